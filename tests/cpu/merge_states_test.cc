// merge_states: the algebra of M1 and M2, both bases, strides, odd states, refusals that leave the outputs alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/convert.h"
#include "cpu/expect_error.h"
#include "headwater/cpu.h"
#include "reference/element.h"
#include "reference/rng.h"

namespace headwater {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kLn2 = 0.69314718055994530942;

/// Dense states [rows, heads, dim] in any type, and outputs full of NaN.
struct States {
  int heads;
  int dim;
  DType in_type;
  DType out_type;
  std::vector<std::int32_t> indptr;
  std::vector<std::byte> v;
  std::vector<float> lse;
  std::vector<std::byte> v_out;
  std::vector<float> lse_out;
  LseBase base_in = LseBase::two;
  LseBase base_out = LseBase::two;

  States(const std::vector<int>& group_sizes, int heads_, int dim_, DType in, DType out, std::uint64_t seed)
      : heads(heads_), dim(dim_), in_type(in), out_type(out), indptr{0} {
    for (const int n : group_sizes) indptr.push_back(indptr.back() + n);
    const auto rows = static_cast<std::size_t>(indptr.back());
    const auto per_row = static_cast<std::size_t>(heads * dim);
    v.resize(rows * per_row * size_of(in));
    lse.resize(rows * static_cast<std::size_t>(heads));
    v_out.resize(group_sizes.size() * per_row * size_of(out), std::byte{0xFF});
    lse_out.resize(group_sizes.size() * static_cast<std::size_t>(heads), kNan);
    reference::Rng rng(seed);
    for (std::size_t i = 0; i < rows * per_row; ++i) {
      reference::store(in, v.data(), static_cast<std::int64_t>(i), rng.normal());
    }
    for (float& x : lse) x = static_cast<float>(10.0 * rng.normal());
  }

  [[nodiscard]] ConstRowsView in() const { return {v.data(), in_type, std::int64_t{heads} * dim, dim}; }
  [[nodiscard]] ConstLseView lse_in() const { return {lse.data(), heads, 1, base_in}; }
  [[nodiscard]] RowsView out() { return {v_out.data(), out_type, std::int64_t{heads} * dim, dim}; }
  [[nodiscard]] LseView lse_to() { return {lse_out.data(), heads, 1, base_out}; }

  void merge(Executor& executor) { cpu::merge_states(in(), lse_in(), indptr, heads, dim, out(), lse_to(), executor); }
  void merge() {
    SerialExecutor serial;
    merge(serial);
  }

  [[nodiscard]] double v_at(std::size_t row, int h, int d) const {
    return reference::load(in_type, v.data(), (static_cast<std::int64_t>(row) * heads + h) * dim + d);
  }
  [[nodiscard]] double out_at(std::size_t group, int h, int d) const {
    return reference::load(out_type, v_out.data(), (static_cast<std::int64_t>(group) * heads + h) * dim + d);
  }
  [[nodiscard]] float& lse_at(std::size_t row, int h) {
    return lse[row * static_cast<std::size_t>(heads) + static_cast<std::size_t>(h)];
  }
  [[nodiscard]] float lse_out_at(std::size_t group, int h) const {
    return lse_out[group * static_cast<std::size_t>(heads) + static_cast<std::size_t>(h)];
  }

