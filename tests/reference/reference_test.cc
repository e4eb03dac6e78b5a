// The reference itself, checked against things known by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "reference/attention.h"
#include "reference/element.h"
#include "reference/memory.h"
#include "reference/pool.h"
#include "reference/tables.h"
#include "reference/tolerance.h"

namespace headwater::reference {
namespace {

TEST(Element, KnownBitPatterns) {
  const auto bits16 = [](DType type, double value) {
    std::uint16_t bits = 0;
    store(type, &bits, 0, value);
    return bits;
  };
  EXPECT_EQ(bits16(DType::f16, 1.0), 0x3C00);
  EXPECT_EQ(bits16(DType::f16, -65504.0), 0xFBFF);
  EXPECT_EQ(bits16(DType::f16, 65520.0), 0x7C00);               // rounds to infinity
  EXPECT_EQ(bits16(DType::f16, std::ldexp(1.0, -24)), 0x0001);  // smallest subnormal
  EXPECT_EQ(bits16(DType::f16, std::ldexp(1.0, -25)), 0x0000);  // tie to even
  EXPECT_EQ(bits16(DType::bf16, 1.0), 0x3F80);
  EXPECT_EQ(bits16(DType::bf16, 1.0 + std::ldexp(1.0, -8)), 0x3F80);        // tie to even
  EXPECT_EQ(bits16(DType::bf16, 1.0 + 3.0 * std::ldexp(1.0, -8)), 0x3F82);  // tie to even, upwards
  unsigned char bits8 = 0;
  store(DType::f8e4m3, &bits8, 0, 448.0);
  EXPECT_EQ(bits8, 0x7E);
  store(DType::f8e4m3, &bits8, 0, -1e9);
  EXPECT_EQ(bits8, 0xFE);
  store(DType::f8e4m3, &bits8, 0, std::ldexp(1.0, -9));
  EXPECT_EQ(bits8, 0x01);
}

TEST(Element, EveryPatternSurvivesARoundTrip) {
  for (const DType type : {DType::f16, DType::bf16}) {
    for (int i = 0; i < 65536; ++i) {
      const auto bits = static_cast<std::uint16_t>(i);
      const double value = load(type, &bits, 0);
      std::uint16_t again = 0;
      store(type, &again, 0, value);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(load(type, &again, 0)));
      } else {
        ASSERT_EQ(again, bits) << name_of(type);
      }
    }
  }
  for (int i = 0; i < 256; ++i) {
    const auto bits = static_cast<unsigned char>(i);
    unsigned char again = 0;
    store(DType::f8e4m3, &again, 0, load(DType::f8e4m3, &bits, 0));
    EXPECT_EQ(again, bits);
  }
}

TEST(Element, PoisonIsNotANumberInEveryType) {
  const FencedBuffer buffer(16);
  for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3}) {
    EXPECT_TRUE(std::isnan(load(type, buffer.data(), 1))) << name_of(type);
  }
}

TEST(Memory, FenceNoticesAStrayByte) {
  FencedBuffer buffer(100, 64);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 64, 0U);
  std::memset(buffer.data(), 0, buffer.size());
  EXPECT_TRUE(buffer.intact());
  static_cast<std::byte*>(buffer.data())[100] = std::byte{0};
  EXPECT_FALSE(buffer.intact());
}

TEST(MemoryDeathTest, BytePastTheFenceIsFatal) {
  const FencedBuffer buffer(4096, 64);
  EXPECT_DEATH(static_cast<volatile unsigned char*>(buffer.data())[4096] = 0, "");
}

TEST(Attention, TwoKeysByHand) {
  // One head of size 2; keys (0, 0) and (1, 0), q = (ln 3, 0), scale 1: weights 1/4 and 3/4.
  float k[] = {0, 0, 1, 0};
  float v[] = {4, 0, 8, 4};
  float q[] = {std::log(3.0F), 0};
  PageTables tables;
  tables.page_size = 2;
  tables.add({0}, 2);
  KvCache cache{{k, 4, 2, 2}, {v, 4, 2, 2}, DType::f32, 1, 2};
  Problem problem;
  problem.shape = {1, 1, 2, 2, DType::f32, DType::f32, DType::f32};
  problem.options.sm_scale = 1.0F;
  problem.batch = tables.batch();
  problem.kv = {&cache, 1};
  problem.q = {q, DType::f32, 2, 2};
  const Result plain = attend(problem);
  EXPECT_NEAR(plain.o[0], 7.0, 1e-6);
  EXPECT_NEAR(plain.o[1], 3.0, 1e-6);
  EXPECT_NEAR(plain.lse[0], std::log(4.0), 1e-6);

  const float sink = std::log(4.0F);  // as much again in the denominator
  problem.sinks = &sink;
  problem.options.sinks = true;
  const Result with_sink = attend(problem);
  EXPECT_NEAR(with_sink.o[0], 3.5, 1e-6);
  EXPECT_NEAR(with_sink.lse[0], std::log(8.0), 1e-6);
}

