// Plans on the device: a captured graph serves later plans, bits do not depend on chance, capacities are kept, streams
// do not meet, offsets pass 2^32.
#include "headwater/plan.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>

#include "cuda/device_plan.h"
#include "cuda/device_runner.h"
#include "headwater/error.h"
#include "plan/plan_data.h"
#include "property/scenario.h"
#include "reference/call.h"

namespace headwater::cuda_test {
namespace {

const AttentionShape kShape{8, 2, 128, 128, DType::f16, DType::f16, DType::f16};

void ok(cudaError_t status) {
  ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
}

/// A small forest and its plans by two policies.
struct Plans {
  Plans() : call(kShape, {}, property::small_forest(16), {}, 5) {
    Planner planner(property::eager_model(128, 64));
    PlanOptions options;
    options.policy = Policy::flat;
    flat = planner.plan(kShape, call.batch(), options);
    options.policy = Policy::forest;
    forest = planner.plan(kShape, call.batch(), options);
    const cuda::Capacity a = cuda::Capacity::of(flat);
    const cuda::Capacity b = cuda::Capacity::of(forest);
    both = {std::max(a.max_rows, b.max_rows), std::max(a.max_page_ids, b.max_page_ids),
            std::max(a.max_items, b.max_items), std::max(a.max_partials, b.max_partials)};
  }
  [[nodiscard]] std::int64_t num_rows() const { return static_cast<std::int64_t>(flat.data().rows.size()); }

