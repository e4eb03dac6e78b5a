// The property tests of the CPU back end, on the GPU: random forests x policies x options x types x layouts against the
// same float64 reference with the same tolerances, poisoned and fenced.
#include <gtest/gtest.h>

#include <array>

#include "cuda/device_runner.h"
#include "headwater/plan.h"
#include "property/scenario.h"
#include "reference/call.h"

namespace headwater::property {
namespace {

constexpr std::array kPolicies{Policy::automatic, Policy::flat, Policy::two_level, Policy::vllm, Policy::forest};

void run_seeds(std::uint64_t first, int count, const Range& range) {
  int runs = 0;
  int cascades = 0;
  for (int i = 0; i < count; ++i) {
    const Scenario s = random_scenario(first + static_cast<std::uint64_t>(i), range);
    SCOPED_TRACE(describe(s));
    reference::Call call(s.shape, s.options, s.tables, s.call, s.seed);
    Planner planner(s.model);
    for (const Policy policy : kPolicies) {
      PlanOptions options = s.options;
      options.policy = policy;
      const Plan plan = planner.plan(s.shape, call.batch(), options);
      const reference::Ran ran = call.run_by(cuda_test::run_on_device, plan, 0);
      EXPECT_EQ(ran.complaint, "") << "policy " << name_of(policy) << "\n" << plan.describe();
      ++runs;
      if (ran.outcome.path == Path::cascade) ++cascades;
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(cascades, runs / 10) << "of " << runs << " runs";
}

const std::vector<int> kPageSizes{1, 2, 4, 8, 16, 16, 32, 64};

TEST(CudaForest, Plain) {
  HEADWATER_NEEDS_GPU();
  run_seeds(
      1'000, 60,
      {.features = false, .odd_strides = false, .head_dims = {64, 128}, .page_sizes = kPageSizes, .gpu_types = true});
}

TEST(CudaForest, EveryOption) {
  HEADWATER_NEEDS_GPU();
  run_seeds(2'000, 200, {.head_dims = {64, 128}, .page_sizes = kPageSizes, .gpu_types = true});
}

TEST(CudaForest, ManyRows) {
  HEADWATER_NEEDS_GPU();
  run_seeds(3'000, 40,
            {.max_rows = 70, .max_pages = 20, .head_dims = {64, 128}, .page_sizes = kPageSizes, .gpu_types = true});
}

}  // namespace
}  // namespace headwater::property
