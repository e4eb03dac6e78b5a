// See engine_loop.h.
#include "server/engine_loop.h"

#include <utility>

namespace headwater::server {

EngineLoop::EngineLoop(Factory factory, EngineLoopHooks hooks, EngineLoopOptions options)
    : hooks_(std::move(hooks)), options_(options), thread_([this, factory = std::move(factory)] { run(factory); }) {}

EngineLoop::~EngineLoop() {
  stop();
}

EngineLoop::Submitted EngineLoop::submit(Ticket ticket, engine::Request request) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return Submitted::stopping;
    if (num_pending_.load(std::memory_order_relaxed) >= options_.max_pending) return Submitted::full;
    inbox_.submissions.push_back({ticket, std::move(request)});
    num_pending_.fetch_add(1, std::memory_order_relaxed);
  }
  wake_.notify_one();
  return Submitted::accepted;
}

void EngineLoop::cancel(Ticket ticket) {
  {
    const std::lock_guard lock(mutex_);
    inbox_.cancels.push_back(ticket);
  }
  wake_.notify_one();
}

bool EngineLoop::inspect(std::function<void(const engine::Engine&)> question) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return false;
    inbox_.questions.push_back(std::move(question));
  }
  wake_.notify_one();
  return true;
}

void EngineLoop::ask_to_stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
}

void EngineLoop::stop() {
  ask_to_stop();
  thread_.join();
}

bool EngineLoop::stop_within(std::chrono::milliseconds limit) {
  ask_to_stop();
  return thread_.ends_within(limit);
}

/// Within a handler: tells of what it has caught, which nothing on this thread survives.
void EngineLoop::fail() {
  ask_to_stop();
  if (hooks_.on_failed) hooks_.on_failed(std::current_exception());
}

void EngineLoop::run(const Factory& factory) {
  std::unique_ptr<engine::Engine> engine;
  try {
    engine = factory();
  } catch (...) {
    return fail();
  }
  ready_.store(true, std::memory_order_release);
  if (hooks_.on_ready) hooks_.on_ready();
  try {
    serve(*engine);
  } catch (...) {  // a failed step whose requests could not be cancelled, for instance: the engine cannot be trusted
    fail();
  }
  ready_.store(false, std::memory_order_release);
}

void EngineLoop::serve(engine::Engine& engine) {
  Inbox inbox;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || !inbox_.empty() || engine.has_work(); });
      if (stopping_) return;
      std::swap(inbox, inbox_);
    }
    std::vector<Delivery> out;
    take_in(engine, inbox, out);
    const bool worked = engine.has_work();
    if (worked) step(engine, out);
    if (worked && !engine.has_work() && hooks_.on_idle) hooks_.on_idle(engine);
    if (!out.empty() && hooks_.on_events) hooks_.on_events(std::move(out));
    for (const auto& question : inbox.questions) question(engine);
    inbox.submissions.clear();
    inbox.cancels.clear();
    inbox.questions.clear();
  }
}

void EngineLoop::take_in(engine::Engine& engine, Inbox& inbox, std::vector<Delivery>& out) {
  for (Submission& submission : inbox.submissions) {
    const int samples = submission.request.num_samples;
    try {
      const engine::RequestId id = engine.submit(std::move(submission.request));
      live_.emplace(id, Live{submission.ticket, samples});
      requests_.emplace(submission.ticket, id);
    } catch (const std::exception& error) {
      Delivery refusal;
      refusal.ticket = submission.ticket;
      refusal.event.finish = engine::FinishReason::error;
      refusal.event.error = error.what();
      const auto* known = dynamic_cast<const Error*>(&error);
      refusal.refused = known != nullptr ? known->code() : ErrorCode::internal;
      out.push_back(std::move(refusal));
      num_pending_.fetch_sub(1, std::memory_order_relaxed);
    }
  }
  // After the submits: a ticket may have been given up while its request still lay in the inbox.
  for (const Ticket ticket : inbox.cancels) {
    const auto request = requests_.find(ticket);
    if (request == requests_.end()) continue;
    engine.cancel(request->second);
    forget(ticket);
  }
}

void EngineLoop::step(engine::Engine& engine, std::vector<Delivery>& out) {
  try {
    std::vector<engine::Event> events = engine.step();
    if (hooks_.on_step) hooks_.on_step(engine);
    for (engine::Event& event : events) {
      const auto live = live_.find(event.request);
      if (live == live_.end()) continue;  // cancelled
      const Ticket ticket = live->second.ticket;
      const bool last = event.finish && --live->second.samples_left == 0;
      out.push_back({ticket, std::move(event), std::nullopt});
      if (last) forget(ticket);
    }
  } catch (const std::exception& error) {
    engine.cancel_all();
    while (!requests_.empty()) {
      Delivery failure;
      failure.ticket = requests_.begin()->first;
      failure.event.finish = engine::FinishReason::error;
      failure.event.error = error.what();
      failure.refused = ErrorCode::internal;
      out.push_back(std::move(failure));
      forget(requests_.begin()->first);
    }
    if (hooks_.on_internal_error) hooks_.on_internal_error(error.what());
  }
}

void EngineLoop::forget(Ticket ticket) {
  const auto request = requests_.find(ticket);
  live_.erase(request->second);
  requests_.erase(request);
  num_pending_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace headwater::server
