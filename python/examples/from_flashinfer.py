"""Migration from FlashInfer: the import changes, the calls stay. Needs torch; runs on the CPU.

    python python/examples/from_flashinfer.py

A two-level cascade as FlashInfer's documentation sets it up, then the same batch without levels: sharing is found.
"""

import torch

# import flashinfer
import headwater.flashinfer as flashinfer

heads, kv_heads, dim, page, batch = 8, 2, 64, 16, 7
ints = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
shared_pages, own_pages = 64, 2
k, v = torch.randn(2, shared_pages + batch * own_pages, page, kv_heads, dim, dtype=torch.float16)
q = torch.randn(batch, heads, dim, dtype=torch.float16)

wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(128 << 20, dtype=torch.uint8), "NHD")
wrapper.plan(
    [ints(0, batch), torch.arange(batch + 1, dtype=torch.int32)],
    [ints(0, shared_pages), torch.arange(batch + 1, dtype=torch.int32) * own_pages],
    [torch.arange(shared_pages, dtype=torch.int32), torch.arange(shared_pages, len(k), dtype=torch.int32)],
    [ints(page), torch.full((batch,), 9, dtype=torch.int32)],
    heads,
    kv_heads,
    dim,
    page,
)
out = wrapper.run(q, (k, v))

# Without levels: ordinary page tables, from which the shared pages are found.
tables = [list(range(shared_pages)) + [shared_pages + b * own_pages + i for i in range(own_pages)] for b in range(batch)]
decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(128 << 20, dtype=torch.uint8))
decode.plan(
    torch.arange(batch + 1, dtype=torch.int32) * (shared_pages + own_pages),
    ints(*sum(tables, [])),
    torch.full((batch,), 9, dtype=torch.int32),
    heads,
    kv_heads,
    dim,
    page,
)
same = decode.run(q, (k, v))
print("greatest difference:", (out.float() - same.float()).abs().max().item())
assert torch.allclose(out.float(), same.float(), atol=5e-3)
