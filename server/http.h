// An HTTP/1.1 server: one thread, asynchronous, every connection's memory and time bounded. It knows bytes, not
// OpenAI: a handler gets whole requests and an Exchange to answer on, now or later. Boost.Beast and Asio stay behind
// this header.
//
// Everything but HttpServer::post happens on the thread that calls run().
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace headwater::server {

struct HttpOptions {
  std::string host = "127.0.0.1";  ///< a numeric address or a name; the first address of a name is taken
  std::uint16_t port = 8000;       ///< 0: any free one, see HttpServer::port
  std::size_t max_connections = 1024;
  std::size_t max_header_bytes = 16 << 10;
  std::size_t max_body_bytes = 4 << 20;
  std::size_t max_output_bytes = 1 << 20;           ///< of a stream, not yet taken by the client when more comes; above
                                                    ///< that it is dropped
  std::chrono::milliseconds read_timeout{30'000};   ///< from the first byte of a request to its last
  std::chrono::milliseconds write_timeout{30'000};  ///< for the client to take any part of what was written
  std::chrono::milliseconds idle_timeout{75'000};   ///< of a connection without a request
};

/// The beginning of a request. Strings are as sent; `path` is the target up to '?', not decoded.
struct HttpHead {
  std::string method;
  std::string path;
  std::string query;
  std::string authorization;
  std::string content_type;
  std::string host;
  std::string origin;
};

struct HttpRequest : HttpHead {
  std::string body;
};

struct HttpResponse {
  int status = 200;
  std::string body{};
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers{};
};

/// Where one request is answered: either respond(), or begin_stream(), write()... and end_stream(). Calls after the
/// client has gone do nothing.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual void respond(HttpResponse response) = 0;
  /// Status 200 and the headers, which are sent with the first piece of the body.
  virtual void begin_stream(std::string_view content_type) = 0;
  /// Sends a piece, not empty. False: the client has gone, or had left more than max_output_bytes lying and was
  /// dropped.
  virtual bool write(std::string_view data) = 0;
  virtual void end_stream() = 0;
  /// Called once if the client goes away before its answer is complete; not while one of the functions above runs. It
  /// is noticed at once, or within 250 ms where the client has sent something after its request.
  virtual void on_gone(std::function<void()> callback) = 0;
};

struct HttpHandler {
  /// Looks at a request before its body is read: an answer refuses it.
  std::function<std::optional<HttpResponse>(const HttpHead& head)> check;
  /// Must answer on the exchange, at once or later.
  std::function<void(HttpRequest request, std::shared_ptr<Exchange> exchange)> handle;
  /// The body of an answer that the server itself gives: 400, 408, 413, 431, 503. JSON.
  std::function<std::string(int status, std::string_view message)> error_body;
};

/// Sums since the start; `connections` is now.
struct HttpStats {
  std::size_t connections = 0;
  std::uint64_t accepted = 0;
  std::uint64_t turned_away = 0;   ///< above max_connections
  std::uint64_t timed_out = 0;     ///< closed by a timeout, idle ones apart
  std::uint64_t dropped_slow = 0;  ///< left too much output lying
  std::uint64_t refused = 0;       ///< answered 400, 408, 413 or 431 before a handler saw them
};

class HttpServer {
 public:
  /// Binds and listens. Throws Error(io) naming the address.
  HttpServer(const HttpOptions& options, HttpHandler handler);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  [[nodiscard]] std::uint16_t port() const noexcept;
  /// "127.0.0.1:8000", "[::1]:8000".
  [[nodiscard]] std::string address() const;
  /// Only programs of this machine reach it.
  [[nodiscard]] bool is_loopback() const;
  /// Serves until stop(), or until drain() has nothing left to wait for.
  void run();
  /// Runs `task` on the server's thread. Any thread may call it, before, during and after run().
  void post(std::function<void()> task);
  /// Runs `task` on the server's thread after a while.
  void after(std::chrono::milliseconds delay, std::function<void()> task);
  /// Calls `callback` for SIGINT, SIGTERM and SIGHUP, on the server's thread. They end nothing by themselves until this
  /// object dies.
  void watch_signals(std::function<void(int signal)> callback);

  /// Answers what has been asked, then closes; run() returns when no request is under way. New requests are still
  /// answered until then.
  void drain();
  /// Closes everything; run() returns.
  void stop();
  [[nodiscard]] HttpStats stats() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace headwater::server
