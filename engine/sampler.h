// Choice of the next token from logits. Pure: the same (logits, parameters, sample index, position) give the same
// token, whatever ran before or beside it. The random number is a hash of (seed, sample, position), not a stream.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/request.h"

namespace headwater::engine {

/// Uniform in [0, 1), a function of its arguments.
[[nodiscard]] double uniform_at(std::uint64_t seed, std::int64_t sample, std::int64_t position) noexcept;

/// Scratch memory that a caller reuses from call to call.
struct SamplerScratch {
  std::vector<std::int32_t> candidates;
  std::vector<double> weights;
  std::vector<float> logits;
};

/// The token at `position` (its index in the sample's tokens, prompt included), or -1 when a logit is NaN or none is
/// finite. Order of likelihood: higher logit first, lower id on a tie.
[[nodiscard]] std::int32_t sample_token(std::span<const float> logits, const SamplingParams& params,
                                        std::int64_t sample, std::int64_t position, SamplerScratch& scratch);

/// The logits with params' biases and the penalties for `generated`, the tokens that the sample has generated so far:
/// in scratch, or `logits` itself where nothing changes. Token ids are within the logits.
[[nodiscard]] std::span<const float> adjusted_logits(std::span<const float> logits, const SamplingParams& params,
                                                     std::span<const std::int32_t> generated, SamplerScratch& scratch);

/// Log probabilities of `token` and of the num_top likeliest tokens. Allocates nothing where out.top and scratch have
/// room. `token` -1 (no logit is finite): none.
void token_logprobs(std::span<const float> logits, std::int32_t token, int num_top, PlaceLogprobs& out,
                    SamplerScratch& scratch);

}  // namespace headwater::engine
