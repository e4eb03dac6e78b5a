// The measuring itself: its proofs are able to fail, and what was not measured well says so.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "bench/cpu_processor.h"
#include "bench/harness.h"
#include "bench/replay.h"
#include "bench/report.h"
#include "bench/step.h"
#include "bench/workloads.h"
#include "plan/plan_data.h"

namespace headwater::bench {
namespace {

AttentionShape small_shape() {
  AttentionShape shape;
  shape.num_qo_heads = 2;
  shape.num_kv_heads = 1;
  shape.head_dim_qk = shape.head_dim_vo = 32;
  return shape;
}

Workload small_workload() {
  Workload workload;
  workload.name = "1,3|64,16";
  workload.forest = two_level(64, 3, 16);
  return workload;
}

BenchConfig small_config() {
  BenchConfig config;
  config.shape = small_shape();
  config.policies = {Policy::flat, Policy::forest};
  config.steps = 2;
  config.reps = 1;
  config.warmup = 0;
  config.cold_bytes = 0;
  return config;
}

TEST(DispatchProof, FailsWhenPathOrBytesAreNotThePlans) {
  SerialExecutor serial;
  Planner planner{DeviceModel{}};
  const PagedForest paged = make_paged(small_workload().forest, 16, 1);
  PlanOptions options;
  options.policy = Policy::forest;
  Step step(planner, small_shape(), paged, options, Isa::scalar);
  ColdKv kv(small_shape(), paged.pool->num_pages(), 16, Layout::hnd, false, 0);
  EXPECT_NO_THROW(step.run(kv.next(), serial));
  EXPECT_EQ(step.outcome().path, Path::cascade);

  const auto message = [&] {
    try {
      step.run(kv.next(), serial);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::internal);
      return std::string(e.what());
    }
    return std::string("no error");
  };
  PlanStats& stats = step.plan().data().stats;
  stats.kv_bytes_read += 2;
  EXPECT_TRUE(message().starts_with("dispatch proof: planned path cascade with ")) << message();
  stats.kv_bytes_read -= 2;
  EXPECT_EQ(message(), "no error");
}

TEST(Verdicts, FewPairsDecideNothing) {
  EXPECT_EQ(verdict_of_pairs(29, true), Verdict::not_judged);
  EXPECT_EQ(verdict_of_pairs(29, false), Verdict::not_judged);
  EXPECT_EQ(verdict_of_pairs(30, true), Verdict::passed);
  EXPECT_EQ(verdict_of_pairs(30, false), Verdict::missed);

  ReplaySummary replayed;
  EXPECT_EQ(replayed.verdict(), Verdict::not_judged) << "no steps";
  replayed.steps = replayed.identical_plans = 3;
  EXPECT_EQ(replayed.verdict(), Verdict::passed) << "byte for byte flat's";
  replayed.identical_plans = 2;
  replayed.pairs = 29;
  EXPECT_EQ(replayed.verdict(), Verdict::not_judged);
  EXPECT_EQ(to_json(replayed)["passed"], false);
  EXPECT_EQ(to_json(replayed)["verdict"], "not judged");
  replayed.pairs = 30;
  replayed.pair_ratio = {1.03, 1.04, 1.05};
  EXPECT_EQ(replayed.verdict(), Verdict::missed);
  replayed.pair_ratio.low = 1.01;
  EXPECT_EQ(replayed.verdict(), Verdict::passed);

  OverheadResult overhead;
  overhead.pairs = 30;
  EXPECT_EQ(overhead.verdict(), Verdict::missed) << "another plan";
  overhead.same_plan = true;
  EXPECT_EQ(overhead.verdict(), Verdict::passed);
  overhead.pairs = 29;
  EXPECT_EQ(overhead.verdict(), Verdict::not_judged);
}

TEST(Samples, AtLeastTheDemandedNumber) {
  SerialExecutor serial;
  BenchConfig config = small_config();
  config.min_samples = kMinPairs;
  config.cell_seconds = 1e-9;  // would stop after six
  const CellResult cell = Harness(make_cpu_processor(serial, Isa::scalar)).run(small_workload(), config);
  EXPECT_EQ(cell.samples, kMinPairs);
  EXPECT_EQ(cell.arms.back().samples_us.size(), static_cast<std::size_t>(kMinPairs));
}

TEST(Replay, OneSummaryForEveryPolicyAndEnoughPairs) {
  SerialExecutor serial;
  Harness harness(make_cpu_processor(serial, Isa::scalar));
  BenchConfig config = small_config();
  config.policies = {Policy::flat, Policy::two_level, Policy::forest};
  config.plan.min_shared_pages = 1;
  const std::vector<ReplayStep> steps = {{"a", two_level(64, 3, 16)}, {"b", two_level(128, 2, 16)}};
  const std::vector<ReplaySummary> summaries = replay(harness, "r", steps, config, {}, {});
  ASSERT_EQ(summaries.size(), 2U);
  EXPECT_EQ(summaries[0].policy, Policy::two_level);
  EXPECT_EQ(summaries[1].policy, Policy::forest);
  for (const ReplaySummary& summary : summaries) {
    EXPECT_EQ(summary.identical_plans, 0);
    EXPECT_GE(summary.pairs, kMinPairs);
    EXPECT_LT(summary.bytes_read, summary.bytes_flat);
    EXPECT_GE(summary.worst_times_limit, summary.times_limit);
  }
}

/// Workers that never run at full speed.
class SlowExecutor final : public Executor {
 public:
  [[nodiscard]] int num_workers() const noexcept override { return 1; }
  void parallel(void (*task)(void* context, int worker) noexcept, void* context) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    task(context, 0);
  }
};

TEST(Samples, ThrottledOnesThatAreKeptAreMarked) {
  SlowExecutor slow;
  const CellResult cell = Harness(make_cpu_processor(slow, Isa::scalar)).run(small_workload(), small_config());
  EXPECT_EQ(cell.dropped, 2 * 2);
  EXPECT_EQ(cell.samples, 2);
  EXPECT_EQ(cell.throttled_kept, 2);

  TextTable table = cell_table();
  add_rows(table, cell);
  EXPECT_NE(table.text().find("4 (KEPT 2)"), std::string::npos) << table.text();
  auto json = nlohmann::ordered_json::array();
  append_json(json, cell);
  EXPECT_EQ(json.at(0)["throttled_kept"], 2);
  EXPECT_NE(csv_of(json).find(",dropped,throttled_kept,"), std::string::npos);
}

TEST(Samples, CleanOnesAreNotMarked) {
  CellResult cell;
  cell.arms.resize(1);
  cell.arms[0].rep_medians_us = {1};
  TextTable table = cell_table();
  add_rows(table, cell);
  EXPECT_EQ(table.text().find("KEPT"), std::string::npos);
}

}  // namespace
}  // namespace headwater::bench
