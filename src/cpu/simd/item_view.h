// What both kernels need to know of a work item: its stacked rows, where its keys lie, and where its states go.
//
// Stacked row j of a KV head is query row j / group_size, group slot j % group_size: query head kv_head * group_size +
// slot.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/simd/math.h"

namespace headwater::cpu::simd {

/// fp32 scale that was given per tensor or per KV head, or not at all.
[[gnu::always_inline]] inline float scale_of(const Scale& s, int kv_head) noexcept {
  if (s.data == nullptr || s.count == 0) return 1.0F;
  return s.data[s.count == 1 ? 0 : kv_head];
}

/// Bytes of one element (the library's own size_of is not forced inline).
[[gnu::always_inline]] inline std::int64_t element_bytes(DType t) noexcept {
  return t == DType::f32 ? 4 : t == DType::f8e4m3 ? 1 : 2;
}

/// load_f8 returns the value times 2^-8.
[[gnu::always_inline]] inline float kv_factor(DType t) noexcept {
  return t == DType::f8e4m3 ? 256.0F : 1.0F;
}

/// kLanes elements of type T at p, as fp32.
template <class V, DType T>
[[gnu::always_inline]] inline typename V::F load_as_f32(const void* p) noexcept {
  if constexpr (T == DType::f32) {
    return V::load(static_cast<const float*>(p));
  } else if constexpr (T == DType::f16) {
    return V::load_f16(p);
  } else if constexpr (T == DType::bf16) {
    return V::load_bf16(p);
  } else {
    return V::load_f8(p);
  }
}

/// Calls f with T = the query's type (never fp8) as a template argument.
template <class F>
[[gnu::always_inline]] inline void with_float_type(DType t, F&& f) noexcept {
  if (t == DType::f32) {
    f.template operator()<DType::f32>();
  } else if (t == DType::f16) {
    f.template operator()<DType::f16>();
  } else {
    f.template operator()<DType::bf16>();
  }
}

template <class V, DType T>
[[gnu::always_inline]] inline void store_from_f32(void* p, typename V::F x) noexcept {
  if constexpr (T == DType::f32) {
    V::store(static_cast<float*>(p), x);
  } else if constexpr (T == DType::f16) {
    V::store_f16(p, x);
  } else {
    V::store_bf16(p, x);
  }
}

struct ItemView {
  const AttendParams& p;
  const detail::WorkItem& item;
  const KvCache& kv;
  int num_rows;  ///< stacked rows of one KV head

  [[gnu::always_inline]] ItemView(const AttendParams& params, const detail::WorkItem& work) noexcept
      : p(params), item(work), kv(params.kv[work.view]), num_rows(work.num_rows * params.group_size) {}

  [[gnu::always_inline]] std::int32_t query_row(int j) const noexcept {
    return p.item_rows[item.row_begin + j / p.group_size];
  }
  [[gnu::always_inline]] int query_head(int j, int kv_head) const noexcept {
    return kv_head * p.group_size + j % p.group_size;
  }
  [[gnu::always_inline]] const char* query(int j, int kv_head) const noexcept {
    const std::int64_t at = query_row(j) * p.q.row_stride + query_head(j, kv_head) * p.q.head_stride;
    return static_cast<const char*>(p.q.data) + at * element_bytes(p.q.dtype);
  }

  /// What a raw product q . k is multiplied with: to base-2 units, or to the argument of tanh with a soft cap.
  [[gnu::always_inline]] float score_factor(int kv_head) const noexcept {
    const float s = p.sm_scale * scale_of(p.k_scale, kv_head) * kv_factor(kv.dtype);
    return p.logits_soft_cap > 0.0F ? s / p.logits_soft_cap : s * kLog2E;
  }
  [[gnu::always_inline]] float value_factor(int kv_head) const noexcept {
    return scale_of(p.v_scale, kv_head) * kv_factor(kv.dtype);
  }

  /// Addresses of K and V of `count` tokens from item token t on, KV head `kv_head`.
  [[gnu::always_inline]] void locate(int t, int count, int kv_head, const char** k, const char** v) const noexcept {
    const std::int64_t bytes = element_bytes(kv.dtype);
    const std::int64_t k_step = kv.k.token_stride * bytes;
    const std::int64_t v_step = kv.v.token_stride * bytes;
    const int in_pages = item.first_token + t;
    int page = in_pages / kv.page_size;
    int offset = in_pages % kv.page_size;
    for (int i = 0; i < count; ++page, offset = 0) {
      const std::int64_t id = p.page_ids[item.page_begin + page];
      const char* k_at = static_cast<const char*>(kv.k.data) +
                         (id * kv.k.page_stride + kv_head * kv.k.head_stride) * bytes + offset * k_step;
      const char* v_at = static_cast<const char*>(kv.v.data) +
                         (id * kv.v.page_stride + kv_head * kv.v.head_stride) * bytes + offset * v_step;
      const int left = count - i;
      const int end = i + (kv.page_size - offset < left ? kv.page_size - offset : left);
      for (; i < end; ++i, k_at += k_step, v_at += v_step) {
        k[i] = k_at;
        v[i] = v_at;
      }
    }
  }

  [[gnu::always_inline]] bool direct() const noexcept { return item.partial_begin < 0; }
  /// Index of (slot, head) in partial_lse and, times head_dim_vo, in partial_o.
  [[gnu::always_inline]] std::int64_t partial_at(int j, int state, int kv_head) const noexcept {
    const std::int64_t slot = std::int64_t{item.partial_begin} + std::int64_t{state} * item.num_rows + j / p.group_size;
    return slot * p.num_qo_heads + query_head(j, kv_head);
  }
  /// First element of row j's output and its type.
  [[gnu::always_inline]] char* destination(int j, int state, int kv_head) const noexcept {
    if (!direct()) return reinterpret_cast<char*>(p.partial_o + partial_at(j, state, kv_head) * p.head_dim_vo);
    const std::int64_t at = query_row(j) * p.out.row_stride + query_head(j, kv_head) * p.out.head_stride;
    return static_cast<char*>(p.out.data) + at * element_bytes(p.out.dtype);
  }
  [[gnu::always_inline]] DType destination_dtype() const noexcept { return direct() ? p.out.dtype : DType::f32; }

  /// Stores the final or partial LSE (base 2) of row j.
  [[gnu::always_inline]] void store_lse(int j, int state, int kv_head, float lse) const noexcept {
    if (!direct()) {
      p.partial_lse[partial_at(j, state, kv_head)] = lse;
    } else if (p.lse.data != nullptr) {
      float& to = p.lse.data[query_row(j) * p.lse.row_stride + query_head(j, kv_head) * p.lse.head_stride];
      to = p.lse.base == LseBase::two ? lse : lse * kLn2;
    }
  }
  /// Learned sink of row j in base-2 units; -inf without.
  [[gnu::always_inline]] float sink(int j, int kv_head) const noexcept {
    return p.sinks == nullptr ? -kInfinity : p.sinks[query_head(j, kv_head)] * kLog2E;
  }
};

}  // namespace headwater::cpu::simd
