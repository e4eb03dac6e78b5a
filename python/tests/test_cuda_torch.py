"""headwater.torch and headwater.flashinfer with CUDA tensors: operators, compiled code, graphs. Skipped, and counted, without a GPU."""

import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

import headwater  # noqa: E402
import headwater.cuda as cuda  # noqa: E402
import headwater.flashinfer as flashinfer  # noqa: E402
import headwater.torch as ops  # noqa: E402
from conftest import assert_close  # noqa: E402
from test_cuda import NO_GPU, OnDevice  # noqa: E402
from test_flashinfer import TOLERANCE, as_cache, expected, make, pack, two_levels  # noqa: E402

pytestmark = pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU or "never")


def tables(on):
    case = on.case
    return [torch.from_numpy(x).cuda() for x in (case.qo_indptr, case.kv_indptr, case.kv_indices, case.kv_last_page_len)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_paged_attention(dtype):
    on = OnDevice(dtype)
    arguments = (on.q, on.k, on.v, *tables(on))
    out, lse = ops.paged_attention(*arguments)
    on.check(out, lse)
    on.check(ops.paged_attention(*arguments, window_left=20)[0], window_left=20)  # other options, the same runner
    on.check(ops.paged_attention(*arguments, sm_scale=0.3)[0], sm_scale=0.3)
    torch.library.opcheck(torch.ops.headwater.paged_attention.default, arguments)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_attend_under_compile_follows_uploads(backend):
    on = OnDevice()
    handle = ops.PlanHandle(on.plan, "cuda")
    torch.library.opcheck(torch.ops.headwater.attend.default, (on.q, on.k, on.v, handle.id))

    @torch.compile(fullgraph=True, backend=backend)
    def layer(x):
        out, lse = ops.attend(x * 2, on.k, on.v, handle.id)
        return out + 1, lse

    for _ in range(3):
        out, lse = layer(on.q / 2)
        on.check(out - 1)
        on.case.kv_last_page_len[0] += 1
        on.planner.update(on.plan, on.case.batch())
        handle.upload()
    torch._dynamo.reset()


def test_attend_in_a_graph():
    on = OnDevice()
    capacity = cuda.Capacity.of(on.plan)
    handle = ops.PlanHandle(on.plan, "cuda", cuda.Capacity(capacity.max_rows, 4096, 4096, 4096))
    graph = torch.cuda.CUDAGraph()
    ops.attend(on.q, on.k, on.v, handle.id)
    with torch.cuda.graph(graph):
        out, lse = ops.attend(on.q, on.k, on.v, handle.id)
    for _ in range(3):
        graph.replay()
        on.check(out, lse)
        on.case.kv_last_page_len[0] += 1
        on.planner.update(on.plan, on.case.batch())
        handle.upload()


def test_rows_behind_the_plan_are_empty():
    on = OnDevice()
    rows = len(on.q)
    q = torch.cat([on.q, on.q[:3]])
    capacity = cuda.Capacity.of(on.plan)
    handle = ops.PlanHandle(on.plan, "cuda", cuda.Capacity(rows + 3, 4096, 4096, capacity.max_partials + 4096))
    torch.full((1 << 20,), float("nan"), device="cuda")  # what new memory may hold
    out, lse = ops.attend(q, on.k, on.v, handle.id)
    on.check(out[:rows], lse[:rows])
    assert (out[rows:] == 0).all() and (lse[rows:] == -torch.inf).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = ops.attend(q, on.k, on.v, handle.id)
    for _ in range(2):
        out.fill_(float("nan"))
        graph.replay()
        on.check(out[:rows], lse[:rows])
        assert (out[rows:] == 0).all() and (lse[rows:] == -torch.inf).all()

    wrapper, (q, k, v), plan = decode((40, 9, 16, 300), graph=True)
    plan((40, 9))
    out, lse = wrapper.run(q, (k, v), return_lse=True)
    assert (out[2:] == 0).all() and (lse[2:] == -torch.inf).all() and not (out[:2] == 0).all()


@pytest.mark.parametrize("mode", ["compiled", "graph"])
def test_tables_on_the_device(mode):
    on = OnDevice()
    table, lengths = on.block_table()
    handle = ops.TablePlanHandle(
        on.shape, on.options, max_requests=len(lengths), max_blocks=table.shape[1], num_pages=len(on.k)
    )
    torch.library.opcheck(torch.ops.headwater.plan_tables.default, (handle.status, table, lengths, handle.id))

    def step(q):
        at_hand = table + 0  # an intermediate, whose memory lives as long as attend names it
        ops.plan_tables(handle.status, at_hand, lengths, handle.id)
        return ops.attend(q, on.k, on.v, handle.id, status=handle.status, block_table=at_hand)

    if mode == "compiled":
        step = torch.compile(step, fullgraph=True)
        results = lambda: step(on.q)  # noqa: E731
    else:
        step(on.q)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(on.q)
        results = lambda: (graph.replay(), captured)[1]  # noqa: E731
    for _ in range(3):
        out, lse = results()
        on.check(out, lse)
        assert handle.read_status()[:2] == (0, 2)
        lengths[0] += 1
        on.case.kv_last_page_len[0] += 1
    torch._dynamo.reset()


def test_append_and_merges():
    on = OnDevice()
    rows = torch.randn(2, *on.k.shape[2:], device="cuda", dtype=on.k.dtype)
    slots = torch.tensor([3, 0], device="cuda")
    k, v = on.k.clone(), on.v.clone()
    torch.library.opcheck(torch.ops.headwater.append_kv.default, (k, v, rows, 2 * rows, slots))

    @torch.compile(fullgraph=True)
    def step(k, v, rows):
        ops.append_kv(k, v, rows, rows * 2, slots)
        return k.sum()

    step(k, v, rows)
    assert torch.equal(k[0, 3], rows[0]) and torch.equal(v[0, 0], 2 * rows[1])
    states = torch.randn(6, 4, 64, device="cuda"), torch.randn(6, 4, device="cuda")
    torch.library.opcheck(torch.ops.headwater.merge_state.default, (*states, states[0].flip(0), states[1].flip(0)))
    indptr = torch.tensor([0, 2, 2, 6], dtype=torch.int32, device="cuda")
    torch.library.opcheck(torch.ops.headwater.merge_states.default, (*states, indptr))
    merged = ops.merge_states(*states, indptr)
    want = ops.merge_states(*(x.cpu() for x in (*states, indptr)))
    assert_close(merged[0].cpu(), want[0])
    assert_close(merged[1].cpu(), want[1])


def workspace():
    return torch.empty(1024, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("layout, one", [("NHD", True), ("NHD", False), ("HND", True)])
@pytest.mark.parametrize(
    "groups, shared, unique, qo_len, page_size, heads, dtype",
    [
        ((12,), (128,), (37,) * 12, 1, 16, (8, 8), torch.float16),  # FlashInfer's own
        ((17,), (512,), (17,) * 17, 1, 1, (8, 8), torch.float16),
        ((3,), (128,), (37,) * 3, 17, 16, (16, 16), torch.float16),
        ((3, 1, 4), (40, 8, 33), (5, 1, 9, 30, 7, 2, 3, 4), 1, 8, (8, 2), torch.bfloat16),  # wider
    ],
)
@pytest.mark.parametrize("causal, window", [(False, -1), (True, -1), (True, 11)])
def test_flashinfer_two_levels(layout, one, groups, shared, unique, qo_len, page_size, heads, dtype, causal, window):
    arrays, num_pages = two_levels(groups, shared, unique, qo_len, page_size)
    q, k, v = make(len(unique) * qo_len, num_pages, page_size, heads, 128, dtype)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(), layout)
    on_device = [[x.cuda() for x in array] for array in arrays]
    wrapper.plan(*on_device, *heads, 128, page_size, causal=causal, window_left=window, q_data_type=dtype)
    cache = as_cache(k, v, layout, one)
    out = wrapper.run(q.cuda(), cache.cuda() if one else tuple(x.cuda() for x in cache))
    assert out.dtype == dtype and out.is_cuda
    assert_close(out.float().cpu(), expected(q, k, v, arrays, causal=causal, window_left=window), TOLERANCE[dtype])


def test_flashinfer_graph_with_changing_plans():
    heads, page_size, batch = (8, 2), 16, 6
    buffers = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (batch + 1, 256, batch)]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", True, False, *buffers)
    graph = None
    for step, lengths in enumerate([(40, 9, 16, 300, 5, 33), (41, 10, 17, 20, 6, 34), (2, 250, 18, 21, 100, 35)]):
        indptr, indices, last, num_pages = pack(lengths, page_size, 0)
        if step == 0:
            q, k, v = (x.cuda() for x in make(batch, 64, page_size, heads, 128, torch.float16))
        wrapper.plan(*(x.cuda() for x in (indptr, indices, last)), *heads, 128, page_size, q_data_type="float16")
        if graph is None:
            wrapper.run(q, (k, v), k_scale=0.5)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = wrapper.run(q, (k, v), k_scale=0.5)
        graph.replay()
        arrays = [[torch.arange(batch + 1)], [indptr], [indices], [last]]
        want = expected(*(x.cpu() for x in (q, k, v)), arrays, sm_scale=0.5 / np.sqrt(128))
        assert_close(out.float().cpu(), want, 5e-3)


