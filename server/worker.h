// A thread that runs tasks in order: what takes too long for the thread that serves the connections (parsing and
// tokenising a document). The queue is bounded by the bytes that its tasks hold: clients that send and leave do not
// wait for theirs, so the number of connections is no bound.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>

#include "server/timed_thread.h"

namespace headwater::server {

class Worker {
 public:
  Worker() : thread_([this] { run(); }) {}
  /// Waits for the task under way.
  ~Worker() { stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Tasks that have not begun are dropped.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
  }
  /// After stop().
  [[nodiscard]] bool ends_within(std::chrono::milliseconds limit) const { return thread_.ends_within(limit); }

  /// Bytes that waiting tasks may hold; one task alone may hold more.
  static constexpr std::size_t kMostBytes = std::size_t{64} << 20;

  /// `bytes`: that the task holds. It must not throw. False: the queue is full or stopped, the task was not taken.
  [[nodiscard]] bool post(std::function<void()> task, std::size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      bytes += kTaskBytes;
      if (stopping_ || (!tasks_.empty() && bytes_ + bytes > kMostBytes)) return false;
      bytes_ += bytes;
      tasks_.push_back({std::move(task), bytes});
    }
    wake_.notify_one();
    return true;
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
        if (stopping_) return;
        task = std::move(tasks_.front().run);
        bytes_ -= tasks_.front().bytes;
        tasks_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  struct Task {
    std::function<void()> run;
    std::size_t bytes;
  };
  static constexpr std::size_t kTaskBytes = 1'024;  ///< about what a task takes beside its body

  std::deque<Task> tasks_;
  std::size_t bytes_ = 0;  ///< of all in tasks_
  bool stopping_ = false;
  TimedThread thread_;
};

}  // namespace headwater::server
