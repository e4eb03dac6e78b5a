// A thread whose end can be waited for with a limit: what it runs (a step of a large model, a model file on a slow
// disk) may take longer than the one who ends it wants to wait.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <utility>

namespace headwater::server {

class TimedThread {
 public:
  /// `body` must not throw.
  explicit TimedThread(std::function<void()> body)
      : thread_([this, body = std::move(body)]() noexcept {
          body();
          ended_.set_value();
        }) {}
  ~TimedThread() { join(); }
  TimedThread(const TimedThread&) = delete;
  TimedThread& operator=(const TimedThread&) = delete;

  /// Whether the body has ended, or does within `limit`.
  [[nodiscard]] bool ends_within(std::chrono::milliseconds limit) const {
    return end_.wait_for(limit) == std::future_status::ready;
  }
  void join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::promise<void> ended_;
  std::future<void> end_ = ended_.get_future();
  std::thread thread_;  // last: it uses the others
};

}  // namespace headwater::server
