// Random forests x policies x options x types x layouts x instruction sets x threads against the float64 reference.
// Call::run checks of every run: O and LSE, fences, poison, that the planned path ran and read the planned bytes.
#include <gtest/gtest.h>

#include <array>

#include "headwater/plan.h"
#include "property/scenario.h"
#include "reference/call.h"

namespace headwater::property {
namespace {

constexpr std::array kPolicies{Policy::automatic, Policy::flat, Policy::two_level, Policy::vllm, Policy::forest};

/// How many runs took which path: a suite that never cascades proves nothing.
struct Tally {
  int runs = 0;
  int cascades = 0;
};

void check_stats(const Scenario& s, const Plan& plan, Policy policy) {
  const PlanStats& stats = plan.stats();
  const reference::VisibleBytes visible = reference::visible_bytes(s.shape, s.options, s.tables.batch());
  EXPECT_EQ(stats.num_rows, s.tables.qo_indptr.back());
  EXPECT_EQ(stats.num_requests, s.tables.num_requests());
  EXPECT_GE(stats.kv_bytes_read, visible.distinct);
  EXPECT_GE(stats.kv_bytes_unique, visible.distinct);
  EXPECT_GE(stats.kv_bytes_flat, visible.flat);
  EXPECT_EQ(stats.path == Path::cascade, stats.num_spans > 0);
  if (policy == Policy::flat) {
    EXPECT_EQ(stats.path, Path::flat);
    EXPECT_EQ(stats.kv_bytes_read, stats.kv_bytes_flat);
  }
  if (policy == Policy::forest && must_share(s.options, s.tables)) {
    EXPECT_EQ(stats.path, Path::cascade);
  }
}

void run_policies(const Scenario& s, Executors& executors, Tally& tally) {
  SCOPED_TRACE(describe(s));
  reference::Call call(s.shape, s.options, s.tables, s.call, s.seed);
  Planner planner(s.model);
  int turn = static_cast<int>(s.seed);
  for (const Policy policy : kPolicies) {
    PlanOptions options = s.options;
    options.policy = policy;
    const Plan plan = planner.plan(s.shape, call.batch(), options);
    check_stats(s, plan, policy);
    for (const Isa isa : isas()) {
      const int workers = 1 + ++turn % 3;
      const reference::Ran ran = call.run(plan, executors.of(workers), isa);
      EXPECT_EQ(ran.complaint, "") << "policy " << name_of(policy) << ", " << name_of(isa) << ", " << workers
                                   << " worker(s)\n"
                                   << plan.describe();
      ++tally.runs;
      if (ran.outcome.path == Path::cascade) ++tally.cascades;
    }
    if (::testing::Test::HasFailure()) return;
  }
}

void run_seeds(std::uint64_t first, int count, const Range& range) {
  Executors executors;
  Tally tally;
  for (int i = 0; i < count && !::testing::Test::HasFailure(); ++i) {
    run_policies(random_scenario(first + static_cast<std::uint64_t>(i), range), executors, tally);
  }
  if (::testing::Test::HasFailure()) return;
  EXPECT_GT(tally.cascades, tally.runs / 10) << "of " << tally.runs << " runs";
}

TEST(Forest, PlainFp32) {
  run_seeds(1'000, 150, {.fp32_only = true, .features = false, .odd_strides = false});
}

TEST(Forest, EveryOptionFp32) {
  run_seeds(2'000, 300, {.fp32_only = true});
}

TEST(Forest, EveryTypeAndOption) {
  run_seeds(3'000, 300, {});
}

TEST(Forest, LongRequests) {
  run_seeds(4'000, 25, {.max_rows = 4, .max_pages = 60, .head_dims = {64, 128}});
}

TEST(Forest, SwitchOffScansNothing) {
  Executors executors;
  int shared = 0;
  for (std::uint64_t seed = 5'000; seed < 5'040; ++seed) {
    const Scenario s = random_scenario(seed, {.features = false});
    SCOPED_TRACE(describe(s));
    reference::Call call(s.shape, s.options, s.tables, s.call, seed);
    Planner planner(s.model);
    PlanOptions options = s.options;
    options.policy = Policy::flat;
    const Plan flat = planner.plan(s.shape, call.batch(), options);
    options.policy = Policy::forest;
    options.cascade = CascadeSwitch::off;
    const Plan off = planner.plan(s.shape, call.batch(), options);
    EXPECT_EQ(off.stats().path, Path::flat);
    EXPECT_EQ(off.stats().num_spans, 0);
    const reference::Ran a = call.run(flat, executors.of(1));
    const reference::Ran b = call.run(off, executors.of(1));
    EXPECT_EQ(a.complaint, "");
    EXPECT_EQ(b.complaint, "");
    EXPECT_EQ(a.out, b.out);
    EXPECT_EQ(a.lse, b.lse);
    options.policy = Policy::flat;
    options.cascade = CascadeSwitch::on;
    const Plan on = planner.plan(s.shape, call.batch(), options);
    if (must_share(s.options, s.tables)) {
      EXPECT_EQ(on.stats().path, Path::cascade);
      ++shared;
    }
    EXPECT_EQ(call.run(on, executors.of(2)).complaint, "");
  }
  EXPECT_GT(shared, 10);
}

TEST(Levels, RandomLevelsFp32) {
  Executors executors;
  int cascades = 0;
  for (std::uint64_t seed = 6'000; seed < 6'150; ++seed) {
    Scenario s = random_scenario(seed, {.fp32_only = true});
    reference::Rng rng(seed);
    const reference::LevelTables levels = reference::random_levels(rng, s.tables.page_size, 3);
    SCOPED_TRACE("levels; options as in " + describe(s));
    reference::Call call(s.shape, s.options, levels, s.call, seed);
    Planner planner(s.model);
    for (const Policy policy : kPolicies) {
      PlanOptions options = s.options;
      options.policy = policy;
      const Plan plan = planner.plan(s.shape, call.batch(), options);
      for (const Isa isa : isas()) {
        const reference::Ran ran = call.run(plan, executors.of(1 + static_cast<int>(seed % 3)), isa);
        ASSERT_EQ(ran.complaint, "") << name_of(policy) << ", " << name_of(isa) << "\n" << plan.describe();
        if (ran.outcome.path == Path::cascade) ++cascades;
      }
    }
  }
  EXPECT_GT(cascades, 100);
}

TEST(Plans, EqualInputsGiveEqualBytes) {
  for (std::uint64_t seed = 7'000; seed < 7'100; ++seed) {
    const Scenario s = random_scenario(seed, {});
    SCOPED_TRACE(describe(s));
    PlanOptions options = s.options;
    options.policy = seed % 2 == 0 ? Policy::forest : Policy::automatic;
    Planner one(s.model);
    Planner other(s.model);
    const Plan first = one.plan(s.shape, s.tables.batch(), options);
    const Scenario unrelated = random_scenario(seed + 1, {});
    (void)other.plan(unrelated.shape, unrelated.tables.batch(), unrelated.options);  // dirties the scratch memory
    const Plan second = other.plan(s.shape, s.tables.batch(), options);
    EXPECT_EQ(first.serialize(), second.serialize());
  }
}

}  // namespace
}  // namespace headwater::property
