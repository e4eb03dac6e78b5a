"""A Triton kernel that only reads; its own module, since it can be imported only where Triton is."""

import triton
import triton.language as tl


@triton.jit
def add_up(k, v, pages, sums, num_blocks, page_blocks: tl.constexpr, block: tl.constexpr):
    """Program i takes blocks i, i + programs, ... of all pages' elements, and leaves the sum of what it read."""
    lane = tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for i in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        page = tl.load(pages + i // page_blocks).to(tl.int64)
        at = (page * page_blocks + i % page_blocks) * block + lane
        total += tl.load(k + at).to(tl.float32)
        total += tl.load(v + at).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(total))
