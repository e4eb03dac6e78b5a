// What goes into the engine and what comes out: requests, sampling parameters, events. Plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "headwater/error.h"

namespace headwater::engine {

struct LogitBias {
  std::int32_t token = 0;
  float bias = 0.0F;
};

/// How the next token is chosen. The choice is a pure function of (logits, seed, sample index, position), so it does
/// not depend on what else is in the batch.
struct SamplingParams {
  float temperature = 0.0F;  ///< 0: greedy, the most likely token (the lowest id on a tie)
  int top_k = 0;             ///< keep the k most likely tokens; 0: all
  float top_p = 1.0F;        ///< then keep the smallest set whose probability reaches top_p; 1: all
  std::uint64_t seed = 0;
  // Logits are changed before anything else: += bias, -= presence_penalty if the sample has generated the token,
  // -= frequency_penalty for each time that it has. Tokens of the prompt do not count.
  float presence_penalty = 0.0F;
  float frequency_penalty = 0.0F;
  std::vector<LogitBias> logit_bias{};  ///< one entry a token
};

/// Throws Error(invalid_argument) naming the field: a temperature that is negative or not finite, a negative top_k, a
/// top_p outside (0, 1], a penalty or bias that is not finite.
void check_sampling(const SamplingParams& params);

/// One prompt, and n samples of its continuation. The samples share the prompt's pages.
struct Request {
  std::vector<std::int32_t> prompt{};  ///< at least one token
  SamplingParams sampling{};
  int num_samples = 1;
  int max_tokens = 128;                     ///< per sample, >= 1
  std::vector<std::string> stop{};          ///< a sample ends before the first of these; not part of its text
  std::vector<std::int32_t> stop_tokens{};  ///< ends a sample; besides the model's own end-of-sequence token
  bool ignore_eos = false;                  ///< go on after the model's end-of-sequence token
  std::uint64_t salt = 0;                   ///< requests with different salts never share cached pages
  std::uint64_t tag = 0;                    ///< the caller's own name for it, told again in StepRequest
  int num_logprobs = -1;         ///< events tell the log probabilities of the token and of so many likeliest; -1: none
  bool prompt_logprobs = false;  ///< the same of the prompt's tokens; nothing of it is then taken from the prefix cache
};

/// Everything about a request that can be wrong whatever the model: num_samples, max_tokens, sampling, stop strings
/// (empty, or not UTF-8). The prompt is not looked at. Engine::submit does the same; a program can call this before it
/// loads a model. Throws Error(invalid_argument) naming the field.
void check_settings(const Request& request);

using RequestId = std::int64_t;

enum class FinishReason : std::uint8_t {
  stop,       ///< end-of-sequence token, stop token or stop string
  length,     ///< max_tokens, or the model's context is full
  cancelled,  ///< Engine::cancel
  error,      ///< Event::error says why, for instance out of pages
};

/// "stop", "length", "cancelled", "error".
[[nodiscard]] std::string_view name_of(FinishReason reason) noexcept;

/// Natural logarithm of a token's probability, as the model says: at temperature 1, without penalties and biases.
struct TokenLogprob {
  std::int32_t token = 0;
  float logprob = 0.0F;
};

/// What is told of one place in a text.
struct PlaceLogprobs {
  TokenLogprob chosen;
  std::vector<TokenLogprob> top;  ///< likeliest first
};

/// One token of one sample, or the end of a sample (then token may be -1). `text` holds complete UTF-8 characters only,
/// and nothing that may still turn out to be a stop string; the texts of a sample's events, joined, are its text.
struct Event {
  RequestId request = 0;
  int sample = 0;
  std::int32_t token = -1;
  std::string text;
  std::optional<FinishReason> finish;
  std::string error;
  ErrorCode error_code = ErrorCode::internal;  ///< of `error`: out_of_pages, or what the computation threw
  std::size_t held_bytes = 0;  ///< bytes that the sample's tokens spell and that no text has handed out yet; at the
                               ///< end: that were dropped, a stop string and what came with it
  std::optional<PlaceLogprobs> logprobs;       ///< of `token`, where they were asked for
  std::vector<PlaceLogprobs> prompt_logprobs;  ///< with sample 0's first token: of the prompt's tokens but its first
  std::int64_t cached_tokens = 0;              ///< prompt tokens that were adopted when the request was first admitted
};

/// A finished sample.
struct Completion {
  RequestId request = 0;
  int sample = 0;
  std::vector<std::int32_t> tokens;  ///< generated tokens, the end-of-sequence token included
  std::string text;
  FinishReason finish = FinishReason::stop;
  std::string error;
};

}  // namespace headwater::engine
