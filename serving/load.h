// Sends requests and records what comes back: a round (all clients start together, the round ends with the last of
// them) or a replay (every request at its own time).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "serving/completion.h"
#include "serving/http_client.h"
#include "serving/record.h"

namespace headwater::serving {

struct PlannedRequest {
  std::function<Prompt()> prompt;  ///< called once: before a round, or when a replayed request starts
  std::int64_t max_tokens = 0;
  double at_s = 0;  ///< replay: seconds after the first one
};

/// Where a run is. The function that is told may throw to stop it.
struct Progress {
  std::int64_t finished = 0;
  std::int64_t total = 0;
  std::int64_t running = 0;
  std::int64_t events = 0;  ///< with text, so far
};
using ProgressFunction = std::function<void(const Progress&)>;

struct LoadOptions {
  RequestOptions request;
  double patience_s = 120;           ///< without a byte for this long a request fails
  std::int64_t most_running = 1024;  ///< replay: further requests wait, and are late
};

[[nodiscard]] std::vector<Record> run_round(HttpClient& client, const std::vector<PlannedRequest>& requests,
                                            const LoadOptions& options, const ProgressFunction& progress);
/// Requests in order of time.
[[nodiscard]] std::vector<Record> run_replay(HttpClient& client, const std::vector<PlannedRequest>& requests,
                                             const LoadOptions& options, const ProgressFunction& progress);

}  // namespace headwater::serving
