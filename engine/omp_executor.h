// The engine's workers. Debian's oneDNN runs its products in OpenMP regions whose idle workers spin; a second pool
// beside them would fight for the same cores (milliseconds a switch on two cores). So attention and the small
// operations run in OpenMP regions too: one set of workers in the process. OpenMP is used nowhere but in the engine.
// With the build option HEADWATER_SERIAL_PRODUCTS products run on the calling thread and the rest on
// headwater::ThreadPool, which ThreadSanitizer can see into (it cannot see into libgomp).
// libgomp reads how long idle workers spin when the process starts, so only the environment can change it. Its default,
// milliseconds, wastes the cores that other processes want: with one of them busy on two cores a decode step took 3x as
// long as with GOMP_SPINCOUNT=1000 (`engine_bench decode`), which costs nothing measurable on a quiet machine.
#pragma once

#include <memory>

#include "headwater/executor.h"

namespace headwater::engine {

class OmpExecutor final : public Executor {
 public:
  explicit OmpExecutor(int num_workers) noexcept : num_workers_(num_workers) {}
  [[nodiscard]] int num_workers() const noexcept override { return num_workers_; }
  void parallel(void (*task)(void* context, int worker) noexcept, void* context) override;

 private:
  int num_workers_;
};

/// Processors in the process's affinity mask at its start (OMP_PROC_BIND narrows the calling thread's own later).
[[nodiscard]] int available_processors() noexcept;

/// OmpExecutor, or ThreadPool in a HEADWATER_SERIAL_PRODUCTS build. num_workers = 0: available_processors().
[[nodiscard]] std::unique_ptr<Executor> make_executor(int num_workers);

/// While it lives, oneDNN creates and runs products with this many threads (one in a HEADWATER_SERIAL_PRODUCTS build),
/// on the calling thread. The former number is restored afterwards.
class ProductThreads {
 public:
  explicit ProductThreads(int num_threads) noexcept;
  ~ProductThreads();
  ProductThreads(const ProductThreads&) = delete;
  ProductThreads& operator=(const ProductThreads&) = delete;

 private:
  int before_;
};

/// Calls fn(begin, end) for parts of [0, count), one per worker; serially below `serial_below`.
template <class Fn>
void for_ranges(Executor& executor, int count, int serial_below, const Fn& fn) {
  const int workers = executor.num_workers();
  if (workers == 1 || count < serial_below) {
    if (count > 0) fn(0, count);
    return;
  }
  struct Context {
    const Fn* fn;
    int count;
    int workers;
  } context{&fn, count, workers};
  executor.parallel(
      [](void* opaque, int worker) noexcept {
        const auto& c = *static_cast<const Context*>(opaque);
        const auto border = [&](int w) { return static_cast<int>(static_cast<long long>(c.count) * w / c.workers); };
        if (border(worker) < border(worker + 1)) (*c.fn)(border(worker), border(worker + 1));
      },
      &context);
}

}  // namespace headwater::engine
