// Faults that attention of this kind has shipped, one named test each: the scenarios of tests/faults on the GPU, with
// LSE compared everywhere. Rows 11 to 14, 17, 18 and 29 are about planning, which has one code for all back ends, and
// are tested there (13 and 12 also by every test here: what a piece reads is compared with the reference).
#include <cmath>

#include "cuda/fault_fixture.h"
#include "reference/element.h"

namespace headwater::cuda_test {
namespace {

using reference::PageTables;

TEST(CudaFaults, Fault01_LseOfSplitGroupsIsCompared) {
  check_both_paths(kSmallF32Out, reference::tree({1, 6}, {96, 24}, 8));
  HEADWATER_NEEDS_GPU();
  // The control: LSE of two heads of a group swapped must be noticed.
  reference::Call call(kSmallF32Out, {}, reference::tree({1, 6}, {96, 24}, 8), {}, 50'100);
  Planner planner = eager_planner();
  const Plan plan = planner.plan(kSmallF32Out, call.batch(), {});
  const auto swapped = [](const Plan& p, const cpu::RunArgs& args) {
    const cpu::RunOutcome outcome = run_on_device(p, args);
    std::swap(args.lse.data[0], args.lse.data[1]);
    return outcome;
  };
  EXPECT_EQ(call.run_by(run_on_device, plan, 0).complaint, "");
  EXPECT_NE(call.run_by(swapped, plan, 0).complaint, "");
}

TEST(CudaFaults, Fault02_NonContiguousLseIsHonoured) {
  PageTables tables;
  tables.page_size = 8;
  for (int i = 0; i < 128; ++i) tables.add({0, 1, 2}, 5);
  check_both_paths({4, 1, 64, 64, DType::f16, DType::f16, DType::f16}, tables, {}, {.lse_head_major = true});
  HEADWATER_NEEDS_GPU();
}

TEST(CudaFaults, Fault03_EmptySplitsWriteTheRightSlot) {
  PageTables tables;
  tables.page_size = 4;
  tables.add({}, 0, 2);
  tables.add({0, 1, 2, 3, 4}, 1, 1);
  tables.add({}, 0, 1);
  tables.add({0, 1, 2, 3, 5}, 4, 3);
  tables.add({0}, 1, 1);
  tables.add({}, 0, 0);
  check_both_paths(kSmallF16, tables);
  HEADWATER_NEEDS_GPU();
}

TEST(CudaFaults, Fault04_RowsWithoutKeysHaveMinusInfinity) {
  PageTables tables;
  tables.page_size = 4;
  tables.add({}, 0, 1);
  reference::Call call(kSmallF16, {}, tables, {}, 50'200);
  Planner planner;
  const Plan plan = planner.plan(kSmallF16, call.batch(), {});
  EXPECT_EQ(plan.data().empty_rows.size(), 1U);
  HEADWATER_NEEDS_GPU();
  const reference::Ran ran = call.run_by(run_on_device, plan, 0);
  EXPECT_EQ(ran.complaint, "");
  for (const float lse : ran.lse) EXPECT_EQ(lse, -std::numeric_limits<float>::infinity());
}

TEST(CudaFaults, Fault06_HugeNegativeLogits) {
  // One direction, q = 1 and k = -3: equal scores far below -5e4, flat and cascaded, by both kernels (few and many
  // rows). With equal scores the result is a plain mean of visible values.
  constexpr int kDim = 64;
  for (const int heads : {1, 64}) {
    const AttentionShape shape{heads, 1, kDim, kDim, DType::f16, DType::f16, DType::f32};
    const auto h = static_cast<std::size_t>(heads);
    std::vector<std::uint16_t> q(2 * h * kDim);
    std::vector<std::uint16_t> k(16 * kDim);
    std::vector<std::uint16_t> v(16 * kDim);
    for (std::size_t i = 0; i < 2 * h; ++i) reference::store(DType::f16, q.data(), static_cast<int>(i) * kDim, 1.0);
    for (int t = 0; t < 16; ++t) {
      reference::store(DType::f16, k.data(), t * kDim, -3.0);
      reference::store(DType::f16, v.data(), t * kDim, t);
    }
    PageTables tables;
    tables.page_size = 4;
    tables.add({0, 1, 2}, 4);
    tables.add({0, 1, 3}, 4);
    const KvCache cache{{k.data(), 4 * kDim, kDim, kDim}, {v.data(), 4 * kDim, kDim, kDim}, DType::f16, 4, 4};
    for (const double size : {1e5, 1e6, 1e7, 1e8}) {
      PlanOptions options;
      options.sm_scale = static_cast<float>(size / 3);
      for (const Policy policy : {Policy::flat, Policy::forest}) {
        options.policy = policy;
        Planner planner = eager_planner();
        const Plan plan = planner.plan(shape, tables.batch(), options);
        EXPECT_EQ(plan.stats().path, policy == Policy::flat ? Path::flat : Path::cascade);
        if (!have_gpu()) continue;
        std::vector<float> out(2 * h * kDim);
        std::vector<float> lse(2 * h);
        cpu::RunArgs args;
        args.q = {q.data(), DType::f16, static_cast<std::int64_t>(h) * kDim, kDim};
        args.kv = {&cache, 1};
        args.out = {out.data(), DType::f32, static_cast<std::int64_t>(h) * kDim, kDim};
        args.lse = {lse.data(), static_cast<std::int64_t>(h), 1, LseBase::natural};
        run_on_device(plan, args);
        // Past 2^24 an fp32 LSE no longer tells 4 keys from 8, so merged pieces weigh alike: still a mean, and finite.
        const bool exact = size < 1e6 || policy == Policy::flat;
        const double error = exact ? 2e-2 : 2.0;
        for (std::size_t i = 0; i < h; ++i) {
          ASSERT_NEAR(out[i * kDim], 5.5, error) << size << ", head " << i << ' ' << name_of(policy);
          ASSERT_NEAR(out[(h + i) * kDim], (28.0 + 12 + 13 + 14 + 15) / 12, error) << size << ", head " << i;
          ASSERT_NEAR(lse[i], -size + std::log(12.0), 1e-6 * size);
          ASSERT_TRUE(std::isfinite(lse[h + i]));
        }
      }
    }
  }
  HEADWATER_NEEDS_GPU();
}

TEST(CudaFaults, Fault07_FullyMaskedRowsOneKeyRowsEmptyChunks) {
  PageTables tables;
  tables.page_size = 4;
  tables.add({0}, 3, 6);
  tables.add({1}, 1, 1);
  tables.add({0, 2, 3}, 1, 4);
  tables.add({0, 2, 4}, 1, 8);
  check_both_paths(kSmallF16, tables);
  PlanOptions window;
  window.window_left = 0;
  reference::Call call(kSmallF16, window, tables, {}, 50'300);
  Planner planner;
  const Plan plan = planner.plan(kSmallF16, call.batch(), window);
  if (have_gpu()) {
    EXPECT_EQ(call.run_by(run_on_device, plan, 0).complaint, "");
  }
  PlanOptions local;
  local.local_chunk = 8;
  check_both_paths(kSmallF16, tables, local);
  HEADWATER_NEEDS_GPU();
}

TEST(CudaFaults, Fault08_OneToOneHundredTwentyEightHeads) {
  for (const int heads : {1, 2, 3, 7, 16, 31, 64, 96, 128}) {
    check_both_paths({heads, heads, 128, 128, DType::f16, DType::f16, DType::f16},
                     reference::tree({1, 3}, {32, 9}, 16));
  }
  check_both_paths({96, 8, 128, 128, DType::f16, DType::f16, DType::f32}, reference::tree({1, 3}, {32, 9}, 16));
  check_both_paths({128, 1, 64, 64, DType::f16, DType::f16, DType::f16}, reference::tree({1, 3}, {32, 9}, 16));
  HEADWATER_NEEDS_GPU();
}

TEST(CudaFaults, Fault09_BaseIsPartOfEveryLse) {
  for (const LseBase base : {LseBase::two, LseBase::natural}) {
    check_both_paths(kSmallF16, reference::tree({1, 4}, {64, 12}, 8), {}, {.lse_base = base});
  }
  HEADWATER_NEEDS_GPU();
}

TEST(CudaFaults, Fault10_LseOfEitherShapeAndNoOther) {
  for (const bool head_major : {false, true}) {
    check_both_paths(kSmallF16, reference::tree({1, 4}, {64, 12}, 8), {}, {.lse_head_major = head_major});
  }
  HEADWATER_NEEDS_GPU();
  // Strides under which two elements coincide are refused before anything is written.
  reference::Call call(kSmallF16, {}, reference::tree({1, 4}, {64, 12}, 8), {}, 50'350);
  Planner planner = eager_planner();
  const Plan plan = planner.plan(kSmallF16, call.batch(), {});
  std::string message;
  const auto overlapping = [&](const Plan& p, const cpu::RunArgs& args) {
    cuda::DevicePlan device(kSmallF16, cuda::Capacity::of(p));
    const DeviceCall there(kSmallF16, args, 4, device.workspace_size());
    device.upload(p, nullptr);
    cuda::RunArgs wrong = there.args();
    wrong.lse.row_stride = 0;
    message = message_of([&] { cuda::run(device, wrong, nullptr); });
    cuda::run(device, there.args(), nullptr);
    there.fetch_to(args);
    return cpu::RunOutcome{p.stats().path, Isa::scalar, p.stats().num_items, p.stats().kv_bytes_read, 0};
  };
  EXPECT_EQ(call.run_by(overlapping, plan, 0).complaint, "");
  EXPECT_NE(message.find("lse"), std::string::npos) << message;
}

TEST(CudaFaults, Fault15_LearnedSinksCountOnceWhateverTheNumberOfPieces) {
  PlanOptions options;
  options.sinks = true;
  check_both_paths(kSmallF32Out, reference::tree({1, 2, 4, 8}, {64, 40, 30, 9}, 2), options);
  check_both_paths(kSmallF32Out, reference::tree({1, 2, 4, 8}, {64, 40, 30, 9}, 2), options, {.include_sink = false});
  PageTables empty;
  empty.page_size = 4;
  empty.add({}, 0, 2);
  check_both_paths(kSmallF32Out, empty, options, {}, Path::flat);
  HEADWATER_NEEDS_GPU();
  // The control: sinks that count twice, e^s + e^s = e^(s + ln 2), are outside tolerance.
  reference::Call call(kSmallF32Out, options, reference::tree({1, 2}, {16, 4}, 4), {}, 50'500);
  Planner planner = eager_planner();
  const Plan plan = planner.plan(kSmallF32Out, call.batch(), options);
  const auto twice = [](const Plan& p, cpu::RunArgs args) {
    std::vector<float> doubled(args.sinks, args.sinks + 8);
    for (float& s : doubled) s += std::log(2.0F);
    args.sinks = doubled.data();
    return run_on_device(p, args);
  };
  EXPECT_EQ(call.run_by(run_on_device, plan, 0).complaint, "");
  EXPECT_NE(call.run_by(twice, plan, 0).complaint, "");
}

TEST(CudaFaults, Fault16_BatchInvarianceIsServedOrDeclinedByName) {
  // Never ignored: a plan with this option either gives flat and cascade the same bits, or is declined with the reason
  // before there is a plan, and by DevicePlan.
  PlanOptions options;
  options.batch_invariant = true;
  options.invariant_chunk = 64;
  reference::Call call(kSmallF16, options, reference::tree({1, 6}, {96, 20}, 16), {}, 50'550);
  const std::string declined = message_of([&] { cuda::check_supported(kSmallF16, options, call.batch()); });
  EXPECT_EQ(declined, "");
  PlanOptions odd = options;
  odd.invariant_chunk = 32;
  EXPECT_NE(message_of([&] { cuda::check_supported(kSmallF16, odd, call.batch()); }).find("invariant_chunk = 32"),
            std::string::npos);
  HEADWATER_NEEDS_GPU();
  Planner planner = eager_planner();
  std::vector<reference::Ran> ran;
  for (const Policy policy : {Policy::flat, Policy::forest}) {
    options.policy = policy;
    const Plan plan = planner.plan(kSmallF16, call.batch(), options);
    cuda::DevicePlan device(kSmallF16, cuda::Capacity::of(plan));
    EXPECT_EQ(message_of([&] { device.upload(plan, nullptr); }), "");
    ran.push_back(call.run_by(run_on_device, plan, 0));
  }
  EXPECT_EQ(ran[0].complaint + ran[1].complaint, "");
  EXPECT_EQ(ran[1].outcome.path, Path::cascade);
  EXPECT_EQ(ran[0].out, ran[1].out);
  EXPECT_EQ(ran[0].lse, ran[1].lse);
}

TEST(CudaFaults, Fault19_EveryGroupSizeFromOneToSixteen) {
  for (int group = 1; group <= 16; ++group) {
    check_both_paths({2 * group, 2, 64, 64, DType::f16, DType::f16, DType::f16}, reference::tree({1, 5}, {48, 7}, 8));
    check_both_paths({3 * group, 3, 128, 128, DType::f16, DType::f16, DType::f16}, reference::tree({1, 5}, {48, 7}, 8));
  }
  HEADWATER_NEEDS_GPU();
}

TEST(CudaFaults, Fault21_PoisonOutsideTheVisibleTokensNeverShows) {
  PageTables tables;
  tables.page_size = 16;
  tables.add({9, 2, 5}, 3);
  tables.add({9, 2, 7}, 11);
  tables.add({9, 2, 5}, 3);
  tables.num_pages = 12;
  check_both_paths(kSmallF16, tables, {}, {.page_padding = 8});
  PlanOptions window;
  window.window_left = 20;
  check_both_paths(kSmallF16, tables, window, {.page_padding = 8});
  check_both_paths(kSmallF16, tables, window, {.layout = reference::Layout::hnd_side, .page_padding = 1});
  check_both_paths({64, 1, 64, 64, DType::f16, DType::f16, DType::f16}, tables, window, {.page_padding = 8});
  HEADWATER_NEEDS_GPU();
}

TEST(CudaFaults, Fault22_Fp8CacheWithScales) {
  for (const DType type : {DType::f16, DType::bf16}) {
    for (const int dim : {64, 128}) {
      for (const int scales : {0, 1, 2}) {
        check_both_paths({8, 2, dim, dim, type, DType::f8e4m3, type}, reference::tree({1, 4}, {64, 20}, 16), {},
                         {.k_scales = scales, .v_scales = 2 - scales});
      }
    }
  }
  HEADWATER_NEEDS_GPU();
}

TEST(CudaFaults, Fault23_CascadeActivatesWithDefaultSettings) {
  // A chat's shape under the shipped cost model and default options. On the device the workspace tells which path ran:
  // it is poisoned, and a cascade leaves the partial states of its rows there, flat (of parts this short) fewer.
  const AttentionShape shape{32, 8, 128, 128, DType::f16, DType::f16, DType::f16};
  const PageTables tables = reference::tree({1, 16}, {2048, 256}, 16);
  Planner planner(cuda::h200_model(shape));
  const Plan plan = planner.plan(shape, tables.batch(), {});
  EXPECT_EQ(plan.stats().path, Path::cascade) << plan.describe();
  EXPECT_LT(plan.stats().kv_bytes_read, plan.stats().kv_bytes_flat / 3);
  HEADWATER_NEEDS_GPU();
  reference::Call call(shape, {}, tables, {.check_naive = false}, 50'600);
  const auto counted = [&](const Plan& p, const cpu::RunArgs& args) {
    cuda::DevicePlan device(shape, cuda::Capacity::of(p));
    const DeviceCall there(shape, args, 16, device.workspace_size());
    device.upload(p, nullptr);
    cuda::run(device, there.args(), nullptr);
    there.fetch_to(args);
    EXPECT_EQ(there.complaint(), "");
    // The LSE of every partial state of the plan was written: none is NaN.
    std::vector<float> workspace(device.workspace_size() / sizeof(float));
    ok(cudaMemcpy(workspace.data(), there.args().workspace.data, device.workspace_size(), cudaMemcpyDeviceToHost));
    const auto states = static_cast<std::size_t>(p.stats().num_partials) * 32;
    EXPECT_GE(states, 2U * 16 * 32);
    std::size_t written = 0;
    for (std::size_t i = states * 128; i < workspace.size(); ++i) written += std::isnan(workspace[i]) ? 0 : 1;
    EXPECT_EQ(written, states);
    return cpu::RunOutcome{device.stats().path, Isa::scalar, device.stats().num_items, device.stats().kv_bytes_read, 0};
  };
  EXPECT_EQ(call.run_by(counted, plan, 0).complaint, "");
}

TEST(CudaFaults, Fault28_OutsidersDoNotDisableSharing) {
  PageTables tables;
  tables.page_size = 4;
  tables.add({0, 1, 2}, 4);
  tables.add({10, 11, 12}, 2);
  tables.add({}, 0, 1);
  tables.add({0, 1, 3}, 4);
  tables.add({20}, 4, 0);
  tables.add({30, 31}, 1);
  tables.add({10, 11, 13}, 2);
  PlanOptions options;
  options.policy = Policy::forest;
  Planner planner = eager_planner();
  const Plan plan = planner.plan(kSmallF16, tables.batch(), options);
  EXPECT_EQ(plan.stats().num_spans, 2);
  EXPECT_EQ(plan.stats().member_sequences, 4);
  check_both_paths(kSmallF16, tables);
  HEADWATER_NEEDS_GPU();
}

}  // namespace
}  // namespace headwater::cuda_test
