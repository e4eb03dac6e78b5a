// See prometheus_text.h.
#include "serving/prometheus_text.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>
#include <vector>

namespace headwater::serving {
namespace {

struct Sample {
  std::string_view name;
  std::vector<std::pair<std::string_view, std::string>> labels;
  double value = 0;
};

void skip_spaces(std::string_view& text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
}

/// `name="value",...}`; false if malformed. Escapes in values: \\, \" and \n.
bool read_labels(std::string_view& text, Sample& sample) {
  for (;;) {
    skip_spaces(text);
    if (text.starts_with('}')) {
      text.remove_prefix(1);
      return true;
    }
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos) return false;
    std::string_view name = text.substr(0, equals);
    while (name.ends_with(' ')) name.remove_suffix(1);
    text.remove_prefix(equals + 1);
    skip_spaces(text);
    if (!text.starts_with('"')) return false;
    text.remove_prefix(1);
    std::string value;
    while (!text.empty() && text.front() != '"') {
      if (text.front() == '\\' && text.size() > 1) {
        text.remove_prefix(1);
        value += text.front() == 'n' ? '\n' : text.front();
      } else {
        value += text.front();
      }
      text.remove_prefix(1);
    }
    if (text.empty()) return false;
    text.remove_prefix(1);
    sample.labels.emplace_back(name, std::move(value));
    skip_spaces(text);
    if (text.starts_with(',')) text.remove_prefix(1);
  }
}

bool read_sample(std::string_view line, Sample& sample) {
  skip_spaces(line);
  if (line.empty() || line.front() == '#') return false;
  const std::size_t end = line.find_first_of("{ \t");
  if (end == std::string_view::npos) return false;
  sample.name = line.substr(0, end);
  line.remove_prefix(end);
  skip_spaces(line);
  if (line.starts_with('{')) {
    line.remove_prefix(1);
    if (!read_labels(line, sample)) return false;
  }
  const std::string number(line);
  char* stop = nullptr;
  sample.value = std::strtod(number.c_str(), &stop);
  return stop != number.c_str() && std::isfinite(sample.value);
}

template <typename Visit>
void for_each_sample(std::string_view text, std::string_view metric, const Visit& visit) {
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    Sample sample;
    if (line.find(metric) != std::string_view::npos && read_sample(line, sample) && sample.name == metric)
      visit(sample);
  }
}

void add_differences(std::map<std::string, double>& sums, const std::map<std::string, double>& before,
                     const std::map<std::string, double>& after) {
  for (const auto& [name, value] : after) {
    const auto earlier = before.find(name);
    sums[name] += value - (earlier == before.end() ? 0 : earlier->second);
  }
}

}  // namespace

std::map<std::string, double> sum_by_label(std::string_view exposition, std::string_view metric,
                                           std::string_view label) {
  std::map<std::string, double> sums;
  for_each_sample(exposition, metric, [&](const Sample& sample) {
    for (const auto& [name, value] : sample.labels) {
      if (name == label) sums[value] += sample.value;
    }
  });
  return sums;
}

std::optional<double> sum_of(std::string_view exposition, std::string_view metric) {
  std::optional<double> sum;
  for_each_sample(exposition, metric, [&](const Sample& sample) { sum = sum.value_or(0) + sample.value; });
  return sum;
}

Counters Counters::from(std::string_view exposition) {
  Counters out;
  out.launches = sum_by_label(exposition, "headwater_decode_launches_total", "path");
  for (const std::string_view name : kTotals) {
    const auto sum = sum_of(exposition, "headwater_" + std::string(name) + "_total");
    if (sum) out.totals.emplace(name, *sum);
  }
  return out;
}

void Counters::add(const Counters& before, const Counters& after) {
  add_differences(launches, before.launches, after.launches);
  add_differences(totals, before.totals, after.totals);
}

double Counters::total(const std::string& name) const {
  const auto found = totals.find(name);
  return found == totals.end() ? 0 : found->second;
}

double Counters::total_launches() const {
  double sum = 0;
  for (const auto& [path, count] : launches) sum += count;
  return sum;
}

double Counters::cascade_launches() const {
  const auto found = launches.find("cascade");
  return found == launches.end() ? 0 : found->second;
}

}  // namespace headwater::serving
