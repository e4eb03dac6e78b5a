// merge_states and merge_state on the GPU against double precision and the CPU's: types, bases, strides, group sizes,
// states without keys, in place. Refusals, in the CPU's words, need no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/expect_error.h"
#include "cuda/device_runner.h"
#include "headwater/cuda.h"
#include "reference/element.h"
#include "reference/rng.h"

namespace headwater::cuda_test {
namespace {

using reference::Rng;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::array kTypes{DType::f32, DType::f16, DType::bf16};
constexpr std::array kBases{LseBase::two, LseBase::natural};

void ok(cudaError_t status) {
  ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
}

/// States or results [rows, heads, dim] on the host and between fences on the device.
struct States {
  std::int64_t rows;
  int heads;
  int dim;
  DType type;
  std::int64_t head_stride;
  std::vector<std::byte> v;
  std::vector<float> lse;  ///< [heads, rows] as vLLM has it where `head_major`
  std::int64_t lse_row_stride;
  std::int64_t lse_head_stride;
  LseBase base;
  DeviceMemory device_v;
  DeviceMemory device_lse;

  States(std::int64_t rows_, int heads_, int dim_, DType type_, LseBase base_, int gap, bool head_major)
      : rows(rows_),
        heads(heads_),
        dim(dim_),
        type(type_),
        head_stride(dim_ + gap),
        v(static_cast<std::size_t>(rows_ * heads_ * (dim_ + gap)) * size_of(type_), std::byte{0xff}),
        lse(static_cast<std::size_t>(rows_ * heads_), std::nanf("")),
        lse_row_stride(head_major ? 1 : heads_),
        lse_head_stride(head_major ? rows_ : 1),
        base(base_),
        device_v(v.size()),
        device_lse(lse.size() * sizeof(float)) {}

  void fill(Rng& rng) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (int h = 0; h < heads; ++h) {
        for (int d = 0; d < dim; ++d) reference::store(type, v.data(), at(r, h, d), rng.normal());
        lse_at(r, h) = static_cast<float>(10.0 * rng.normal());
      }
    }
  }
  void put() {
    device_v.put(v.data(), v.size());
    device_lse.put(lse.data(), lse.size() * sizeof(float));
  }
  void get() {
    device_v.get(v.data(), v.size());
    device_lse.get(lse.data(), lse.size() * sizeof(float));
  }
  [[nodiscard]] bool intact() const { return device_v.intact() && device_lse.intact(); }

  [[nodiscard]] std::int64_t at(std::int64_t r, int h, int d) const { return (r * heads + h) * head_stride + d; }
  float& lse_at(std::int64_t r, int h) {
    return lse[static_cast<std::size_t>(r * lse_row_stride + h * lse_head_stride)];
  }
  [[nodiscard]] double value(std::int64_t r, int h, int d) const {
    return reference::load(type, v.data(), at(r, h, d));
  }
  /// In base 2; +inf means none.
  double lse2(std::int64_t r, int h) {
    const double x = lse_at(r, h);
    return x == kInf ? -kInf : base == LseBase::two ? x : x / std::log(2.0);
  }

  [[nodiscard]] ConstRowsView in() const { return {device_v.data(), type, heads * head_stride, head_stride}; }
  [[nodiscard]] ConstLseView lse_in() const {
    return {reinterpret_cast<const float*>(device_lse.data()), lse_row_stride, lse_head_stride, base};
  }
  [[nodiscard]] RowsView out() const { return {device_v.data(), type, heads * head_stride, head_stride}; }
  [[nodiscard]] LseView lse_out() const {
    return {reinterpret_cast<float*>(device_lse.data()), lse_row_stride, lse_head_stride, base};
  }
};

/// Holds group `j` of `out`, merged from rows given as (states, row), against double precision.
void expect_merged(const std::vector<std::pair<States*, std::int64_t>>& from, States& out, std::int64_t j) {
  for (int h = 0; h < out.heads; ++h) {
    double max = -kInf;
    for (const auto& [states, row] : from) max = std::max(max, states->lse2(row, h));
    double sum = 0;
    for (const auto& [states, row] : from) sum += max == -kInf ? 0.0 : std::exp2(states->lse2(row, h) - max);
    double largest = 0;
    double worst = 0;
    for (int d = 0; d < out.dim; ++d) {
      double o = 0;
      for (const auto& [states, row] : from) {
        const double w = max == -kInf ? 0.0 : std::exp2(states->lse2(row, h) - max);
        if (w > 0) o += w / sum * states->value(row, h, d);
      }
      largest = std::max(largest, std::abs(o));
      const double error = std::abs(out.value(j, h, d) - o);
      worst = std::isnan(error) ? kInf : std::max(worst, error);
    }
    ASSERT_LE(worst, (2e-5 + reference::epsilon_of(out.type)) * std::max(largest, 1e-30))
        << "group " << j << " head " << h;
    if (sum == 0) {
      ASSERT_EQ(out.lse_at(j, h), -kInf);
    } else {
      ASSERT_NEAR(out.lse2(j, h), max + std::log2(sum), 2e-5 * std::max(1.0, std::abs(max)));
    }
  }
}

