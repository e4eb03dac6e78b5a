// The layer benchmark; see harness.h.
#include "bench/harness.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "bench/probe.h"
#include "bench/reference.h"

namespace headwater::bench {
namespace {

/// Shortest of a few runs, in microseconds; at most about `budget` seconds.
template <typename Task>
double shortest_us(const Task& task, double budget = 0.02) {
  double best = 1e9;
  const double end = now() + budget;
  int runs = 0;
  do {
    const double start = now();
    task();
    best = std::min(best, now() - start);
  } while (++runs < 5 || (now() < end && runs < 200));
  return best * 1e6;
}

/// Times and limits of one arm, sample by sample.
struct Samples {
  std::vector<double> us;
  std::vector<double> limit_us;
};

void summarise(const Samples& samples, int steps, ArmResult& arm) {
  for (std::size_t at = 0; at < samples.us.size(); at += static_cast<std::size_t>(steps)) {
    const std::size_t end = std::min(samples.us.size(), at + static_cast<std::size_t>(steps));
    arm.rep_medians_us.push_back(median(
        {samples.us.begin() + static_cast<std::ptrdiff_t>(at), samples.us.begin() + static_cast<std::ptrdiff_t>(end)}));
  }
  arm.median_us = median(samples.us);
  arm.min_us = *std::ranges::min_element(samples.us);
  arm.max_us = *std::ranges::max_element(samples.us);
  arm.limit_us = median(samples.limit_us);
  std::vector<double> ratios;
  for (std::size_t i = 0; i < samples.us.size(); ++i) ratios.push_back(samples.us[i] / samples.limit_us[i]);
  arm.times_limit = median(ratios);
}

/// Holds what a call wrote against the reference. Throws Error(internal) where it is off.
void prove(const std::string& name, const PagedForest& paged, const Checked& checked, const BenchConfig& config,
           ArmResult& arm) {
  const RowsView& out = checked.out;
  const ErrorSample error = compare_with_reference(config.shape, paged, *checked.kv, checked.q,
                                                   {out.data, out.dtype, out.row_stride, out.head_stride}, checked.lse,
                                                   config.error_rows, config.plan, checked.alibi_slopes, checked.sinks);
  arm.max_rel_error = error.max_rel_error;
  arm.max_lse_error = error.max_lse_error;
  const double bound = tolerance(config.shape);
  if (error.max_rel_error < bound && error.max_lse_error < 0.1) return;
  throw Error(ErrorCode::internal,
              fmt::format("correctness proof: {} {}: max relative error {:.2e} (expected < {:.0e}), LSE off by {:.2e}",
                          name, name_of(arm.policy), error.max_rel_error, bound, error.max_lse_error));
}

}  // namespace

Interval pair_ratio(const std::vector<double>& numerator, const std::vector<double>& denominator) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < numerator.size(); ++i) ratios.push_back(numerator[i] / denominator[i]);
  return median_interval(std::move(ratios));
}

BenchConfig configured_for(const Workload& workload, BenchConfig config) {
  if (workload.num_qo_heads > 0) config.shape.num_qo_heads = workload.num_qo_heads;
  if (workload.num_kv_heads > 0) config.shape.num_kv_heads = workload.num_kv_heads;
  if (workload.head_dim > 0) config.shape.head_dim_qk = config.shape.head_dim_vo = workload.head_dim;
  if (workload.page_size > 0) config.page_size = workload.page_size;
  if (workload.configure) workload.configure(config);
  return config;
}

Harness::Harness(std::unique_ptr<Processor> processor, std::function<void(double)> progress)
    : processor_(std::move(processor)), progress_(std::move(progress)) {}

PlanOptions Harness::options_for(const BenchConfig& config, Policy policy) const {
  PlanOptions options = config.plan;
  options.policy = policy;
  if (policy == Policy::flat) options.cascade = CascadeSwitch::automatic;  // `on` would make it something else
  options.batch_invariant = config.batch_invariant;
  options.num_workers = processor_->plan_workers();
  return options;
}

