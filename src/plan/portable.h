// Code that the compilers of host and device share: the cost model, and planning on the device (src/cuda).
#pragma once

#ifdef __CUDACC__
#define HEADWATER_HOST_DEVICE __host__ __device__
#else
#define HEADWATER_HOST_DEVICE
#endif

namespace headwater::detail {

/// std::min and std::max, which device code cannot call.
template <class T>
[[nodiscard]] HEADWATER_HOST_DEVICE constexpr T lesser(T a, T b) noexcept {
  return b < a ? b : a;
}
template <class T>
[[nodiscard]] HEADWATER_HOST_DEVICE constexpr T greater(T a, T b) noexcept {
  return a < b ? b : a;
}

/// Number of the highest bit that is set; n > 0.
[[nodiscard]] HEADWATER_HOST_DEVICE inline int top_bit(unsigned long long n) noexcept {
#ifdef __CUDA_ARCH__
  return 63 - __clzll(static_cast<long long>(n));
#else
  return 63 - __builtin_clzll(n);
#endif
}

}  // namespace headwater::detail
