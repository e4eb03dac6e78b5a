// See summary.h.
#include "serving/summary.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace headwater::serving {
namespace {

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

/// First start to last end.
double wall_of(const std::vector<Record>& records) {
  if (records.empty()) return 0;
  double begin = records.front().start;
  double end = records.front().end;
  for (const Record& r : records) {
    begin = std::min(begin, r.start);
    end = std::max(end, r.end);
  }
  return end - begin;
}

/// Sums what the server says, where it says it.
void add_count(std::optional<std::int64_t>& sum, std::int64_t count) {
  if (count >= 0) sum = sum.value_or(0) + count;
}

}  // namespace

double percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(values.size()) - 1e-9));
  return values[std::clamp<std::size_t>(rank, 1, values.size()) - 1];
}

std::int64_t most_at_once(const std::vector<Record>& records) {
  std::vector<std::pair<double, int>> changes;  // an end before a start of the same moment
  for (const Record& r : records) {
    changes.emplace_back(r.start, 1);
    changes.emplace_back(r.end, -1);
  }
  std::ranges::sort(changes);
  std::int64_t running = 0;
  std::int64_t most = 0;
  for (const auto& [time, change] : changes) {
    running += change;
    most = std::max(most, running);
  }
  return most;
}

LevelResult summarize(const std::vector<std::vector<Record>>& rounds) {
  LevelResult out;
  out.rounds = std::ssize(rounds);
  std::vector<double> ttft;
  std::vector<double> rates;
  std::vector<double> gaps;
  std::vector<double> late;
  for (const std::vector<Record>& round : rounds) {
    out.wall_s += wall_of(round);
    for (const Record& r : round) {
      if (r.due > 0) late.push_back(std::max(r.start - r.due, 0.0));
      if (!r.ok()) {
        ++out.fail;
        ++out.errors[r.error];
        continue;
      }
      ++out.ok;
      out.completion_tokens += r.completion_tokens;
      out.counted_events += r.counted_events ? 1 : 0;
      add_count(out.prompt_tokens, r.prompt_tokens);
      add_count(out.cached_tokens, r.cached_tokens);
      ttft.push_back(r.ttft());
      for (std::size_t i = 1; i < r.arrivals.size(); ++i) gaps.push_back(r.arrivals[i] - r.arrivals[i - 1]);
      const double decoding = r.arrivals.back() - r.arrivals.front();
      if (decoding > 0 && r.completion_tokens > 1)
        rates.push_back(static_cast<double>(r.completion_tokens - 1) / decoding);
    }
  }
  out.ttft_mean_s = mean(ttft);
  out.ttft_p50_s = percentile(ttft, 0.50);
  out.ttft_p95_s = percentile(ttft, 0.95);
  out.gap_p50_s = percentile(gaps, 0.50);
  out.gap_p95_s = percentile(gaps, 0.95);
  out.decode_tps = mean(rates);
  out.late_mean_s = mean(late);
  if (out.wall_s > 0) out.aggregate_tps = static_cast<double>(out.completion_tokens) / out.wall_s;
  return out;
}

}  // namespace headwater::serving
