"""headwater.flashinfer against the float64 reference: the grid of FlashInfer's cascade tests and a wider one."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

import headwater  # noqa: E402
import headwater.flashinfer as flashinfer  # noqa: E402
import reference  # noqa: E402
from conftest import assert_close  # noqa: E402

TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def pack(lengths, page_size, first_page):
    """indptr, indices, last_page_len of runs of fresh pages, and the next free page."""
    pages = [-(-n // page_size) for n in lengths]
    indptr = np.concatenate([[0], np.cumsum(pages)])
    last = [n - (p - 1) * page_size if p else 0 for n, p in zip(lengths, pages)]
    return ints(indptr), torch.arange(first_page, first_page + int(indptr[-1]), dtype=torch.int32), ints(last), first_page + int(indptr[-1])


def tokens(cache, indptr, indices, last, j):
    pages = indices[indptr[j] : indptr[j + 1]].numpy()
    return reference.gather(cache.float().numpy(), pages, int(last[j]))


def two_levels(groups, shared, unique, qo_len, page_size):
    """qo_indptr, indptr, indices, last_page_len, one list each, and the number of pages."""
    top = pack(shared, page_size, 0)
    low = pack(unique, page_size, top[3])
    rows = np.arange(0, len(unique) * qo_len + 1, qo_len)
    bounds = rows[np.concatenate([[0], np.cumsum(groups)])]
    return [[ints(bounds), ints(rows)], *([top[i], low[i]] for i in range(3))], low[3]


def expected(q, k, v, arrays, **options):
    qo, indptr, indices, last = arrays
    outs = []
    for j in range(len(qo[-1]) - 1):
        begin, end = int(qo[-1][j]), int(qo[-1][j + 1])
        parts = []
        for level in range(len(qo)):
            node = int(np.searchsorted(qo[level].numpy(), begin, side="right")) - 1
            parts.append([tokens(x, indptr[level], indices[level], last[level], node) for x in (k, v)])
        keys, values = (np.concatenate([p[i] for p in parts]) for i in range(2))
        outs.append(reference.attend(q[begin:end].float().numpy(), keys, values, **options)[0])
    return np.concatenate(outs)


def make(rows, num_pages, page_size, heads, dim, dtype, seed=0):
    torch.manual_seed(seed)
    return (
        torch.randn(rows, heads[0], dim).to(dtype),
        torch.randn(num_pages, page_size, heads[1], dim).to(dtype),
        torch.randn(num_pages, page_size, heads[1], dim).to(dtype),
    )


def as_cache(k, v, layout, one):
    if layout == "HND":
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    return torch.stack([k, v], dim=1) if one else (k, v)


@pytest.mark.parametrize("layout, one", [("NHD", True), ("NHD", False), ("HND", True)])
@pytest.mark.parametrize(
    "groups, shared, unique, qo_len, page_size, heads, dim, dtype",
    [
        ((12,), (128,), (37,) * 12, 1, 16, (8, 8), 128, torch.float16),  # FlashInfer's own
        ((17,), (512,), (17,) * 17, 1, 1, (8, 8), 128, torch.float16),
        ((3,), (128,), (37,) * 3, 17, 16, (16, 16), 128, torch.float16),
        ((3, 1, 4), (40, 8, 33), (5, 1, 9, 30, 7, 2, 3, 4), 1, 8, (8, 2), 96, torch.bfloat16),  # wider
        ((2, 2), (25, 70), (6, 9, 4, 31), 3, 4, (6, 3), 192, torch.float32),
    ],
)
@pytest.mark.parametrize("causal, window", [(False, -1), (True, -1), (True, 11)])
def test_two_levels(layout, one, groups, shared, unique, qo_len, page_size, heads, dim, dtype, causal, window):
    if qo_len > min(unique):
        unique = tuple(max(n, qo_len) for n in unique)
    arrays, num_pages = two_levels(groups, shared, unique, qo_len, page_size)
    q, k, v = make(len(unique) * qo_len, num_pages, page_size, heads, dim, dtype)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(1024, dtype=torch.uint8), layout)
    wrapper.plan(*arrays, *heads, dim, page_size, causal=causal, window_left=window, q_data_type=dtype)
    out = wrapper.run(q, as_cache(k, v, layout, one))
    assert out.dtype == dtype
    assert_close(out.float(), expected(q, k, v, arrays, causal=causal, window_left=window), TOLERANCE[dtype])


def test_three_levels():
    top, middle = pack([64], 8, 0), None
    middle = pack([24, 9], 8, top[3])
    low = pack([3, 8, 1, 17], 8, middle[3])
    arrays = [[ints([0, 4]), ints([0, 3, 4]), ints([0, 1, 2, 3, 4])], *([x[i] for x in (top, middle, low)] for i in range(3))]
    q, k, v = make(4, low[3], 8, (4, 2), 64, torch.float32)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3)
    wrapper.begin_forward(*arrays, 4, 2, 64, 8, q_data_type="float32", logits_soft_cap=3.0, sm_scale=0.2)
    want = expected(q, k, v, arrays, causal=False, cap=3.0, sm_scale=0.2)
    assert_close(wrapper.forward(q, (k, v)), want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("shared", [1, 53, 128])
def test_shared_prefix(layout, shared):
    unique = (5, 17, 8)
    indptr, indices, last, num_pages = pack(unique, 8, 0)
    heads, dim = (4, 2), 64
    q, k, v = make(3, num_pages, 8, heads, dim, torch.float32)
    ks, vs = torch.randn(2, shared, heads[1], dim)
    given = (ks, vs) if layout == "NHD" else tuple(x.transpose(0, 1).contiguous() for x in (ks, vs))
    want = lambda rows, n, causal: np.concatenate(  # noqa: E731
        [
            reference.attend(
                rows[n * b : n * (b + 1)].numpy(),
                *(np.concatenate([s.numpy(), tokens(c, indptr, indices, last, b)]) for s, c in ((ks, k), (vs, v))),
                causal=causal,
            )[0]
            for b in range(3)
        ]
    )
    decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(None, layout)
    decode.begin_forward(indptr, indices, last, *heads, dim, 8)
    for one in (True, False):
        assert_close(decode.forward(q, *given, as_cache(k, v, layout, one)), want(q, 1, False))
    rows = torch.randn(9, heads[0], dim)
    prefill = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(None, layout)
    prefill.begin_forward(ints([0, 3, 6, 9]), indptr, indices, last, *heads, dim, 8)
    for causal in (False, True):
        assert_close(prefill.forward(rows, *given, as_cache(k, v, layout, True), causal=causal), want(rows, 3, causal))


def test_batch_decode_with_lse_and_scales():
    indptr, indices, last, num_pages = pack((40, 9, 16), 8, 0)
    q, k, v = make(3, num_pages, 8, (4, 2), 64, torch.float32)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(indptr, indices, last, 4, 2, 64, 8, q_data_type=torch.float32)
    out, lse = wrapper.run(q, (k, v), q_scale=0.5, k_scale=3.0, v_scale=2.0, return_lse=True)
    want_out, want_lse = reference.paged(
        q.numpy(), k.numpy(), 2.0 * v.numpy(), range(4), indptr.numpy(), indices.numpy(), last.numpy(), sm_scale=1.5 / 8.0
    )
    assert_close(out, want_out)
    assert_close(lse, want_lse)


def test_merges():
    torch.manual_seed(1)
    v, s = torch.randn(5, 3, 4, 32), 3 * torch.randn(5, 3, 4)
    want_v, want_s = reference.merge([v[:, i].numpy() for i in range(3)], [s[:, i].numpy() for i in range(3)])
    got_v, got_s = flashinfer.merge_states(v, s)
    assert_close(got_v, want_v)
    assert_close(got_s, want_s)
    a, b = flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    mask = torch.tensor([True, False, True, True, False])
    x, y = v[:, 0].clone(), s[:, 0].clone()
    flashinfer.merge_state_in_place(x, y, v[:, 1], s[:, 1], mask)
    assert torch.equal(x[mask], a[mask]) and torch.equal(x[~mask], v[~mask, 0]) and torch.equal(y[mask], b[mask])
    x, y = v[:, 0].clone(), s[:, 0].clone()
    flashinfer.merge_state_in_place(x, y, v[:, 1], s[:, 1])
    assert torch.equal(x, a) and torch.equal(y, b)


def test_refusals():
    arrays, num_pages = two_levels((2,), (16,), (4, 4), 1, 8)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2)
    q, k, v = make(2, num_pages, 8, (4, 2), 64, torch.float16)
    with pytest.raises(NotImplementedError, match="before plan"):
        wrapper.run(q, (k, v))
    with pytest.raises(NotImplementedError, match="pos_encoding_mode"):
        wrapper.plan(*arrays, 4, 2, 64, 8, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(ValueError, match="qo_indptr_arr has 1 entries"):
        wrapper.plan(arrays[0][:1], *arrays[1:], 4, 2, 64, 8)
    with pytest.raises(ValueError, match="q_data_type"):
        wrapper.plan(*arrays, 4, 2, 64, 8, q_data_type="int8")
    with pytest.raises(ValueError, match="kv_layout"):
        flashinfer.MultiLevelCascadeAttentionWrapper(2, None, "DHN")
    wrapper.plan(*arrays, 4, 2, 64, 8)
    with pytest.raises(headwater.InvalidArgument, match="num_pages"):
        wrapper.run(q, (k[:-1], v[:-1]))
    with pytest.raises(headwater.InvalidArgument, match="q.dtype = f32"):
        wrapper.run(q.float(), (k, v))


def test_stale_ids_behind_the_last_request_do_not_count():
    indptr, indices, last, num_pages = pack((16, 9), 8, 0)
    q, k, v = make(2, num_pages, 8, (4, 2), 64, torch.float16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper()
    outs = []
    for ids in (indices, torch.cat([indices, ints([num_pages + 7])])):
        wrapper.plan(indptr, ids, last, 4, 2, 64, 8)
        outs.append(wrapper.run(q, (k, v)))
    assert torch.equal(*outs)


@pytest.mark.parametrize("wrong", ["page ids", "options"])
def test_a_refused_plan_leaves_none_in_force(wrong):
    heads = (4, 2)
    indptr, indices, last, num_pages = pack((16, 9), 8, 0)
    q, k, v = make(2, num_pages, 8, heads, 64, torch.float16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(indptr, indices, last, *heads, 64, 8)
    wrapper.run(q, (k, v))
    with pytest.raises(ValueError):
        if wrong == "page ids":
            wrapper.plan(indptr, -1 - indices, last, *heads, 64, 8)
        else:
            wrapper.plan(indptr, indices, last, *heads, 64, 8, window_left=-7)
    with pytest.raises(NotImplementedError, match="after a plan that was refused"):
        wrapper.run(q, (k, v))


def planned(**options):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
    indptr, indices, last, num_pages = pack((5, 17, 8), 8, 0)
    options = {"q_data_type": "float32"} | options
    wrapper.plan(indptr, indices, last, 4, 2, 64, 8, **options)
    return wrapper, make(3, num_pages, 8, (4, 2), 64, torch.float32)


def test_data_type_fills_in_what_is_not_given():
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    for given, want in (
        (dict(q_data_type="float16", data_type=bf16), ("bf16", "bf16")),
        (dict(q_data_type=f32, data_type=bf16), ("f32", "bf16")),
        (dict(q_data_type=f32, kv_data_type=f16, data_type=bf16), ("f32", "f16")),
        (dict(q_data_type=None, data_type=bf16), ("bf16", "bf16")),
    ):
        shape = planned(**given)[0]._plan.shape
        assert (shape.q_dtype, shape.kv_dtype) == want


def test_the_older_forward_takes_its_own_arguments():
    wrapper, (q, k, v) = planned()
    want = wrapper.run(q, (k, v), k_scale=0.5)
    assert torch.equal(wrapper.forward(q, (k, v), "NONE", None, 0.5), want)
    out, lse = wrapper.forward_return_lse(q, (k, v), "NONE", k_scale=0.5)
    assert torch.equal(out, want) and lse.shape == (3, 4)
    assert torch.equal(wrapper.forward(q, (k, v), k_scale=0.5, sm_scale=None, rope_theta=None), want)
    with pytest.raises(NotImplementedError, match='pos_encoding_mode = "ALIBI"'):
        wrapper.forward(q, (k, v), "ALIBI")
    for name in ("window_left", "logits_soft_cap", "sm_scale"):
        with pytest.raises(NotImplementedError, match=f"forward: {name} is given, expected it at plan"):
            wrapper.forward(q, (k, v), **{name: 3})
    with pytest.raises(TypeError, match="no_such"):
        wrapper.forward(q, (k, v), no_such=1)


def test_a_scale_of_zero_is_not_the_default():
    with pytest.raises(NotImplementedError, match="sm_scale = 0, expected None"):
        planned(sm_scale=0.0)
