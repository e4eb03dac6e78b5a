// Memory that notices misuse: between two inaccessible pages, every byte poisoned (a NaN in every element type), slack
// bytes checked afterwards, optionally read-only while the library runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace headwater::reference {

/// An allocation whose last byte lies as close before an inaccessible page as its alignment permits.
class FencedBuffer {
 public:
  FencedBuffer() = default;
  explicit FencedBuffer(std::size_t bytes, std::size_t alignment = 64);
  ~FencedBuffer();
  FencedBuffer(FencedBuffer&& other) noexcept;
  FencedBuffer& operator=(FencedBuffer&& other) noexcept;
  FencedBuffer(const FencedBuffer&) = delete;
  FencedBuffer& operator=(const FencedBuffer&) = delete;

  [[nodiscard]] void* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }

  /// Fills with NaNs again.
  void poison();
  void make_read_only();
  void make_writable();
  /// Whether the slack bytes before and after still hold the poison.
  [[nodiscard]] bool intact() const;

 private:
  std::byte* mapping_ = nullptr;
  std::size_t mapped_ = 0;
  std::byte* inner_ = nullptr;  ///< first accessible byte
  std::size_t inner_bytes_ = 0;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Address space without memory behind it until touched, zero when read: for pools beyond 2^32 elements.
class SparseBuffer {
 public:
  explicit SparseBuffer(std::size_t bytes);
  ~SparseBuffer();
  SparseBuffer(const SparseBuffer&) = delete;
  SparseBuffer& operator=(const SparseBuffer&) = delete;
  [[nodiscard]] void* data() const noexcept { return data_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace headwater::reference
