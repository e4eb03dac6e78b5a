// HTTP on one thread: any number of exchanges at once, driven by run(). Every exchange has a connection of its own,
// opened when it starts, so that its first byte is timed from the connect on. The network library stays in the source.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "serving/url.h"

namespace headwater::serving {

struct Answer {
  int status = 0;
  std::string body;
};

/// What an exchange reports, in this order; each call is made from run().
struct Listener {
  std::function<void(int status)> on_status;
  std::function<void(std::string_view bytes)> on_body;   ///< pieces of the body as they come, chunk framing removed
  std::function<void(const std::string& error)> on_end;  ///< once; empty: the whole answer is there
};

class HttpClient {
 public:
  /// `api_key`: sent as a bearer token unless empty.
  HttpClient(Url url, std::string api_key);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  [[nodiscard]] const Url& url() const noexcept;

  /// Opens a connection and sends the request. `seconds` without a byte of progress end the exchange with an error.
  void post(const std::string& path, std::string body, double seconds, Listener listener);
  /// Calls `action` at `time` (seconds of bench::now()).
  void at(double time, std::function<void()> action);
  /// Works until every exchange has ended and every action was called. `tick` is called ten times a second; what it
  /// throws ends the run. An exchange that was cut off that way reports nothing.
  void run(const std::function<void()>& tick);

  /// One exchange, waited for; only where no other is under way. Error(io) names the address and the reason.
  [[nodiscard]] Answer get_now(const std::string& path, double seconds = 30);
  [[nodiscard]] Answer post_now(const std::string& path, const std::string& body, double seconds = 120);

 private:
  struct Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace headwater::serving
