// Calibration of the cost model; see calibrate.h.
#include "bench/calibrate.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
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

/// Value at a rank: 0 the least, 1 the greatest.
double quantile(std::vector<double> values, double rank) {
  std::ranges::sort(values);
  return values[static_cast<std::size_t>(rank * static_cast<double>(values.size() - 1))];
}

/// Small attention calls on warm KV, timed in turn, so that a disturbance from outside reaches all of them alike.
class Calls {
 public:
  Calls(const DeviceModel& model, Isa isa) : planner_(model), isa_(isa) {}

  /// The number of a call.
  std::size_t add(Executor& executor, const AttentionShape& shape, const Forest& forest, Policy policy) {
    const PagedForest paged = make_paged(forest, kPage, 1);
    PlanOptions options;
    options.policy = policy;
    options.min_shared_pages = 1;
    options.num_workers = executor.num_workers();
    calls_.push_back({&executor,
                      Step(planner_, shape, paged, options, isa_),
                      ColdKv(shape, paged.pool->num_pages(), kPage, Layout::hnd, false, 0),
                      {}});
    return calls_.size() - 1;
  }

  /// Every call twice: the first run brings code, KV and workers back, the second counts.
  void round() {
    for (Call& call : calls_) {
      call.step.run(call.kv.next(), *call.executor);
      call.seconds.push_back(call.step.run(call.kv.next(), *call.executor));
    }
  }

  /// Of one run: the least, since noise from outside only adds.
  [[nodiscard]] double seconds(std::size_t call) const { return std::ranges::min(calls_[call].seconds); }

 private:
  struct Call {
    Executor* executor;
    Step step;
    ColdKv kv;
    std::vector<double> seconds;
  };
  Planner planner_;
  Isa isa_;
  std::vector<Call> calls_;
};

/// Products of one key and KV head with a number of stacked rows, in cache, on one thread: a long request less a short.
class ProductCalls {
 public:
  ProductCalls(Calls& calls, Executor& serial, DType type, const ComputeModel& compute) : calls_(calls) {
    for (const int rows : {1, 2, 4, 8, 16, 32, 64, 128}) {
      const AttentionShape shape = shape_of(rows, 1, type);
      const std::size_t all = calls.add(serial, shape, unshared(1, kTokens), Policy::flat);
      const std::size_t fixed = calls.add(serial, shape, unshared(1, kPage), Policy::flat);
      (rows <= compute.few_row_max ? few_ : many_).push_back({rows, all, fixed});
    }
  }

  /// `out`: few_row_max and many_row_pad, which are properties of the kernels, stay as they are.
  void measure(ComputeModel& out) const {
    double seconds = 0;  // a line through the origin, weighted towards more rows
    double rows = 0;
    for (const Pair& pair : few_) {
      seconds += per_key(pair);
      rows += pair.rows;
    }
    if (rows > 0) out.few_row_ps = picoseconds(seconds / rows);
    std::vector<std::pair<double, double>> points;
    for (const Pair& pair : many_) points.emplace_back(pair.rows, per_key(pair));
    const Line line = fit_line(points);
    out.many_row_ps = picoseconds(line.slope);
    out.many_base_ps = picoseconds(line.base, 0);
  }

 private:
  static constexpr std::int64_t kTokens = 512;  ///< 256 KiB of bf16 KV at one head of 128 + 128
  struct Pair {
    int rows;
    std::size_t all;
    std::size_t fixed;
  };
  [[nodiscard]] double per_key(const Pair& pair) const {
    return std::max(calls_.seconds(pair.all) - calls_.seconds(pair.fixed), 1e-9) / static_cast<double>(kTokens - kPage);
  }

  Calls& calls_;
  std::vector<Pair> few_;
  std::vector<Pair> many_;
};

/// Rates of memory and cache, and what the cache holds.
class Rates {
 public:
  Rates(Executor& executor, Executor& serial, Isa isa) : all_(executor, isa), one_(serial, isa) {}

  void sample() {
    for (int i = 0; i < 3; ++i) {
      sample(all_, all_gbs_);
      sample(one_, one_gbs_);
    }
  }

  void measure(DeviceModel& model) {
    // The upper decile: bandwidth that others take away is not the machine's, and neither is a lucky outlier.
    // One worker alone is never faster than all together.
    const double one = quantile(one_gbs_, 0.9);
    const double memory = std::max(quantile(all_gbs_, 0.9), one);
    double cache = all_.cached_read_gbs(std::size_t{4} << 20);
    // The cache ends where reading again is hardly faster than memory.
    std::size_t cache_bytes = std::size_t{2} << 20;
    for (std::size_t bytes = std::size_t{4} << 20; bytes <= std::size_t{128} << 20; bytes *= 2) {
      if (all_.cached_read_gbs(bytes) < memory + 0.4 * (cache - memory)) break;
      cache_bytes = bytes;
    }
    cache = std::max(cache, memory);
    model.memory_ps_per_kib = picoseconds(1024 / (memory * 1e9));
    model.worker_ps_per_kib = picoseconds(1024 / (one * 1e9));
    model.cache_ps_per_kib = picoseconds(1024 / (cache * 1e9));
    model.cache_bytes = static_cast<std::int64_t>(cache_bytes);
  }

