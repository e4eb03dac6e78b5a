// Where attention runs, as the harness sees it: memory for KV, one policy's call, what the machine can do. The CPU
// (cpu_processor.h) and a CUDA device (cuda_processor.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "bench/paged.h"
#include "headwater/headwater.h"

namespace headwater::bench {

/// Copies of one KV cache, used in turn so that what a call reads is not in a cache from the call before.
class KvMemory {
 public:
  virtual ~KvMemory() = default;
  /// The cache is larger than memory and is mapped again and again.
  [[nodiscard]] virtual bool aliased() const noexcept = 0;
};

/// What a checked call read and wrote, in host memory; valid until the next one of the same arm.
struct Checked {
  const KvCache* kv = nullptr;
  ConstRowsView q;
  RowsView out;
  LseView lse;
  std::span<const std::byte> out_bytes;
  std::span<const std::byte> lse_bytes;
  const float* alibi_slopes = nullptr;  ///< [Hq], with the option
  const float* sinks = nullptr;         ///< [Hq], with the option
};

/// One policy's attention call with everything it needs: plan, query, outputs, workspace.
class Arm {
 public:
  virtual ~Arm() = default;
  [[nodiscard]] virtual Plan& plan() noexcept = 0;
  /// One call on poisoned outputs and the first copy of KV, which is one and the same for all arms. Throws
  /// Error(internal) when what was done is not what was planned; so does run.
  virtual Checked check() = 0;
  /// Seconds of one call on cold KV.
  virtual double run() = 0;
  /// Seconds of one call on KV that is still in the device's cache; 0: not measured here.
  virtual double run_warm() { return 0; }
  /// Brings a changed plan to where it is run from; seconds until it is there.
  virtual double upload() { return 0; }
};

class Processor {
 public:
  virtual ~Processor() = default;

  [[nodiscard]] virtual std::string_view device() const noexcept = 0;  ///< "cpu", "cuda"
  [[nodiscard]] virtual std::string isa() const = 0;                   ///< "avx2", "sm_90"
  [[nodiscard]] virtual int num_workers() const noexcept = 0;          ///< threads, multiprocessors
  /// PlanOptions::num_workers for plans that are to run here.
  [[nodiscard]] virtual int plan_workers() const noexcept = 0;
  /// The cost model of a cell, where `configured` is what the configuration has.
  [[nodiscard]] virtual DeviceModel model_for(const AttentionShape& shape, const DeviceModel& configured) const = 0;
  /// One line: the machine, its rates and its peaks.
  [[nodiscard]] virtual std::string describe() = 0;

  [[nodiscard]] virtual std::unique_ptr<KvMemory> make_kv(const AttentionShape& shape, std::int64_t num_pages,
                                                          int page_size, Layout layout, bool mla,
                                                          std::size_t cold_bytes) = 0;
  /// `kv` must be this processor's, and live as long as the arm.
  [[nodiscard]] virtual std::unique_ptr<Arm> make_arm(Planner& planner, const AttentionShape& shape,
                                                      const PagedForest& paged, const PlanOptions& options,
                                                      KvMemory& kv) = 0;

  struct Sample {
    double read_gbs = 0;     ///< read rate of cold memory, all workers
    bool throttled = false;  ///< the processor was not at its full speed
  };
  [[nodiscard]] virtual Sample sample() = 0;
  [[nodiscard]] virtual double peak_gflops(DType q_dtype, DType kv_dtype) const noexcept = 0;
};

}  // namespace headwater::bench
