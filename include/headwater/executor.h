// Where the CPU back end's work runs. The caller owns the workers: one process should have one set of them.
#pragma once

#include <memory>

namespace headwater {

class Executor {
 public:
  virtual ~Executor() = default;
  /// Number of workers, >= 1.
  [[nodiscard]] virtual int num_workers() const noexcept = 0;
  /// Calls task(context, w) once for every w in [0, num_workers()), possibly at the same time and possibly one after
  /// the other on one thread, and returns when all have returned. Everything written before the call is visible to the
  /// tasks, and everything they write to the caller afterwards. Tasks do not throw and do not wait for each other.
  virtual void parallel(void (*task)(void* context, int worker) noexcept, void* context) = 0;
};

/// Runs everything on the calling thread.
class SerialExecutor final : public Executor {
 public:
  [[nodiscard]] int num_workers() const noexcept override { return 1; }
  void parallel(void (*task)(void* context, int worker) noexcept, void* context) override { task(context, 0); }
};

/// A small pool of num_workers - 1 threads and the caller. Idle threads spin for about half a millisecond, then sleep;
/// what a sleeping thread is too late for, the others do. A call from inside a task, or while another thread is in
/// parallel(), runs on its caller alone.
class ThreadPool final : public Executor {
 public:
  /// num_workers = 0: as many as the calling thread's affinity mask has processors.
  explicit ThreadPool(int num_workers = 0);
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int num_workers() const noexcept override;
  void parallel(void (*task)(void* context, int worker) noexcept, void* context) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace headwater
