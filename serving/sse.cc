// See sse.h.
#include "serving/sse.h"

#include <utility>

namespace headwater::serving {

void SseParser::feed(std::string_view bytes, const Handler& handler) {
  while (!bytes.empty()) {
    if (std::exchange(after_cr_, false) && bytes.front() == '\n') {
      bytes.remove_prefix(1);
      continue;
    }
    const std::size_t end = bytes.find_first_of("\r\n");
    line_ += bytes.substr(0, end);
    if (end == std::string_view::npos) return;
    after_cr_ = bytes[end] == '\r';
    bytes.remove_prefix(end + 1);
    end_line(handler);
  }
}

void SseParser::end_line(const Handler& handler) {
  if (line_.empty()) {
    const std::string data = std::exchange(data_, {});
    if (std::exchange(has_data_, false)) handler(data);
    return;
  }
  std::string_view line = line_;
  if (line.substr(0, line.find(':')) == "data") {
    line.remove_prefix(std::min<std::size_t>(line.size(), 5));
    if (line.starts_with(' ')) line.remove_prefix(1);
    if (has_data_) data_ += '\n';
    data_ += line;
    has_data_ = true;
  }
  line_.clear();
}

}  // namespace headwater::serving
