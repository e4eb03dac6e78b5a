// See request.h. What can be refused without a model is refused here, so that a program can do it before it loads one.
#include "engine/request.h"

#include <fmt/format.h>

#include <cmath>

#include "engine/stop_strings.h"
#include "headwater/error.h"

namespace headwater::engine {
namespace {

template <class T>
[[noreturn]] void refuse(std::string_view field, T got, std::string_view expected) {
  throw Error(ErrorCode::invalid_argument, fmt::format("{} = {}, expected {}", field, got, expected));
}

}  // namespace

std::string_view name_of(FinishReason reason) noexcept {
  switch (reason) {
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::cancelled:
      return "cancelled";
    case FinishReason::error:
      return "error";
  }
  return "?";
}

void check_sampling(const SamplingParams& params) {
  if (!(params.temperature >= 0.0F) || !std::isfinite(params.temperature)) {
    refuse("sampling.temperature", params.temperature, "a finite number of at least 0");
  }
  if (params.top_k < 0) refuse("sampling.top_k", params.top_k, "at least 0");
  if (!(params.top_p > 0.0F) || !(params.top_p <= 1.0F)) {
    refuse("sampling.top_p", params.top_p, "more than 0 and at most 1");
  }
  if (!std::isfinite(params.presence_penalty)) refuse("sampling.presence_penalty", params.presence_penalty, "finite");
  if (!std::isfinite(params.frequency_penalty)) {
    refuse("sampling.frequency_penalty", params.frequency_penalty, "finite");
  }
  for (std::size_t i = 0; i < params.logit_bias.size(); ++i) {
    const float bias = params.logit_bias[i].bias;
    if (!std::isfinite(bias)) refuse(fmt::format("sampling.logit_bias[{}].bias", i), bias, "finite");
  }
}

void check_settings(const Request& request) {
  if (request.num_samples < 1) refuse("num_samples", request.num_samples, "at least 1");
  if (request.max_tokens < 1) refuse("max_tokens", request.max_tokens, "at least 1");
  if (request.num_logprobs < -1) refuse("num_logprobs", request.num_logprobs, "at least -1");
  check_sampling(request.sampling);
  (void)StopStrings(request.stop);
}

}  // namespace headwater::engine