TEST(Attention, NoVisibleKey) {
  PageTables tables;
  tables.page_size = 2;
  tables.add({}, 0, 1);
  float q[] = {1, 1};
  KvCache cache{{q, 4, 2, 2}, {q, 4, 2, 2}, DType::f32, 1, 2};
  Problem problem;
  problem.shape = {1, 1, 2, 2, DType::f32, DType::f32, DType::f32};
  problem.batch = tables.batch();
  problem.kv = {&cache, 1};
  problem.q = {q, DType::f32, 2, 2};
  const Result plain = attend(problem);
  EXPECT_EQ(plain.o[0], 0.0);
  EXPECT_EQ(plain.lse[0], -std::numeric_limits<double>::infinity());
  const float sink = 1.5F;
  problem.sinks = &sink;
  problem.options.sinks = true;
  EXPECT_EQ(attend(problem).o[1], 0.0);
  EXPECT_EQ(attend(problem).lse[0], 1.5);
}

TEST(Attention, Visibility) {
  PlanOptions options;
  EXPECT_TRUE(sees(options, 5, 5));
  EXPECT_FALSE(sees(options, 5, 6));
  options.window_left = 2;
  EXPECT_TRUE(sees(options, 5, 3));
  EXPECT_FALSE(sees(options, 5, 2));
  options.num_sink_tokens = 2;
  EXPECT_TRUE(sees(options, 5, 1));
  EXPECT_FALSE(sees(options, 5, 2));
  options = {};
  options.local_chunk = 4;
  EXPECT_FALSE(sees(options, 5, 3));
  EXPECT_TRUE(sees(options, 5, 4));
  options.causal = false;
  EXPECT_TRUE(sees(options, 5, 7));
  EXPECT_FALSE(sees(options, 5, 8));
}

TEST(Tables, PositionsWithWindowStartAndOffset) {
  PageTables tables;
  tables.page_size = 4;
  tables.add({7, 3}, 2, 2, 5, 3);
  const Rows rows = rows_of(tables.batch());
  ASSERT_EQ(rows.rows.size(), 2U);
  EXPECT_EQ(rows.rows[0].position, 6 * 4 + 2 - 2);
  ASSERT_EQ(rows.paths[0].size(), 3U);
  EXPECT_EQ(rows.paths[0][0].position, 23);
  EXPECT_EQ(rows.paths[0][0].page, 7);
  EXPECT_EQ(rows.paths[0][0].offset, 3);
  EXPECT_EQ(rows.paths[0][2].position, 25);
}

TEST(Tables, LevelsAddUp) {
  LevelTables tables;
  tables.levels.resize(2);
  tables.levels[0] = {4, 1, {0, 2}, {0, 1}, {0}, {3}};
  tables.levels[1] = {4, 2, {0, 1, 2}, {0, 1, 2}, {0, 1}, {2, 4}};
  const Rows rows = rows_of(tables.batch());
  ASSERT_EQ(rows.rows.size(), 2U);
  EXPECT_EQ(rows.rows[0].position, 4);
  EXPECT_EQ(rows.rows[1].position, 6);
  EXPECT_EQ(rows.paths[1][3].view, 1);
  EXPECT_EQ(rows.paths[1][3].page, 1);
  EXPECT_EQ(rows.paths[1][3].position, 3);
}

