// Ends a stream of text before the first stop string, even when it arrives in pieces: text that may still turn out to
// be the start of a stop string is held back until it is decided. One state a stop string (Knuth-Morris-Pratt), so each
// byte costs the same however it is cut.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/detokenizer.h"

namespace headwater::engine {

class StopStrings {
 public:
  StopStrings() = default;
  /// Throws Error (invalid_argument) when a stop string is empty or not valid UTF-8 (a match then begins and ends at
  /// character borders).
  explicit StopStrings(std::vector<std::string> stops);

  /// The text that is now known to precede every stop string. Empty once stopped().
  [[nodiscard]] std::string push(std::string_view text);
  /// The end of the stream: the text held back, unless stopped().
  [[nodiscard]] std::string finish();

  [[nodiscard]] bool stopped() const noexcept { return matched_.has_value(); }
  /// Index of the stop string that ended the stream: the one whose last byte came first; among several, the longest.
  [[nodiscard]] std::optional<std::size_t> matched() const noexcept { return matched_; }
  /// Bytes pushed and not handed out: held back or, once stopped(), dropped.
  [[nodiscard]] std::size_t held() const noexcept { return held_.size() - held_begin_ + num_dropped_; }

 private:
  /// Hands out the text held back but for its last `keep` bytes.
  std::string take(std::size_t keep);

  std::vector<std::string> stops_;
  std::vector<std::vector<std::size_t>> borders_;  ///< per stop string: length of the longest border of each prefix
  std::vector<std::size_t> states_;                ///< per stop string: bytes of it that the text ends with
  std::string held_;                               ///< text not handed out yet begins at held_begin_
  std::size_t held_begin_ = 0;
  std::size_t num_dropped_ = 0;  ///< bytes pushed behind the stop string
  std::optional<std::size_t> matched_;
};

/// Detokenizer and stop strings in one: what an answer shows, token by token.
class TextStream {
 public:
  TextStream(const Tokenizer& tokenizer, StopStrings stops, bool show_specials = false)
      : detokenizer_(tokenizer, show_specials), stops_(std::move(stops)) {}

  [[nodiscard]] std::string push(TokenId token) { return stops_.push(detokenizer_.push(token)); }
  /// To be called once, at the end, also when stopped.
  [[nodiscard]] std::string finish();
  [[nodiscard]] bool stopped() const noexcept { return stops_.stopped(); }
  [[nodiscard]] std::optional<std::size_t> matched() const noexcept { return stops_.matched(); }
  /// Bytes of the tokens that no text has handed out.
  [[nodiscard]] std::size_t held() const noexcept { return stops_.held() + detokenizer_.held(); }

 private:
  Detokenizer detokenizer_;
  StopStrings stops_;
};

}  // namespace headwater::engine
