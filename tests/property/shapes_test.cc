// Every head size, type pair, layout, page size and group size, flat and cascade, on every instruction-set level, over
// one small forest with a shared trunk, branches, partly filled pages and several rows.
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "headwater/plan.h"
#include "property/scenario.h"
#include "reference/call.h"

namespace headwater::property {
namespace {

/// Runs the small forest flat and cascaded on every level; asserts which path ran.
void check(const AttentionShape& shape, int page_size, const reference::CallOptions& options,
           const PlanOptions& plan_options = {}) {
  static Executors executors;
  const auto seed = static_cast<std::uint64_t>(10'000 + 100 * shape.num_qo_heads + shape.head_dim_qk + page_size);
  reference::Call call(shape, plan_options, small_forest(page_size), options, seed);
  Planner planner(eager_model(128, 64));
  for (const Policy policy : {Policy::flat, Policy::forest}) {
    PlanOptions chosen = plan_options;
    chosen.policy = policy;
    const Plan plan = planner.plan(shape, call.batch(), chosen);
    ASSERT_EQ(plan.stats().path, policy == Policy::flat ? Path::flat : Path::cascade);
    if (policy == Policy::forest) {
      ASSERT_LT(plan.stats().kv_bytes_read, plan.stats().kv_bytes_flat);
    }
    for (const Isa isa : isas()) {
      const reference::Ran ran = call.run(plan, executors.of(1 + static_cast<int>(seed % 3)), isa);
      EXPECT_EQ(ran.complaint, "") << name_of(policy) << ", " << name_of(isa) << ", heads " << shape.num_qo_heads << "/"
                                   << shape.num_kv_heads << ", dims " << shape.head_dim_qk << "/" << shape.head_dim_vo
                                   << ", q " << name_of(shape.q_dtype) << ", kv " << name_of(shape.kv_dtype) << ", out "
                                   << name_of(shape.out_dtype) << ", page " << page_size << ", layout "
                                   << reference::name_of(options.layout) << ", seed " << seed;
    }
  }
}

constexpr std::array kFloats{DType::f32, DType::f16, DType::bf16};
constexpr std::array kKv{DType::f32, DType::f16, DType::bf16, DType::f8e4m3};

TEST(Shapes, EveryTypeTriple) {
  for (const DType q : kFloats) {
    for (const DType kv : kKv) {
      for (const DType out : kFloats) check({8, 2, 64, 64, q, kv, out}, 16, {.lse_base = LseBase::natural});
    }
  }
}

TEST(Shapes, HeadDims) {
  for (int dim = 32; dim <= 256; dim += 16) {
    for (const DType type : kFloats) check({4, 1, dim, dim, type, type, type}, 16, {.layout = reference::Layout::hnd});
    check({4, 1, dim, dim, DType::bf16, DType::f8e4m3, DType::bf16}, 16, {.k_scales = 1, .v_scales = 1});
    check({6, 2, dim, dim, DType::f32, DType::bf16, DType::f32}, 16, {});
  }
}

TEST(Shapes, HeadDimsDiffer) {
  for (const DType type : kFloats) {
    check({4, 2, 192, 128, type, type, type}, 16, {});
    check({4, 2, 64, 96, type, type, type}, 16, {.layout = reference::Layout::hnd_side});
  }
}

TEST(Shapes, LatentKvOfMla) {
  for (const DType type : kFloats) {
    check({16, 1, 576, 512, type, type, type}, 16, {.layout = reference::Layout::latent});
  }
  check({16, 1, 576, 512, DType::f32, DType::bf16, DType::f32}, 64, {.layout = reference::Layout::latent});
  check({20, 1, 576, 512, DType::bf16, DType::f8e4m3, DType::bf16}, 16,
        {.layout = reference::Layout::latent, .page_padding = 5});
}

TEST(Shapes, GroupSizes) {
  for (int group = 1; group <= 16; ++group) {
    check({2 * group, 2, 64, 64, DType::bf16, DType::bf16, DType::bf16}, 16, {});
    check({group, 1, 32, 32, DType::f32, DType::f32, DType::f32}, 4, {});
  }
}

TEST(Shapes, PageSizes) {
  for (const int page_size : {1, 2, 3, 5, 7, 8, 11, 16, 24, 32, 33, 40}) {
    check({4, 2, 64, 64, DType::f32, DType::f32, DType::f32}, page_size, {.layout = reference::Layout::hnd});
    check({4, 2, 64, 64, DType::bf16, DType::bf16, DType::bf16}, page_size, {.page_padding = 3});
  }
}

TEST(Shapes, Layouts) {
  for (const reference::Layout layout : reference::kLayouts) {
    for (const std::int64_t padding : {0, 1, 64}) {
      for (const DType type : kFloats) {
        check({6, 3, 64, 64, type, type, type}, 8,
              {.layout = layout, .page_padding = padding, .row_padding = padding, .lse_head_major = padding == 1});
      }
      check({6, 3, 32, 48, DType::f16, DType::f8e4m3, DType::f32}, 8, {.layout = layout, .page_padding = padding});
    }
  }
}

TEST(Shapes, InvariantModeServesEveryType) {
  PlanOptions options;
  options.batch_invariant = true;
  options.invariant_chunk = 16;
  for (const DType q : kFloats) {
    for (const DType kv : kKv) check({8, 2, 80, 80, q, kv, q}, 16, {}, options);
  }
}

}  // namespace
}  // namespace headwater::property
