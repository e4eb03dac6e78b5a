// Constants of the cost model, all integers so that every compiler and device decides alike. Times in picoseconds.
// `headwater calibrate` measures them; the defaults are estimates for a Zen 4 with two threads, with products fitted to
// one machine of each other instruction-set level (for_isa).
#pragma once

#include <cstdint>

#include "headwater/types.h"

namespace headwater {

/// Cost of the products of one key of one KV head with a tile of stacked query rows (rows x group_size), at
/// head_dim_qk + head_dim_vo = 256, in cache, by one worker. Other head sizes scale in proportion.
struct ComputeModel {
  std::int64_t few_row_ps = 2'750;    ///< few-rows kernel: per stacked row
  std::int64_t many_base_ps = 5'700;  ///< many-rows kernel: per key ...
  std::int64_t many_row_ps = 2'330;   ///< ... and per stacked row, padded
  std::int32_t many_row_pad = 16;     ///< stacked rows are padded to a multiple of this
  std::int32_t few_row_max = 12;      ///< above this the many-rows kernel is used
};

struct DeviceModel {
  std::int32_t num_workers = 2;
  bool has_dot16 = true;                    ///< bf16 q on bf16 KV uses `dot16`; everything else uses `fma32`
  std::int64_t memory_ps_per_kib = 28'000;  ///< reading KV from memory, all workers together
  std::int64_t worker_ps_per_kib = 40'000;  ///< the same by one worker while the others are idle
  std::int64_t cache_ps_per_kib = 7'000;  ///< re-reading KV that the last-level cache still holds, all workers together
  std::int64_t cache_bytes = 16LL << 20;  ///< KV that survives in the last-level cache between reads
  std::int64_t item_ps = 1'500'000;       ///< fixed cost of a work item
  std::int64_t item_row_ps = 150'000;     ///< fixed cost of one query row (all heads) in an item: gather q, close state
  std::int64_t partial_ps_per_kib = 60'000;  ///< writing and merging one KiB of partial state
  std::int64_t many_start_ps = 0;            ///< fixed cost of a run that uses the many-rows kernel beside the other
  std::int64_t launch_ps = 4'000'000;        ///< fixed cost of a run; a merge phase costs another
  std::int32_t max_tile_rows = 128;          ///< stacked rows (rows x group_size) of a work item
  std::int32_t chunk_tokens = 1'024;         ///< tokens of an item where several row tiles read one span in turn
  std::int32_t part_tokens = 1;              ///< parts of a span are cut at multiples of this (and of pages)
  /// A worker is a team with a member per KV head (thread blocks of a GPU): heads are never split between workers, and
  /// products go on while KV comes, so that the longer counts, not the sum.
  bool teams = false;
  ComputeModel dot16;                                ///< products on 16-bit operands (bf16 dot instructions)
  ComputeModel fma32{5'500, 11'000, 4'660, 16, 12};  ///< products in fp32, KV converted on load

  /// The shipped constants for the processor this runs on: for_isa(cpu::default_isa()), with as many workers as this
  /// process may use processors.
  [[nodiscard]] static DeviceModel default_cpu();
  /// The shipped constants for an instruction-set level; those of DeviceModel{} but for the products.
  [[nodiscard]] static DeviceModel for_isa(Isa isa);
};

}  // namespace headwater
