// What tests of runs on streams share: streams that can be held up, and a small forest with its plans by two policies.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "cuda/fault_fixture.h"

namespace headwater::cuda_test {

/// A stream that runs beside all others.
struct OwnStream {
  OwnStream() { ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~OwnStream() { cudaStreamDestroy(stream); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  cudaStream_t stream = nullptr;
};

/// Holds up a stream until it is opened.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) { ok(cudaLaunchHostFunc(stream, wait, this)); }
  ~Gate() {
    open();
    cudaDeviceSynchronize();
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void open() { open_ = true; }
  [[nodiscard]] bool is_open() const { return open_; }

 private:
  static void CUDART_CB wait(void* self) {
    while (!static_cast<Gate*>(self)->open_) std::this_thread::yield();
  }
  std::atomic<bool> open_ = false;
};

/// A forest and its plans by two policies.
struct Plans {
  explicit Plans(std::uint64_t seed = 52'000) : call(kSmallF16, {}, property::small_forest(16), {}, seed) {
    PlanOptions options;
    options.policy = Policy::flat;
    flat = planner.plan(kSmallF16, call.batch(), options);
    options.policy = Policy::forest;
    forest = planner.plan(kSmallF16, call.batch(), options);
    EXPECT_EQ(forest.stats().path, Path::cascade);
  }
  [[nodiscard]] std::int64_t num_rows() const { return static_cast<std::int64_t>(flat.data().rows.size()); }
  [[nodiscard]] cuda::Capacity both() const {
    const cuda::Capacity a = cuda::Capacity::of(flat);
    const cuda::Capacity b = cuda::Capacity::of(forest);
    return {std::max(a.max_rows, b.max_rows), std::max(a.max_page_ids, b.max_page_ids),
            std::max(a.max_items, b.max_items), std::max(a.max_partials, b.max_partials)};
  }

  Planner planner = eager_planner();
  reference::Call call;
  Plan flat;
  Plan forest;
};

inline cpu::RunOutcome outcome_of(const Plan& plan) {
  const PlanStats& stats = plan.stats();
  return {stats.path, Isa::scalar, stats.num_items, stats.kv_bytes_read, 0};
}

}  // namespace headwater::cuda_test