  reference::Call call;
  Plan flat;
  Plan forest;
  cuda::Capacity both;
};

cpu::RunOutcome outcome_of(const Plan& plan) {
  const PlanStats& stats = plan.stats();
  return {stats.path, Isa::scalar, stats.num_items, stats.kv_bytes_read, 0};
}

TEST(CudaPlan, OneGraphServesLaterPlans) {
  HEADWATER_NEEDS_GPU();
  Plans plans;
  ASSERT_EQ(plans.forest.stats().path, Path::cascade);
  cuda::DevicePlan device(kShape, plans.both);
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreate(&stream));
  std::unique_ptr<DeviceCall> there;
  cudaGraphExec_t exec = nullptr;
  for (const Plan* plan : {&plans.flat, &plans.forest, &plans.flat, &plans.forest}) {
    const auto replay = [&](const Plan& p, const cpu::RunArgs& args) {
      if (there == nullptr) {  // captured once, with the first plan in force
        there = std::make_unique<DeviceCall>(kShape, args, plans.num_rows(), device.workspace_size());
        device.upload(p, stream);
        cudaGraph_t graph = nullptr;
        ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        cuda::run(device, there->args(), stream);
        ok(cudaStreamEndCapture(stream, &graph));
        ok(cudaGraphInstantiate(&exec, graph, 0));
        ok(cudaGraphDestroy(graph));
      } else {
        device.upload(p, stream);
      }
      there->poison_outputs();
      ok(cudaGraphLaunch(exec, stream));
      ok(cudaStreamSynchronize(stream));
      there->fetch_to(args);
      EXPECT_EQ(there->complaint(), "");
      return outcome_of(p);
    };
    EXPECT_EQ(plans.call.run_by(replay, *plan, 0).complaint, "") << name_of(plan->stats().path);
  }
  ok(cudaGraphExecDestroy(exec));
  ok(cudaStreamDestroy(stream));
}

TEST(CudaPlan, SameBitsEveryTime) {
  HEADWATER_NEEDS_GPU();
  Plans plans;
  const reference::Ran first = plans.call.run_by(run_on_device, plans.forest, 0);
  ASSERT_EQ(first.complaint, "");
  for (int i = 0; i < 50; ++i) {
    const reference::Ran again = plans.call.run_by(run_on_device, plans.forest, 0);
    ASSERT_EQ(again.out, first.out) << "run " << i;
    ASSERT_EQ(std::memcmp(again.lse.data(), first.lse.data(), first.lse.size() * sizeof(float)), 0) << "run " << i;
  }
  // The comparison can fail: another policy sums in another order.
  EXPECT_NE(plans.call.run_by(run_on_device, plans.flat, 0).out, first.out);
}

TEST(CudaPlan, LaterStepsCopyOnlyPageIdsThatChanged) {
  HEADWATER_NEEDS_GPU();
  // 24 requests of about 500 pages of one token: a page more at every step.
  constexpr int kRequests = 24;
  constexpr int kSteps = 14;  // at the thirteenth, tables of 512 pages outgrow their places
  const auto tables_of = [](int step) {
    reference::PageTables tables;
    tables.page_size = 1;
    tables.num_pages = 16'384;
    for (int b = 0; b < kRequests; ++b) {
      std::vector<std::int32_t> pages;
      for (int i = 0; i < 500 + step; ++i) pages.push_back((b * 640 + i * 7) % 16'384);
      tables.add(pages, 1);
    }
    return tables;
  };
  PlanOptions options;
  options.policy = Policy::flat;
  Planner planner(property::eager_model(128, 64));
  std::vector<std::unique_ptr<reference::Call>> calls;
  for (int step = 0; step < kSteps; ++step) {
    calls.push_back(std::make_unique<reference::Call>(kShape, options, tables_of(step), reference::CallOptions{}, 9));
  }
  Plan plan = planner.plan(kShape, calls[0]->batch(), options);
  cuda::Capacity capacity = cuda::Capacity::of(planner.plan(kShape, calls.back()->batch(), options));
  capacity.max_items += 64;
  capacity.max_partials += 1'024;
  cuda::DevicePlan device(kShape, capacity);
  for (int step = 0; step < kSteps; ++step) {
    if (step > 0) planner.update(plan, calls[static_cast<std::size_t>(step)]->batch(), nullptr);
    const auto run = [&](const Plan& p, const cpu::RunArgs& args) {
      device.upload(p, nullptr);
      DeviceCall there(kShape, args, static_cast<std::int64_t>(p.data().rows.size()), device.workspace_size());
      cuda::run(device, there.args(), nullptr);
      there.fetch_to(args);
      EXPECT_EQ(there.complaint(), "");
      return outcome_of(p);
    };
    EXPECT_EQ(calls[static_cast<std::size_t>(step)]->run_by(run, plan, 0).complaint, "") << "step " << step;
    const std::int64_t ids = device.impl().uploaded_ids;
    // All of them at first, and where a table has outgrown its place; else one for each request.
    if (step == 0 || step == 12) {
      EXPECT_GT(ids, 500 * kRequests) << "step " << step;
    } else {
      EXPECT_EQ(ids, kRequests) << "step " << step;
    }
  }
  // An update that was not uploaded cannot be patched over; nor can another plan's ids.
  planner.update(plan, calls[6]->batch(), nullptr);
  planner.update(plan, calls[5]->batch(), nullptr);
  device.upload(plan, nullptr);
  EXPECT_GT(device.impl().uploaded_ids, 500 * kRequests);
  device.upload(plan, nullptr);
  EXPECT_EQ(device.impl().uploaded_ids, 0);
  device.upload(planner.plan(kShape, calls[5]->batch(), options), nullptr);
  EXPECT_GT(device.impl().uploaded_ids, 500 * kRequests);
}

TEST(CudaPlan, BeyondTheCapacityIsRefusedByName) {
  HEADWATER_NEEDS_GPU();
  Plans plans;
  const auto refused = [&](auto field) {
    cuda::Capacity less = plans.both;
    less.*field -= 1;
    cuda::DevicePlan device(kShape, less);
    bool one_fits = false;
    std::string words;
    for (const Plan* plan : {&plans.flat, &plans.forest}) {
      try {
        device.upload(*plan, nullptr);
        one_fits = true;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::capacity_exceeded);
        words = error.what();
      }
    }
    EXPECT_EQ(device.stats().num_rows > 0, one_fits) << "a refused plan leaves the one in force";
    return words;
  };
  EXPECT_NE(refused(&cuda::Capacity::max_rows).find("capacity.max_rows = "), std::string::npos);
  EXPECT_NE(refused(&cuda::Capacity::max_page_ids).find("capacity.max_page_ids = "), std::string::npos);
  EXPECT_NE(refused(&cuda::Capacity::max_items).find("capacity.max_items = "), std::string::npos);
  EXPECT_NE(refused(&cuda::Capacity::max_partials).find("capacity.max_partials = "), std::string::npos);
}

TEST(CudaPlan, OtherScoresThanTheFirstPlansAreRefused) {
  HEADWATER_NEEDS_GPU();
  Plans plans;
  const cuda::Capacity c = plans.both;
  cuda::DevicePlan device(kShape, {4 * c.max_rows, 4 * c.max_page_ids, 4 * c.max_items, 4 * c.max_partials + 64});
  device.upload(plans.flat, nullptr);
  Planner planner(property::eager_model(128, 64));
  PlanOptions options;
  options.logits_soft_cap = 30.0F;
  EXPECT_THROW(device.upload(planner.plan(kShape, plans.call.batch(), options), nullptr), Error);
  options.logits_soft_cap = 0.0F;
  options.window_left = 20;  // is part of the plan
  EXPECT_NO_THROW(device.upload(planner.plan(kShape, plans.call.batch(), options), nullptr));
}

TEST(CudaPlan, RunWithoutAPlanIsRefused) {
  HEADWATER_NEEDS_GPU();
  Plans plans;
  const cuda::DevicePlan device(kShape, plans.both);
  EXPECT_THROW(cuda::run(device, {}, nullptr), Error);
}

TEST(CudaPlan, TwoStreamsAtOnce) {
  HEADWATER_NEEDS_GPU();
  Plans plans;
  const auto run_both = [&](const Plan& plan, const cpu::RunArgs& args) {
    struct Side {
      cuda::DevicePlan plan;
      DeviceCall call;
      cudaStream_t stream = nullptr;
    };
    Side a{cuda::DevicePlan(kShape, plans.both), DeviceCall(kShape, args, plans.num_rows(), 1 << 20)};
    Side b{cuda::DevicePlan(kShape, plans.both), DeviceCall(kShape, args, plans.num_rows(), 1 << 20)};
    for (Side* side : {&a, &b}) {
      ok(cudaStreamCreateWithFlags(&side->stream, cudaStreamNonBlocking));
      side->plan.upload(plan, side->stream);
    }
    for (int i = 0; i < 20; ++i) {
      for (Side* side : {&a, &b}) cuda::run(side->plan, side->call.args(), side->stream);
    }
    b.call.fetch_to(args);
    std::vector<std::byte> other(b.call.out_bytes());
    std::memcpy(other.data(), args.out.data, other.size());
    a.call.fetch_to(args);
    EXPECT_EQ(std::memcmp(other.data(), args.out.data, other.size()), 0);
    for (Side* side : {&a, &b}) ok(cudaStreamDestroy(side->stream));
    return outcome_of(plan);
  };
  EXPECT_EQ(plans.call.run_by(run_both, plans.forest, 0).complaint, "");
}

TEST(CudaFaults, Fault27_OffsetsPastTwoToTheThirtyTwo) {
  HEADWATER_NEEDS_GPU();
  Plans plans;
  const auto far = [&](const Plan& plan, const cpu::RunArgs& args) {
    cuda::DevicePlan device(kShape, plans.both);
    DeviceCall there(kShape, args, plans.num_rows(), device.workspace_size());
    // The same pages, so far apart that the last ones lie beyond 2^32 elements.
    const KvCache& near = args.kv[0];
    const std::int64_t stride = (std::int64_t{5} << 32) / 4 / near.num_pages / 64 * 64;
    KvCache cache = near;
    std::vector<std::unique_ptr<DeviceMemory>> memory;
    for (PagedTensor* side : {&cache.k, &cache.v}) {
      memory.push_back(std::make_unique<DeviceMemory>(static_cast<std::size_t>(near.num_pages * stride) * 2 * 4));
      const std::size_t bytes = static_cast<std::size_t>(side->page_stride) * 2;
      for (std::int64_t page = 0; page < near.num_pages; ++page) {
        const auto* from = static_cast<const std::byte*>(side->data) + static_cast<std::size_t>(page) * bytes;
        ok(cudaMemcpy(memory.back()->data() + static_cast<std::size_t>(page * stride * 4) * 2, from, bytes,
                      cudaMemcpyHostToDevice));
      }
      side->data = memory.back()->data();
      side->page_stride = stride * 4;
    }
    EXPECT_GT((near.num_pages - 1) * cache.k.page_stride, std::int64_t{1} << 32);
    cuda::RunArgs far_args = there.args();
    far_args.kv = std::span(&cache, 1);
    device.upload(plan, nullptr);
    cuda::run(device, far_args, nullptr);
    there.fetch_to(args);
    return outcome_of(plan);
  };
  EXPECT_EQ(plans.call.run_by(far, plans.forest, 0).complaint, "");
}

}  // namespace
}  // namespace headwater::cuda_test
