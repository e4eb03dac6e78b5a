// See fake_server.h.
#include "fake_server.h"

#include <fmt/format.h>

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <chrono>
#include <functional>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

namespace headwater::test {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;
using nlohmann::json;
using Request = http::request<http::string_body>;

void wait(double seconds) {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

std::string answer(int status, const std::string& body, const char* type = "application/json") {
  return fmt::format("HTTP/1.1 {} X\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}", status,
                     type, body.size(), body);
}

std::string chunk(const std::string& text) {
  return fmt::format("{:x}\r\n{}\r\n", text.size(), text);
}

}  // namespace

std::vector<std::int32_t> fake_tokens(const std::string& text) {
  std::vector<std::int32_t> tokens;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const auto id = static_cast<std::int32_t>(std::hash<std::string>()(word) % 30000);
    tokens.push_back(id);
    if (word.size() >= 7) tokens.push_back(id + 1);
  }
  return tokens;
}

struct FakeServer::State {
  explicit State(FakeOptions given) : options(std::move(given)) {}

  FakeOptions options;
  asio::io_context context;
  tcp::acceptor acceptor{context};
  std::thread accepting;
  std::vector<std::thread> connections;
  std::atomic<bool> stopping{false};
  mutable std::mutex mutex;
  std::vector<json> bodies;
  int running = 0;
  int most = 0;
  int ready_asked = 0;
  std::int64_t flat = 0;
  std::int64_t cascade = 0;

  void serve(tcp::socket socket);
  std::string simple(const Request& request);
  void complete(tcp::socket& socket, const Request& request);
  void stream(tcp::socket& socket, const json& body, bool chat, const std::function<void()>& over);
  void send(tcp::socket& socket, const std::string& bytes) const;
};

void FakeServer::State::send(tcp::socket& socket, const std::string& bytes) const {
  if (!options.byte_by_byte) {
    asio::write(socket, asio::buffer(bytes));
    return;
  }
  for (const char& byte : bytes) asio::write(socket, asio::buffer(&byte, 1));
}

std::string FakeServer::State::simple(const Request& request) {
  const std::string path(request.target());
  const std::lock_guard lock(mutex);
  if (path == "/ready") return answer(ready_asked++ < options.not_ready ? 503 : 200, "{}");
  if (path == "/v1/models") return answer(200, R"({"object":"list","data":[{"id":"fake-model","object":"model"}]})");
  if (path == "/metrics" && options.metrics) {
    return answer(200,
                  fmt::format("# HELP headwater_decode_launches_total Launches.\n"
                              "# TYPE headwater_decode_launches_total counter\n"
                              "headwater_decode_launches_total{{path=\"flat\"}} {}\n"
                              "headwater_decode_launches_total{{path=\"cascade\"}} {}\n",
                              flat, cascade),
                  "text/plain; version=0.0.4");
  }
  if (path == "/tokenize" && options.tokenizer) {
    const auto tokens = fake_tokens(json::parse(request.body()).at("prompt").get<std::string>());
    return answer(200, json{{"count", tokens.size()}, {"tokens", tokens}}.dump());
  }
  return answer(404, R"({"error":{"message":"no such path"}})");
}

void FakeServer::State::serve(tcp::socket socket) {
  try {
    boost::beast::flat_buffer buffer;
    Request request;
    http::read(socket, buffer, request);
    const std::string path(request.target());
    if (!options.api_key.empty() && request[http::field::authorization] != "Bearer " + options.api_key) {
      send(socket, answer(401, R"({"error":{"message":"wrong key"}})"));
    } else if (path.ends_with("/completions")) {
      complete(socket, request);
    } else {
      send(socket, simple(request));
    }
    socket.shutdown(tcp::socket::shutdown_both);
  } catch (const std::exception&) {  // the client is gone
  }
}

