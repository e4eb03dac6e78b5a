// Zeroed memory for weights, the KV pool and activations: mapped at 2 MiB borders with huge pages asked for, because a
// product with few rows and decode attention are bound by how fast memory streams (huge pages: 1.2x to 2x). Pages are
// taken from the system when first touched, so an unused part of a pool costs nothing.
#pragma once

#include <cstddef>
#include <utility>

namespace headwater::engine {

class HugeBuffer {
 public:
  HugeBuffer() = default;
  /// At least `bytes` bytes of zeros. Throws std::bad_alloc.
  explicit HugeBuffer(std::size_t bytes);
  ~HugeBuffer();
  HugeBuffer(HugeBuffer&& other) noexcept { *this = std::move(other); }
  HugeBuffer& operator=(HugeBuffer&& other) noexcept;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return bytes_; }
  template <class T>
  [[nodiscard]] T* as() const noexcept {
    return reinterpret_cast<T*>(data_);
  }
  /// Grows to at least `bytes`; the contents are lost then.
  void reserve(std::size_t bytes) {
    if (bytes > bytes_) *this = HugeBuffer(bytes);
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace headwater::engine
