// What the CUDA kernels read: plain structs, passed by value or copied to the device. Host and device code include it.
//
// A plan on the device is one block of memory: a Header, then arrays at places that depend on the capacity alone. A
// captured graph remembers these addresses, and so serves every later plan within the capacity.
#pragma once

#include <cstdint>

#include "plan/plan_data.h"

namespace headwater::cuda {

/// KV caches of one call: one, or one per level of an explicit cascade.
inline constexpr int kMaxViews = 8;

/// Counts of the plan in force.
struct Header {
  std::int32_t num_items = 0;
  std::int32_t num_merge_rows = 0;
  std::int32_t num_empty_rows = 0;
};

/// A query row of an item: where it lies, and the keys that it sees (detail::RowRange).
struct ItemRow {
  std::int32_t row = 0;
  std::int32_t lo = 0;
  std::int32_t hi = 0;
  std::int32_t pos = 0;
};

/// A work item with what its first copies need: a block that has it starts them without another look at memory. Of a
/// size that copies of 16 bytes can carry.
struct alignas(64) DeviceItem : detail::WorkItem {
  ItemRow first_row;             ///< item_rows[row_begin]
  std::int32_t lead = 0;         ///< hidden tokens at its start: kernels begin where copies or tiles do
  std::int32_t first_pages[13];  ///< page_ids[page_begin ...], as many as there are
};
static_assert(sizeof(DeviceItem) == 128);
inline constexpr int kFirstPages = 13;

/// A plan on the device. An item is for all KV heads; the work of a thread block is one of them.
struct PlanView {
  const Header* header = nullptr;
  const DeviceItem* items = nullptr;  ///< [max_items], at least one place
  std::int32_t max_items = 0;
  const ItemRow* item_rows = nullptr;          ///< rows of all items
  const std::int32_t* merge_rows = nullptr;    ///< [num_merge_rows]
  const std::int32_t* merge_indptr = nullptr;  ///< [num_merge_rows + 1]
  const std::int32_t* merge_slots = nullptr;
  const std::int32_t* empty_rows = nullptr;  ///< [num_empty_rows]
  const std::int32_t* page_ids = nullptr;
};

/// One side (K or V) of a paged cache; strides in bytes.
struct PagedBytes {
  const unsigned char* data = nullptr;
  std::int64_t page_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

struct CacheView {
  PagedBytes k;
  PagedBytes v;
  std::int32_t page_shift = 4;  ///< log2(page_size)
  std::int32_t num_pages = 0;
  bool aligned = false;  ///< every row starts at a multiple of 16 bytes
  bool mapped = false;   ///< its TensorMaps are there
};

/// A CUtensorMap: one side of a paged cache as the bulk copy engine sees it (tensor_map.h).
struct alignas(64) TensorMap {
  std::uint64_t words[16] = {};
};

/// One fp32 scale, one per KV head, or none.
struct DeviceScale {
  const float* data = nullptr;
  std::int32_t stride = 0;  ///< 1: per head
};

struct Output {
  void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
  float* lse = nullptr;
  std::int64_t lse_row_stride = 0;
  std::int64_t lse_head_stride = 0;
  DType dtype = DType::bf16;
  bool aligned = false;          ///< four elements of a row from a multiple of four on can be stored at once
  bool natural = false;          ///< LSE in natural logarithms
  const float* sinks = nullptr;  ///< [Hq] learned sink logits
};

struct AttendParams {
  TensorMap k_maps[kMaxViews];
  TensorMap v_maps[kMaxViews];
  PlanView plan;
  std::int32_t* queue = nullptr;  ///< next work, counted from the number of blocks; zero between runs
  CacheView kv[kMaxViews];
  const unsigned char* q = nullptr;
  std::int64_t q_row_stride = 0;  ///< bytes
  std::int64_t q_head_stride = 0;
  bool q_aligned = false;
  Output out;
  std::int32_t num_qo_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t group_size = 1;
  float score_scale = 1.0F;  ///< sm_scale, natural
  float soft_cap = 0.0F;
  const float* alibi_slopes = nullptr;
  DeviceScale k_scale;
  DeviceScale v_scale;
  std::int32_t num_sink_tokens = 0;
  bool invariant = false;        ///< one kernel for all items
  std::int32_t stages = 3;       ///< depth of the KV pipeline of the few-rows kernel
  float* partial_o = nullptr;    ///< [slots, Hq, Dvo]
  float* partial_lse = nullptr;  ///< [slots, Hq], base 2
};

}  // namespace headwater::cuda
