// See openai.h.
#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "server/json_text.h"
#include "server/openai.h"
#include "server/openai_fields.h"

namespace headwater::server {
namespace {

using nlohmann::json;

/// Whether a value asks for nothing: what leaves a feature off.
bool is_empty(const json& value) {
  return value.is_null() || (value.is_structured() && value.empty()) || (value.is_string() && value == "") ||
         (value.is_boolean() && value == false);
}

/// Fields that OpenAI has and this server does not serve. A value that asks for nothing is let through.
void refuse_unsupported_fields(Endpoint endpoint, const Fields& fields) {
  static constexpr std::string_view kChat[] = {
      "tools", "functions", "audio", "prediction", "web_search_options", "reasoning_effort", "verbosity"};
  static constexpr std::string_view kCompletions[] = {"suffix"};
  const auto check = [&](std::string_view name) {
    const json* value = fields.find(name);
    if (value != nullptr && !is_empty(*value)) refuse_unsupported(std::string(name), "is not supported by this server");
  };
  if (endpoint == Endpoint::chat) {
    for (const std::string_view name : kChat) check(name);
    for (const std::string_view name : {"tool_choice", "function_call"}) {
      const json* value = fields.find(name);
      if (value != nullptr && *value != "none" && *value != "auto") {
        refuse_unsupported(name.data(), "is not supported by this server, which has no tools");
      }
    }
    if (const json* modalities = fields.find("modalities")) {
      if (*modalities != json::array({"text"})) refuse_unsupported("modalities", "only [\"text\"] is supported");
    }
  } else {
    for (const std::string_view name : kCompletions) check(name);
  }
  if (const json* format = fields.find("response_format")) {
    if (!format->is_object()) {
      refuse_field("response_format", fmt::format("expected an object, got {}", kind_of(*format)));
    }
    const auto type = format->find("type");
    if (type == format->end() || *type != "text") {
      refuse_unsupported("response_format", "only {\"type\": \"text\"} is supported");
    }
  }
}

/// Text of a message: a string, or an array of text parts.
std::string content_of(const json& value, const std::string& path) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) {
    refuse_field(path, fmt::format("expected a string or an array of parts, got {}", kind_of(value)));
  }
  std::string text;
  for (std::size_t i = 0; i < value.size(); ++i) {
    const std::string part = fmt::format("{}[{}]", path, i);
    if (!value[i].is_object()) refuse_field(part, fmt::format("expected an object, got {}", kind_of(value[i])));
    const Fields fields(value[i], part + ".");
    const std::string* type = fields.string("type");
    if (type == nullptr) refuse_field(part + ".type", "is missing");
    if (*type != "text")
      refuse_unsupported(part + ".type", fmt::format("{}: only \"text\" is supported", json_string(clipped(*type))));
    const std::string* piece = fields.string("text");
    if (piece == nullptr) refuse_field(part + ".text", "is missing");
    text += *piece;
  }
  return text;
}

engine::ChatMessage message_of(const json& value, std::size_t index) {
  const std::string path = fmt::format("messages[{}]", index);
  if (!value.is_object()) refuse_field(path, fmt::format("expected an object, got {}", kind_of(value)));
  const Fields fields(value, path + ".");
  const std::string* role = fields.string("role");
  if (role == nullptr) refuse_field(path + ".role", "is missing");
  if (*role == "tool" || *role == "function") {
    refuse_unsupported(path + ".role",
                       fmt::format("\"{}\" is not supported by this server, which has no tools", *role));
  }
  if (*role != "system" && *role != "developer" && *role != "user" && *role != "assistant") {
    refuse_field(path + ".role",
                 fmt::format("expected system, developer, user or assistant, got {}", json_string(clipped(*role))));
  }
  if (const json* calls = fields.find("tool_calls"); calls != nullptr && !is_empty(*calls)) {
    refuse_unsupported(path + ".tool_calls", "is not supported by this server");
  }
  const json* content = fields.find("content");
  if (content == nullptr) refuse_field(path + ".content", "is missing");
  return {*role == "developer" ? "system" : *role, content_of(*content, path + ".content")};
}

std::vector<engine::ChatMessage> messages_of(const Fields& fields, const ParseLimits& limits) {
  const json* value = fields.find("messages");
  if (value == nullptr) refuse_field("messages", "is missing");
  if (!value->is_array()) refuse_field("messages", fmt::format("expected an array, got {}", kind_of(*value)));
  if (value->empty()) refuse_field("messages", "is empty, expected at least one");
  if (value->size() > limits.max_messages) {
    refuse_field("messages", fmt::format("has {} entries, expected at most {}", value->size(), limits.max_messages));
  }
  std::vector<engine::ChatMessage> messages;
  for (std::size_t i = 0; i < value->size(); ++i) messages.push_back(message_of((*value)[i], i));
  return messages;
}

