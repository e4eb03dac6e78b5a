// Strict reading of JSON objects: every key must be known and is read once, with its type and range; a message names
// the file, the line, the field, what was expected and what was found.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace headwater::cli {

/// Where in an input something went wrong. `text` is what the line numbers of fields are found in.
struct Place {
  std::string_view name;  ///< file name
  std::string_view text;  ///< the object's own text
  int first_line = 1;     ///< line of its first character in the file

  /// Throws Error(io) "name:line: field: message". The line is that of the field's key, where it occurs.
  [[noreturn]] void fail(std::string_view field, const std::string& message) const;
};

/// Parses one JSON value; a syntax error or a repeated key is refused with its line and column.
[[nodiscard]] nlohmann::json parse_json(const Place& place);

/// One object. Call the getters, then finish(), which refuses keys that nobody asked for.
class ObjectReader {
 public:
  /// `prefix` precedes field names in messages ("nodes[3]."); the value must be an object.
  ObjectReader(const nlohmann::json& value, const Place& place, std::string prefix = "");

  [[nodiscard]] bool has(std::string_view key) const;
  [[nodiscard]] std::int64_t integer(std::string_view key, std::int64_t min, std::int64_t max);
  [[nodiscard]] std::int64_t integer_or(std::string_view key, std::int64_t min, std::int64_t max,
                                        std::int64_t fallback);
  [[nodiscard]] double number_or(std::string_view key, double min, double max, double fallback);
  [[nodiscard]] bool boolean_or(std::string_view key, bool fallback);
  [[nodiscard]] std::string string_or(std::string_view key, std::string_view fallback);
  [[nodiscard]] std::vector<std::int32_t> int32_array(std::string_view key);
  [[nodiscard]] std::vector<std::int64_t> int64_array(std::string_view key, std::int64_t min, std::int64_t max);
  /// Any value, for nested readers.
  [[nodiscard]] const nlohmann::json& array(std::string_view key);
  [[nodiscard]] const nlohmann::json& object(std::string_view key);
  [[noreturn]] void fail(std::string_view key, const std::string& message) const;
  void finish() const;

 private:
  const nlohmann::json* find(std::string_view key);
  const nlohmann::json& require(std::string_view key, const char* kind);

  const nlohmann::json* value_;
  const Place* place_;
  std::string prefix_;
  std::vector<std::string> seen_;
};

}  // namespace headwater::cli
