// See openai_fields.h.
#include "server/openai_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "server/json_text.h"

namespace headwater::server {
namespace {
constexpr int kMostDepth = 32;
}

void refuse_field(const std::string& param, const std::string& message) {
  throw ApiError{400, "invalid_request_error", param + ": " + message, param, "invalid_value"};
}

void refuse_unsupported(const std::string& param, const std::string& message) {
  throw ApiError{400, "invalid_request_error", param + ": " + message, param, "unsupported_parameter"};
}

std::string_view kind_of(const nlohmann::json& value) {
  switch (value.type()) {
    case nlohmann::json::value_t::null:
      return "null";
    case nlohmann::json::value_t::object:
      return "an object";
    case nlohmann::json::value_t::array:
      return "an array";
    case nlohmann::json::value_t::string:
      return "a string";
    case nlohmann::json::value_t::boolean:
      return "a boolean";
    case nlohmann::json::value_t::number_float:
      return "a number with a fraction";
    default:
      return "an integer";
  }
}

namespace {

/// How deep brackets outside strings nest, at most. (The library's callback could tell, but with one every object's end
/// costs as much as its parent has members.)
int depth_of(std::string_view body) {
  int depth = 0;
  int most = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < body.size(); ++i) {
    const char c = body[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      most = std::max(most, ++depth);
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return most;
}

}  // namespace

nlohmann::json parse_object(std::string_view body) {
  if (depth_of(body) > kMostDepth) {
    throw ApiError{400, "invalid_request_error", fmt::format("the body is nested deeper than {}", kMostDepth)};
  }
  nlohmann::json root;
  try {
    root = nlohmann::json::parse(body);
  } catch (const nlohmann::json::exception& error) {
    // The library's own text begins with its error number.
    const std::string_view what = error.what();
    const std::size_t at = what.find("] ");
    std::string why(at == std::string_view::npos ? what : what.substr(at + 2));
    if (const std::size_t quote = why.find("; last read"); quote != std::string::npos) why.resize(quote);
    throw ApiError{400, "invalid_request_error", "the body is not valid JSON: " + clipped(why, 200)};
  }
  if (!root.is_object()) {
    throw ApiError{400, "invalid_request_error", fmt::format("the body is {}, expected an object", kind_of(root))};
  }
  return root;
}

const nlohmann::json* Fields::find(std::string_view name) const {
  const auto it = object_->find(name);
  return it == object_->end() || it->is_null() ? nullptr : &*it;
}

std::optional<std::int64_t> Fields::integer(std::string_view name, std::int64_t min, std::int64_t max) const {
  const nlohmann::json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number_integer())
    refuse_field(path(name), fmt::format("expected an integer, got {}", kind_of(*value)));
  const bool too_large = value->is_number_unsigned() && value->get<std::uint64_t>() > std::uint64_t{INT64_MAX};
  const auto number = too_large ? INT64_MAX : value->get<std::int64_t>();
  if (too_large || number < min || number > max) {
    refuse_field(path(name), fmt::format("expected {}..{}, got {}", min, max, value->dump()));
  }
  return number;
}

std::optional<double> Fields::number(std::string_view name, double min, double max) const {
  const nlohmann::json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) refuse_field(path(name), fmt::format("expected a number, got {}", kind_of(*value)));
  const auto number = value->get<double>();
  if (number < min || number > max) {  // JSON has no NaN
    refuse_field(path(name), fmt::format("expected {}..{}, got {}", min, max, value->dump()));
  }
  return number;
}

std::optional<bool> Fields::boolean(std::string_view name) const {
  const nlohmann::json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) refuse_field(path(name), fmt::format("expected true or false, got {}", kind_of(*value)));
  return value->get<bool>();
}

const std::string* Fields::string(std::string_view name) const {
  const nlohmann::json* value = find(name);
  if (value == nullptr) return nullptr;
  if (!value->is_string()) refuse_field(path(name), fmt::format("expected a string, got {}", kind_of(*value)));
  return value->get_ptr<const std::string*>();
}

}  // namespace headwater::server
