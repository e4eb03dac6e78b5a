"""headwater.torch: results, opcheck, torch.compile(fullgraph=True). Skipped without torch."""

import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

import headwater  # noqa: E402
import headwater.torch as ops  # noqa: E402
from conftest import assert_close, make_case  # noqa: E402

EXCHANGES = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


@pytest.fixture
def tensors():
    case = make_case()
    names = ("q", "k", "v", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
    return case, [torch.from_numpy(getattr(case, name)) for name in names]


def test_paged_attention(tensors):
    case, arguments = tensors
    out, lse = ops.paged_attention(*arguments, policy="forest")
    assert_close(out, case.expected()[0])
    assert_close(lse, case.expected()[1])
    torch.library.opcheck(torch.ops.headwater.paged_attention.default, tuple(arguments))


def test_attend_follows_updates_under_compile(tensors):
    case, (q, k, v, *_) = tensors
    planner = headwater.Planner()
    handle = ops.PlanHandle(planner.plan(case.shape, case.batch()))
    torch.library.opcheck(torch.ops.headwater.attend.default, (q, k, v, handle.id))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x):
        out, lse = ops.attend(x * 2, k, v, handle.id)
        return out + 1, lse

    assert_close(layer(q / 2)[0] - 1, case.expected()[0])
    case.kv_last_page_len[1] += 1
    planner.update(handle.plan, case.batch())
    out, lse = layer(q / 2)
    assert_close(out - 1, case.expected()[0])
    assert_close(lse, case.expected()[1])
    number = handle.id
    del handle, layer
    torch._dynamo.reset()
    import gc

    gc.collect()
    with pytest.raises(ValueError, match="is not the id of a live PlanHandle"):
        ops.attend(q, k, v, number)


def test_merges_and_append(tensors):
    _, (q, k, v, *_) = tensors
    s = torch.randn(q.shape[:2])
    torch.library.opcheck(torch.ops.headwater.merge_state.default, (q, s, q.flip(0), s.flip(0)))
    indptr = torch.tensor([0, 2, 2, 7], dtype=torch.int32)
    torch.library.opcheck(torch.ops.headwater.merge_states.default, (q, s, indptr))
    slots = torch.tensor([3, 0], dtype=torch.int64)
    rows = torch.randn(2, k.shape[2], k.shape[3])
    torch.library.opcheck(torch.ops.headwater.append_kv.default, (k.clone(), v.clone(), rows, rows, slots))
    k, v = k.clone(), v.clone()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(k, v, rows):
        ops.append_kv(k, v, rows, rows * 2, slots)
        return k.sum()

    step(k, v, rows)
    assert torch.equal(k[0, 3], rows[0]) and torch.equal(v[0, 0], 2 * rows[1])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 5e-3), (torch.bfloat16, 2e-2)])
def test_16_bit_and_gradients(tensors, dtype, tolerance):
    case, (q, k, v, *table) = tensors
    q, k, v = (x.to(dtype) for x in (q, k, v))
    out, _ = ops.paged_attention(q, k, v, *table)
    assert out.dtype == dtype
    case.q, case.k, case.v = (x.float().numpy() for x in (q, k, v))
    assert_close(out.float(), case.expected()[0], tolerance)
    with_gradient, _ = ops.paged_attention(q.clone().requires_grad_(), k, v, *table)
    assert torch.equal(with_gradient, out)


def test_refusals_name_the_argument(tensors):
    case, (q, k, v, *table) = tensors
    with pytest.raises(ValueError, match="kv_indices has dtype int64"):
        ops.paged_attention(q, k, v, table[0], table[1], table[2].long(), table[3])
    plan = headwater.Planner().plan(case.shape, case.batch())
    for wrong, match in (
        (q.to("meta"), "q is on device meta"),
        # The words tell how it was read: through the C exchange interface where torch has it, else by attributes.
        (q.to(torch.complex64), "q has dtype complex64, expected" if EXCHANGES else "q has dtype torch.complex64, which"),
        (q.to_sparse(), "q is a Tensor without memory that can be read"),
        (q.clone().requires_grad_(), "q requires a gradient"),
        (q.double(), "q has dtype float64"),
        (torch._neg_view(q), "q is a negated view"),
    ):
        with pytest.raises(ValueError, match=match):
            headwater.run(plan, wrong, (k, v))
    freed = q.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="q has no memory"):
        headwater.run(plan, freed, (k, v))


class Subclass(torch.Tensor):
    pass


def test_subclasses_are_read_by_their_attributes(tensors):
    case, (q, k, v, *_) = tensors
    plan = headwater.Planner().plan(case.shape, case.batch())
    strided = torch.stack((q, q + 1), dim=1)[:, 0]
    a, b = (headwater.run(plan, f(strided), (f(k), f(v))) for f in (lambda x: x, lambda x: x.as_subclass(Subclass)))
    assert torch.equal(a, b.as_subclass(torch.Tensor))
    with pytest.raises(ValueError, match="q has dtype torch.complex64, which"):
        headwater.run(plan, q.to(torch.complex64).as_subclass(Subclass), (k, v))


def test_fp8_cache(tensors):
    case, (q, k, v, *table) = tensors
    k8, v8 = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    out, _ = ops.paged_attention(q, k8, v8, *table)
    case.k, case.v = k8.float().numpy(), v8.float().numpy()
    assert_close(out, case.expected()[0])
    assert np.isfinite(out.numpy()).all()


def test_a_runner_that_may_grow_is_not_captured(monkeypatch):
    """With stand-ins for the device: what a graph captured must not be freed by a later, larger plan."""
    from headwater import _device_runner

    ran = []
    stand_in = types.SimpleNamespace(run=lambda *args, **options: ran.append(args))
    monkeypatch.setattr(_device_runner, "cuda", stand_in)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    runners = [_device_runner.DeviceRunner(torch.device("cuda", 0), capacity) for capacity in (None, object())]
    for runner in runners:
        runner._plan = object()
    with pytest.raises(headwater.InvalidArgument, match="give PlanHandle a capacity"):
        runners[0].run(None, None, None)
    assert not ran
    runners[1].run(None, None, None)
    assert len(ran) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    runners[0].run(None, None, None)
    assert len(ran) == 2
