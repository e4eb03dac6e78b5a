// See http_session.h. The life of a connection: idle -> reading -> handling -> (streaming ->) answering -> idle ...
// While a request is handled one read stays under way, so that a client that goes away is noticed at once. What a
// client sends ahead (pipelining) waits in the buffer and is the next request; whether such a client is still there is
// looked at with every tick of the clock.
#include "server/http_session.h"

#include <fmt/chrono.h>
#include <poll.h>

#include <boost/asio/write.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/status.hpp>
#include <ctime>
#include <utility>

#include "headwater/version.h"
#include "server/sse.h"

namespace headwater::server {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using Clock = std::chrono::steady_clock;
using ErrorCode = boost::system::error_code;

constexpr std::size_t kReadBytes = 16 << 10;
constexpr std::size_t kWriteBytes = 64 << 10;  ///< at once
constexpr std::size_t kMostLingered = 16 << 20;
constexpr std::chrono::milliseconds kLinger{2000};

/// "Mon, 30 Nov 2026 14:00:00 GMT", made once a second.
const std::string& date_text() {
  thread_local std::time_t second = 0;
  thread_local std::string text;
  const std::time_t now = std::time(nullptr);
  if (now != second) {
    second = now;
    text = fmt::format("{:%a, %d %b %Y %H:%M:%S} GMT", fmt::gmtime(now));
  }
  return text;
}

std::string head_text(int status, std::string_view content_type, bool keep_alive) {
  std::string out = "HTTP/1.1 " + std::to_string(status) + " ";
  out += std::string_view(http::obsolete_reason(http::int_to_status(static_cast<unsigned>(status))));
  out += "\r\nServer: headwater\r\nDate: ";
  out += date_text();
  out += "\r\nContent-Type: ";
  out += content_type;
  out += keep_alive ? "\r\nConnection: keep-alive\r\n" : "\r\nConnection: close\r\n";
  out += "X-Content-Type-Options: nosniff\r\n";
  return out;
}

HttpHead head_of(const http::request<http::string_body>& message) {
  const auto text = [](const auto& view) { return std::string(view.data(), view.size()); };
  HttpHead head;
  head.method = text(message.method_string());
  const std::string target = text(message.target());
  const std::size_t mark = target.find('?');
  head.path = target.substr(0, mark);
  if (mark != std::string::npos) head.query = target.substr(mark + 1);
  head.authorization = text(message[http::field::authorization]);
  head.content_type = text(message[http::field::content_type]);
  head.host = text(message[http::field::host]);
  head.origin = text(message[http::field::origin]);
  return head;
}

}  // namespace

Session::Session(asio::ip::tcp::socket socket, SessionHost& host)
    : socket_(std::move(socket)), host_(host), buffer_(host.options.max_header_bytes + 4 * kReadBytes) {}

void Session::start() {
  ErrorCode ignored;
  socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
  expect(host_.options.idle_timeout);
  pump();
}

void Session::expect(std::chrono::milliseconds timeout) {
  deadline_ = Clock::now() + timeout;
}

void Session::next_request() {
  parser_.reset();
  head_only_ = false;
  state_ = State::idle;
  if (host_.draining && buffer_.size() == 0) return close();
  expect(host_.options.idle_timeout);
  if (buffer_.size() > 0) return read_head();
  host_.on_idle();
  pump();
}

/// Keeps a read under way, until something comes that was sent ahead.
void Session::pump() {
  if (pumping_ || state_ == State::closed || buffer_.size() > 0) return;
  pumping_ = true;
  socket_.async_read_some(buffer_.prepare(kReadBytes),
                          [self = shared_from_this()](const ErrorCode& error, std::size_t count) {
                            self->pumping_ = false;
                            if (self->state_ == State::closed) return;
                            self->buffer_.commit(count);
                            if (self->state_ == State::lingering) {
                              self->lingered_ += count;
                              self->buffer_.consume(count);
                              if (error || self->lingered_ > kMostLingered) return self->close();
                              return self->pump();
                            }
                            if (error) return self->gone();
                            if (self->state_ == State::idle) self->read_head();
                          });
}

