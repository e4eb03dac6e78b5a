"""Headwater's arms: plans of a policy, made by the host or on the device; and by the CPU, for dry runs."""

from .arm import LN2, Arm, NotServed, Unavailable
from .cells import PAGE


def _import():
    try:
        import headwater
        import headwater.cuda
    except ImportError as error:
        raise Unavailable(f"headwater cannot be imported: {error}") from None
    return headwater


class _Headwater(Arm):
    library = "headwater"

    def __init__(self, policy):
        self.headwater = _import()
        self.version = getattr(self.headwater, "__version__", "")
        self.policy = policy

    def prepare(self, inputs):
        super().prepare(inputs)
        cell, hw = inputs.cell, self.headwater
        self.shape = hw.AttentionShape(cell.num_qo_heads, cell.num_kv_heads, cell.head_dim, q_dtype="f16")
        self.options = hw.PlanOptions(policy=self.policy)

    def _batch(self):
        inputs = self.inputs
        qo_indptr = inputs.device.ints(range(inputs.cell.num_requests + 1), host=True)
        return self.headwater.Batch(qo_indptr, *inputs.csr, page_size=PAGE, num_pages=inputs.tables.num_pages)

    def _check_path(self, path, bytes_read=None):
        """`auto` is free to choose; `flat` is flat, `forest` reads what is shared once."""
        cell = self.inputs.cell
        if self.policy == "flat" or not cell.is_shared:
            assert path == "flat", f"path {path}, expected flat"
        elif self.policy == "forest":
            assert path == "cascade", f"path {path}, expected cascade"
            assert bytes_read is None or bytes_read < cell.flat_bytes, f"{bytes_read} bytes read, as many as flat"
        return path


class HostPlan(_Headwater):
    """Planned on the host, uploaded, run on the GPU."""

    def __init__(self, policy):
        super().__init__(policy)
        cuda = self.headwater.cuda
        if not cuda.is_built():
            raise Unavailable("this headwater was built without CUDA")

    def prepare(self, inputs):
        super().prepare(inputs)
        cuda = self.headwater.cuda
        try:
            cuda.check_supported(self.shape, self.options, PAGE)
        except self.headwater.Unsupported as error:
            raise NotServed(str(error)) from None
        self.planner = self.headwater.Planner(cuda.device_model(self.shape))
        self.batch = self._batch()
        self.host_plan = self.planner.plan(self.shape, self.batch, self.options)
        self._take(cuda.DevicePlan(self.shape, cuda.Capacity.of(self.host_plan)))

    def _take(self, device_plan):
        torch, q = self.inputs.device.torch, self.inputs.q
        self.device_plan = device_plan
        workspace = q.new_empty(max(device_plan.workspace_size(), 64), dtype=torch.uint8)
        self.out = torch.empty_like(q)
        self.lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        args = lambda kv, lse: self.headwater.cuda.RunArgs(q, kv, self.out, workspace=workspace, lse=lse)  # noqa: E731
        self.args = [args(kv, None) for kv in self.inputs.copies]
        self.last_with_lse = args(self.inputs.copies[-1], self.lse)

    def plan(self):
        self.host_plan = self.planner.plan(self.shape, self.batch, self.options)
        self.device_plan.upload(self.host_plan)

    def call(self, copy):
        self.headwater.cuda.run(self.device_plan, self.args[copy])
        return self.out

    def call_with_lse(self, copy):
        self.inputs.device.poison(self.out)
        self.inputs.device.poison(self.lse)
        self.headwater.cuda.run(self.device_plan, self.last_with_lse)
        return self.out, self.lse * LN2

    def path(self):
        planned, there = self.host_plan.stats, self.device_plan.stats
        assert (there.path, there.kv_bytes_read) == (planned.path, planned.kv_bytes_read), "another plan is on the device"
        return self._check_path(there.path, there.kv_bytes_read)

    def kv_bytes_read(self):
        return self.device_plan.stats.kv_bytes_read


class DevicePlan(HostPlan):
    """Planned on the GPU, from a block table there."""

    plans_on_device = True

    def prepare(self, inputs):
        _Headwater.prepare(self, inputs)
        cuda, device = self.headwater.cuda, inputs.device
        self.table, self.lengths = inputs.block_table, device.ints(inputs.cell.lengths)
        limits = dict(max_requests=self.table.shape[0], max_blocks=self.table.shape[1])
        try:
            self.planner = cuda.DevicePlanner(
                self.shape, self.options, **limits, num_pages=inputs.tables.num_pages, page_size=PAGE
            )
        except self.headwater.Unsupported as error:
            raise NotServed(str(error)) from None
        self._take(cuda.DevicePlan(self.shape, self.planner.capacity))

    def plan(self):
        self.planner.plan(self.device_plan, self.table, self.lengths)

    def path(self):
        status = self.inputs.q.new_zeros(4, dtype=self.inputs.device.torch.int64)
        self.planner.copy_status(status)
        made = self.headwater.cuda.PlanStatus.read(status.cpu())
        assert made.flags == 0, f"the planner's status has flags {made.flags}"
        return self._check_path("cascade" if made.num_spans else "flat")

    def kv_bytes_read(self):
        return None


class CpuPlan(_Headwater):
    """Planned and run on the CPU."""

    def prepare(self, inputs):
        super().prepare(inputs)
        np = inputs.device.np
        self.planner = self.headwater.Planner()
        self.batch = self._batch()
        self.out = np.empty_like(inputs.q)
        self.lse = np.empty(inputs.q.shape[:2], dtype=np.float32)

    def plan(self):
        self.host_plan = self.planner.plan(self.shape, self.batch, self.options)

    def call(self, copy):
        args = self.headwater.RunArgs(self.inputs.q, self.inputs.copies[copy], self.out)
        self.outcome = self.headwater.run(self.host_plan, args)
        return self.out

    def call_with_lse(self, copy):
        self.inputs.device.poison(self.lse)
        self.headwater.run(self.host_plan, self.inputs.q, self.inputs.copies[copy], self.out, lse=self.lse)
        return self.out, self.lse * LN2

    def path(self):
        return self._check_path(self.outcome.path, self.outcome.kv_bytes_read)

    def kv_bytes_read(self):
        return self.outcome.kv_bytes_read