  /// Compares every group with float64. Natural logarithms inside.
  void check(double tolerance) {
    double worst = 0.0;
    for (std::size_t g = 0; g + 1 < indptr.size(); ++g) {
      for (int h = 0; h < heads; ++h) {
        double max = -INFINITY;
        std::vector<std::size_t> rows;
        std::vector<double> ln;
        for (auto r = static_cast<std::size_t>(indptr[g]); r < static_cast<std::size_t>(indptr[g + 1]); ++r) {
          const double x = lse_at(r, h);
          if (std::isinf(x)) continue;
          rows.push_back(r);
          ln.push_back(base_in == LseBase::two ? x * kLn2 : x);
          max = std::max(max, ln.back());
        }
        double sum = 0.0;
        for (const double x : ln) sum += std::exp(x - max);
        for (int d = 0; d < dim; ++d) {
          double expected = 0.0;
          for (std::size_t i = 0; i < rows.size(); ++i) expected += std::exp(ln[i] - max) / sum * v_at(rows[i], h, d);
          worst = std::max(worst, std::abs(expected - out_at(g, h, d)));
          ASSERT_FALSE(std::isnan(out_at(g, h, d))) << "group " << g << " head " << h;
        }
        const double expected_lse =
            rows.empty() ? -INFINITY : (max + std::log(sum)) / (base_out == LseBase::two ? kLn2 : 1.0);
        if (rows.empty()) {
          ASSERT_EQ(lse_out_at(g, h), -kInf);
        } else {
          ASSERT_NEAR(lse_out_at(g, h), expected_lse, 4e-6 * std::max(1.0, std::abs(expected_lse)));
        }
      }
    }
    EXPECT_LT(worst, tolerance);
  }
};

TEST(MergeStates, AgreesWithFloat64ForEveryTypeAndBase) {
  for (const DType in : {DType::f32, DType::f16, DType::bf16}) {
    for (const DType out : {DType::f32, DType::f16, DType::bf16}) {
      for (const LseBase base_in : {LseBase::two, LseBase::natural}) {
        for (const LseBase base_out : {LseBase::two, LseBase::natural}) {
          SCOPED_TRACE(std::string(name_of(in)) + " to " + std::string(name_of(out)));
          States s({3, 0, 1, 2, 17}, 6, 80, in, out, 7);
          s.base_in = base_in;
          s.base_out = base_out;
          s.merge();
          s.check(out == DType::f32 ? 4e-6 : out == DType::f16 ? 2e-3 : 1.7e-2);
        }
      }
    }
  }
}

TEST(MergeStates, AnyHeadDimAndHeadsUpTo128) {
  for (const int heads : {1, 2, 3, 7, 24, 64, 96, 127, 128}) {
    for (const int dim : {1, 5, 64, 128, 192, 512, 576}) {
      States s({2, 3}, heads, dim, DType::f32, DType::f32, 11);
      s.merge();
      s.check(4e-6);
    }
  }
}

TEST(MergeStates, ManyGroupsInParallel) {
  States s(std::vector<int>(97, 4), 8, 128, DType::bf16, DType::f32, 3);
  States serial = s;
  ThreadPool pool(3);
  s.merge(pool);
  serial.merge();
  s.check(4e-6);
  EXPECT_EQ(std::memcmp(s.v_out.data(), serial.v_out.data(), s.v_out.size()), 0);
}

TEST(MergeStates, AGroupOfOneIsCopiedBitForBit) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    States s({1, 1, 1}, 4, 64, type, type, 5);
    s.lse_at(1, 2) = 1e30F;
    s.lse_at(2, 3) = -8e4F;
    reference::store(type, s.v.data(), 3, -0.0);
    s.merge();
    EXPECT_EQ(std::memcmp(s.v_out.data(), s.v.data(), s.v.size()), 0) << name_of(type);
    EXPECT_EQ(std::memcmp(s.lse_out.data(), s.lse.data(), s.lse.size() * sizeof(float)), 0);
  }
}

TEST(MergeStates, AnEmptyGroupIsZeroAndMinusInfinity) {
  States s({0, 2, 0}, 3, 16, DType::f32, DType::f32, 5);
  s.merge();
  for (const std::size_t group : {std::size_t{0}, std::size_t{2}}) {
    for (int h = 0; h < 3; ++h) {
      EXPECT_EQ(s.lse_out_at(group, h), -kInf);
      for (int d = 0; d < 16; ++d) EXPECT_EQ(s.out_at(group, h, d), 0.0);
    }
  }
}

// A state without keys has LSE -inf, or +inf by an old convention, and anything as its values.
TEST(MergeStates, StatesWithoutKeysContributeNothing) {
  for (const float empty : {-kInf, kInf}) {
    States s({3, 2, 1}, 2, 32, DType::f32, DType::f32, 9);
    const auto make_empty = [&](std::size_t row) {
      for (int h = 0; h < 2; ++h) {
        s.lse_at(row, h) = empty;
        for (int d = 0; d < 32; ++d)
          reference::store(DType::f32, s.v.data(), static_cast<std::int64_t>(row) * 64 + h * 32 + d, NAN);
      }
    };
    for (const std::size_t row : {0U, 2U, 3U, 4U, 5U}) make_empty(row);  // group 0 keeps row 1; groups 1 and 2 nothing
    s.merge();
    for (int h = 0; h < 2; ++h) {
      EXPECT_EQ(s.lse_out_at(0, h), s.lse_at(1, h));
      for (int d = 0; d < 32; ++d) EXPECT_EQ(s.out_at(0, h, d), s.v_at(1, h, d));
      for (const std::size_t group : {std::size_t{1}, std::size_t{2}}) {
        EXPECT_EQ(s.lse_out_at(group, h), -kInf);
        for (int d = 0; d < 32; ++d) EXPECT_EQ(s.out_at(group, h, d), 0.0);
      }
    }
  }
}

