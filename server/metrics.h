// The server's counters, in Prometheus' text form. Every metric has HELP and TYPE; docs/server.md lists them. Counters
// may be added to from any thread.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "engine/engine.h"

namespace headwater::server {

struct HttpStats;

class Metrics {
 public:
  Metrics();
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  /// After each step, on the engine's thread.
  void on_step(const engine::Engine& engine);
  /// The gauges that change without a step; on the engine's thread.
  void on_idle(const engine::Engine& engine);
  /// Why cascade is off; empty: it is not.
  void set_cascade_off(std::string_view reason);

  void on_first_token(double seconds);
  void on_token_gap(double seconds);
  /// `outcome`: stop, length, cancelled, error, rejected.
  void on_request_end(std::string_view endpoint, std::string_view outcome, double seconds);
  void on_response(int status);
  void set_queue_length(std::size_t requests);
  void set_http(const HttpStats& stats, double io_cpu_seconds, std::uint64_t lost_log_lines);

  /// The whole page.
  [[nodiscard]] std::string text() const;
  static constexpr std::string_view kContentType = "text/plain; version=0.0.4; charset=utf-8";

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace headwater::server
