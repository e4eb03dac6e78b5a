// Structured log lines on standard error or in a file: time, level, event, then key=value, or the same as JSON. Prompts
// and answers are never among the values. Written by a thread of its own from a queue of fixed length: whoever logs
// never waits, and a log that cannot be written costs lines (counted), not requests.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace headwater::server {

enum class LogFormat : std::uint8_t { text, json };

struct LogField {
  std::string_view key;
  std::variant<std::string, std::int64_t, double> value;
};

class Log {
 public:
  /// `path` empty: standard error. Throws Error(io) when the file cannot be opened, or is a pipe that nobody reads.
  explicit Log(const std::string& path = "", LogFormat format = LogFormat::text);
  /// As flush().
  ~Log();
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  void info(std::string_view event, const std::vector<LogField>& fields = {}) { write("info", event, fields); }
  void warn(std::string_view event, const std::vector<LogField>& fields = {}) { write("warn", event, fields); }
  void error(std::string_view event, const std::vector<LogField>& fields = {}) { write("error", event, fields); }
  /// Waits until what lies in the queue has been written, a second at most.
  void flush();
  /// Lines that could not be written.
  [[nodiscard]] std::uint64_t num_lost() const noexcept;

 private:
  void write(std::string_view level, std::string_view event, const std::vector<LogField>& fields);
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace headwater::server
