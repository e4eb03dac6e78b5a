// Levels of load on one server, or on two whose rounds take turns (a pair: the same prompts in the same round, the
// order swapped every round, so that drift of the machine falls on both alike).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/stats.h"
#include "serving/child.h"
#include "serving/http_client.h"
#include "serving/load.h"
#include "serving/prompts.h"
#include "serving/summary.h"

namespace headwater::serving {

/// A server under load.
class Server {
 public:
  /// `metrics`: read its counters around every round. An empty model name is the first of GET /v1/models.
  Server(const Url& url, const std::string& api_key, LoadOptions options, bool metrics, std::string arm = "");

  /// Waits until GET /ready (where there is none, GET /v1/models) is answered with 200; Error(io) after `seconds`, or
  /// when `child` (may be null) ends. `tick` is called meanwhile and may throw.
  void wait_until_ready(double seconds, Child* child, const std::function<void()>& tick);
  /// Finds the model's name. Error(io) if there is no server.
  void find_model();

  [[nodiscard]] HttpClient& client() noexcept { return client_; }
  [[nodiscard]] LoadOptions& options() noexcept { return options_; }
  [[nodiscard]] const std::string& model() const noexcept { return options_.request.model; }
  [[nodiscard]] const std::string& arm() const noexcept { return arm_; }
  [[nodiscard]] bool metrics() const noexcept { return metrics_; }
  /// Error(io) where GET /metrics is not answered with 200.
  [[nodiscard]] Counters counters();

 private:
  HttpClient client_;
  LoadOptions options_;
  bool metrics_;
  std::string arm_;
};

struct LevelPlan {
  std::int64_t shared_tokens = 0;
  std::int64_t own_tokens = 1;
  std::int64_t max_tokens = 1;
  bool cold = false;  ///< every round has a document of its own, and nothing warms the prefix cache
  int rounds = 1;
};

using LevelProgress = std::function<void(const std::string& arm, int round, const Progress&)>;

/// One level: for every server the summary of all rounds, and of each round.
struct LevelMeasurement {
  std::vector<LevelResult> arms;
  std::vector<std::vector<LevelResult>> rounds;  ///< [round][server]
};

/// Makes the prompts of all levels; one for all servers, which must have the same tokenizer.
class LevelRunner {
 public:
  LevelRunner(std::vector<Server*> servers, PromptMaker& maker, LevelPlan plan);

  /// Unless cold, one request with the document warms each server first; Error(io) if it fails.
  [[nodiscard]] LevelMeasurement run(std::int64_t concurrency, const LevelProgress& progress);

 private:
  [[nodiscard]] std::vector<PlannedRequest> draw(std::int64_t count, std::int64_t max_tokens);
  void warm(const ProgressFunction& progress);

  std::vector<Server*> servers_;
  PromptMaker& maker_;
  LevelPlan plan_;
  PromptMaker::Part document_;
};

/// First server over second, round by round: the median with its 95 % interval.
struct PairRatio {
  std::int64_t concurrency = 0;
  std::size_t rounds = 0;
  bench::Interval aggregate;  ///< above 1: the first is faster
  bench::Interval decode;     ///< above 1: the first is faster
  bench::Interval ttft;       ///< below 1: the first is faster
};

/// Rounds in which either server failed a request are left out.
[[nodiscard]] PairRatio ratio_of(const LevelMeasurement& level);

/// `passed` unless the 95 % interval of the ratio of aggregate rates lies below `least`; not judged below
/// bench::kMinPairs rounds.
[[nodiscard]] bench::Verdict judge(const PairRatio& ratio, double least);

}  // namespace headwater::serving
