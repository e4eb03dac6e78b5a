// exp2, log2 and tanh on vectors, and the fold of two states, the same code for every level.
//
// exp2(0) = 1 and log2(1) = 0 exactly: a tile or a chunk without a visible key then leaves a state bit for bit as it
// was.
#pragma once

#include <limits>

namespace headwater::cpu::simd {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kLog2E = 1.44269504088896340736F;
inline constexpr float kLn2 = 0.693147180559945309417F;

/// 2^x for x <= 127; -inf and all below the level's floor give exactly 0. Relative error 1e-7 (Degree 5) or 3e-6
/// (Degree 4): minimax polynomials on [-0.5, 0.5] with constant term 1. NaN stays NaN.
template <class V, int Degree = 5>
[[gnu::always_inline]] inline typename V::F exp2(typename V::F x) noexcept {
  using F = typename V::F;
  x = V::max(V::set1(V::kExp2Floor), x);
  const F n = V::round(x);
  const F f = V::sub(x, n);
  F y;
  if constexpr (Degree == 5) {
    y = V::fma(V::set1(1.326472203e-03F), f, V::set1(9.671512997e-03F));
    y = V::fma(y, f, V::set1(5.550733760e-02F));
    y = V::fma(y, f, V::set1(2.402224208e-01F));
    y = V::fma(y, f, V::set1(6.931469776e-01F));
  } else {
    y = V::fma(V::set1(9.582852994e-03F), f, V::set1(5.590642474e-02F));
    y = V::fma(y, f, V::set1(2.402409861e-01F));
    y = V::fma(y, f, V::set1(6.931241934e-01F));
  }
  y = V::fma(y, f, V::set1(1.0F));
  return V::scale_by_power(y, n);
}

/// log2 of a positive normal number; 0 gives about -127 (callers select -inf themselves).
template <class V>
[[gnu::always_inline]] inline typename V::F log2(typename V::F x) noexcept {
  using F = typename V::F;
  F e = V::exponent(x);
  F m = V::mantissa(x);
  const auto high = V::less(V::set1(1.41421356F), m);  // bring the mantissa to [sqrt(1/2), sqrt(2)]
  e = V::select(high, V::add(e, V::set1(1.0F)), e);
  m = V::select(high, V::mul(m, V::set1(0.5F)), m);
  // ln m = 2 atanh t, t = (m - 1) / (m + 1), |t| <= 0.172.
  const F t = V::div(V::sub(m, V::set1(1.0F)), V::add(m, V::set1(1.0F)));
  const F t2 = V::mul(t, t);
  F y = V::fma(V::set1(2.0F * kLog2E / 9.0F), t2, V::set1(2.0F * kLog2E / 7.0F));
  y = V::fma(y, t2, V::set1(2.0F * kLog2E / 5.0F));
  y = V::fma(y, t2, V::set1(2.0F * kLog2E / 3.0F));
  y = V::fma(y, t2, V::set1(2.0F * kLog2E));
  return V::fma(y, t, e);
}

/// tanh x = m / (m + 2), m = e^2x - 1: relative error 3e-7 however small x is. A soft cap far above the scores leaves
/// them as they are only so: 1 - 2 / (e^2x + 1) is off by 1e-7 of the cap.
template <class V>
[[gnu::always_inline]] inline typename V::F tanh(typename V::F x) noexcept {
  using F = typename V::F;
  const F limit = V::set1(20.0F);
  F bounded = V::select(V::less(limit, x), limit, x);
  bounded = V::select(V::less(bounded, V::set1(-20.0F)), V::set1(-20.0F), bounded);
  const F y = V::mul(bounded, V::set1(2.0F * kLog2E));
  const F n = V::round(y);
  const F f = V::sub(y, n);
  // (2^f - 1) / f on [-0.5, 0.5], relative error 1e-8.
  F q = V::fma(V::set1(1.545316336e-04F), f, V::set1(1.339086331e-03F));
  q = V::fma(q, f, V::set1(9.618083015e-03F));
  q = V::fma(q, f, V::set1(5.550356954e-02F));
  q = V::fma(q, f, V::set1(2.402265072e-01F));
  q = V::fma(q, f, V::set1(6.931471825e-01F));
  const F power = V::scale_by_power(V::set1(1.0F), n);
  const F m = V::fma(power, V::mul(q, f), V::sub(power, V::set1(1.0F)));
  return V::div(m, V::add(m, V::set1(2.0F)));
}

/// Weights of two normalised states, lane by lane; an empty state (-inf) gets weight 0 and the other exactly 1.
template <class V>
struct Fold {
  using F = typename V::F;
  F a;
  F b;
  F lse;

  [[gnu::always_inline]] static inline Fold make(F lse_a, F lse_b) noexcept {
    const F empty = V::set1(-kInfinity);
    const F max = V::max(lse_a, lse_b);
    const F finite_max = V::select(V::equal(max, empty), V::zero(), max);
    const F a = exp2<V>(V::sub(lse_a, finite_max));
    const F b = exp2<V>(V::sub(lse_b, finite_max));
    const F sum = V::add(a, b);
    const auto a_empty = V::equal(lse_a, empty);
    const auto b_empty = V::equal(lse_b, empty);
    Fold f;
    f.a = V::select(b_empty, V::set1(1.0F), V::div(a, sum));
    f.b = V::select(a_empty, V::set1(1.0F), V::div(b, sum));
    f.a = V::select(a_empty, V::zero(), f.a);
    f.b = V::select(b_empty, V::zero(), f.b);
    f.lse = V::add(finite_max, log2<V>(sum));
    f.lse = V::select(a_empty, lse_b, f.lse);
    f.lse = V::select(b_empty, lse_a, f.lse);
    return f;
  }

  /// O of the fold. 0 * 0 + 1 * o is o (an empty state's O is zero), save for the sign of a zero.
  [[gnu::always_inline]] inline F apply(F o_a, F o_b) const noexcept { return V::fma(a, o_a, V::mul(b, o_b)); }
};

}  // namespace headwater::cpu::simd
