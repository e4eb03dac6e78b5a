// OpenAI's requests as values: read from JSON, checked field by field. Pure: no model, no sockets, so that it can be
// fuzzed. What is refused is an ApiError in OpenAI's shape, naming the field.
//
// Three kinds of fields: those that are served; those that are known and not served, which are refused unless their
// value asks for nothing (openai_parse.cc lists them); and those that nobody knows, which are ignored.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "engine/chat_template.h"
#include "engine/request.h"

namespace headwater::server {

/// A refusal or failure that a client is told.
struct ApiError {
  int status = 400;
  std::string type = "invalid_request_error";
  std::string message{};
  std::string param{};          ///< empty: null
  std::string code{};           ///< empty: null
  int retry_after_seconds = 0;  ///< 0: no such header
};

/// Text, or token ids.
using Prompt = std::variant<std::string, std::vector<std::int32_t>>;

enum class Endpoint : std::uint8_t { chat, completions };

/// A request of either endpoint. `engine` holds everything but the prompt's tokens.
struct GenerationRequest {
  Endpoint endpoint = Endpoint::chat;
  std::string model;
  std::vector<engine::ChatMessage> messages;  ///< chat
  std::vector<Prompt> prompts;                ///< completions: at least one
  engine::Request engine;
  std::optional<int> max_tokens;  ///< absent: the endpoint's default; 0 only with echo
  std::optional<std::int64_t> seed;
  bool stream = false;
  bool include_usage = false;
  bool echo = false;
};

struct ParseLimits {
  int max_choices = 128;  ///< prompts * n
  std::size_t max_messages = 4096;
  int max_tokens = 1 << 20;
};

/// Either of the endpoints' bodies. Throws ApiError.
[[nodiscard]] GenerationRequest parse_generation(Endpoint endpoint, std::string_view body, const ParseLimits& limits);

struct TokenizeRequest {
  std::string prompt;
  std::vector<engine::ChatMessage> messages;  ///< instead of a prompt
  bool is_chat = false;
  bool add_special_tokens = true;  ///< a plain prompt begins with the begin-of-text token, if the model wants it
  bool add_generation_prompt = true;
};
/// {"prompt": "..."} or {"messages": [...]}. Throws ApiError.
[[nodiscard]] TokenizeRequest parse_tokenize(std::string_view body, const ParseLimits& limits);
/// {"tokens": [...]}. Throws ApiError.
[[nodiscard]] std::vector<std::int32_t> parse_detokenize(std::string_view body);

/// {"error": {"message", "type", "param", "code"}}
[[nodiscard]] std::string error_json(const ApiError& error);

}  // namespace headwater::server
