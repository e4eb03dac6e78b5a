// Planning on the device, run by host threads: its spans and members against the host planner's, its plans against the
// page tables and, through the CPU back end, against the float64 reference; bad input; refusals. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <sstream>
#include <tuple>

#include "cuda/planner_emulation.h"
#include "headwater/error.h"
#include "plan/check.h"
#include "plan/memory.h"
#include "property/scenario.h"
#include "reference/call.h"

namespace headwater::cuda_test {
namespace {

using cuda::DevicePlanStatus;
using reference::PageTables;
using reference::Rng;
using reference::tree;

const AttentionShape kShape{4, 2, 32, 32, DType::f32, DType::f32, DType::f32};

PlanOptions with(Policy policy) {
  PlanOptions options;
  options.policy = policy;
  return options;
}

/// (first token, tokens, members)
using Span = std::tuple<std::int32_t, std::int32_t, std::set<std::int32_t>>;

std::multiset<Span> spans_of(const Plan& plan) {
  const detail::PlanData::Memory& memory = *plan.data().memory;
  std::multiset<Span> spans;
  for (const detail::Piece& piece : memory.pieces) {
    if (piece.num_members < 2 || piece.depth >= cuda::kMaxDepth) continue;
    std::set<std::int32_t> members;
    for (std::int32_t k = 0; k < piece.num_members; ++k) {
      const auto e = static_cast<std::size_t>(memory.forest.order[static_cast<std::size_t>(piece.member_begin + k)]);
      members.insert(memory.entries[e].request);
    }
    spans.emplace(piece.tok_begin, piece.tok_end - piece.tok_begin, members);
  }
  return spans;
}

std::multiset<Span> spans_of(const Planned& planned) {
  std::multiset<Span> spans;
  for (const cuda::DeviceSpan& s : planned.spans) {
    const auto first = planned.members.begin() + s.member_begin;
    spans.emplace(s.pos_begin, s.num_tokens, std::set<std::int32_t>(first, first + s.num_members));
  }
  return spans;
}

/// What plan_test::complaint says, but for what is promised of host plans only: here a list of rows serves several
/// items, and some of its rows may see nothing of one.
std::string complaint(const Plan& plan, const Batch& batch) {
  std::istringstream all(plan_test::complaint(plan, batch));
  std::string rest;
  for (std::string line; std::getline(all, line);) {
    if (line.find("sees nothing of an item") != std::string::npos) continue;
    if (line.find("nobody sees position") != std::string::npos) continue;
    rest += line + "\n";
  }
  return rest;
}

/// What is wrong with the rows and page ids that items carry themselves; empty: nothing.
std::string carried_complaint(const Planned& planned, const BlockTables& tables) {
  std::string text;
  for (std::size_t i = 0; i < planned.items.size(); ++i) {
    const cuda::DeviceItem& item = planned.items[i];
    const cuda::ItemRow& row = planned.item_rows[static_cast<std::size_t>(item.row_begin)];
    const cuda::ItemRow& first = item.first_row;
    if (std::tie(first.row, first.lo, first.hi, first.pos) != std::tie(row.row, row.lo, row.hi, row.pos)) {
      text += "item " + std::to_string(i) + ": another first row\n";
    }
    const int pages = (item.first_token + item.num_tokens + tables.page_size - 1) / tables.page_size;
    for (int j = 0; j < std::min(pages, cuda::kFirstPages); ++j) {
      if (item.first_pages[j] == tables.block_table[static_cast<std::size_t>(item.page_begin + j)]) continue;
      text += "item " + std::to_string(i) + ": another page " + std::to_string(j) + "\n";
    }
  }
  return text;
}

struct Case {
  PageTables tables;
  PlanOptions options;
  DeviceModel model;
};

Case random_case(std::uint64_t seed, int max_requests) {
  Rng rng(seed);
  Case c;
  reference::ForestOptions forest;
  constexpr std::array kPageSizes{1, 2, 4, 8, 16, 32};
  forest.page_size = rng.pick(kPageSizes);
  forest.max_requests = max_requests;
  forest.max_pages = rng.integer(1, 40);
  forest.max_rows = rng.chance(0.4) ? rng.integer(2, 20) : 1;
  forest.null_page = rng.chance(0.3);
  c.tables = reference::random_forest(rng, forest);
  if (forest.null_page && rng.chance(0.5)) {  // null pages that are seen
    for (std::int32_t& id : c.tables.kv_indices) {
      if (rng.chance(0.1)) id = 0;
    }
  }
  c.options.causal = !rng.chance(0.2);
  if (rng.chance(0.4)) c.options.min_shared_pages = rng.integer(1, 4);
  if (rng.chance(0.4)) c.options.min_members = rng.integer(2, 4);
  constexpr std::array kTiles{8, 16, 32, 128};
  c.model = rng.chance(0.3) ? cuda::h200_model(kShape) : property::eager_model(rng.pick(kTiles), 1 << 20);
  if (rng.chance(0.5)) c.options.num_workers = rng.integer(1, 40);
  return c;
}

/// All that must hold of one plan; returns the spans.
std::multiset<Span> check(const Case& c, Policy policy) {
  PlanOptions options = c.options;
  options.policy = policy;
  const BlockTables tables(c.tables);
  const Planned planned = plan_alone(kShape, options, c.model, tables);
  EXPECT_EQ(planned.status.flags & ~DevicePlanStatus::kOverCapacity, 0U);
  EXPECT_EQ(complaint(to_plan(kShape, options, tables, planned), c.tables.batch()), "");
  EXPECT_EQ(carried_complaint(planned, tables), "");
  return spans_of(planned);
}

TEST(DevicePlanner, SpansAndMembersAreTheHosts) {
  int shared = 0;
  int deep = 0;
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    SCOPED_TRACE(seed);
    Case c = random_case(seed, seed % 4 == 0 ? 80 : 14);
    c.options.policy = Policy::forest;
    Planner planner(c.model);
    const Plan host = planner.plan(kShape, c.tables.batch(), c.options);
    const auto expected = spans_of(host);
    EXPECT_EQ(check(c, Policy::forest), expected) << reference::to_string(c.tables);
    shared += expected.empty() ? 0 : 1;
    deep += std::ranges::any_of(host.data().spans, [](const auto& s) { return s.depth >= cuda::kMaxDepth; }) ? 1 : 0;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(shared, 200);
  EXPECT_GT(deep, 5) << "trees beyond the depth limit";
}

TEST(DevicePlanner, AutomaticCutsAsTheHostsProgramme) {
  int cascades = 0;
  int equal = 0;
  for (std::uint64_t seed = 1'000; seed < 1'300; ++seed) {
    SCOPED_TRACE(seed);
    Case c = random_case(seed, 20);
    c.options.policy = Policy::automatic;
    Planner planner(c.model);
    const Plan host = planner.plan(kShape, c.tables.batch(), c.options);
    const auto spans = check(c, Policy::automatic);
    if (::testing::Test::HasFailure()) return;
    if (spans.empty() || host.data().memory->chosen != Policy::automatic) continue;
    const auto& nodes = host.data().memory->forest.nodes;
    if (std::ranges::any_of(nodes, [](const auto& n) { return n.num_members > 1 && n.depth >= cuda::kMaxDepth; }))
      continue;
    ++cascades;
    equal += spans == spans_of(host) ? 1 : 0;
    EXPECT_EQ(spans, spans_of(host)) << reference::to_string(c.tables);
  }
  EXPECT_GT(cascades, 50);
  EXPECT_EQ(equal, cascades);
}

TEST(DevicePlanner, FlatSharesNothing) {
  for (std::uint64_t seed = 2'000; seed < 2'100; ++seed) {
    SCOPED_TRACE(seed);
    EXPECT_TRUE(check(random_case(seed, 14), Policy::flat).empty());
  }
}

TEST(DevicePlanner, ThreadsAndBlocksPlanTheSame) {
  for (std::uint64_t seed = 3'000; seed < 3'030; ++seed) {
    SCOPED_TRACE(seed);
    const Case c = random_case(seed, 30);
    const BlockTables tables(c.tables);
    for (const Policy policy : {Policy::automatic, Policy::forest}) {
      PlanOptions options = c.options;
      options.policy = policy;
      const std::string alone = bytes_of(plan_alone(kShape, options, c.model, tables));
      EXPECT_EQ(bytes_of(plan_by_threads(kShape, options, c.model, tables, 1, 5)), alone);
      EXPECT_EQ(bytes_of(plan_by_threads(kShape, options, c.model, tables, 3, 2)), alone);
    }
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(DevicePlanner, AttentionByItsPlansIsTheReferences) {
  SerialExecutor executor;
  int cascades = 0;
  for (std::uint64_t seed = 4'000; seed < 4'060; ++seed) {
    SCOPED_TRACE(seed);
    Case c = random_case(seed, 10);
    for (const Policy policy : {Policy::automatic, Policy::forest, Policy::flat}) {
      PlanOptions options = c.options;
      options.policy = policy;
      reference::Call call(kShape, options, c.tables, {}, seed);
      const BlockTables tables(call.tables());
      const Planned planned = plan_alone(kShape, options, c.model, tables);
      const reference::Ran ran = call.run(to_plan(kShape, options, tables, planned), executor);
      EXPECT_EQ(ran.complaint, "") << name_of(policy) << "\n" << reference::to_string(c.tables);
      cascades += planned.spans.empty() ? 0 : 1;
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(cascades, 40);
}

TEST(DevicePlanner, PaddedRequestsNeverGroup) {
  PageTables t = tree({1, 4}, {64, 32}, 16);
  t.null_page = 0;
  for (std::int32_t& id : t.kv_indices) ++id;
  ++t.num_pages;
  BlockTables tables(t);
  tables.pad(12);
  const PlanOptions options = with(Policy::forest);
  const Planned planned = plan_alone(kShape, options, property::eager_model(), tables);
  EXPECT_EQ(planned.status.flags, 0U);
  const std::multiset<Span> expected{{0, 64, {0, 1, 2, 3}}};
  EXPECT_EQ(spans_of(planned), expected);
  std::vector<std::int32_t> empty = planned.empty_rows;
  std::ranges::sort(empty);
  EXPECT_EQ(empty, (std::vector<std::int32_t>{4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}));
  for (const detail::WorkItem& item : planned.items) {
    for (std::int32_t j = 0; j < item.num_rows; ++j) {
      EXPECT_LT(planned.item_rows[static_cast<std::size_t>(item.row_begin + j)].row, 4);
    }
  }
}

TEST(DevicePlanner, TheNullPageIsNotShared) {
  PageTables t;
  t.page_size = 16;
  t.null_page = 0;
  t.add({0, 1, 2}, 16);
  t.add({0, 1, 3}, 16);
  t.add({4, 0, 2}, 16);
  t.add({4, 0, 2}, 16);
  t.num_pages = 8;
  const BlockTables tables(t);
  const std::multiset<Span> expected{{0, 16, {2, 3}}};
  EXPECT_EQ(spans_of(plan_alone(kShape, with(Policy::forest), property::eager_model(), tables)), expected);
  BlockTables without(t);
  without.null_page = -1;
  EXPECT_EQ(spans_of(plan_alone(kShape, with(Policy::forest), property::eager_model(), without)).size(), 2U);
}

TEST(DevicePlanner, BadIdsAndLengthsAreFlatAndSaySo) {
  const PageTables t = tree({1, 6}, {64, 32}, 16);
  const PlanOptions options = with(Policy::forest);
  const DeviceModel model = property::eager_model();
  const auto flat = [&](const BlockTables& tables, std::uint32_t flag) {
    for (const int blocks : {1, 3}) {
      const Planned planned = blocks == 1 ? plan_alone(kShape, options, model, tables)
                                          : plan_by_threads(kShape, options, model, tables, blocks, 2);
      EXPECT_EQ(planned.status.flags, flag);
      EXPECT_EQ(planned.status.num_spans, 0);
      EXPECT_GE(planned.header.num_items, 6);
    }
  };
  for (const std::int32_t id : {-1, -7, 1 << 30}) {
    for (const std::size_t column : {0U, 3U, 5U}) {
      BlockTables bad(t);
      bad.num_pages = t.num_pages;
      bad.block_table[2 * static_cast<std::size_t>(bad.row_stride) + column] = id;
      flat(bad, DevicePlanStatus::kBadPageId);
    }
  }
  BlockTables just(t);
  just.num_pages = t.num_pages - 1;
  flat(just, DevicePlanStatus::kBadPageId);
  BlockTables negative(t);
  negative.lengths[3] = -5;
  EXPECT_EQ(plan_alone(kShape, options, model, negative).status.flags, DevicePlanStatus::kBadLength);
  BlockTables beyond(t, 0);
  beyond.lengths[3] = beyond.max_blocks * 16 + 1;
  const Planned planned = plan_alone(kShape, options, model, beyond);
  EXPECT_EQ(planned.status.flags, DevicePlanStatus::kBadLength);
  for (const detail::WorkItem& item : planned.items)
    EXPECT_LE(item.pos_begin + item.num_tokens, beyond.max_blocks * 16);
}

TEST(DevicePlanner, BadRowsComputeNothing) {
  const PageTables t = tree({1, 6}, {64, 32}, 16);
  for (const auto& [at, value] : {std::pair{3, 1}, {0, 1}, {2, -4}, {5, 7}}) {
    BlockTables bad(t);
    const cuda::Capacity room{.max_rows = 6, .max_page_ids = 0, .max_items = 64, .max_partials = 500};
    bad.qo_indptr[static_cast<std::size_t>(at)] = value;
    const Planned planned = plan_alone(kShape, with(Policy::forest), property::eager_model(), bad, &room);
    EXPECT_EQ(planned.status.flags, DevicePlanStatus::kBadRows);
    EXPECT_EQ(planned.header.num_items, 0);
    EXPECT_EQ(planned.header.num_merge_rows, 0);
    EXPECT_EQ(planned.header.num_empty_rows, 0);
  }
}

TEST(DevicePlanner, BeyondTheCapacityIsFlatAndSaysSo) {
  int over = 0;
  for (std::uint64_t seed = 5'000; seed < 5'100; ++seed) {
    SCOPED_TRACE(seed);
    const Case c = random_case(seed, 14);
    PlanOptions options = c.options;
    options.policy = Policy::forest;
    const BlockTables tables(c.tables);
    const detail::CostModel cost(kShape, options, c.model);
    const cuda::DeviceTableLimits limits = tables.limits();
    // No more than a flat plan in one piece each needs.
    const cuda::Capacity least{.max_rows = limits.max_rows,
                               .max_page_ids = 0,
                               .max_items = limits.max_requests + limits.max_rows / cost.tile_rows(),
                               .max_partials = 0};
    const Planned planned = plan_alone(kShape, options, c.model, tables, &least);
    EXPECT_EQ(planned.status.flags & ~DevicePlanStatus::kOverCapacity, 0U);
    EXPECT_EQ(planned.status.num_spans, 0);
    EXPECT_EQ(planned.status.num_partials, 0);
    EXPECT_EQ(complaint(to_plan(kShape, options, tables, planned), c.tables.batch()), "");
    over += planned.status.flags != 0 ? 1 : 0;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(over, 30);
}

TEST(DevicePlanner, CapacityHoldsBigPlans) {
  const AttentionShape shape{32, 8, 128, 128, DType::f16, DType::f16, DType::f16};
  const DeviceModel model = cuda::h200_model(shape);
  for (const Policy policy : {Policy::automatic, Policy::forest}) {
    for (const auto& [nodes, tokens] : {std::pair<std::vector<int>, std::vector<int>>{{256}, {4'096}},
                                        {{1, 256}, {16'384, 512}},
                                        {{2, 256}, {8'192, 300}},
                                        {{1, 4, 32, 256}, {4'096, 2'048, 1'024, 100}},
                                        {{1}, {65'536}},
                                        {{1, 1'024}, {2'048, 128}}}) {
      const PageTables t = tree(nodes, tokens, 16);
      const BlockTables tables(t);
      const Planned planned = plan_alone(shape, with(policy), model, tables);
      EXPECT_EQ(planned.status.flags, 0U);
      const std::int32_t inner = std::accumulate(nodes.begin(), nodes.end() - 1, 0);
      if (policy == Policy::forest) {
        EXPECT_EQ(planned.status.num_spans, inner);
      }
      EXPECT_EQ(planned.status.num_spans > 0, inner > 0);
      EXPECT_EQ(complaint(to_plan(shape, with(policy), tables, planned), t.batch()), "");
    }
  }
  // The workspace of 256 requests stays below 64 MiB.
  const cuda::DeviceTableLimits limits{256, 2'048, 256, 16, 1 << 20, 0};
  const detail::CostModel cost(shape, {}, model);
  EXPECT_LT(cuda::planner_capacity(cost, limits).max_partials * 32 * 129 * 4, 64 << 20);
}

TEST(DevicePlanner, WhatItCannotPlanIsRefused) {
  const cuda::DeviceTableLimits limits{4, 8, 4, 16, 100, 0};
  const auto reason = [&](const PlanOptions& options, cuda::DeviceTableLimits l) -> std::string {
    try {
      cuda::check_planner(kShape, options, l);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(reason({}, limits), "");
  PlanOptions windowed;
  windowed.window_left = 5;
  EXPECT_EQ(reason(windowed, limits), "options.window_left = 5, expected -1 when plans are made on the device");
  EXPECT_NE(reason(with(Policy::two_level), limits).find("expected auto, flat or forest"), std::string::npos);
  cuda::DeviceTableLimits odd = limits;
  odd.page_size = 24;
  EXPECT_EQ(reason({}, odd), "limits.page_size = 24, expected a power of two in 1..256 on CUDA");
  odd = limits;
  odd.max_requests = 0;
  EXPECT_EQ(reason({}, odd), "limits.max_requests = 0, expected 1..4096");
  EXPECT_EQ(reason({.min_members = -3}, limits).substr(0, 16), "min_members = -3");
}

}  // namespace
}  // namespace headwater::cuda_test
