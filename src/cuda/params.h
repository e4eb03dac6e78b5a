// What the CUDA kernels read: plain structs, passed by value or copied to the device. Host and device code include it.
//
// A plan on the device is one blob at one address: a Header, then the arrays of PlanData that kernels read, packed. A
// captured graph remembers the blob's address only, and so serves every later plan within the capacity.
#pragma once

#include <cstdint>

#include "plan/plan_data.h"

#ifdef __CUDACC__
#define HEADWATER_DEVICE __device__ __forceinline__
#else
#define HEADWATER_DEVICE
#endif

namespace headwater::cuda {

/// KV caches of one call: one, or one per level of an explicit cascade.
inline constexpr int kMaxViews = 8;

/// The head of a plan's blob: counts, and where its arrays start, in bytes from the blob's start. They change from plan
/// to plan; kernels read them from the device.
struct Header {
  std::int32_t num_items = 0;
  std::int32_t heads_per_item = 1;  ///< KV heads of an item: the work of a thread block is one of them
  std::int32_t num_merge_rows = 0;
  std::int32_t num_empty_rows = 0;
  std::int32_t items = 0;         ///< detail::WorkItem [num_items], page_begin counted in this blob's page_ids
  std::int32_t rows = 0;          ///< detail::RowRange [R]
  std::int32_t item_rows = 0;     ///< int32
  std::int32_t merge_rows = 0;    ///< int32 [num_merge_rows]
  std::int32_t merge_indptr = 0;  ///< int32 [num_merge_rows + 1]
  std::int32_t merge_slots = 0;   ///< int32
  std::int32_t empty_rows = 0;    ///< int32 [num_empty_rows]
  std::int32_t page_ids = 0;      ///< int32
};

/// A plan's blob on the device: a Header, then its arrays.
struct DeviceBlob {
  const unsigned char* data = nullptr;

  [[nodiscard]] HEADWATER_DEVICE const Header& header() const { return *reinterpret_cast<const Header*>(data); }
  template <class Element>
  [[nodiscard]] HEADWATER_DEVICE const Element* at(std::int32_t offset) const {
    return reinterpret_cast<const Element*>(data + offset);
  }
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
  DeviceBlob plan;
  std::int32_t* queue = nullptr;  ///< [2] next work, blocks done; both zero between launches
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
  std::int32_t stages = 3;       ///< depth of the KV pipeline of the few-rows kernel
  float* partial_o = nullptr;    ///< [slots, Hq, Dvo]
  float* partial_lse = nullptr;  ///< [slots, Hq], base 2
};

}  // namespace headwater::cuda
