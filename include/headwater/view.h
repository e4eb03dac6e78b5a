// Non-owning views of the caller's tensors. Strides are in elements and 64-bit; the innermost dimension (head_dim) is
// contiguous. NHD, HND, [pages, 2, page, Hkv, D], separate tensors, K and V side by side: all are only strides.
#pragma once

#include <cstdint>

#include "headwater/types.h"

namespace headwater {

/// One side (K or V) of a paged KV cache.
/// Element (page, token, kv_head, d) lies at data + page * page_stride + token * token_stride + kv_head * head_stride +
/// d.
///   NHD [pages, page_size, Hkv, D]: token_stride = Hkv * D, head_stride = D.
///   HND [pages, Hkv, page_size, D]: token_stride = D, head_stride = page_size * D.
struct PagedTensor {
  void* data = nullptr;
  std::int64_t page_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

/// A paged KV cache of one layer. K and V may overlap (MLA: V is a view of K). `run` only reads it; append_kv and
/// copy_pages write it. Keys and values that some row of a call sees must be finite: rows are computed together, and
/// weigh what they do not see with zero, which makes NaN of a neighbour's NaN. What no row sees may hold anything.
struct KvCache {
  PagedTensor k;
  PagedTensor v;
  DType dtype = DType::bf16;
  std::int64_t num_pages = 0;  ///< page ids are in [0, num_pages)
  int page_size = 16;          ///< tokens in a page, >= 1
};

/// A tensor [rows, heads, head_dim]; element (r, h, d) at data + r * row_stride + h * head_stride + d.
struct RowsView {
  void* data = nullptr;
  DType dtype = DType::bf16;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

/// Read-only twin of RowsView.
struct ConstRowsView {
  const void* data = nullptr;
  DType dtype = DType::bf16;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

/// LSE tensor, fp32: element (r, h) at data + r * row_stride + h * head_stride. data == nullptr: not wanted.
/// [rows, heads] (FlashInfer): strides {Hq, 1}. [heads, rows] (vLLM): strides {1, rows}.
struct LseView {
  float* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 1;
  LseBase base = LseBase::two;
};

/// Read-only twin of LseView.
struct ConstLseView {
  const float* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 1;
  LseBase base = LseBase::two;
};

/// A dequantisation scale: absent (1.0), one fp32 per tensor, or one fp32 per KV head.
struct Scale {
  const float* data = nullptr;  ///< nullptr: 1.0
  int count = 0;                ///< 0, 1 or num_kv_heads
};

}  // namespace headwater
