// Plans made by hand, without the planner: every way of cutting that a plan may use - token chunks, row tiles, ranges
// of KV heads, a span that all requests share - is an argument here, so that kernels and run meet all of them.
#pragma once

#include "headwater/plan.h"
#include "reference/tables.h"

namespace headwater {

struct HandCut {
  int chunk_tokens = 1 << 30;  ///< items are cut at absolute multiples; in batch-invariant mode a multiple of the chunk
  int tile_rows = 1 << 30;     ///< query rows of an item
  int heads_per_item = 1 << 30;
  int shared_pages = 0;  ///< leading pages that all requests have in common: read once for all of them
  int num_workers = 2;
};

/// One piece per request (two with shared_pages), covering every token of its table from the first visible page on.
Plan hand_plan(const AttentionShape& shape, const PlanOptions& options, const reference::PageTables& tables,
               const HandCut& cut);

}  // namespace headwater