std::unique_ptr<KvMemory> Harness::make_kv(std::int64_t num_pages, const BenchConfig& config) {
  return processor_->make_kv(config.shape, num_pages, config.page_size, config.layout, config.mla, config.cold_bytes);
}

CellResult Harness::run(const Workload& workload, const BenchConfig& requested) {
  const BenchConfig config = configured_for(workload, requested);
  const PagedForest paged = make_paged(workload.forest, config.page_size, config.seed, workload.shuffled);
  const std::unique_ptr<KvMemory> kv = make_kv(paged.pool->num_pages(), config);
  return measure(workload.name, paged, *kv, config);
}

CellResult Harness::measure(const std::string& name, const PagedForest& paged, KvMemory& kv,
                            const BenchConfig& config) {
  const AttentionShape& shape = config.shape;
  Planner planner(processor_->model_for(shape, config.model));
  Arms arms;
  std::vector<std::string> bytes;  // of each plan
  CellResult cell;
  for (const Policy policy : config.policies) {
    const PlanOptions options = options_for(config, policy);
    Arm& arm = *arms.emplace_back(processor_->make_arm(planner, shape, paged, options, kv));
    ArmResult& result = cell.arms.emplace_back();
    result.policy = policy;
    result.stats = arm.plan().stats();
    result.plan_us = shortest_us([&] { (void)planner.plan(shape, paged.batch(), options); });
    result.plan_warm_us = shortest_us([&] { planner.update(arm.plan(), paged.batch()); });
    result.upload_us = arm.upload();
    for (int i = 0; i < 20 && result.upload_us > 0; ++i) result.upload_us = std::min(result.upload_us, arm.upload());
    result.upload_us *= 1e6;
    bytes.push_back(arm.plan().serialize());
    result.same_plan_as = static_cast<std::size_t>(std::ranges::find(bytes, bytes.back()) - bytes.begin());
  }
  cell.workload = name;
  cell.shape = shape;
  cell.layout = config.layout;
  cell.page_size = config.page_size;
  cell.batch = static_cast<std::int64_t>(paged.qo_indptr.size()) - 1;
  cell.device = processor_->device();
  cell.isa = processor_->isa();
  cell.threads = processor_->num_workers();
  cell.batch_invariant = config.batch_invariant;
  cell.kv_aliased = kv.aliased();
  cell.peak_gflops = processor_->peak_gflops(shape.q_dtype, shape.kv_dtype);

  Checked first;
  for (std::size_t a = 0; a < arms.size(); ++a) {
    const Checked checked = arms[a]->check();
    if (a == 0) first = checked;
    cell.arms[a].bits_equal_first = std::ranges::equal(checked.out_bytes, first.out_bytes) &&
                                    std::ranges::equal(checked.lse_bytes, first.lse_bytes);
    if (config.error_rows > 0) prove(name, paged, checked, config, cell.arms[a]);
  }
  take_samples(arms, config, cell);
  return cell;
}

