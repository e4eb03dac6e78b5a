// A server with the tiny model on a free port, in this process; and requests to it.
#pragma once

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <thread>

#include "engine/fixture.h"
#include "server/client.h"
#include "server/server.h"

namespace headwater::test {

inline server::ServedModel served_as_tiny(std::shared_ptr<const engine::Model> model) {
  server::ServedModel served;
  served.name = "tiny";
  served.model = std::move(model);
  served.chat.emplace(served.model->gguf(), served.model->tokenizer());
  return served;
}

inline server::ServedModel tiny_served() {
  return served_as_tiny(shared_tiny_model());
}

/// Its end is a check, too: whatever a test did, every page's count is right and none is in use.
class TestServer {
 public:
  explicit TestServer(server::ServerOptions options = {}, engine::EngineOptions engine = tiny_options(),
                      const std::function<server::ServedModel()>& served = tiny_served,
                      const std::string& log = "/dev/null")
      : server_(
            listen_anywhere(std::move(options)),
            [engine, served] {
              return server::Loaded{served(), engine};
            },
            std::make_shared<server::Log>(log)) {
    ended_ = std::async(std::launch::async, [this] { return server_.run(false); });
    for (int i = 0; i < 2000 && Client(port()).get("/ready").status != 200; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  ~TestServer() {
    if (!ended_.valid()) return;
    expect_nothing_leaked();
    server_.shut_down();
    server_.shut_down();
  }

  [[nodiscard]] std::uint16_t port() const { return server_.port(); }
  [[nodiscard]] Client client() const { return Client(port()); }
  server::Server& operator*() { return server_; }
  server::Server* operator->() { return &server_; }
  /// How run() ended; waits 30 s at most.
  server::Server::Ended wait() {
    if (ended_.wait_for(std::chrono::seconds(30)) != std::future_status::ready) std::abort();
    return ended_.get();
  }

  /// What `question` says of the engine.
  template <class Question>
  auto ask(Question question) {
    using Answer = decltype(question(std::declval<const engine::Engine&>()));
    auto promise = std::make_shared<std::promise<Answer>>();
    auto future = promise->get_future();
    EXPECT_TRUE(
        server_.inspect([promise, question](const engine::Engine& engine) { promise->set_value(question(engine)); }));
    if (future.wait_for(std::chrono::seconds(30)) != std::future_status::ready) std::abort();
    return future.get();
  }
  /// The value of a line of /metrics; -1: there is none.
  [[nodiscard]] double metric(const std::string& name) const {
    const std::string text = client().get("/metrics").body;
    const std::size_t at = text.find("\n" + name + " ");
    return at == std::string::npos ? -1 : std::stod(text.substr(at + name.size() + 2));
  }
  /// Waits until it has that value, 20 s at most.
  [[nodiscard]] bool metric_becomes(const std::string& name, double value) const {
    for (int i = 0; i < 4000; ++i) {
      if (metric(name) == value) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

  /// Waits until nothing runs; then no page may be in use and every count must be right.
  void expect_nothing_leaked() {
    for (int i = 0; i < 2000; ++i) {
      if (!ask([](const engine::Engine& engine) { return engine.has_work(); })) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    const std::string wrong = ask([](const engine::Engine& engine) -> std::string {
      if (engine.has_work()) return "requests are still running";
      try {
        engine.audit();
      } catch (const std::exception& error) {
        return error.what();
      }
      const std::int64_t used = engine.num_pages() - engine.num_free_pages() - engine.num_idle_cached_pages();
      return used == 0 ? "" : std::to_string(used) + " pages are still in use";
    });
    EXPECT_EQ(wrong, "");
  }

 private:
  static server::ServerOptions listen_anywhere(server::ServerOptions options) {
    options.http.port = 0;
    return options;
  }
  server::Server server_;
  std::future<server::Server::Ended> ended_;
};

/// Holds a server's engine between two steps: after the one under way, or after the first that begins once an earlier
/// pause has ended. Connections go on.
class Pause {
 public:
  explicit Pause(TestServer& server) {
    EXPECT_TRUE(server->inspect([held = held_, freed = freed_](const engine::Engine& engine) {
      held->set_value(engine.progress());
      freed.wait();
    }));
  }
  ~Pause() { end(); }
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;
  /// Waits until the engine is held; how far it was.
  engine::Progress held() { return held_->get_future().get(); }
  void end() {
    if (!std::exchange(ended_, true)) free_.set_value();
  }

 private:
  std::shared_ptr<std::promise<engine::Progress>> held_ = std::make_shared<std::promise<engine::Progress>>();
  std::promise<void> free_;
  std::shared_future<void> freed_ = free_.get_future().share();
  bool ended_ = false;
};

inline constexpr const char* kPending = "headwater_requests_pending";
inline constexpr const char* kCancelled = "headwater_requests_total{endpoint=\"completions\",outcome=\"cancelled\"}";

/// Greedy, 12 tokens, goes on after the end-of-sequence token.
inline nlohmann::json completion_of(const nlohmann::json& prompt) {
  return {{"model", "tiny"}, {"prompt", prompt}, {"max_tokens", 12}, {"temperature", 0}, {"ignore_eos", true}};
}

inline nlohmann::json chat_of(const std::string& text) {
  return {{"model", "tiny"},
          {"messages", {{{"role", "user"}, {"content", text}}}},
          {"max_tokens", 12},
          {"temperature", 0},
          {"ignore_eos", true}};
}

inline nlohmann::json with(nlohmann::json object, const nlohmann::json& fields) {
  object.update(fields);
  return object;
}

}  // namespace headwater::test
