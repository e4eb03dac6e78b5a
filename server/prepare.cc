// See prepare.h.
#include "server/prepare.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <random>

#include "headwater/error.h"
#include "server/json_text.h"

namespace headwater::server {
namespace {

constexpr int kDefaultCompletionTokens = 16;  // OpenAI's

std::vector<std::int32_t> encode_chat(std::vector<engine::ChatMessage>&& messages, bool add_generation_prompt,
                                      const ServedModel& served) {
  if (!served.chat) {
    throw ApiError{400, "invalid_request_error", "the model " + served.name + " has no chat format", "messages"};
  }
  if (!served.system.empty() && messages.front().role != "system") {
    messages.insert(messages.begin(), {"system", served.system});
  }
  return served.chat->render(served.model->tokenizer(), messages, add_generation_prompt);
}

std::vector<std::int32_t> encode_text(std::string_view text, bool add_special_tokens, const ServedModel& served) {
  const engine::Tokenizer& tokenizer = served.model->tokenizer();
  std::vector<std::int32_t> tokens;
  if (add_special_tokens && tokenizer.add_bos() && tokenizer.bos()) tokens.push_back(*tokenizer.bos());
  tokenizer.encode_to(text, engine::Specials::as_text, tokens);
  return tokens;
}

void check_tokens(const std::vector<std::int32_t>& tokens, const std::string& param, const ServedModel& served) {
  const auto vocab = static_cast<std::int32_t>(served.model->tokenizer().vocab_size());
  const auto wrong = std::ranges::find_if(tokens, [&](std::int32_t token) { return token < 0 || token >= vocab; });
  if (wrong == tokens.end()) return;
  throw ApiError{
      400, "invalid_request_error",
      fmt::format("{}[{}]: expected a token id in 0..{}, got {}", param, wrong - tokens.begin(), vocab - 1, *wrong),
      param, "invalid_value"};
}

/// How many tokens may follow the prompt.
int tokens_to_generate(const GenerationRequest& request, std::size_t prompt_tokens, const ServedModel& served) {
  const std::int64_t room = served.max_tokens() - static_cast<std::int64_t>(prompt_tokens);
  const std::int64_t context = served.model->config().context;
  const std::string limit = served.max_tokens() == context
                                ? fmt::format("the model's context is {} tokens", context)
                                : fmt::format("the whole KV cache holds {} tokens", served.kv_tokens);
  const bool chat = request.endpoint == Endpoint::chat;
  const std::string param = chat ? "messages" : "prompt";
  if (room < 1) {
    throw ApiError{400, "invalid_request_error", fmt::format("{}, the prompt alone has {}", limit, prompt_tokens),
                   param, "context_length_exceeded"};
  }
  if (!request.max_tokens)
    return static_cast<int>(chat ? room : std::min<std::int64_t>(room, kDefaultCompletionTokens));
  if (*request.max_tokens > room) {
    throw ApiError{
        400, "invalid_request_error",
        fmt::format("{}; the prompt has {} and max_tokens asks for {} more", limit, prompt_tokens, *request.max_tokens),
        "max_tokens", "context_length_exceeded"};
  }
  return std::max(*request.max_tokens, 1);
}

std::uint64_t random_seed() {
  thread_local std::mt19937_64 generator{std::random_device{}()};
  return generator();
}

}  // namespace

std::int64_t ServedModel::max_tokens() const {
  const std::int64_t context = model->config().context;
  return kv_tokens > 0 ? std::min(context, kv_tokens + 1) : context;
}

PreparedRequest prepare_generation(Endpoint endpoint, std::string_view body, const ParseLimits& limits,
                                   const ServedModel& served) {
  PreparedRequest prepared{parse_generation(endpoint, body, limits), {}, {}};
  GenerationRequest& request = prepared.request;
  if (request.model != served.name) {
    throw ApiError{
        404, "invalid_request_error",
        "model: this server has " + json_string(served.name) + ", not " + json_string(clipped(request.model)), "model",
        "model_not_found"};
  }
  if (endpoint == Endpoint::chat) {
    prepared.prompts.push_back(encode_chat(std::move(request.messages), true, served));
  }
  for (std::size_t i = 0; i < request.prompts.size(); ++i) {
    if (auto* tokens = std::get_if<std::vector<std::int32_t>>(&request.prompts[i])) {
      check_tokens(*tokens, request.prompts.size() == 1 ? "prompt" : fmt::format("prompt[{}]", i), served);
      prepared.prompts.push_back(std::move(*tokens));
    } else {
      prepared.prompts.push_back(encode_text(std::get<std::string>(request.prompts[i]), true, served));
    }
    if (!prepared.prompts.back().empty()) continue;
    throw ApiError{400, "invalid_request_error", "prompt: has no tokens, expected at least one", "prompt",
                   "invalid_value"};
  }
  request.prompts.clear();
  const engine::ModelConfig& config = served.model->config();
  for (const engine::LogitBias& bias : request.engine.sampling.logit_bias) {
    if (bias.token < config.vocab) continue;
    throw ApiError{400, "invalid_request_error",
                   fmt::format("logit_bias: expected token ids in 0..{}, got {}", config.vocab - 1, bias.token),
                   "logit_bias", "invalid_value"};
  }
  request.engine.num_logprobs = std::min(request.engine.num_logprobs, static_cast<int>(config.vocab));
  request.engine.sampling.seed = request.seed ? static_cast<std::uint64_t>(*request.seed) : random_seed();
  for (const auto& prompt : prepared.prompts) {
    engine::Request work = request.engine;
    work.prompt = prompt;
    work.max_tokens = tokens_to_generate(request, prompt.size(), served);
    prepared.work.push_back(std::move(work));
  }
  return prepared;
}

std::string tokenize(std::string_view body, const ParseLimits& limits, const ServedModel& served) {
  TokenizeRequest request = parse_tokenize(body, limits);
  const std::vector<std::int32_t> tokens =
      request.is_chat ? encode_chat(std::move(request.messages), request.add_generation_prompt, served)
                      : encode_text(request.prompt, request.add_special_tokens, served);
  return fmt::format("{{\"count\":{},\"max_model_len\":{},\"tokens\":[{}]}}", tokens.size(), served.max_tokens(),
                     fmt::join(tokens, ","));
}

std::string detokenize(std::string_view body, const ServedModel& served) {
  const std::vector<std::int32_t> tokens = parse_detokenize(body);
  check_tokens(tokens, "tokens", served);
  return "{\"prompt\":" + json_string(served.model->tokenizer().decode(tokens)) + "}";
}

}  // namespace headwater::server
