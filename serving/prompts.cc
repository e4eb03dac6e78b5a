// See prompts.h.
#include "serving/prompts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string_view>

#include "headwater/error.h"

namespace headwater::serving {
namespace {

using nlohmann::json;

constexpr auto kWords = std::to_array<std::string_view>(
    {"the",     "river",  "of",      "and",     "a",        "to",      "in",     "water",  "stone",   "light",
     "house",   "small",  "was",     "with",    "field",    "morning", "people", "over",   "through", "time",
     "little",  "world",  "long",    "where",   "between",  "trees",   "old",    "city",   "after",   "could",
     "winter",  "road",   "great",   "found",   "mountain", "years",   "sea",    "under",  "every",   "green",
     "garden",  "before", "door",    "evening", "children", "story",   "north",  "while",  "summer",  "bridge",
     "first",   "their",  "village", "again",   "night",    "bread",   "window", "three",  "letter",  "without",
     "wind",    "behind", "market",  "quiet",   "often",    "horse",   "paper",  "south",  "island",  "never",
     "music",   "young",  "early",   "table",   "near",     "rain",    "walked", "until",  "silver",  "large",
     "friend",  "across", "corner",  "open",    "deep",     "ground",  "school", "always", "spring",  "earth",
     "fire",    "white",  "forest",  "seven",   "ship",     "better",  "high",   "valley", "clear",   "among",
     "teacher", "number", "harbor",  "snow",    "wood",     "second",  "looked", "far"});

constexpr int kRefillWords = 2048;

/// A well-mixed 64-bit number from two.
std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = a * 0x9e3779b97f4a7c15ULL + b;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

std::string WordStream::next() {
  return " " + std::string(kWords[random_() % kWords.size()]);
}

PromptMaker::PromptMaker(HttpClient& client, std::string model, bool text_only, std::uint64_t seed)
    : client_(client), model_(std::move(model)), seed_(seed), words_(seed) {
  const auto probe = tokenize(" river");
  if (!probe || probe->empty()) {
    form_ = Form::estimated_text;
  } else if (text_only) {
    form_ = Form::counted_text;
  } else {
    refill(1);
    pool_ = ahead_;
    std::ranges::sort(pool_);
    pool_.erase(std::unique(pool_.begin(), pool_.end()), pool_.end());
  }
}

std::string PromptMaker::describe() const {
  switch (form_) {
    case Form::token_list:
      return "as token lists";
    case Form::counted_text:
      return "as text, counted by the server's /tokenize";
    default:
      return "as text, a word taken for a token (the server has no /tokenize)";
  }
}

PromptMaker::Part PromptMaker::take(std::int64_t num_tokens) {
  Part part;
  if (form_ == Form::token_list) {
    const auto wanted = static_cast<std::size_t>(num_tokens);
    refill(wanted);
    const auto end = ahead_.begin() + num_tokens;
    part.tokens.assign(ahead_.begin(), end);
    ahead_.erase(ahead_.begin(), end);
  } else if (form_ == Form::counted_text) {
    part.text = counted_text(num_tokens);
  } else {
    for (std::int64_t i = 0; i < num_tokens; ++i) part.text += words_.next();
  }
  return part;
}

Prompt PromptMaker::join(const Part& shared, const Part& own) {
  Prompt prompt;
  prompt.tokens = shared.tokens;
  prompt.tokens.insert(prompt.tokens.end(), own.tokens.begin(), own.tokens.end());
  prompt.shared = shared.text;
  prompt.own = own.text;
  return prompt;
}

PromptMaker::Part PromptMaker::block(std::int64_t id, std::int64_t num_tokens) {
  Part part;
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    const std::uint64_t draw = mix(seed_ ^ static_cast<std::uint64_t>(id), static_cast<std::uint64_t>(i));
    if (form_ == Form::token_list) {
      part.tokens.push_back(pool_[draw % pool_.size()]);
    } else {
      part.text += ' ';
      part.text += kWords[draw % kWords.size()];
    }
  }
  return part;
}

/// Nothing where the server has no such path, or none that answers with tokens. vLLM reads "prompt", llama.cpp
/// "content".
std::optional<std::vector<std::int32_t>> PromptMaker::tokenize(const std::string& text) {
  const json body = {{"model", model_}, {"prompt", text}, {"content", text}, {"add_special_tokens", false}};
  const Answer answer = client_.post_now("/tokenize", body.dump());
  if (answer.status != 200) return std::nullopt;
  const json value = json::parse(answer.body, nullptr, false);
  if (!value.is_object() || !value.contains("tokens") || !value["tokens"].is_array()) return std::nullopt;
  std::vector<std::int32_t> tokens;
  for (const json& token : value["tokens"]) {
    if (!token.is_number_integer()) return std::nullopt;
    tokens.push_back(token.get<std::int32_t>());
  }
  return tokens;
}

std::int64_t PromptMaker::count(const std::string& text) {
  const auto tokens = tokenize(text);
  if (!tokens) throw Error(ErrorCode::io, "POST /tokenize: expected a list of tokens, got none");
  return std::ssize(*tokens);
}

/// The largest number of words that fits, then the shortest word until the count is reached.
std::string PromptMaker::counted_text(std::int64_t num_tokens) {
  std::vector<std::string> words;
  for (std::int64_t i = 0; i < num_tokens; ++i) words.push_back(words_.next());
  const auto first = [&](std::int64_t n) {
    std::string text;
    for (std::int64_t i = 0; i < n; ++i) text += words[static_cast<std::size_t>(i)];
    return text;
  };
  std::int64_t low = 0;  // fits
  std::int64_t high = num_tokens;
  if (count(first(high)) <= num_tokens) {
    low = high;
  } else {
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (count(first(middle)) <= num_tokens ? low : high) = middle;
    }
  }
  std::string text = first(low);
  for (std::int64_t have = count(text); have < num_tokens;) {
    text += " a";
    const std::int64_t now = count(text);
    if (now <= have) break;
    have = now;
  }
  return text;
}

void PromptMaker::refill(std::size_t at_least) {
  while (ahead_.size() < at_least) {
    std::string text;
    for (int i = 0; i < kRefillWords; ++i) text += words_.next();
    const auto tokens = tokenize(text);
    if (!tokens || tokens->empty()) throw Error(ErrorCode::io, "POST /tokenize: expected a list of tokens, got none");
    ahead_.insert(ahead_.end(), tokens->begin(), tokens->end());
  }
}

}  // namespace headwater::serving
