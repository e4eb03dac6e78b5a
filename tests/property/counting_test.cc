// Bytes read, confirmed page by page: the scalar kernel runs the planner's items with a reader that counts every K and
// V vector it really loads.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <tuple>

#include "cpu/attend_scalar.h"
#include "cpu/run.h"
#include "headwater/plan.h"
#include "plan/plan_data.h"
#include "property/scenario.h"
#include "reference/call.h"

namespace headwater::property {
namespace {

using Place = std::tuple<std::int32_t, int, int>;  // page, token, KV head

struct CountingReader {
  std::map<Place, int> keys;
  std::map<Place, int> values;
  void key(std::int32_t page, int token, int head) { ++keys[{page, token, head}]; }
  void value(std::int32_t page, int token, int head) { ++values[{page, token, head}]; }

  [[nodiscard]] std::int64_t bytes(const AttentionShape& shape) const {
    std::int64_t elements = 0;
    for (const auto& [place, times] : keys) elements += std::int64_t{times} * shape.head_dim_qk;
    for (const auto& [place, times] : values) elements += std::int64_t{times} * shape.head_dim_vo;
    return elements * static_cast<std::int64_t>(size_of(shape.kv_dtype));
  }
};

CountingReader count_reads(reference::Call& call, const Plan& plan) {
  const AttentionShape& shape = call.problem().shape;
  const auto rows = static_cast<std::size_t>(plan.stats().num_rows);
  const std::size_t row = static_cast<std::size_t>(shape.num_qo_heads * shape.head_dim_vo);
  reference::FencedBuffer out(rows * row * size_of(shape.out_dtype));
  reference::FencedBuffer workspace(plan.workspace_size());
  cpu::RunArgs args = call.args();
  args.out = {out.data(), shape.out_dtype, static_cast<std::int64_t>(row), shape.head_dim_vo};
  args.workspace = {workspace.data(), workspace.size()};
  cpu::check_run_args(plan.data(), args);
  const cpu::AttendParams params = cpu::make_params(plan.data(), args);
  CountingReader reader;
  const cpu::Scratch scratch{static_cast<std::byte*>(workspace.data()) + plan.data().scratch_offset,
                             plan.data().scratch_bytes_per_worker};
  for (const detail::WorkItem& item : plan.data().items) cpu::scalar::attend(params, item, scratch, reader);
  return reader;
}

/// (page, token, KV head) of everything that some row sees.
std::set<Place> visible_places(const Scenario& s) {
  std::set<Place> places;
  const reference::Rows rows = reference::rows_of(s.tables.batch());
  for (const reference::Row& row : rows.rows) {
    for (const reference::Token& token : rows.paths[row.path]) {
      if (!reference::sees(s.options, row.position, token.position)) continue;
      for (int head = 0; head < s.shape.num_kv_heads; ++head) places.insert({token.page, token.offset, head});
    }
  }
  return places;
}

TEST(Counting, PlannedBytesAreReadPageByPage) {
  int exact = 0;
  for (std::uint64_t seed = 50'000; seed < 50'200; ++seed) {
    const Scenario s = random_scenario(seed, {.head_dims = {32, 48}});
    SCOPED_TRACE(describe(s));
    reference::Call call(s.shape, s.options, s.tables, s.call, seed);
    Planner planner(s.model);
    for (const Policy policy : {Policy::flat, Policy::forest}) {
      PlanOptions options = s.options;
      options.policy = policy;
      const Plan plan = planner.plan(s.shape, call.batch(), options);
      const CountingReader reader = count_reads(call, plan);
      std::set<Place> keys;
      std::set<Place> values;
      for (const auto& [place, times] : reader.keys) keys.insert(place);
      for (const auto& [place, times] : reader.values) values.insert(place);
      // Exactly the tokens that somebody sees are touched; nothing is read that was not planned for.
      EXPECT_EQ(keys, visible_places(s));
      EXPECT_EQ(values, keys);
      const std::int64_t bytes = reader.bytes(s.shape);
      EXPECT_LE(bytes, plan.stats().kv_bytes_read);
      if (bytes == plan.stats().kv_bytes_read) ++exact;
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(exact, 300);  // the others: holes between sinks and windows, rows that end early in a tile
}

TEST(Counting, DecodingReadsEveryPlannedByteAndSharedOnesOnce) {
  const AttentionShape shape{8, 2, 64, 64, DType::bf16, DType::bf16, DType::bf16};
  Scenario s;
  s.shape = shape;
  s.tables = reference::tree({1, 2, 6}, {100, 40, 9}, 4);
  for (const Policy policy : {Policy::flat, Policy::forest}) {
    PlanOptions options;
    options.policy = policy;
    reference::Call call(shape, options, s.tables, {}, 51'000);
    Planner planner(eager_model(128, 64));
    const Plan plan = planner.plan(shape, call.batch(), options);
    const CountingReader reader = count_reads(call, plan);
    EXPECT_EQ(reader.bytes(shape), plan.stats().kv_bytes_read);
    SerialExecutor serial;
    EXPECT_EQ(call.run(plan, serial, Isa::scalar).outcome.kv_bytes_read, plan.stats().kv_bytes_read);
    int most = 0;
    for (const auto& [place, times] : reader.keys) most = std::max(most, times);
    EXPECT_EQ(most, policy == Policy::flat ? 6 : 1);
  }
}

}  // namespace
}  // namespace headwater::property
