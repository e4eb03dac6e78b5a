// The alphabet in which byte-level vocabularies are written: every byte has a printable character of its own. Printable
// bytes stand for themselves (as Latin-1); the other 68 are written, in order, as U+0100, U+0101, ...: a space becomes
// U+0120.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace headwater::engine {

/// Appends the bytes that `text` stands for. False if a character stands for none (then `bytes` is in between).
[[nodiscard]] bool append_alphabet_bytes(std::string_view text, std::string& bytes);

/// The characters that stand for `bytes`.
[[nodiscard]] std::string alphabet_text(std::string_view bytes);

}  // namespace headwater::engine
