// Merging of a plan's partial states: a warp for a row and query head, or four where these are few; states in the
// plan's order, of four warps every fourth.
//   m = max lse_i, w_i = 2^(lse_i - m), O = sum(w_i O_i) / sum(w_i), lse = m + log2(sum w_i).
#pragma once

#include "cuda/params.h"

namespace headwater::cuda {

struct MergeParams {
  PlanView plan;
  std::int32_t* queue = nullptr;  ///< of the attend kernel before: set back
  Output out;
  std::int32_t num_qo_heads = 0;
  std::int32_t head_dim = 0;
  bool invariant = false;  ///< always one warp for a row
  const float* partial_o = nullptr;
  const float* partial_lse = nullptr;
};

inline constexpr int kMergeWarps = 4;  ///< of a block

/// The kernel; its one argument is a MergeParams.
const void* merge_kernel();

}  // namespace headwater::cuda
