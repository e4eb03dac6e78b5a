// A cursor over a file's bytes that cannot pass their end: every read names what it reads, and what does not fit is
// refused with an Error (io) that names the file and the place.
#pragma once

#include <fmt/format.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "headwater/error.h"

namespace headwater::engine {

static_assert(std::endian::native == std::endian::little, "the file's numbers are little-endian and read in place");
static_assert(sizeof(std::size_t) == 8, "sizes in the file have 64 bits");

/// A number stored anywhere, unaligned.
template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

class ByteReader {
 public:
  /// `file` is the name in messages; it and the bytes must outlive the reader.
  ByteReader(std::span<const std::byte> bytes, const std::string& file) : bytes_(bytes), file_(file) {}

  [[nodiscard]] std::uint64_t position() const noexcept { return at_; }
  [[nodiscard]] std::uint64_t left() const noexcept { return bytes_.size() - at_; }

  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    throw Error(ErrorCode::io, file_ + ": " + fmt::format(what, std::forward<Args>(args)...));
  }

  std::span<const std::byte> take(std::uint64_t count, std::string_view what) {
    if (count > left()) {
      fail("{} at byte {} needs {} bytes, but the file has {} left (it is truncated or malformed)", what, at_, count,
           left());
    }
    const auto out = bytes_.subspan(at_, count);
    at_ += count;
    return out;
  }

  template <typename T>
  T number(std::string_view what) {
    return load<T>(take(sizeof(T), what).data());
  }

  /// Length, then bytes.
  std::string_view string(const std::string& what) {
    const auto length = number<std::uint64_t>("length of " + what);
    const auto text = take(length, what);
    return {reinterpret_cast<const char*>(text.data()), text.size()};
  }

  /// Refuses a count of things that cannot all fit in the rest of the file.
  void check_count(std::uint64_t count, std::uint64_t min_bytes_each, std::string_view what) const {
    if (count > left() / min_bytes_each) {
      fail("{} = {} before byte {}, expected at most {}: the file has {} bytes left", what, count, at_,
           left() / min_bytes_each, left());
    }
  }

 private:
  std::span<const std::byte> bytes_;
  const std::string& file_;
  std::uint64_t at_ = 0;
};

}  // namespace headwater::engine
