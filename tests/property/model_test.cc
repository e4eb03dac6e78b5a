// The claims behind cascade attention, end to end: the byte model, exact masks of shared spans, the stacking of heads
// and the base of the LSE, each with a control that must fail visibly.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "headwater/cpu.h"
#include "headwater/plan.h"
#include "property/scenario.h"
#include "reference/call.h"
#include "reference/element.h"

namespace headwater::property {
namespace {

TEST(Model, BytesOfSixtyFourRequestsOnOnePrefix) {
  // N = 64, P = 4096, S = 128: flat N (P + S) = 270,336 tokens, cascade P + N S = 12,288: 22 times fewer.
  const AttentionShape shape{1, 1, 32, 32, DType::bf16, DType::bf16, DType::bf16};
  const std::int64_t token_bytes = 2 * 32 * 2;
  PlanOptions options;
  reference::Call call(shape, options, reference::tree({1, 64}, {4096, 128}, 16), {.check_naive = false}, 30'000);
  Executors executors;
  Planner planner;
  options.policy = Policy::flat;
  const Plan flat = planner.plan(shape, call.batch(), options);
  EXPECT_EQ(flat.stats().kv_bytes_read, 270'336 * token_bytes);
  const reference::Ran flat_ran = call.run(flat, executors.of(2));
  EXPECT_EQ(flat_ran.complaint, "");
  EXPECT_EQ(flat_ran.outcome.kv_bytes_read, 270'336 * token_bytes);
  EXPECT_EQ(flat_ran.outcome.path, Path::flat);
  options.policy = Policy::forest;
  const Plan cascade = planner.plan(shape, call.batch(), options);
  EXPECT_EQ(cascade.stats().kv_bytes_flat, 270'336 * token_bytes);
  EXPECT_EQ(cascade.stats().kv_bytes_unique, 12'288 * token_bytes);
  const reference::Ran cascade_ran = call.run(cascade, executors.of(2));
  EXPECT_EQ(cascade_ran.complaint, "");
  EXPECT_EQ(cascade_ran.outcome.kv_bytes_read, 12'288 * token_bytes);
  EXPECT_EQ(cascade_ran.outcome.path, Path::cascade);
  EXPECT_EQ(270'336 / 12'288, 22);
}

TEST(Model, RowTileBoundsTheSaving) {
  // 64 rows of 4 stacked heads are 256 stacked rows: tiles of 64 read the prefix 4 times.
  const AttentionShape shape{4, 1, 32, 32, DType::bf16, DType::bf16, DType::bf16};
  const std::int64_t token_bytes = 2 * 32 * 2;
  PlanOptions options;
  options.policy = Policy::forest;
  reference::Call call(shape, options, reference::tree({1, 64}, {512, 16}, 16), {.check_naive = false}, 30'100);
  Executors executors;
  Planner planner(eager_model(64, 1024));
  const reference::Ran ran = call.run(planner.plan(shape, call.batch(), options), executors.of(2));
  EXPECT_EQ(ran.complaint, "");
  EXPECT_EQ(ran.outcome.path, Path::cascade);
  EXPECT_EQ(ran.outcome.kv_bytes_read, (4 * 512 + 64 * 16) * token_bytes);
}

/// R1 holds [A,B,C,D,E,X] and asks for D, E, X; R2 holds [A,B,C,D,E,Y] and asks for E, Y. All six pages are written
/// before attention, so the shared span covers D and E too, which R1's first row must not see.
reference::PageTables worked_example() {
  reference::PageTables tables;
  tables.page_size = 1;
  tables.add({0, 1, 2, 3, 4, 5}, 1, 3);
  tables.add({0, 1, 2, 3, 4, 6}, 1, 2);
  return tables;
}

TEST(Model, WorkedExampleMasksSharedSpansByRow) {
  const AttentionShape shape{4, 2, 32, 32, DType::f32, DType::f32, DType::f32};
  Executors executors;
  for (const Policy policy : {Policy::flat, Policy::two_level, Policy::forest}) {
    PlanOptions options;
    options.policy = policy;
    options.min_shared_pages = 1;
    reference::Call call(shape, options, worked_example(), {}, 31'000);
    Planner planner(eager_model());
    const Plan plan = planner.plan(shape, call.batch(), options);
    EXPECT_EQ(plan.stats().path, policy == Policy::flat ? Path::flat : Path::cascade) << name_of(policy);
    for (const Isa isa : isas()) EXPECT_EQ(call.run(plan, executors.of(1), isa).complaint, "") << name_of(policy);
  }
}

TEST(Model, WorkedExampleWithoutRowMasksIsWrong) {
  // The control: seeing every key of the table (no causal mask) changes the answer of the first row visibly.
  const AttentionShape shape{4, 2, 32, 32, DType::f32, DType::f32, DType::f32};
  PlanOptions causal;
  reference::Call call(shape, causal, worked_example(), {}, 31'000);
  reference::Problem leaky = call.problem();
  leaky.options.causal = false;
  const reference::Result wrong = reference::attend(leaky);
  const reference::Result& right = call.expected();
  EXPECT_GT(std::fabs(wrong.o[0] - right.o[0]) + std::fabs(wrong.lse[0] - right.lse[0]), 1e-2);
}

/// M members share one span and each asks with one row. The span alone can be computed as one row whose head
/// kv * (M * G) + m * G + g is member m's head kv * G + g: KV head kv is then read once for all M * G.
class Stacking : public ::testing::Test {
 protected:
  static constexpr int kMembers = 5;
  static constexpr int kGroup = 3;
  static constexpr int kKvHeads = 2;
  static constexpr int kHeads = kGroup * kKvHeads;
  static constexpr int kDim = 64;

  /// Largest deviation / max |reference| when member m's head h is put at head stacked(m, h).
  template <class StackedHead>
  static double error_of(StackedHead stacked) {
    const AttentionShape shape{kHeads, kKvHeads, kDim, kDim, DType::f32, DType::f32, DType::f32};
    reference::PageTables tables;
    tables.page_size = 8;
    for (int m = 0; m < kMembers; ++m) tables.add({0, 1, 2, 3}, 8);
    const reference::CallOptions options;
    reference::Call members(shape, {.causal = false}, tables, options, 32'000);
    const reference::Result& expected = members.expected();

    const cpu::RunArgs source = members.args();
    std::vector<float> q(static_cast<std::size_t>(kMembers * kHeads * kDim));
    for (int m = 0; m < kMembers; ++m) {
      for (int h = 0; h < kHeads; ++h) {
        for (int d = 0; d < kDim; ++d) {
          q[static_cast<std::size_t>(stacked(m, h) * kDim + d)] = static_cast<float>(
              reference::load(DType::f32, source.q.data, m * source.q.row_stride + h * source.q.head_stride + d));
        }
      }
    }
    reference::PageTables one;
    one.page_size = 8;
    one.add({0, 1, 2, 3}, 8);
    const AttentionShape wide{kMembers * kHeads, kKvHeads, kDim, kDim, DType::f32, DType::f32, DType::f32};
    Planner planner;
    const Plan plan = planner.plan(wide, one.batch(), {.causal = false});
    std::vector<float> out(q.size());
    reference::FencedBuffer workspace(plan.workspace_size());
    cpu::RunArgs args = source;
    args.q = {q.data(), DType::f32, kMembers * kHeads * kDim, kDim};
    args.out = {out.data(), DType::f32, kMembers * kHeads * kDim, kDim};
    args.workspace = {workspace.data(), workspace.size()};
    SerialExecutor serial;
    cpu::run(plan, args, serial);

    double error = 0.0;
    double largest = 0.0;
    for (int m = 0; m < kMembers; ++m) {
      for (int h = 0; h < kHeads; ++h) {
        for (int d = 0; d < kDim; ++d) {
          const double want = expected.o[static_cast<std::size_t>((m * kHeads + h) * kDim + d)];
          const double got = out[static_cast<std::size_t>(stacked(m, h) * kDim + d)];
          error = std::max(error, std::fabs(got - want));
          largest = std::max(largest, std::fabs(want));
        }
      }
    }
    return error / largest;
  }
};

TEST_F(Stacking, KvHeadMajorIsExact) {
  EXPECT_LT(error_of([](int m, int h) { return h / kGroup * (kMembers * kGroup) + m * kGroup + h % kGroup; }), 2e-5);
}

TEST_F(Stacking, MemberMajorIsVisiblyWrong) {
  EXPECT_GT(error_of([](int m, int h) { return m * kHeads + h; }), 1e-2);
}

/// Two halves of one request's keys, each computed on its own, merged.
class Halves : public ::testing::Test {
 protected:
  /// Error of the merged O and LSE when the parts' natural-log LSE is declared to be of `declared` base.
  static double error_of(LseBase declared) {
    const AttentionShape shape{4, 2, 64, 64, DType::f32, DType::f32, DType::f32};
    reference::PageTables whole;
    whole.page_size = 8;
    whole.add({0, 1, 2, 3, 4}, 5);
    reference::Call call(shape, {.causal = false}, whole, {.key_spread = 2.0}, 33'000);
    std::vector<float> v(2 * 4 * 64);
    std::vector<float> lse(2 * 4);
    const std::array<std::vector<std::int32_t>, 2> parts{std::vector<std::int32_t>{0}, {1, 2, 3, 4}};
    SerialExecutor serial;
    for (std::size_t i = 0; i < 2; ++i) {
      reference::PageTables part;
      part.page_size = 8;
      part.add(parts[i], i == 0 ? 8 : 5);
      part.num_pages = whole.num_pages;
      Planner planner;
      const Plan plan = planner.plan(shape, part.batch(), {.causal = false});
      reference::FencedBuffer workspace(plan.workspace_size());
      cpu::RunArgs args = call.args();
      args.out = {v.data() + i * 4 * 64, DType::f32, 4 * 64, 64};
      args.lse = {lse.data() + i * 4, 4, 1, LseBase::natural};
      args.workspace = {workspace.data(), workspace.size()};
      cpu::run(plan, args, serial);
    }
    const std::array<std::int32_t, 2> indptr{0, 2};
    std::vector<float> merged(4 * 64);
    std::vector<float> merged_lse(4);
    cpu::merge_states({v.data(), DType::f32, 4 * 64, 64}, {lse.data(), 4, 1, declared}, indptr, 4, 64,
                      {merged.data(), DType::f32, 4 * 64, 64}, {merged_lse.data(), 4, 1, declared}, serial);
    const reference::Result& expected = call.expected();
    double error = 0.0;
    double largest = 0.0;
    for (std::size_t i = 0; i < merged.size(); ++i) {
      error = std::max(error, std::fabs(merged[i] - expected.o[i]));
      largest = std::max(largest, std::fabs(expected.o[i]));
    }
    return error / largest;
  }
};

TEST_F(Halves, DeclaredBaseIsExact) {
  EXPECT_LT(error_of(LseBase::natural), 2e-5);
}

TEST_F(Halves, NaturalLogFedToTheBaseTwoMergeIsVisiblyWrong) {
  EXPECT_GT(error_of(LseBase::two), 1e-3);
}

}  // namespace
}  // namespace headwater::property
