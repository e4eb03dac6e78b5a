"""vLLM's block tables as the page tables of a Batch."""

import numpy as np


def csr(block_table, lengths, block_size):
    """(kv_indptr, kv_indices, kv_last_page_len) of int32 [requests, columns] and lengths; what lies behind a request's
    last token in its row is left out."""
    pages = -(-lengths // block_size)
    if len(pages) and pages.max() > block_table.shape[1]:
        row = int(pages.argmax())
        raise ValueError(f"seq_lens[{row}] = {lengths[row]}, expected at most {block_table.shape[1] * block_size}")
    indptr = np.zeros(len(pages) + 1, dtype=np.int32)
    np.cumsum(pages, out=indptr[1:])
    live = np.arange(block_table.shape[1]) < pages[:, None]
    last = lengths - np.maximum(pages - 1, 0) * block_size
    return indptr, np.ascontiguousarray(block_table[live], dtype=np.int32), last.astype(np.int32)
