// The sampler: a pure function with the right statistics.
#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>

#include "headwater/error.h"

namespace headwater::engine {
namespace {

std::map<std::int32_t, int> histogram(std::span<const float> logits, const SamplingParams& params, int draws) {
  SamplerScratch scratch;
  std::map<std::int32_t, int> counts;
  for (int position = 0; position < draws; ++position) ++counts[sample_token(logits, params, 0, position, scratch)];
  return counts;
}

TEST(Sampler, GreedyTakesTheLowestIdOfTheMostLikely) {
  SamplerScratch scratch;
  const std::vector<float> logits{0.5F, 2.0F, -1.0F, 2.0F};
  EXPECT_EQ(sample_token(logits, {}, 0, 0, scratch), 1);
  EXPECT_EQ(sample_token(logits, {1.0F, 1, 1.0F, 7}, 3, 9, scratch), 1);
}

TEST(Sampler, FollowsTheSoftmaxAtItsTemperature) {
  const std::vector<float> logits{1.0F, 0.0F, -1.0F, 2.0F};
  constexpr int kDraws = 40'000;
  for (const float temperature : {0.5F, 1.0F, 2.0F}) {
    double total = 0;
    for (const float logit : logits) total += std::exp(static_cast<double>(logit / temperature));
    auto counts = histogram(logits, {temperature, 0, 1.0F, 11}, kDraws);
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const double p = std::exp(static_cast<double>(logits[i] / temperature)) / total;
      const double sigma = std::sqrt(p * (1 - p) * kDraws);
      EXPECT_NEAR(counts[static_cast<std::int32_t>(i)], p * kDraws, 5 * sigma)
          << "token " << i << " at " << temperature;
    }
  }
}

TEST(Sampler, TopKAndTopPKeepTheLikeliest) {
  const std::vector<float> logits{1.0F, 0.0F, 3.0F, 2.0F, -5.0F};
  for (const auto& [token, count] : histogram(logits, {1.0F, 2, 1.0F, 5}, 2000)) EXPECT_TRUE(token == 2 || token == 3);
  // Probabilities: 0.64, 0.23, 0.09, ...: 0.8 needs two tokens, 0.5 one, 0.9 three.
  EXPECT_EQ(histogram(logits, {1.0F, 0, 0.5F, 5}, 2000).size(), 1U);
  EXPECT_EQ(histogram(logits, {1.0F, 0, 0.8F, 5}, 2000).size(), 2U);
  EXPECT_EQ(histogram(logits, {1.0F, 0, 0.9F, 5}, 2000).size(), 3U);
  // Both: top_p counts within the top k.
  EXPECT_EQ(histogram(logits, {1.0F, 2, 0.6F, 5}, 2000).size(), 1U);
}

TEST(Sampler, NucleusOfAFlatDistributionIsExact) {
  const std::vector<float> logits(1000, 1.0F);
  std::int32_t largest = 0;
  for (const auto& [token, count] : histogram(logits, {1.0F, 0, 0.25F, 5}, 20'000)) largest = std::max(largest, token);
  EXPECT_LT(largest, 251);  // equal logits: lower ids first
  EXPECT_GT(largest, 240);
}

TEST(Sampler, DependsOnSeedSampleAndPositionAlone) {
  const std::vector<float> logits(512, 0.0F);
  const SamplingParams params{1.0F, 0, 1.0F, 99};
  SamplerScratch fresh;
  SamplerScratch used;
  (void)sample_token(std::vector<float>(4096, 0.5F), params, 5, 5, used);
  std::map<std::int32_t, int> seen;
  for (std::int64_t sample = 0; sample < 4; ++sample) {
    for (std::int64_t position = 0; position < 8; ++position) {
      const std::int32_t token = sample_token(logits, params, sample, position, fresh);
      EXPECT_EQ(sample_token(logits, params, sample, position, used), token);
      ++seen[token];
    }
  }
  EXPECT_GT(seen.size(), 20U);
  EXPECT_NE(uniform_at(1, 0, 0), uniform_at(2, 0, 0));
  EXPECT_NE(uniform_at(1, 1, 0), uniform_at(1, 0, 1));
}

TEST(Sampler, UniformIsUniform) {
  std::vector<int> bins(16);
  constexpr int kDraws = 64'000;
  for (int i = 0; i < kDraws; ++i) {
    const double u = uniform_at(3, i % 7, i);
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    ++bins[static_cast<std::size_t>(u * 16)];
  }
  for (const int count : bins) EXPECT_NEAR(count, kDraws / 16.0, 5 * std::sqrt(kDraws / 16.0));
}

TEST(Sampler, ReportsLogitsThatAreNotNumbers) {
  SamplerScratch scratch;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(sample_token(std::vector<float>{1.0F, nan}, {}, 0, 0, scratch), -1);
  EXPECT_EQ(sample_token(std::vector<float>{-inf, -inf}, {}, 0, 0, scratch), -1);
  EXPECT_EQ(sample_token(std::vector<float>{1.0F, inf}, {}, 0, 0, scratch), -1);
  EXPECT_EQ(sample_token(std::vector<float>{-inf, 1.0F}, {1.0F, 0, 1.0F, 1}, 0, 0, scratch), 1);
}

TEST(Sampler, RefusesParametersByName) {
  const auto message = [](const SamplingParams& params) -> std::string {
    try {
      check_sampling(params);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message({}), "");
  EXPECT_EQ(message({-1.0F, 0, 1.0F, 0}), "sampling.temperature = -1, expected a finite number of at least 0");
  EXPECT_EQ(message({1.0F, -2, 1.0F, 0}), "sampling.top_k = -2, expected at least 0");
  EXPECT_EQ(message({1.0F, 0, 0.0F, 0}), "sampling.top_p = 0, expected more than 0 and at most 1");
  EXPECT_EQ(message({std::numeric_limits<float>::infinity(), 0, 1.0F, 0}),
            "sampling.temperature = inf, expected a finite number of at least 0");
  EXPECT_EQ(message({1.0F, 0, 1.5F, 0}), "sampling.top_p = 1.5, expected more than 0 and at most 1");
}

TEST(Sampler, BiasesAndPenaltiesChangeLogitsAsDocumented) {
  SamplerScratch scratch;
  const std::vector<float> logits{1.0F, 2.0F, 3.0F, 4.0F};
  SamplingParams params;
  EXPECT_EQ(adjusted_logits(logits, params, std::vector<std::int32_t>{1, 1}, scratch).data(), logits.data());
  params.presence_penalty = 0.5F;
  params.frequency_penalty = 0.25F;
  EXPECT_EQ(adjusted_logits(logits, params, {}, scratch).data(), logits.data());
  params.logit_bias = {{3, -100.0F}, {0, 2.0F}};
  const auto adjusted = adjusted_logits(logits, params, std::vector<std::int32_t>{2, 1, 2, 2}, scratch);
  const std::vector<float> expected{3.0F, 2.0F - 0.75F, 3.0F - 0.5F - 0.75F, -96.0F};
  EXPECT_EQ(std::vector<float>(adjusted.begin(), adjusted.end()), expected);
  params.logit_bias = {{1, NAN}};
  EXPECT_THROW(check_sampling(params), Error);
  params.logit_bias.clear();
  params.presence_penalty = INFINITY;
  EXPECT_THROW(check_sampling(params), Error);
}

TEST(Sampler, LogProbabilitiesAreThoseOfTheSoftmax) {
  SamplerScratch scratch;
  const std::vector<float> logits{1.0F, 3.0F, 3.0F, -2.0F};
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
  PlaceLogprobs place;
  token_logprobs(logits, 0, 9, place, scratch);
  EXPECT_EQ(place.chosen.token, 0);
  EXPECT_NEAR(place.chosen.logprob, 1.0 - std::log(sum), 1e-6);
  ASSERT_EQ(place.top.size(), 4U);  // all there are
  EXPECT_EQ(place.top[0].token, 1);
  EXPECT_EQ(place.top[1].token, 2);
  EXPECT_EQ(place.top[3].token, 3);
  token_logprobs(logits, 1, 0, place, scratch);
  EXPECT_TRUE(place.top.empty());
}

}  // namespace
}  // namespace headwater::engine
