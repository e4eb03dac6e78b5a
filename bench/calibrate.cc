// Calibration of the cost model; see calibrate.h.
#include "bench/calibrate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "bench/paged.h"
#include "bench/probe.h"
#include "bench/stats.h"
#include "bench/step.h"
#include "bench/workloads.h"

namespace headwater::bench {
namespace {

constexpr int kPage = 16;

AttentionShape shape_of(int q_heads, int kv_heads, DType type) {
  AttentionShape shape;
  shape.num_qo_heads = q_heads;
  shape.num_kv_heads = kv_heads;
  shape.q_dtype = shape.kv_dtype = shape.out_dtype = type;
  return shape;
}

/// Seconds of one call: the lower quartile of `runs`, which noise from outside reaches least without being a lucky
/// outlier.
double time_of(Executor& executor, Isa isa, const DeviceModel& model, const AttentionShape& shape, const Forest& forest,
               Policy policy, std::size_t cold_bytes, int runs) {
  const PagedForest paged = make_paged(forest, kPage, 1);
  PlanOptions options;
  options.policy = policy;
  options.min_shared_pages = 1;
  options.num_workers = executor.num_workers();
  Planner planner(model);
  Step step(planner, shape, paged, options, isa);
  ColdKv kv(shape, paged.pool->num_pages(), kPage, Layout::hnd, false, cold_bytes);
  for (int i = 0; i < 3; ++i) step.run(kv.next(), executor);
  std::vector<double> seconds;
  for (int i = 0; i < runs; ++i) seconds.push_back(step.run(kv.next(), executor));
  std::ranges::sort(seconds);
  return seconds[seconds.size() / 4];
}

struct Line {
  double base = 0;
  double slope = 0;
};

/// Least squares.
Line fit(const std::vector<std::pair<double, double>>& points) {
  double sx = 0;
  double sy = 0;
  double sxx = 0;
  double sxy = 0;
  const auto n = static_cast<double>(points.size());
  for (const auto& [x, y] : points) {
    sx += x;
    sy += y;
    sxx += x * x;
    sxy += x * y;
  }
  Line line;
  line.slope = (n * sxy - sx * sy) / (n * sxx - sx * sx);
  line.base = (sy - line.slope * sx) / n;
  return line;
}

std::int64_t picoseconds(double seconds, double least = 1) {
  return static_cast<std::int64_t>(std::llround(std::max(seconds * 1e12, least)));
}

/// Products of one key and KV head with r stacked rows, in cache, on one thread.
ComputeModel measure_compute(Isa isa, DType type, const DeviceModel& model) {
  SerialExecutor serial;
  constexpr std::int64_t kTokens = 1024;  // 512 KiB of bf16 KV at one head
  const auto per_key = [&](int rows) {
    const AttentionShape shape = shape_of(rows, 1, type);
    const double all = time_of(serial, isa, model, shape, unshared(1, kTokens), Policy::flat, 0, 40);
    const double fixed = time_of(serial, isa, model, shape, unshared(1, kPage), Policy::flat, 0, 40);
    return std::max(all - fixed, 1e-9) / static_cast<double>(kTokens - kPage);
  };
  ComputeModel out = model.has_dot16 && type == DType::bf16 ? model.dot16 : model.fma32;
  std::vector<std::pair<double, double>> few;
  for (const int rows : {1, 2, 4, 8}) {
    if (rows <= out.few_row_max) few.emplace_back(rows, per_key(rows));
  }
  double ratio = 0;  // through the origin, weighted towards more rows
  double weight = 0;
  for (const auto& [rows, seconds] : few) {
    ratio += seconds;
    weight += rows;
  }
  out.few_row_ps = picoseconds(ratio / weight);
  std::vector<std::pair<double, double>> many;
  for (const int rows : {16, 32, 64, 128}) many.emplace_back(rows, per_key(rows));
  const Line line = fit(many);
  out.many_row_ps = picoseconds(line.slope);
  out.many_base_ps = picoseconds(line.base, 0);
  return out;
}

}  // namespace

DeviceModel calibrate(Executor& executor, Isa isa, const std::function<void(double, const std::string&)>& progress) {
  DeviceModel model = DeviceModel::default_cpu();
  model.num_workers = executor.num_workers();
  model.has_dot16 = isa == Isa::avx512_bf16;
  const auto report = [&](double fraction, const char* what) {
    if (progress) progress(fraction, what);
  };

  report(0.02, "memory and cache rates");
  MachineProbe probe(executor, isa);
  const double memory_gbs = probe.memory_gbs();
  double cache_gbs = probe.cached_read_gbs(std::size_t{4} << 20);
  // The cache ends where reading again is hardly faster than memory.
  std::size_t cache_bytes = std::size_t{2} << 20;
  for (std::size_t bytes = std::size_t{4} << 20; bytes <= std::size_t{128} << 20; bytes *= 2) {
    if (probe.cached_read_gbs(bytes) < memory_gbs + 0.4 * (cache_gbs - memory_gbs)) break;
    cache_bytes = bytes;
  }
  cache_gbs = std::max(cache_gbs, memory_gbs);
  model.memory_ps_per_kib = picoseconds(1024 / (memory_gbs * 1e9));
  model.cache_ps_per_kib = picoseconds(1024 / (cache_gbs * 1e9));
  SerialExecutor serial;
  model.worker_ps_per_kib = picoseconds(1024 / (MachineProbe(serial, isa).memory_gbs() * 1e9));
  model.cache_bytes = static_cast<std::int64_t>(cache_bytes);

  // Without dot products all types are computed in fp32; bf16, which has to be converted, then stands for them.
  report(0.2, "products");
  model.fma32 = measure_compute(isa, model.has_dot16 ? DType::f32 : DType::bf16, model);
  report(0.45, "products of 16-bit operands");
  if (model.has_dot16) model.dot16 = measure_compute(isa, DType::bf16, model);
  const ComputeModel& compute = model.has_dot16 ? model.dot16 : model.fma32;  // of the calls below

  const AttentionShape shape = shape_of(32, 8, DType::bf16);
  const auto one = [&](const Forest& forest, Policy policy) {
    return time_of(serial, isa, model, shape, forest, policy, 0, 60);
  };

  report(0.7, "items and rows");
  // n requests of one page: n items of one row each. The products of 16 keys are taken off.
  const double keys = static_cast<double>(kPage) * shape.num_kv_heads;
  const double per_key = static_cast<double>(compute.few_row_ps) * shape.group_size() * 1e-12;
  const Line items = fit({{8, one(unshared(8, kPage), Policy::flat)},
                          {32, one(unshared(32, kPage), Policy::flat)},
                          {128, one(unshared(128, kPage), Policy::flat)}});
  // n rows over one and the same page: one item of n rows. `own` = 0 tokens: requests with one table.
  const auto rows_time = [&](int n) { return one(two_level(kPage, n, 0), Policy::forest); };
  const Line rows = fit({{8, rows_time(8)}, {16, rows_time(16)}, {32, rows_time(32)}});
  const double row_products = keys * static_cast<double>(compute.many_row_ps) * shape.group_size() * 1e-12;
  model.item_row_ps = picoseconds(rows.slope - row_products, 10'000);
  model.item_ps = picoseconds(items.slope - keys * per_key - static_cast<double>(model.item_row_ps) * 1e-12, 50'000);

  report(0.8, "partial states");
  // One request of 4,096 tokens split at every shared page border against the same unsplit: n requests share one page
  // and own one.
  const auto split_time = [&](int n, Policy policy) { return one(two_level(kPage, n, kPage), policy); };
  const int n = 32;
  const double extra = split_time(n, Policy::forest) - split_time(n, Policy::flat);
  // forest: n more row visits in one more item, 2 n partial rows; products are the same except that shared ones use the
  // other kernel.
  const double kib = 2.0 * n * shape.num_qo_heads * (shape.head_dim_vo + 1) * 4 / 1024;
  const double shared_products =
      keys *
      (n * shape.group_size() * static_cast<double>(compute.many_row_ps) + static_cast<double>(compute.many_base_ps)) *
      1e-12;
  const double saved = n * keys * per_key - shared_products;
  model.partial_ps_per_kib = picoseconds(
      (extra + saved - (n * static_cast<double>(model.item_row_ps) + static_cast<double>(model.item_ps)) * 1e-12) / kib,
      5'000);

  report(0.95, "launch");
  const double launch =
      time_of(executor, isa, model, shape, unshared(std::max(2, executor.num_workers()), kPage), Policy::flat, 0, 200);
  model.launch_ps =
      picoseconds(launch - (static_cast<double>(model.item_ps + model.item_row_ps) * 1e-12 + keys * per_key), 500'000);
  report(1, "done");
  return model;
}

}  // namespace headwater::bench