TEST(MergeStates, HugeNegativeLseIsNotASentinel) {
  States s({2, 2}, 1, 8, DType::f32, DType::f32, 9);
  s.lse_at(0, 0) = -1e6F;
  s.lse_at(1, 0) = -1e6F;
  s.lse_at(2, 0) = -3e38F;
  s.lse_at(3, 0) = -kInf;
  s.merge();
  EXPECT_EQ(s.lse_out_at(0, 0), -1e6F + 1.0F);
  EXPECT_EQ(s.lse_out_at(1, 0), -3e38F);
  for (int d = 0; d < 8; ++d) {
    EXPECT_NEAR(s.out_at(0, 0, d), (s.v_at(0, 0, d) + s.v_at(1, 0, d)) / 2, 1e-6);
    EXPECT_EQ(s.out_at(1, 0, d), s.v_at(2, 0, d));
  }
}

TEST(MergeStates, NanIsNotHidden) {
  States s({2, 2}, 1, 4, DType::f32, DType::f32, 9);
  s.lse_at(1, 0) = kNan;
  s.merge();
  EXPECT_TRUE(std::isnan(s.lse_out_at(0, 0)));
  EXPECT_TRUE(std::isnan(s.out_at(0, 0, 0)));
  EXPECT_FALSE(std::isnan(s.lse_out_at(1, 0)));
}

// The LSE may be [heads, rows], as other libraries hand it over; the rows of V may be padded.
TEST(MergeStates, HonoursStrides) {
  States s({2, 1, 3}, 5, 24, DType::f32, DType::f32, 21);
  States strided = s;
  const std::int64_t rows = s.indptr.back();
  std::vector<float> lse_in(s.lse.size());
  std::vector<float> lse_out(s.lse_out.size(), kNan);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int h = 0; h < 5; ++h)
      lse_in[static_cast<std::size_t>(h * rows + r)] = s.lse_at(static_cast<std::size_t>(r), h);
  }
  const std::int64_t head_stride = 29;
  const std::int64_t row_stride = 5 * head_stride + 3;
  std::vector<float> v(static_cast<std::size_t>(rows * row_stride), kNan);
  std::vector<float> out(static_cast<std::size_t>(3 * row_stride), 77.0F);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int h = 0; h < 5; ++h) {
      for (int d = 0; d < 24; ++d) {
        v[static_cast<std::size_t>(r * row_stride + h * head_stride + d)] =
            static_cast<float>(s.v_at(static_cast<std::size_t>(r), h, d));
      }
    }
  }
  SerialExecutor serial;
  cpu::merge_states({v.data(), DType::f32, row_stride, head_stride}, {lse_in.data(), 1, rows}, s.indptr, 5, 24,
                    {out.data(), DType::f32, row_stride, head_stride}, {lse_out.data(), 1, 3}, serial);
  s.merge();
  std::size_t untouched = 0;
  for (std::int64_t g = 0; g < 3; ++g) {
    for (int h = 0; h < 5; ++h) {
      EXPECT_EQ(lse_out[static_cast<std::size_t>(h * 3 + g)], s.lse_out_at(static_cast<std::size_t>(g), h));
      for (int d = 0; d < 24; ++d) {
        EXPECT_EQ(out[static_cast<std::size_t>(g * row_stride + h * head_stride + d)],
                  s.out_at(static_cast<std::size_t>(g), h, d));
      }
    }
  }
  for (const float x : out) untouched += x == 77.0F ? 1 : 0;
  EXPECT_EQ(untouched, out.size() - 3 * 5 * 24);
}

