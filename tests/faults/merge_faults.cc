// Faults of merging partial states: conventions for "no keys", bases, strides.
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "faults/fixture.h"

namespace headwater::faults {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Partial states of [groups x heads], dense, base two.
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
    Merged merged{std::vector<float>(groups * static_cast<std::size_t>(heads * dim), kNan),
                  std::vector<float>(groups * static_cast<std::size_t>(heads), kNan)};
    SerialExecutor serial;
    cpu::merge_states({v.data(), DType::f32, heads * dim, dim}, {lse.data(), heads, 1, base}, indptr, heads, dim,
                      {merged.v.data(), DType::f32, heads * dim, dim}, {merged.lse.data(), heads, 1, base}, serial);
    return merged;
  }
};

TEST(Faults, Fault02_NonContiguousLseIsHonoured) {
  // 128 identical requests, LSE as [heads, rows] and with gaps: run and merge honour the strides.
  reference::PageTables tables;
  tables.page_size = 8;
  for (int i = 0; i < 128; ++i) tables.add({0, 1, 2}, 5);
  check_both_paths({4, 1, 32, 32, DType::f32, DType::f32, DType::f32}, tables, {}, {.lse_head_major = true});

  constexpr int kRows = 128;
  constexpr int kHeads = 3;
  std::vector<float> v(kRows * 2 * kHeads * 16);
  std::vector<float> lse(kRows * 2 * kHeads * 5, kNan);  // (row r, head h) at h * rows * 5 + r * 5
  std::vector<std::int32_t> indptr{0};
  for (int r = 0; r < kRows; ++r) indptr.push_back(2 * (r + 1));
  for (int r = 0; r < 2 * kRows; ++r) {
    for (int h = 0; h < kHeads; ++h) {
      lse[static_cast<std::size_t>(h * 2 * kRows * 5 + r * 5)] = static_cast<float>(r % 2 == 0 ? h : h + 1);
      for (int d = 0; d < 16; ++d) v[static_cast<std::size_t>((r * kHeads + h) * 16 + d)] = r % 2 == 0 ? 3.0F : 6.0F;
    }
  }
  std::vector<float> out(kRows * kHeads * 16);
  std::vector<float> out_lse(kRows * kHeads);
  SerialExecutor serial;
  cpu::merge_states({v.data(), DType::f32, kHeads * 16, 16}, {lse.data(), 5, 2 * kRows * 5, LseBase::two}, indptr,
                    kHeads, 16, {out.data(), DType::f32, kHeads * 16, 16}, {out_lse.data(), 1, kRows, LseBase::two},
                    serial);
  for (int r = 0; r < kRows; ++r) {
    for (int h = 0; h < kHeads; ++h) {
      EXPECT_NEAR(out[static_cast<std::size_t>((r * kHeads + h) * 16)], (3.0 + 2.0 * 6.0) / 3.0, 1e-5);
      EXPECT_NEAR(out_lse[static_cast<std::size_t>(h * kRows + r)], h + std::log2(3.0), 1e-5);
    }
  }
}

