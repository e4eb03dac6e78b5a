// Faults of merging partial states, one named test each, through merge_states on the device: conventions for "no keys",
// bases, strides, numbers of heads.
#include <array>
#include <cmath>

#include "cuda/fault_fixture.h"

namespace headwater::cuda_test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Partial states of [groups x heads], dense.
struct States {
  int heads = 1;
  int dim = 16;
  std::vector<std::int32_t> indptr{0};
  std::vector<float> v;
  std::vector<float> lse;

  void add(float value, float state_lse) {
    v.insert(v.end(), static_cast<std::size_t>(heads * dim), value);
    lse.insert(lse.end(), static_cast<std::size_t>(heads), state_lse);
  }
  void close_group() { indptr.push_back(static_cast<std::int32_t>(lse.size()) / heads); }

  struct Merged {
    std::vector<float> v;
    std::vector<float> lse;
  };
  [[nodiscard]] Merged merge(LseBase base = LseBase::two) const {
    const std::size_t groups = indptr.size() - 1;
    const OnDevice<float> device_v(v);
    const OnDevice<float> device_lse(lse);
    const OnDevice<std::int32_t> device_indptr(indptr);
    const OnDevice<float> out(std::vector<float>(groups * static_cast<std::size_t>(heads * dim), kNan));
    const OnDevice<float> out_lse(std::vector<float>(groups * static_cast<std::size_t>(heads), kNan));
    cuda::merge_states({device_v.data(), DType::f32, heads * dim, dim}, {device_lse.data(), heads, 1, base},
                       static_cast<std::int64_t>(lse.size()) / heads, device_indptr.data(),
                       static_cast<std::int64_t>(groups), heads, dim, {out.data(), DType::f32, heads * dim, dim},
                       {out_lse.data(), heads, 1, base}, nullptr);
    return {out.get(), out_lse.get()};
  }
};

TEST(CudaFaults, Fault02_NonContiguousLseIsMergedByItsStrides) {
  HEADWATER_NEEDS_GPU();
  constexpr int kRows = 128;
  constexpr int kHeads = 3;
  std::vector<float> v(std::size_t{kRows} * 2 * kHeads * 16);
  std::vector<float> lse(std::size_t{kRows} * 2 * kHeads * 5, kNan);  // (row r, head h) at h * rows * 5 + r * 5
  std::vector<std::int32_t> indptr{0};
  for (int r = 0; r < kRows; ++r) indptr.push_back(2 * (r + 1));
  for (int r = 0; r < 2 * kRows; ++r) {
    for (int h = 0; h < kHeads; ++h) {
      lse[static_cast<std::size_t>(h * 2 * kRows * 5 + r * 5)] = static_cast<float>(r % 2 == 0 ? h : h + 1);
      for (int d = 0; d < 16; ++d) v[static_cast<std::size_t>((r * kHeads + h) * 16 + d)] = r % 2 == 0 ? 3.0F : 6.0F;
    }
  }
  const OnDevice<float> device_v(v);
  const OnDevice<float> device_lse(lse);
  const OnDevice<std::int32_t> device_indptr(indptr);
  const OnDevice<float> out(std::vector<float>(std::size_t{kRows} * kHeads * 16, kNan));
  const OnDevice<float> out_lse(std::vector<float>(std::size_t{kRows} * kHeads, kNan));
  cuda::merge_states({device_v.data(), DType::f32, kHeads * 16, 16},
                     {device_lse.data(), 5, 2 * kRows * 5, LseBase::two}, 2 * kRows, device_indptr.data(), kRows,
                     kHeads, 16, {out.data(), DType::f32, kHeads * 16, 16}, {out_lse.data(), 1, kRows, LseBase::two},
                     nullptr);
  const std::vector<float> merged = out.get();
  const std::vector<float> merged_lse = out_lse.get();
  for (int r = 0; r < kRows; ++r) {
    for (int h = 0; h < kHeads; ++h) {
      ASSERT_NEAR(merged[static_cast<std::size_t>((r * kHeads + h) * 16)], (3.0 + 2.0 * 6.0) / 3.0, 1e-5);
      ASSERT_NEAR(merged_lse[static_cast<std::size_t>(h * kRows + r)], h + std::log2(3.0), 1e-5);
    }
  }
}

TEST(CudaFaults, Fault04_PlusInfinityForNoKeysIsAcceptedOnInput) {
  HEADWATER_NEEDS_GPU();
  States states;
  states.add(2.0F, 1.0F);
  states.add(kNan, kInfinity);
  states.add(kNan, -kInfinity);
  states.close_group();
  states.add(kNan, kInfinity);
  states.close_group();
  const auto merged = states.merge();
  EXPECT_FLOAT_EQ(merged.v[0], 2.0F);
  EXPECT_FLOAT_EQ(merged.lse[0], 1.0F);
  EXPECT_EQ(merged.v[16], 0.0F);
  EXPECT_EQ(merged.lse[1], -kInfinity);
}