void Harness::take_samples(Arms& arms, const BenchConfig& config, CellResult& cell) {
  for (int i = 0; i < config.warmup; ++i) {
    for (const auto& arm : arms) arm->run();
  }
  std::vector<Samples> samples(arms.size());
  std::vector<double> rates;
  std::vector<double> us(arms.size());
  const int wanted = std::max(config.steps * config.reps, config.min_samples);
  const int least = std::max(6, config.min_samples);
  const double end = now() + config.cell_seconds;
  Processor::Sample before = processor_->sample();
  for (int round = 0; cell.samples < wanted && (now() < end || cell.samples < least); ++round) {
    for (std::size_t i = 0; i < arms.size(); ++i) {
      const std::size_t a = (i + static_cast<std::size_t>(round)) % arms.size();  // every arm goes first in turn
      us[a] = arms[a]->run() * 1e6;
    }
    const Processor::Sample after = processor_->sample();
    const bool keep = !before.throttled && !after.throttled;
    const double rate = (before.read_gbs + after.read_gbs) / 2;
    before = after;
    if (!keep && cell.dropped < 2 * wanted && now() < end + config.cell_seconds) {
      ++cell.dropped;
      continue;
    }
    cell.throttled_kept += keep ? 0 : 1;
    ++cell.samples;
    rates.push_back(rate);
    for (std::size_t a = 0; a < arms.size(); ++a) {
      const PlanStats& stats = cell.arms[a].stats;
      samples[a].us.push_back(us[a]);
      samples[a].limit_us.push_back(std::max(static_cast<double>(stats.kv_bytes_unique) / rate / 1e3,
                                             static_cast<double>(stats.flops) / cell.peak_gflops / 1e3));
    }
    if (progress_) progress_(static_cast<double>(cell.samples) / wanted);
  }
  cell.read_gbs = median(rates);
  for (std::size_t a = 0; a < arms.size(); ++a) {
    ArmResult& result = cell.arms[a];
    summarise(samples[a], config.steps, result);
    result.samples_us = samples[a].us;
    result.speedup = pair_ratio(samples.front().us, samples[a].us);
    result.bytes_limit_us = static_cast<double>(result.stats.kv_bytes_unique) / cell.read_gbs / 1e3;
    result.flops_limit_us = static_cast<double>(result.stats.flops) / cell.peak_gflops / 1e3;
    std::vector<double> warm;
    while (warm.size() < 11 && (warm.empty() || warm.back() > 0)) warm.push_back(arms[a]->run_warm() * 1e6);
    result.warm_us = median(warm);
  }
}

OverheadResult Harness::overhead(const Workload& workload, const BenchConfig& requested) {
  const BenchConfig config = configured_for(workload, requested);
  // Requests of the same lengths, each on its own.
  Forest apart;
  const std::vector<std::int64_t> path = path_lengths(workload.forest);
  for (const ForestRequest& request : workload.forest.requests) {
    apart.requests.push_back({static_cast<std::int32_t>(apart.nodes.size()), request.num_rows});
    apart.nodes.push_back({-1, path[static_cast<std::size_t>(request.node)]});
  }
  const PagedForest paged = make_paged(apart, config.page_size, config.seed);
  Planner planner(processor_->model_for(config.shape, config.model));
  PlanOptions off = options_for(config, Policy::flat);
  off.cascade = CascadeSwitch::off;
  const PlanOptions detect = options_for(config, Policy::automatic);
  const std::unique_ptr<KvMemory> kv = make_kv(paged.pool->num_pages(), config);
  const std::unique_ptr<Arm> flat = processor_->make_arm(planner, config.shape, paged, off, *kv);
  const std::unique_ptr<Arm> planned = processor_->make_arm(planner, config.shape, paged, detect, *kv);

  OverheadResult result;
  result.workload = workload.name;
  result.batch = static_cast<std::int64_t>(apart.requests.size());
  result.same_plan = flat->plan().serialize() == planned->plan().serialize();
  result.plan_cold_us = shortest_us([&] { (void)planner.plan(config.shape, paged.batch(), detect); });
  std::vector<double> without;
  std::vector<double> with;
  std::vector<double> planning;
  const auto run_planned = [&] {
    const double start = now();
    planner.update(planned->plan(), paged.batch());
    const double seconds = now() - start;
    planning.push_back(seconds * 1e6);
    return (seconds + planned->upload() + planned->run()) * 1e6;
  };
  const int pairs = std::max(30, config.steps * config.reps / 2);
  const double end = now() + config.cell_seconds;
  for (int i = 0; i < pairs && (i < 30 || now() < end); ++i) {
    double first = 0;
    double second = 0;
    if (i % 2 == 0) {
      first = flat->run() * 1e6;
      second = run_planned();
    } else {
      second = run_planned();
      first = flat->run() * 1e6;
    }
    without.push_back(first);
    with.push_back(second);
    if (progress_) progress_(static_cast<double>(i + 1) / pairs);
  }
  result.pairs = static_cast<int>(with.size());
  result.flat_us = median(without);
  result.plan_warm_us = median(planning);
  result.ratio = pair_ratio(with, without);
  return result;
}

}  // namespace headwater::bench
