// Reads structured input out of a fuzzer's bytes: numbers from the front, zeros when the bytes run out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace headwater::fuzz {

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

  std::uint8_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  /// In [low, high], high - low < 256.
  int between(int low, int high) { return low + byte() % (high - low + 1); }
  bool flag() { return (byte() & 1U) != 0U; }
  /// Usually in [low, high]; one time in 16 anything of 32 bits.
  std::int32_t wild(int low, int high) {
    if (byte() % 16 != 15) return between(low, high);
    std::uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value = value << 8U | byte();
    return static_cast<std::int32_t>(value);
  }
  [[nodiscard]] bool empty() const { return left_ == 0; }
  std::string_view rest() {
    const std::string_view text(reinterpret_cast<const char*>(data_), left_);
    left_ = 0;
    return text;
  }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

}  // namespace headwater::fuzz

/// The target; libFuzzer or replay.cc calls it.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