// M3, second negative control: a natural LSE handed over as base 2 is visibly wrong, so the base matters in these
// tests.
TEST(MergeStates, TheWrongBaseIsVisiblyWrong) {
  States s({2, 2, 2}, 4, 32, DType::f32, DType::f32, 2);
  for (float& x : s.lse) x /= 10.0F;
  States wrong = s;
  s.base_in = LseBase::natural;
  s.merge();
  s.check(4e-6);
  wrong.merge();
  double error = 0.0;
  for (std::size_t g = 0; g < 3; ++g) {
    for (int h = 0; h < 4; ++h) {
      for (int d = 0; d < 32; ++d) error = std::max(error, std::abs(s.out_at(g, h, d) - wrong.out_at(g, h, d)));
    }
  }
  EXPECT_GT(error, 1e-3);
}

TEST(MergeStates, LseOutMayBeAbsent) {
  States s({2, 1, 0}, 2, 16, DType::f32, DType::f32, 2);
  SerialExecutor serial;
  cpu::merge_states(s.in(), s.lse_in(), s.indptr, 2, 16, s.out(), {}, serial);
  for (const float x : s.lse_out) EXPECT_TRUE(std::isnan(x));
  s.merge();
  s.check(4e-6);
}

TEST(MergeStates, NoGroupsIsNothing) {
  const std::vector<std::int32_t> indptr{0};
  SerialExecutor serial;
  cpu::merge_states({nullptr, DType::f32, 0, 0}, {}, indptr, 4, 64, {nullptr, DType::f32, 0, 0}, {}, serial);
}

class MergeRefusals : public testing::Test {
 protected:
  States s_{{2, 1}, 4, 32, DType::f32, DType::f32, 1};
  ConstRowsView v_in_ = s_.in();
  ConstLseView lse_in_ = s_.lse_in();
  RowsView v_out_ = s_.out();
  LseView lse_out_ = s_.lse_to();
  int heads_ = 4;
  int dim_ = 32;

  void refused(const std::string& message) {
    SerialExecutor serial;
    expect_error(ErrorCode::invalid_argument, message,
                 [&] { cpu::merge_states(v_in_, lse_in_, s_.indptr, heads_, dim_, v_out_, lse_out_, serial); });
    for (const float x : s_.lse_out) EXPECT_TRUE(std::isnan(x)) << "written before the check";
    for (const std::byte b : s_.v_out) EXPECT_EQ(b, std::byte{0xFF}) << "written before the check";
  }
};

TEST_F(MergeRefusals, NumHeads) {
  heads_ = 0;
  refused("num_heads = 0, expected at least 1");
}
TEST_F(MergeRefusals, HeadDim) {
  dim_ = -3;
  refused("head_dim = -3, expected at least 1");
}
TEST_F(MergeRefusals, IndptrEmpty) {
  s_.indptr.clear();
  refused("o_indptr.size() = 0, expected at least 1 (groups + 1)");
}
TEST_F(MergeRefusals, IndptrStart) {
  s_.indptr[0] = 1;
  refused("o_indptr[0] = 1, expected 0");
}
TEST_F(MergeRefusals, IndptrDecreases) {
  s_.indptr[1] = 4;
  refused("o_indptr[2] = 3 is less than o_indptr[1] = 4");
}
TEST_F(MergeRefusals, InputType) {
  v_in_.dtype = DType::f8e4m3;
  refused("v_in.dtype = f8e4m3, expected f32, f16 or bf16");
}
TEST_F(MergeRefusals, OutputType) {
  v_out_.dtype = DType::f8e4m3;
  refused("v_out.dtype = f8e4m3, expected f32, f16 or bf16");
}
TEST_F(MergeRefusals, NullInput) {
  v_in_.data = nullptr;
  refused("v_in.data = nullptr, expected a tensor");
}
TEST_F(MergeRefusals, NullLse) {
  lse_in_.data = nullptr;
  refused("lse_in.data = nullptr, expected a tensor");
}
TEST_F(MergeRefusals, NullOutput) {
  v_out_.data = nullptr;
  refused("v_out.data = nullptr, expected a tensor");
}
TEST_F(MergeRefusals, Misaligned) {
  v_in_.data = static_cast<const std::byte*>(v_in_.data) + 2;
  refused("v_in.data = an address 2 bytes off, expected alignment to 4 bytes (f32)");
}
TEST_F(MergeRefusals, OverlappingHeads) {
  v_out_.head_stride = 31;
  refused("v_out.head_stride = 31, expected at least 32 (elements that the inner dimensions span)");
}
TEST_F(MergeRefusals, OverlappingRows) {
  v_in_.row_stride = 127;
  refused("v_in.row_stride = 127, expected at least 128 (elements that the inner dimensions span)");
}
TEST_F(MergeRefusals, OverlappingLse) {
  lse_out_.row_stride = 3;
  refused("lse_out.row_stride = 3, expected at least 4 (elements that the inner dimensions span)");
}
TEST_F(MergeRefusals, StrideBeyondTheAddressSpace) {
  v_in_.row_stride = std::int64_t{1} << 61;
  refused("v_in.row_stride = 2305843009213693952, expected at most 576460752303423424 (64-bit offsets)");
}
TEST_F(MergeRefusals, Base) {
  lse_in_.base = static_cast<LseBase>(9);
  refused("lse_in.base = 9, expected two or natural");
}

