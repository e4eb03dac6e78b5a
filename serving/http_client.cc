// See http_client.h. Boost.Beast and Asio; an Exchange keeps itself alive through the handlers that wait on it.
#include "serving/http_client.h"

#include <fmt/format.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <chrono>
#include <cstdint>
#include <utility>

#include "bench/probe.h"
#include "headwater/error.h"

namespace headwater::serving {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using boost::system::error_code;
using Endpoints = asio::ip::tcp::resolver::results_type;

/// More than any answer; a server that sends more is cut off.
constexpr std::uint64_t kMaxBody = std::uint64_t{1} << 30;

std::chrono::nanoseconds duration(double seconds) {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
}

/// connect -> write -> read the head -> read the body piece by piece.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(asio::io_context& context, http::request<http::string_body> request, double seconds, Listener listener)
      : stream_(context), request_(std::move(request)), patience_(duration(seconds)), listener_(std::move(listener)) {
    parser_.body_limit(kMaxBody);
  }

  void start(const Endpoints& endpoints) {
    stream_.expires_after(patience_);
    stream_.async_connect(endpoints, [self = shared_from_this()](error_code error, const auto&) {
      if (error) return self->end("connect", error);
      self->stream_.socket().set_option(asio::ip::tcp::no_delay(true), error);
      self->write();
    });
  }

 private:
  void write() {
    stream_.expires_after(patience_);
    http::async_write(stream_, request_, [self = shared_from_this()](error_code error, std::size_t) {
      if (error) return self->end("send", error);
      self->read();
    });
  }

  /// Returns with every piece that has come: an eager parser would wait for the last one.
  void read() {
    stream_.expires_after(patience_);
    http::async_read_some(stream_, buffer_, parser_,
                          [self = shared_from_this()](error_code error, std::size_t) { self->take(error); });
  }

  void take(error_code error) {
    if (parser_.is_header_done() && !status_known_) {
      status_known_ = true;
      if (listener_.on_status) listener_.on_status(static_cast<int>(parser_.get().result_int()));
    }
    if (std::string& body = parser_.get().body(); !body.empty()) {
      if (listener_.on_body) listener_.on_body(body);
      body.clear();
    }
    if (error) return end("receive", error);
    if (!parser_.is_done()) return read();
    error_code ignored;
    stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_both, ignored);
    if (listener_.on_end) listener_.on_end("");
  }

  void end(const char* what, error_code error) {
    const std::string reason = error == beast::error::timeout ? "no progress in time" : error.message();
    error_code ignored;
    stream_.socket().close(ignored);
    if (listener_.on_end) listener_.on_end(fmt::format("{}: {}", what, reason));
  }

  beast::tcp_stream stream_;
  http::request<http::string_body> request_;
  http::response_parser<http::string_body> parser_;
  beast::flat_buffer buffer_;
  std::chrono::nanoseconds patience_;
  Listener listener_;
  bool status_known_ = false;
};

}  // namespace

struct HttpClient::Loop {
  Loop(Url where, std::string key) : url(std::move(where)), api_key(std::move(key)) {}

  /// Resolved once: a name server is no part of what is measured.
  const Endpoints& resolve() {
    if (endpoints.empty()) {
      error_code error;
      endpoints = asio::ip::tcp::resolver(context).resolve(url.host, url.port, error);
      if (error) throw Error(ErrorCode::io, fmt::format("{}: {}", url.text(), error.message()));
    }
    return endpoints;
  }

  void start(http::verb verb, const std::string& path, std::string body, double seconds, Listener listener) {
    http::request<http::string_body> request(verb, url.base + path, 11);
    request.set(http::field::host, url.host + ":" + url.port);
    request.set(http::field::user_agent, "headwater-bench-serving");
    request.set(http::field::connection, "close");
    if (!api_key.empty()) request.set(http::field::authorization, "Bearer " + api_key);
    if (verb == http::verb::post) request.set(http::field::content_type, "application/json");
    request.body() = std::move(body);
    request.prepare_payload();
    std::make_shared<Exchange>(context, std::move(request), seconds, std::move(listener))->start(resolve());
  }

  Answer wait_for(http::verb verb, const std::string& path, const std::string& body, double seconds) {
    Answer answer;
    std::string failure;
    start(verb, path, body, seconds,
          {[&](int status) { answer.status = status; }, [&](std::string_view piece) { answer.body += piece; },
           [&](const std::string& error) { failure = error; }});
    context.restart();
    context.run();
    if (!failure.empty()) throw Error(ErrorCode::io, fmt::format("{}{}: {}", url.text(), path, failure));
    return answer;
  }

  Url url;
  std::string api_key;
  asio::io_context context{1};
  Endpoints endpoints;
  std::int64_t waiting = 0;  ///< exchanges and actions that run() waits for
};

HttpClient::HttpClient(Url url, std::string api_key)
    : loop_(std::make_unique<Loop>(std::move(url), std::move(api_key))) {}

HttpClient::~HttpClient() = default;

const Url& HttpClient::url() const noexcept {
  return loop_->url;
}

void HttpClient::post(const std::string& path, std::string body, double seconds, Listener listener) {
  Loop* const loop = loop_.get();
  ++loop->waiting;
  listener.on_end = [loop, inner = std::move(listener.on_end)](const std::string& error) {
    --loop->waiting;
    if (inner) inner(error);
  };
  loop->start(http::verb::post, path, std::move(body), seconds, std::move(listener));
}

void HttpClient::at(double time, std::function<void()> action) {
  Loop* const loop = loop_.get();
  ++loop->waiting;
  auto timer = std::make_shared<asio::steady_timer>(loop->context, duration(std::max(time - bench::now(), 0.0)));
  timer->async_wait([loop, timer, action = std::move(action)](error_code) {
    --loop->waiting;
    action();
  });
}

void HttpClient::run(const std::function<void()>& tick) {
  Loop& loop = *loop_;
  loop.context.restart();
  double next = bench::now() + 0.1;
  while (loop.waiting > 0) {
    loop.context.run_one_for(std::chrono::milliseconds(100));
    if (const double now = bench::now(); now >= next) {
      next = now + 0.1;
      if (tick) tick();
    }
  }
}

Answer HttpClient::get_now(const std::string& path, double seconds) {
  return loop_->wait_for(http::verb::get, path, "", seconds);
}

Answer HttpClient::post_now(const std::string& path, const std::string& body, double seconds) {
  return loop_->wait_for(http::verb::post, path, body, seconds);
}

}  // namespace headwater::serving
