"""What an arm is, the inputs that all arms of a cell share, and the reference that they are checked against."""

import functools
import math

from .cells import PAGE, Tables

LN2 = math.log(2.0)
TOLERANCE = 5e-3  # of half precision: ||out - reference|| / ||reference||; of LSE, absolute
CHECKED_ROWS = 8


class Unavailable(Exception):
    """The library of an arm cannot be used here; the reason."""


class NotServed(Exception):
    """The arm has nothing to run on this cell; the reason."""


class Inputs:
    """q [requests, Hq, D], and copies of K and V [pages, page, Hkv, D], of one cell; half precision."""

    def __init__(self, device, cell):
        self.device = device
        self.cell = cell
        self.tables = Tables(cell)
        heads, dim = cell.num_kv_heads, cell.head_dim
        self.q = device.normal(cell.num_requests, cell.num_qo_heads, dim)
        side = lambda: device.normal(self.tables.num_pages, PAGE, heads, dim)  # noqa: E731
        self.copies = [(side(), side()) for _ in range(device.num_copies(cell.distinct_bytes))]

    @functools.cached_property
    def csr(self):
        """(indptr, indices, last_page_len) of the requests, in host memory."""
        return tuple(self.device.ints(values, host=True) for values in self.tables.csr())

    @functools.cached_property
    def block_table(self):
        """[requests, most pages], on the device."""
        return self.device.ints(self.tables.block_table())

    @functools.cached_property
    def reference(self):
        """(rows, out [rows, Hq, D], natural lse [rows, Hq]) in double precision, on the last copy."""
        count = self.cell.num_requests
        rows = sorted({round(i * (count - 1) / (CHECKED_ROWS - 1)) for i in range(CHECKED_ROWS)})
        outs, lses = zip(*map(self._attend, rows))
        return rows, self.device.np.stack(outs), self.device.np.stack(lses)

    def _attend(self, row):
        device, cell, np = self.device, self.cell, self.device.np
        pages, length = self.tables.requests[row], cell.lengths[row]
        k, v = (device.double(x[pages]).reshape(-1, cell.num_kv_heads, cell.head_dim)[:length] for x in self.copies[-1])
        q = device.double(self.q[row]).reshape(cell.num_kv_heads, -1, cell.head_dim) / math.sqrt(cell.head_dim)
        scores = np.einsum("hgd,thd->hgt", q, k)
        most = np.amax(scores, axis=-1, keepdims=True)
        weights = np.exp(scores - most)
        total = weights.sum(-1)
        out = np.einsum("hgt,thd->hgd", weights, v) / total[..., None]
        return out.reshape(-1, cell.head_dim), (np.log(total) + most[..., 0]).reshape(-1)

    def errors(self, out, lse=None):
        """(of out, of lse or None) at the reference's rows; NaN where anything is not finite."""
        rows, want_out, want_lse = self.reference
        got = self.device.double(out)[rows]
        error = float(((got - want_out) ** 2).sum() / (want_out**2).sum()) ** 0.5
        if lse is None:
            return error, None
        return error, float(abs(self.device.double(lse)[rows] - want_lse).max())


class Arm:
    """One way to compute the attention of a cell. `prepare` comes first, `call` is what is timed."""

    library = ""
    version = ""
    tolerance = TOLERANCE
    plans_on_device = False  # `plan` is a launch, timed by a graph of its own; otherwise by the host's clock

    def prepare(self, inputs):
        """Makes everything that a step needs but its plan. Raises NotServed."""
        self.inputs = inputs

    def plan(self):
        """What has to be done once a step."""

    def call(self, copy):
        """Attention on that copy of the KV cache; returns out [requests, Hq, D]."""
        raise NotImplementedError

    def call_with_lse(self, copy):
        """(out, natural LSE [requests, Hq]), or None where the arm gives no LSE."""
        return None

    def path(self):
        """Which path runs, in words; AssertionError where it is not the arm's."""
        raise NotImplementedError

    def kv_bytes_read(self):
        """Of K and V, as far as the arm tells; else None."""
        return None

    def errors(self, graph):
        """(of out, of LSE or None): of what the timed graph writes into poisoned memory, and of an eager call."""
        device, last = self.inputs.device, len(self.inputs.copies) - 1
        device.poison(graph.out)
        graph.replay()
        device.synchronize()
        of_out, _ = self.inputs.errors(graph.out)
        pair = self.call_with_lse(last)
        if pair is None:
            return of_out, None
        of_eager, of_lse = self.inputs.errors(*pair)
        return max(of_out, of_eager), of_lse
