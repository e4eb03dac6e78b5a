// Conversions, exhaustively: every 8- and 16-bit pattern is decoded and compared with its definition; encoding is
// tested at every representable value, at every midpoint of neighbours and right beside it.
#include "cpu/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace headwater::cpu {
namespace {

/// Value of a float format by its definition; NaN where the pattern is one.
double define(unsigned bits, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const unsigned mantissa = bits & ((1U << mantissa_bits) - 1);
  const unsigned exponent = (bits >> mantissa_bits) & ((1U << exponent_bits) - 1);
  const double sign = ((bits >> (mantissa_bits + exponent_bits)) & 1U) != 0 ? -1.0 : 1.0;
  const unsigned top = (1U << exponent_bits) - 1;
  const int bias = static_cast<int>(top >> 1);
  if (has_infinity && exponent == top) return mantissa == 0 ? sign * INFINITY : NAN;
  if (!has_infinity && exponent == top && mantissa == (1U << mantissa_bits) - 1) return NAN;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((1U << mantissa_bits) + mantissa, static_cast<int>(exponent) - bias - mantissa_bits);
}

template <class T>
struct Format;
template <>
struct Format<F16> {
  static constexpr int exponent = 5, mantissa = 10, bits = 16;
  static constexpr bool infinity = true;
};
template <>
struct Format<Bf16> {
  static constexpr int exponent = 8, mantissa = 7, bits = 16;
  static constexpr bool infinity = true;
};
template <>
struct Format<F8e4m3> {
  static constexpr int exponent = 4, mantissa = 3, bits = 8;
  static constexpr bool infinity = false;
};

template <class T>
T of_bits(unsigned bits) {
  T x;
  x.bits = static_cast<decltype(x.bits)>(bits);
  return x;
}

template <class T>
class Convert : public testing::Test {};
using Types = testing::Types<F16, Bf16, F8e4m3>;
TYPED_TEST_SUITE(Convert, Types);

TYPED_TEST(Convert, DecodesEveryPattern) {
  using F = Format<TypeParam>;
  for (unsigned bits = 0; bits < (1U << F::bits); ++bits) {
    const double expected = define(bits, F::exponent, F::mantissa, F::infinity);
    const float got = to_f32(of_bits<TypeParam>(bits));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(got), expected) << bits;
      ASSERT_EQ(std::signbit(got), std::signbit(expected)) << bits;
    }
  }
}

TYPED_TEST(Convert, EncodesWhatItDecodes) {
  using F = Format<TypeParam>;
  for (unsigned bits = 0; bits < (1U << F::bits); ++bits) {
    const float x = to_f32(of_bits<TypeParam>(bits));
    const TypeParam back = from_f32<TypeParam>(x);
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(to_f32(back))) << bits;
    } else {
      ASSERT_EQ(back.bits, bits);
    }
  }
}

TYPED_TEST(Convert, RoundsToNearestEven) {
  using F = Format<TypeParam>;
  const unsigned sign_bit = 1U << (F::bits - 1);
  for (unsigned bits = 0; bits + 1 < sign_bit; ++bits) {
    const float low = to_f32(of_bits<TypeParam>(bits));
    const float high = to_f32(of_bits<TypeParam>(bits + 1));
    if (!std::isfinite(low) || !std::isfinite(high)) continue;
    const double exact_middle = (static_cast<double>(low) + static_cast<double>(high)) / 2;
    const auto middle = static_cast<float>(exact_middle);
    if (static_cast<double>(middle) != exact_middle) continue;  // bf16 subnormals: no fp32 between
    const unsigned even = (bits & 1U) != 0 ? bits + 1 : bits;
    for (const unsigned sign : {0U, sign_bit}) {
      const float s = sign != 0 ? -1.0F : 1.0F;
      ASSERT_EQ(from_f32<TypeParam>(s * middle).bits, even | sign) << bits;
      ASSERT_EQ(from_f32<TypeParam>(s * std::nextafter(middle, 0.0F)).bits, bits | sign) << bits;
      ASSERT_EQ(from_f32<TypeParam>(s * std::nextafter(middle, INFINITY)).bits, (bits + 1) | sign) << bits;
    }
  }
}

TEST(ConvertF16, OverflowsToInfinityAt65520) {
  EXPECT_EQ(from_f32<F16>(std::nextafter(65520.0F, 0.0F)).bits, 0x7BFF);
  EXPECT_EQ(from_f32<F16>(65520.0F).bits, 0x7C00);
  EXPECT_EQ(from_f32<F16>(-INFINITY).bits, 0xFC00);
}

TEST(ConvertBf16, OverflowsToInfinity) {
  EXPECT_EQ(from_f32<Bf16>(std::numeric_limits<float>::max()).bits, 0x7F80);
  EXPECT_EQ(from_f32<Bf16>(-INFINITY).bits, 0xFF80);
}

TEST(ConvertF8, Saturates) {
  for (const float x : {448.0F, 449.0F, 464.0F, 480.0F, 1e30F, INFINITY}) {
    EXPECT_EQ(from_f32<F8e4m3>(x).bits, 0x7E) << x;
    EXPECT_EQ(from_f32<F8e4m3>(-x).bits, 0xFE) << x;
  }
}

TEST(Convert16, NanPayloadsStayNan) {
  for (const unsigned bits : {0x7F800001U, 0x7FBFFFFFU, 0x7FC00000U, 0xFFFFFFFFU, 0xFF800001U}) {
    const float nan = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(to_f32(from_f32<F16>(nan)))) << bits;
    EXPECT_TRUE(std::isnan(to_f32(from_f32<Bf16>(nan)))) << bits;
    EXPECT_TRUE(std::isnan(to_f32(from_f32<F8e4m3>(nan)))) << bits;
  }
}

// Usable at compile time.
static_assert(from_f32<F16>(1.0F).bits == 0x3C00);
static_assert(from_f32<Bf16>(1.0F).bits == 0x3F80);
static_assert(from_f32<F8e4m3>(1.0F).bits == 0x38);
static_assert(to_f32(F8e4m3{0x7E}) == 448.0F);

TEST(ConvertRow, PicksTheTypeByName) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3}) {
    const std::size_t size = with_type(type, [](auto tag) { return sizeof(tag); });
    EXPECT_EQ(size, size_of(type));
  }
  const std::vector<float> from{1.0F, -2.5F, 0.0F};
  std::vector<Bf16> to(3);
  convert_row(from.data(), to.data(), 3);
  EXPECT_EQ(to[1].bits, 0xC020);
}

}  // namespace
}  // namespace headwater::cpu
