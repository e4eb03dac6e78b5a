// Replay of recorded sharing: Tree-of-Thoughts trees decode step by decode step, chat traces by arrival time.
//
// Every step (or moment) becomes a cell; all cells of a replay use one KV memory. The summary pools the pairs of all
// cells.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "cli/formats.h"

namespace headwater::bench {

struct ReplayStep {
  std::string name;  ///< "tree 3 step 417", "t = 120.0 s"
  Forest forest;
};

/// Up to `per_tree` decode steps of each of up to `max_trees` trees, evenly spaced over the steps in which something is
/// live.
[[nodiscard]] std::vector<ReplayStep> steps_of_trees(const std::vector<cli::Tree>& trees, int max_trees, int per_tree);
/// `count` moments evenly spaced over the trace, with arrivals `rate` times as fast.
[[nodiscard]] std::vector<ReplayStep> steps_of_trace(const cli::Trace& trace, int count, double rate);

struct ReplaySummary {
  std::string name;
  int steps = 0;
  int identical_plans = 0;  ///< steps whose plan is flat's byte for byte
  double mean_requests = 0;
  double bytes_read = 0;  ///< of the second arm, summed
  double bytes_flat = 0;
  double bytes_unique = 0;
  double times_limit = 0;    ///< geometric mean over steps, second arm
  double speedup = 0;        ///< geometric mean over steps of the first arm's median / the second's
  double total_speedup = 0;  ///< sum of medians, first arm / second
  Interval pair_ratio;       ///< second arm / first, all pairs of all steps whose plans differ
  int dropped = 0;
  /// Never slower: no evidence beyond 2 per cent in the pooled pairs.
  [[nodiscard]] bool passed() const { return identical_plans == steps || pair_ratio.low <= 1.02; }
};

/// Measures all steps; `config.policies` are two arms. `on_cell` sees each result; `progress` the fraction of all.
[[nodiscard]] ReplaySummary replay(Harness& harness, const std::string& name, const std::vector<ReplayStep>& steps,
                                   const BenchConfig& config, const std::function<void(const CellResult&)>& on_cell,
                                   const std::function<void(double)>& progress);

}  // namespace headwater::bench
