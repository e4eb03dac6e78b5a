// A small pool of workers for short parallel regions.
//
// One region is one step of `epoch`: the caller stores the task, advances epoch and takes part as worker 0; each worker
// runs its share and counts `running` down; the caller waits for zero. Both sides spin for a while (a region costs
// about a microsecond then) and sleep afterwards; waking costs tens of microseconds. Where there are more workers than
// processors, spinning would hold up the very thread that is waited for, so nobody spins.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "headwater/error.h"
#include "headwater/executor.h"

namespace headwater {
namespace {

constexpr std::chrono::microseconds kSpin{500};
constexpr int kMaxWorkers = 4096;

int num_processors() noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
  const unsigned n = std::thread::hardware_concurrency();
  return n == 0 ? 1 : static_cast<int>(n);
}

void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Waits until value differs from `old`; returns what it became.
std::uint32_t wait_change(const std::atomic<std::uint32_t>& value, std::uint32_t old, bool spin) noexcept {
  std::uint32_t now = value.load(std::memory_order_acquire);
  if (spin && now == old) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 64 && now == old; ++i) {
        pause();
        now = value.load(std::memory_order_acquire);
      }
    } while (now == old && std::chrono::steady_clock::now() < end);
  }
  while (now == old) {
    value.wait(old, std::memory_order_acquire);
    now = value.load(std::memory_order_acquire);
  }
  return now;
}

}  // namespace

struct ThreadPool::Impl {
  using Task = void (*)(void* context, int worker) noexcept;

  alignas(64) std::atomic<std::uint32_t> epoch{0};
  Task task = nullptr;
  void* context = nullptr;
  bool stop = false;
  alignas(64) std::atomic<std::uint32_t> running{0};
  alignas(64) std::atomic<bool> busy{false};
  bool spin = true;
  std::vector<std::thread> threads;

  void work(int worker) noexcept {
    std::uint32_t seen = 0;
    for (;;) {
      seen = wait_change(epoch, seen, spin);
      if (stop) return;
      task(context, worker);
      if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) running.notify_one();
    }
  }

  void advance() noexcept {
    epoch.fetch_add(1, std::memory_order_release);
    epoch.notify_all();
  }

  void join() noexcept {
    stop = true;
    advance();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }
};

ThreadPool::ThreadPool(int num_workers) : impl_(std::make_unique<Impl>()) {
  if (num_workers < 0 || num_workers > kMaxWorkers) {
    throw Error(ErrorCode::invalid_argument, "num_workers = " + std::to_string(num_workers) + ", expected 0 to " +
                                                 std::to_string(kMaxWorkers) + " (0: one per processor)");
  }
  const int processors = num_processors();
  if (num_workers == 0) num_workers = processors;
  impl_->spin = num_workers <= processors;
  try {
    impl_->threads.reserve(static_cast<std::size_t>(num_workers - 1));
    for (int worker = 1; worker < num_workers; ++worker) {
      impl_->threads.emplace_back([impl = impl_.get(), worker] { impl->work(worker); });
    }
  } catch (...) {
    impl_->join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  impl_->join();
}

int ThreadPool::num_workers() const noexcept {
  return static_cast<int>(impl_->threads.size()) + 1;
}

void ThreadPool::parallel(void (*task)(void* context, int worker) noexcept, void* context) {
  Impl& impl = *impl_;
  const int workers = num_workers();
  // A call from inside a task (or from a second thread) finds the workers taken and does everything itself.
  if (workers == 1 || impl.busy.exchange(true, std::memory_order_acquire)) {
    for (int worker = 0; worker < workers; ++worker) task(context, worker);
    return;
  }
  impl.task = task;
  impl.context = context;
  impl.running.store(static_cast<std::uint32_t>(workers - 1), std::memory_order_relaxed);
  impl.advance();
  task(context, 0);
  for (std::uint32_t running = impl.running.load(std::memory_order_acquire); running != 0;) {
    running = wait_change(impl.running, running, impl.spin);
  }
  impl.busy.store(false, std::memory_order_release);
}

}  // namespace headwater
