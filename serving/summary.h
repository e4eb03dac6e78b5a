// Numbers of one level of load from its records. Pure: the same records, the same numbers.
//
// ttft          from just before a request's connection is opened to the first event that carries text.
// decode_tps    of one stream: (completion tokens - 1) / (last event with text - first one); the mean over the streams
//               that have both. It leaves out the prompt.
// aggregate_tps completion tokens of all ok requests / the time in which requests were running: for every round, from
//               its first start to its last end. It includes the prompts.
// p95           the smallest value that at least 95 % of the values do not exceed; p50 likewise.
// Failed requests are counted and enter nothing else, except that their time is time.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "serving/prometheus_text.h"
#include "serving/record.h"

namespace headwater::serving {

struct LevelResult {
  std::string arm;               ///< of a pair: "on" or "off"; else empty
  std::int64_t concurrency = 0;  ///< clients; of a replay: the most requests that ran at once
  std::int64_t rounds = 0;
  std::int64_t ok = 0;
  std::int64_t fail = 0;
  double wall_s = 0;  ///< sum over rounds
  double ttft_mean_s = 0;
  double ttft_p50_s = 0;
  double ttft_p95_s = 0;
  double gap_p50_s = 0;  ///< between successive events with text of one stream
  double gap_p95_s = 0;
  double decode_tps = 0;
  double aggregate_tps = 0;
  double late_mean_s = 0;  ///< replay: start after the time that the trace asks for
  std::int64_t completion_tokens = 0;
  std::optional<std::int64_t> prompt_tokens;  ///< where the server counts them
  std::optional<std::int64_t> cached_tokens;
  std::int64_t counted_events = 0;             ///< ok requests whose tokens had to be counted as events
  std::map<std::string, std::int64_t> errors;  ///< message -> how often
  std::optional<Counters> counters;            ///< with --metrics: what the server counted meanwhile
};

/// Smallest value that at least `share` of the values do not exceed; 0 for none.
[[nodiscard]] double percentile(std::vector<double> values, double share);
/// The most requests under way at one moment.
[[nodiscard]] std::int64_t most_at_once(const std::vector<Record>& records);
/// `rounds`: the records of each round, one after another in time.
[[nodiscard]] LevelResult summarize(const std::vector<std::vector<Record>>& rounds);

}  // namespace headwater::serving
