// The loops of ops.h, included by one file per instruction set and compiled with its flags. Written so that the
// compiler vectorises them as they stand: no library calls, fixed numbers of independent sums. Everything is local to
// the including file: code compiled for one instruction set must not be linked into another.
#pragma once

#include "engine/ops.h"

namespace headwater::engine {
namespace {

inline constexpr int kLanes = 16;

inline std::uint16_t to_bf16(float value) noexcept {
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

/// exp(x) for x <= about 88, relative error below 3e-7; 0 far below. 2^t split into an integer and a fraction.
inline float fast_exp(float x) noexcept {
  float t = x * 1.44269504F;
  t = t > -126.0F ? t : -126.0F;
  t = t < 127.0F ? t : 127.0F;
  const auto shifted = static_cast<std::int32_t>(t + 126.5F);  // rounds t to nearest: t + 126.5 is positive
  const float f = t - (static_cast<float>(shifted) - 126.0F);  // [-0.5, 0.5]
  float p = 1.5403530e-4F;
  p = p * f + 1.3333558e-3F;
  p = p * f + 9.6181291e-3F;
  p = p * f + 5.5504109e-2F;
  p = p * f + 2.4022651e-1F;
  p = p * f + 6.9314718e-1F;
  p = p * f + 1.0F;
  return p * __builtin_bit_cast(float, (static_cast<std::uint32_t>(shifted) + 1U) << 23);
}

inline void rms_norm_kernel(const float* x, const float* weight, float eps, int n, ProductInput out) noexcept {
  float sums[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) sums[j] += x[i + j] * x[i + j];
  }
  float total = 0.0F;
  for (; i < n; ++i) total += x[i] * x[i];
  for (float sum : sums) total += sum;
  const float scale = 1.0F / __builtin_sqrtf(total / static_cast<float>(n) + eps);
  if (out.type == DType::bf16) {
    auto* y = static_cast<std::uint16_t*>(out.data);
    for (int k = 0; k < n; ++k) y[k] = to_bf16(x[k] * scale * weight[k]);
  } else {
    auto* y = static_cast<float*>(out.data);
    for (int k = 0; k < n; ++k) y[k] = x[k] * scale * weight[k];
  }
}

inline void rope_kernel(float* x, int num_heads, int head_dim, const float* table, int dim) noexcept {
  for (int head = 0; head < num_heads; ++head, x += head_dim) {
    for (int i = 0; i < dim; i += 2) {
      const float a = x[i];
      const float b = x[i + 1];
      x[i] = a * table[i] - b * table[i + 1];
      x[i + 1] = a * table[i + 1] + b * table[i];
    }
  }
}

inline void swiglu_kernel(const float* gate, const float* up, int n, ProductInput out) noexcept {
  if (out.type == DType::bf16) {
    auto* y = static_cast<std::uint16_t*>(out.data);
    for (int k = 0; k < n; ++k) y[k] = to_bf16(gate[k] / (1.0F + fast_exp(-gate[k])) * up[k]);
  } else {
    auto* y = static_cast<float*>(out.data);
    for (int k = 0; k < n; ++k) y[k] = gate[k] / (1.0F + fast_exp(-gate[k])) * up[k];
  }
}

inline void convert_kernel(const float* x, int n, ProductInput out) noexcept {
  if (out.type == DType::bf16) {
    auto* y = static_cast<std::uint16_t*>(out.data);
    for (int k = 0; k < n; ++k) y[k] = to_bf16(x[k]);
  } else {
    auto* y = static_cast<float*>(out.data);
    for (int k = 0; k < n; ++k) y[k] = x[k];
  }
}

}  // namespace
}  // namespace headwater::engine
