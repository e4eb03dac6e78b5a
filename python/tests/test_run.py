"""Planner, Plan and run on numpy arrays, against the float64 reference: O and LSE, dtypes, layouts, options, threads."""

import array
import json
import threading
import time

import numpy as np
import pytest

import headwater
import reference
from conftest import assert_close, make_case

FOREST = headwater.PlanOptions(policy="forest")


def run_case(case, options=FOREST, **kwargs):
    plan = headwater.Planner().plan(case.shape, case.batch(), options)
    return plan, headwater.run(plan, case.q, (case.k, case.v), return_lse=True, **kwargs)


@pytest.mark.parametrize("policy", ["auto", "flat", "two_level", "vllm", "forest"])
@pytest.mark.parametrize("qo_len", [1, 3])
def test_every_policy_is_exact(policy, qo_len):
    case = make_case(qo_len=qo_len, own_tokens=(5, 9, 4, 16))
    plan, (out, lse) = run_case(case, headwater.PlanOptions(policy=policy))
    want_out, want_lse = case.expected()
    assert_close(out, want_out)
    assert_close(lse, want_lse)
    if policy in ("flat", "forest"):
        assert plan.stats.path == {"flat": "flat", "forest": "cascade"}[policy]


def test_the_reference_notices_a_wrong_page():
    case = make_case()
    _, (out, _) = run_case(case)
    case.kv_indices[0], case.kv_indices[1] = case.kv_indices[-1], case.kv_indices[0]
    with pytest.raises(AssertionError):
        assert_close(out, case.expected()[0])


def test_cascade_reads_shared_pages_once():
    case = make_case(groups=(8,), shared_pages=(32,))
    plan, _ = run_case(case)
    assert plan.stats.num_spans == 1 and plan.stats.member_sequences == 8
    assert plan.stats.kv_bytes_read < 0.4 * plan.stats.kv_bytes_flat
    args = headwater.RunArgs(case.q, (case.k, case.v), np.empty_like(case.q))
    outcome = headwater.run(plan, args)
    assert outcome.path == "cascade" and outcome.kv_bytes_read == plan.stats.kv_bytes_read


@pytest.mark.parametrize(
    "options, reference_options",
    [
        ({"window_left": 7}, {"window_left": 7}),
        ({"local_chunk": 8}, {"local_chunk": 8}),
        ({"window_left": 3, "num_sink_tokens": 2}, {"window_left": 3, "num_sink_tokens": 2}),
        ({"logits_soft_cap": 2.0}, {"cap": 2.0}),
        ({"sm_scale": 0.5}, {"sm_scale": 0.5}),
        ({"causal": False}, {"causal": False}),
        ({"batch_invariant": True}, {}),
    ],
)
def test_options(options, reference_options):
    case = make_case(qo_len=2, own_tokens=(5, 9, 4, 16))
    _, (out, lse) = run_case(case, headwater.PlanOptions(policy="forest", **options))
    want_out, want_lse = case.expected(**reference_options)
    assert_close(out, want_out)
    assert_close(lse, want_lse)


def test_alibi_and_sinks(case):
    slopes = np.linspace(0.01, 0.3, 8, dtype=np.float32)
    sinks = np.linspace(-2, 3, 8, dtype=np.float32)
    options = headwater.PlanOptions(policy="forest", alibi=True, sinks=True)
    _, (out, lse) = run_case(case, options, alibi_slopes=slopes, sinks=sinks)
    want_out, want_lse = case.expected(slopes=slopes, sinks=sinks)
    assert_close(out, want_out)
    assert_close(lse, want_lse)


def test_natural_lse_in_a_transposed_array(case):
    plan = headwater.Planner().plan(case.shape, case.batch())
    lse = np.empty((case.shape.num_qo_heads, len(case.q)), dtype=np.float32)
    headwater.run(plan, case.q, (case.k, case.v), lse=lse.T, lse_base="natural")
    assert_close(lse.T, case.expected()[1] * np.log(2.0))


