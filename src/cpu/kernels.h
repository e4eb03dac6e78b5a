// The table of CPU kernels: one entry per ISA level, each from its own translation unit compiled with that level's
// flags. Only kernels.cc tests for the processor's features.
#pragma once

#include <cstddef>
#include <cstdint>

#include "headwater/cpu.h"
#include "plan/plan_data.h"

namespace headwater::cpu {

/// Everything a kernel reads; one plain struct a run. Rows are query tokens; a row has num_qo_heads heads.
struct AttendParams {
  // Shape.
  int num_qo_heads = 0;
  int num_kv_heads = 0;
  int group_size = 0;
  int head_dim_qk = 0;
  int head_dim_vo = 0;

  // Tensors.
  ConstRowsView q;
  const KvCache* kv = nullptr;  ///< [views]
  RowsView out;
  LseView lse;

  // Plan.
  const std::int32_t* page_ids = nullptr;
  const std::int32_t* item_rows = nullptr;
  const detail::RowRange* rows = nullptr;

  // Scores.
  float sm_scale = 1.0F;
  float logits_soft_cap = 0.0F;
  const float* alibi_slopes = nullptr;
  const float* sinks = nullptr;  ///< nullptr also when include_sink is false
  Scale k_scale;
  Scale v_scale;
  std::int64_t num_sink_tokens = 0;

  // Partial states (workspace).
  float* partial_o = nullptr;    ///< [slots, Hq, Dvo]
  float* partial_lse = nullptr;  ///< [slots, Hq], base 2, without learned sinks
  bool batch_invariant = false;
  int invariant_chunk = 128;
};

/// Per-worker scratch memory, part of the caller's stack or of a caller-owned buffer; size given by scratch_bytes().
struct Scratch {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

struct Kernels {
  Isa isa;
  /// Attention of one work item.
  void (*attend)(const AttendParams& p, const detail::WorkItem& item, Scratch scratch) noexcept;
  /// Scratch that `attend` needs for a tile of `max_rows` query rows.
  std::size_t (*scratch_bytes)(const AttendParams& p, int max_rows) noexcept;
  /// Merges `count` states (partial slots in order) of query row `row`, all heads, adds the learned sink, writes out
  /// and lse. In batch-invariant mode a left fold (state.h). count >= 1; the scalar level also takes 0, a row without
  /// keys.
  void (*merge_row)(const AttendParams& p, std::int32_t row, const std::int32_t* slots, int count) noexcept;
  /// to[i] := from[i], rounded to nearest even: the same bits at every level (a NaN stays some NaN).
  void (*convert_row)(const void* from, DType from_type, void* to, DType to_type, int n) noexcept;
  /// sum[i] += weight * from[i] with two roundings: the same bits at every level.
  void (*add_weighted_row)(const void* from, DType type, float weight, float* sum, int n) noexcept;
};

/// Table of a level; throws Error(unsupported) where the processor lacks it.
const Kernels& kernels_for(Isa isa);
/// The same, for a processor whose highest level is `highest`.
const Kernels& kernels_for(Isa isa, Isa highest);

// One per translation unit; those above scalar exist on x86-64 only.
extern const Kernels kScalarKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx512Bf16Kernels;

}  // namespace headwater::cpu
