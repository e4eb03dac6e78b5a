// Every head size of the build, type pair, group size, page size and layout on the GPU, flat and cascaded, over one
// small forest with a shared trunk, branches, partly filled pages and several rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "cuda/device_runner.h"
#include "headwater/plan.h"
#include "plan/plan_data.h"
#include "property/scenario.h"
#include "reference/call.h"

namespace headwater::property {
namespace {

constexpr std::array kHalves{DType::f16, DType::bf16};

void check(const AttentionShape& shape, int page_size, const reference::CallOptions& options,
           const PlanOptions& plan_options = {}) {
  const auto seed = static_cast<std::uint64_t>(20'000 + 100 * shape.num_qo_heads + shape.head_dim_qk + page_size);
  reference::Call call(shape, plan_options, small_forest(page_size), options, seed);
  Planner planner(eager_model(128, 64));
  for (const Policy policy : {Policy::flat, Policy::forest}) {
    PlanOptions chosen = plan_options;
    chosen.policy = policy;
    const Plan plan = planner.plan(shape, call.batch(), chosen);
    ASSERT_EQ(plan.stats().path, policy == Policy::flat ? Path::flat : Path::cascade);
    const reference::Ran ran = call.run_by(cuda_test::run_on_device, plan, 0);
    EXPECT_EQ(ran.complaint, "") << name_of(policy) << ", heads " << shape.num_qo_heads << "/" << shape.num_kv_heads
                                 << ", dims " << shape.head_dim_qk << "/" << shape.head_dim_vo << ", q "
                                 << name_of(shape.q_dtype) << ", kv " << name_of(shape.kv_dtype) << ", out "
                                 << name_of(shape.out_dtype) << ", page " << page_size << ", layout "
                                 << reference::name_of(options.layout) << ", seed " << seed;
  }
}

TEST(CudaShapes, TypesAndHeadDims) {
  HEADWATER_NEEDS_GPU();
  int served = 0;
  for (const DType q : kHalves) {
    for (const DType kv : {q, DType::f8e4m3}) {
      for (const DType out : {DType::f16, DType::bf16, DType::f32}) {
        for (const auto& [qk, vo] : {std::pair{64, 64}, {96, 96}, {128, 128}, {192, 192}, {256, 256}, {192, 128}}) {
          const AttentionShape shape{8, 2, qk, vo, q, kv, out};
          try {
            cuda::check_supported(shape, {}, {});
          } catch (const Error&) {
            continue;  // not in this build
          }
          ++served;
          check(shape, 16, {.lse_base = LseBase::natural, .k_scales = 1, .v_scales = 2});
        }
      }
    }
  }
  EXPECT_GE(served, 12) << "types x head sizes of this build";
}

TEST(CudaShapes, GroupSizes) {
  HEADWATER_NEEDS_GPU();
  for (const int group : {1, 2, 3, 5, 7, 8, 12, 16, 17, 31, 33, 64, 71, 128}) {
    check({2 * group, 2, 64, 64, DType::bf16, DType::bf16, DType::bf16}, 16, {});
    check({group, 1, 128, 128, DType::f16, DType::f16, DType::f32}, 4, {});
  }
}

TEST(CudaShapes, PageSizes) {
  HEADWATER_NEEDS_GPU();
  for (int page_size = 1; page_size <= 256; page_size *= 2) {
    check({4, 2, 64, 64, DType::f16, DType::f16, DType::f16}, page_size, {.layout = reference::Layout::hnd});
    check({4, 2, 128, 128, DType::bf16, DType::f8e4m3, DType::bf16}, page_size, {.page_padding = 3});
  }
}

TEST(CudaShapes, LongItems) {
  HEADWATER_NEEDS_GPU();
  // One worker cuts nothing: items of thousands of tokens, whose page ids come in several batches.
  const AttentionShape shape{8, 2, 64, 64, DType::f16, DType::f16, DType::f16};
  DeviceModel model = eager_model(128, 1 << 20);
  model.num_workers = 1;
  Planner planner(model);
  for (const int page_size : {1, 8, 16, 256}) {
    for (const bool invariant : {false, true}) {
      PlanOptions options;
      options.policy = Policy::forest;
      options.batch_invariant = invariant;
      options.invariant_chunk = 64;  // more than 64 states to merge for each row
      reference::Call call(shape, options, reference::tree({1, 9}, {4'608, 300}, page_size), {}, 21'000);
      const Plan plan = planner.plan(shape, call.batch(), options);
      ASSERT_EQ(plan.stats().path, Path::cascade);
      if (!invariant) {
        EXPECT_TRUE(std::ranges::any_of(plan.data().items, [](const auto& item) { return item.num_tokens > 4'096; }));
      }
      EXPECT_EQ(call.run_by(cuda_test::run_on_device, plan, 0).complaint, "") << "pages of " << page_size;
    }
  }
}

TEST(CudaShapes, SoftCapsOfAnySize) {
  HEADWATER_NEEDS_GPU();
  for (const float cap : {1e-3F, 0.5F, 30.0F, 1e3F, 1e6F, 1e9F}) {
    PlanOptions options;
    options.logits_soft_cap = cap;
    check({8, 2, 64, 64, DType::f16, DType::f16, DType::f32}, 16, {}, options);
    check({64, 2, 64, 64, DType::f16, DType::f16, DType::f32}, 16, {}, options);
  }
}

TEST(CudaShapes, Layouts) {
  HEADWATER_NEEDS_GPU();
  for (const reference::Layout layout : reference::kLayouts) {
    for (const std::int64_t padding : {0, 1, 64}) {
      for (const DType kv : {DType::f16, DType::f8e4m3}) {
        check({6, 3, 64, 64, DType::f16, kv, DType::f16}, 8,
              {.layout = layout, .page_padding = padding, .row_padding = padding, .lse_head_major = padding == 1});
      }
    }
  }
}

}  // namespace
}  // namespace headwater::property
