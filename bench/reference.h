// Attention of single rows in double precision, by two plain loops over the page table: what a cell's output is
// compared with.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/paged.h"
#include "headwater/cpu.h"
#include "headwater/options.h"

namespace headwater::bench {

struct ErrorSample {
  double max_rel_error = 0;  ///< max abs error / max |reference| over the sampled rows
  double max_lse_error = 0;  ///< absolute, base 2
  int rows = 0;
};

/// Compares up to `max_rows` query rows (first, last and evenly between) of a causal step, with the
/// windows, soft-caps, ALiBi (`slopes`) and learned sinks of `options`, without its sink tokens and local chunks. At
/// most about 40 million key elements are visited per call; at least one row is.
[[nodiscard]] ErrorSample compare_with_reference(const AttentionShape& shape, const PagedForest& paged,
                                                 const KvCache& kv, const ConstRowsView& q, const ConstRowsView& out,
                                                 const LseView& lse, int max_rows, const PlanOptions& options = {},
                                                 const float* slopes = nullptr, const float* sinks = nullptr);

/// Tolerance on max_rel_error: the coarsest of q, 16-bit KV and out counts (f32 2e-5, f16 5e-3, bf16 2e-2); fp8 KV
/// takes the class of q; fp32 q and out on 16-bit KV: 5e-3.
[[nodiscard]] double tolerance(const AttentionShape& shape);

}  // namespace headwater::bench
