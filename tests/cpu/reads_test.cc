// The planner's plans, read page by page: the scalar kernel reports every K and V vector that it loads. Their sum is
// what run reports as kv_bytes_read, together they are exactly the visible tokens, and a shared span is read once.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/attend_scalar.h"
#include "cpu/run.h"
#include "plan/plan_data.h"
#include "reference/call.h"
#include "reference/memory.h"

namespace headwater {
namespace {

using reference::Call;
using reference::FencedBuffer;
using reference::ForestOptions;
using reference::PageTables;
using reference::Rng;

/// Times that K and V were read, by (page, token, KV head).
struct CountedReads {
  using Where = std::tuple<std::int32_t, int, int>;
  std::map<Where, int> keys;
  std::map<Where, int> values;
  void key(std::int32_t page, int token, int head) { ++keys[{page, token, head}]; }
  void value(std::int32_t page, int token, int head) { ++values[{page, token, head}]; }
};

CountedReads count_reads(const Call& call, const Plan& plan) {
  const AttentionShape& shape = call.problem().shape;
  const std::int64_t row = std::int64_t{shape.num_qo_heads} * shape.head_dim_vo;
  FencedBuffer out(static_cast<std::size_t>(plan.stats().num_rows * row) * size_of(shape.out_dtype));
  FencedBuffer workspace(plan.workspace_size());
  cpu::RunArgs args = call.args();
  args.out = {out.data(), shape.out_dtype, row, shape.head_dim_vo};
  args.workspace = {workspace.data(), workspace.size()};
  cpu::check_run_args(plan.data(), args);
  const cpu::AttendParams params = cpu::make_params(plan.data(), args);
  const cpu::Scratch scratch{static_cast<std::byte*>(workspace.data()) + plan.data().scratch_offset,
                             plan.data().scratch_bytes_per_worker};
  CountedReads reads;
  for (const detail::WorkItem& item : plan.data().items) cpu::scalar::attend(params, item, scratch, reads);
  return reads;
}

AttentionShape small_shape() {
  AttentionShape shape;
  shape.num_qo_heads = 4;
  shape.num_kv_heads = 2;
  shape.head_dim_qk = 48;
  shape.head_dim_vo = 32;
  return shape;
}

struct Policies {
  Policy policy;
  bool invariant;
};

class Reads : public testing::TestWithParam<Policies> {};

INSTANTIATE_TEST_SUITE_P(Policies, Reads,
                         testing::Values(Policies{Policy::flat, false}, Policies{Policy::automatic, false},
                                         Policies{Policy::forest, false}, Policies{Policy::two_level, false},
                                         Policies{Policy::vllm, false}, Policies{Policy::forest, true},
                                         Policies{Policy::automatic, true}, Policies{Policy::flat, true}),
                         [](const auto& param) {
                           return std::string(name_of(param.param.policy)) +
                                  (param.param.invariant ? "_invariant" : "");
                         });

TEST_P(Reads, EqualTheReportAndTheVisibleTokens) {
  Rng rng(6);
  int cascades = 0;
  for (int i = 0; i < 120; ++i) {
    ForestOptions forest;
    forest.page_size = rng.integer(1, 9);
    forest.max_rows = rng.chance(0.3) ? 4 : 1;
    forest.windows = rng.chance(0.3);
    PlanOptions options;
    options.policy = GetParam().policy;
    options.min_shared_pages = 1;
    options.batch_invariant = GetParam().invariant;
    options.invariant_chunk = 16;
    if (rng.chance(0.3)) options.window_left = rng.integer(0, 30);
    if (rng.chance(0.2)) options.num_sink_tokens = rng.integer(1, 12);
    if (rng.chance(0.1)) options.local_chunk = rng.integer(13, 40);
    Call call(small_shape(), options, reference::random_forest(rng, forest), {}, 1);
    Planner planner;
    const Plan plan = planner.plan(small_shape(), call.batch(), options);
    cascades += plan.stats().path == Path::cascade ? 1 : 0;

    const CountedReads reads = count_reads(call, plan);
    const std::int64_t key_bytes = 48 * 2;
    const std::int64_t value_bytes = 32 * 2;
    std::int64_t bytes = 0;
    for (const auto& [where, times] : reads.keys) bytes += times * key_bytes;
    for (const auto& [where, times] : reads.values) bytes += times * value_bytes;
    SerialExecutor serial;
    const reference::Ran ran = call.run(plan, serial, Isa::scalar);
    ASSERT_EQ(ran.complaint, "") << "case " << i << ", " << to_string(call.tables());
    ASSERT_EQ(ran.outcome.kv_bytes_read, bytes) << "case " << i << ", " << to_string(call.tables());
    ASSERT_EQ(reads.keys, reads.values);
    const auto visible = reference::visible_bytes(small_shape(), options, call.batch());
    ASSERT_EQ(static_cast<std::int64_t>(reads.keys.size()) * (key_bytes + value_bytes), visible.distinct);
  }
  if (GetParam().policy == Policy::flat) {
    EXPECT_EQ(cascades, 0);
  } else if (GetParam().policy == Policy::forest) {
    EXPECT_GT(cascades, 30);
  }
}

// Eight requests on one prefix of full pages: policy forest reads each of its tokens once per KV head.
TEST(SharedSpan, IsReadOnce) {
  PageTables tables;
  tables.page_size = 16;
  for (std::int32_t b = 0; b < 8; ++b) tables.add({0, 1, 2, 3, 4 + b}, 5);
  PlanOptions options;
  options.policy = Policy::forest;
  Call call(small_shape(), options, tables, {}, 1);
  Planner planner;
  const Plan plan = planner.plan(small_shape(), call.batch(), options);
  ASSERT_EQ(plan.stats().path, Path::cascade);
  const CountedReads reads = count_reads(call, plan);
  EXPECT_EQ(reads.keys.size(), 2U * (64 + 8 * 5));
  for (const auto& [where, times] : reads.keys) EXPECT_EQ(times, 1);
}

}  // namespace
}  // namespace headwater
