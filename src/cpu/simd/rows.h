// Rows of any element type, at one level: conversion between types, and a weighted sum. append_kv and merge_states are
// made of these. Lengths are arbitrary: what does not fill a vector goes through the scalar conversions, which round
// alike.
#pragma once

#include <type_traits>

#include "cpu/convert.h"
#include "cpu/simd/item_view.h"

namespace headwater::cpu::simd {

template <class V>
struct Rows {
  using F = typename V::F;
  static constexpr int kL = V::kLanes;

  /// C++ type of the elements -> DType.
  template <class T>
  static constexpr DType kTypeOf = std::is_same_v<T, float>  ? DType::f32
                                   : std::is_same_v<T, F16>  ? DType::f16
                                   : std::is_same_v<T, Bf16> ? DType::bf16
                                                             : DType::f8e4m3;

  template <class T>
  [[gnu::always_inline]] static F load(const T* p) noexcept {
    const F x = load_as_f32<V, kTypeOf<T>>(p);
    if constexpr (kTypeOf<T> == DType::f8e4m3) return V::mul(x, V::set1(kv_factor(DType::f8e4m3)));
    return x;
  }

  /// to[i] := from[i], rounded to nearest even; fp8 as a destination stays scalar.
  static void convert(const void* from, DType from_type, void* to, DType to_type, int n) noexcept {
    with_type(from_type, [&](auto from_tag) {
      with_type(to_type, [&](auto to_tag) {
        using From = decltype(from_tag);
        using To = decltype(to_tag);
        const From* x = static_cast<const From*>(from);
        To* y = static_cast<To*>(to);
        int i = 0;
        if constexpr (!std::is_same_v<To, F8e4m3>) {
          for (; i + kL <= n; i += kL) store_from_f32<V, kTypeOf<To>>(y + i, load(x + i));
        }
        for (; i < n; ++i) y[i] = from_f32<To>(to_f32(x[i]));
      });
    });
  }

  /// sum[i] += weight * from[i], two roundings, as the scalar code has it.
  static void add_weighted(const void* from, DType type, float weight, float* sum, int n) noexcept {
    with_type(type, [&](auto tag) {
      const auto* x = static_cast<const decltype(tag)*>(from);
      const F w = V::set1(weight);
      int i = 0;
      for (; i + kL <= n; i += kL) V::store(sum + i, V::add(V::load(sum + i), V::mul(w, load(x + i))));
      for (; i < n; ++i) sum[i] += weight * to_f32(x[i]);
    });
  }
};

}  // namespace headwater::cpu::simd
