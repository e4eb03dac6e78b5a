// Conversion and weighted sums of rows: every level gives the scalar level's bits (a NaN stays some NaN), for every
// pair of types and length, with NaN, infinities, subnormals and ties among the values, and writes nothing past the
// end.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/convert.h"
#include "cpu/kernels.h"
#include "headwater/cpu.h"

namespace headwater::test {
namespace {

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16, DType::f8e4m3};
constexpr int kLengths[] = {1, 7, 8, 16, 31, 128, 131};
constexpr std::byte kFence{0xA5};

/// n elements: random sizes over the whole range of the type, and every special value.
std::vector<std::byte> values_of(DType type, int n) {
  std::mt19937 rng(static_cast<unsigned>(n));
  std::vector<std::byte> bytes(static_cast<std::size_t>(n) * size_of(type));
  const float inf = std::numeric_limits<float>::infinity();
  const float special[] = {0.0F,   -0.0F, inf,      -inf,        std::numeric_limits<float>::quiet_NaN(),
                           1e-41F, 6e-8F, 65520.0F, 1.00390625F, 1.01171875F,
                           449.0F};
  cpu::with_type(type, [&](auto tag) {
    using T = decltype(tag);
    for (int i = 0; i < n; ++i) {
      const float x = i % 3 == 0 ? special[static_cast<std::size_t>(i / 3) % std::size(special)]
                                 : std::ldexp(std::uniform_real_distribution<float>(-2.0F, 2.0F)(rng),
                                              static_cast<int>(rng() % 40U) - 20);
      const T value = cpu::from_f32<T>(x);
      std::memcpy(bytes.data() + static_cast<std::size_t>(i) * sizeof(T), &value, sizeof value);
    }
  });
  return bytes;
}

class Rows : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (GetParam() > cpu::detect_isa()) GTEST_SKIP() << "this processor lacks " << name_of(GetParam());
  }
};

TEST_P(Rows, ConvertBits) {
  for (const DType from : kTypes) {
    for (const DType to : kTypes) {
      for (const int n : kLengths) {
        const auto x = values_of(from, n);
        std::vector<std::byte> expected((static_cast<std::size_t>(n) + 4) * size_of(to), kFence);
        std::vector<std::byte> got = expected;
        cpu::kernels_for(Isa::scalar).convert_row(x.data(), from, expected.data(), to, n);
        cpu::kernels_for(GetParam()).convert_row(x.data(), from, got.data(), to, n);
        cpu::with_type(to, [&](auto tag) {
          using To = decltype(tag);
          for (std::size_t i = 0; i < expected.size() / sizeof(To); ++i) {
            To a;
            To b;
            std::memcpy(&a, got.data() + i * sizeof(To), sizeof a);
            std::memcpy(&b, expected.data() + i * sizeof(To), sizeof b);
            if (std::isnan(cpu::to_f32(b))) {
              EXPECT_TRUE(std::isnan(cpu::to_f32(a))) << name_of(from) << " to " << name_of(to) << ", element " << i;
            } else {
              EXPECT_EQ(std::memcmp(&a, &b, sizeof a), 0)
                  << name_of(from) << " to " << name_of(to) << ", " << n << ", element " << i;
            }
          }
        });
        EXPECT_EQ(got.back(), kFence);
      }
    }
  }
}

TEST_P(Rows, AddWeightedBits) {
  for (const DType type : kTypes) {
    for (const int n : kLengths) {
      const auto x = values_of(type, n);
      std::vector<float> expected(static_cast<std::size_t>(n) + 4, 0.3F);
      std::vector<float> got = expected;
      cpu::kernels_for(Isa::scalar).add_weighted_row(x.data(), type, 0.7F, expected.data(), n);
      cpu::kernels_for(GetParam()).add_weighted_row(x.data(), type, 0.7F, got.data(), n);
      for (std::size_t i = 0; i < got.size(); ++i) {
        if (std::isnan(expected[i])) {
          EXPECT_TRUE(std::isnan(got[i]));
        } else {
          EXPECT_EQ(got[i], expected[i]) << name_of(type) << ", " << n << ", element " << i;
        }
      }
      EXPECT_EQ(got.back(), 0.3F);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, Rows, testing::Values(Isa::avx2, Isa::avx512, Isa::avx512_bf16),
                         [](const auto& level) { return std::string(name_of(level.param)); });

}  // namespace
}  // namespace headwater::test
