#include "engine/byte_alphabet.h"

namespace headwater::engine {
namespace {

constexpr int kNumCodePoints = 256 + 68;
constexpr std::int16_t kNone = -1;

constexpr bool stands_for_itself(int byte) {
  return (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
}

constexpr std::array<std::int16_t, 256> kByteToCodePoint = [] {
  std::array<std::int16_t, 256> table{};
  std::int16_t next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    table[static_cast<std::size_t>(byte)] = stands_for_itself(byte) ? static_cast<std::int16_t>(byte) : next++;
  }
  return table;
}();

constexpr std::array<std::int16_t, kNumCodePoints> kCodePointToByte = [] {
  std::array<std::int16_t, kNumCodePoints> table{};
  table.fill(kNone);
  for (std::size_t byte = 0; byte < 256; ++byte) {
    table[static_cast<std::size_t>(kByteToCodePoint[byte])] = static_cast<std::int16_t>(byte);
  }
  return table;
}();

}  // namespace

bool append_alphabet_bytes(std::string_view text, std::string& bytes) {
  for (std::size_t at = 0; at < text.size();) {
    unsigned code_point = static_cast<unsigned char>(text[at]);
    if (code_point < 0x80) {
      at += 1;
    } else {  // two bytes of UTF-8 reach U+07FF, beyond the alphabet
      if (code_point < 0xC2 || code_point > 0xDF || at + 1 == text.size()) return false;
      const unsigned second = static_cast<unsigned char>(text[at + 1]);
      if ((second & 0xC0U) != 0x80U) return false;
      code_point = (code_point & 0x1FU) << 6 | (second & 0x3FU);
      at += 2;
    }
    if (code_point >= kNumCodePoints || kCodePointToByte[code_point] == kNone) return false;
    bytes += static_cast<char>(kCodePointToByte[code_point]);
  }
  return true;
}

std::string alphabet_text(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto code_point = static_cast<unsigned>(kByteToCodePoint[static_cast<unsigned char>(c)]);
    if (code_point < 0x80) {
      text += static_cast<char>(code_point);
    } else {
      text += static_cast<char>(0xC0U | code_point >> 6);
      text += static_cast<char>(0x80U | (code_point & 0x3FU));
    }
  }
  return text;
}

}  // namespace headwater::engine
