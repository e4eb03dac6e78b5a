// See json_text.h.
#include "server/json_text.h"

#include "engine/utf8.h"

namespace headwater::server {
namespace {

void append_escaped(std::string& out, char byte) {
  switch (byte) {
    case '"':
      out += "\\\"";
      return;
    case '\\':
      out += "\\\\";
      return;
    case '\n':
      out += "\\n";
      return;
    case '\r':
      out += "\\r";
      return;
    case '\t':
      out += "\\t";
      return;
    default: {
      constexpr std::string_view kDigits = "0123456789abcdef";
      const auto value = static_cast<unsigned char>(byte);
      out += "\\u00";
      out += kDigits[value >> 4];
      out += kDigits[value & 15];
    }
  }
}

}  // namespace

void append_json_string(std::string& out, std::string_view text) {
  out += '"';
  std::size_t at = 0;
  while (at < text.size()) {
    const char byte = text[at];
    if (static_cast<unsigned char>(byte) < 0x80) {
      if (static_cast<unsigned char>(byte) < 0x20 || byte == '"' || byte == '\\' || byte == '<' || byte == 0x7F) {
        append_escaped(out, byte);
      } else {
        out += byte;
      }
      ++at;
      continue;
    }
    const engine::Utf8Step step = engine::next_utf8(text.substr(at));
    const std::string_view piece = text.substr(at, step.length);
    if (step.kind != engine::Utf8Step::valid) {
      out += "\xEF\xBF\xBD";
    } else if (piece == "\xE2\x80\xA8" || piece == "\xE2\x80\xA9") {
      out += piece.back() == '\xA8' ? "\\u2028" : "\\u2029";
    } else {
      out += piece;
    }
    at += step.length;
  }
  out += '"';
}

std::string clipped(std::string_view text, std::size_t most) {
  if (text.size() <= most) return std::string(text);
  std::size_t end = most;  // not inside a character: none has more than three bytes after its first
  while (end > most - 3 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;
  return std::string(text.substr(0, end)) + "...";
}

}  // namespace headwater::server
