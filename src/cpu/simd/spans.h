// How the few-rows kernel reads K and V: spans of a row as one to two vectors, in whatever order the loads leave them.
//
// A span type defines kElements (of a row that one step consumes), kParts (vectors that it yields) and kKeys (keys
// whose values are read together: 2 where a dot instruction multiplies pairs). Part by part for keys, so that no more
// than one vector of a key is held at a time. Q is packed in the order of load_key's parts, and O is kept in the order
// of load_value's vectors; `restore` puts a step of O back in order.
#pragma once

#include "cpu/simd/item_view.h"

namespace headwater::cpu::simd {

/// One vector of fp32, fp16, bf16 or fp8 at a time, in order; fp32 products.
template <class V, DType T>
struct PlainSpan {
  using F = typename V::F;
  static constexpr int kElements = V::kLanes;
  static constexpr int kParts = 1;
  static constexpr int kKeys = 1;
  static constexpr bool kDot = false;
  static constexpr int kElementBytes = T == DType::f32 ? 4 : T == DType::f8e4m3 ? 1 : 2;

  template <int Part>
  [[gnu::always_inline]] static inline F load_key(const char* p, int /*left*/) noexcept {
    return load_as_f32<V, T>(p);
  }
  [[gnu::always_inline]] static inline void load_value(const char* const* p, std::int64_t at, int /*left*/,
                                                       F (&x)[kParts]) noexcept {
    x[0] = load_as_f32<V, T>(p[0] + at);
  }
  [[gnu::always_inline]] static inline F mac(F acc, F a, F b) noexcept { return V::fma(a, b, acc); }
  /// Sixteen-lane (or eight-lane) runs of the step's elements in order.
  [[gnu::always_inline]] static inline void restore(F (& /*x*/)[kParts]) noexcept {}
  /// One step of a query row, scaled, in load_key's order.
  template <DType Q>
  [[gnu::always_inline]] static inline void pack(const char* q, int /*left*/, F scale, F (&x)[kParts]) noexcept {
    x[0] = V::mul(load_as_f32<V, Q>(q), scale);
  }
};

/// Two vectors of bf16 at a time, split in even and odd elements: cheaper than widening each.
template <class V>
struct SplitSpan {
  using F = typename V::F;
  static constexpr int kElements = 2 * V::kLanes;
  static constexpr int kParts = 2;
  static constexpr int kKeys = 1;
  static constexpr bool kDot = false;
  static constexpr int kElementBytes = 2;

  template <int Part>
  [[gnu::always_inline]] static inline F load_key(const char* p, int /*left*/) noexcept {
    return Part == 0 ? V::load_bf16_even(p) : V::load_bf16_odd(p);
  }
  [[gnu::always_inline]] static inline void load_value(const char* const* p, std::int64_t at, int /*left*/,
                                                       F (&x)[kParts]) noexcept {
    V::load_bf16_split(p[0] + at, x[0], x[1]);
  }
  [[gnu::always_inline]] static inline F mac(F acc, F a, F b) noexcept { return V::fma(a, b, acc); }
  [[gnu::always_inline]] static inline void restore(F (&x)[kParts]) noexcept { V::join_split(x[0], x[1], x[0], x[1]); }
  template <DType Q>
  [[gnu::always_inline]] static inline void pack(const char* q, int /*left*/, F scale, F (&x)[kParts]) noexcept {
    const F first = V::mul(load_as_f32<V, Q>(q), scale);
    const F second = V::mul(load_as_f32<V, Q>(q + V::kLanes * element_bytes(Q)), scale);
    V::split(first, second, x[0], x[1]);
  }
};

/// bf16 dot products: keys as they lie, values of two keys interleaved. The last step may be half full.
template <class V>
struct DotSpan {
  using F = typename V::F;
  static constexpr int kElements = 2 * V::kLanes;
  static constexpr int kParts = 1;  ///< of a key
  static constexpr int kKeys = 2;
  static constexpr bool kDot = true;
  static constexpr int kElementBytes = 2;

  template <int Part>
  [[gnu::always_inline]] static inline F load_key(const char* p, int left) noexcept {
    return V::load_first(p, (left < kElements ? left : kElements) / 2);
  }
  [[gnu::always_inline]] static inline void load_value(const char* const* p, std::int64_t at, int left,
                                                       F (&x)[2]) noexcept {
    const int units = (left < kElements ? left : kElements) / 2;
    V::interleave_16(V::load_first(p[0] + at, units), V::load_first(p[1] + at, units), x[0], x[1]);
  }
  [[gnu::always_inline]] static inline F mac(F acc, F a, F b) noexcept { return V::dot_bf16(acc, a, b); }
  [[gnu::always_inline]] static inline void restore(F (&x)[2]) noexcept { V::join_interleaved(x[0], x[1], x[0], x[1]); }
  template <DType Q>
  [[gnu::always_inline]] static inline void pack(const char* q, int left, F /*scale*/, F (&x)[1]) noexcept {
    x[0] = load_key<0>(q, left);
  }
};

}  // namespace headwater::cpu::simd
