// Scalar conversions between fp32 and the 16-bit and 8-bit float formats, round to nearest, ties to even.
//
// f16, bf16 and f8e4m3 are stored as their bits. Overflow: f16 and bf16 round to infinity, f8e4m3 (which has none)
// saturates at +-448. NaN stays NaN. All are constexpr and forced inline: this header is also included by files that
// are compiled for newer processors, and a copy out of line could be picked by the linker for everybody.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "headwater/types.h"

namespace headwater::cpu {

struct F16 {
  std::uint16_t bits;
};
struct Bf16 {
  std::uint16_t bits;
};
struct F8e4m3 {
  std::uint8_t bits;
};

[[gnu::always_inline]] constexpr float to_f32(float x) noexcept {
  return x;
}

[[gnu::always_inline]] constexpr float to_f32(Bf16 x) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

[[gnu::always_inline]] constexpr float to_f32(F16 x) noexcept {
  const std::uint32_t sign = (x.bits & 0x8000U) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 31U;
  const std::uint32_t mantissa = x.bits & 0x3FFU;
  if (exponent == 31) {
    return std::bit_cast<float>(sign | 0x7F800000U | (mantissa << 13) | (mantissa != 0 ? 0x400000U : 0U));
  }
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24, exact in fp32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

[[gnu::always_inline]] constexpr float to_f32(F8e4m3 x) noexcept {
  const std::uint32_t sign = (x.bits & 0x80U) << 24;
  const std::uint32_t exponent = (x.bits >> 3) & 15U;
  const std::uint32_t mantissa = x.bits & 7U;
  if (exponent == 15 && mantissa == 7) return std::bit_cast<float>(sign | 0x7FC00000U);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9F;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
  }
  return std::bit_cast<float>(sign | ((exponent + 120) << 23) | (mantissa << 20));
}

template <class T>
constexpr T from_f32(float x) noexcept;

template <>
[[gnu::always_inline]] constexpr float from_f32<float>(float x) noexcept {
  return x;
}

template <>
[[gnu::always_inline]] constexpr Bf16 from_f32<Bf16>(float x) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x40U;
  return {static_cast<std::uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? quiet_nan : rounded)};
}

template <>
[[gnu::always_inline]] constexpr F16 from_f32<F16>(float x) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t half = 0;
  if (magnitude > 0x7F800000U) {
    half = 0x7E00U | ((magnitude >> 13) & 0x3FFU);
  } else if (magnitude >= 0x477FF000U) {  // 65520 and above round to infinity
    half = 0x7C00U;
  } else if (magnitude < 0x38800000U) {  // below 2^-14: adding 0.5 rounds at 2^-24, the step of subnormals
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3F000000U;
  } else {
    half = (magnitude - (112U << 23) + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13;
  }
  return {static_cast<std::uint16_t>(sign | half)};
}

template <>
[[gnu::always_inline]] constexpr F8e4m3 from_f32<F8e4m3>(float x) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 24) & 0x80U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t byte = 0;
  if (magnitude > 0x7F800000U) {
    byte = 0x7FU;
  } else if (magnitude >= 0x43E00000U) {  // 448 and above saturate
    byte = 0x7EU;
  } else if (magnitude < 0x3C800000U) {  // below 2^-6: adding 2^14 rounds at 2^-9, the step of subnormals
    byte = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 16384.0F) - 0x46800000U;
  } else {
    byte = (magnitude - (120U << 23) + 0x7FFFFU + ((magnitude >> 20) & 1U)) >> 20;
  }
  return {static_cast<std::uint8_t>(sign | byte)};
}

/// Converts n elements.
template <class To, class From>
[[gnu::always_inline]] inline void convert_row(const From* from, To* to, int n) noexcept {
  for (int i = 0; i < n; ++i) to[i] = from_f32<To>(to_f32(from[i]));
}

/// Calls f with a value of the C++ type that stores `dtype`: with_type(DType::bf16, [](auto tag) { using T =
/// decltype(tag); }).
template <class F>
[[gnu::always_inline]] inline decltype(auto) with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::f16:
      return f(F16{});
    case DType::bf16:
      return f(Bf16{});
    case DType::f8e4m3:
      break;
  }
  return f(F8e4m3{});
}

}  // namespace headwater::cpu
