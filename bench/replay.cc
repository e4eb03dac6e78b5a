// Replay of trees and traces; see replay.h.
#include "bench/replay.h"

#include <fmt/format.h>

#include <algorithm>

namespace headwater::bench {

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

ReplaySummary replay(Harness& harness, const std::string& name, const std::vector<ReplayStep>& steps,
                     const BenchConfig& config, const std::function<void(const CellResult&)>& on_cell,
                     const std::function<void(double)>& progress) {
  ReplaySummary summary;
  summary.name = name;
  if (steps.empty()) return summary;
  std::int64_t pool_pages = 1;
  for (const ReplayStep& step : steps) pool_pages = std::max(pool_pages, count_pages(step.forest, config.page_size));
  ColdKv kv(config.shape, pool_pages, config.page_size, config.layout, config.mla, config.cold_bytes);
  std::vector<double> speedups;
  std::vector<double> limits;
  std::vector<double> first;
  std::vector<double> second;
  double first_sum = 0;
  double second_sum = 0;
  for (const ReplayStep& step : steps) {
    const PagedForest paged = make_paged(step.forest, config.page_size, config.seed, true, pool_pages);
    const CellResult cell = harness.measure(name + ", " + step.name, paged, kv, config);
    const ArmResult& a = cell.arms.front();
    const ArmResult& b = cell.arms.back();
    ++summary.steps;
    summary.mean_requests += static_cast<double>(cell.batch) / static_cast<double>(steps.size());
    summary.identical_plans += b.same_plan_as_first ? 1 : 0;
    summary.bytes_read += static_cast<double>(b.stats.kv_bytes_read);
    summary.bytes_flat += static_cast<double>(b.stats.kv_bytes_flat);
    summary.bytes_unique += static_cast<double>(b.stats.kv_bytes_unique);
    summary.dropped += cell.dropped;
    limits.push_back(b.times_limit);
    speedups.push_back(a.median_us / b.median_us);
    first_sum += a.median_us;
    second_sum += b.median_us;
    if (!b.same_plan_as_first) {
      first.insert(first.end(), a.samples_us.begin(), a.samples_us.end());
      second.insert(second.end(), b.samples_us.begin(), b.samples_us.end());
    }
    if (on_cell) on_cell(cell);
    if (progress) progress(static_cast<double>(summary.steps) / static_cast<double>(steps.size()));
  }
  summary.times_limit = geometric_mean(limits);
  summary.speedup = geometric_mean(speedups);
  summary.total_speedup = first_sum / second_sum;
  summary.pair_ratio = pair_ratio(second, first);
  return summary;
}

}  // namespace headwater::bench
