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

/// One policy ("this arm") against the first one of a replay.
struct ReplaySummary {
  std::string name;
  Policy policy = Policy::automatic;
  int steps = 0;
  int identical_plans = 0;  ///< steps whose plan is the first arm's byte for byte
  double mean_requests = 0;
  double bytes_read = 0;  ///< of this arm, summed
  double bytes_flat = 0;
  double bytes_unique = 0;
  double times_limit = 0;        ///< geometric mean over steps
  double worst_times_limit = 0;  ///< of any step
  double speedup = 0;            ///< geometric mean over steps of the first arm's median / this one's
  double total_speedup = 0;      ///< sum of medians, first arm / this one
  Interval pair_ratio;           ///< this arm / first, all pairs of all steps whose plans differ
  int pairs = 0;                 ///< how many those are
  int dropped = 0;
  int throttled_kept = 0;
  /// Never slower: no evidence beyond 2 per cent in the pooled pairs.
  [[nodiscard]] Verdict verdict() const {
    if (steps > 0 && identical_plans == steps) return Verdict::passed;
    return verdict_of_pairs(static_cast<std::size_t>(pairs), pair_ratio.low <= 1.02);
  }
};

/// Measures all steps by all of `config.policies`, each step often enough that kMinPairs pairs come together; one
/// summary for each policy but the first. `on_cell` sees each result; `progress` the fraction of all.
[[nodiscard]] std::vector<ReplaySummary> replay(Harness& harness, const std::string& name,
                                                const std::vector<ReplayStep>& steps, BenchConfig config,
                                                const std::function<void(const CellResult&)>& on_cell,
                                                const std::function<void(double)>& progress);

}  // namespace headwater::bench