TEST(CudaMergeStates, TypesBasesStridesAndGroups) {
  HEADWATER_NEEDS_GPU();
  Rng rng(1);
  // An empty group, single states, and more states than a warp has lanes, whose weights are computed in turns.
  const std::vector<std::int32_t> indptr{0, 0, 1, 3, 10, 42, 142, 142, 143};
  const auto groups = static_cast<std::int64_t>(indptr.size()) - 1;
  DeviceMemory device_indptr(indptr.size() * sizeof(std::int32_t));
  device_indptr.put(indptr.data(), indptr.size() * sizeof(std::int32_t));
  for (const DType in : kTypes) {
    for (const DType out : kTypes) {
      for (const LseBase base_in : kBases) {
        for (const LseBase base_out : kBases) {
          for (const int dim : {64, 128, 200, 576, 7}) {
            const int gap = dim == 200 ? 3 : 0;
            States from(indptr.back(), 3, dim, in, base_in, gap, dim == 128);
            States to(groups, 3, dim, out, base_out, gap, dim == 128);
            from.fill(rng);
            for (int h = 0; h < 2; ++h) {  // states without keys, whose values may be anything
              for (const std::int64_t row : {2, 5, 42, 50, 142}) {
                from.lse_at(row, h) = row % 2 == 0 ? -kInf : kInf;
                std::memset(from.v.data() + static_cast<std::size_t>(from.at(row, h, 0)) * size_of(in), 0xff,
                            static_cast<std::size_t>(dim) * size_of(in));
              }
            }
            from.put();
            cuda::merge_states(from.in(), from.lse_in(), from.rows,
                               reinterpret_cast<const std::int32_t*>(device_indptr.data()), groups, 3, dim, to.out(),
                               to.lse_out(), nullptr);
            ok(cudaDeviceSynchronize());
            to.get();
            ASSERT_TRUE(to.intact());
            for (std::int64_t j = 0; j < groups; ++j) {
              std::vector<std::pair<States*, std::int64_t>> rows;
              for (std::int32_t i = indptr[static_cast<std::size_t>(j)]; i < indptr[static_cast<std::size_t>(j) + 1];
                   ++i) {
                rows.emplace_back(&from, i);
              }
              expect_merged(rows, to, j);
              if (HasFatalFailure()) {
                FAIL() << name_of(in) << " to " << name_of(out) << ", head size " << dim;
              }
            }
            // A single state with keys: the same bits.
            if (in == out) {
              ASSERT_EQ(std::memcmp(to.v.data() + to.at(1, 0, 0) * static_cast<std::int64_t>(size_of(out)),
                                    from.v.data() + from.at(0, 0, 0) * static_cast<std::int64_t>(size_of(in)),
                                    static_cast<std::size_t>(dim) * size_of(in)),
                        0);
            }
            if (base_in == base_out) {
              ASSERT_EQ(to.lse_at(1, 0), from.lse_at(0, 0));
            }
          }
        }
      }
    }
  }
}

TEST(CudaMergeStates, RowsThatDoNotExistAreNotRead) {
  HEADWATER_NEEDS_GPU();
  Rng rng(2);
  const std::vector<std::int32_t> indptr{-5, 1, 1'000'000, 3, 2};
  DeviceMemory device_indptr(indptr.size() * sizeof(std::int32_t));
  device_indptr.put(indptr.data(), indptr.size() * sizeof(std::int32_t));
  States from(4, 2, 64, DType::f32, LseBase::two, 0, false);
  States to(4, 2, 64, DType::f32, LseBase::two, 0, false);
  from.fill(rng);
  from.put();
  cuda::merge_states(from.in(), from.lse_in(), 4, reinterpret_cast<const std::int32_t*>(device_indptr.data()), 4, 2, 64,
                     to.out(), to.lse_out(), nullptr);
  ok(cudaDeviceSynchronize());
  to.get();
  EXPECT_TRUE(to.intact());
  expect_merged({{&from, 0}}, to, 0);
  expect_merged({{&from, 1}, {&from, 2}, {&from, 3}}, to, 1);
  expect_merged({}, to, 2);
  expect_merged({}, to, 3);
}

TEST(CudaMergeState, PairsAlsoInPlace) {
  HEADWATER_NEEDS_GPU();
  Rng rng(3);
  for (const DType type : kTypes) {
    for (const LseBase base : kBases) {
      for (const int dim : {64, 128, 250}) {
        for (const int target : {0, 1, 2}) {  // a new place, a, b
          States a(37, 4, dim, type, base, 0, false);
          States b(37, 4, dim, type, base, 0, true);
          States fresh(37, 4, dim, type, base, 0, false);
          a.fill(rng);
          b.fill(rng);
          a.lse_at(3, 1) = b.lse_at(3, 1) = -kInf;
          a.lse_at(4, 0) = kInf;
          b.lse_at(5, 0) = -kInf;
          a.put();
          b.put();
          States& to = target == 0 ? fresh : target == 1 ? a : b;
          cuda::merge_state(a.in(), a.lse_in(), b.in(), b.lse_in(), 37, 4, dim, to.out(), to.lse_out(), nullptr);
          ok(cudaDeviceSynchronize());
          States result(37, 4, dim, type, base, 0, target == 2);  // a and b keep what they were given
          to.device_v.get(result.v.data(), result.v.size());
          to.device_lse.get(result.lse.data(), result.lse.size() * sizeof(float));
          ASSERT_TRUE(a.intact() && b.intact() && fresh.intact());
          for (std::int64_t row = 0; row < 37; ++row) {
            expect_merged({{&a, row}, {&b, row}}, result, row);
            if (HasFatalFailure()) FAIL() << name_of(type) << ", " << dim << ", target " << target;
          }
        }
      }
    }
  }
}

