// One connection; internal to the HTTP server (http_session.cc, http_server.cc).
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "server/http.h"

namespace headwater::server {

class Session;

/// What sessions share with their server.
struct SessionHost {
  HttpOptions options;
  HttpHandler handler;
  HttpStats stats;
  bool draining = false;
  std::unordered_map<Session*, std::shared_ptr<Session>> sessions;
  std::function<void()> on_idle;  ///< a session has finished a request or closed
};

class Session final : public Exchange, public std::enable_shared_from_this<Session> {
 public:
  Session(boost::asio::ip::tcp::socket socket, SessionHost& host);

  void start();
  /// Whether a request is being read, handled or answered.
  [[nodiscard]] bool busy() const noexcept { return state_ != State::idle && state_ != State::closed; }
  /// Looks at the clock: a session past its deadline is answered 408 or closed.
  void check_deadline(std::chrono::steady_clock::time_point now);
  /// Closes an idle session; a busy one closes after its answer.
  void finish_soon();
  void close();

  void respond(HttpResponse response) override;
  void begin_stream(std::string_view content_type) override;
  bool write(std::string_view data) override;
  void end_stream() override;
  void on_gone(std::function<void()> callback) override;

 private:
  enum class State : std::uint8_t {
    idle,       ///< no byte of a request yet
    reading,    ///< its head or its body
    handling,   ///< the handler has it
    streaming,  ///< its answer has begun
    answering,  ///< its answer is whole and being written
    lingering,  ///< answered and shut down; what the client still sends is thrown away
    closed,
  };
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;

  void expect(std::chrono::milliseconds timeout);
  void next_request();
  void pump();
  void read_head();
  void on_head(const boost::system::error_code& error);
  [[nodiscard]] std::string_view wrong_with_head() const;
  void read_body();
  void dispatch();
  void refuse(int status, std::string_view message);
  void queue(HttpResponse&& response, bool keep_alive);
  void flush();
  void on_written(const boost::system::error_code& error);
  void linger();
  [[nodiscard]] bool left_unheard();
  void gone();

  boost::asio::ip::tcp::socket socket_;
  SessionHost& host_;
  boost::beast::flat_buffer buffer_;  ///< bytes received and not yet parsed
  std::optional<Parser> parser_;
  State state_ = State::idle;
  bool pumping_ = false;  ///< a read is under way that waits for bytes or the end
  bool writing_ = false;
  bool keep_alive_ = true;
  bool chunked_ = true;
  bool head_only_ = false;  ///< HEAD: the answer's body is not sent
  std::string sending_;     ///< being written
  std::string pending_;     ///< to be written next
  std::size_t lingered_ = 0;
  std::chrono::steady_clock::time_point deadline_;
  std::function<void()> on_gone_;
};

}  // namespace headwater::server
