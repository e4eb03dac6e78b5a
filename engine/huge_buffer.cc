// See huge_buffer.h. Buffers below one huge page come from ordinary pages, so that small models stay small.
#include "engine/huge_buffer.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace headwater::engine {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kPage = 4096;

constexpr std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace

HugeBuffer::HugeBuffer(std::size_t bytes) : bytes_(round_up(bytes, kPage)) {
  if (bytes == 0) return;
  const bool huge = bytes_ >= kHugePage;
  const std::size_t slack = huge ? kHugePage : 0;
  void* mapping =
      ::mmap(nullptr, bytes_ + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  if (!huge) {
    data_ = static_cast<std::byte*>(mapping);
    return;
  }
  // Give back what lies before the first 2 MiB border and after the end.
  auto* begin = static_cast<std::byte*>(mapping);
  const std::size_t before =
      round_up(reinterpret_cast<std::uintptr_t>(begin), kHugePage) - reinterpret_cast<std::uintptr_t>(begin);
  if (before > 0) ::munmap(begin, before);
  if (before < slack) ::munmap(begin + before + bytes_, slack - before);
  data_ = begin + before;
  ::madvise(data_, bytes_, MADV_HUGEPAGE);  // a wish: without it everything works, slower
}

HugeBuffer::~HugeBuffer() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

HugeBuffer& HugeBuffer::operator=(HugeBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace headwater::engine
