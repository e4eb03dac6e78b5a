// Strings as JSON, appended to a growing text. Answers are written piece by piece while tokens arrive, a few hundred
// bytes each; building a tree of values for every token would cost more than the token's other handling together.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace headwater::server {

/// Appends `text` in quotes. Control characters, quotes and backslashes are escaped, and so are U+2028 and '<' (so that
/// the text may stand inside a script element). Bytes that are not UTF-8 become U+FFFD.
void append_json_string(std::string& out, std::string_view text);

/// What messages show of a client's own words: the first `most` bytes or a few less, whole characters, and "..." where
/// there is more.
[[nodiscard]] std::string clipped(std::string_view text, std::size_t most = 100);

[[nodiscard]] inline std::string json_string(std::string_view text) {
  std::string out;
  append_json_string(out, text);
  return out;
}

}  // namespace headwater::server
