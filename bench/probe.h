// What the machine can do right now: read rate from memory, arithmetic peak, and whether two threads run on one core's
// speed.
//
// Virtual machines lend and take away bandwidth and cores by the second, so the rate is probed around every sample and
// the limit of a sample is computed from it. Peaks are measured once, as the best of several short runs.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/paged.h"
#include "headwater/executor.h"
#include "headwater/types.h"

namespace headwater::bench {

/// Seconds since some fixed moment.
[[nodiscard]] double now() noexcept;

/// Arithmetic peaks, GFLOP/s with all workers together.
struct Peaks {
  double fma32 = 0;  ///< fp32 multiply-add at the chosen instruction set
  double dot16 = 0;  ///< bf16 dot products; equals fma32 where the set has none
};

class MachineProbe {
 public:
  /// Measures the peaks: about a tenth of a second. `isa` must be one that the processor has.
  MachineProbe(Executor& executor, Isa isa);

  [[nodiscard]] const Peaks& peaks() const noexcept { return peaks_; }
  /// The peak that a cell is measured against: bf16 operands use dot products where the set has them.
  [[nodiscard]] double peak_gflops(DType q_dtype, DType kv_dtype) const noexcept;

  struct Sample {
    double read_gbs = 0;     ///< read rate of cold memory, all workers
    bool throttled = false;  ///< the workers together had less than 1 / 1.4 of their arithmetic at the start
  };
  /// About 0.4 ms: reads a fresh part of a buffer far larger than the caches, and runs a short arithmetic loop.
  [[nodiscard]] Sample sample();
  /// Read rate of `bytes` that stay in the last-level cache.
  [[nodiscard]] double cached_read_gbs(std::size_t bytes);
  /// Median of several cold samples, GB/s.
  [[nodiscard]] double memory_gbs();

 private:
  using Reader = std::uint64_t (*)(const std::byte* data, std::size_t bytes) noexcept;

  const std::byte* next_cold() noexcept;
  double timed_read(Reader reader, const std::byte* data, std::size_t bytes);
  double timed_arithmetic(std::int64_t rounds);

  Executor& executor_;
  Isa isa_;
  Buffer cold_;
  std::size_t cold_at_ = 0;
  Reader read_ = nullptr;  ///< the fastest way of reading here
  Peaks peaks_;
  std::int64_t short_rounds_ = 0;
  double short_seconds_ = 0;  ///< of short_rounds_ on one worker at full speed
};

}  // namespace headwater::bench
