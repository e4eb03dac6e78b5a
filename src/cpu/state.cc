// fold_weights, compiled once without ISA flags: its bits are the same for every kernel.
#include "cpu/state.h"

#include <algorithm>
#include <cmath>

namespace headwater::cpu {

FoldWeights fold_weights(float lse_a, float lse_b) noexcept {
  if (lse_b == kMinusInfinity) return {1.0F, 0.0F, lse_a};
  if (lse_a == kMinusInfinity) return {0.0F, 1.0F, lse_b};
  const float max = std::max(lse_a, lse_b);
  const float a = std::exp2(lse_a - max);
  const float b = std::exp2(lse_b - max);
  const float sum = a + b;
  return {a / sum, b / sum, max + std::log2(sum)};
}

}  // namespace headwater::cpu
