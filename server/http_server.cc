// See http.h. One acceptor, one set of sessions, one clock for all timeouts: a timer of its own for every write would
// cost more than the write.
#include <algorithm>
#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <vector>

#include "headwater/error.h"
#include "server/http_session.h"

namespace headwater::server {
namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

struct HttpServer::Impl {
  Impl(const HttpOptions& options, HttpHandler handler)
      : acceptor(io), clock(io), retry(io), signals(io), work(asio::make_work_guard(io)) {
    host.options = options;
    host.handler = std::move(handler);
    host.on_idle = [this] {
      if (host.draining) stop_if_idle();
    };
    listen();
  }

  void listen();
  void accept();
  void turn_away(tcp::socket socket);
  void tick();
  void stop_if_idle();
  void stop();
  void wait_for_signal();

  asio::io_context io{1};
  tcp::acceptor acceptor;
  tcp::endpoint endpoint;
  asio::steady_timer clock;
  asio::steady_timer retry;
  asio::signal_set signals;
  std::function<void(int)> on_signal;
  asio::executor_work_guard<asio::io_context::executor_type> work;
  SessionHost host;
  bool stopped = false;
};

void HttpServer::Impl::listen() {
  // The system takes no name for every address of the machine.
  if (host.options.host.empty()) {
    throw Error(ErrorCode::invalid_argument, "host is empty, expected an address or a name to listen on");
  }
  const std::string name = host.options.host + ":" + std::to_string(host.options.port);
  try {
    tcp::resolver resolver(io);
    const auto found = resolver.resolve(host.options.host, std::to_string(host.options.port),
                                        tcp::resolver::passive | tcp::resolver::numeric_service);
    endpoint = found.begin()->endpoint();
    acceptor.open(endpoint.protocol());
    acceptor.set_option(tcp::acceptor::reuse_address(true));
    acceptor.bind(endpoint);
    acceptor.listen(asio::socket_base::max_listen_connections);
    endpoint = acceptor.local_endpoint();
  } catch (const boost::system::system_error& error) {
    throw Error(ErrorCode::io, "cannot listen on " + name + ": " + error.code().message());
  }
}

void HttpServer::Impl::accept() {
  acceptor.async_accept([this](const error_code& error, tcp::socket socket) {
    if (stopped || !acceptor.is_open()) return;
    if (error) {  // out of file descriptors, for instance: others may free some
      retry.expires_after(std::chrono::milliseconds(50));
      retry.async_wait([this](const error_code& cancelled) {
        if (!cancelled) accept();
      });
      return;
    }
    ++host.stats.accepted;
    if (host.sessions.size() >= host.options.max_connections) {
      turn_away(std::move(socket));
    } else {
      auto session = std::make_shared<Session>(std::move(socket), host);
      host.sessions.emplace(session.get(), session);
      host.stats.connections = host.sessions.size();
      session->start();
    }
    accept();
  });
}

/// Says 503 without waiting for anything.
void HttpServer::Impl::turn_away(tcp::socket socket) {
  ++host.stats.turned_away;
  const std::string body = host.handler.error_body(503, "too many connections");
  const std::string text = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n" +
                           std::string("Connection: close\r\nContent-Length: ") + std::to_string(body.size()) +
                           "\r\n\r\n" + body;
  error_code ignored;
  socket.non_blocking(true, ignored);
  socket.write_some(asio::buffer(text), ignored);
  socket.shutdown(tcp::socket::shutdown_send, ignored);
}

void HttpServer::Impl::tick() {
  const HttpOptions& options = host.options;
  const auto shortest = std::min({options.read_timeout, options.write_timeout, options.idle_timeout});
  clock.expires_after(std::clamp(shortest / 4, std::chrono::milliseconds(10), std::chrono::milliseconds(250)));
  clock.async_wait([this](const error_code& cancelled) {
    if (cancelled || stopped) return;
    const auto now = std::chrono::steady_clock::now();
    std::vector<std::shared_ptr<Session>> all;  // sessions leave the set while they are looked at
    all.reserve(host.sessions.size());
    for (const auto& [raw, session] : host.sessions) all.push_back(session);
    for (const auto& session : all) session->check_deadline(now);
    tick();
  });
}

void HttpServer::Impl::stop_if_idle() {
  const bool busy = std::ranges::any_of(host.sessions, [](const auto& entry) { return entry.second->busy(); });
  if (!busy) asio::post(io, [this] { stop(); });
}

void HttpServer::Impl::stop() {
  if (stopped) return;
  stopped = true;
  error_code ignored;
  acceptor.close(ignored);
  std::vector<std::shared_ptr<Session>> all;
  for (const auto& [raw, session] : host.sessions) all.push_back(session);
  for (const auto& session : all) session->close();
  work.reset();
  io.stop();
}

void HttpServer::Impl::wait_for_signal() {
  signals.async_wait([this](const error_code& cancelled, int signal) {
    if (cancelled) return;
    on_signal(signal);
    wait_for_signal();
  });
}

HttpServer::HttpServer(const HttpOptions& options, HttpHandler handler)
    : impl_(std::make_unique<Impl>(options, std::move(handler))) {}

HttpServer::~HttpServer() {
  impl_->stop();
}

std::uint16_t HttpServer::port() const noexcept {
  return impl_->endpoint.port();
}

bool HttpServer::is_loopback() const {
  return impl_->endpoint.address().is_loopback();
}

std::string HttpServer::address() const {
  const std::string ip = impl_->endpoint.address().to_string();
  return (impl_->endpoint.address().is_v6() ? "[" + ip + "]" : ip) + ":" + std::to_string(port());
}

void HttpServer::run() {
  impl_->accept();
  impl_->tick();
  impl_->io.run();
}

void HttpServer::post(std::function<void()> task) {
  asio::post(impl_->io, std::move(task));
}

void HttpServer::after(std::chrono::milliseconds delay, std::function<void()> task) {
  auto timer = std::make_shared<asio::steady_timer>(impl_->io, delay);
  timer->async_wait([timer, task = std::move(task)](const error_code& cancelled) {
    if (!cancelled) task();
  });
}

void HttpServer::watch_signals(std::function<void(int signal)> callback) {
  impl_->on_signal = std::move(callback);
  impl_->signals.add(SIGINT);
  impl_->signals.add(SIGTERM);
  impl_->signals.add(SIGHUP);  // of a terminal that is closed
  impl_->wait_for_signal();
}

void HttpServer::drain() {
  impl_->host.draining = true;
  std::vector<std::shared_ptr<Session>> all;
  for (const auto& [raw, session] : impl_->host.sessions) all.push_back(session);
  for (const auto& session : all) session->finish_soon();
  impl_->stop_if_idle();
}

void HttpServer::stop() {
  impl_->stop();
}

HttpStats HttpServer::stats() const noexcept {
  return impl_->host.stats;
}

}  // namespace headwater::server
