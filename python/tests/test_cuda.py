"""headwater.cuda on a GPU, with torch tensors: results, layouts, streams, graphs, refusals. Skipped, and counted, without one."""

import threading
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

import headwater  # noqa: E402
import headwater.cuda as cuda  # noqa: E402
from conftest import assert_close, make_case  # noqa: E402

NO_GPU = "built without CUDA" if not cuda.is_built() else "no CUDA device" if not cuda.num_devices() else ""
pytestmark = pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU or "never")
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 2e-2}
NAMES = {torch.float16: "f16", torch.bfloat16: "bf16"}


class OnDevice:
    """A case of conftest with 16-bit tensors on the device, and a host plan of it."""

    def __init__(self, dtype=torch.float16, fp8=False, policy="forest", **sizes):
        self.case = make_case(page_size=16, **{"groups": (5, 3), "own_tokens": (5, 29, 1, 16), **sizes})
        self.dtype = dtype
        case = self.case
        kv_type = torch.float8_e4m3fn if fp8 else dtype
        self.q = torch.from_numpy(case.q).to("cuda", dtype)
        self.k, self.v = (torch.from_numpy(x).cuda().to(kv_type) for x in (case.k, case.v))
        case.q, case.k, case.v = (x.float().cpu().numpy() for x in (self.q, self.k, self.v))
        self.shape = headwater.AttentionShape(
            case.shape.num_qo_heads, case.shape.num_kv_heads, case.shape.head_dim, q_dtype=NAMES[dtype],
            kv_dtype="f8e4m3" if fp8 else None,
        )  # fmt: skip
        self.planner = headwater.Planner(cuda.device_model(self.shape))
        self.options = headwater.PlanOptions(policy=policy)
        self.plan = self.planner.plan(self.shape, case.batch(), self.options)

    def device_plan(self, capacity=None):
        made = cuda.DevicePlan(self.shape, capacity or cuda.Capacity.of(self.plan))
        return made, torch.empty(max(made.workspace_size(), 64), dtype=torch.uint8, device="cuda")

    def outputs(self):
        return torch.full_like(self.q, float("nan")), torch.full(self.q.shape[:2], float("nan"), device="cuda")

    def check(self, out, lse=None, **options):
        want_out, want_lse = self.case.expected(**options)
        assert_close(out.float().cpu(), want_out, TOLERANCE[self.dtype])
        if lse is not None:
            assert_close(lse.cpu(), want_lse, TOLERANCE[self.dtype])

    def block_table(self):
        """The page tables as a device planner takes them, with ids behind the lengths that nobody may read."""
        case = self.case
        pages = np.diff(case.kv_indptr)
        table = np.full((len(pages), int(pages.max()) + 3), 2**30, dtype=np.int32)
        for i, n in enumerate(pages):
            table[i, :n] = case.kv_indices[case.kv_indptr[i] : case.kv_indptr[i] + n]
        lengths = (pages - 1) * case.page_size + case.kv_last_page_len
        return torch.from_numpy(table).cuda(), torch.from_numpy(lengths.astype(np.int32)).cuda()

    def device_planner(self, columns, **options):
        limits = dict(max_requests=len(self.case.kv_last_page_len), max_blocks=columns, num_pages=len(self.k))
        planner = cuda.DevicePlanner(self.shape, self.options, page_size=self.case.page_size, **limits, **options)
        return planner, *self.device_plan(planner.capacity)


def read_status(planner):
    status = torch.zeros(4, dtype=torch.int64).pin_memory()
    planner.copy_status(status)
    torch.cuda.synchronize()
    return cuda.PlanStatus.read(status)