def layouts(case):
    k, v = case.k, case.v
    yield "NHD", (k, v)
    yield "NHD", np.stack([k, v], axis=1)
    yield "HND", (np.ascontiguousarray(k.swapaxes(1, 2)), np.ascontiguousarray(v.swapaxes(1, 2)))
    yield "HND", np.stack([k.swapaxes(1, 2), v.swapaxes(1, 2)], axis=1)
    both = np.concatenate([k, v], axis=3)
    yield "NHD", (both[..., : k.shape[3]], both[..., k.shape[3] :])
    wide = np.full((len(k), 7, *k.shape[1:]), np.nan, dtype=np.float32)
    wide[:, 2], wide[:, 5] = k, v
    yield "NHD", (wide[:, 2], wide[:, 5])


@pytest.mark.parametrize("which", range(6))
def test_layouts(case, which):
    plan = headwater.Planner().plan(case.shape, case.batch(), FOREST)
    layout, kv = list(layouts(case))[which]
    assert_close(headwater.run(plan, case.q, kv, kv_layout=layout), case.expected()[0])


@pytest.mark.parametrize("dtype, tolerance", [("f16", 5e-3), ("bf16", 2e-2)])
def test_16_bit(case, dtype, tolerance):
    if dtype == "f16":
        pack, unpack = (lambda x: x.astype(np.float16)), (lambda x: x.astype(np.float32))
    else:
        pack, unpack = reference.to_bf16, reference.from_bf16
    q, k, v = pack(case.q), pack(case.k), pack(case.v)
    shape = headwater.AttentionShape(8, 2, 64, q_dtype=dtype)
    plan = headwater.Planner().plan(shape, case.batch(), FOREST)
    out, lse = headwater.run(plan, q, (k, v), return_lse=True)
    assert out.dtype == q.dtype
    case.q, case.k, case.v = unpack(q), unpack(k), unpack(v)
    want_out, want_lse = case.expected()
    assert_close(unpack(out), want_out, tolerance)
    assert_close(lse, want_lse, tolerance)


def test_levels(case):
    """The two groups, given as a two-level cascade; one pool for both levels, then one cache each."""
    starts, rows = [0, 4, 7], 7
    shared = [case.kv_indices[case.kv_indptr[s]:][:n] for s, n in zip(starts, (6, 4))]
    own = [case.kv_indices[case.kv_indptr[b] + (6 if b < 4 else 4) : case.kv_indptr[b + 1]] for b in range(rows)]
    indptr = lambda tables: np.cumsum([0] + [len(t) for t in tables]).astype(np.int32)  # noqa: E731
    pool = {"page_size": case.page_size, "num_pages": len(case.k)}
    levels = [
        headwater.Level(
            np.array(starts, np.int32), indptr(shared), np.concatenate(shared), np.full(2, case.page_size, np.int32), **pool
        ),
        headwater.Level(case.qo_indptr, indptr(own), np.concatenate(own), case.kv_last_page_len, **pool),
    ]
    plan = headwater.Planner().plan(case.shape, headwater.Batch.from_levels(levels))
    for kv in ((case.k, case.v), [(case.k, case.v), (case.k.copy(), case.v.copy())]):
        out, lse = headwater.run(plan, case.q, kv, return_lse=True)
        assert_close(out, case.expected()[0])
        assert_close(lse, case.expected()[1])
    with pytest.raises(headwater.InvalidArgument, match="kv.size"):
        headwater.run(plan, case.q, [(case.k, case.v)] * 3)


def test_update_equals_a_new_plan(case):
    planner = headwater.Planner()
    plan = planner.plan(case.shape, case.batch(), FOREST)
    case.kv_last_page_len[2] += 1
    planner.update(plan, case.batch(), grown=np.array([2], np.int32))
    assert plan.serialize() == planner.plan(case.shape, case.batch(), FOREST).serialize()
    case.kv_last_page_len[0] += 1
    planner.update(plan, case.batch())
    assert plan.serialize() == planner.plan(case.shape, case.batch(), FOREST).serialize()


