// The counters that prove which path ran, read from Prometheus' text format.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace headwater::serving {

/// Sums of one metric's samples by the value of one label: of
/// `headwater_decode_launches_total{path="flat"} 12` by "path": {"flat": 12}. Lines that are no sample are skipped.
[[nodiscard]] std::map<std::string, double> sum_by_label(std::string_view exposition, std::string_view metric,
                                                         std::string_view label);
/// Sum over all samples of a metric; nothing where it has none.
[[nodiscard]] std::optional<double> sum_of(std::string_view exposition, std::string_view metric);

/// The server's counters at one moment. Differences say what happened in between.
struct Counters {
  std::map<std::string, double> launches;  ///< by path; empty: the server has no such counter
  std::optional<double> kv_bytes_read;
  std::optional<double> kv_bytes_saved;
  std::optional<double> shared_tokens;
  std::optional<double> member_sequences;
  std::optional<double> spans;

  [[nodiscard]] static Counters from(std::string_view exposition);
  /// Adds what was counted from `before` to `after`.
  void add(const Counters& before, const Counters& after);
  [[nodiscard]] double total_launches() const;
  [[nodiscard]] double cascade_launches() const;
};

}  // namespace headwater::serving
