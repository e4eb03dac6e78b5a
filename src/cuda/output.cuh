// The end of a row's softmax: learned sink, output type, LSE. Formulas: contracts of RunArgs (cpu.h) and options.h.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx.cuh"

namespace headwater::cuda {

/// log2(2^a + 2^b); -inf is the empty sum.
__device__ __forceinline__ float add_log2(float a, float b) {
  const float max = fmaxf(a, b);
  if (max == minus_infinity()) return max;
  return max + log2f(exp2f(a - max) + exp2f(b - max));
}

/// Adds the sink of query head `head` to a state's lse (base 2); returns the factor that its O must be multiplied by.
__device__ __forceinline__ float add_sink(const Output& out, int head, float& lse) {
  if (out.sinks == nullptr) return 1.0F;
  const float total = add_log2(lse, out.sinks[head] * kLog2E);
  if (total == minus_infinity()) return 1.0F;
  const float factor = lse == minus_infinity() ? 0.0F : exp2f(lse - total);
  lse = total;
  return factor;
}

/// Stores four neighbouring elements of O at element `at` of the output.
__device__ __forceinline__ void store_output4(const Output& out, std::int64_t at, float4 o) {
  if (out.dtype == DType::f32) {
    float* to = static_cast<float*>(out.data) + at;
    if (out.aligned) {
      *reinterpret_cast<float4*>(to) = o;
    } else {
      to[0] = o.x, to[1] = o.y, to[2] = o.z, to[3] = o.w;
    }
    return;
  }
  const bool half = out.dtype == DType::f16;
  const uint2 two{half ? pack<__half>(o.x, o.y) : pack<__nv_bfloat16>(o.x, o.y),
                  half ? pack<__half>(o.z, o.w) : pack<__nv_bfloat16>(o.z, o.w)};
  auto* to = static_cast<std::uint16_t*>(out.data) + at;
  if (out.aligned) {
    *reinterpret_cast<uint2*>(to) = two;
  } else {
    to[0] = static_cast<std::uint16_t>(two.x), to[1] = static_cast<std::uint16_t>(two.x >> 16);
    to[2] = static_cast<std::uint16_t>(two.y), to[3] = static_cast<std::uint16_t>(two.y >> 16);
  }
}

/// Stores two neighbouring elements of O.
__device__ __forceinline__ void store_output2(const Output& out, std::int64_t at, float2 o) {
  if (out.dtype == DType::f32) {
    float* to = static_cast<float*>(out.data) + at;
    if (out.aligned) {
      *reinterpret_cast<float2*>(to) = o;
    } else {
      to[0] = o.x, to[1] = o.y;
    }
    return;
  }
  const std::uint32_t two = out.dtype == DType::f16 ? pack<__half>(o.x, o.y) : pack<__nv_bfloat16>(o.x, o.y);
  auto* to = static_cast<std::uint16_t*>(out.data) + at;
  if (out.aligned) {
    *reinterpret_cast<std::uint32_t*>(to) = two;
  } else {
    to[0] = static_cast<std::uint16_t>(two), to[1] = static_cast<std::uint16_t>(two >> 16);
  }
}

__device__ __forceinline__ void store_lse(const Output& out, std::int32_t row, int head, float lse) {
  if (out.lse == nullptr) return;
  out.lse[row * out.lse_row_stride + head * out.lse_head_stride] = out.natural ? lse * kLn2 : lse;
}

}  // namespace headwater::cuda