std::int32_t token_of(const json& value, const std::string& path) {
  if (!value.is_number_integer()) refuse_field(path, fmt::format("expected a token id, got {}", kind_of(value)));
  const bool fits = value.is_number_unsigned() ? value.get<std::uint64_t>() <= std::uint64_t{INT32_MAX} : false;
  if (!fits) refuse_field(path, fmt::format("expected a token id, got {}", value.dump()));
  return static_cast<std::int32_t>(value.get<std::uint64_t>());
}

std::vector<std::int32_t> tokens_of(const json& array, const std::string& path) {
  if (array.empty()) refuse_field(path, "is empty, expected at least one token");
  std::vector<std::int32_t> tokens;
  tokens.reserve(array.size());
  for (std::size_t i = 0; i < array.size(); ++i) tokens.push_back(token_of(array[i], fmt::format("{}[{}]", path, i)));
  return tokens;
}

/// A string, a list of strings, a list of tokens, or a list of lists of tokens.
std::vector<Prompt> prompts_of(const Fields& fields) {
  const json* value = fields.find("prompt");
  if (value == nullptr) refuse_field("prompt", "is missing");
  if (value->is_string()) return {value->get<std::string>()};
  if (!value->is_array()) {
    refuse_field("prompt", fmt::format("expected a string or an array, got {}", kind_of(*value)));
  }
  if (value->empty()) refuse_field("prompt", "is empty, expected at least one");
  if ((*value)[0].is_number()) return {tokens_of(*value, "prompt")};
  std::vector<Prompt> prompts;
  for (std::size_t i = 0; i < value->size(); ++i) {
    const std::string path = fmt::format("prompt[{}]", i);
    const json& entry = (*value)[i];
    if (entry.is_string() && !(*value)[0].is_array()) {
      prompts.emplace_back(entry.get<std::string>());
    } else if (entry.is_array() && (*value)[0].is_array()) {
      prompts.emplace_back(tokens_of(entry, path));
    } else {
      refuse_field(path,
                   fmt::format("expected {} like the entries before it, got {}", kind_of((*value)[0]), kind_of(entry)));
    }
  }
  return prompts;
}

std::vector<std::string> stops_of(const Fields& fields) {
  const json* value = fields.find("stop");
  if (value == nullptr) return {};
  if (value->is_string()) {
    if (value->get_ref<const std::string&>().empty()) refuse_field("stop", "is empty, expected at least one character");
    return {value->get<std::string>()};
  }
  if (!value->is_array()) {
    refuse_field("stop", fmt::format("expected a string or an array of strings, got {}", kind_of(*value)));
  }
  if (value->size() > 4) refuse_field("stop", fmt::format("has {} entries, expected at most 4", value->size()));
  std::vector<std::string> stops;
  for (std::size_t i = 0; i < value->size(); ++i) {
    const json& entry = (*value)[i];
    const std::string path = fmt::format("stop[{}]", i);
    if (!entry.is_string()) refuse_field(path, fmt::format("expected a string, got {}", kind_of(entry)));
    if (entry.get_ref<const std::string&>().empty()) refuse_field(path, "is empty, expected at least one character");
    stops.push_back(entry.get<std::string>());
  }
  return stops;
}

std::vector<engine::LogitBias> biases_of(const Fields& fields) {
  const json* value = fields.find("logit_bias");
  if (value == nullptr) return {};
  if (!value->is_object()) refuse_field("logit_bias", fmt::format("expected an object, got {}", kind_of(*value)));
  std::vector<engine::LogitBias> biases;
  for (const auto& [key, bias] : value->items()) {
    std::int32_t token = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), token);
    const bool padded = key.size() > 1 && key.front() == '0';  // "5" and "05" would be one token given twice
    if (error != std::errc() || end != key.data() + key.size() || token < 0 || padded) {
      refuse_field("logit_bias", fmt::format("the key {} is not a token id", json_string(clipped(key))));
    }
    const std::string path = fmt::format("logit_bias.{}", token);
    if (!bias.is_number()) refuse_field(path, fmt::format("expected a number, got {}", kind_of(bias)));
    const auto number = bias.get<double>();
    if (!(number >= -100 && number <= 100)) refuse_field(path, fmt::format("expected -100..100, got {}", bias.dump()));
    biases.push_back({token, static_cast<float>(number)});
  }
  return biases;
}

void read_logprobs(Endpoint endpoint, const Fields& fields, engine::Request& engine) {
  if (endpoint == Endpoint::completions) {
    if (const auto count = fields.integer("logprobs", 0, 5)) engine.num_logprobs = static_cast<int>(*count);
    return;
  }
  const bool wanted = fields.boolean("logprobs").value_or(false);
  const auto top = fields.integer("top_logprobs", 0, 20);
  if (top && *top > 0 && !wanted) refuse_field("top_logprobs", "needs logprobs to be true");
  if (wanted) engine.num_logprobs = static_cast<int>(top.value_or(0));
}

