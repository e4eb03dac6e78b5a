// Explicit levels on the GPU: nested nodes with partly filled pages, each level with a cache of its own (its own views,
// layout and page size), against the float64 reference.
#include <gtest/gtest.h>

#include <array>

#include "cuda/fault_fixture.h"
#include "reference/rng.h"

namespace headwater::cuda_test {
namespace {

constexpr std::array kPolicies{Policy::automatic, Policy::flat, Policy::two_level, Policy::forest};

TEST(CudaLevels, RandomLevelsWithEveryOption) {
  int cascades = 0;
  int views = 0;
  for (std::uint64_t seed = 70'000; seed < 70'080; ++seed) {
    property::Scenario s = property::random_scenario(
        seed, {.head_dims = {64, 128}, .page_sizes = {1, 2, 4, 8, 16, 16, 32, 64, 128, 256}, .gpu_types = true});
    reference::Rng rng(seed);
    const reference::LevelTables levels = reference::random_levels(rng, s.tables.page_size, 3);
    SCOPED_TRACE("levels; options as in " + property::describe(s));
    reference::Call call(s.shape, s.options, levels, s.call, seed);
    Planner planner(s.model);
    for (const Policy policy : kPolicies) {
      PlanOptions options = s.options;
      options.policy = policy;
      const Plan plan = planner.plan(s.shape, call.batch(), options);
      cascades += plan.stats().path == Path::cascade ? 1 : 0;
      views += plan.data().page_size.size() > 1 ? 1 : 0;
      if (!have_gpu() || !in_build(s.shape)) continue;
      ASSERT_EQ(call.run_by(run_on_device, plan, 0).complaint, "") << name_of(policy) << "\n" << plan.describe();
    }
  }
  EXPECT_GT(cascades, 60);
  EXPECT_GT(views, 100) << "several caches in one call";
  HEADWATER_NEEDS_GPU();
}

/// A level of nodes over rows [0, 4, 8), or finer, with `pages` pages each, the last filled with `last` tokens.
reference::LevelTable level(int page_size, const std::vector<std::int32_t>& qo_indptr, int pages, int last) {
  reference::LevelTable out;
  out.page_size = page_size;
  out.qo_indptr = qo_indptr;
  std::int32_t next = 0;
  for (std::size_t j = 0; j + 1 < qo_indptr.size(); ++j) {
    for (int p = 0; p < pages; ++p) out.kv_indices.push_back(next++);
    out.kv_indptr.push_back(next);
    out.last_page_len.push_back(last);
  }
  out.num_pages = next;
  return out;
}

TEST(CudaLevels, PagesOfAnotherSizeOnEveryLevel) {
  const std::vector<std::int32_t> all{0, 8};
  const std::vector<std::int32_t> halves{0, 4, 8};
  const std::vector<std::int32_t> rows{0, 1, 2, 3, 4, 5, 6, 7, 8};
  for (const auto& [first, second, third] : {std::array{256, 16, 1}, {1, 256, 4}, {32, 2, 128}, {64, 64, 8}}) {
    for (const reference::Layout layout : reference::kLayouts) {
      reference::LevelTables levels;
      // The last page ends within a tile of keys, whose rest belongs to nobody, and the rows' keys go on.
      levels.levels.push_back(level(first, all, first > 64 ? 2 : 70, first == 1 ? 1 : first / 2 + 3));
      levels.levels.push_back(level(second, halves, 2, second));
      levels.levels.push_back(level(third, rows, 3, 1));
      std::vector<AttentionShape> shapes{kSmallF16};
      if (layout == reference::Layout::hnd) shapes.push_back({64, 2, 128, 128, DType::f16, DType::f16, DType::f32});
      for (const AttentionShape& shape : shapes) {
        reference::Call call(shape, {}, levels,
                             {.layout = layout, .page_padding = first == 64 ? 1 : 0, .check_naive = false}, 71'000);
        for (const Policy policy : {Policy::flat, Policy::forest}) {
          PlanOptions options;
          options.policy = policy;
          Planner planner = eager_planner();
          const Plan plan = planner.plan(shape, call.batch(), options);
          EXPECT_EQ(plan.data().page_size, (std::vector<std::int32_t>{first, second, third}));
          EXPECT_EQ(plan.stats().path, policy == Policy::flat ? Path::flat : Path::cascade);
          if (!have_gpu() || !in_build(shape)) continue;
          EXPECT_EQ(call.run_by(run_on_device, plan, 0).complaint, "")
              << name_of(policy) << ", pages " << first << ' ' << second << ' ' << third << ", "
              << reference::name_of(layout);
        }
      }
    }
  }
  HEADWATER_NEEDS_GPU();
}

TEST(CudaLevels, MoreThanEightAreDeclined) {
  reference::LevelTables levels;
  for (int l = 0; l < 8; ++l) levels.levels.push_back(level(16, {0, 4, 8}, 1, 16));
  EXPECT_EQ(message_of([&] { cuda::check_supported(kSmallF16, {}, levels.batch()); }), "");
  reference::Call call(kSmallF16, {}, levels, {}, 72'000);
  Planner planner = eager_planner();
  const Plan plan = planner.plan(kSmallF16, call.batch(), {});
  if (have_gpu()) {
    EXPECT_EQ(call.run_by(run_on_device, plan, 0).complaint, "");
  }
  levels.levels.push_back(level(16, {0, 4, 8}, 1, 16));
  EXPECT_EQ(message_of([&] { cuda::check_supported(kSmallF16, {}, levels.batch()); }),
            "9 levels, expected at most 8 on CUDA");
  HEADWATER_NEEDS_GPU();
}

}  // namespace
}  // namespace headwater::cuda_test