TEST(Tables, ForestsShareInEveryWay) {
  // The generator is a proof's raw material: make sure that what it promises turns up.
  int shared_prefix = 0;
  int shared_partial = 0;
  int duplicates = 0;
  int rejoined = 0;
  int empty = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(seed);
    const PageTables t = random_forest(rng, {.page_size = 4, .windows = true});
    const auto entry = [&](int b, int i) {
      return t.kv_indices[static_cast<std::size_t>(t.kv_indptr[static_cast<std::size_t>(b)] + i)];
    };
    const auto count = [&](int b) {
      return t.kv_indptr[static_cast<std::size_t>(b) + 1] - t.kv_indptr[static_cast<std::size_t>(b)];
    };
    for (int b = 0; b < t.num_requests(); ++b) {
      if (count(b) == 0) ++empty;
      for (int a = 0; a < b; ++a) {
        const int n = std::min(count(a), count(b));
        if (n == 0) continue;
        int common = 0;
        while (common < n && entry(a, common) == entry(b, common)) ++common;
        if (common > 0) ++shared_prefix;
        if (common == n && count(a) == count(b)) ++duplicates;
        if (common == n && t.last_page_len[static_cast<std::size_t>(a)] != t.last_page_len[static_cast<std::size_t>(b)])
          ++shared_partial;
        for (int i = common + 1; i < n; ++i) {
          if (entry(a, i) == entry(b, i)) ++rejoined;
        }
      }
    }
  }
  EXPECT_GT(shared_prefix, 300);
  EXPECT_GT(shared_partial, 50);
  EXPECT_GT(duplicates, 50);
  EXPECT_GT(rejoined, 50);
  EXPECT_GT(empty, 50);
}

TEST(Pools, LayoutsAddressDistinctElements) {
  const AttentionShape shape{4, 2, 16, 32, DType::f32, DType::f32, DType::f32};
  for (const Layout layout : kLayouts) {
    const Pool pool(shape, 3, 5, layout, 7);
    const KvCache& cache = pool.cache();
    std::set<const float*> seen;
    for (const bool value : {false, true}) {
      const PagedTensor& t = value ? cache.v : cache.k;
      for (int p = 0; p < 3; ++p) {
        for (int i = 0; i < 5; ++i) {
          for (int h = 0; h < 2; ++h) {
            for (int d = 0; d < (value ? 32 : 16); ++d) {
              seen.insert(static_cast<const float*>(t.data) + p * t.page_stride + i * t.token_stride +
                          h * t.head_stride + d);
            }
          }
        }
      }
    }
    EXPECT_EQ(seen.size(), 3U * 5U * 2U * 48U) << name_of(layout);
  }
}

TEST(Tolerances, Classes) {
  AttentionShape shape;
  shape.q_dtype = shape.kv_dtype = shape.out_dtype = DType::f32;
  EXPECT_EQ(tolerance_of(shape).o, 2e-5);
  shape.kv_dtype = DType::bf16;
  EXPECT_EQ(tolerance_of(shape).o, 5e-3);
  shape.kv_dtype = DType::f8e4m3;
  EXPECT_EQ(tolerance_of(shape).o, 2e-5);
  shape.q_dtype = DType::f16;
  EXPECT_EQ(tolerance_of(shape).o, 5e-3);
  shape.out_dtype = DType::bf16;
  EXPECT_EQ(tolerance_of(shape).o, 2e-2);
}

TEST(Tolerances, WrongValuesAreNoticed) {
  const AttentionShape shape{1, 1, 16, 2, DType::f32, DType::f32, DType::f32};
  Result expected;
  expected.num_rows = 1;
  expected.num_heads = 1;
  expected.head_dim = 2;
  expected.o = {1.0, -2.0};
  expected.lse = {3.0};
  float out[] = {1.0F, -2.0F};
  float lse[] = {3.0F};
  const auto complaint = [&] {
    return compare(shape, expected, nullptr, {out, DType::f32, 2, 2}, {lse, 1, 1, LseBase::natural}).complaint;
  };
  EXPECT_EQ(complaint(), "");
  out[0] = 1.0001F;
  EXPECT_NE(complaint().find("out[row 0, head 0, d 0]"), std::string::npos) << complaint();
  out[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_NE(complaint().find("nan"), std::string::npos) << complaint();
  out[0] = 1.0F;
  lse[0] = 3.001F;
  EXPECT_NE(complaint().find("lse[row 0, head 0]"), std::string::npos) << complaint();
  lse[0] = -std::numeric_limits<float>::infinity();
  EXPECT_NE(complaint().find("lse[row 0, head 0]"), std::string::npos) << complaint();
}

}  // namespace
}  // namespace headwater::reference
