// The routes: what is answered where, by whom it may be asked, and the way of a generation request: check -> parse and
// tokenise (on a worker) -> engine loop -> answer. Everything here runs on the HTTP server's thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "server/answer.h"
#include "server/engine_loop.h"
#include "server/http.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/openai.h"
#include "server/prepare.h"
#include "server/worker.h"

namespace headwater::server {

struct ApiOptions {
  std::string api_key;      ///< empty: anybody may ask
  bool local_only = false;  ///< anybody but other sites' pages in a browser of this machine (local_only.h)
  ParseLimits limits;
  std::string page;  ///< HTML of the page at /
};

class Api {
 public:
  /// All must outlive this object.
  Api(ApiOptions options, HttpServer& http, EngineLoop& loop, Metrics& metrics, Log& log);
  Api(const Api&) = delete;
  Api& operator=(const Api&) = delete;

  /// The model is there: requests are served from now on.
  void serve(ServedModel served);
  /// No new generations: 503.
  void drain() noexcept { draining_ = true; }
  [[nodiscard]] std::size_t num_generations() const noexcept { return generations_.size(); }
  /// Ends the worker, for whose task under way it waits no longer than `limit`. True: nothing is posted after that.
  [[nodiscard]] bool stop_worker_within(std::chrono::milliseconds limit) {
    worker_.stop();
    return worker_.ends_within(limit);
  }

  [[nodiscard]] std::optional<HttpResponse> check(const HttpHead& head) const;
  void handle(HttpRequest request, const std::shared_ptr<Exchange>& exchange);
  /// Events of one step.
  void deliver(std::vector<Delivery> deliveries);

 private:
  using Clock = std::chrono::steady_clock;

  /// A generation request under way.
  struct Generation {
    std::uint64_t number = 0;
    Endpoint endpoint = Endpoint::chat;
    std::shared_ptr<Exchange> exchange;
    std::unique_ptr<Answer> answer;  ///< once the engine has its work
    std::vector<Ticket> tickets;     ///< of its prompts
    Clock::time_point begin;
    std::vector<Clock::time_point> last_token;  ///< of each choice; zero: none yet
    bool streaming = false;
    bool begun = false;  ///< the stream's head has been sent
    std::string out;     ///< stream events of the step that is being delivered
  };

  void generate(Endpoint endpoint, HttpRequest request, const std::shared_ptr<Exchange>& exchange);
  void start(std::uint64_t number, PreparedRequest prepared);
  void fail(std::uint64_t number, const ApiError& error);
  void give_up(std::uint64_t number);
  void guarded(std::uint64_t number, const std::function<void()>& work);
  void take_event(Generation& generation, Delivery& delivery);
  void observe(Generation& generation, std::size_t choice);
  void flush(Generation& generation);
  void finish(Generation& generation, std::string_view outcome);
  void run_on_worker(const std::shared_ptr<Exchange>& exchange, std::function<std::string()> work, std::size_t bytes);
  void forest(const std::shared_ptr<Exchange>& exchange);
  void respond(const std::shared_ptr<Exchange>& exchange, HttpResponse response);
  void respond(const std::shared_ptr<Exchange>& exchange, const ApiError& error);
  [[nodiscard]] HttpResponse metrics_page();
  [[nodiscard]] HttpResponse start_page() const;
  [[nodiscard]] std::string models() const;
  [[nodiscard]] std::string id_of(Ticket ticket) const;

  ApiOptions options_;
  HttpServer& http_;
  EngineLoop& loop_;
  Metrics& metrics_;
  Log& log_;
  std::shared_ptr<const ServedModel> served_;
  std::int64_t started_;  ///< seconds since 1970
  std::uint64_t id_key_;  ///< random: ids of two runs differ
  std::uint64_t next_number_ = 1;
  bool draining_ = false;
  std::unordered_map<std::uint64_t, std::unique_ptr<Generation>> generations_;  ///< by number
  Worker worker_;                                                               // last: its tasks use the others
};

/// An ApiError as an HTTP answer.
[[nodiscard]] HttpResponse response_of(const ApiError& error);
/// The error that fits a status given by the HTTP server itself.
[[nodiscard]] ApiError error_of(int status, std::string_view message);

}  // namespace headwater::server