TEST(Faults, Fault04_PlusInfinityForNoKeysIsAcceptedOnInput) {
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

TEST(Faults, Fault05_TwoEmptyStatesMergeToZeroAndMinusInfinity) {
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

TEST(Faults, Fault06_VeryNegativeStatesMergeExactly) {
  States states;
  states.add(1.0F, -1e6F);
  states.add(3.0F, -1e6F);
  states.close_group();
  const auto merged = states.merge();
  EXPECT_FLOAT_EQ(merged.v[0], 2.0F);
  EXPECT_FLOAT_EQ(merged.lse[0], -1e6F + 1.0F);
}

TEST(Faults, Fault08_MergeOfOneToOneHundredTwentyEightHeads) {
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

TEST(Faults, Fault09_BaseIsPartOfEveryLse) {
  // States of weights 1 and 3: the same merge in either base; the wrong base is off by far more than rounding.
  States natural;
  natural.add(0.0F, 0.0F);
  natural.add(4.0F, std::log(3.0F));
  natural.close_group();
  EXPECT_NEAR(natural.merge(LseBase::natural).v[0], 3.0, 1e-6);
  EXPECT_NEAR(natural.merge(LseBase::natural).lse[0], std::log(4.0), 1e-6);
  EXPECT_GT(std::fabs(natural.merge(LseBase::two).v[0] - 3.0), 1e-1);
  // And of run: both bases agree with the reference, flat and cascaded.
  for (const LseBase base : {LseBase::two, LseBase::natural}) {
    check_both_paths(kSmallF32, reference::tree({1, 4}, {64, 12}, 8), {}, {.lse_base = base});
  }
}

TEST(Faults, Fault10_LseOfEitherShapeAndNoOther) {
  for (const bool head_major : {false, true}) {
    check_both_paths(kSmallF32, reference::tree({1, 4}, {64, 12}, 8), {}, {.lse_head_major = head_major});
  }
  // Strides under which two elements coincide are refused.
  States states;
  states.add(1.0F, 0.0F);
  states.add(1.0F, 0.0F);
  states.close_group();
  states.indptr.insert(states.indptr.begin() + 1, 1);
  std::vector<float> out(2 * 16, -7.0F);
  std::vector<float> lse(2, -7.0F);
  SerialExecutor serial;
  const std::string message = message_of([&] {
    cpu::merge_states({states.v.data(), DType::f32, 16, 16}, {states.lse.data(), 1, 1, LseBase::two}, states.indptr, 1,
                      16, {out.data(), DType::f32, 16, 16}, {lse.data(), 0, 1, LseBase::two}, serial);
  });
  EXPECT_NE(message.find("lse_out"), std::string::npos) << message;
  EXPECT_EQ(out[0], -7.0F);
}

TEST(Faults, Fault15_SinkOfPartialRangesIsLeftToTheMerge) {
  // Two ranges of one row without the sink, then the sink as a state of its own (O = 0, LSE = the sink): the whole.
  const AttentionShape shape{2, 1, 32, 32, DType::f32, DType::f32, DType::f32};
  PlanOptions options;
  options.sinks = true;
  options.causal = false;
  reference::PageTables whole;
  whole.page_size = 4;
  whole.add({0, 1, 2}, 3);
  reference::Call call(shape, options, whole, {}, 41'000);
  std::vector<float> v(3 * 64, 0.0F);
  std::vector<float> lse(3 * 2);
  SerialExecutor serial;
  Planner planner;
  const std::array<std::vector<std::int32_t>, 2> parts{std::vector<std::int32_t>{0}, {1, 2}};
  for (std::size_t i = 0; i < 2; ++i) {
    reference::PageTables part;
    part.page_size = 4;
    part.add(parts[i], i == 0 ? 4 : 3);
    part.num_pages = whole.num_pages;
    const Plan plan = planner.plan(shape, part.batch(), options);
    reference::FencedBuffer workspace(plan.workspace_size());
    cpu::RunArgs args = call.args();
    args.include_sink = false;
    args.out = {v.data() + i * 64, DType::f32, 64, 32};
    args.lse = {lse.data() + i * 2, 2, 1, LseBase::natural};
    args.workspace = {workspace.data(), workspace.size()};
    cpu::run(plan, args, serial);
  }
  lse[4] = call.args().sinks[0];
  lse[5] = call.args().sinks[1];
  std::vector<float> out(64);
  std::vector<float> out_lse(2);
  const std::array<std::int32_t, 2> indptr{0, 3};
  cpu::merge_states({v.data(), DType::f32, 64, 32}, {lse.data(), 2, 1, LseBase::natural}, indptr, 2, 32,
                    {out.data(), DType::f32, 64, 32}, {out_lse.data(), 2, 1, LseBase::natural}, serial);
  EXPECT_EQ(reference::compare(shape, call.expected(), nullptr, {out.data(), DType::f32, 64, 32},
                               {out_lse.data(), 2, 1, LseBase::natural})
                .complaint,
            "");
}

}  // namespace
}  // namespace headwater::faults
