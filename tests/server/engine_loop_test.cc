// The thread that owns the engine: order, cancellation, refusals, shutdown.
#include "server/engine_loop.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <future>
#include <mutex>
#include <thread>

#include "engine/fixture.h"

namespace headwater::server {
namespace {

using test::random_tokens;
using test::request_of;
using test::shared_tiny_model;
using test::tiny_options;

/// Collects deliveries, and counts steps.
class Collector {
 public:
  EngineLoopHooks hooks() {
    EngineLoopHooks hooks;
    hooks.on_events = [this](std::vector<Delivery> deliveries) {
      const std::lock_guard lock(mutex_);
      for (Delivery& delivery : deliveries) all_.push_back(std::move(delivery));
      changed_.notify_all();
    };
    hooks.on_step = [this](const engine::Engine& engine) {
      if (at_step) at_step(engine);
    };
    return hooks;
  }
  std::vector<Delivery> wait_for_ends(std::size_t count) {
    std::unique_lock lock(mutex_);
    const auto ended = [&] {
      return static_cast<std::size_t>(
                 std::ranges::count_if(all_, [](const Delivery& d) { return d.event.finish.has_value(); })) >= count;
    };
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(30), ended));
    return all_;
  }
  std::function<void(const engine::Engine&)> at_step;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Delivery> all_;
};

std::unique_ptr<engine::Engine> tiny_engine() {
  return std::make_unique<engine::Engine>(shared_tiny_model(), tiny_options());
}

engine::Request request(std::uint64_t seed, int max_tokens) {
  return request_of(random_tokens(seed, 9, *shared_tiny_model()), max_tokens);
}

