"""Questions on documents: requests arrive one by one; the prefix cache finds the document, the planner the groups.

    python python/examples/document_questions.py

Two documents, six questions each. The model is a stand-in; ends with the cache's hits and the plan in words.
"""

import numpy as np

import headwater

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16

rng = np.random.default_rng(1)
pool = headwater.PagePool(num_pages=512, page_size=PAGE)
prefixes = headwater.PrefixCache(pool)
cache = np.zeros((512, 2, PAGE, KV_HEADS, DIM), np.float32)
documents = [rng.integers(0, 50_000, 1500, dtype=np.int32) for _ in range(2)]
requests = []

for question in range(12):
    tokens = np.concatenate([documents[question % 2], rng.integers(0, 50_000, 20 + question, dtype=np.int32)])
    sequence = pool.adopt(prefixes.lookup(tokens))
    computed = len(tokens) - pool.num_tokens(sequence)
    copies, slots = pool.prepare_append(sequence, computed)
    assert not copies  # adopted pages are full
    k, v = rng.standard_normal((2, computed, KV_HEADS, DIM)).astype(np.float32)
    headwater.append_kv(cache, k, v, slots)
    pool.replace_prefix(sequence, prefixes.insert(tokens, pool.pages(sequence)))
    requests.append(sequence)

batch = headwater.Batch(
    np.arange(13, dtype=np.int32), *pool.page_table(requests), page_size=PAGE, num_pages=pool.num_pages
)
plan = headwater.Planner().plan(headwater.AttentionShape(HEADS, KV_HEADS, DIM, q_dtype="f32"), batch)
q = rng.standard_normal((12, HEADS, DIM)).astype(np.float32)
out, lse = headwater.run(plan, q, cache, return_lse=True)
assert np.isfinite(out).all() and np.isfinite(lse).all()

stats = prefixes.stats
print(f"prefix cache: {stats.hits} of {stats.lookups} requests hit, {stats.tokens_hit} of {stats.tokens_requested} tokens")
print(plan.describe())
assert stats.hits == 10 and plan.stats.num_spans == 2
pool.audit(prefixes.held_pages())
