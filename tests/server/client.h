// A blocking HTTP client over a plain socket, so that tests can send what no library would.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

namespace headwater::test {

struct Reply {
  int status = 0;
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;
  [[nodiscard]] nlohmann::json json() const { return nlohmann::json::parse(body); }
};

class Client {
 public:
  explicit Client(std::uint16_t port, int receive_buffer = 0) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    if (receive_buffer > 0) setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    const timeval timeout{120, 0};  // sanitizers on a busy machine
    setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      ::close(socket_);
      throw std::runtime_error("connect failed");
    }
  }
  ~Client() { close(); }
  Client(Client&& other) noexcept : socket_(std::exchange(other.socket_, -1)), buffer_(std::move(other.buffer_)) {}
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void close() {
    if (socket_ >= 0) ::close(socket_);
    socket_ = -1;
  }
  void close_sending() { ::shutdown(socket_, SHUT_WR); }

  /// False: the server has closed.
  bool send(std::string_view text) {
    while (!text.empty()) {
      const ssize_t count = ::send(socket_, text.data(), text.size(), MSG_NOSIGNAL);
      if (count <= 0) return false;
      text.remove_prefix(static_cast<std::size_t>(count));
    }
    return true;
  }

  static std::string request_text(std::string_view method, std::string_view path, std::string_view body = "",
                                  std::string_view headers = "") {
    std::string text = std::string(method) + " " + std::string(path) + " HTTP/1.1\r\nHost: localhost\r\n";
    text += headers;
    if (method == "POST") {
      text += "Content-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) + "\r\n";
    }
    return text + "\r\n" + std::string(body);
  }

  Reply get(std::string_view path, std::string_view headers = "") {
    send(request_text("GET", path, "", headers));
    return read_reply();
  }
  Reply post_text(std::string_view path, std::string_view body, std::string_view headers = "") {
    send(request_text("POST", path, body, headers));
    return read_reply();
  }
  Reply post(std::string_view path, const nlohmann::json& body) { return post_text(path, body.dump()); }

  /// Status and headers; the body stays to be read. status 0: the server has closed without a word.
  Reply read_head() {
    Reply reply;
    std::string line = read_line();
    if (line.size() < 12) return reply;
    reply.status = std::atoi(line.c_str() + 9);
    while (!(line = read_line()).empty()) {
      const std::size_t colon = line.find(": ");
      std::string name = line.substr(0, colon);
      for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      reply.headers[name] = line.substr(colon + 2);
    }
    return reply;
  }
  Reply read_reply() {
    Reply reply = read_head();
    if (reply.status == 100) reply = read_head();
    if (reply.headers.contains("content-length")) {
      reply.body = read_exactly(std::stoul(reply.headers["content-length"]));
    } else if (reply.headers.contains("transfer-encoding")) {
      for (std::string chunk; !(chunk = read_chunk()).empty();) reply.body += chunk;
    } else {
      while (fill()) continue;
      reply.body = std::exchange(buffer_, "");
    }
    return reply;
  }
  /// One chunk; empty: the last, or the server has closed.
  std::string read_chunk() {
    const std::string size = read_line();
    if (size.empty()) return "";
    const std::string data = read_exactly(std::stoul(size, nullptr, 16));
    (void)read_line();
    return data;
  }
  /// Whether the server closes without sending more.
  bool closed_by_server() {
    while (fill()) continue;
    return true;
  }
  [[nodiscard]] const std::string& rest() const { return buffer_; }
  /// Throws when the server closes before.
  std::string read_exactly(std::size_t count) {
    while (buffer_.size() < count) {
      if (!fill()) throw std::runtime_error("the server closed inside a body");
    }
    std::string data = buffer_.substr(0, count);
    buffer_.erase(0, count);
    return data;
  }

 private:
  bool fill() {
    char bytes[16384];
    const ssize_t count = ::recv(socket_, bytes, sizeof bytes, 0);
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) throw std::runtime_error("no answer within 120 s");
    if (count <= 0) return false;
    buffer_.append(bytes, static_cast<std::size_t>(count));
    return true;
  }
  std::string read_line() {
    std::size_t end = 0;
    while ((end = buffer_.find("\r\n")) == std::string::npos) {
      if (!fill()) return "";
    }
    std::string line = buffer_.substr(0, end);
    buffer_.erase(0, end + 2);
    return line;
  }

  int socket_;
  std::string buffer_;
};

/// The JSON of a stream's events, [DONE] (which must be the last) left out.
inline std::vector<nlohmann::json> events_of(const std::string& body) {
  std::vector<nlohmann::json> events;
  bool done = false;
  std::size_t at = 0;
  while (at < body.size()) {
    const std::size_t end = body.find("\n\n", at);
    if (end == std::string::npos || body.compare(at, 6, "data: ") != 0) throw std::runtime_error("not an event stream");
    const std::string data = body.substr(at + 6, end - at - 6);
    if (done) throw std::runtime_error("an event after [DONE]");
    done = data == "[DONE]";
    if (!done) events.push_back(nlohmann::json::parse(data));
    at = end + 2;
  }
  if (!done) throw std::runtime_error("no [DONE]");
  return events;
}

}  // namespace headwater::test
