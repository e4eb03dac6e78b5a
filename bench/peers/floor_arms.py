"""What no attention can beat: a kernel that only reads every distinct page once. And plain numpy attention, for dry runs."""

from .arm import Arm, Unavailable


class ReadOnce(Arm):
    """Adds up every element of the pages that the cell has."""

    library = "floor"
    tolerance = 1e-4
    _block = 2048  # elements: with four warps two loads of 16 bytes a thread

    def __init__(self):
        try:
            from .read_kernel import add_up
        except ImportError as error:
            raise Unavailable(f"triton cannot be imported: {error}") from None
        self.kernel = add_up

    def prepare(self, inputs):
        super().prepare(inputs)
        torch = inputs.device.torch
        self.pages = inputs.device.ints(inputs.tables.distinct)
        self.page_blocks = inputs.copies[0][0][0].numel() // self._block
        self.num_blocks = self.page_blocks * self.pages.numel()
        programs = min(self.num_blocks, 16 * inputs.device.num_processors)
        self.sums = inputs.q.new_empty(programs, dtype=torch.float32)

    def call(self, copy):
        k, v = self.inputs.copies[copy]
        grid = (self.sums.numel(),)
        self.kernel[grid](k, v, self.pages, self.sums, self.num_blocks, self.page_blocks, self._block, num_warps=4)
        return self.sums

    def errors(self, graph):
        """Of the sum, against the root of the number of elements: what a page read twice or not at all would miss by."""
        device = self.inputs.device
        device.poison(self.sums)
        graph.replay()
        read = [device.double(x[self.pages.long()]) for x in self.inputs.copies[-1]]
        want, elements = sum(x.sum() for x in read), sum(x.numel() for x in read)
        return float(abs(device.double(self.sums).sum() - want)) / elements**0.5, None

    def path(self):
        return "read"

    def kv_bytes_read(self):
        return self.inputs.cell.distinct_bytes


class Numpy(Arm):
    """Softmax attention, one request at a time."""

    library = "numpy"

    def call(self, copy):
        inputs, np = self.inputs, self.inputs.device.np
        cell, out = inputs.cell, np.empty_like(self.inputs.q)
        for row, (pages, length) in enumerate(zip(inputs.tables.requests, cell.lengths)):
            k, v = (x[pages].reshape(-1, cell.num_kv_heads, cell.head_dim)[:length] for x in inputs.copies[copy])
            q = inputs.q[row].reshape(cell.num_kv_heads, -1, cell.head_dim).astype(np.float32) * cell.head_dim**-0.5
            weights = np.exp(np.einsum("hgd,thd->hgt", q, k.astype(np.float32)))
            weights /= weights.sum(-1, keepdims=True)
            out[row] = np.einsum("hgt,thd->hgd", weights, v.astype(np.float32)).reshape(-1, cell.head_dim)
        return out

    def path(self):
        return "flat"
