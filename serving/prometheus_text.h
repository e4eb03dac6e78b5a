// The counters that prove which path ran, read from Prometheus' text format.
#pragma once

#include <array>
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

/// The server's counters at one moment, or what was counted between two. A counter that the server does not have is
/// not in `totals`.
struct Counters {
  std::map<std::string, double> launches;  ///< decode launches by path; empty: the server has no such counter
  std::map<std::string, double> totals;    ///< "kv_bytes_read" is headwater_kv_bytes_read_total; see kTotals

  [[nodiscard]] static Counters from(std::string_view exposition);
  /// Adds what was counted from `before` to `after`.
  void add(const Counters& before, const Counters& after);
  [[nodiscard]] double total_launches() const;
  [[nodiscard]] double cascade_launches() const;
  /// 0 where it is not known.
  [[nodiscard]] double total(const std::string& name) const;
};

/// The counters that are kept: headwater_NAME_total.
inline constexpr std::array<std::string_view, 12> kTotals = {
    "kv_bytes_read", "kv_bytes_saved", "cascade_spans",     "cascade_shared_tokens", "cascade_member_sequences",
    "steps",         "step_seconds",   "attention_seconds", "append_seconds",        "product_seconds",
    "plan_seconds",  "forward_seconds"};

}  // namespace headwater::serving
