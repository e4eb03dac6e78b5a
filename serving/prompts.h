// Prompts with exact numbers of tokens, all made from one seeded stream of plain English words.
//
// Where the server has POST /tokenize, the stream is turned into token ids once, and prompts are slices of it: sent as
// token lists, whose lengths are exact. For endpoints that take only text, words are added until the server's own count
// is reached. Without /tokenize a word counts as a token; results then show what the server counted.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "serving/completion.h"
#include "serving/http_client.h"

namespace headwater::serving {

/// Endless words from a seed, the same everywhere.
class WordStream {
 public:
  explicit WordStream(std::uint64_t seed) : random_(seed) {}
  /// A word with the space before it.
  [[nodiscard]] std::string next();

 private:
  std::mt19937_64 random_;
};

class PromptMaker {
 public:
  enum class Form { token_list, counted_text, estimated_text };

  /// Finds out what the server can do. `text_only`: for endpoints that take no token lists.
  PromptMaker(HttpClient& client, std::string model, bool text_only, std::uint64_t seed);

  [[nodiscard]] Form form() const noexcept { return form_; }
  /// "as token lists", "as text counted by the server's /tokenize", ...
  [[nodiscard]] std::string describe() const;

  /// A part of a prompt, new with every call.
  struct Part {
    std::vector<std::int32_t> tokens;
    std::string text;
  };
  [[nodiscard]] Part take(std::int64_t num_tokens);
  /// `shared` followed by `own`.
  [[nodiscard]] static Prompt join(const Part& shared, const Part& own);

  /// The part that `id` stands for: equal ids, equal parts, of which a shorter one is the beginning of a longer one. In
  /// text forms a word counts as a token.
  [[nodiscard]] Part block(std::int64_t id, std::int64_t num_tokens);

 private:
  [[nodiscard]] std::optional<std::vector<std::int32_t>> tokenize(const std::string& text);
  [[nodiscard]] std::int64_t count(const std::string& text);
  [[nodiscard]] std::string counted_text(std::int64_t num_tokens);
  void refill(std::size_t at_least);

  HttpClient& client_;
  std::string model_;
  Form form_ = Form::token_list;
  std::uint64_t seed_;
  WordStream words_;
  std::vector<std::int32_t> ahead_;  ///< token ids not yet taken
  std::vector<std::int32_t> pool_;   ///< distinct ids, for blocks
};

}  // namespace headwater::serving
