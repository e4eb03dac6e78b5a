// See server.h.
#include "server/server.h"

#include <fmt/format.h>

#include <utility>

#include "cli/outcome.h"
#include "engine/model.h"
#include "headwater/error.h"
#include "server/api.h"
#include "server/metrics.h"
#include "server/page.h"

namespace headwater::server {
namespace {

/// A key that no Authorization header can have would shut everybody out.
ServerOptions checked(ServerOptions options) {
  const std::string& key = options.api_key;
  for (std::size_t i = 0; i < key.size(); ++i) {
    const auto byte = static_cast<unsigned char>(key[i]);
    const bool at_end = i == 0 || i + 1 == key.size();
    if (byte > ' ' ? byte < 0x7F : byte == ' ' && !at_end) continue;
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("the API key has byte 0x{:02x} at {}, expected printable ASCII, no blank at an end", byte, i));
  }
  return options;
}

}  // namespace

struct Server::Impl {
  Impl(ServerOptions options_in, Load load_in, std::shared_ptr<Log> log_in)
      : options(checked(std::move(options_in))),
        load(std::move(load_in)),
        log(std::move(log_in)),
        metrics(options.cascade_off),
        http(options.http, handler()) {
    if (!options.cascade_off.empty()) log->info("cascade_off", {{"reason", options.cascade_off}});
  }

  HttpHandler handler();
  EngineLoopHooks hooks();
  void on_step(const engine::Engine& engine);
  void shut_down();

  ServerOptions options;
  Load load;
  std::shared_ptr<Log> log;
  Metrics metrics;
  HttpServer http;
  std::unique_ptr<EngineLoop> loop;
  std::unique_ptr<Api> api;
  int shut_downs = 0;
  bool drained = true;
  std::exception_ptr failure;
  bool announced[2] = {false, false};  // by path; the engine thread's
  bool announced_failure = false;      // so is this
};

HttpHandler Server::Impl::handler() {
  HttpHandler handler;
  handler.check = [this](const HttpHead& head) { return api->check(head); };
  handler.handle = [this](HttpRequest request, const std::shared_ptr<Exchange>& exchange) {
    api->handle(std::move(request), exchange);
  };
  handler.error_body = [this](int status, std::string_view message) {
    metrics.on_response(status);
    return error_json(error_of(status, message));
  };
  return handler;
}

/// All on the engine's thread; what concerns connections is handed over.
EngineLoopHooks Server::Impl::hooks() {
  EngineLoopHooks hooks;
  hooks.on_failed = [this](const std::exception_ptr& error) {
    http.post([this, error] {
      failure = error;
      http.stop();
    });
  };
  hooks.on_events = [this](std::vector<Delivery> deliveries) {
    auto events = std::make_shared<std::vector<Delivery>>(std::move(deliveries));
    http.post([this, events] { api->deliver(std::move(*events)); });
  };
  hooks.on_step = [this](const engine::Engine& engine) { on_step(engine); };
  hooks.on_idle = [this](const engine::Engine& engine) { metrics.on_idle(engine); };
  hooks.on_internal_error = [this](const std::string& error) { log->error("step_failed", {{"error", error}}); };
  return hooks;
}

void Server::Impl::on_step(const engine::Engine& engine) {
  metrics.on_step(engine);
  const engine::StepStats& step = engine.last_step();
  if (!step.cascade_error.empty() && !announced_failure) {
    announced_failure = true;
    log->warn("cascade_failed", {{"step", step.step}, {"error", step.cascade_error}, {"instead", std::string("flat")}});
  }
  const auto path = static_cast<std::size_t>(step.path);
  if (step.decode_rows == 0 || step.prefill_rows > 0 || announced[path]) return;
  announced[path] = true;
  log->info("launch", {{"step", step.step}, {"outcome", cli::describe_outcome(engine.last_plan())}});
}

void Server::Impl::shut_down() {
  if (++shut_downs > 1) {
    log->info("stopping_at_once");
    drained = false;
    return http.stop();
  }
  log->info("draining", {{"requests", static_cast<std::int64_t>(api->num_generations())}});
  api->drain();
  http.after(options.drain_timeout, [this] {
    log->warn("drain_timed_out", {{"requests", static_cast<std::int64_t>(api->num_generations())}});
    drained = false;
    http.stop();
  });
  http.drain();
}

Server::Server(ServerOptions options, Load load, std::shared_ptr<Log> log)
    : impl_(std::make_unique<Impl>(std::move(options), std::move(load), std::move(log))) {}

Server::~Server() = default;

std::uint16_t Server::port() const noexcept {
  return impl_->http.port();
}
std::string Server::address() const {
  return impl_->http.address();
}

Server::Ended Server::run(bool handle_signals) {
  Impl& s = *impl_;
  auto make_engine = [&s] {
    Loaded loaded = s.load();
    auto engine = std::make_unique<engine::Engine>(loaded.served.model, loaded.engine);
    auto served = std::make_shared<ServedModel>(std::move(loaded.served));
    served->kv_tokens = engine->num_pages() * engine->options().page_size;
    s.metrics.on_idle(*engine);
    s.http.post([&s, served] {
      s.log->info("ready", {{"model", served->name}, {"address", s.http.address()}});
      s.api->serve(std::move(*served));
    });
    return engine;
  };
  s.loop = std::make_unique<EngineLoop>(make_engine, s.hooks(), s.options.loop);
  const bool local_only = s.options.api_key.empty() && s.http.is_loopback();
  s.api = std::make_unique<Api>(ApiOptions{s.options.api_key, local_only, s.options.limits, std::string(start_page())},
                                s.http, *s.loop, s.metrics, *s.log);
  if (handle_signals) s.http.watch_signals([&s](int) { s.shut_down(); });
  s.log->info("listening", {{"address", s.http.address()}});
  if (s.options.api_key.empty() && !s.http.is_loopback()) {
    s.log->warn("no_api_key", {{"address", s.http.address()}, {"who", std::string("anybody who reaches it may ask")}});
  }
  s.http.run();
  const auto limit = std::chrono::steady_clock::now() + s.options.stop_timeout;
  const auto left = [&limit] {
    return std::chrono::duration_cast<std::chrono::milliseconds>(limit - std::chrono::steady_clock::now());
  };
  if (!s.loop->stop_within(left()) || !s.api->stop_worker_within(left())) {
    s.log->warn("stuck", {{"why", std::string("a step, a model's loading or a tokenisation takes long")}});
    return Ended::stuck;
  }
  if (s.failure) std::rethrow_exception(s.failure);
  s.log->info("stopped");
  return s.drained ? Ended::drained : Ended::stopped;
}

void Server::shut_down() {
  impl_->http.post([impl = impl_.get()] { impl->shut_down(); });
}

bool Server::inspect(std::function<void(const engine::Engine&)> question) {
  return impl_->loop && impl_->loop->inspect(std::move(question));
}

}  // namespace headwater::server
