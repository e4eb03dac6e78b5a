// See api.h: routes and the small answers. The way of a generation is in generation.cc.
#include "server/api.h"

#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <random>

#include "headwater/error.h"
#include "headwater/version.h"
#include "server/forest.h"
#include "server/json_text.h"
#include "server/local_only.h"

namespace headwater::server {
namespace {

enum class Access : std::uint8_t { open, keyed };

struct Route {
  std::string_view path;
  std::string_view method;
  Access access;
};

// /health, /ready and the page tell nothing that is worth a key.
constexpr std::array kRoutes{
    Route{"/", "GET", Access::open},
    Route{"/health", "GET", Access::open},
    Route{"/ready", "GET", Access::open},
    Route{"/metrics", "GET", Access::keyed},
    Route{"/v1/models", "GET", Access::keyed},
    Route{"/v1/headwater/forest", "GET", Access::keyed},
    Route{"/v1/chat/completions", "POST", Access::keyed},
    Route{"/v1/completions", "POST", Access::keyed},
    Route{"/tokenize", "POST", Access::keyed},
    Route{"/detokenize", "POST", Access::keyed},
};

/// Takes as long for a wrong key as for the right one.
bool same_key(std::string_view given, std::string_view key) {
  unsigned difference = given.size() == key.size() ? 0 : 1;
  for (std::size_t i = 0; i < given.size(); ++i) {
    difference |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(key[i % key.size()]);
  }
  return difference == 0;
}

/// What follows "Bearer "; schemes are read whatever their case.
std::optional<std::string_view> bearer_of(std::string_view authorization) {
  constexpr std::string_view kBearer = "bearer ";
  if (authorization.size() < kBearer.size()) return std::nullopt;
  for (std::size_t i = 0; i < kBearer.size(); ++i) {
    const char c = authorization[i];
    if ((c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c) != kBearer[i]) return std::nullopt;
  }
  return authorization.substr(kBearer.size());
}

bool is_json(std::string_view content_type) {
  constexpr std::string_view kJson = "application/json";
  if (content_type.size() < kJson.size()) return false;
  for (std::size_t i = 0; i < kJson.size(); ++i) {
    const char c = content_type[i];
    if ((c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c) != kJson[i]) return false;
  }
  const std::string_view rest = content_type.substr(kJson.size());
  return rest.empty() || rest.front() == ';' || rest.front() == ' ';
}

double thread_cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

std::string with_nonce(std::string html, const std::string& nonce) {
  for (const std::string_view tag : {"<script", "<style"}) {
    const std::string attribute = " nonce=\"" + nonce + "\"";
    for (std::size_t at = html.find(tag); at != std::string::npos; at = html.find(tag, at + tag.size())) {
      html.insert(at + tag.size(), attribute);
    }
  }
  return html;
}

}  // namespace

HttpResponse response_of(const ApiError& error) {
  HttpResponse response{error.status, error_json(error)};
  if (error.retry_after_seconds > 0) {
    response.headers.emplace_back("Retry-After", std::to_string(error.retry_after_seconds));
  }
  if (error.status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  return response;
}

ApiError error_of(int status, std::string_view message) {
  ApiError error;
  error.status = status;
  error.message = message;
  if (status >= 500) error.type = "server_error";
  return error;
}

Api::Api(ApiOptions options, HttpServer& http, EngineLoop& loop, Metrics& metrics, Log& log)
    : options_(std::move(options)),
      http_(http),
      loop_(loop),
      metrics_(metrics),
      log_(log),
      started_(std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
                   .count()),
      id_key_(std::random_device{}()) {}

void Api::serve(ServedModel served) {
  served_ = std::make_shared<const ServedModel>(std::move(served));
}

std::optional<HttpResponse> Api::check(const HttpHead& head) const {
  const auto refuse = [&](const ApiError& error) {
    metrics_.on_response(error.status);
    return response_of(error);
  };
  if (options_.local_only) {
    const std::string why = why_foreign(head.host, head.origin);
    if (!why.empty()) return refuse({403, "invalid_request_error", why, "", "foreign_origin"});
  }
  const auto* const route = std::ranges::find(kRoutes, std::string_view(head.path), &Route::path);
  if (route == kRoutes.end()) {
    return refuse({404, "invalid_request_error", "no such path: " + clipped(head.path), "", "not_found"});
  }
  const bool get = route->method == "GET";
  if (head.method != route->method && !(get && head.method == "HEAD")) {
    auto refusal = refuse(
        {405, "invalid_request_error", head.path + " does not take " + clipped(head.method), "", "method_not_allowed"});
    refusal.headers.emplace_back("Allow", get ? "GET, HEAD" : std::string(route->method));
    return refusal;
  }
  if (route->access == Access::keyed && !options_.api_key.empty()) {
    const std::optional<std::string_view> given = bearer_of(head.authorization);
    if (!given || !same_key(*given, options_.api_key)) {
      return refuse({401, "invalid_request_error", "wrong or missing API key: expected Authorization: Bearer KEY", "",
                     "invalid_api_key"});
    }
  }
  if (get) return std::nullopt;
  // Other types could be sent by any web page that the user of this machine happens to visit.
  if (!is_json(head.content_type)) {
    return refuse({415, "invalid_request_error", "expected the header Content-Type: application/json", "",
                   "unsupported_media_type"});
  }
  if (served_ == nullptr) return refuse({503, "server_error", "the model is being loaded", "", "not_ready", 2});
  if (draining_) return refuse({503, "server_error", "the server is shutting down", "", "shutting_down", 5});
  return std::nullopt;
}

void Api::handle(HttpRequest request, const std::shared_ptr<Exchange>& exchange) {
  if (request.path == "/v1/chat/completions") return generate(Endpoint::chat, std::move(request), exchange);
  if (request.path == "/v1/completions") return generate(Endpoint::completions, std::move(request), exchange);
  if (request.path == "/health") return respond(exchange, HttpResponse{200, "{\"status\":\"ok\"}"});
  if (request.path == "/ready") {
    if (draining_)
      return respond(exchange, {503, "server_error", "the server is shutting down", "", "shutting_down", 5});
    if (served_ == nullptr) {
      return respond(exchange, {503, "server_error", "the model is being loaded", "", "not_ready", 2});
    }
    return respond(exchange, HttpResponse{200, "{\"status\":\"ready\"}"});
  }
  if (request.path == "/metrics") return respond(exchange, metrics_page());
  if (request.path == "/v1/models") return respond(exchange, HttpResponse{200, models()});
  if (request.path == "/v1/headwater/forest") return forest(exchange);
  if (request.path == "/") return respond(exchange, start_page());
  const std::size_t bytes = request.body.size();
  run_on_worker(
      exchange,
      [served = served_, limits = options_.limits, body = std::move(request.body),
       encode = request.path == "/tokenize"] {
        return encode ? tokenize(body, limits, *served) : detokenize(body, *served);
      },
      bytes);
}

/// Answers with what `work`, which may throw ApiError or Error and holds so many bytes, returns.
void Api::run_on_worker(const std::shared_ptr<Exchange>& exchange, std::function<std::string()> work,
                        std::size_t bytes) {
  auto answer = [this, exchange, work = std::move(work)] {
    HttpResponse response;
    try {
      response.body = work();
    } catch (const ApiError& error) {
      response = response_of(error);
    } catch (const Error& error) {
      response = response_of({400, "invalid_request_error", error.what()});
    } catch (const std::exception& error) {
      response = response_of({500, "server_error", error.what()});
    }
    http_.post([this, exchange, response = std::move(response)]() mutable { respond(exchange, std::move(response)); });
  };
  if (worker_.post(std::move(answer), bytes)) return;
  respond(exchange, {429, "rate_limit_error", "too many requests are waiting", "", "queue_full", 1});
}

void Api::forest(const std::shared_ptr<Exchange>& exchange) {
  if (served_ == nullptr)
    return respond(exchange, {503, "server_error", "the model is being loaded", "", "not_ready", 2});
  const bool asked = loop_.inspect([this, exchange](const engine::Engine& engine) {
    auto snapshot = std::make_shared<const ForestSnapshot>(take_forest(engine));
    http_.post([this, exchange, snapshot] {
      run_on_worker(
          exchange,
          [this, snapshot] { return forest_json(*snapshot, [this](std::uint64_t tag) { return id_of(tag); }); }, 0);
    });
  });
  if (!asked) respond(exchange, {503, "server_error", "the engine is not running", "", "not_ready", 2});
}

void Api::respond(const std::shared_ptr<Exchange>& exchange, HttpResponse response) {
  metrics_.on_response(response.status);
  exchange->respond(std::move(response));
}

void Api::respond(const std::shared_ptr<Exchange>& exchange, const ApiError& error) {
  respond(exchange, response_of(error));
}

HttpResponse Api::metrics_page() {
  const Metrics::Elsewhere elsewhere{loop_.num_pending(), thread_cpu_seconds(), log_.num_lost()};
  return {200, metrics_.text(http_.stats(), elsewhere), std::string(Metrics::kContentType)};
}

HttpResponse Api::start_page() const {
  std::random_device random;
  const std::string nonce = fmt::format("{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
  const std::string policy = "default-src 'none'; script-src 'nonce-" + nonce + "'; style-src 'nonce-" + nonce +
                             "'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
                             "frame-ancestors 'none'";
  return {200,
          with_nonce(options_.page, nonce),
          "text/html; charset=utf-8",
          {{"Content-Security-Policy", policy},
           {"Cache-Control", "no-store"},
           {"Referrer-Policy", "no-referrer"},
           {"X-Frame-Options", "DENY"}}};
}

std::string Api::models() const {
  if (served_ == nullptr) return "{\"object\":\"list\",\"data\":[]}";
  return "{\"object\":\"list\",\"data\":[{\"id\":" + json_string(served_->name) +
         ",\"object\":\"model\",\"created\":" + std::to_string(started_) +
         ",\"owned_by\":\"headwater\",\"max_model_len\":" + std::to_string(served_->max_tokens()) + "}]}";
}

}  // namespace headwater::server
