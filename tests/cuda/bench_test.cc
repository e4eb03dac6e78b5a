// The layer benchmark on a CUDA device: proofs, times and limits of a cell, calibration. And without a device:
// refusals, and what a calibrated model becomes for a shape.
#include <gtest/gtest.h>

#include <set>

#include "bench/cuda_processor.h"
#include "bench/harness.h"
#include "bench/report.h"
#include "bench/suites.h"
#include "bench/workloads.h"
#include "cli/formats.h"
#include "cuda/device_runner.h"
#include "headwater/error.h"

namespace headwater::bench {
namespace {

BenchConfig small_config() {
  BenchConfig config;
  config.shape = {8, 2, 64, 64, DType::f16, DType::f16, DType::f16};
  config.policies = {Policy::flat, Policy::forest};
  config.steps = 3;
  config.reps = 2;
  config.warmup = 1;
  return config;
}

TEST(CudaBench, ACellHasProofsTimesAndLimits) {
  HEADWATER_NEEDS_GPU();
  Workload workload;
  workload.name = "1,16|512,64";
  workload.forest = two_level(512, 16, 64);
  Harness harness(make_cuda_processor());
  const CellResult cell = harness.run(workload, small_config());
  EXPECT_EQ(cell.device, "cuda");
  EXPECT_TRUE(cell.isa.starts_with("sm_"));
  EXPECT_EQ(cell.samples, 6);
  EXPECT_GT(cell.read_gbs, 50);
  EXPECT_GT(cell.peak_gflops, 1e4);
  ASSERT_EQ(cell.arms.size(), 2U);
  EXPECT_EQ(cell.arms[0].stats.path, Path::flat);
  EXPECT_EQ(cell.arms[1].stats.path, Path::cascade);
  EXPECT_FALSE(cell.arms[1].same_plan_as_first());
  for (const ArmResult& arm : cell.arms) {
    EXPECT_GT(arm.median_us, 1) << "no call takes less";
    EXPECT_LT(arm.median_us, 1e4);
    EXPECT_GT(arm.warm_us, 1);
    EXPECT_LT(arm.warm_us, 2 * arm.median_us);
    EXPECT_GT(arm.upload_us, 0);
    EXPECT_GT(arm.max_rel_error, 0) << "compared with double precision";
    EXPECT_LT(arm.max_rel_error, 5e-3);
    EXPECT_GT(arm.bytes_limit_us, 0);
    EXPECT_GT(arm.flops_limit_us, 0);
    EXPECT_GE(arm.times_limit, 0.9) << "faster than the memory can be read";
    EXPECT_EQ(arm.samples_us.size(), 6U);
  }
  auto json = nlohmann::ordered_json::array();
  append_json(json, cell);
  EXPECT_EQ(json.at(0)["device"], "cuda");
  EXPECT_GT(json.at(0)["warm_us"], 0);
  EXPECT_NE(csv_of(json).find(",device,warm_us,upload_us,bytes_limit_us,flops_limit_us"), std::string::npos);
  TextTable table = cell_table(true);
  add_rows(table, cell);
  EXPECT_NE(table.text().find("limited by"), std::string::npos);
}

TEST(CudaBench, WhatNoKernelServesIsRefused) {
  HEADWATER_NEEDS_GPU();
  Workload workload;
  workload.forest = two_level(64, 2, 16);
  BenchConfig config = small_config();
  workload.head_dim = 80;
  Harness harness(make_cuda_processor());
  EXPECT_THROW((void)harness.run(workload, config), Error);
}

TEST(CudaBench, CalibrationMeasuresEveryConstantAndReportsProgress) {
  HEADWATER_NEEDS_GPU();
  std::set<std::string> parts;
  double last = -1;
  const DeviceModel model = calibrate_cuda(DType::f16, [&](double fraction, const std::string& what) {
    EXPECT_GE(fraction, last);
    last = fraction;
    parts.insert(what);
  });
  EXPECT_EQ(last, 1);
  EXPECT_GE(parts.size(), 5U);
  EXPECT_GT(model.num_workers, 1);
  EXPECT_GT(model.memory_ps_per_kib, 50);
  EXPECT_GT(model.worker_ps_per_kib, model.memory_ps_per_kib) << "one block against all";
  EXPECT_GT(model.cache_ps_per_kib, 10);
  EXPECT_GT(model.item_ps, 100'000);
  EXPECT_LT(model.item_ps, 100'000'000);
  EXPECT_GT(model.launch_ps, 500'000) << "the least that is written";
  EXPECT_GT(model.dot16.many_row_ps, 0);
  EXPECT_EQ(cli::device_model_to_json(cli::parse_device_model(cli::device_model_to_json(model, "m"), "f"), "m"),
            cli::device_model_to_json(model, "m"));
}

TEST(CudaBench, FeatureCellsHaveTheSameBytes) {
  // By the planner's account, in both groups; without a device.
  std::set<std::string> names;
  for (const SuiteGroup& group : find_suite("features", BenchConfig{}, true)) {
    double base = 0;
    for (const Workload& workload : group.workloads) {
      names.insert(workload.name);
      const BenchConfig config = configured_for(workload, group.config);
      const PagedForest paged = make_paged(workload.forest, config.page_size, 1, false);
      Planner planner(cuda::h200_model(config.shape));
      const PlanStats stats = planner.plan(config.shape, paged.batch(), config.plan).stats();
      if (base == 0) base = static_cast<double>(stats.kv_bytes_unique);
      EXPECT_NEAR(static_cast<double>(stats.kv_bytes_unique) / base, 1.0, 0.03) << workload.name;
    }
  }
  EXPECT_EQ(names.size(), 40U);
  EXPECT_THROW((void)find_suite("features", BenchConfig{}), Error) << "for devices";
}

TEST(CudaBench, WithoutADeviceEverythingIsRefused) {
  if (cuda::num_devices() > 0) GTEST_SKIP() << "there is a device";
  const auto refused = [](const auto& call) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const std::string words = "device cuda: no CUDA device that this process can use";
  EXPECT_EQ(refused([] { (void)make_cuda_processor(); }), words);
  EXPECT_EQ(refused([] { (void)calibrate_cuda(DType::f16, {}); }), words);
  EXPECT_EQ(refused([] { (void)cuda_device_name(); }), words);
}

TEST(CudaModel, OfOneHeadBecomesThatOfAShape) {
  const DeviceModel one = cuda::h200_model({4, 1, 128, 128});
  EXPECT_EQ(one.num_workers, 264) << "two blocks a multiprocessor";
  const DeviceModel eight = cuda::model_for_shape(one, {32, 8, 128, 128});
  EXPECT_EQ(eight.num_workers, 33) << "teams of eight";
  EXPECT_EQ(eight.worker_ps_per_kib, one.worker_ps_per_kib / 8) << "which read side by side";
  EXPECT_EQ(eight.dot16.many_row_ps, one.dot16.many_row_ps / 8);
  EXPECT_EQ(eight.dot16.many_base_ps, one.dot16.many_base_ps / 8);
  EXPECT_EQ(eight.item_ps, one.item_ps);
  EXPECT_EQ(cli::device_model_to_json(eight, ""), cli::device_model_to_json(cuda::h200_model({32, 8, 128, 128}), ""));
  const DeviceModel wide = cuda::model_for_shape(one, {16, 1, 256, 256});
  EXPECT_EQ(wide.num_workers, 132) << "one block a multiprocessor";
  EXPECT_EQ(wide.max_tile_rows, one.max_tile_rows / 2);
  EXPECT_EQ(cuda::model_for_shape(one, {4096, 1024, 128, 128}).num_workers, 1);
}

}  // namespace
}  // namespace headwater::bench
