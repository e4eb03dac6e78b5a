// The table of environment variables. The library itself never reads the environment: programs hand a lookup to
// PlanOptions::from_env.
#include <algorithm>
#include <cctype>
#include <charconv>
#include <string>
#include <string_view>

#include "headwater/options.h"

namespace headwater {
namespace {

std::string trimmed_lower(std::string_view s) {
  const auto space = [](unsigned char c) { return std::isspace(c) != 0; };
  while (!s.empty() && space(s.front())) s.remove_prefix(1);
  while (!s.empty() && space(s.back())) s.remove_suffix(1);
  std::string out(s);
  std::ranges::transform(out, out.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

/// A positive integer, or `fallback` for anything else.
int positive_or(const char* text, int fallback) {
  if (text == nullptr) return fallback;
  const std::string s = trimmed_lower(text);
  int value = 0;
  const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), value);
  return error == std::errc() && end == s.data() + s.size() && value > 0 ? value : fallback;
}

CascadeSwitch switch_or(const char* text, CascadeSwitch fallback) {
  if (text == nullptr) return fallback;
  const std::string s = trimmed_lower(text);
  if (s == "1" || s == "true" || s == "on" || s == "yes") return CascadeSwitch::on;
  if (s == "0" || s == "false" || s == "off" || s == "no") return CascadeSwitch::off;
  return fallback;
}

}  // namespace

PlanOptions PlanOptions::from_env(const std::function<const char*(const char*)>& lookup, PlanOptions base) {
  base.cascade = switch_or(lookup("HEADWATER_CASCADE_ATTENTION"), base.cascade);
  base.min_shared_pages = positive_or(lookup("HEADWATER_CASCADE_MIN_SHARED_PAGES"), base.min_shared_pages);
  base.min_members = positive_or(lookup("HEADWATER_CASCADE_MIN_MEMBERS"), base.min_members);
  return base;
}

}  // namespace headwater
