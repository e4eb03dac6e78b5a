// See sse.h.
#include "server/sse.h"

#include <array>
#include <charconv>

namespace headwater::server {

void append_event(std::string& out, std::string_view data) {
  out += "data: ";
  out += data;
  out += "\n\n";
}

void append_chunk(std::string& out, std::string_view data) {
  std::array<char, 16> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), data.size(), 16);
  out.append(digits.data(), end.ptr);
  out += "\r\n";
  out += data;
  out += "\r\n";
}

}  // namespace headwater::server
