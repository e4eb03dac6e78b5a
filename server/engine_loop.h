// The one thread that owns an engine. Others leave submits, cancels and questions in its inbox; it steps while there is
// work, empties the inbox before every step (so a cancel takes effect within one) and hands each step's events to a
// callback, all of them at once. The callback must not block: what is slow (a client) waits elsewhere.
//
// The engine is also made on this thread: OpenMP keeps a set of workers for every thread that uses it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/engine.h"
#include "headwater/error.h"
#include "server/timed_thread.h"

namespace headwater::server {

/// Names a request from submit to its last event; chosen by the caller, never reused.
using Ticket = std::uint64_t;

/// An event of a request. `refused`: submit threw; the event then has finish = error and is the only one.
struct Delivery {
  Ticket ticket = 0;
  engine::Event event;
  std::optional<ErrorCode> refused;
};

struct EngineLoopOptions {
  /// Requests accepted and not yet finished; further ones are turned away.
  std::size_t max_pending = 1024;
};

/// All are called on the loop's thread and must neither block nor throw.
struct EngineLoopHooks {
  std::function<void()> on_ready;                             ///< the engine has been made
  std::function<void(std::exception_ptr)> on_failed;          ///< it could not be made, or is of no use any more; the
                                                              ///< thread ends, requests are dropped without events
  std::function<void(std::vector<Delivery>)> on_events;       ///< of one step, never empty
  std::function<void(const engine::Engine&)> on_step;         ///< after every step, before its events
  std::function<void(const engine::Engine&)> on_idle;         ///< the last work has ended
  std::function<void(const std::string&)> on_internal_error;  ///< a step threw; all requests have been ended
};

class EngineLoop {
 public:
  using Factory = std::function<std::unique_ptr<engine::Engine>()>;

  EngineLoop(Factory factory, EngineLoopHooks hooks, EngineLoopOptions options = {});
  /// As stop().
  ~EngineLoop();
  EngineLoop(const EngineLoop&) = delete;
  EngineLoop& operator=(const EngineLoop&) = delete;

  enum class Submitted : std::uint8_t { accepted, full, stopping };
  /// Leaves a request. Its events, and none after the one that ends its last sample, carry the ticket.
  [[nodiscard]] Submitted submit(Ticket ticket, engine::Request request);
  /// Ends a request before the next step; no event of it is handed out after that. Unknown tickets are ignored.
  void cancel(Ticket ticket);
  /// Runs `question` on the loop's thread between two steps. False: stopping; it will not run.
  [[nodiscard]] bool inspect(std::function<void(const engine::Engine&)> question);
  /// Ends the thread after the step under way; requests are dropped without events. May be called repeatedly.
  void stop();
  /// The same, but waits no longer than `limit`. False: the thread still runs; the destructor waits for it.
  [[nodiscard]] bool stop_within(std::chrono::milliseconds limit);

  [[nodiscard]] std::size_t max_pending() const noexcept { return options_.max_pending; }
  [[nodiscard]] bool ready() const noexcept { return ready_.load(std::memory_order_acquire); }
  /// Requests accepted and not yet finished.
  [[nodiscard]] std::size_t num_pending() const noexcept { return num_pending_.load(std::memory_order_relaxed); }

 private:
  struct Submission {
    Ticket ticket;
    engine::Request request;
  };
  struct Inbox {
    std::vector<Submission> submissions;
    std::vector<Ticket> cancels;
    std::vector<std::function<void(const engine::Engine&)>> questions;
    [[nodiscard]] bool empty() const noexcept { return submissions.empty() && cancels.empty() && questions.empty(); }
  };
  struct Live {
    Ticket ticket;
    int samples_left;
  };

  void run(const Factory& factory);
  void serve(engine::Engine& engine);
  void take_in(engine::Engine& engine, Inbox& inbox, std::vector<Delivery>& out);
  void step(engine::Engine& engine, std::vector<Delivery>& out);
  void forget(Ticket ticket);
  void ask_to_stop();
  void fail();

  EngineLoopHooks hooks_;
  EngineLoopOptions options_;

  std::mutex mutex_;
  std::condition_variable wake_;
  Inbox inbox_;            // guarded by mutex_
  bool stopping_ = false;  // guarded by mutex_
  std::atomic<bool> ready_{false};
  std::atomic<std::size_t> num_pending_{0};

  // The thread's own.
  std::unordered_map<engine::RequestId, Live> live_;
  std::unordered_map<Ticket, engine::RequestId> requests_;

  TimedThread thread_;  // last: it uses all of the above
};

}  // namespace headwater::server
