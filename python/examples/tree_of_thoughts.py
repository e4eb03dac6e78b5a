"""A small Tree-of-Thoughts search: every thought forks its parent's pages; the tree is the sharing forest.

    python python/examples/tree_of_thoughts.py

Beam search over thoughts of 24 tokens, three children each, the best four kept. A thought's value is a stand-in computed
from its attention output. Ends with what each level read.
"""

import numpy as np

import headwater

HEADS, KV_HEADS, DIM, PAGE, THOUGHT, CHILDREN, BEAM, DEPTH = 8, 2, 64, 8, 24, 3, 4, 4

rng = np.random.default_rng(2)
pool = headwater.PagePool(num_pages=512, page_size=PAGE)
k_cache, v_cache = np.zeros((2, 512, PAGE, KV_HEADS, DIM), np.float32)
shape = headwater.AttentionShape(HEADS, KV_HEADS, DIM, q_dtype="f32")
planner = headwater.Planner()


def think(sequence, num_tokens):
    copies, slots = pool.prepare_append(sequence, num_tokens)
    headwater.copy_pages((k_cache, v_cache), copies)
    k, v = rng.standard_normal((2, num_tokens, KV_HEADS, DIM)).astype(np.float32)
    headwater.append_kv((k_cache, v_cache), k, v, slots)


def judge(sequences):
    """A value for each sequence: one decode step of all of them."""
    batch = headwater.Batch(
        np.arange(len(sequences) + 1, dtype=np.int32),
        *pool.page_table(sequences),
        page_size=PAGE,
        num_pages=pool.num_pages,
    )
    plan = planner.plan(shape, batch)
    q = rng.standard_normal((len(sequences), HEADS, DIM)).astype(np.float32)
    out = headwater.run(plan, q, (k_cache, v_cache))
    return out.sum(axis=(1, 2)), plan.stats


root = pool.create()
think(root, 300)
beam = [root]
for depth in range(DEPTH):
    children = [pool.fork(parent) for parent in beam for _ in range(CHILDREN)]
    for parent in beam:
        pool.release(parent)
    for child in children:
        think(child, THOUGHT)
    values, stats = judge(children)
    best = np.argsort(values)[::-1][:BEAM]
    print(
        f"level {depth + 1}: {len(children)} thoughts, {stats.path}, {stats.num_spans} shared spans, "
        f"{stats.kv_bytes_flat / stats.kv_bytes_read:.1f}x fewer bytes than flat"
    )
    assert stats.kv_bytes_unique <= stats.kv_bytes_read <= stats.kv_bytes_flat
    beam = [children[i] for i in best]
    for i in set(range(len(children))) - set(best.tolist()):
        pool.release(children[i])
pool.audit()
print(f"best path: {pool.num_tokens(beam[0])} tokens in pages {pool.pages(beam[0]).tolist()}")
