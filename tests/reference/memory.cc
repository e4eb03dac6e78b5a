// See memory.h. One mmap per buffer: guard page | slack | data | slack | guard page.
#include "reference/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "reference/element.h"

namespace headwater::reference {
namespace {

std::size_t system_page() {
  return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace

FencedBuffer::FencedBuffer(std::size_t bytes, std::size_t alignment) : size_(bytes) {
  const std::size_t page = system_page();
  inner_bytes_ = (std::max<std::size_t>(bytes, 1) + page - 1) / page * page;
  mapped_ = inner_bytes_ + 2 * page;
  void* mapping = ::mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<std::byte*>(mapping);
  inner_ = mapping_ + page;
  if (::mprotect(inner_, inner_bytes_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  data_ = inner_ + (inner_bytes_ - bytes) / alignment * alignment;
  std::memset(inner_, kPoisonByte, inner_bytes_);
}

FencedBuffer::~FencedBuffer() {
  if (mapping_ != nullptr) ::munmap(mapping_, mapped_);
}

FencedBuffer::FencedBuffer(FencedBuffer&& other) noexcept {
  *this = std::move(other);
}

FencedBuffer& FencedBuffer::operator=(FencedBuffer&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  std::swap(inner_, other.inner_);
  std::swap(inner_bytes_, other.inner_bytes_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void FencedBuffer::poison() {
  if (inner_ != nullptr) std::memset(inner_, kPoisonByte, inner_bytes_);
}

void FencedBuffer::make_read_only() {
  if (inner_ != nullptr) ::mprotect(inner_, inner_bytes_, PROT_READ);
}

void FencedBuffer::make_writable() {
  if (inner_ != nullptr) ::mprotect(inner_, inner_bytes_, PROT_READ | PROT_WRITE);
}

bool FencedBuffer::intact() const {
  const auto poisoned = [](std::byte b) { return b == std::byte{kPoisonByte}; };
  return inner_ == nullptr ||
         (std::all_of(inner_, data_, poisoned) && std::all_of(data_ + size_, inner_ + inner_bytes_, poisoned));
}

SparseBuffer::SparseBuffer(std::size_t bytes) : bytes_(bytes) {
  data_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data_ == MAP_FAILED) throw std::bad_alloc();
}

SparseBuffer::~SparseBuffer() {
  ::munmap(data_, bytes_);
}

}  // namespace headwater::reference
