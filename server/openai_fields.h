// Reading fields of a JSON object that a client sent; null counts as absent. Every getter refuses a wrong type or range
// with an ApiError that names the field.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "server/openai.h"

namespace headwater::server {

/// Throws the 400 of a field.
[[noreturn]] void refuse_field(const std::string& param, const std::string& message);
/// The same for something that OpenAI has and this server has not.
[[noreturn]] void refuse_unsupported(const std::string& param, const std::string& message);
/// "a string", "an array", ...
[[nodiscard]] std::string_view kind_of(const nlohmann::json& value);

/// One JSON text, its root an object. Refuses syntax errors, invalid UTF-8, and nesting deeper than 32.
[[nodiscard]] nlohmann::json parse_object(std::string_view body);

class Fields {
 public:
  /// `prefix` precedes the names in messages: "messages[3].".
  explicit Fields(const nlohmann::json& object, std::string prefix = "")
      : object_(&object), prefix_(std::move(prefix)) {}

  /// nullptr: absent or null.
  [[nodiscard]] const nlohmann::json* find(std::string_view name) const;
  [[nodiscard]] std::string path(std::string_view name) const { return prefix_ + std::string(name); }

  [[nodiscard]] std::optional<std::int64_t> integer(std::string_view name, std::int64_t min, std::int64_t max) const;
  [[nodiscard]] std::optional<double> number(std::string_view name, double min, double max) const;
  [[nodiscard]] std::optional<bool> boolean(std::string_view name) const;
  [[nodiscard]] const std::string* string(std::string_view name) const;

 private:
  const nlohmann::json* object_;
  std::string prefix_;
};

}  // namespace headwater::server
