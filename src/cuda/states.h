// What the kernel of merge_states and merge_state reads. Strides are in elements.
#pragma once

#include <cstdint>

#include "headwater/types.h"

namespace headwater::cuda {

/// States [rows, heads, head_dim] and their LSE.
struct StatesIn {
  const void* v = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
  const float* lse = nullptr;
  std::int64_t lse_row_stride = 0;
  std::int64_t lse_head_stride = 0;
  float to_base_two = 1.0F;  ///< log2(e) for natural LSE
};

struct StatesParams {
  StatesIn in[2];                          ///< the second: only of pairs
  const std::int32_t* o_indptr = nullptr;  ///< [num_groups + 1]; null: group j is row j of in[0] and row j of in[1]
  std::int64_t num_states = 0;
  std::int64_t num_groups = 0;
  std::int32_t num_heads = 1;
  std::int32_t head_dim = 1;
  bool aligned = false;  ///< four elements from a multiple of four on can be loaded and stored at once
  void* v_out = nullptr;
  std::int64_t out_row_stride = 0;
  std::int64_t out_head_stride = 0;
  float* lse_out = nullptr;  ///< null: not wanted
  std::int64_t lse_out_row_stride = 0;
  std::int64_t lse_out_head_stride = 0;
  float from_base_two = 1.0F;  ///< ln(2) for natural LSE
};

inline constexpr int kStateWarps = 4;  ///< of a block; a warp merges one head of one group

/// Types: of the states, of the output.
const void* states_kernel(DType in, DType out);

}  // namespace headwater::cuda