void Session::read_head() {
  state_ = State::reading;
  expect(host_.options.read_timeout);
  parser_.emplace();
  parser_->header_limit(static_cast<std::uint32_t>(host_.options.max_header_bytes));
  parser_->body_limit(host_.options.max_body_bytes);
  http::async_read_header(socket_, buffer_, *parser_,
                          [self = shared_from_this()](const ErrorCode& error, std::size_t) { self->on_head(error); });
}

void Session::on_head(const ErrorCode& error) {
  if (state_ != State::reading) return;
  if (error == http::error::header_limit || error == http::error::buffer_overflow) {
    return refuse(431, "the request's header is too large");
  }
  if (error == http::error::body_limit) return refuse(413, "the request's body is too large");
  if (error.category() == http::make_error_code(http::error::bad_method).category() &&
      error != http::error::end_of_stream && error != http::error::partial_message) {
    return refuse(400, "not a well-formed HTTP request: " + error.message());
  }
  if (error) return gone();
  const auto& message = parser_->get();
  keep_alive_ = message.keep_alive();
  chunked_ = message.version() >= 11;
  head_only_ = message.method() == http::verb::head;
  if (const std::string_view wrong = wrong_with_head(); !wrong.empty()) return refuse(400, wrong);
  if (std::optional<HttpResponse> refusal = host_.handler.check(head_of(message))) {
    ++host_.stats.refused;
    return queue(std::move(*refusal), keep_alive_ && parser_->is_done());
  }
  if (!boost::beast::iequals(message[http::field::expect], "100-continue")) return read_body();
  writing_ = true;
  sending_ = "HTTP/1.1 100 Continue\r\n\r\n";
  asio::async_write(socket_, asio::buffer(sending_), [self = shared_from_this()](const ErrorCode& failed, std::size_t) {
    self->writing_ = false;
    if (self->state_ != State::reading) return;
    if (failed) return self->gone();
    self->read_body();
  });
}

/// What a proxy before this server may have understood otherwise; empty: nothing.
std::string_view Session::wrong_with_head() const {
  const auto& message = parser_->get();
  if (message.count(http::field::host) > 1) return "more than one Host header";
  if (message.count(http::field::transfer_encoding) == 0) return "";
  if (!parser_->chunked()) return "Transfer-Encoding: expected chunked as the last coding";
  if (message.count(http::field::content_length) > 0) return "Content-Length beside Transfer-Encoding";
  return "";
}

void Session::read_body() {
  if (parser_->is_done()) return dispatch();
  http::async_read(socket_, buffer_, *parser_, [self = shared_from_this()](const ErrorCode& error, std::size_t) {
    if (self->state_ != State::reading) return;
    if (error == http::error::body_limit) return self->refuse(413, "the request's body is too large");
    if (error == http::error::end_of_stream || error == http::error::partial_message) return self->gone();
    if (error.category() == http::make_error_code(http::error::bad_method).category()) {
      return self->refuse(400, "not a well-formed HTTP request: " + error.message());
    }
    if (error) return self->gone();
    self->dispatch();
  });
}

void Session::dispatch() {
  HttpRequest request{head_of(parser_->get()), std::move(parser_->get().body())};
  parser_.reset();
  state_ = State::handling;
  deadline_ = Clock::time_point::max();
  pump();
  try {
    host_.handler.handle(std::move(request), shared_from_this());
  } catch (const std::exception& error) {  // out of memory, for instance: others may go on
    respond({500, host_.handler.error_body(500, error.what())});
  }
}

/// An answer to what could not even be read; the connection ends with it.
void Session::refuse(int status, std::string_view message) {
  ++host_.stats.refused;
  queue({status, host_.handler.error_body(status, message)}, false);
}

void Session::respond(HttpResponse response) {
  if (state_ != State::handling) return;
  queue(std::move(response), keep_alive_);
}

void Session::queue(HttpResponse&& response, bool keep_alive) {
  keep_alive_ = keep_alive && !host_.draining;
  on_gone_ = nullptr;
  state_ = State::answering;
  pending_ += head_text(response.status, response.content_type, keep_alive_);
  for (const auto& [name, value] : response.headers) pending_ += name + ": " + value + "\r\n";
  pending_ += "Content-Length: " + std::to_string(response.body.size()) + "\r\n\r\n";
  if (!head_only_) pending_ += response.body;
  flush();
}