TEST(CudaFaults, Fault05_TwoEmptyStatesMergeToZeroAndMinusInfinity) {
  HEADWATER_NEEDS_GPU();
  States states;
  states.add(kNan, -kInfinity);
  states.add(kNan, -kInfinity);
  states.close_group();
  states.close_group();  // an empty group
  const auto merged = states.merge();
  for (int d = 0; d < 32; ++d) EXPECT_EQ(merged.v[static_cast<std::size_t>(d)], 0.0F);
  EXPECT_EQ(merged.lse[0], -kInfinity);
  EXPECT_EQ(merged.lse[1], -kInfinity);
}

TEST(CudaFaults, Fault06_VeryNegativeStatesMergeExactly) {
  HEADWATER_NEEDS_GPU();
  States states;
  states.add(1.0F, -1e6F);
  states.add(3.0F, -1e6F);
  states.close_group();
  const auto merged = states.merge();
  EXPECT_FLOAT_EQ(merged.v[0], 2.0F);
  EXPECT_FLOAT_EQ(merged.lse[0], -1e6F + 1.0F);
}

TEST(CudaFaults, Fault08_MergeOfOneToOneHundredTwentyEightHeads) {
  HEADWATER_NEEDS_GPU();
  for (const int heads : {1, 2, 31, 96, 128}) {
    States states;
    states.heads = heads;
    states.dim = 128;
    states.add(1.0F, 0.0F);
    states.add(5.0F, 0.0F);
    states.close_group();
    const auto merged = states.merge();
    for (const float v : merged.v) ASSERT_FLOAT_EQ(v, 3.0F);
    for (const float lse : merged.lse) ASSERT_FLOAT_EQ(lse, 1.0F);
  }
}

TEST(CudaFaults, Fault09_BaseIsPartOfEveryMerge) {
  HEADWATER_NEEDS_GPU();
  // States of weights 1 and 3: the wrong base is off by far more than rounding.
  States natural;
  natural.add(0.0F, 0.0F);
  natural.add(4.0F, std::log(3.0F));
  natural.close_group();
  EXPECT_NEAR(natural.merge(LseBase::natural).v[0], 3.0, 1e-5);
  EXPECT_NEAR(natural.merge(LseBase::natural).lse[0], std::log(4.0), 1e-5);
  EXPECT_GT(std::fabs(natural.merge(LseBase::two).v[0] - 3.0), 1e-1);
}

TEST(CudaFaults, Fault10_MergeRefusesOverlappingLse) {
  // Refused on the host, before anything reaches a device.
  std::vector<float> v(32);
  std::vector<float> lse(2);
  const std::array<std::int32_t, 3> indptr{0, 1, 2};
  const std::string message = message_of([&] {
    cuda::merge_states({v.data(), DType::f32, 16, 16}, {lse.data(), 1, 1, LseBase::two}, 2, indptr.data(), 2, 1, 16,
                       {v.data(), DType::f32, 16, 16}, {lse.data(), 0, 1, LseBase::two}, nullptr);
  });
  EXPECT_NE(message.find("lse_out"), std::string::npos) << message;
}

TEST(CudaFaults, Fault15_SinkOfPartialRangesIsLeftToTheMerge) {
  // Two ranges of one row without the sink, then the sink as a state of its own (O = 0, LSE = the sink): the whole.
  const AttentionShape shape{2, 1, 64, 64, DType::f16, DType::f16, DType::f32};
  PlanOptions options;
  options.sinks = true;
  options.causal = false;
  reference::PageTables whole;
  whole.page_size = 4;
  whole.add({0, 1, 2}, 3);
  reference::Call call(shape, options, whole, {}, 51'000);
  std::vector<float> v(std::size_t{3} * 128, 0.0F);
  std::vector<float> lse(std::size_t{3} * 2);
  Planner planner;
  const std::array<std::vector<std::int32_t>, 2> parts{std::vector<std::int32_t>{0}, {1, 2}};
  for (std::size_t i = 0; i < 2; ++i) {
    reference::PageTables part;
    part.page_size = 4;
    part.add(parts[i], i == 0 ? 4 : 3);
    part.num_pages = whole.num_pages;
    const Plan plan = planner.plan(shape, part.batch(), options);
    EXPECT_EQ(plan.stats().num_rows, 1);
    if (!have_gpu()) continue;
    cpu::RunArgs args = call.args();
    args.include_sink = false;
    args.out = {v.data() + i * 128, DType::f32, 128, 64};
    args.lse = {lse.data() + i * 2, 2, 1, LseBase::natural};
    run_on_device(plan, args);
  }
  HEADWATER_NEEDS_GPU();
  lse[4] = call.args().sinks[0];
  lse[5] = call.args().sinks[1];
  States states;
  states.heads = 2;
  states.dim = 64;
  states.v = v;
  states.lse = lse;
  states.indptr = {0, 3};
  const auto merged = states.merge(LseBase::natural);
  EXPECT_EQ(reference::compare(shape, call.expected(), nullptr, {merged.v.data(), DType::f32, 128, 64},
                               {merged.lse.data(), 2, 1, LseBase::natural})
                .complaint,
            "");
}

}  // namespace
}  // namespace headwater::cuda_test
