// Capacities and workspaces of plans, without a GPU: exact for one plan, never too small for any plan within bounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "cuda/fault_fixture.h"
#include "reference/rng.h"

namespace headwater::cuda_test {
namespace {

constexpr std::array kPolicies{Policy::automatic, Policy::flat, Policy::two_level, Policy::vllm, Policy::forest};
constexpr std::size_t kMostWorkspace = std::size_t{64} << 20;

/// Bounds that a batch just meets.
cuda::PlanBounds bounds_of(const reference::PageTables& tables) {
  cuda::PlanBounds bounds;
  bounds.max_requests = tables.num_requests();
  bounds.max_rows = tables.qo_indptr.back();
  bounds.page_size = tables.page_size;
  for (std::size_t b = 0; b + 1 < tables.kv_indptr.size(); ++b) {
    bounds.max_pages = std::max<std::int64_t>(bounds.max_pages, tables.kv_indptr[b + 1] - tables.kv_indptr[b]);
  }
  const auto equal = [](const std::vector<std::int32_t>& v) {
    return std::ranges::all_of(v, [&](std::int32_t x) { return x == v.front(); });
  };
  bounds.same_start = equal(tables.kv_start_page) && equal(tables.first_page_offset);
  return bounds;
}

/// Names the fields of `plan` beyond `most`; empty: it fits.
std::string beyond(const cuda::Capacity& plan, const cuda::Capacity& most) {
  std::string text;
  const auto compare = [&](const char* name, std::int64_t is, std::int64_t limit) {
    if (is > limit) text += std::string(name) + " " + std::to_string(is) + " > " + std::to_string(limit) + "; ";
  };
  compare("max_rows", plan.max_rows, most.max_rows);
  compare("max_page_ids", plan.max_page_ids, most.max_page_ids);
  compare("max_items", plan.max_items, most.max_items);
  compare("max_partials", plan.max_partials, most.max_partials);
  return text;
}

TEST(CudaCapacity, EveryPlanWithinTheBoundsFits) {
  int cascades = 0;
  int tight_items = 0;
  int tight_ids = 0;
  for (std::uint64_t seed = 60'000; seed < 64'000; ++seed) {
    property::Scenario s = property::random_scenario(seed, {.max_rows = seed % 3 == 0 ? 40 : 4,
                                                            .max_pages = seed % 5 == 0 ? 60 : 12,
                                                            .head_dims = {64, 128},
                                                            .page_sizes = {1, 2, 4, 8, 16, 16, 32, 64},
                                                            .gpu_types = true});
    SCOPED_TRACE(property::describe(s));
    reference::Rng rng(seed);
    // Windows shorter than what rows of a tile are apart: gaps, and sinks before them. (With windows of their own,
    // tables may hold stale ids outside them.)
    if (seed % 4 != 0 && s.options.window_left < 0 && s.options.local_chunk == 0) {
      s.options.window_left = rng.integer(0, 20);
      s.options.num_sink_tokens = rng.chance(0.7) ? rng.integer(1, 6) : 0;
    }
    DeviceModel model = s.model;
    if (rng.chance(0.5)) model = cuda::h200_model(s.shape);
    if (rng.chance(0.5)) model.num_workers = rng.chance(0.5) ? 9 : 33;
    if (rng.chance(0.2)) model.cache_bytes = 1 << 14;
    Planner planner(model);
    for (const Policy policy : kPolicies) {
      PlanOptions options = s.options;
      options.policy = policy;
      options.batch_invariant = seed % 3 == 1;
      options.invariant_chunk = 1 << (4 + seed % 4);
      const cuda::Capacity most = cuda::Capacity::within(bounds_of(s.tables), s.shape, options, model);
      const Plan plan = planner.plan(s.shape, s.tables.batch(), options);
      const cuda::Capacity needed = cuda::Capacity::of(plan);
      ASSERT_EQ(beyond(needed, most), "") << name_of(policy) << "\n" << plan.describe();
      cascades += plan.stats().path == Path::cascade ? 1 : 0;
      tight_items += 2 * needed.max_items >= most.max_items ? 1 : 0;
      tight_ids += 2 * needed.max_page_ids >= most.max_page_ids ? 1 : 0;
    }
  }
  EXPECT_GT(cascades, 1'000);
  // The bounds are not far off where plans are simple.
  EXPECT_GT(tight_items, 100);
  EXPECT_GT(tight_ids, 100);
}

TEST(CudaCapacity, SharedSpansBetweenPagesOfOnesOwnFit) {
  // Eight pairs that share ten pages; before them one of a pair has ten pages of its own, and both have some behind.
  const AttentionShape shape{8, 2, 64, 64, DType::f16, DType::f16, DType::f16};
  reference::PageTables tables;
  tables.page_size = 16;
  std::int32_t next = 0;
  const auto some = [&](int count) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
    std::iota(ids.begin(), ids.end(), next);
    next += count;
    return ids;
  };
  for (int pair = 0; pair < 8; ++pair) {
    const std::vector<std::int32_t> shared = some(10);
    std::vector<std::int32_t> longer = some(10);
    std::vector<std::int32_t> shorter = shared;
    longer.insert(longer.end(), shared.begin(), shared.end());
    for (std::vector<std::int32_t>* ids : {&longer, &shorter}) {
      ids->push_back(next++);
      tables.add(*ids, 16);
    }
    tables.kv_start_page.resize(static_cast<std::size_t>(tables.num_requests()) - 1, 0);
    tables.kv_start_page.push_back(10);
  }
  tables.num_pages = next;
  cuda::PlanBounds bounds = bounds_of(tables);
  ASSERT_FALSE(bounds.same_start);
  bounds.max_shared_spans = 1;
  DeviceModel model = property::eager_model();
  model.num_workers = 1;
  PlanOptions options;
  options.policy = Policy::forest;
  Planner planner(model);
  const Plan plan = planner.plan(shape, tables.batch(), options);
  ASSERT_EQ(plan.stats().num_spans, 8);
  EXPECT_EQ(beyond(cuda::Capacity::of(plan), cuda::Capacity::within(bounds, shape, options, model)), "");
}

TEST(CudaCapacity, EveryStepOfADecodeFits) {
  // One DevicePlan's capacity for a decode in which requests join, grow and leave, and share ever longer prefixes.
  const AttentionShape shape{32, 8, 128, 128, DType::f16, DType::f16, DType::f16};
  const DeviceModel model = cuda::h200_model(shape);
  const cuda::PlanBounds bounds{.max_requests = 64, .max_rows = 64, .max_pages = 80, .max_shared_spans = 3};
  const cuda::Capacity most = cuda::Capacity::within(bounds, shape, {}, model);
  Planner planner(model);
  for (int step = 1; step <= 64; ++step) {
    const int branches = 1 + step / 16;
    const int leaves = step / branches * branches;
    const reference::PageTables tables = reference::tree({1, branches, leaves}, {16 * step / 4, 256, 17 + step}, 16);
    for (const Policy policy : kPolicies) {
      PlanOptions options;
      options.policy = policy;
      const Plan plan = planner.plan(shape, tables.batch(), options);
      ASSERT_EQ(beyond(cuda::Capacity::of(plan), most), "") << "step " << step << ", " << name_of(policy);
    }
  }
}

TEST(CudaCapacity, TablesThatAreKeptWholeFit) {
  // Plans of many page ids keep whole tables on the device, with the places that a plan leaves for them to grow.
  const AttentionShape shape{32, 8, 128, 128, DType::f16, DType::f16, DType::f16};
  const DeviceModel model = cuda::h200_model(shape);
  const cuda::PlanBounds bounds{.max_requests = 64, .max_rows = 64, .max_pages = 259};
  PlanOptions options;
  options.policy = Policy::flat;
  const cuda::Capacity most = cuda::Capacity::within(bounds, shape, options, model);
  for (int pages = 255; pages <= 259; ++pages) {
    const reference::PageTables tables = reference::tree({64}, {16 * pages}, 16);
    const Plan plan = Planner(model).plan(shape, tables.batch(), options);
    const cuda::Capacity needed = cuda::Capacity::of(plan);
    EXPECT_GT(needed.max_page_ids, std::int64_t{64} * pages) << "with places to grow";
    EXPECT_EQ(beyond(needed, most), "") << pages << " pages";
  }
  // Many more requests than rows do not make it larger.
  cuda::PlanBounds loose = bounds;
  loose.max_requests = 65'536;
  EXPECT_LE(cuda::Capacity::within(loose, shape, options, model).max_page_ids, 4 * most.max_page_ids);
}

TEST(CudaCapacity, ChainsOfPrefixesAreTheWorstCase) {
  // Request i shares i pages with all later ones: as many spans on a path as there are requests.
  reference::PageTables tables;
  tables.page_size = 16;
  std::vector<std::int32_t> pages;
  for (int i = 0; i < 40; ++i) {
    pages.push_back(i);
    std::vector<std::int32_t> mine = pages;
    mine.push_back(100 + i);
    tables.add(mine, 16);
  }
  tables.num_pages = 200;
  PlanOptions options;
  options.policy = Policy::forest;
  DeviceModel model = property::eager_model(128, 64);
  model.num_workers = 1;  // nothing is cut for balance
  Planner planner(model);
  const Plan plan = planner.plan(kSmallF16, tables.batch(), options);
  cuda::PlanBounds bounds = bounds_of(tables);
  const cuda::Capacity needed = cuda::Capacity::of(plan);
  EXPECT_EQ(beyond(needed, cuda::Capacity::within(bounds, kSmallF16, options, model)), "");
  EXPECT_GT(needed.max_partials, 400) << "a row for every span on its path";
  bounds.max_shared_spans = 2;
  EXPECT_NE(beyond(needed, cuda::Capacity::within(bounds, kSmallF16, options, model)), "")
      << "more spans than promised";
}

TEST(CudaCapacity, BoundsAreChecked) {
  const DeviceModel model = cuda::h200_model({});
  const auto message = [&](const cuda::PlanBounds& bounds, const PlanOptions& options = {}) {
    return message_of([&] { (void)cuda::Capacity::within(bounds, {}, options, model); });
  };
  EXPECT_EQ(message({.max_requests = -1}), "bounds.max_requests = -1, expected 0..2147483647");
  EXPECT_EQ(message({.max_rows = -1}), "bounds.max_rows = -1, expected 0..2147483647");
  EXPECT_EQ(message({.max_pages = 1LL << 40}), "bounds.max_pages = 1099511627776, expected 0..2147483647");
  EXPECT_EQ(message({.page_size = 0}), "bounds.page_size = 0, expected 1..2147483647");
  EXPECT_EQ(message({}), "");
}

TEST(CudaWorkspace, ExactAndAtMost64MiBForALargeBatch) {
  // 256 requests, 32 / 8 / 128, on an H200: nothing shared, one prompt of any length, groups, trees; and the same
  // formula that DevicePlan answers with.
  const AttentionShape shape{32, 8, 128, 128, DType::f16, DType::f16, DType::f16};
  Planner planner(cuda::h200_model(shape));
  const auto workspace = [&](const std::vector<int>& nodes, const std::vector<int>& tokens) {
    const reference::PageTables tables = reference::tree(nodes, tokens, 16);
    const Plan plan = planner.plan(shape, tables.batch(), {});
    const std::size_t bytes = cuda::workspace_size(shape, cuda::Capacity::of(plan));
    EXPECT_EQ(bytes, static_cast<std::size_t>(plan.stats().num_partials) * 32 * 129 * sizeof(float));
    EXPECT_LE(bytes, kMostWorkspace) << plan.describe().substr(0, 2'000);
    return bytes;
  };
  std::size_t most = 0;
  for (const int length : {16, 1'000, 4'000, 32'768}) most = std::max(most, workspace({256}, {length}));
  for (const int shared : {256, 1'024, 4'096, 16'384, 32'752}) {
    for (const int own : {16, 256, 2'000}) {
      most = std::max(most, workspace({1, 256}, {shared, own}));
      most = std::max(most, workspace({16, 256}, {shared, own}));
      most = std::max(most, workspace({1, 8, 64, 256}, {shared, 512, 128, own}));
    }
  }
  EXPECT_GT(most, std::size_t{1} << 20) << "some plan has partial states";
  RecordProperty("largest_workspace_bytes", static_cast<int>(most));
}

}  // namespace
}  // namespace headwater::cuda_test