void Session::begin_stream(std::string_view content_type) {
  if (state_ != State::handling) return;
  if (!chunked_ || host_.draining) keep_alive_ = false;
  state_ = State::streaming;
  pending_ += head_text(200, content_type, keep_alive_);
  pending_ += "Cache-Control: no-cache\r\n";
  pending_ += chunked_ ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n";
}

bool Session::write(std::string_view data) {
  if (state_ != State::streaming) return false;
  if (pending_.size() > host_.options.max_output_bytes) {  // before this piece: one large step drops nobody
    ++host_.stats.dropped_slow;
    on_gone_ = nullptr;  // the caller learns it from the result
    close();
    return false;
  }
  if (chunked_) {
    append_chunk(pending_, data);
  } else {
    pending_ += data;
  }
  flush();
  return true;
}

void Session::end_stream() {
  if (state_ != State::streaming) return;
  on_gone_ = nullptr;
  state_ = State::answering;
  if (chunked_) pending_ += kLastChunk;
  flush();
}

void Session::on_gone(std::function<void()> callback) {
  if (state_ == State::handling || state_ == State::streaming) on_gone_ = std::move(callback);
}

void Session::flush() {
  if (writing_ || state_ == State::closed) return;
  writing_ = true;
  std::swap(sending_, pending_);
  pending_.clear();
  expect(host_.options.write_timeout);
  const auto progress = [self = shared_from_this()](const ErrorCode& error, std::size_t) -> std::size_t {
    self->expect(self->host_.options.write_timeout);
    return error ? 0 : kWriteBytes;
  };
  asio::async_write(socket_, asio::buffer(sending_), progress,
                    [self = shared_from_this()](const ErrorCode& error, std::size_t) { self->on_written(error); });
}

void Session::on_written(const ErrorCode& error) {
  writing_ = false;
  if (state_ == State::closed) return;
  if (error) return gone();
  if (!pending_.empty()) return flush();
  deadline_ = Clock::time_point::max();
  if (state_ != State::answering) return;  // a stream between two pieces
  if (sending_.capacity() > (64U << 10)) sending_ = {};
  if (!keep_alive_) return linger();
  next_request();
}

/// Closing at once would reset the connection where the client is still sending, and it would lose the answer.
void Session::linger() {
  ErrorCode error;
  socket_.shutdown(asio::ip::tcp::socket::shutdown_send, error);
  if (error) return close();
  state_ = State::lingering;
  buffer_.consume(buffer_.size());
  expect(kLinger);
  host_.on_idle();
  pump();
}

void Session::gone() {
  const std::function<void()> callback = std::exchange(on_gone_, nullptr);
  close();
  if (callback) callback();
}

void Session::close() {
  if (state_ == State::closed) return;
  state_ = State::closed;
  ErrorCode ignored;
  socket_.close(ignored);
  const std::shared_ptr<Session> self = shared_from_this();
  host_.sessions.erase(this);
  host_.stats.connections = host_.sessions.size();
  host_.on_idle();
}

void Session::finish_soon() {
  keep_alive_ = false;
  if (state_ == State::idle) close();
}

/// A client that has closed, while no read is under way that would tell.
bool Session::left_unheard() {
  if (pumping_ || (state_ != State::handling && state_ != State::streaming)) return false;
  pollfd socket{};
  socket.fd = socket_.native_handle();
  socket.events = POLLRDHUP;
  return ::poll(&socket, 1, 0) > 0;
}

void Session::check_deadline(Clock::time_point now) {
  if (left_unheard()) return gone();
  if (now < deadline_) return;
  if (state_ == State::reading && !writing_) {
    ++host_.stats.timed_out;
    ErrorCode ignored;
    socket_.cancel(ignored);  // the read under way
    return refuse(408, "the request did not arrive in time");
  }
  if (state_ != State::idle && state_ != State::lingering) ++host_.stats.timed_out;
  gone();
}

}  // namespace headwater::server
