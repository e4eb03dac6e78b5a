"""Attention in numpy float64, one request and head at a time: what every test compares with.

Written from the formulas of include/headwater/options.h alone; nothing of the package is used. LSE is base 2.
"""

import numpy as np


def visible(q_pos, kv_len, *, causal=True, window_left=-1, local_chunk=0, num_sink_tokens=0):
    """Mask [kv_len] of the keys that a row at q_pos sees."""
    k = np.arange(kv_len)
    hi = q_pos + 1 if causal else kv_len
    lo = 0
    if window_left >= 0:
        lo = max(lo, q_pos - window_left)
    if local_chunk > 0:
        chunk = q_pos // local_chunk
        lo = max(lo, chunk * local_chunk)
        hi = min(hi, (chunk + 1) * local_chunk)
    seen = (k >= lo) & (k < hi)
    sinks = k < num_sink_tokens
    if causal:
        sinks &= k <= q_pos
    return seen | sinks


def attend(q, k, v, *, sm_scale=None, cap=0.0, slopes=None, sinks=None, **mask):
    """q [n, Hq, D], k [m, Hkv, D], v [m, Hkv, Dv] -> (out [n, Hq, Dv], lse [n, Hq])."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    n, num_qo_heads, dim = q.shape
    m, num_kv_heads, _ = k.shape
    scale = sm_scale if sm_scale else 1.0 / np.sqrt(dim)
    out = np.zeros((n, num_qo_heads, v.shape[2]))
    lse = np.full((n, num_qo_heads), -np.inf)
    for i in range(n):
        q_pos = m - n + i
        seen = visible(q_pos, m, **mask)
        for h in range(num_qo_heads):
            g = h // (num_qo_heads // num_kv_heads)
            s = scale * (k[seen, g] @ q[i, h])
            if cap:
                s = cap * np.tanh(s / cap)
            if slopes is not None:
                s = s + slopes[h] * (np.arange(m)[seen] - q_pos)
            extra = [] if sinks is None else [float(sinks[h])]
            every = np.concatenate([s, extra])
            if every.size == 0:
                continue
            top = every.max()
            total = np.exp(every - top).sum()
            out[i, h] = (np.exp(s - top) / total) @ v[seen, g]
            lse[i, h] = (top + np.log(total)) / np.log(2.0)
    return out, lse


def gather(cache, pages, last_page_len):
    """Tokens [n, Hkv, D] of an NHD cache [pages, page_size, Hkv, D]."""
    if len(pages) == 0:
        return cache[:0].reshape(0, *cache.shape[2:])
    page_size = cache.shape[1]
    tokens = cache[np.asarray(pages)].reshape(-1, *cache.shape[2:])
    return tokens[: (len(pages) - 1) * page_size + last_page_len]


def paged(q, k, v, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, **options):
    """Attention of a batch over NHD caches."""
    outs, lses = [], []
    for b in range(len(qo_indptr) - 1):
        pages = kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
        rows = q[qo_indptr[b] : qo_indptr[b + 1]]
        out, lse = attend(
            rows, gather(k, pages, kv_last_page_len[b]), gather(v, pages, kv_last_page_len[b]), **options
        )
        outs.append(out)
        lses.append(lse)
    return np.concatenate(outs), np.concatenate(lses)


def merge(vs, ss):
    """Merges states: lists of v [N, H, D] and s [N, H], base 2."""
    s = np.stack([np.asarray(x, dtype=np.float64) for x in ss])
    top = s.max(axis=0)
    top = np.where(np.isinf(top), 0.0, top)
    w = np.exp2(s - top)
    total = w.sum(axis=0)
    v = sum(w[i][..., None] * np.asarray(vs[i], dtype=np.float64) for i in range(len(vs)))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total[..., None] > 0, v / total[..., None], 0.0), top + np.log2(total)


def to_bf16(x):
    """Bits (uint16) of x rounded to bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)
