// Order statistics of samples, and the interval of a median that gates are judged by.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace headwater::bench {

/// Median of a copy; 0 for none.
[[nodiscard]] inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

[[nodiscard]] inline double geometric_mean(const std::vector<double>& values) {
  if (values.empty()) return 0;
  double sum = 0;
  for (const double v : values) sum += std::log(v);
  return std::exp(sum / static_cast<double>(values.size()));
}

struct Interval {
  double low = 0;
  double middle = 0;
  double high = 0;
};

/// The median with its 95 % interval from order statistics (no assumption on the distribution): the values at ranks
/// n/2 -+ 1.96 sqrt(n)/2. With fewer than six values the interval is the range.
[[nodiscard]] inline Interval median_interval(std::vector<double> values) {
  if (values.empty()) return {};
  std::ranges::sort(values);
  const auto n = static_cast<double>(values.size());
  const double reach = 1.96 * std::sqrt(n) / 2;
  const double last = n - 1;
  const auto low = static_cast<std::size_t>(std::clamp(std::floor(n / 2 - reach), 0.0, last));
  const auto high = static_cast<std::size_t>(std::clamp(std::ceil(n / 2 + reach), 0.0, last));
  return {values[low], median(values), values[high]};
}

/// Pairs below which a gate on ratios of times decides nothing.
inline constexpr int kMinPairs = 30;

/// What a gate came to.
enum class Verdict { passed, missed, not_judged };

[[nodiscard]] inline std::string_view name_of(Verdict verdict) noexcept {
  return verdict == Verdict::passed ? "passed" : verdict == Verdict::missed ? "missed" : "not judged";
}

/// Of a gate that `pairs` interleaved pairs decide.
[[nodiscard]] inline Verdict verdict_of_pairs(std::size_t pairs, bool passed) noexcept {
  if (pairs < kMinPairs) return Verdict::not_judged;
  return passed ? Verdict::passed : Verdict::missed;
}

struct Line {
  double base = 0;
  double slope = 0;
};

/// Least squares of the relative error.
[[nodiscard]] inline Line fit_line(const std::vector<std::pair<double, double>>& points) {
  double sw = 0;
  double sx = 0;
  double sy = 0;
  double sxx = 0;
  double sxy = 0;
  for (const auto& [x, y] : points) {
    const double w = 1 / (y * y);
    sw += w;
    sx += w * x;
    sy += w * y;
    sxx += w * x * x;
    sxy += w * x * y;
  }
  Line line;
  line.slope = (sw * sxy - sx * sy) / (sw * sxx - sx * sx);
  line.base = (sy - line.slope * sx) / sw;
  return line;
}

/// A constant of the cost model from seconds.
[[nodiscard]] inline std::int64_t picoseconds(double seconds, double least = 1) {
  return static_cast<std::int64_t>(std::llround(std::max(seconds * 1e12, least)));
}

[[nodiscard]] inline double in_seconds(std::int64_t ps) {
  return static_cast<double>(ps) * 1e-12;
}

}  // namespace headwater::bench
