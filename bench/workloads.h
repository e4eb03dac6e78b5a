// Workloads by name: the kernel sets of published systems, two-level cells, beams, nothing shared, seeded random
// shapes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "bench/forest.h"

namespace headwater::bench {

struct BenchConfig;

struct Workload {
  std::string name;  ///< its own notation, or what it is
  Forest forest;
  int num_qo_heads = 0;  ///< 0: the caller's
  int num_kv_heads = 0;
  int head_dim = 0;
  int page_size = 0;
  bool shuffled = false;                        ///< requests in an order unrelated to the tree
  std::function<void(BenchConfig&)> configure;  ///< what else it changes: types, options; empty: nothing
};

/// batch requests that share `shared` tokens and have `own` tokens each.
[[nodiscard]] Forest two_level(std::int64_t shared, std::int64_t batch, std::int64_t own);
/// batch requests of `tokens` each that share nothing.
[[nodiscard]] Forest unshared(std::int64_t batch, std::int64_t tokens);
/// A random forest: 1..64 requests, up to four levels, node lengths from 1 to 2,048 tokens, log-uniform; some requests
/// with several query rows. The same seed gives the same forest everywhere.
[[nodiscard]] Forest random_forest(std::uint64_t seed);

/// A named set, or the notation of cli/formats.h (one workload). Names: fasttree, pat, chat, beam, losing, codec,
/// flashinfer, unshared, random:SEED or random:SEED:COUNT. Error(invalid_argument) lists the names.
[[nodiscard]] std::vector<Workload> find_workloads(std::string_view name);

/// One line for each name, for --help.
[[nodiscard]] std::string describe_workload_names();

}  // namespace headwater::bench