LAYOUTS = {
    "pair": lambda k, v: ((k, v), "NHD"),
    "one tensor": lambda k, v: (torch.stack([k, v], dim=1), "NHD"),
    "HND": lambda k, v: ((k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()), "HND"),
    "side by side": lambda k, v: (torch.cat([k, v], dim=-1).split(k.shape[-1], -1), "NHD"),
    "side by side, heads first": lambda k, v: (
        torch.cat([k, v], dim=-1).transpose(1, 2).contiguous().transpose(1, 2).split(k.shape[-1], -1),
        "NHD",
    ),
    "padded pages": lambda k, v: (tuple(torch.cat([x, x[:, :3]], dim=1)[:, : x.shape[1]] for x in (k, v)), "NHD"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_layouts(layout, dtype):
    on = OnDevice(dtype)
    plan, workspace = on.device_plan()
    plan.upload(on.plan)
    assert plan.stats.path == "cascade" and plan.stats.kv_bytes_read < plan.stats.kv_bytes_flat
    kv, names = LAYOUTS[layout](on.k, on.v)
    out, lse = on.outputs()
    cuda.run(plan, on.q, kv, out, lse=lse, workspace=workspace, kv_layout=names)
    on.check(out, lse)
    args = cuda.RunArgs(on.q, kv, out.fill_(float("nan")), workspace=workspace, kv_layout=names, lse=lse)
    cuda.run(plan, args)
    on.check(out, lse)


def test_fp8_cache_with_scales_per_head():
    on = OnDevice(torch.bfloat16, fp8=True, dim=128)
    plan, workspace = on.device_plan()
    plan.upload(on.plan)
    k_scale, v_scale = (torch.tensor(x, device="cuda") for x in ([0.5, 1.5], [2.0, 0.25]))
    out, lse = on.outputs()
    for k, v in ((on.k, on.v), (on.k.view(torch.uint8), on.v.view(torch.uint8))):
        cuda.run(plan, on.q, (k, v), out, lse=lse, workspace=workspace, k_scale=k_scale, v_scale=v_scale)
        on.case.k, on.case.v = on.k.float().cpu().numpy(), on.v.float().cpu().numpy()
        on.case.k *= k_scale.cpu().numpy()[:, None]
        on.case.v *= v_scale.cpu().numpy()[:, None]
        on.check(out, lse)
        out.fill_(float("nan"))
    with pytest.raises(ValueError, match="k_scale is a number"):
        cuda.run(plan, on.q, (on.k, on.v), out, workspace=workspace, k_scale=0.5)


@pytest.mark.parametrize("how", ["current", "object", "number"])
def test_the_stream_is_honoured(how):
    """q is written on a side stream behind a long wait: only work on that stream sees it."""
    on = OnDevice()
    plan, workspace = on.device_plan()
    q, (out, lse) = torch.zeros_like(on.q), on.outputs()
    stream = torch.cuda.Stream()
    plan.upload(on.plan)
    cuda.run(plan, q, (on.k, on.v), out, lse=lse, workspace=workspace)  # loads the kernels
    torch.cuda.synchronize()
    given = {"current": None, "object": stream, "number": stream.cuda_stream}[how]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        q.copy_(on.q)
        if how == "current":
            plan.upload(on.plan)
            cuda.run(plan, q, (on.k, on.v), out, lse=lse, workspace=workspace)
    if how != "current":
        plan.upload(on.plan, stream=given)
        cuda.run(plan, q, (on.k, on.v), out, lse=lse, workspace=workspace, stream=given)
    assert not stream.query()  # nothing waited
    stream.synchronize()
    on.check(out, lse)


def test_a_graph_replays_plans_uploaded_later():
    on = OnDevice()
    grown = cuda.Capacity.of(on.plan)
    for field in ("max_page_ids", "max_items", "max_partials"):
        setattr(grown, field, 2 * getattr(grown, field) + 64)
    plan, workspace = on.device_plan(grown)
    out, lse = on.outputs()
    plan.upload(on.plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.run(plan, on.q, (on.k, on.v), out, lse=lse, workspace=workspace)
    for step in range(4):
        out.fill_(float("nan"))
        plan.upload(on.plan)
        graph.replay()
        on.check(out, lse)
        on.case.kv_last_page_len[step % 3] += 1  # the tables change in place, the plan follows
        on.case.kv_indices[[0, 1]] = on.case.kv_indices[[1, 0]]
        on.planner.update(on.plan, on.case.batch())
    small = cuda.DevicePlan(on.shape, cuda.Capacity(len(on.q), 4096, 1, 4096))
    with pytest.raises(headwater.CapacityExceeded, match="capacity.max_items = 1, expected at least"):
        small.upload(on.plan)


def test_an_upload_is_not_captured():
    on = OnDevice()
    plan, workspace = on.device_plan()
    out, lse = on.outputs()
    plan.upload(on.plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="stream: it is being captured"):
            plan.upload(on.plan)
        cuda.run(plan, on.q, (on.k, on.v), out, lse=lse, workspace=workspace)
    graph.replay()
    on.check(out, lse)


def test_a_graph_plans_on_the_device():
    """The tables change in place between replays of one graph: what was shared lies in pages of their own, group by group."""
    on = OnDevice(groups=(6, 4), shared_pages=(9, 5))
    table, lengths = on.block_table()
    groups = [(list(range(6)), 9), (list(range(6, 10)), 5)]
    copies = torch.cat([table[rows, :first].flatten() for rows, first in groups]).long()
    next_page = len(on.k)
    on.k, on.v = (torch.cat([x, x[copies]]) for x in (on.k, on.v))
    planner, plan, workspace = on.device_planner(table.shape[1])
    out, lse = on.outputs()
    status = torch.zeros(4, dtype=torch.int64).pin_memory()

    def step():
        planner.plan(plan, table, lengths)
        cuda.run(plan, on.q, (on.k, on.v), out, lse=lse, workspace=workspace)
        planner.copy_status(status)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for num_spans in (2, 1, 0):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        on.check(out, lse)
        made = cuda.PlanStatus.read(status)
        assert (made.flags, made.num_spans) == (0, num_spans)
        if num_spans == 2:
            assert (made.shared_tokens, made.member_sequences) == (14 * 16, 10)
            spans = torch.zeros(10, 5, dtype=torch.int32, device="cuda")
            members = torch.zeros(10, dtype=torch.int32, device="cuda")
            planner.copy_spans(spans)
            planner.copy_span_members(members)
            assert sorted(spans[:2, 1].tolist()) == [5 * 16, 9 * 16]
            assert sorted(members.tolist()) == list(range(10))
        if num_spans > 0:
            rows, first = groups[2 - num_spans]
            fresh = torch.arange(next_page, next_page + len(rows) * first, dtype=torch.int32, device="cuda")
            table[rows, :first] = fresh.view(len(rows), first)
            next_page += len(fresh)


def test_device_planner_with_padding_and_several_rows():
    on = OnDevice(qo_len=3, own_tokens=(5, 29, 4, 16))
    table, lengths = on.block_table()
    requests = len(lengths)
    padded = torch.zeros(requests + 5, table.shape[1] + 2, dtype=torch.int32, device="cuda")
    padded[:requests, : table.shape[1]] = table
    lengths = torch.cat([lengths, torch.zeros(5, dtype=torch.int32, device="cuda")])
    rows = np.concatenate([on.case.qo_indptr, np.full(5, on.case.qo_indptr[-1])]).astype(np.int32)
    planner = cuda.DevicePlanner(
        on.shape, on.options, max_requests=requests + 5, max_blocks=table.shape[1], num_pages=len(on.k), page_size=16,
        max_rows=len(on.q) + 7,
    )  # fmt: skip
    plan, workspace = on.device_plan(planner.capacity)
    planner.plan(plan, padded[:, : table.shape[1]], lengths, torch.from_numpy(rows).cuda())
    q = torch.cat([on.q, torch.full_like(on.q[:7], float("nan"))])
    out = torch.full_like(q, 5.0)
    cuda.run(plan, q, (on.k, on.v), out, workspace=workspace)
    on.check(out[: len(on.q)])
    assert (out[len(on.q) :] == 5.0).all()
    assert read_status(planner).num_spans == 2


def test_runs_of_plans_made_on_the_device_need_rows():
    on = OnDevice()
    table, lengths = on.block_table()
    planner, plan, workspace = on.device_planner(table.shape[1])
    rows = torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda")
    few, out = on.q[:3], torch.full_like(on.q[:3], float("nan"))
    for arguments in ((table, lengths), (table, lengths, rows), (table[:4], lengths[:4])):
        planner.plan(plan, *arguments)
        with pytest.raises(ValueError, match=r"q.shape\[0\] = 3, expected [48] .at least"):
            cuda.run(plan, few, (on.k, on.v), out, workspace=workspace)
    torch.cuda.synchronize()
    assert out.isnan().all()
    planner.plan(plan, table[:3], lengths[:3], rows[:4], max_rows=3)
    cuda.run(plan, few, (on.k, on.v), out, workspace=workspace)
    assert_close(out.float().cpu(), on.case.expected()[0][:3], TOLERANCE[on.dtype])
    for wrong, named, match in (
        ((table, lengths, rows), {"max_rows": 9}, r"max_rows = 9, expected 0..8"),
        ((table, lengths, rows), {"max_rows": -1}, r"max_rows = -1, expected 0..8"),
        ((table, lengths), {"max_rows": 8}, "max_rows is given, expected None without qo_indptr"),
    ):
        with pytest.raises(ValueError, match=match):
            planner.plan(plan, *wrong, **named)


def test_a_plan_keeps_its_block_table():
    on = OnDevice()
    table, lengths = on.block_table()
    planner, plan, workspace = on.device_planner(table.shape[1])
    passing = table.clone()
    address, alive = passing.data_ptr(), weakref.ref(passing)
    planner.plan(plan, passing, lengths)
    del passing
    assert alive() is not None
    thieves = [torch.full_like(table, -1) for _ in range(16)]  # would be given its memory
    assert address not in [x.data_ptr() for x in thieves]
    out, lse = on.outputs()
    cuda.run(plan, on.q, (on.k, on.v), out, lse=lse, workspace=workspace)
    on.check(out, lse)
    planner.plan(plan, table, lengths)
    assert alive() is None


def test_bad_tables_give_a_flat_plan_and_a_flag():
    on = OnDevice()
    table, lengths = on.block_table()
    planner, plan, workspace = on.device_planner(table.shape[1])
    out, _ = on.outputs()
    broken = table.clone()
    broken[2, 0] = len(on.k)
    planner.plan(plan, broken, lengths)
    cuda.run(plan, on.q, (on.k, on.v), out, workspace=workspace)
    status = read_status(planner)
    assert status.flags == cuda.BAD_PAGE_ID and status.num_spans == 0
    good = [i for i in range(len(lengths)) if i != 2]
    assert_close(out[good].float().cpu(), on.case.expected()[0][good], 5e-3)


def test_append_copy_and_merge():
    on = OnDevice()
    k, v = (torch.zeros_like(x) for x in (on.k, on.v))
    rows = torch.randn(6, k.shape[2], k.shape[3], device="cuda", dtype=k.dtype)
    slots = torch.tensor([3, -1, 40, 17, 10**9, 0], device="cuda")
    bad = torch.zeros(1, dtype=torch.int32, device="cuda")
    cuda.append_kv((k, v), rows, 2 * rows, slots, num_bad=bad)
    want = torch.zeros_like(k)
    for row, slot in ((0, 3), (2, 40), (3, 17), (5, 0)):
        want[slot // 16, slot % 16] = rows[row]
    assert torch.equal(k, want) and torch.equal(v, 2 * want) and bad.item() == 1

    cuda.copy_pages((k, v), [(0, 5, 16), (1, 6, 2)])
    assert torch.equal(k[5], want[0]) and torch.equal(v[6, :2], 2 * want[1, :2]) and (k[6, 2:] == 0).all()
    cuda.copy_pages((k, v), torch.tensor([[2, 7, 9], [-1, 8, 4]], dtype=torch.int32, device="cuda"), num_bad=bad)
    assert torch.equal(k[7, :9], want[2, :9]) and bad.item() == 2

    states = torch.randn(7, 8, 64), torch.randn(7, 8)
    indptr = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    merged = headwater.merge_states(*states, indptr)
    out = torch.empty(3, 8, 64, device="cuda"), torch.empty(3, 8, device="cuda")
    cuda.merge_states(*(x.cuda() for x in states), indptr.cuda(), *out)
    assert_close(out[0].cpu(), merged[0])
    assert_close(out[1].cpu(), merged[1])
    a, b = ([x[:3].cuda() for x in states], [x[3:6].cuda() for x in states])
    want = headwater.merge_state(*(x.cpu() for x in (*a, *b)))
    cuda.merge_state(*a, *b, *a)  # in place
    assert_close(a[0].cpu(), want[0])
    assert_close(a[1].cpu(), want[1])


def test_refusals_name_the_argument():
    on = OnDevice()
    plan, workspace = on.device_plan()
    out, lse = on.outputs()
    kv = (on.k, on.v)

    def refused(match, kind=ValueError, **changed):
        arguments = dict(q=on.q, kv=kv, out=out, workspace=workspace, lse=lse) | changed
        with pytest.raises(kind, match=match):
            cuda.run(plan, **arguments)

    refused("nothing was uploaded")
    plan.upload(on.plan)
    before = out.clone()
    refused("q is on the CPU, expected a CUDA device", q=on.q.cpu())
    refused(r"kv\[1\] is on the CPU, expected CUDA device 0", kv=(on.k, on.v.cpu()))
    refused("out is on the CPU", out=out.cpu())
    refused("q has dtype int32", q=on.q.int())
    refused(r"q.shape\[0\] = 3, expected 8", q=on.q[:3])
    refused(r"out.shape\[0\] = 3, expected 8", out=out[:3])
    refused("q has stride 2", q=torch.cat([on.q, on.q], -1)[..., ::2])
    refused("workspace", workspace=workspace[: plan.workspace_size() - 1])
    refused("workspace", workspace=None)
    refused("lse has dtype", lse=lse.half())
    refused("stream is of type str", stream="main")
    refused("kv_layout", kv_layout="DNH")
    refused("sinks.shape", sinks=torch.zeros(3, device="cuda"))
    freed = on.q.clone()
    freed.untyped_storage().resize_(0)
    refused("q has no memory", q=freed)
    refused("q requires a gradient", q=on.q.clone().requires_grad_())
    torch.cuda.synchronize()
    assert torch.equal(out, before) or (out.isnan() == before.isnan()).all()  # nothing was written

    table, lengths = on.block_table()
    planner, other, _ = on.device_planner(table.shape[1])
    for arguments, match in (
        ((table.long(), lengths), "block_table has dtype int64"),
        ((table[:, :-1], lengths), r"block_table.shape\[1\]"),
        ((table, lengths[:-1]), r"lengths.shape\[0\]"),
        ((table, lengths.cpu()), "lengths is on the CPU"),
        ((table, lengths, lengths), r"qo_indptr.shape\[0\]"),
        ((torch.cat([table, table]), torch.cat([lengths, lengths])), "expected at most 8"),
        ((table[:1].expand(len(lengths), -1), lengths), "block_table has 0 elements from row to row"),
    ):
        with pytest.raises(ValueError, match=match):
            planner.plan(other, *arguments)
    with pytest.raises(headwater.Error, match="plan: the host's plans|capacity"):
        planner.plan(plan, table, lengths)  # holds the host's plans
    with pytest.raises(headwater.Unsupported, match="window_left = 7"):
        cuda.DevicePlanner(on.shape, headwater.PlanOptions(window_left=7), max_requests=1, max_blocks=1, num_pages=1)
    with pytest.raises(ValueError, match="device = 99"):
        cuda.DevicePlan(on.shape, cuda.Capacity(1, 1, 1, 1), device=99)
    with pytest.raises(headwater.Unsupported):
        cuda.DevicePlan(headwater.AttentionShape(8, 2, 80, q_dtype="f16"), cuda.Capacity(1, 1, 1, 1))


def test_threads_with_plans_of_their_own():
    on = OnDevice()
    errors = []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                plan, workspace = on.device_plan()
                for _ in range(20):
                    out, lse = on.outputs()
                    plan.upload(on.plan)
                    cuda.run(plan, on.q, (on.k, on.v), out, lse=lse, workspace=workspace)
                    torch.cuda.current_stream().synchronize()
                    on.check(out, lse)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    on = OnDevice()
    plan, workspace = on.device_plan()
    out, lse = on.outputs()
    q, k, v = (cupy.asarray(x) for x in (on.q, on.k, on.v))
    result = cupy.empty(out.shape, dtype=cupy.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        plan.upload(on.plan, stream=stream)
        cuda.run(plan, q, (k, v), result, lse=cupy.asarray(lse), workspace=cupy.asarray(workspace))
    stream.synchronize()
    on.check(torch.as_tensor(result, device="cuda"), lse)
