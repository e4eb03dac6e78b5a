// See sampler.h. Probabilities are summed in double precision, in an order that only the logits decide.
#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace headwater::engine {
namespace {

/// Mixes all bits (the finaliser of splitmix64).
std::uint64_t mix(std::uint64_t x) noexcept {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

/// Index of the largest logit, the lowest on a tie; -1 when one is NaN or none is finite.
std::int32_t most_likely(std::span<const float> logits) noexcept {
  std::int32_t best = -1;
  float best_logit = -INFINITY;
  bool valid = true;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    valid = valid && !std::isnan(logits[i]);
    if (logits[i] > best_logit) {
      best_logit = logits[i];
      best = static_cast<std::int32_t>(i);
    }
  }
  return valid && std::isfinite(best_logit) ? best : -1;
}

}  // namespace

double uniform_at(std::uint64_t seed, std::int64_t sample, std::int64_t position) noexcept {
  const std::uint64_t hash =
      mix(mix(mix(seed) ^ static_cast<std::uint64_t>(sample)) ^ static_cast<std::uint64_t>(position));
  return static_cast<double>(hash >> 11) * 0x1.0p-53;
}

std::int32_t sample_token(std::span<const float> logits, const SamplingParams& params, std::int64_t sample,
                          std::int64_t position, SamplerScratch& scratch) {
  const std::int32_t best = most_likely(logits);
  if (best < 0 || params.temperature == 0.0F || params.top_k == 1) return best;
  const double top = logits[static_cast<std::size_t>(best)];
  const double inverse_temperature = 1.0 / static_cast<double>(params.temperature);
  const auto weight = [&](std::int32_t token) {
    return std::exp((static_cast<double>(logits[static_cast<std::size_t>(token)]) - top) * inverse_temperature);
  };
  const auto more_likely = [&](std::int32_t a, std::int32_t b) {
    const float la = logits[static_cast<std::size_t>(a)];
    const float lb = logits[static_cast<std::size_t>(b)];
    return la != lb ? la > lb : a < b;
  };

  std::vector<std::int32_t>& candidates = scratch.candidates;
  candidates.resize(logits.size());
  std::iota(candidates.begin(), candidates.end(), 0);
  const bool nucleus = params.top_p < 1.0F;
  if (params.top_k > 0 && static_cast<std::size_t>(params.top_k) < candidates.size()) {
    std::nth_element(candidates.begin(), candidates.begin() + params.top_k, candidates.end(), more_likely);
    candidates.resize(static_cast<std::size_t>(params.top_k));
    std::sort(candidates.begin(), candidates.end(), more_likely);
  }
  std::vector<double>& weights = scratch.weights;
  weights.resize(candidates.size());
  double total = 0.0;
  for (std::size_t i = 0; i < candidates.size(); ++i) total += weights[i] = weight(candidates[i]);

  std::size_t kept = candidates.size();
  if (nucleus) {
    // Sort only as many of the likeliest as the nucleus needs.
    const double wanted = static_cast<double>(params.top_p) * total;
    double sum = 0.0;
    std::size_t sorted = 0;
    for (kept = 0; kept < candidates.size() && sum < wanted; ++kept) {
      if (kept == sorted) {
        sorted = std::min(candidates.size(), std::max<std::size_t>(64, 8 * sorted));
        std::partial_sort(candidates.begin() + static_cast<std::ptrdiff_t>(kept),
                          candidates.begin() + static_cast<std::ptrdiff_t>(sorted), candidates.end(), more_likely);
      }
      weights[kept] = weight(candidates[kept]);
      sum += weights[kept];
    }
    total = sum;
  }
  double left = uniform_at(params.seed, sample, position) * total;
  for (std::size_t i = 0; i < kept; ++i) {
    left -= weights[i];
    if (left < 0.0) return candidates[i];
  }
  // Rounding left a crumb: the last token with any weight.
  for (std::size_t i = kept; i-- > 0;) {
    if (weights[i] > 0.0) return candidates[i];
  }
  return best;
}

std::span<const float> adjusted_logits(std::span<const float> logits, const SamplingParams& params,
                                       std::span<const std::int32_t> generated, SamplerScratch& scratch) {
  const bool penalised = params.presence_penalty != 0.0F || params.frequency_penalty != 0.0F;
  if (params.logit_bias.empty() && (!penalised || generated.empty())) return logits;
  std::vector<float>& out = scratch.logits;
  out.assign(logits.begin(), logits.end());
  for (const LogitBias& bias : params.logit_bias) out[static_cast<std::size_t>(bias.token)] += bias.bias;
  if (!penalised) return out;
  // Sorted, equal tokens are neighbours and their number is known at once.
  std::vector<std::int32_t>& tokens = scratch.candidates;
  tokens.assign(generated.begin(), generated.end());
  std::sort(tokens.begin(), tokens.end());
  for (std::size_t begin = 0; begin < tokens.size();) {
    std::size_t end = begin;
    while (end < tokens.size() && tokens[end] == tokens[begin]) ++end;
    out[static_cast<std::size_t>(tokens[begin])] -=
        params.presence_penalty + params.frequency_penalty * static_cast<float>(end - begin);
    begin = end;
  }
  return out;
}

void token_logprobs(std::span<const float> logits, std::int32_t token, int num_top, PlaceLogprobs& out,
                    SamplerScratch& scratch) {
  out.top.clear();
  out.chosen = {token, -INFINITY};
  const std::int32_t best = most_likely(logits);
  if (best < 0 || token < 0) return;
  const double top = logits[static_cast<std::size_t>(best)];
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - top);
  const double log_sum = top + std::log(sum);
  const auto logprob = [&](std::int32_t id) {
    return static_cast<float>(static_cast<double>(logits[static_cast<std::size_t>(id)]) - log_sum);
  };
  out.chosen.logprob = logprob(token);
  const std::size_t count = std::min(static_cast<std::size_t>(num_top), logits.size());
  if (count == 0) return;
  std::vector<std::int32_t>& ids = scratch.candidates;
  ids.resize(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto middle = ids.begin() + static_cast<std::ptrdiff_t>(count);
  std::partial_sort(ids.begin(), middle, ids.end(), [&](std::int32_t a, std::int32_t b) {
    const float la = logits[static_cast<std::size_t>(a)];
    const float lb = logits[static_cast<std::size_t>(b)];
    return la != lb ? la > lb : a < b;
  });
  for (std::size_t i = 0; i < count; ++i) out.top.push_back({ids[i], logprob(ids[i])});
}

}  // namespace headwater::engine
