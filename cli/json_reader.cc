// Strict JSON objects; see json_reader.h.
#include "cli/json_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "headwater/error.h"

namespace headwater::cli {
namespace {

using nlohmann::json;

/// A value in a message: short, on one line.
std::string shown(const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 40) text = text.substr(0, 37) + "...";
  return text;
}

int line_of(std::string_view text, std::size_t offset, int first_line) {
  const std::string_view before = text.substr(0, std::min(offset, text.size()));
  return first_line + static_cast<int>(std::ranges::count(before, '\n'));
}

/// Finds repeated keys (the last of two would win silently) and endless nesting while the parser runs.
class ParseGuard {
 public:
  bool operator()(int depth, json::parse_event_t event, json& parsed) {
    too_deep_ = too_deep_ || depth > kMaxDepth;  // what is kept of it is handled by recursion
    if (depth > kMaxDepth) return false;
    if (event == json::parse_event_t::object_start) open_.emplace_back();
    if (event == json::parse_event_t::object_end && !open_.empty()) open_.pop_back();
    if (event == json::parse_event_t::key && !open_.empty()) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!open_.back().insert(key).second && repeated_.empty()) repeated_ = key;
    }
    return true;
  }
  [[nodiscard]] const std::string& repeated() const { return repeated_; }
  [[nodiscard]] bool too_deep() const { return too_deep_; }

 private:
  static constexpr int kMaxDepth = 64;
  std::vector<std::set<std::string>> open_;
  std::string repeated_;
  bool too_deep_ = false;
};

}  // namespace

void Place::fail(std::string_view field, const std::string& message) const {
  int line = first_line;
  if (!field.empty()) {
    const std::string key(field.substr(0, field.find_first_of("[.")));
    const auto at = text.find('"' + key + '"');
    if (at != std::string_view::npos) line = line_of(text, at, first_line);
  }
  throw Error(ErrorCode::io, fmt::format("{}:{}: {}{}{}", name, line, field, field.empty() ? "" : ": ", message));
}

json parse_json(const Place& place) {
  ParseGuard guard;
  try {
    json value = json::parse(
        place.text.begin(), place.text.end(),
        [&guard](int depth, json::parse_event_t event, json& parsed) { return guard(depth, event, parsed); });
    if (guard.too_deep()) place.fail("", "expected at most 64 levels of nesting");
    if (!guard.repeated().empty()) place.fail(guard.repeated(), "the key occurs twice in one object");
    return value;
  } catch (const json::parse_error& e) {
    const std::size_t at = std::min<std::size_t>(e.byte == 0 ? 0 : e.byte - 1, place.text.size());
    const std::size_t line_start = at == 0 ? 0 : place.text.rfind('\n', at - 1) + 1;  // npos + 1 = 0
    const std::string_view found = place.text.substr(at, std::min<std::size_t>(12, place.text.size() - at));
    const std::string got = at == place.text.size() ? "the end of the input" : shown(json(std::string(found)));
    throw Error(ErrorCode::io, fmt::format("{}:{}: column {}: expected JSON, got {}", place.name,
                                           line_of(place.text, at, place.first_line), at - line_start + 1, got));
  } catch (const json::exception& e) {  // a number out of range, for instance
    throw Error(ErrorCode::io, fmt::format("{}:{}: {}", place.name, place.first_line, e.what()));
  }
}

ObjectReader::ObjectReader(const json& value, const Place& place, std::string prefix)
    : value_(&value), place_(&place), prefix_(std::move(prefix)) {
  if (!value.is_object()) {
    const std::string_view field = std::string_view(prefix_).substr(0, prefix_.empty() ? 0 : prefix_.size() - 1);
    place.fail(field, "expected an object, got " + shown(value));
  }
}

bool ObjectReader::has(std::string_view key) const {
  return value_->contains(std::string(key));
}

void ObjectReader::fail(std::string_view key, const std::string& message) const {
  place_->fail(prefix_ + std::string(key), message);
}

const json* ObjectReader::find(std::string_view key) {
  seen_.emplace_back(key);
  const auto it = value_->find(std::string(key));
  return it == value_->end() ? nullptr : &*it;
}

const json& ObjectReader::require(std::string_view key, const char* kind) {
  const json* value = find(key);
  if (value == nullptr) fail(key, fmt::format("expected {}, but the key is missing", kind));
  return *value;
}

namespace {

/// An integer in [min, max]; `where` is the field or element it belongs to.
template <typename Fail>
std::int64_t checked_integer(const json& value, std::int64_t min, std::int64_t max, const Fail& fail) {
  const bool fits = value.is_number_integer() && (!value.is_number_unsigned() ||
                                                  value.get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX));
  if (!fits || value.get<std::int64_t>() < min || value.get<std::int64_t>() > max) {
    fail(fmt::format("expected an integer in [{}, {}], got {}", min, max, shown(value)));
  }
  return value.get<std::int64_t>();
}

}  // namespace

std::int64_t ObjectReader::integer(std::string_view key, std::int64_t min, std::int64_t max) {
  const json& value = require(key, "an integer");
  return checked_integer(value, min, max, [&](const std::string& message) { fail(key, message); });
}

std::int64_t ObjectReader::integer_or(std::string_view key, std::int64_t min, std::int64_t max, std::int64_t fallback) {
  return has(key) ? integer(key, min, max) : (seen_.emplace_back(key), fallback);
}

double ObjectReader::number_or(std::string_view key, double min, double max, double fallback) {
  const json* value = find(key);
  if (value == nullptr) return fallback;
  const bool fits = value->is_number() && value->get<double>() >= min && value->get<double>() <= max;
  if (!fits) {
    fail(key, fmt::format("expected a number in [{}, {}], got {}", min, max, shown(*value)));
  }
  return value->get<double>();
}

bool ObjectReader::boolean_or(std::string_view key, bool fallback) {
  const json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) fail(key, "expected true or false, got " + shown(*value));
  return value->get<bool>();
}

std::string ObjectReader::string_or(std::string_view key, std::string_view fallback) {
  const json* value = find(key);
  if (value == nullptr) return std::string(fallback);
  if (!value->is_string()) fail(key, "expected a string, got " + shown(*value));
  return value->get<std::string>();
}

std::vector<std::int64_t> ObjectReader::int64_array(std::string_view key, std::int64_t min, std::int64_t max) {
  const json& values = array(key);
  std::vector<std::int64_t> out;
  out.reserve(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    out.push_back(checked_integer(values[i], min, max,
                                  [&](const std::string& message) { fail(fmt::format("{}[{}]", key, i), message); }));
  }
  return out;
}

std::vector<std::int32_t> ObjectReader::int32_array(std::string_view key) {
  const std::vector<std::int64_t> values = int64_array(key, INT32_MIN, INT32_MAX);
  return {values.begin(), values.end()};
}

const json& ObjectReader::array(std::string_view key) {
  const json& value = require(key, "an array");
  if (!value.is_array()) fail(key, "expected an array, got " + shown(value));
  return value;
}

const json& ObjectReader::object(std::string_view key) {
  const json& value = require(key, "an object");
  if (!value.is_object()) fail(key, "expected an object, got " + shown(value));
  return value;
}

void ObjectReader::finish() const {
  for (const auto& [key, value] : value_->items()) {
    if (std::ranges::find(seen_, key) == seen_.end()) fail(key, "unknown key");
  }
}

}  // namespace headwater::cli
