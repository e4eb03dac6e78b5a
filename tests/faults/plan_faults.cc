// Faults of planning: what is taken for sharing, which pages the pieces cover, when a cascade is chosen.
#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "faults/fixture.h"
#include "plan/plan_data.h"

namespace headwater::faults {
namespace {

using reference::PageTables;

/// A cascade plan under a cost model in which sharing always pays.
Plan forest_plan(const PageTables& tables, PlanOptions options = {}) {
  options.policy = Policy::forest;
  Planner planner(property::eager_model());
  return planner.plan(kSmallF32, tables.batch(), options);
}

TEST(Faults, Fault11_SharingIsReadOffPageIdsByPosition) {
  // Different pages do not group, whatever they hold or however often they are referenced; the same ids at other
  // positions do not either; the same ids at the same positions do.
  PageTables apart;
  apart.page_size = 4;
  apart.add({0, 1, 2}, 4);
  apart.add({3, 4, 5}, 4);
  EXPECT_EQ(forest_plan(apart).stats().path, Path::flat);
  PageTables shifted;
  shifted.page_size = 4;
  shifted.add({0, 1, 2}, 4);
  shifted.add({3, 0, 1}, 4);
  EXPECT_EQ(forest_plan(shifted).stats().path, Path::flat);
  PageTables same;
  same.page_size = 4;
  same.add({0, 1, 2}, 4);
  same.add({0, 1, 3}, 4);
  const Plan plan = forest_plan(same);
  EXPECT_EQ(plan.stats().path, Path::cascade);
  EXPECT_EQ(plan.stats().num_spans, 1);
  EXPECT_EQ(plan.stats().shared_tokens, 8);
  EXPECT_EQ(plan.stats().member_sequences, 2);
  // Equal absolute position under different starts of the tables counts; the null page never does.
  PageTables windows;
  windows.page_size = 4;
  windows.add({9, 0, 1, 2}, 4, 1, 1);
  windows.add({0, 1, 3}, 4, 1, 2);
  const Plan later = forest_plan(windows);
  EXPECT_EQ(later.stats().path, Path::cascade);
  EXPECT_GE(later.stats().shared_tokens, 8);
  EXPECT_EQ(later.stats().kv_bytes_read, 20 * 2 * 2 * 64 * 4);  // 20 distinct tokens, once each
  PageTables null_page = same;
  null_page.null_page = 0;
  EXPECT_LE(forest_plan(null_page).stats().shared_tokens, 4);
}

/// For every row: the tokens of its pieces, checked against the row's own table.
void check_partition(const property::Scenario& s, const Plan& plan) {
  const detail::PlanData& data = plan.data();
  const reference::Rows rows = reference::rows_of(s.tables.batch());
  std::vector<std::map<std::int64_t, std::pair<std::int32_t, int>>> read(rows.rows.size());  // position -> page, times
  std::vector<std::set<int>> heads_of(rows.rows.size());
  for (const detail::WorkItem& item : data.items) {
    for (int head = item.kv_head_begin; head < item.kv_head_end; ++head) {
      for (int j = 0; j < item.num_rows; ++j) {
        const auto row = static_cast<std::size_t>(data.item_rows[static_cast<std::size_t>(item.row_begin + j)]);
        heads_of[row].insert(head);
        if (head != 0) continue;  // KV heads are checked by count, positions on the first
        for (int t = 0; t < item.num_tokens; ++t) {
          const int in_pages = item.first_token + t;
          const std::int32_t page =
              data.page_ids[static_cast<std::size_t>(item.page_begin + in_pages / s.tables.page_size)];
          const std::int64_t position = item.pos_begin + t;
          ASSERT_EQ(position % s.tables.page_size, in_pages % s.tables.page_size);
          auto [at, fresh] = read[row].try_emplace(position, page, 0);
          ASSERT_TRUE(fresh) << "row " << row << " reads position " << position << " twice";
          ++at->second.second;
        }
      }
    }
  }
  for (std::size_t r = 0; r < rows.rows.size(); ++r) {
    bool any = false;
    for (const reference::Token& token : rows.paths[rows.rows[r].path]) {
      if (!reference::sees(s.options, rows.rows[r].position, token.position)) continue;
      any = true;
      const auto at = read[r].find(token.position);
      ASSERT_NE(at, read[r].end()) << "row " << r << " misses position " << token.position;
      ASSERT_EQ(at->second.first, token.page) << "row " << r << ", position " << token.position;
    }
    if (any) {
      ASSERT_EQ(static_cast<int>(heads_of[r].size()), s.shape.num_kv_heads);
    }
  }
}

TEST(Faults, Fault13_PiecesPartitionTheFlatRange) {
  int cascades = 0;
  for (std::uint64_t seed = 42'000; seed < 42'300; ++seed) {
    const property::Scenario s = property::random_scenario(seed, {.fp32_only = true});
    SCOPED_TRACE(property::describe(s));
    for (const bool invariant : {false, true}) {
      PlanOptions options = s.options;
      options.policy = Policy::forest;
      options.batch_invariant = invariant;
      options.invariant_chunk = 16;
      Planner planner(s.model);
      const Plan plan = planner.plan(s.shape, s.tables.batch(), options);
      if (plan.stats().path == Path::cascade) ++cascades;
      check_partition(s, plan);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  EXPECT_GT(cascades, 100);
}

TEST(Faults, Fault16_BatchInvariantResultsDoNotDependOnCascade) {
  // (All of it: property_invariant_test.) The same bits from policy flat and from a real cascade.
  PlanOptions options;
  options.batch_invariant = true;
  options.invariant_chunk = 32;
  reference::Call call(kSmallBf16, options, reference::tree({1, 6}, {96, 20}, 16), {}, 42'500);
  ThreadPool pool(2);
  Planner planner(property::eager_model());
  options.policy = Policy::flat;
  const reference::Ran flat = call.run(planner.plan(kSmallBf16, call.batch(), options), pool);
  options.policy = Policy::forest;
  const reference::Ran cascade = call.run(planner.plan(kSmallBf16, call.batch(), options), pool);
  EXPECT_EQ(flat.complaint + cascade.complaint, "");
  EXPECT_EQ(cascade.outcome.path, Path::cascade);
  EXPECT_EQ(flat.out, cascade.out);
  EXPECT_EQ(flat.lse, cascade.lse);
}

TEST(Faults, Fault17_CascadeIsNotChosenWhereItLoses) {
  // By the model's own account `automatic` is never slower than flat; with nothing shared the plans are equal.
  const auto check = [](const AttentionShape& shape, const PageTables& tables) {
    Planner planner;
    PlanOptions options;
    options.policy = Policy::flat;
    const Plan flat = planner.plan(shape, tables.batch(), options);
    options.policy = Policy::automatic;
    const Plan chosen = planner.plan(shape, tables.batch(), options);
    EXPECT_LE(chosen.stats().predicted_ps, flat.stats().predicted_ps);
    EXPECT_EQ(chosen.stats().predicted_flat_ps, flat.stats().predicted_ps);
    return chosen.stats().path;
  };
  AttentionShape shape;
  EXPECT_EQ(check(shape, reference::tree({8}, {512}, 16)), Path::flat);       // nothing shared
  EXPECT_EQ(check(shape, reference::tree({1, 2}, {1, 512}, 1)), Path::flat);  // one shared token of two requests
  shape.num_kv_heads = 1;
  shape.num_qo_heads = 8;
  (void)check(shape, reference::tree({1, 8}, {512, 64}, 16));
  // Nothing to find: the plan of `automatic` is the flat plan (the options that made it apart).
  const PageTables apart = reference::tree({8}, {512}, 16);
  Planner planner;
  PlanOptions options;
  options.policy = Policy::flat;
  const Plan flat = planner.plan(shape, apart.batch(), options);
  options.policy = Policy::automatic;
  const Plan automatic = planner.plan(shape, apart.batch(), options);
  EXPECT_EQ(flat.stats().num_items, automatic.stats().num_items);
  EXPECT_EQ(flat.stats().kv_bytes_read, automatic.stats().kv_bytes_read);
  EXPECT_EQ(flat.stats().num_partials, automatic.stats().num_partials);
}

TEST(Faults, Fault18_SmallModelCellIsNotSlowerByPrediction) {
  // 8 query heads on 1 KV head, prefix 4000, 8 requests: a cell where three launches lost to one. The CPU's step is one
  // run; `automatic` must not predict a loss against flat.
  AttentionShape shape;
  shape.num_qo_heads = 8;
  shape.num_kv_heads = 1;
  Planner planner;
  const PageTables tables = reference::tree({1, 8}, {4000, 100}, 16);
  const Plan plan = planner.plan(shape, tables.batch(), {});
  EXPECT_LE(plan.stats().predicted_ps, plan.stats().predicted_flat_ps);
}

TEST(Faults, Fault28_OutsidersDoNotDisableSharing) {
  // Two groups, a finished request without rows, one without keys, one unrelated: both groups are found.
  PageTables tables;
  tables.page_size = 4;
  tables.add({0, 1, 2}, 4);
  tables.add({10, 11, 12}, 2);
  tables.add({}, 0, 1);
  tables.add({0, 1, 3}, 4);
  tables.add({20}, 4, 0);
  tables.add({30, 31}, 1);
  tables.add({10, 11, 13}, 2);
  const Plan plan = forest_plan(tables);
  EXPECT_EQ(plan.stats().path, Path::cascade);
  EXPECT_EQ(plan.stats().num_spans, 2);
  EXPECT_EQ(plan.stats().shared_tokens, 16);
  EXPECT_EQ(plan.stats().member_sequences, 4);
  check_both_paths(kSmallF32, tables);
}

TEST(Faults, Fault29_WhetherACascadeRanCanBeTold) {
  const PageTables tables = reference::tree({1, 4}, {32, 8}, 8);
  PlanOptions options;
  options.policy = Policy::forest;
  reference::Call call(kSmallF32, options, tables, {}, 42'600);
  Planner planner(property::eager_model());
  const Plan plan = planner.plan(kSmallF32, call.batch(), options);
  SerialExecutor serial;
  const reference::Ran ran = call.run(plan, serial);
  EXPECT_EQ(ran.complaint, "");
  EXPECT_EQ(ran.outcome.path, Path::cascade);
  EXPECT_GT(ran.outcome.items, 0);
  EXPECT_GT(ran.outcome.merged_rows, 0);
  EXPECT_EQ(plan.stats().num_spans, 1);
  EXPECT_EQ(plan.stats().shared_tokens, 32);
  EXPECT_EQ(plan.stats().member_sequences, 4);
  EXPECT_NE(plan.describe().find("cascade"), std::string::npos) << plan.describe();
  EXPECT_NE(plan.to_json().find("\"cascade\""), std::string::npos) << plan.to_json();
}

}  // namespace
}  // namespace headwater::faults