// Two states of each row from tensors of their own: the same bits as groups of two in one tensor, in place too.
TEST(MergeState, IsMergeStatesOfPairs) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    const int rows = 37;
    States pairs(std::vector<int>(rows, 2), 3, 48, type, type, 11);
    pairs.lse_at(4, 1) = -kInf;
    pairs.lse_at(5, 1) = -kInf;
    pairs.lse_at(7, 0) = kInf;
    pairs.merge();
    // Rows 2i and 2i + 1 as strided tensors a and b.
    const std::int64_t row = std::int64_t{3} * 48;
    const auto a = ConstRowsView{pairs.v.data(), type, 2 * row, 48};
    const auto b = ConstRowsView{pairs.v.data() + static_cast<std::size_t>(row) * size_of(type), type, 2 * row, 48};
    const ConstLseView lse_a{pairs.lse.data(), 6, 1, LseBase::two};
    const ConstLseView lse_b{pairs.lse.data() + 3, 6, 1, LseBase::two};
    std::vector<std::byte> v(pairs.v_out.size(), std::byte{0xFF});
    std::vector<float> lse(pairs.lse_out.size(), kNan);
    ThreadPool pool(2);
    cpu::merge_state(a, lse_a, b, lse_b, rows, 3, 48, {v.data(), type, row, 48}, {lse.data(), 3, 1, LseBase::two},
                     pool);
    EXPECT_EQ(v, pairs.v_out);
    EXPECT_EQ(std::memcmp(lse.data(), pairs.lse_out.data(), lse.size() * sizeof(float)), 0);

    cpu::merge_state(a, lse_a, b, lse_b, rows, 3, 48, {pairs.v.data(), type, 2 * row, 48},
                     {pairs.lse.data(), 6, 1, LseBase::two}, pool);
    for (std::size_t i = 0; i < static_cast<std::size_t>(rows); ++i) {
      const auto bytes = static_cast<std::size_t>(row) * size_of(type);
      EXPECT_EQ(std::memcmp(pairs.v.data() + 2 * i * bytes, v.data() + i * bytes, bytes), 0);
      EXPECT_EQ(std::memcmp(&pairs.lse[6 * i], &lse[3 * i], 3 * sizeof(float)), 0);
    }
  }
}

TEST(MergeState, RefusesByName) {
  States s({1, 1}, 2, 16, DType::f32, DType::f32, 1);
  SerialExecutor serial;
  const auto call = [&](ConstRowsView b, std::int64_t rows) {
    cpu::merge_state(s.in(), s.lse_in(), b, s.lse_in(), rows, 2, 16, s.out(), s.lse_to(), serial);
  };
  expect_error(ErrorCode::invalid_argument, "v_b.data = nullptr, expected a tensor", [&] {
    call({nullptr, DType::f32, 32, 16}, 2);
  });
  expect_error(ErrorCode::invalid_argument,
               "v_b.row_stride = 31, expected at least 32 (elements that the inner dimensions span)", [&] {
                 call({s.v.data(), DType::f32, 31, 16}, 2);
               });
  expect_error(ErrorCode::invalid_argument, "num_rows = -1, expected at least 0", [&] { call(s.in(), -1); });
  call(s.in(), 0);
  EXPECT_TRUE(std::isnan(s.lse_out[0]));
}

}  // namespace
}  // namespace headwater
