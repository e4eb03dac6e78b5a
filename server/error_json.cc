// An error in OpenAI's shape; see openai.h.
#include "server/json_text.h"
#include "server/openai.h"

namespace headwater::server {

std::string error_json(const ApiError& error) {
  const auto text_or_null = [](const std::string& text) { return text.empty() ? "null" : json_string(text); };
  return "{\"error\":{\"message\":" + json_string(error.message) + ",\"type\":" + json_string(error.type) +
         ",\"param\":" + text_or_null(error.param) + ",\"code\":" + text_or_null(error.code) + "}}";
}

}  // namespace headwater::server