/// Asks until the answer is true; false after 30 s.
bool eventually(EngineLoop& loop, const std::function<bool(const engine::Engine&)>& question) {
  for (int i = 0; i < 6000; ++i) {
    auto promise = std::make_shared<std::promise<bool>>();
    auto future = promise->get_future();
    if (!loop.inspect([promise, question](const engine::Engine& engine) { promise->set_value(question(engine)); })) {
      return false;
    }
    if (future.get()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

TEST(EngineLoop, TokensAreThoseOfTheEngineAlone) {
  auto engine = tiny_engine();
  std::vector<engine::Request> requests;
  for (std::uint64_t seed = 1; seed <= 5; ++seed) requests.push_back(request(seed, 20));
  const auto expected = test::tokens_of(engine::run_to_completion(*engine, requests));

  Collector collector;
  EngineLoop loop(tiny_engine, collector.hooks());
  for (std::size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(loop.submit(100 + i, requests[i]), EngineLoop::Submitted::accepted);
  }
  std::vector<std::vector<std::int32_t>> tokens(requests.size());
  for (const Delivery& delivery : collector.wait_for_ends(requests.size())) {
    ASSERT_GE(delivery.ticket, 100U);
    tokens.at(delivery.ticket - 100).push_back(delivery.event.token);
  }
  EXPECT_EQ(tokens, expected);
  EXPECT_EQ(loop.num_pending(), 0U);
}

TEST(EngineLoop, ACancelTakesEffectWithinOneStep) {
  Collector collector;
  EngineLoop* loop_pointer = nullptr;
  std::atomic<std::int64_t> cancelled_after{0};
  std::atomic<std::int64_t> last_step_with_it{0};
  collector.at_step = [&](const engine::Engine& engine) {
    if (!engine.last_requests().empty()) last_step_with_it = engine.last_step().step;
    if (engine.stats().generated_tokens >= 5 && cancelled_after == 0) {
      cancelled_after = engine.last_step().step;
      loop_pointer->cancel(7);
    }
  };
  EngineLoop loop(tiny_engine, collector.hooks());
  loop_pointer = &loop;
  ASSERT_EQ(loop.submit(7, request(1, 900)), EngineLoop::Submitted::accepted);
  ASSERT_TRUE(
      eventually(loop, [](const engine::Engine& e) { return e.stats().generated_tokens > 0 && !e.has_work(); }));
  EXPECT_GT(cancelled_after.load(), 0);
  EXPECT_EQ(last_step_with_it.load(), cancelled_after.load());
  EXPECT_EQ(loop.num_pending(), 0U);
  // Nobody is told of it, and nothing of it is left.
  for (const Delivery& delivery : collector.wait_for_ends(0)) EXPECT_FALSE(delivery.event.finish.has_value());
  EXPECT_TRUE(eventually(loop, [](const engine::Engine& e) {
    e.audit();
    return e.num_free_pages() + e.num_idle_cached_pages() == e.num_pages();
  }));
}

TEST(EngineLoop, ACancelInTheInboxStillCounts) {
  Collector collector;
  std::promise<void> go;
  auto made = go.get_future().share();
  EngineLoop loop(
      [made] {
        made.wait();
        return tiny_engine();
      },
      collector.hooks());
  ASSERT_EQ(loop.submit(1, request(1, 50)), EngineLoop::Submitted::accepted);
  loop.cancel(1);
  loop.cancel(99);  // nobody
  ASSERT_EQ(loop.submit(2, request(2, 3)), EngineLoop::Submitted::accepted);
  go.set_value();
  for (const Delivery& delivery : collector.wait_for_ends(1)) EXPECT_EQ(delivery.ticket, 2U);
}

TEST(EngineLoop, ARefusedRequestIsAnEventAndOthersGoOn) {
  Collector collector;
  EngineLoop loop(tiny_engine, collector.hooks());
  ASSERT_EQ(loop.submit(1, request_of({}, 5)), EngineLoop::Submitted::accepted);
  ASSERT_EQ(loop.submit(2, request_of(random_tokens(1, 5000, *shared_tiny_model()), 5)),
            EngineLoop::Submitted::accepted);
  ASSERT_EQ(loop.submit(3, request(1, 4)), EngineLoop::Submitted::accepted);
  std::map<Ticket, Delivery> last;
  for (const Delivery& delivery : collector.wait_for_ends(3)) last[delivery.ticket] = delivery;
  ASSERT_EQ(last.size(), 3U);
  EXPECT_EQ(last[1].refused, ErrorCode::invalid_argument);
  EXPECT_TRUE(last[1].event.error.starts_with("prompt = "));
  EXPECT_EQ(last[2].refused, ErrorCode::invalid_argument);
  EXPECT_FALSE(last[3].refused.has_value());
  EXPECT_EQ(last[3].event.finish, engine::FinishReason::length);
}

TEST(EngineLoop, TurnsAwayWhatIsTooMuch) {
  Collector collector;
  std::promise<void> go;
  auto made = go.get_future().share();
  EngineLoop loop(
      [made] {
        made.wait();
        return tiny_engine();
      },
      collector.hooks(), {.max_pending = 2});
  EXPECT_EQ(loop.submit(1, request(1, 3)), EngineLoop::Submitted::accepted);
  EXPECT_EQ(loop.submit(2, request(2, 3)), EngineLoop::Submitted::accepted);
  EXPECT_EQ(loop.submit(3, request(3, 3)), EngineLoop::Submitted::full);
  go.set_value();
  collector.wait_for_ends(2);
  EXPECT_TRUE(eventually(loop, [](const engine::Engine& e) { return !e.has_work(); }));
  EXPECT_EQ(loop.submit(4, request(4, 3)), EngineLoop::Submitted::accepted);
  collector.wait_for_ends(3);
}

TEST(EngineLoop, StopsInTheMiddle) {
  Collector collector;
  EngineLoop loop(tiny_engine, collector.hooks());
  ASSERT_EQ(loop.submit(1, request(1, 900)), EngineLoop::Submitted::accepted);
  loop.stop();
  EXPECT_EQ(loop.submit(2, request(1, 3)), EngineLoop::Submitted::stopping);
  EXPECT_FALSE(loop.inspect([](const engine::Engine&) {}));
  loop.stop();
}

TEST(EngineLoop, StoppingWaitsAsLongAsItIsToldTo) {
  EngineLoop loop(tiny_engine, {});
  std::promise<void> go;
  auto going = go.get_future().share();
  std::promise<void> held;
  ASSERT_TRUE(loop.inspect([&held, going](const engine::Engine&) {
    held.set_value();
    going.wait();
  }));
  held.get_future().wait();
  EXPECT_FALSE(loop.stop_within(std::chrono::milliseconds(20)));
  EXPECT_EQ(loop.submit(1, request(1, 3)), EngineLoop::Submitted::stopping);
  go.set_value();
  EXPECT_TRUE(loop.stop_within(std::chrono::seconds(30)));
}

/// Hooks that put the words of what the loop failed with into `said`.
EngineLoopHooks hooks_that_tell(std::promise<std::string>& said) {
  EngineLoopHooks hooks;
  hooks.on_failed = [&said](const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const Error& known) {
      said.set_value(known.what());
    }
  };
  return hooks;
}

// What escapes ends the loop with a word, not the process.
TEST(EngineLoop, SaysThatTheEngineIsOfNoUseAnyMore) {
  std::promise<std::string> said;
  EngineLoopHooks hooks = hooks_that_tell(said);
  EngineLoop loop(tiny_engine, std::move(hooks));
  ASSERT_EQ(loop.submit(1, request(1, 900)), EngineLoop::Submitted::accepted);
  ASSERT_TRUE(loop.inspect([](const engine::Engine&) { throw Error(ErrorCode::internal, "cannot be cancelled"); }));
  EXPECT_EQ(said.get_future().get(), "cannot be cancelled");
  EXPECT_EQ(loop.submit(2, request(1, 3)), EngineLoop::Submitted::stopping);
  EXPECT_TRUE(loop.stop_within(std::chrono::seconds(30)));
  EXPECT_FALSE(loop.ready());
}

// An old request grows until pages run out; the youngest, which computes a document that a third one waits for, goes
// back to the queue in the middle of it.
TEST(EngineLoop, AWaiterOutlivesThePreemptionOfItsPrefixsOwner) {
  engine::EngineOptions options = tiny_options();
  options.num_pages = 80;  // of 4 tokens
  options.max_step_tokens = 12;
  engine::Request old = request(1, 60);
  old.num_samples = 8;
  old.sampling.temperature = 1.0F;
  std::vector<std::int32_t> document = random_tokens(2, 200, *shared_tiny_model());
  const engine::Request owner = request_of(document, 4);
  document.push_back(7);
  const engine::Request waiter = request_of(document, 4);
  const engine::Request* const all[] = {&old, &owner, &waiter};
  std::vector<std::vector<std::int32_t>> expected;
  for (const engine::Request* alone : all) {
    auto engine = tiny_engine();
    for (auto& tokens : test::tokens_of(engine::run_to_completion(*engine, {alone, 1}))) {
      expected.push_back(std::move(tokens));
    }
  }

  Collector collector;
  std::int64_t owner_had = 0;  // tokens before this step
  std::atomic<std::int64_t> owner_sent_back_at{-1};
  collector.at_step = [&](const engine::Engine& engine) {
    std::int64_t has = 0;
    for (const engine::StepRequest& in_step : engine.last_requests()) {
      if (in_step.tag == 2) has = in_step.tokens;
    }
    if (engine.last_step().preempted > 0 && has == 0 && owner_had > 0 && owner_sent_back_at < 0) {
      owner_sent_back_at = owner_had;
    }
    owner_had = has;
  };
  EngineLoop loop([&options] { return std::make_unique<engine::Engine>(shared_tiny_model(), options); },
                  collector.hooks());
  std::uint64_t ticket = 0;
  for (const engine::Request* one : all) {
    engine::Request work = *one;
    work.tag = ++ticket;
    ASSERT_EQ(loop.submit(ticket, std::move(work)), EngineLoop::Submitted::accepted);
  }
  std::vector<std::vector<std::int32_t>> tokens(10);
  for (const Delivery& delivery : collector.wait_for_ends(10)) {
    const auto sample = static_cast<std::size_t>(delivery.event.sample);
    tokens.at(delivery.ticket == 1 ? sample : 6 + delivery.ticket).push_back(delivery.event.token);
    EXPECT_EQ(delivery.event.error, "");
  }
  EXPECT_EQ(tokens, expected);
  EXPECT_GT(owner_sent_back_at.load(), 0) << "the case was not reached";
  EXPECT_LT(owner_sent_back_at.load(), 200) << "the case was not reached";
  EXPECT_TRUE(eventually(loop, [](const engine::Engine& e) {
    e.audit();
    return e.num_free_pages() + e.num_idle_cached_pages() == e.num_pages();
  }));
}

TEST(EngineLoop, SaysThatTheEngineCouldNotBeMade) {
  std::promise<std::string> said;
  EngineLoopHooks hooks = hooks_that_tell(said);
  EngineLoop loop([]() -> std::unique_ptr<engine::Engine> { throw Error(ErrorCode::io, "no such model"); },
                  std::move(hooks));
  EXPECT_EQ(said.get_future().get(), "no such model");
  EXPECT_FALSE(loop.ready());
  EXPECT_EQ(loop.submit(1, request(1, 3)), EngineLoop::Submitted::stopping);
}

}  // namespace
}  // namespace headwater::server