def decode(lengths=(40, 9, 16), graph=False):
    """A planned wrapper of head sizes (8, 2), its tensors, and plan(lengths)."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", graph)

    def plan(lengths):
        tables = [x.cuda() for x in pack(lengths, 16, 0)[:3]]
        wrapper.plan(*tables, 8, 2, 128, 16, q_data_type="float16")

    plan(lengths)
    return wrapper, [x.cuda() for x in make(len(lengths), 64, 16, (8, 2), 128, torch.float16)], plan


def test_flashinfer_scale_first_used_in_a_capture():
    wrapper, (q, k, v), _ = decode(graph=True)
    wrapper.run(q, (k, v))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = wrapper.run(q, (k, v), k_scale=0.5)
    eager = wrapper.run(q, (k, v), k_scale=0.5)  # before the graph ran once
    graph.replay()
    assert torch.equal(eager, wrapper.run(q, (k, v), k_scale=torch.tensor([0.5], device="cuda")))
    assert torch.equal(eager, captured)


def test_flashinfer_refuses_other_rows_and_keeps_no_old_plan():
    wrapper, (q, k, v), _ = decode()
    with pytest.raises(ValueError, match=r"q.shape\[0\] = 6, expected 3"):
        wrapper.run(torch.cat([q, q]), (k, v))
    wrapper, (q, k, v), plan = decode(graph=True)
    wrapper.run(q, (k, v))
    with pytest.raises(headwater.CapacityExceeded, match="plan the largest batch first"):
        plan((40,) * 9)
    with pytest.raises(NotImplementedError, match="after a plan that was refused"):
        wrapper.run(q, (k, v))


def test_what_grows_is_not_captured():
    on = OnDevice()
    handle = ops.PlanHandle(on.plan, "cuda")
    ops.attend(on.q, on.k, on.v, handle.id)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="give PlanHandle a capacity"):
            ops.attend(on.q, on.k, on.v, handle.id)


def test_threads_with_batches_of_their_own_on_one_stream():
    sides = [OnDevice(), OnDevice(seed=1, groups=(2, 6), own_tokens=(3, 17, 40))]
    wrong = []

    def work(on):
        arguments = (on.q, on.k, on.v, *tables(on))
        want = ops.paged_attention(*arguments)[0]
        on.check(want)
        for _ in range(200):
            if not torch.equal(ops.paged_attention(*arguments)[0], want):
                wrong.append(on)

    threads = [threading.Thread(target=work, args=(on,)) for on in sides]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_flashinfer_shared_prefix_and_merges():
    heads, unique = (4, 2), (5, 17, 8)
    indptr, indices, last, num_pages = pack(unique, 8, 0)
    q, k, v = make(3, num_pages, 8, heads, 128, torch.float16)
    prefix = [torch.randn(56, heads[1], 128).half() for _ in range(2)]
    on_cpu, on_gpu = (flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(None) for _ in range(2))
    for wrapper in (on_cpu, on_gpu):
        wrapper.begin_forward(indptr, indices, last, *heads, 128, 8)
    want = on_cpu.forward(q, *prefix, (k, v))
    out = on_gpu.forward(q.cuda(), *(x.cuda() for x in prefix), (k.cuda(), v.cuda()))
    assert_close(out.float().cpu(), want.float(), 5e-3)

    v4, s3 = torch.randn(5, 3, 4, 64), torch.randn(5, 3, 4)
    want = flashinfer.merge_states(v4, s3)
    merged = flashinfer.merge_states(v4.cuda(), s3.cuda())
    assert_close(merged[0].cpu(), want[0])
    assert_close(merged[1].cpu(), want[1])
    x, y = v4[:, 0].cuda().contiguous(), s3[:, 0].cuda().contiguous()
    mask = torch.tensor([True, False, True, True, False], device="cuda")
    flashinfer.merge_state_in_place(x, y, v4[:, 1].cuda(), s3[:, 1].cuda(), mask)
    want = flashinfer.merge_state(v4[:, 0], s3[:, 0], v4[:, 1], s3[:, 1])
    kept = mask.cpu()
    assert_close(x.cpu()[kept], want[0][kept])
    assert torch.equal(x.cpu()[~kept], v4[:, 0][~kept])


def test_mixed_devices_are_refused():
    on = OnDevice()
    handle = ops.PlanHandle(on.plan, "cuda")
    with pytest.raises(ValueError, match="kv"):
        ops.attend(on.q, on.k.cpu(), on.v, handle.id)
    with pytest.raises(ValueError, match="q is on the CPU"):
        ops.attend(on.q.cpu(), on.k.cpu(), on.v.cpu(), handle.id)
    with pytest.raises(ValueError, match="q is on CUDA device 0, expected the CPU"):
        headwater.run(on.plan, on.q, (on.k, on.v))