void FakeServer::State::complete(tcp::socket& socket, const Request& request) {
  const bool chat = request.target().find("/chat/") != std::string_view::npos;
  const json body = json::parse(request.body());
  bool refuse = false;
  {
    const std::lock_guard lock(mutex);
    bodies.push_back(body);
    refuse = options.fail_every > 0 && bodies.size() % static_cast<std::size_t>(options.fail_every) == 0;
    most = std::max(most, ++running);
  }
  bool counted = true;
  const auto over = [&] {
    const std::lock_guard lock(mutex);
    if (std::exchange(counted, false)) --running;
  };
  if (refuse) {
    send(socket, answer(503, R"({"error":{"message":"the queue is full","type":"overloaded"}})"));
  } else if (!chat && body.at("prompt").is_array() && !options.token_lists) {
    send(socket, answer(400, R"({"error":{"message":"prompt must be a string"}})"));
  } else {
    try {
      stream(socket, body, chat, over);
    } catch (const std::exception&) {
    }
  }
  over();
}

/// Calls `over` before the client can see that the answer is complete.
void FakeServer::State::stream(tcp::socket& socket, const json& body, bool chat, const std::function<void()>& over) {
  const auto event = [&](const std::string& text) {
    json choice = {{"index", 0}, {"finish_reason", nullptr}};
    if (chat) {
      choice["delta"] = {{"content", text}};
    } else {
      choice["text"] = text;
    }
    return "data: " + json{{"choices", json::array({choice})}}.dump() + "\n\n";
  };
  send(socket, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n");
  if (options.empty_first) send(socket, chunk(event("")));
  const int tokens = body.at("max_tokens").get<int>();
  for (int i = 0; i < tokens; ++i) {
    wait(i == 0 ? options.first_s : options.gap_s);
    if (i == options.drop_after) return;
    if (i == options.error_after) {
      send(socket, chunk("data: {\"error\":{\"message\":\"out of pages\"}}\n\n"));
      break;
    }
    {
      const std::lock_guard lock(mutex);
      ++(options.cascade && running > 1 ? cascade : flat);
    }
    send(socket, chunk(event(" token")));
  }
  over();
  if (options.usage) {
    const std::size_t in = !chat && body.at("prompt").is_array() ? body["prompt"].size() : 7;
    send(socket, chunk("data: " +
                       json{{"choices", json::array()},
                            {"usage",
                             {{"prompt_tokens", in},
                              {"completion_tokens", tokens},
                              {"prompt_tokens_details", {{"cached_tokens", in / 2}}}}}}
                           .dump() +
                       "\n\n"));
  }
  if (options.done) send(socket, chunk("data: [DONE]\n\n"));
  send(socket, "0\r\n\r\n");
}

FakeServer::FakeServer(FakeOptions options) : state_(std::make_shared<State>(std::move(options))) {
  State& state = *state_;
  const tcp::endpoint endpoint(asio::ip::address_v4::loopback(), static_cast<std::uint16_t>(state.options.port));
  state.acceptor.open(endpoint.protocol());
  state.acceptor.set_option(tcp::acceptor::reuse_address(true));
  state.acceptor.bind(endpoint);
  state.acceptor.listen(1024);
  state.accepting = std::thread([&state] {
    for (;;) {
      error_code error;
      tcp::socket socket(state.context);
      state.acceptor.accept(socket, error);
      if (state.stopping) return;
      if (error) continue;
      socket.set_option(tcp::no_delay(true), error);
      state.connections.emplace_back([&state, s = std::move(socket)]() mutable { state.serve(std::move(s)); });
    }
  });
}

FakeServer::~FakeServer() {
  state_->stopping = true;
  try {  // wakes the acceptor
    tcp::socket(state_->context).connect({asio::ip::address_v4::loopback(), static_cast<std::uint16_t>(port())});
  } catch (const std::exception&) {
  }
  state_->accepting.join();
  for (std::thread& connection : state_->connections) connection.join();
}

int FakeServer::port() const {
  return state_->acceptor.local_endpoint().port();
}

std::string FakeServer::url() const {
  return fmt::format("http://127.0.0.1:{}", port());
}

std::vector<json> FakeServer::completions() const {
  const std::lock_guard lock(state_->mutex);
  return state_->bodies;
}

int FakeServer::most_at_once() const {
  const std::lock_guard lock(state_->mutex);
  return state_->most;
}

}  // namespace headwater::test
