"""Parallel sampling: 8 continuations of one prompt, forked copy-on-write; the prompt's pages are read once per step.

    python python/examples/parallel_sampling.py

The model is a stand-in (random q, k and v); pages, plans and attention are real. Ends with what a step read.
"""

import numpy as np

import headwater

HEADS, KV_HEADS, DIM, PAGE, SAMPLES, PROMPT, STEPS = 8, 2, 64, 16, 8, 1000, 5

rng = np.random.default_rng(0)
pool = headwater.PagePool(num_pages=256, page_size=PAGE)
cache = np.zeros((256, 2, PAGE, KV_HEADS, DIM), np.float32)  # one layer
shape = headwater.AttentionShape(HEADS, KV_HEADS, DIM, q_dtype="f32")
planner = headwater.Planner()


def append(sequences, num_tokens):
    """Makes room in every sequence, copies what is shared and half full, then writes keys and values."""
    copies, slots = [], []
    for sequence in sequences:
        more, at = pool.prepare_append(sequence, num_tokens)
        copies += more
        slots.append(np.asarray(at))
    headwater.copy_pages(cache, copies)
    rows = np.concatenate(slots)
    k, v = rng.standard_normal((2, len(rows), KV_HEADS, DIM)).astype(np.float32)
    headwater.append_kv(cache, k, v, rows)


prompt = pool.create()
append([prompt], PROMPT)
samples = [pool.fork(prompt) for _ in range(SAMPLES)]
pool.release(prompt)

plan = None
for step in range(STEPS):
    append(samples, 1)
    indptr, indices, last = pool.page_table(samples)
    batch = headwater.Batch(
        np.arange(SAMPLES + 1, dtype=np.int32), indptr, indices, last, page_size=PAGE, num_pages=pool.num_pages
    )
    if plan is None:
        plan = planner.plan(shape, batch)
    else:
        planner.update(plan, batch)
    q = rng.standard_normal((SAMPLES, HEADS, DIM)).astype(np.float32)
    out = headwater.run(plan, q, cache)
    assert np.isfinite(out).all()

stats = plan.stats
print(f"{stats.path}: a step reads {stats.kv_bytes_read:,} bytes of KV, flat attention {stats.kv_bytes_flat:,}")
print(f"{pool.num_pages - pool.num_free} pages hold {sum(map(pool.num_tokens, samples))} tokens")
assert stats.kv_bytes_read < stats.kv_bytes_flat / 3
for sample in samples:
    pool.release(sample)
pool.audit()
