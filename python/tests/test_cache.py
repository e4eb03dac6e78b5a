"""PagePool and PrefixCache: sharing, copy-on-write, page tables, errors that change nothing."""

import numpy as np
import pytest

import headwater


def test_fork_copies_on_write_and_counts():
    pool = headwater.PagePool(8, 4)
    a = pool.create()
    copies, slots = pool.prepare_append(a, 6)
    assert copies == [] and len(slots) == 6 and slots.format in ("q", "l")
    b = pool.fork(a)
    assert pool.pages(a).tolist() == pool.pages(b).tolist()
    copies, slots = pool.prepare_append(b, 1)
    (src, dst, tokens), = copies
    assert src == pool.pages(a)[1] and dst == pool.pages(b)[1] and tokens == 2
    assert slots.tolist() == [dst * 4 + 2]
    pool.audit()
    indptr, indices, last = pool.page_table([a, b])
    assert indptr.tolist() == [0, 2, 4] and last.tolist() == [2, 3] and len(indices) == 4
    assert np.asarray(indices).dtype == np.int32
    pool.release(a)
    pool.release(b)
    assert pool.num_free == 8


def test_out_of_pages_changes_nothing():
    pool = headwater.PagePool(2, 4)
    a = pool.create()
    with pytest.raises(headwater.OutOfPages):
        pool.prepare_append(a, 9)
    assert pool.num_free == 2 and pool.num_tokens(a) == 0
    with pytest.raises(RuntimeError):
        pool.prepare_append(a, 9)


def test_prefix_cache():
    pool = headwater.PagePool(16, 4)
    cache = headwater.PrefixCache(pool)
    tokens = np.arange(10, dtype=np.int32)
    assert len(cache.lookup(tokens)) == 0
    a = pool.create()
    pool.prepare_append(a, 10)
    kept = cache.insert(tokens, pool.pages(a))
    assert kept.tolist() == pool.pages(a)[:2].tolist()
    b = pool.adopt(cache.lookup(tokens))
    assert pool.pages(b).tolist() == kept.tolist() and pool.num_tokens(b) == 8
    assert len(cache.lookup(tokens, salt=7)) == 0
    assert cache.stats.hits == 1 and cache.stats.pages_cached == 2
    pool.audit(cache.held_pages())
    with pytest.raises(headwater.InternalError):
        pool.audit()
    pool.release(a)
    pool.release(b)
    assert cache.evict(5) == 2 and pool.num_free == 16


def test_the_pool_outlives_its_cache():
    cache = headwater.PrefixCache(headwater.PagePool(4, 2))
    import gc

    gc.collect()
    assert cache.insert(np.arange(0, dtype=np.int32), np.arange(0, dtype=np.int32)).tolist() == []


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.pages(0),
        lambda p: p.release(-1),
        lambda p: p.ref_count(99),
        lambda p: p.fork(3),
        lambda p: p.truncate(0, -1),
        lambda p: p.adopt(np.array([77], np.int32)),
        lambda p: p.adopt(np.array([-1], np.int32)),
        lambda p: p.page_table([5]),
        lambda p: headwater.PagePool(0, 4),
        lambda p: headwater.PagePool(4, 0),
    ],
)
def test_refusals(call):
    with pytest.raises(ValueError):
        call(headwater.PagePool(4, 2))
