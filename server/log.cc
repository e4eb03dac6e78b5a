// See log.h.
#include "server/log.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "headwater/error.h"
#include "server/json_text.h"

namespace headwater::server {
namespace {

constexpr std::size_t kMostLines = 4096;

/// The whole line, or not.
bool write_all(int file, std::string_view line) {
  while (!line.empty()) {
    const ssize_t count = ::write(file, line.data(), line.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    line.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

std::string now_text() {
  const auto now = std::chrono::system_clock::now();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", fmt::gmtime(std::chrono::system_clock::to_time_t(now)), ms);
}

/// A value of the text form: quoted where it would not be one word.
std::string text_value(const std::string& value) {
  const auto plain = [](unsigned char c) { return c > ' ' && c < 0x7F && c != '"' && c != '='; };
  return !value.empty() && std::ranges::all_of(value, plain) ? value : json_string(value);
}

}  // namespace

// Shared with the writing thread, which outlives the log if a write hangs.
struct Log::Impl {
  int file = STDERR_FILENO;
  LogFormat format = LogFormat::text;
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable written;
  std::deque<std::string> lines;
  bool writing = false;
  bool closing = false;
  std::atomic<std::uint64_t> lost{0};

  ~Impl() {
    if (file != STDERR_FILENO) ::close(file);
  }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return closing || !lines.empty(); });
      if (lines.empty()) break;
      const std::string line = std::move(lines.front());
      lines.pop_front();
      writing = true;
      lock.unlock();
      if (!write_all(file, line)) ++lost;
      lock.lock();
      writing = false;
      if (lines.empty()) written.notify_all();
    }
  }
};

Log::Log(const std::string& path, LogFormat format) : impl_(std::make_shared<Impl>()) {
  impl_->format = format;
  if (!path.empty()) {
    // Without O_NONBLOCK a pipe would be opened when somebody reads it, and not before.
    const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0644);
    if (file < 0) {
      const std::string why = errno == ENXIO ? "nobody reads this pipe" : std::strerror(errno);
      throw Error(ErrorCode::io, path + ": cannot be opened for the log: " + why);
    }
    impl_->file = file;
    ::fcntl(file, F_SETFL, O_WRONLY | O_APPEND);  // only the writing thread waits from here on
  }
  std::thread([impl = impl_] { impl->run(); }).detach();
}

Log::~Log() {
  flush();
  const std::lock_guard lock(impl_->mutex);
  impl_->closing = true;
  impl_->wake.notify_all();
}

void Log::flush() {
  std::unique_lock lock(impl_->mutex);
  impl_->written.wait_for(lock, std::chrono::seconds(1), [&] { return impl_->lines.empty() && !impl_->writing; });
}

std::uint64_t Log::num_lost() const noexcept {
  return impl_->lost.load();
}

void Log::write(std::string_view level, std::string_view event, const std::vector<LogField>& fields) {
  const bool json = impl_->format == LogFormat::json;
  std::string line = json ? "{\"time\":\"" + now_text() + "\",\"level\":\"" : now_text() + " ";
  line += level;
  line += json ? "\",\"event\":" : " ";
  line += json ? json_string(event) : text_value(std::string(event));
  for (const LogField& field : fields) {
    line += json ? ",\"" + std::string(field.key) + "\":" : " " + std::string(field.key) + "=";
    if (const auto* text = std::get_if<std::string>(&field.value)) {
      line += json ? json_string(*text) : text_value(*text);
    } else if (const auto* number = std::get_if<std::int64_t>(&field.value)) {
      line += std::to_string(*number);
    } else {
      line += fmt::format("{:.6g}", std::get<double>(field.value));
    }
  }
  line += json ? "}\n" : "\n";
  {
    const std::lock_guard lock(impl_->mutex);
    if (impl_->lines.size() >= kMostLines) {
      ++impl_->lost;
      return;
    }
    impl_->lines.push_back(std::move(line));
  }
  impl_->wake.notify_one();
}

}  // namespace headwater::server
