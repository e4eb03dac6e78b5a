// Elements of tensors as fp32 and back, and short vectors of them. Rounding is the CPU back end's (cpu/convert.h): to
// nearest even; f16 and bf16 overflow to infinity, fp8-e4m3 saturates at +-448.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "headwater/types.h"

namespace headwater::cuda {

__device__ __forceinline__ float to_f32(float x) {
  return x;
}
__device__ __forceinline__ float to_f32(__half x) {
  return __half2float(x);
}
__device__ __forceinline__ float to_f32(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

__device__ __forceinline__ void from_f32(float x, float& to) {
  to = x;
}
__device__ __forceinline__ void from_f32(float x, __half& to) {
  to = __float2half_rn(x);
}
__device__ __forceinline__ void from_f32(float x, __nv_bfloat16& to) {
  to = __float2bfloat16_rn(x);
}
__device__ __forceinline__ void from_f32(float x, __nv_fp8_e4m3& to) {
  to.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

/// kWidth elements that are loaded and stored at once.
template <class Element, int kWidth>
struct alignas(sizeof(Element) * kWidth) Elements {
  Element at[kWidth];
};

}  // namespace headwater::cuda
