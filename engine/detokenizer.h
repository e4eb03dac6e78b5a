// Tokens to text, one token at a time. A token may end inside a character, so bytes are held back until the character
// is complete: everything handed out is valid UTF-8. Bytes that can never become a character are replaced by U+FFFD.
#pragma once

#include <string>
#include <string_view>

#include "engine/tokenizer.h"

namespace headwater::engine {

/// Cuts a stream of bytes at character borders.
class Utf8Stream {
 public:
  /// The text that `bytes` completes.
  [[nodiscard]] std::string push(std::string_view bytes);
  /// The end of the stream: U+FFFD if it ended inside a character, or nothing.
  [[nodiscard]] std::string finish();
  /// Bytes of the character that is not complete.
  [[nodiscard]] std::size_t held() const noexcept { return pending_.size(); }

 private:
  std::string pending_;  ///< the first 1-3 bytes of a character
};

class Detokenizer {
 public:
  /// Keeps a reference to the tokenizer. Special tokens spell nothing unless `show_specials`.
  explicit Detokenizer(const Tokenizer& tokenizer, bool show_specials = false)
      : tokenizer_(&tokenizer), show_specials_(show_specials) {}

  [[nodiscard]] std::string push(TokenId token);
  [[nodiscard]] std::string finish() { return utf8_.finish(); }
  [[nodiscard]] std::size_t held() const noexcept { return utf8_.held(); }

 private:
  const Tokenizer* tokenizer_;
  bool show_specials_;
  Utf8Stream utf8_;
};

}  // namespace headwater::engine
