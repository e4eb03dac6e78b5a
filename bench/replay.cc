// Replay of trees and traces; see replay.h.
#include "bench/replay.h"

#include <fmt/format.h>

#include <algorithm>

namespace headwater::bench {

namespace {

/// Arm `a` of all cells against the first.
ReplaySummary summary_of(const std::string& name, const std::vector<CellResult>& cells, std::size_t a) {
  ReplaySummary summary;
  summary.name = name;
  std::vector<double> speedups;
  std::vector<double> limits;
  std::vector<double> first;
  std::vector<double> second;
  double first_sum = 0;
  double second_sum = 0;
  for (const CellResult& cell : cells) {
    const ArmResult& base = cell.arms.front();
    const ArmResult& arm = cell.arms[a];
    summary.policy = arm.policy;
    ++summary.steps;
    summary.mean_requests += static_cast<double>(cell.batch) / static_cast<double>(cells.size());
    summary.identical_plans += arm.same_plan_as_first() ? 1 : 0;
    summary.bytes_read += static_cast<double>(arm.stats.kv_bytes_read);
    summary.bytes_flat += static_cast<double>(arm.stats.kv_bytes_flat);
    summary.bytes_unique += static_cast<double>(arm.stats.kv_bytes_unique);
    summary.dropped += cell.dropped;
    summary.throttled_kept += cell.throttled_kept;
    summary.worst_times_limit = std::max(summary.worst_times_limit, arm.times_limit);
    limits.push_back(arm.times_limit);
    speedups.push_back(base.median_us / arm.median_us);
    first_sum += base.median_us;
    second_sum += arm.median_us;
    if (arm.same_plan_as_first()) continue;
    first.insert(first.end(), base.samples_us.begin(), base.samples_us.end());
    second.insert(second.end(), arm.samples_us.begin(), arm.samples_us.end());
  }
  summary.times_limit = geometric_mean(limits);
  summary.speedup = geometric_mean(speedups);
  summary.total_speedup = second_sum > 0 ? first_sum / second_sum : 0;
  summary.pairs = static_cast<int>(first.size());
  summary.pair_ratio = pair_ratio(second, first);
  return summary;
}

}  // namespace

std::vector<ReplayStep> steps_of_trees(const std::vector<cli::Tree>& trees, int max_trees, int per_tree) {
  std::vector<ReplayStep> out;
  const std::size_t count = std::min(trees.size(), static_cast<std::size_t>(std::max(max_trees, 0)));
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t tree = i * trees.size() / count;
    const std::int64_t last = trees[tree].last_step();
    for (int s = 0; s < per_tree; ++s) {
      // The middle of each of per_tree equal parts of [1, last].
      const std::int64_t step = 1 + (last - 1) * (2 * std::int64_t{s} + 1) / (2 * std::int64_t{per_tree});
      Forest forest = trees[tree].at_step(step);
      if (!forest.requests.empty()) out.push_back({fmt::format("tree {} step {}", tree, step), std::move(forest)});
    }
  }
  return out;
}

std::vector<ReplayStep> steps_of_trace(const cli::Trace& trace, int count, double rate) {
  std::vector<ReplayStep> out;
  const double duration = std::max(trace.duration(rate), 1.0);
  for (int i = 0; i < count; ++i) {
    const double at = duration * (i + 0.5) / count + 1.0;  // one second of prefill comes before the first token
    Forest forest = trace.at_time(at, rate);
    if (!forest.requests.empty()) out.push_back({fmt::format("t = {:.1f} s, rate {:g}", at, rate), std::move(forest)});
  }
  return out;
}

std::vector<ReplaySummary> replay(Harness& harness, const std::string& name, const std::vector<ReplayStep>& steps,
                                  BenchConfig config, const std::function<void(const CellResult&)>& on_cell,
                                  const std::function<void(double)>& progress) {
  std::int64_t pool_pages = 1;
  for (const ReplayStep& step : steps) pool_pages = std::max(pool_pages, count_pages(step.forest, config.page_size));
  const std::unique_ptr<KvMemory> kv = harness.make_kv(pool_pages, config);
  const int count = static_cast<int>(steps.size());
  config.min_samples = count > 0 ? (kMinPairs + count - 1) / count : 0;
  std::vector<CellResult> cells;
  for (const ReplayStep& step : steps) {
    const PagedForest paged = make_paged(step.forest, config.page_size, config.seed, true, pool_pages);
    cells.push_back(harness.measure(name + ", " + step.name, paged, *kv, config));
    if (on_cell) on_cell(cells.back());
    if (progress) progress(static_cast<double>(cells.size()) / count);
  }
  std::vector<ReplaySummary> out;
  for (std::size_t a = 1; a < config.policies.size(); ++a) out.push_back(summary_of(name, cells, a));
  return out;
}

}  // namespace headwater::bench
