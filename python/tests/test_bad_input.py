"""Bad input: a Python exception that names the argument, outputs untouched, never a crash (hypothesis)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headwater
from conftest import make_case

I32 = np.int32


def batch_of(case, **changes):
    arrays = dict(
        qo_indptr=case.qo_indptr,
        kv_indptr=case.kv_indptr,
        kv_indices=case.kv_indices,
        kv_last_page_len=case.kv_last_page_len,
    )
    rest = dict(page_size=case.page_size, num_pages=len(case.k))
    for name, change in changes.items():
        if name in arrays:
            arrays[name] = change(arrays[name]) if callable(change) else change
        else:
            rest[name] = change
    return headwater.Batch(*arrays.values(), **rest)


@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"])
@pytest.mark.parametrize(
    "change, says",
    [
        (lambda a: a.astype(np.int64), "has dtype int64, expected int32"),
        (lambda a: a.astype(np.float32), "has dtype float32, expected int32"),
        (lambda a: a.reshape(1, -1), "expected one dimension"),
        (lambda a: np.repeat(a, 2)[::2], "has stride 2, expected 1"),
        (lambda a: a.tolist(), "is of type list, expected an array"),
        (lambda a: None, "is of type NoneType, expected an array"),
        (lambda a: "text", "is of type str, expected an array"),
        (lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(I32), "is not aligned"),
    ],
)
def test_index_arrays(case, name, change, says):
    with pytest.raises(headwater.InvalidArgument, match=name + ".*" + says):
        batch_of(case, **{name: change})


def put(i, value):
    def change(a):
        a = a.copy()
        a[i] = value
        return a

    return change


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"kv_indices": put(3, -1)}, r"kv_indices\[3\] = -1, expected 0\.\."),
        ({"kv_indices": put(0, 10**6)}, r"kv_indices\[0\] = 1000000, expected 0\.\."),
        ({"kv_indptr": put(2, -5)}, r"kv_indptr\[2\] = -5 is less"),
        ({"kv_indptr": put(-1, 10**6)}, r"kv_indices has \d+ entries"),
        ({"kv_last_page_len": put(1, 0)}, r"kv_last_page_len\[1\] = 0, expected 1\.\.4"),
        ({"kv_last_page_len": put(1, 5)}, r"kv_last_page_len\[1\] = 5, expected 1\.\.4"),
        ({"qo_indptr": put(0, 1)}, r"qo_indptr\[0\] = 1, expected 0"),
        ({"qo_indptr": lambda a: a[:-1]}, "kv_indptr has 8 entries, expected 7"),
        ({"qo_indptr": lambda a: a[:0]}, "qo_indptr is empty"),
        ({"page_size": 0}, "page_size = 0"),
        ({"num_pages": -1}, "num_pages = -1"),
        ({"kv_start_page": np.full(3, 1, I32)}, "kv_start_page has 3 entries"),
    ],
)
def test_page_tables(case, changes, says):
    with pytest.raises(headwater.InvalidPageTable if "page_size" not in says and "num_pages" not in says else ValueError, match=says):
        headwater.Planner().plan(case.shape, batch_of(case, **changes))


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: headwater.AttentionShape(8, 2, 64, q_dtype="int8"), 'q_dtype = "int8", expected one of'),
        (lambda: headwater.PlanOptions(policy="best"), 'policy = "best", expected one of "auto"'),
        (lambda: headwater.PlanOptions(cascade="maybe"), 'cascade = "maybe"'),
        (lambda: headwater.DeviceModel.for_isa("neon"), 'isa = "neon"'),
        (lambda: headwater.ThreadPool(-1), "num_workers = -1"),
        (lambda: headwater.Batch.from_levels([]), "levels is empty"),
        (lambda: headwater.Batch.from_levels([3]), r"levels\[0\] is of type int"),
    ],
)
def test_values(call, says):
    with pytest.raises(headwater.InvalidArgument, match=says):
        call()


@pytest.mark.parametrize(
    "shape, says",
    [((7, 2, 64), "num_qo_heads = 7 is not a multiple"), ((8, 0, 64), "num_kv_heads = 0"), ((8, 2, 20), "head_dim_qk = 20")],
)
def test_shapes(case, shape, says):
    with pytest.raises(ValueError, match=says):
        headwater.Planner().plan(headwater.AttentionShape(*shape), case.batch())


def read_only(a):
    a = a.copy()
    a.flags.writeable = False
    return a


RUN_CHANGES = [
    ("q", lambda a: a.astype(np.float64), "q has dtype float64"),
    ("q", lambda a: a.astype(np.float16), "q.dtype = f16, expected f32"),
    ("q", lambda a: a[0], r"q has shape \[8, 64\], expected 3 dimensions"),
    ("q", lambda a: a[:-1], r"q.shape\[0\] = 6, expected 7 \(rows of the plan\)"),
    ("q", lambda a: a[:, :4], r"q.shape\[1\] = 4, expected 8"),
    ("q", lambda a: a[..., :32], r"q.shape\[2\] = 32, expected 64"),
    ("q", lambda a: np.repeat(a, 2, axis=2)[..., ::2], "q has stride 2 in its last dimension"),
    ("q", lambda a: a[::-1], "q.row_stride = -512"),
    ("q", lambda a: np.broadcast_to(a[:1], a.shape), "q.row_stride = 0"),
    ("q", lambda a: 5, "q is of type int"),
    ("kv", lambda kv: kv[0], "kv has shape .* expected 5 dimensions"),
    ("kv", lambda kv: (kv[0],), r"kv is a tuple of 1, expected \(k, v\)"),
    ("kv", lambda kv: (kv[0], kv[1][:-1]), r"kv\[1\].shape\[0\]"),
    ("kv", lambda kv: (kv[0], kv[1].astype(np.float16)), r"kv\[1\] has dtype f16, expected f32 as k"),
    ("kv", lambda kv: tuple(x[:-1] for x in kv), r"kv\[0\].num_pages"),
    ("kv", lambda kv: tuple(x[:, :2] for x in kv), r"kv\[0\].page_size"),
    ("kv", lambda kv: tuple(x[:, :, :1] for x in kv), r"kv\[0\] has 1 KV heads"),
    ("kv", lambda kv: tuple(x[..., :32] for x in kv), r"kv\[0\] has 2 KV heads of sizes 32 and 32"),
    ("kv", lambda kv: tuple(x.astype(np.float16) for x in kv), r"kv\[0\].dtype = f16, expected f32"),
    ("kv", lambda kv: [], "kv is an empty list"),
    ("kv", lambda kv: None, "kv is of type NoneType"),
    ("out", read_only, "out is read-only"),
    ("out", lambda a: a[:, :, :32], r"out.shape\[2\] = 32"),
    ("out", lambda a: np.broadcast_to(a[:1], a.shape), "out"),
    ("lse", lambda a: a[:-1], r"lse.shape\[0\] = 6"),
    ("lse", lambda a: a.astype(np.float64), "lse has dtype float64"),
    ("lse", lambda a: a.astype(np.float16), "lse has dtype f16, expected float32"),
    ("lse_base", lambda a: "ten", 'lse_base = "ten"'),
    ("kv_layout", lambda a: "HDN", 'kv_layout = "HDN"'),
    ("sinks", lambda a: np.zeros(8, np.float32), "sinks = a pointer, expected nullptr"),
    ("alibi_slopes", lambda a: np.zeros(3, np.float32), r"alibi_slopes.shape\[0\] = 3"),
    ("k_scale", lambda a: np.ones(3, np.float32), "k_scale.count = 3, expected 1 or 2"),
    ("k_scale", lambda a: np.ones(2), "k_scale has dtype float64"),
    ("executor", lambda a: 4, "executor is of type int"),
    ("workspace", lambda a: np.zeros(8, np.uint8), "workspace"),
    ("isa", lambda a: "mmx", 'isa = "mmx"'),
]


@pytest.mark.parametrize("name, change, says", RUN_CHANGES, ids=[f"{i}-{c[0]}" for i, c in enumerate(RUN_CHANGES)])
def test_run(case, name, change, says):
    plan = headwater.Planner().plan(case.shape, case.batch(), headwater.PlanOptions(policy="forest"))
    out = np.full_like(case.q, 7.0)
    lse = np.full(case.q.shape[:2], 7.0, np.float32)
    arguments = dict(q=case.q, kv=(case.k, case.v), out=out, lse=lse)
    arguments[name] = change(arguments.get(name))
    with pytest.raises(headwater.InvalidArgument, match=says):
        headwater.run(plan, **arguments)
    assert (out == 7.0).all() and (lse == 7.0).all()


def test_zero_size_batches():
    empty = np.zeros(0, I32)
    shape = headwater.AttentionShape(8, 2, 64, q_dtype="f32")
    batch = headwater.Batch(np.zeros(1, I32), np.zeros(1, I32), empty, empty, page_size=4, num_pages=0)
    plan = headwater.Planner().plan(shape, batch)
    q = np.zeros((0, 8, 64), np.float32)
    kv = np.zeros((0, 2, 4, 2, 64), np.float32)
    out, lse = headwater.run(plan, q, kv, return_lse=True)
    assert out.shape == (0, 8, 64) and lse.shape == (0, 8)
    headwater.append_kv(kv, np.zeros((0, 2, 64), np.float32), np.zeros((0, 2, 64), np.float32), np.zeros(0, np.int64))
    v, s = headwater.merge_states(q, np.zeros((0, 8), np.float32), np.zeros(1, I32))
    assert v.shape == (0, 8, 64)
    headwater.merge_state(q, lse, q, lse)
    # Requests without rows or keys.
    batch = headwater.Batch(np.array([0, 1, 1], I32), np.zeros(3, I32), empty, np.zeros(2, I32), page_size=4, num_pages=0)
    plan = headwater.Planner().plan(shape, batch)
    out, lse = headwater.run(plan, np.ones((1, 8, 64), np.float32), kv, return_lse=True)
    assert (out == 0).all() and np.isneginf(lse).all()


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"token_slots": np.array([0], np.int32)}, "token_slots has dtype int32, expected int64"),
        ({"token_slots": np.array([10**9], np.int64)}, r"token_slots\[0\] = 1000000000"),
        ({"token_slots": np.array([2**62], np.int64)}, r"token_slots\[0\]"),
        ({"token_slots": np.zeros(2, np.int64)}, r"k.shape\[0\] = 1, expected 2"),
        ({"v": np.zeros((1, 3, 64), np.float32)}, r"v.shape\[1\] = 3"),
        ({"k": np.zeros((1, 2, 32), np.float32)}, r"k.shape\[2\] = 32"),
    ],
)
def test_append(case, changes, says):
    arguments = dict(k=np.zeros((1, 2, 64), np.float32), v=np.zeros((1, 2, 64), np.float32), token_slots=np.array([0]))
    arguments.update(changes)
    before = case.k.copy()
    with pytest.raises(ValueError, match=says):
        headwater.append_kv((case.k, case.v), **arguments)
    assert np.array_equal(before, case.k)


@pytest.mark.parametrize("copies", [[(0, 99, 1)], [(-1, 1, 1)], [(0, 0, 1)], [(0, 1, 9)], [(0, 1)], [(0, 2**40, 1)], ["a"]])
def test_copy_pages(case, copies):
    with pytest.raises(ValueError, match=r"copies\[0\]"):
        headwater.copy_pages((case.k, case.v), copies)


def test_merges(case):
    v, s = np.zeros((4, 2, 16), np.float32), np.zeros((4, 2), np.float32)
    with pytest.raises(ValueError, match=r"indptr\[1\] = 5, expected at most 4"):
        headwater.merge_states(v, s, np.array([0, 5], I32))
    with pytest.raises(ValueError, match=r"o_indptr\[1\] = -1 is less"):
        headwater.merge_states(v, s, np.array([0, -1, 2], I32))
    with pytest.raises(ValueError, match=r"s_b.shape\[0\] = 3, expected 4"):
        headwater.merge_state(v, s, v, s[:3])
    with pytest.raises(ValueError, match=r"v_b.shape\[2\] = 8"):
        headwater.merge_state(v, s, v[..., :8], s)


def test_errors_have_python_bases():
    assert issubclass(headwater.InvalidPageTable, ValueError) and issubclass(headwater.OutOfPages, RuntimeError)
    assert issubclass(headwater.Unsupported, RuntimeError)
    with pytest.raises(TypeError, match="run"):
        headwater.run(3, 4, 5)


def test_planner_of_another_shape_of_kv(case):
    """A plan for a larger pool than the cache has would read outside of it: refused."""
    plan = headwater.Planner().plan(case.shape, batch_of(case, num_pages=10**6))
    with pytest.raises(ValueError, match="num_pages"):
        headwater.run(plan, case.q, (case.k, case.v))


numbers = st.integers(-3, 40)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(numbers, max_size=6),
    st.lists(numbers, max_size=6),
    st.lists(numbers, max_size=12),
    st.lists(numbers, max_size=6),
    st.integers(-1, 5),
    st.integers(-1, 20),
    st.sampled_from(["auto", "flat", "forest", "two_level", "vllm"]),
)
def test_any_table_is_refused_or_computed(qo, indptr, indices, last, page_size, num_pages, policy):
    arrays = [np.array(x, I32) for x in (qo, indptr, indices, last)]
    shape = headwater.AttentionShape(2, 1, 16, q_dtype="f32")
    planner = headwater.Planner()
    try:
        batch = headwater.Batch(*arrays, page_size=page_size, num_pages=num_pages)
        plan = planner.plan(shape, batch, headwater.PlanOptions(policy=policy))
    except headwater.Error as error:
        assert any(name in str(error) for name in ("indptr", "indices", "last_page_len", "page_size", "num_pages"))
        return
    rows = plan.stats.num_rows
    q = np.ones((rows, 2, 16), np.float32)
    kv = np.ones((num_pages, 2, page_size, 1, 16), np.float32)
    out = headwater.run(plan, q, kv)
    assert np.isin(out.round(4), (0.0, 1.0)).all()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_well_formed_table_is_exact(data):
    """Random valid tables with sharing: rows of ones average to one; every page id is used as it stands."""
    page_size = data.draw(st.integers(1, 5))
    num_pages = data.draw(st.integers(1, 12))
    tables = data.draw(st.lists(st.lists(st.integers(0, num_pages - 1), max_size=6), max_size=6))
    lasts = [data.draw(st.integers(1, page_size)) for _ in tables]
    qo = [data.draw(st.integers(0, 3)) for _ in tables]
    cut = lambda x: np.cumsum([0] + x).astype(I32)  # noqa: E731
    batch = headwater.Batch(
        cut(qo), cut([len(t) for t in tables]), np.array(sum(tables, []), I32), np.array(lasts, I32),
        page_size=page_size, num_pages=num_pages,
    )
    shape = headwater.AttentionShape(2, 1, 16, q_dtype="f32")
    options = headwater.PlanOptions(policy="forest", causal=False)
    plan = headwater.Planner().plan(shape, batch, options)
    k = np.zeros((num_pages, page_size, 1, 16), np.float32)
    v = np.broadcast_to(np.arange(num_pages, dtype=np.float32)[:, None, None, None], k.shape).copy()
    out = headwater.run(plan, np.ones((sum(qo), 2, 16), np.float32), (k, v))
    row = 0
    for table, last, n in zip(tables, lasts, qo):
        weights = [page_size] * (len(table) - 1) + [last]
        want = np.average(table, weights=weights) if table else 0.0
        np.testing.assert_allclose(out[row : row + n], want, rtol=1e-4, atol=1e-5)
        row += n


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-2, 9), st.integers(-2, 20)), max_size=30))
def test_any_sequence_of_pool_calls_keeps_the_counts(calls):
    pool = headwater.PagePool(6, 3)
    for what, sequence, n in calls:
        try:
            [
                lambda: pool.create(),
                lambda: pool.prepare_append(sequence, n),
                lambda: pool.fork(sequence),
                lambda: pool.release(sequence),
                lambda: pool.truncate(sequence, n),
                lambda: pool.clone_detached_prefix(sequence, n),
                lambda: pool.adopt(np.array([n], I32)),
                lambda: pool.replace_prefix(sequence, np.array([n], I32)),
                lambda: pool.page_table([sequence, n]),
                lambda: pool.pages(n),
            ][what]()
        except headwater.Error:
            pass
        pool.audit()
