// Thin names for the PTX instructions that the kernels use (sm_80 and newer), and the element types they work on.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace headwater::cuda {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// 16 bytes from global to shared memory, asynchronously.
__device__ __forceinline__ void copy_async16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(shared_address(to)), "l"(from) : "memory");
}
/// 16 bytes from global to shared memory, asynchronously; zeros where `wanted` is false (nothing is read then).
__device__ __forceinline__ void copy_async16(void* to, const void* from, bool wanted) {
  const int bytes = wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}
/// Waits for this thread's copies.
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_all;\n" ::: "memory");
}
/// Makes this thread's stores to shared memory (asynchronous ones too, once they are done) visible to matrix unit and
/// bulk copy engine.
__device__ __forceinline__ void publish_shared() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
}

/// Dependent launches (sm_90): the next kernel's blocks may start where there is room; they wait for this one's memory.
__device__ __forceinline__ void release_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

/// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
/// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
/// An 8x8 matrix of 16-bit elements spread over a warp, transposed.
__device__ __forceinline__ std::uint32_t transpose(std::uint32_t a) {
  std::uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(r) : "r"(a));
  return r;
}

/// What a kernel computes with: the 16-bit type of q (and of KV, unless that is fp8), and whether KV is fp8.
template <class ElementT, bool kFp8V>
struct Types {
  using Element = ElementT;
  static constexpr bool kFp8 = kFp8V;
  static constexpr int kKvBytes = kFp8V ? 1 : 2;
};

/// d += a b, 16x8x16, fp32 sums.
template <class Element>
__device__ __forceinline__ void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  if constexpr (sizeof(Element) == 2 && std::is_same_v<Element, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// Two floats as two 16-bit elements, `low` in the lower half.
template <class Element>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Element, __half>) {
    const __half2 h = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&h);
  } else {
    const __nv_bfloat162 h = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&h);
  }
}

/// Two fp8 (e4m3) as two 16-bit elements: exact.
template <class Element>
__device__ __forceinline__ std::uint32_t widen_fp8(std::uint16_t two) {
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3);
  if constexpr (std::is_same_v<Element, __half>) {
    return *reinterpret_cast<const std::uint32_t*>(&raw);
  } else {
    const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&raw));
    return pack<Element>(f.x, f.y);
  }
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

inline constexpr float kLog2E = 1.44269504088896340736F;
inline constexpr float kLn2 = 0.693147180559945309417F;

__device__ __forceinline__ float minus_infinity() {
  return __int_as_float(0xff800000);
}

}  // namespace headwater::cuda
