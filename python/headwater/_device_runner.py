"""Host plans on a torch CUDA device: a DevicePlan and a workspace tensor, made anew where a plan does not fit."""

import threading

import torch

from . import _core, cuda


def roomy(capacity):
    """A quarter more than `capacity`, and a little: the next steps' plans are larger."""
    more = [
        field + field // 4 + 64
        for field in (capacity.max_rows, capacity.max_page_ids, capacity.max_items, capacity.max_partials)
    ]
    return cuda.Capacity(*more)


def _needs_another(error):
    """Whether a DevicePlan made for that plan would take it: it is too large, or of another shape, scale or page size.

    Not where the stream is being captured or another thread uses it: then nothing may be made, or swapped.
    """
    return isinstance(error, _core.CapacityExceeded) or str(error).startswith(_OF_ANOTHER_KIND)


#: How the library's refusals of a plan begin that differs from the first one of its DevicePlan.
_OF_ANOTHER_KIND = ("plan.shape is not", "plan.options: ", "plan: page sizes")


class DeviceRunner:
    """Holds the plan in force on one device.

    With `capacity` nothing is ever made anew, so graphs may capture its runs: a plan beyond it is refused.
    """

    def __init__(self, device, capacity=None):
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        #: One thread at a time between an upload and the runs by it: held by who shares a runner between threads.
        self.lock = threading.Lock()
        self._capacity = capacity
        self._fixed = capacity is not None
        self._plan = None
        self._workspace = None

    def upload(self, plan):
        """Puts a host Plan in force for what follows on torch's current stream."""
        if self._plan is not None:
            try:
                self._plan.upload(plan, stream=self._stream())
                return
            except (_core.CapacityExceeded, _core.InvalidArgument) as error:
                if self._capacity is not None or not _needs_another(error):
                    raise
        made = cuda.DevicePlan(plan.shape, self._capacity or roomy(cuda.Capacity.of(plan)), device=self.device.index)
        made.upload(plan, stream=self._stream())
        self._take(made)

    def _stream(self):
        return torch.cuda.current_stream(self.device).cuda_stream

    def _take(self, plan):
        self._plan = plan
        self._workspace = torch.empty(max(plan.workspace_size(), 64), dtype=torch.uint8, device=self.device)

    def rows_written(self):
        """Query rows of the plan in force; None where a captured run may meet another plan when it is replayed."""
        return None if torch.cuda.is_current_stream_capturing() else self._plan.stats.num_rows

    def run(self, q, kv, out, lse=None, **options):
        """headwater.cuda.run by the plan in force, on torch's current stream."""
        if self._plan is None:
            raise _core.InvalidArgument("nothing was planned, expected a plan in force")
        if not self._fixed and torch.cuda.is_current_stream_capturing():
            raise _core.InvalidArgument(
                "the current stream is being captured, expected memory that never moves: give PlanHandle a capacity, a "
                "wrapper use_cuda_graph=True"
            )
        cuda.run(self._plan, q, kv, out, lse=lse, workspace=self._workspace, **options)


class TableRunner(DeviceRunner):
    """The same for plans that a DevicePlanner makes."""

    def __init__(self, device, shape, options, **limits):
        super().__init__(device)
        self._fixed = True
        self._rows = None
        self.planner = cuda.DevicePlanner(shape, options, device=self.device.index, **limits)
        self._take(cuda.DevicePlan(shape, self.planner.capacity, device=self.device.index))

    def plan(self, status, block_table, lengths, qo_indptr, max_rows=None):
        """Launches the planner, and after it the copy of its status."""
        stream = self._stream()
        self.planner.plan(self._plan, block_table, lengths, qo_indptr, max_rows=max_rows, stream=stream)
        self.planner.copy_status(status, stream=stream)
        self._rows = block_table.shape[0] if qo_indptr is None else None

    def rows_written(self):
        """One of each request of the last plan; None with qo_indptr, which only the device reads, and while captured."""
        return None if torch.cuda.is_current_stream_capturing() else self._rows