void read_sampling(const Fields& fields, engine::SamplingParams& sampling) {
  sampling.temperature = static_cast<float>(fields.number("temperature", 0, 2).value_or(1.0));
  sampling.top_p = static_cast<float>(fields.number("top_p", 0, 1).value_or(1.0));
  sampling.top_k = static_cast<int>(fields.integer("top_k", -1, INT32_MAX).value_or(0));
  if (sampling.top_k < 0) sampling.top_k = 0;  // as other servers write "all"
  if (sampling.top_p <= 0.0F) {                // the smallest set there is
    sampling.top_p = 1.0F;
    sampling.top_k = 1;
  }
  sampling.presence_penalty = static_cast<float>(fields.number("presence_penalty", -2, 2).value_or(0.0));
  sampling.frequency_penalty = static_cast<float>(fields.number("frequency_penalty", -2, 2).value_or(0.0));
  sampling.logit_bias = biases_of(fields);
}

void read_max_tokens(const Fields& fields, const ParseLimits& limits, GenerationRequest& request) {
  const std::int64_t least = request.echo ? 0 : 1;
  const auto old_name = fields.integer("max_tokens", least, limits.max_tokens);
  const auto new_name = request.endpoint == Endpoint::chat
                            ? fields.integer("max_completion_tokens", least, limits.max_tokens)
                            : std::nullopt;
  if (old_name && new_name && *old_name != *new_name) {
    refuse_field("max_tokens", "differs from max_completion_tokens, expected one of them");
  }
  if (const auto either = new_name ? new_name : old_name) request.max_tokens = static_cast<int>(*either);
}

void read_stream(const Fields& fields, GenerationRequest& request) {
  request.stream = fields.boolean("stream").value_or(false);
  const json* options = fields.find("stream_options");
  if (options == nullptr) return;
  if (!options->is_object()) {
    refuse_field("stream_options", fmt::format("expected an object, got {}", kind_of(*options)));
  }
  if (!request.stream) refuse_field("stream_options", "needs stream to be true");
  request.include_usage = Fields(*options, "stream_options.").boolean("include_usage").value_or(false);
}

}  // namespace

GenerationRequest parse_generation(Endpoint endpoint, std::string_view body, const ParseLimits& limits) {
  const json root = parse_object(body);
  const Fields fields(root);
  GenerationRequest request;
  request.endpoint = endpoint;
  const std::string* model = fields.string("model");
  if (model == nullptr) refuse_field("model", "is missing");
  request.model = *model;
  refuse_unsupported_fields(endpoint, fields);
  if (endpoint == Endpoint::chat) {
    request.messages = messages_of(fields, limits);
  } else {
    request.prompts = prompts_of(fields);
    request.echo = fields.boolean("echo").value_or(false);
  }
  engine::Request& engine = request.engine;
  const auto n = fields.integer("n", 1, limits.max_choices).value_or(1);
  engine.num_samples = static_cast<int>(n);
  if (endpoint == Endpoint::completions) {
    const auto best_of = fields.integer("best_of", 1, limits.max_choices).value_or(n);
    if (best_of < n) refuse_field("best_of", fmt::format("expected at least n = {}, got {}", n, best_of));
    if (best_of > n) refuse_unsupported("best_of", "more than n is not supported by this server");
    const auto choices = static_cast<std::int64_t>(request.prompts.size()) * n;
    if (choices > limits.max_choices) {
      refuse_field("prompt", fmt::format("{} prompts with n = {} make {} choices, expected at most {}",
                                         request.prompts.size(), n, choices, limits.max_choices));
    }
  }
  read_max_tokens(fields, limits, request);
  read_sampling(fields, engine.sampling);
  request.seed = fields.integer("seed", INT64_MIN, INT64_MAX);
  engine.stop = stops_of(fields);
  read_logprobs(endpoint, fields, engine);
  engine.prompt_logprobs = request.echo && engine.num_logprobs >= 0;
  engine.ignore_eos = fields.boolean("ignore_eos").value_or(false);
  read_stream(fields, request);
  return request;
}

TokenizeRequest parse_tokenize(std::string_view body, const ParseLimits& limits) {
  const json root = parse_object(body);
  const Fields fields(root);
  TokenizeRequest request;
  request.is_chat = fields.find("messages") != nullptr;
  if (request.is_chat) {
    if (fields.find("prompt") != nullptr) refuse_field("prompt", "expected either prompt or messages, got both");
    request.messages = messages_of(fields, limits);
  } else {
    const std::string* prompt = fields.string("prompt");
    if (prompt == nullptr) refuse_field("prompt", "is missing");
    request.prompt = *prompt;
  }
  request.add_special_tokens = fields.boolean("add_special_tokens").value_or(true);
  request.add_generation_prompt = fields.boolean("add_generation_prompt").value_or(true);
  return request;
}

std::vector<std::int32_t> parse_detokenize(std::string_view body) {
  const json root = parse_object(body);
  const Fields fields(root);
  const json* tokens = fields.find("tokens");
  if (tokens == nullptr) refuse_field("tokens", "is missing");
  if (!tokens->is_array()) refuse_field("tokens", fmt::format("expected an array, got {}", kind_of(*tokens)));
  if (tokens->empty()) return {};
  return tokens_of(*tokens, "tokens");
}

}  // namespace headwater::server
