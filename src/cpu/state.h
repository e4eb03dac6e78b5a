// The state of a softmax over part of a row's keys, and the one way to fold two of them.
//
// A state is (O, lse): O [head_dim_vo] already normalised, lse in base 2. (0, -inf) is the empty state and an exact
// identity on either side. In batch-invariant mode every state that is combined - inside a kernel, from the workspace,
// or a learned sink - is combined by these functions, left to right by ascending position, so that it does not matter
// where a state travelled. fold_weights is out of line and compiled once for every ISA level; a kernel that vectorises
// fold_state must compute w.a * o[d] + w.b * other[d] with two roundings of products and one of the sum (no FMA), or
// use the same vector code in its merge_row.
#pragma once

#include <limits>

namespace headwater::cpu {

inline constexpr float kLog2E = 1.44269504088896340736F;
inline constexpr float kLn2 = 0.693147180559945309417F;
inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

/// Weights of two normalised states and the lse of both together.
struct FoldWeights {
  float a;
  float b;
  float lse;
};

/// a = 2^lse_a / (2^lse_a + 2^lse_b), b likewise. An empty state has weight 0 and the other then exactly 1 and its own
/// lse; both empty: {1, 0, -inf}. NaN stays NaN.
[[nodiscard]] FoldWeights fold_weights(float lse_a, float lse_b) noexcept;

/// (o, lse) := fold of (o, lse) and (other, other_lse). An empty side is not touched by arithmetic.
[[gnu::always_inline]] inline void fold_state(float* o, float& lse, const float* other, float other_lse,
                                              int n) noexcept {
  if (other_lse == kMinusInfinity) return;
  if (lse == kMinusInfinity) {
    for (int d = 0; d < n; ++d) o[d] = other[d];
    lse = other_lse;
    return;
  }
  const FoldWeights w = fold_weights(lse, other_lse);
  for (int d = 0; d < n; ++d) o[d] = w.a * o[d] + w.b * other[d];
  lse = w.lse;
}

/// Adds a learned sink, a natural-log logit that has no value vector: fold with (0, sink * log2 e).
[[gnu::always_inline]] inline void fold_sink(float* o, float& lse, float sink, int n) noexcept {
  const float sink_lse = sink * kLog2E;
  if (sink_lse == kMinusInfinity) return;
  if (lse == kMinusInfinity) {
    for (int d = 0; d < n; ++d) o[d] = 0.0F;
    lse = sink_lse;
    return;
  }
  const FoldWeights w = fold_weights(lse, sink_lse);
  for (int d = 0; d < n; ++d) o[d] = w.a * o[d];
  lse = w.lse;
}

}  // namespace headwater::cpu