 private:
  static void sample(MachineProbe& probe, std::vector<double>& out) {
    const MachineProbe::Sample taken = probe.sample();
    if (!taken.throttled || out.empty()) out.push_back(taken.read_gbs);
  }

  MachineProbe all_;
  MachineProbe one_;
  std::vector<double> all_gbs_;
  std::vector<double> one_gbs_;
};

}  // namespace

DeviceModel calibrate(Executor& executor, Isa isa, const std::function<void(double, const std::string&)>& progress) {
  DeviceModel model = DeviceModel::for_isa(isa);
  model.num_workers = executor.num_workers();
  model.has_dot16 = isa == Isa::avx512_bf16;
  const auto report = [&](double fraction, const char* what) {
    if (progress) progress(fraction, what);
  };
  report(0, "calls and memory to measure with");
  SerialExecutor serial;
  Rates rates(executor, serial, isa);
  Calls calls(model, isa);
  // Without dot products all types are computed in fp32; bf16, which has to be converted, then stands for them.
  const ProductCalls fma32(calls, serial, model.has_dot16 ? DType::f32 : DType::bf16, model.fma32);
  std::optional<ProductCalls> dot16;
  if (model.has_dot16) dot16.emplace(calls, serial, DType::bf16, model.dot16);

  const AttentionShape shape = shape_of(32, 8, DType::bf16);
  // n requests of one page: n items of one row each.
  std::vector<std::pair<int, std::size_t>> item_calls;
  for (const int n : {8, 32, 128})
    item_calls.emplace_back(n, calls.add(serial, shape, unshared(n, kPage), Policy::flat));
  // n rows over one and the same page: one item of n rows, of at most max_tile_rows stacked ones. No tokens of their
  // own: requests with one table.
  std::vector<std::pair<int, std::size_t>> row_calls;
  for (const int n : {8, 16, 32})
    row_calls.emplace_back(n, calls.add(serial, shape, two_level(kPage, n, 0), Policy::forest));
  // n requests that share one page and own one: split off, and not.
  const int n = 32;
  const std::size_t split = calls.add(serial, shape, two_level(kPage, n, kPage), Policy::forest);
  const std::size_t unsplit = calls.add(serial, shape, two_level(kPage, n, kPage), Policy::flat);
  const std::size_t launch =
      calls.add(executor, shape, unshared(std::max(2, executor.num_workers()), kPage), Policy::flat);

  constexpr int kRounds = 400;
  constexpr int kLeastRounds = 40;
  constexpr double kSeconds = 10;
  const double start = now();
  for (int i = 0; i < kRounds && (i < kLeastRounds || now() - start < kSeconds); ++i) {
    report(0.02 + 0.9 * std::max(static_cast<double>(i) / kRounds, std::min((now() - start) / kSeconds, 1.0)),
           "small calls and memory, in turn");
    calls.round();
    rates.sample();
  }
  report(0.93, "cache");
  rates.measure(model);
  fma32.measure(model.fma32);
  if (dot16) dot16->measure(model.dot16);

  const ComputeModel& compute = model.has_dot16 ? model.dot16 : model.fma32;
  const auto line_of = [&](const std::vector<std::pair<int, std::size_t>>& numbered) {
    std::vector<std::pair<double, double>> points;
    for (const auto& [count, call] : numbered) points.emplace_back(count, calls.seconds(call));
    return fit_line(points);
  };
  // The products of one page's keys with one request's row, and with another row in an item of many.
  const double keys = static_cast<double>(kPage) * shape.num_kv_heads;
  const int group = shape.group_size();
  const double base = keys * in_seconds(compute.many_base_ps);
  const double per_row = keys * in_seconds(compute.many_row_ps) * group;
  const double one_row = group <= compute.few_row_max ? keys * in_seconds(compute.few_row_ps) * group : base + per_row;
  model.item_row_ps = picoseconds(line_of(row_calls).slope - per_row, 10'000);
  model.item_ps = picoseconds(line_of(item_calls).slope - one_row - in_seconds(model.item_row_ps), 50'000);

  // Split off, there are n row visits and one item more, and 2 n partial rows; the shared page's products are by the
  // other kernel, once; and there is a merge phase, which costs no wake-up on one thread.
  const double kib = 2.0 * n * shape.num_qo_heads * (shape.head_dim_vo + 1) * 4 / 1024;
  const double saved = n * (one_row - per_row) - base;
  model.partial_ps_per_kib = picoseconds((calls.seconds(split) - calls.seconds(unsplit) + saved -
                                          n * in_seconds(model.item_row_ps) - in_seconds(model.item_ps)) /
                                             kib,
                                         5'000);
  // Each worker has one item.
  const double items = std::ceil(std::max(2.0, static_cast<double>(executor.num_workers())) / executor.num_workers());
  model.launch_ps =
      picoseconds(calls.seconds(launch) - items * (in_seconds(model.item_ps + model.item_row_ps) + one_row), 500'000);
  report(1, "done");
  return model;
}

}  // namespace headwater::bench
