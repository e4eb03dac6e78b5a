// The forest and its pieces: hand-made tables with known answers, and the partition property on random ones.
#include <gtest/gtest.h>

#include <vector>

#include "headwater/plan.h"
#include "plan/check.h"
#include "plan/memory.h"
#include "plan/plan_data.h"

namespace headwater::plan_test {
namespace {

using reference::PageTables;

const AttentionShape kShape{8, 2, 64, 64, DType::bf16, DType::bf16, DType::bf16};

struct Span {
  int begin, tokens, members;
  friend bool operator==(const Span&, const Span&) = default;
};

std::vector<Span> spans_of(const Plan& plan) {
  std::vector<Span> spans;
  for (const auto& s : plan.data().spans) spans.push_back({s.pos_begin, s.num_tokens, s.num_members});
  return spans;
}

Plan forest_plan(const PageTables& tables, PlanOptions options = {}) {
  options.policy = Policy::forest;
  Planner planner(eager_model(4'096));  // all rows of a span in one tile
  Plan plan = planner.plan(kShape, tables.batch(), options);
  EXPECT_EQ(complaint(plan, tables.batch()), "") << to_string(tables);
  return plan;
}

PageTables tables_of(int page_size, const std::vector<std::vector<std::int32_t>>& pages, int last = 0) {
  PageTables t;
  t.page_size = page_size;
  for (const auto& p : pages) t.add(p, last > 0 ? last : page_size);
  return t;
}

TEST(Forest, OneGroup) {
  const Plan plan = forest_plan(tables_of(4, {{0, 1, 2}, {0, 1, 3}, {0, 1, 4}}));
  EXPECT_EQ(spans_of(plan), (std::vector<Span>{{0, 8, 3}}));
  EXPECT_EQ(plan.stats().path, Path::cascade);
}

TEST(Forest, AnyNumberOfGroupsAndLevels) {
  const Plan plan = forest_plan(tables_of(4, {{0, 1, 2, 5}, {9, 1, 7}, {0, 1, 2, 6}, {0, 1, 3}, {9, 1, 8}, {20}}));
  // Depth first, ordered by first request: the group of 0, its inner group, the group of 9.
  EXPECT_EQ(spans_of(plan), (std::vector<Span>{{0, 8, 3}, {8, 4, 2}, {0, 8, 2}}));
}

TEST(Forest, PositionsAndIdsCountNotMultiplicity) {
  EXPECT_EQ(forest_plan(tables_of(4, {{0, 1}, {1, 0}, {2, 0}})).stats().path, Path::flat);
  EXPECT_EQ(forest_plan(tables_of(4, {{5, 5, 5}, {5, 5, 6}})).stats().shared_tokens, 8);
  // Sharing again after a divergence is correct, and not grouped.
  EXPECT_EQ(spans_of(forest_plan(tables_of(4, {{0, 1, 7}, {0, 2, 7}}))), (std::vector<Span>{{0, 4, 2}}));
}

TEST(Forest, OutsidersDoNotMatter) {
  PageTables t = tables_of(4, {{0, 1, 2}});
  t.add({}, 0);            // no keys
  t.add({0, 1, 3}, 2, 0);  // no rows
  t.add({8, 9}, 1);        // shares nothing
  t.add({0, 1, 4}, 3);
  EXPECT_EQ(spans_of(forest_plan(t)), (std::vector<Span>{{0, 8, 2}}));
}

TEST(Forest, PartlyFilledSharedPagesAreMasked) {
  PageTables t;
  t.page_size = 4;
  t.add({0, 1}, 2);
  t.add({0, 1}, 3);
  t.add({0, 1, 2}, 1);
  const Plan plan = forest_plan(t);
  EXPECT_EQ(spans_of(plan), (std::vector<Span>{{0, 8, 3}}));
  ASSERT_EQ(plan.data().items.size(), 2U);
  EXPECT_EQ(plan.data().items[0].unmasked_end, 6);  // the shortest request has 6 keys
}

TEST(Forest, NullPagesAreNeverShared) {
  PageTables t = tables_of(4, {{3, 0, 1}, {3, 0, 2}});
  t.null_page = 0;
  EXPECT_EQ(spans_of(forest_plan(t)), (std::vector<Span>{{0, 4, 2}}));
  t.null_page = 3;
  EXPECT_EQ(forest_plan(t).stats().path, Path::flat);
}

TEST(Forest, StartsAreAbsolute) {
  PageTables t;
  t.page_size = 4;
  t.add({9, 0, 1, 2}, 4, 1, 1, 0);
  t.add({0, 1, 3}, 4, 1, 2, 2);
  // The later start is page 2; the first tokens of it are hidden from the second request, which masks them.
  EXPECT_EQ(spans_of(forest_plan(t)), (std::vector<Span>{{10, 6, 2}}));
  t.kv_start_page[1] = 3;
  EXPECT_EQ(forest_plan(t).stats().path, Path::flat);
}

TEST(Forest, WindowsOfDifferentLengthsShareTheDocument) {
  // Window of 20 keys at the end of requests of 40, 43 and 46 keys whose first 9 pages are the same.
  PageTables t;
  t.page_size = 4;
  for (int b = 0; b < 3; ++b) {
    std::vector<std::int32_t> pages{0, 1, 2, 3, 4, 5, 6, 7, 8};
    for (int i = 0; i <= b; ++i) pages.push_back(20 + 10 * b + i);
    t.add(pages, 4 - b);
  }
  PlanOptions o;
  o.window_left = 19;
  const Plan plan = forest_plan(t, o);
  EXPECT_EQ(plan.stats().num_spans, 1);
  EXPECT_EQ(plan.stats().member_sequences, 3);
  EXPECT_EQ(plan.stats().kv_bytes_unique, plan.stats().kv_bytes_read);
}

TEST(Forest, SinksAndWindowAreTwoStretches) {
  PageTables t = tables_of(4, {{0, 1, 2, 3, 4, 5, 6, 7, 30}, {0, 1, 2, 3, 4, 5, 6, 7, 31}});
  PlanOptions o;
  o.window_left = 11;
  o.num_sink_tokens = 4;
  const Plan plan = forest_plan(t, o);
  EXPECT_EQ(spans_of(plan), (std::vector<Span>{{0, 4, 2}, {24, 8, 2}}));
  for (const auto& item : plan.data().items) {
    EXPECT_TRUE(item.pos_begin >= 24 || item.pos_begin + item.num_tokens <= 4);
  }
}

TEST(Forest, DeepChain) {
  // Every request is a prefix of the next: as deep a forest as there are requests.
  PageTables t;
  t.page_size = 4;
  std::vector<std::int32_t> pages;
  for (int b = 0; b < 300; ++b) {
    pages.push_back(b);
    t.add(pages, 1 + b % 4);
  }
  const Plan plan = forest_plan(t);
  EXPECT_EQ(plan.stats().num_spans, 299);
  EXPECT_EQ(plan.stats().kv_bytes_read, plan.stats().kv_bytes_unique);
}

TEST(Forest, WorkedExample) {
  // R1 [A B C | D E X], R2 [A B C D | E Y]; computed keys left of the bar, one page a token: the rows of R1 must not
  // see what comes behind them although D, E are shared pages of both.
  PageTables t;
  t.page_size = 1;
  t.add({0, 1, 2, 3, 4, 5}, 1, 3);
  t.add({0, 1, 2, 3, 4, 6}, 1, 2);
  const Plan plan = forest_plan(t);
  EXPECT_EQ(spans_of(plan), (std::vector<Span>{{0, 5, 2}}));
  ASSERT_FALSE(plan.data().items.empty());
  EXPECT_EQ(plan.data().items[0].num_rows, 5);
  EXPECT_EQ(plan.data().items[0].unmasked_end, 4);  // row D of R1 sees A B C D
}

TEST(Forest, RandomTablesArePartitioned) {
  int cascades = 0;
  for (std::uint64_t seed = 0; seed < 1'500; ++seed) {
    reference::Rng rng(seed);
    PlanOptions options = random_options(rng);
    const PageTables tables = random_tables(rng, options);
    Planner planner(eager_model(rng.integer(4, 64)));
    for (const Policy policy : {Policy::automatic, Policy::flat, Policy::two_level, Policy::vllm, Policy::forest}) {
      options.policy = policy;
      const Plan plan = planner.plan(kShape, tables.batch(), options);
      ASSERT_EQ(complaint(plan, tables.batch()), "") << "seed " << seed << ", policy " << name_of(policy) << "\n"
                                                     << to_string(tables) << plan.describe();
      if (plan.stats().path == Path::cascade) ++cascades;
      if (policy == Policy::flat) {
        ASSERT_EQ(plan.stats().path, Path::flat);
      }
    }
  }
  EXPECT_GT(cascades, 1'000);
}

TEST(Forest, RandomLevelsArePartitioned) {
  int cascades = 0;
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    reference::Rng rng(seed);
    PlanOptions options = random_options(rng);
    const reference::LevelTables levels = reference::random_levels(rng, rng.integer(1, 9), 3);
    Planner planner(eager_model(rng.integer(4, 64)));
    for (const Policy policy : {Policy::automatic, Policy::flat, Policy::two_level, Policy::forest}) {
      options.policy = policy;
      const Plan plan = planner.plan(kShape, levels.batch(), options);
      ASSERT_EQ(complaint(plan, levels.batch()), "") << "seed " << seed << ", policy " << name_of(policy);
      if (plan.stats().path == Path::cascade) ++cascades;
    }
  }
  EXPECT_GT(cascades, 200);
}

TEST(Forest, TheCheckerSeesFaults) {
  // A negative control: plans spoilt in one place are found out.
  const PageTables t = tables_of(4, {{0, 1, 2}, {0, 1, 3}, {0, 1, 4}});
  PlanOptions options;
  options.policy = Policy::forest;
  Planner planner(eager_model());
  const auto spoilt = [&](auto&& spoil) {
    Plan plan = planner.plan(kShape, t.batch(), options);
    spoil(plan.data());
    return complaint(plan, t.batch());
  };
  EXPECT_NE(spoilt([](auto& p) { ++p.items[0].page_begin; }), "");
  EXPECT_NE(spoilt([](auto& p) { --p.items[0].num_tokens; }), "");
  EXPECT_NE(spoilt([](auto& p) { p.items.pop_back(); }), "");
  EXPECT_NE(spoilt([](auto& p) { p.items.push_back(p.items.back()); }), "");
  EXPECT_NE(spoilt([](auto& p) { std::swap(p.merge_slots[0], p.merge_slots[1]); }), "");
}

}  // namespace
}  // namespace headwater::plan_test
