// Fixed lists of cells with the bounds that they are held to.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bench/harness.h"

namespace headwater::bench {

struct SuiteGroup {
  std::string name;
  std::string what;
  std::vector<Workload> workloads;
  BenchConfig config;
  std::optional<Isa> isa;     ///< forced for the group
  double mean_bound = 0;      ///< geometric mean of times_limit of the last arm; 0: no bound
  double cell_bound = 0;      ///< times_limit of any cell; 0: no bound
  double speedup_bound = 0;   ///< first arm / last arm, every cell; 0: no bound
  double feature_bound = 0;   ///< times_limit of any cell / the first one's: cells of equal limit; 0: no bound
  bool never_slower = false;  ///< auto against flat within 2 %, against the best policy within 5 %
};

/// Names: cells (hnd, nhd, fp32), isa (avx2, fp16, mla), cascade, policies, features; or one group's own name. `base`
/// gives steps, reps and the like. Error(invalid_argument) lists the names. With `cuda` without bounds on times_limit,
/// which are the CPU's, and without the groups that only a CPU can run (Error(unsupported) where none is left).
[[nodiscard]] std::vector<SuiteGroup> find_suite(std::string_view name, const BenchConfig& base, bool cuda = false);

}  // namespace headwater::bench
