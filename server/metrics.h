// The server's counters, in Prometheus' text form. Every metric has HELP and TYPE; docs/server.md lists them. Counters
// may be added to from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "engine/engine.h"

namespace headwater::server {

struct HttpStats;

class Metrics {
 public:
  /// `cascade_off`: why shared spans are not split; empty: they may be.
  explicit Metrics(std::string_view cascade_off = "");
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  /// After each step, on the engine's thread.
  void on_step(const engine::Engine& engine);
  /// The gauges that change without a step; on the engine's thread.
  void on_idle(const engine::Engine& engine);
  void on_first_token(double seconds);
  void on_token_gap(double seconds);
  /// `outcome`: stop, length, cancelled, error, rejected.
  void on_request_end(std::string_view endpoint, std::string_view outcome, double seconds);
  void on_response(int status);

  /// What others count, as it is when the page is asked for.
  struct Elsewhere {
    std::size_t pending_requests = 0;
    double io_cpu_seconds = 0;
    std::uint64_t lost_log_lines = 0;
  };
  /// The whole page.
  [[nodiscard]] std::string text(const HttpStats& http, const Elsewhere& elsewhere);
  static constexpr std::string_view kContentType = "text/plain; version=0.0.4; charset=utf-8";

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace headwater::server
