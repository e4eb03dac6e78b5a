// The one reader of UTF-8: says whether a text begins with a whole character, with the beginning of one, or with bytes
// that cannot be one. Follows the Unicode standard's table of well-formed sequences (no surrogates, no overlong forms,
// at most U+10FFFF).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace headwater::engine {

struct Utf8Step {
  enum Kind : std::uint8_t {
    valid,       ///< `length` bytes are one character
    invalid,     ///< the first `length` bytes belong to no character, whatever follows (a maximal subpart: one U+FFFD)
    incomplete,  ///< the text ends inside a character; all `length` bytes are its beginning
  };
  Kind kind;
  std::size_t length;  ///< 1..4
};

/// `text` is not empty.
[[nodiscard]] constexpr Utf8Step next_utf8(std::string_view text) noexcept {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {Utf8Step::valid, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8Step::invalid, 1};
  const std::size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // Only the second byte's range depends on the lead byte.
  unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (std::size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Utf8Step::incomplete, i};
    if (byte(i) < low || byte(i) > high) return {Utf8Step::invalid, i};
    low = 0x80;
    high = 0xBF;
  }
  return {Utf8Step::valid, length};
}

/// Length of the longest prefix of `text` that is valid UTF-8.
[[nodiscard]] constexpr std::size_t valid_utf8_prefix(std::string_view text) noexcept {
  std::size_t at = 0;
  while (at < text.size()) {
    const Utf8Step step = next_utf8(text.substr(at));
    if (step.kind != Utf8Step::valid) break;
    at += step.length;
  }
  return at;
}

}  // namespace headwater::engine
