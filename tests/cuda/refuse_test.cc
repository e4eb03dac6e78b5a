// What the CUDA back end cannot do is declined with a reason; needs no GPU.
#include <gtest/gtest.h>

#include <cmath>

#include "cuda/device_runner.h"
#include "headwater/cuda.h"
#include "headwater/error.h"
#include "headwater/plan.h"

namespace headwater::cuda {
namespace {

std::string reason(const AttentionShape& shape, const PlanOptions& options = {}, int page_size = 16) {
  Batch batch;
  batch.kv.page_size = page_size;
  try {
    check_supported(shape, options, batch);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    return error.what();
  }
  return "";
}

TEST(CudaRefuse, WhatNoKernelServes) {
  EXPECT_EQ(reason({32, 8, 128, 128, DType::bf16, DType::bf16, DType::bf16}), "");
  EXPECT_EQ(reason({32, 8, 128, 128, DType::f16, DType::f8e4m3, DType::f32}), "");
  EXPECT_EQ(reason({32, 8, 128, 128, DType::f32, DType::f32, DType::f32}),
            "q_dtype = f32, kv_dtype = f32: on CUDA q is f16 or bf16");
  EXPECT_EQ(reason({32, 8, 128, 128, DType::f16, DType::bf16, DType::f16}),
            "q_dtype = f16, kv_dtype = bf16: on CUDA KV has q's type or is f8e4m3");
  EXPECT_NE(reason({32, 8, 80, 80, DType::f16, DType::f16, DType::f16}).find("head_dim_qk = 80, head_dim_vo = 80"),
            std::string::npos);
  EXPECT_EQ(reason({32, 8, 128, 128}, {}, 24), "page_size = 24, expected a power of two in 1..256 on CUDA");
  EXPECT_EQ(reason({32, 8, 128, 128}, {.batch_invariant = true, .invariant_chunk = 96}),
            "options.invariant_chunk = 96, expected a multiple of 64 on CUDA");
}

TEST(CudaRefuse, WhatTheCpuRefusesInItsWords) {
  const auto words = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    return "nothing was refused";
  };
  const AttentionShape no_heads{32, 0, 128, 128};
  const AttentionShape odd_heads{31, 8, 128, 128};
  const AttentionShape few_heads{4, 8, 128, 128};
  const AttentionShape fp8_out{32, 8, 128, 128, DType::f16, DType::f16, DType::f8e4m3};
  const AttentionShape good{32, 8, 128, 128, DType::f16, DType::f16, DType::f16};
  const DeviceTableLimits limits{4, 8, 4, 16, 100, 0};
  Planner host;
  const Batch empty;
  for (const AttentionShape& shape : {no_heads, odd_heads, few_heads, fp8_out}) {
    const std::string on_cpu = words([&] { (void)host.plan(shape, empty, {}); });
    EXPECT_EQ(words([&] { check_supported(shape, {}, empty); }), on_cpu);
    EXPECT_EQ(words([&] { const DevicePlan plan(shape, {1, 1, 1, 1}); }), on_cpu);
    EXPECT_EQ(words([&] { (void)DevicePlanner::capacity_for(shape, {}, limits, h200_model(good)); }), on_cpu);
    EXPECT_EQ(words([&] { const DevicePlanner planner(shape, {}, limits, h200_model(good)); }), on_cpu);
  }
  for (const PlanOptions& options : {PlanOptions{.min_members = -3}, PlanOptions{.sm_scale = std::nanf("")},
                                     PlanOptions{.logits_soft_cap = -1.0F}}) {
    const std::string on_cpu = words([&] { (void)host.plan(good, empty, options); });
    EXPECT_EQ(words([&] { check_supported(good, options, empty); }), on_cpu);
    EXPECT_EQ(words([&] { (void)DevicePlanner::capacity_for(good, options, limits, h200_model(good)); }), on_cpu);
  }
  DeviceModel idle = h200_model(good);
  idle.num_workers = 0;
  EXPECT_NE(words([&] { (void)DevicePlanner::capacity_for(good, {}, limits, idle); }).find("model.num_workers = 0"),
            std::string::npos);
}

TEST(CudaRefuse, WithoutADevice) {
  if (num_devices() > 0) GTEST_SKIP() << "there is a device";
  try {
    const DevicePlan plan({32, 8, 128, 128}, {.max_rows = 1, .max_page_ids = 1, .max_items = 1, .max_partials = 1});
    FAIL() << "made a plan on no device";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::device);
  }
}

}  // namespace
}  // namespace headwater::cuda
