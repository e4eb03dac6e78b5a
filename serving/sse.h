// Server-sent events from a byte stream cut anywhere: the `data` of each event, lines joined by a line feed. Lines end
// with LF, CR LF or CR; comments and other fields are skipped.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace headwater::serving {

class SseParser {
 public:
  using Handler = std::function<void(std::string_view data)>;

  /// Calls `handler` for every event that these bytes complete. An event that the stream's end cuts off is dropped, as
  /// the format asks.
  void feed(std::string_view bytes, const Handler& handler);

 private:
  void end_line(const Handler& handler);

  std::string line_;
  std::string data_;
  bool has_data_ = false;
  bool after_cr_ = false;  ///< the next LF belongs to the CR before it
};

}  // namespace headwater::serving