TEST(CudaMergeStates, WithoutLse) {
  HEADWATER_NEEDS_GPU();
  Rng rng(4);
  States a(5, 2, 64, DType::f16, LseBase::natural, 0, false);
  States b(5, 2, 64, DType::f16, LseBase::two, 0, false);
  States to(5, 2, 64, DType::f32, LseBase::two, 0, false);
  States with(5, 2, 64, DType::f32, LseBase::two, 0, false);
  for (States* states : {&a, &b}) {
    states->fill(rng);
    states->put();
  }
  cuda::merge_state(a.in(), a.lse_in(), b.in(), b.lse_in(), 5, 2, 64, to.out(), {}, nullptr);
  cuda::merge_state(a.in(), a.lse_in(), b.in(), b.lse_in(), 5, 2, 64, with.out(), with.lse_out(), nullptr);
  ok(cudaDeviceSynchronize());
  to.get();
  with.get();
  EXPECT_EQ(to.v, with.v);
  for (const float x : to.lse) EXPECT_TRUE(std::isnan(x));
  for (std::int64_t row = 0; row < 5; ++row) expect_merged({{&a, row}, {&b, row}}, with, row);
}

TEST(CudaMergeStates, NothingToDoLaunchesNothing) {
  EXPECT_NO_THROW(
      cuda::merge_states({nullptr, DType::f16}, {}, 0, nullptr, 0, 2, 64, {nullptr, DType::f16}, {}, nullptr));
  EXPECT_NO_THROW(cuda::merge_state({nullptr, DType::f16}, {}, {nullptr, DType::f16}, {}, 0, 2, 64,
                                    {nullptr, DType::f16}, {}, nullptr));
}

/// Refused before anything reaches a device: host memory stands for its memory.
class CudaMergeRefusals : public testing::Test {
 protected:
  std::vector<float> values_ = std::vector<float>(std::size_t{6} * 2 * 64);
  ConstRowsView v_in_{values_.data(), DType::f32, 128, 64};
  ConstLseView lse_in_{values_.data(), 2, 1};
  RowsView v_out_{values_.data(), DType::f32, 128, 64};
  LseView lse_out_{values_.data(), 2, 1};
  std::vector<std::int32_t> indptr_{0, 2, 4};
  const std::int32_t* indptr_at_ = indptr_.data();
  std::int64_t num_states_ = 4;
  std::int64_t num_groups_ = 2;
  int heads_ = 2;

  void refused(const std::string& message) {
    expect_error(ErrorCode::invalid_argument, message, [&] {
      cuda::merge_states(v_in_, lse_in_, num_states_, indptr_at_, num_groups_, heads_, 64, v_out_, lse_out_, nullptr);
    });
  }
};

TEST_F(CudaMergeRefusals, InTheWordsOfTheCpu) {
  heads_ = 0;
  refused("num_heads = 0, expected at least 1");
  heads_ = 2;
  num_states_ = -1;
  refused("num_states = -1, expected 0..8589934588");
  num_states_ = 4;
  num_groups_ = -1;
  refused("num_groups = -1, expected 0..4294967294");
  num_groups_ = 2;
  v_in_.dtype = DType::f8e4m3;
  refused("v_in.dtype = f8e4m3, expected f32, f16 or bf16");
  v_in_.dtype = DType::f32;
  v_in_.row_stride = 64;
  refused("v_in.head_stride = 64, expected at least 256 (elements that the inner dimensions span)");
  v_in_.row_stride = 128;
  lse_in_.data = nullptr;
  refused("lse_in.data = nullptr, expected a tensor");
  lse_in_.data = values_.data();
  v_out_.data = nullptr;
  refused("v_out.data = nullptr, expected a tensor");
  v_out_.data = values_.data();
  lse_out_.base = static_cast<LseBase>(7);
  refused("lse_out.base = 7, expected two or natural");
  lse_out_.base = LseBase::two;
  indptr_at_ = nullptr;
  refused("o_indptr = nullptr, expected device memory");
  expect_error(ErrorCode::invalid_argument, "v_b.dtype = f16, expected f32 (v_a's)", [&] {
    ConstRowsView other = v_in_;
    other.dtype = DType::f16;
    cuda::merge_state(v_in_, lse_in_, other, lse_in_, 2, 2, 64, v_out_, lse_out_, nullptr);
  });
}

}  // namespace
}  // namespace headwater::cuda_test
