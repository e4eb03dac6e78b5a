// The layer benchmark: one attention call of one step, by several policies, in interleaved pairs.
//
// Every cell proves what it measured: the path and the bytes that run() reports must be the plan's, and sampled rows
// must agree with double precision. KV is cold (copies in turn), the read rate is probed around every sample, samples
// during which the workers shared one core are dropped and counted (and, once too many were dropped, kept and counted).
// A cell's limit is max(distinct bytes / read rate, products / peak).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/paged.h"
#include "bench/processor.h"
#include "bench/stats.h"
#include "bench/workloads.h"
#include "headwater/headwater.h"

namespace headwater::bench {

struct BenchConfig {
  AttentionShape shape;
  bool mla = false;  ///< V is a view of K
  Layout layout = Layout::hnd;
  int page_size = 16;
  std::vector<Policy> policies = {Policy::flat, Policy::automatic};  ///< arms; ratios are against the first
  PlanOptions plan;        ///< of every arm, but for policy, batch_invariant and num_workers
  std::optional<Isa> isa;  ///< default: the best
  bool batch_invariant = false;
  int steps = 20;  ///< timed steps of each policy in a repetition
  int warmup = 3;
  int reps = 5;              ///< repetitions; median (min, max) are over their medians
  double cell_seconds = 20;  ///< a cell stops early after this, with at least six steps ...
  int min_samples = 0;       ///< ... and with at least these, also where steps x reps are fewer
  std::size_t cold_bytes = std::size_t{128} << 20;
  int error_rows = 4;  ///< rows compared with double precision; 0: none
  DeviceModel model = DeviceModel::default_cpu();
  std::uint64_t seed = 1;
};

struct ArmResult {
  Policy policy = Policy::flat;
  PlanStats stats;
  double median_us = 0;
  double min_us = 0;
  double max_us = 0;
  std::vector<double> rep_medians_us;
  std::vector<double> samples_us;  ///< sample i of every arm belongs to round i: pairs
  double plan_us = 0;              ///< from nothing
  double plan_warm_us = 0;         ///< update without changes given: the tables are compared
  double upload_us = 0;            ///< bringing the plan to the device; 0 on the CPU
  double warm_us = 0;              ///< median on KV that is still in the device's cache; 0 on the CPU: not measured
  double limit_us = 0;             ///< median over samples
  double bytes_limit_us = 0;       ///< what of it the distinct bytes alone take; the products take ...
  double flops_limit_us = 0;       ///< ... this
  double times_limit = 0;          ///< median of sample / its own limit
  Interval speedup;                ///< first arm's time / this arm's, pair by pair
  std::size_t same_plan_as = 0;    ///< the first arm whose plan equals this one's byte for byte; its own index if none
  [[nodiscard]] bool same_plan_as_first() const noexcept { return same_plan_as == 0; }
  double max_rel_error = 0;
  double max_lse_error = 0;
  bool bits_equal_first = false;  ///< output and LSE have the first arm's bits
};

struct CellResult {
  std::string workload;
  AttentionShape shape;
  Layout layout = Layout::hnd;
  int page_size = 16;
  std::int64_t batch = 0;
  std::string device = "cpu";
  std::string isa;
  int threads = 1;  ///< multiprocessors of a CUDA device
  bool batch_invariant = false;
  bool kv_aliased = false;
  double read_gbs = 0;  ///< median of the probes around the samples
  double peak_gflops = 0;
  int samples = 0;         ///< kept, per policy
  int dropped = 0;         ///< samples at less than full speed that were thrown away
  int throttled_kept = 0;  ///< such samples among those kept: times and limits are then not those of the machine
  std::vector<ArmResult> arms;
};

/// Flat attention against planning and flat attention, where nothing is shared.
struct OverheadResult {
  std::string workload;
  std::int64_t batch = 0;
  int pairs = 0;
  double flat_us = 0;
  double plan_warm_us = 0;
  double plan_cold_us = 0;
  Interval ratio;          ///< (plan + run) / run, pair by pair
  bool same_plan = false;  ///< the plan with detection is flat's, byte for byte
  [[nodiscard]] Verdict verdict() const {
    return same_plan ? verdict_of_pairs(static_cast<std::size_t>(pairs), ratio.low <= 1.01) : Verdict::missed;
  }
};

class Harness {
 public:
  /// `progress`, if given, is told the fraction of the current cell.
  explicit Harness(std::unique_ptr<Processor> processor, std::function<void(double)> progress = {});

  /// Measures one workload. Throws Error(internal) when a proof fails: path, bytes or tolerance.
  [[nodiscard]] CellResult run(const Workload& workload, const BenchConfig& config);
  /// The same on given page tables and KV: replays use one KV memory for many steps.
  [[nodiscard]] CellResult measure(const std::string& name, const PagedForest& paged, KvMemory& kv,
                                   const BenchConfig& config);
  /// KV for `measure`.
  [[nodiscard]] std::unique_ptr<KvMemory> make_kv(std::int64_t num_pages, const BenchConfig& config);
  /// The overhead gate for requests of the same lengths that share nothing.
  [[nodiscard]] OverheadResult overhead(const Workload& workload, const BenchConfig& config);
  [[nodiscard]] Processor& processor() noexcept { return *processor_; }

 private:
  using Arms = std::vector<std::unique_ptr<Arm>>;
  [[nodiscard]] PlanOptions options_for(const BenchConfig& config, Policy policy) const;
  void take_samples(Arms& arms, const BenchConfig& config, CellResult& cell);

  std::unique_ptr<Processor> processor_;
  std::function<void(double)> progress_;
};

/// Pair by pair, numerator's time / denominator's, with the interval of the median.
[[nodiscard]] Interval pair_ratio(const std::vector<double>& numerator, const std::vector<double>& denominator);

/// A workload's own heads, head size and page size where it has them, else the configuration's.
[[nodiscard]] BenchConfig configured_for(const Workload& workload, BenchConfig config);

}  // namespace headwater::bench