def test_plans_explain_themselves(case):
    plan = headwater.Planner().plan(case.shape, case.batch(), FOREST)
    assert "cascade" in plan.describe() and "cascade" in repr(plan)
    assert json.loads(plan.to_json())["path"] == "cascade" or "path" in plan.to_json()
    assert plan.stats.num_requests == 7


def test_own_workspace(case):
    plan = headwater.Planner().plan(case.shape, case.batch(), FOREST)
    raw = np.zeros(plan.workspace_size() + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    out = headwater.run(plan, case.q, (case.k, case.v), workspace=raw[start : start + plan.workspace_size()])
    assert_close(out, case.expected()[0])
    with pytest.raises(headwater.WorkspaceTooSmall, match="workspace.bytes"):
        headwater.run(plan, case.q, (case.k, case.v), workspace=raw[start : start + plan.workspace_size() - 1])


def test_arrays_without_numpy():
    """The buffer protocol alone: one request of one page, every score equal."""
    ints = lambda *x: array.array("i", x)  # noqa: E731
    batch = headwater.Batch(ints(0, 1), ints(0, 1), ints(0), ints(2), page_size=2, num_pages=1)
    shape = headwater.AttentionShape(1, 1, 16, q_dtype="f32")
    plan = headwater.Planner().plan(shape, batch)
    cast = lambda values, dims: memoryview(array.array("f", values)).cast("B").cast("f", dims)  # noqa: E731
    out = cast([9.0] * 16, [1, 1, 16])
    headwater.run(plan, cast([0.0] * 16, [1, 1, 16]), (cast([0.0] * 32, [1, 2, 1, 16]), cast([1.0] * 16 + [3.0] * 16, [1, 2, 1, 16])), out)
    assert out.tolist() == [[[2.0] * 16]]


def test_the_same_arrays_are_used(case):
    """No copies: what is written to q, k or v between two runs of prepared arguments is seen."""
    plan = headwater.Planner().plan(case.shape, case.batch())
    out = np.full_like(case.q, np.nan)
    args = headwater.RunArgs(case.q, (case.k, case.v), out)
    headwater.run(plan, args)
    assert_close(out, case.expected()[0])
    case.q *= 0.5
    case.v += 1.0
    headwater.run(plan, args)
    assert_close(out, case.expected()[0])


def test_threads_share_a_plan(case):
    plan = headwater.Planner().plan(case.shape, case.batch(), FOREST)
    want = headwater.run(plan, case.q, (case.k, case.v))
    wrong = []

    def work():
        executor = headwater.SerialExecutor()
        for _ in range(30):
            if not np.array_equal(headwater.run(plan, case.q, (case.k, case.v), executor=executor), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_the_gil_is_released_while_running():
    """Another thread gets on in the middle of one long run; begin and end do not count, where Python gives the GIL up."""
    case = make_case(groups=(4,), shared_pages=(4096,), page_size=16, heads=(16, 16), dim=128)
    plan = headwater.Planner().plan(case.shape, case.batch(), headwater.PlanOptions(policy="flat"))
    stamps, stop = [], threading.Event()

    def stamp():
        while not stop.wait(0.001):
            stamps.append(time.perf_counter())

    thread = threading.Thread(target=stamp)
    args = headwater.RunArgs(case.q, (case.k, case.v), np.empty_like(case.q))
    executor = headwater.SerialExecutor()
    thread.start()
    begin = time.perf_counter()
    headwater.run(plan, args, executor=executor)
    end = time.perf_counter()
    stop.set()
    thread.join()
    quarter = (end - begin) / 4
    assert quarter > 0.005, "the run is too short to tell"
    assert any(begin + quarter < at < end - quarter for at in stamps)


def test_merge_state_and_states():
    rng = np.random.default_rng(3)
    v = rng.standard_normal((4, 3, 5, 32)).astype(np.float32)
    s = (4 * rng.standard_normal((4, 3, 5))).astype(np.float32)
    s[1, 2] = -np.inf
    got_v, got_s = headwater.merge_state(v[0], s[0], v[1], s[1])
    want_v, want_s = reference.merge(v[:2], s[:2])
    assert_close(got_v, want_v)
    assert_close(got_s, want_s)
    a_v, a_s = v[0].copy(), s[0].copy()
    back = headwater.merge_state(a_v, a_s, v[1], s[1], out_v=a_v, out_s=a_s)
    assert back[0] is a_v and np.array_equal(a_v, got_v) and np.array_equal(a_s, got_s)
    # Groups of 3, 0 and 1 rows of 4.
    indptr = np.array([0, 3, 3, 4], np.int32)
    got_v, got_s = headwater.merge_states(v[:, 0], s[:, 0], indptr)
    want_v, want_s = reference.merge(v[:3, 0][:, None], s[:3, 0][:, None])
    assert_close(got_v[:1], want_v)
    assert_close(got_s[:1], want_s)
    assert (got_v[1] == 0).all() and np.isneginf(got_s[1]).all()
    assert np.array_equal(got_v[2], v[3, 0]) and np.array_equal(got_s[2], s[3, 0])


def test_append_then_attend(case):
    rng = np.random.default_rng(4)
    k = rng.standard_normal((3, 2, 64)).astype(np.float32)
    v = rng.standard_normal((3, 2, 64)).astype(np.float32)
    slots = np.array([5, -1, 8], np.int64)
    before = case.k.copy()
    headwater.append_kv((case.k, case.v), k, v, slots)
    flat_k, flat_v = case.k.reshape(-1, 2, 64), case.v.reshape(-1, 2, 64)
    assert np.array_equal(flat_k[[5, 8]], k[[0, 2]]) and np.array_equal(flat_v[[5, 8]], v[[0, 2]])
    untouched = np.setdiff1d(np.arange(len(flat_k)), [5, 8])
    assert np.array_equal(flat_k[untouched], before.reshape(-1, 2, 64)[untouched])
    headwater.copy_pages((case.k, case.v), [(1, 3, 2)])
    assert np.array_equal(case.k[3, :2], case.k[1, :2]) and np.array_equal(case.k[3, 2:], before[3, 2:])


def test_updating_a_running_plan_is_refused():
    case = make_case(groups=(4,), shared_pages=(512,), page_size=16, heads=(16, 16), dim=128)
    planner = headwater.Planner()
    plan = planner.plan(case.shape, case.batch())
    args = headwater.RunArgs(case.q, (case.k, case.v), np.empty_like(case.q))
    executor = headwater.SerialExecutor()
    refused = 0

    def work():
        for _ in range(50):
            try:
                headwater.run(plan, args, executor=executor)
            except headwater.InvalidArgument as error:
                assert "updated by another thread" in str(error)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        try:
            planner.update(plan, case.batch())
        except headwater.InvalidArgument as error:
            assert "plan is being run" in str(error)
            refused += 1
        except BaseException:
            thread.join()
            raise
    thread.join()
    assert refused > 0
    planner.update(plan, case.batch())


def test_jax_arrays_are_read_in_place(case):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    plan = headwater.Planner().plan(case.shape, case.batch(), FOREST)
    q, k, v = (jax.numpy.asarray(x) for x in (case.q, case.k, case.v))
    out = headwater.run(plan, q, (k, v))
    assert isinstance(out, np.ndarray)
    assert_close(out, case.expected()[0])
    with pytest.raises(headwater.InvalidArgument, match="out is a jax array, which is read-only"):
        headwater.run(plan, q, (k, v), q)
