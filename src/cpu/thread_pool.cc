// A small pool of workers for short parallel regions.
//
// A region has a ticket counter: each thread that is awake takes the next worker index and runs the task for it, the
// caller too. So a region never waits for a thread that has not started yet - one that sleeps, or that the system runs
// elsewhere -, only for shares that are being worked on. The ticket carries the number of its region; a late thread
// cannot take a ticket of another one. Idle threads spin for a while and sleep afterwards: a region costs below a
// microsecond while they spin, and waking takes tens. Where there are more threads than processors, spinning would hold
// up the very thread that is waited for, so nobody spins.
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

  // Written by the caller between regions; read by whoever holds a ticket of the region.
  Task task = nullptr;
  void* context = nullptr;
  int num_workers = 1;
  bool spin = true;

  alignas(64) std::atomic<std::uint32_t> epoch{0};    ///< number of the region; changes wake the threads
  alignas(64) std::atomic<std::uint64_t> ticket{0};   ///< region << 32 | next worker index
  alignas(64) std::atomic<std::uint32_t> running{0};  ///< worker indices of the region not done yet
  alignas(64) std::atomic<bool> busy{false};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;

  /// Runs the task for worker indices that nobody has taken, until there are none.
  void take_tickets() noexcept {
    std::uint64_t now = ticket.load(std::memory_order_acquire);
    for (;;) {
      const auto worker = static_cast<std::uint32_t>(now);
      if (worker >= static_cast<std::uint32_t>(num_workers)) return;
      if (!ticket.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      task(context, static_cast<int>(worker));
      if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) running.notify_one();
      now = ticket.load(std::memory_order_acquire);
    }
  }

  void work() noexcept {
    std::uint32_t seen = 0;
    for (;;) {
      seen = wait_change(epoch, seen, spin);
      if (stop.load(std::memory_order_acquire)) return;
      take_tickets();
    }
  }

  void run(Task new_task, void* new_context) noexcept {
    task = new_task;
    context = new_context;
    running.store(static_cast<std::uint32_t>(num_workers), std::memory_order_relaxed);
    const std::uint32_t region = epoch.load(std::memory_order_relaxed) + 1;
    ticket.store(std::uint64_t{region} << 32, std::memory_order_release);
    epoch.store(region, std::memory_order_release);
    epoch.notify_all();
    take_tickets();
    for (std::uint32_t left = running.load(std::memory_order_acquire); left != 0;) {
      left = wait_change(running, left, spin);
    }
  }

  void join() noexcept {
    stop.store(true, std::memory_order_release);
    epoch.fetch_add(1, std::memory_order_release);
    epoch.notify_all();
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
  impl_->num_workers = num_workers;
  impl_->spin = num_workers <= processors;
  // Every index taken: a thread that starts before the first region finds nothing to do.
  impl_->ticket.store(static_cast<std::uint32_t>(num_workers), std::memory_order_relaxed);
  try {
    impl_->threads.reserve(static_cast<std::size_t>(num_workers - 1));
    for (int worker = 1; worker < num_workers; ++worker) {
      impl_->threads.emplace_back([impl = impl_.get()] { impl->work(); });
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
  return impl_->num_workers;
}

void ThreadPool::parallel(void (*task)(void* context, int worker) noexcept, void* context) {
  // A call from inside a task (or from a second thread) finds the workers taken and does everything itself.
  if (impl_->num_workers == 1 || impl_->busy.exchange(true, std::memory_order_acquire)) {
    for (int worker = 0; worker < impl_->num_workers; ++worker) task(context, worker);
    return;
  }
  impl_->run(task, context);
  impl_->busy.store(false, std::memory_order_release);
}

}  // namespace headwater
