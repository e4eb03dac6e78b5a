// One attention call on a CUDA device with everything it needs, timed by graph replay; and copies of KV in its memory.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "bench/processor.h"
#include "headwater/cuda.h"

struct CUevent_st;
struct CUgraphExec_st;

namespace headwater::bench {

/// Device memory; freed with its owner. Throws Error(device).
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t bytes);
  ~DeviceBytes();
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

/// A stream, and time on it by a pair of events.
class Clock {
 public:
  Clock();
  ~Clock();
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;
  [[nodiscard]] cuda::Stream stream() const noexcept { return stream_; }
  /// Device seconds of what `work` puts on the stream; waits for it.
  template <class Work>
  double seconds(const Work& work) {
    start();
    work();
    return stop();
  }

 private:
  void start();
  double stop();
  cuda::Stream stream_ = nullptr;
  CUevent_st* begin_ = nullptr;
  CUevent_st* end_ = nullptr;
};

/// Copies of one cache on the device, and the first of them on the host too.
class CudaKv final : public KvMemory {
 public:
  /// Copies that cover at least `cold_bytes`, as far as a graph of a few hundred calls and the device's memory go.
  CudaKv(const AttentionShape& shape, std::int64_t num_pages, int page_size, Layout layout, bool mla,
         std::size_t cold_bytes);
  [[nodiscard]] bool aliased() const noexcept override { return host_.aliased(); }
  [[nodiscard]] const KvCache& on_host() const noexcept { return host_.caches().front(); }
  [[nodiscard]] const std::vector<KvCache>& copies() const noexcept { return copies_; }

 private:
  ColdKv host_;
  std::unique_ptr<DeviceBytes> memory_;
  std::vector<KvCache> copies_;
};

class CudaArm final : public Arm {
 public:
  CudaArm(Planner& planner, const AttentionShape& shape, const PagedForest& paged, const PlanOptions& options,
          CudaKv& kv, Clock& clock);
  ~CudaArm() override;
  CudaArm(const CudaArm&) = delete;
  CudaArm& operator=(const CudaArm&) = delete;

  [[nodiscard]] Plan& plan() noexcept override { return plan_; }
  Checked check() override;
  double run() override { return replay(cold_); }
  double run_warm() override { return replay(warm_); }
  double upload() override;

 private:
  /// Calls that one replay makes.
  struct Graph {
    CUgraphExec_st* exec = nullptr;
    int calls = 0;
  };
  [[nodiscard]] Graph capture(std::size_t num_copies);
  double replay(const Graph& graph);
  [[nodiscard]] cuda::RunArgs args_for(const KvCache& kv) const;
  void check_stats() const;

  AttentionShape shape_;
  CudaKv& kv_;
  Clock& clock_;
  Plan plan_;
  cuda::DevicePlan device_;
  Buffer host_q_, host_out_, host_lse_;
  std::vector<float> host_slopes_, host_sinks_;  ///< empty without the options
  std::size_t out_bytes_, lse_bytes_;
  DeviceBytes q_, out_, lse_, workspace_, slopes_, sinks_;
  Graph cold_, warm_;
};

}  // namespace headwater::bench
