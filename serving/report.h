// Levels as a table, as remarks and as JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "serving/measure.h"
#include "serving/summary.h"

namespace headwater::serving {

/// Columns: [arm,] concurrency, ok, fail, TTFT mean and p95, tok/s of a stream, of all; with counters the share of
/// launches that were cascade.
[[nodiscard]] std::string table_head(bool arms, bool metrics);
[[nodiscard]] std::string table_row(const LevelResult& level, bool arms, bool metrics);
/// One line each: why requests failed, that a level did not run cascade (or ran it though it is off), mean shared span,
/// bytes, where the steps' time went, what could not be counted.
[[nodiscard]] std::vector<std::string> remarks(const LevelResult& level);
/// What a replay adds to the table: most requests at once, lateness, tokens.
[[nodiscard]] std::string replay_line(const LevelResult& level);
/// "concurrency 8: on/off 1.034 [1.021, 1.050] tok/s, ...".
[[nodiscard]] std::string ratio_line(const PairRatio& ratio);

/// Where a pair's ratio comes from: bytes, attention's time, its share of the steps; empty where the server does not
/// count these.
[[nodiscard]] std::string explain_line(const LevelResult& on, const LevelResult& off);

[[nodiscard]] nlohmann::json to_json(const LevelResult& level);
[[nodiscard]] nlohmann::json to_json(const PairRatio& ratio);

}  // namespace headwater::serving
