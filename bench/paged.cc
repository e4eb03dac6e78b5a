// Forests in pages and cold KV memory; see paged.h.
#include "bench/paged.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

#include "headwater/error.h"

namespace headwater::bench {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kBackingBytes = std::size_t{512} << 20;  ///< of an aliased buffer: far above any last-level cache

std::size_t round_up(std::size_t n, std::size_t unit) {
  return (n + unit - 1) / unit * unit;
}

/// Physical memory that a benchmark may take: half of what is available.
std::size_t memory_budget() {
  const auto pages = static_cast<std::size_t>(std::max(1L, sysconf(_SC_AVPHYS_PAGES)));
  return std::max<std::size_t>(pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) / 2, std::size_t{256} << 20);
}

std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/// Round to nearest even; the magnitudes used here are within half's range.
std::uint16_t to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const float magnitude = std::fabs(value);
  if (magnitude < 6.103515625e-05F) {  // subnormal: units of 2^-24
    return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(std::nearbyint(magnitude * 16777216.0F)));
  }
  const std::uint32_t absolute = bits & 0x7FFFFFFFU;
  const std::uint32_t rounded = absolute + 0xFFF + ((absolute >> 13) & 1);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

double from_f16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

double from_f8e4m3(std::uint8_t bits) {
  const int exponent = (bits >> 3) & 15;
  const int mantissa = bits & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

std::uint8_t to_f8e4m3(float value) {
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const double magnitude = std::min(std::fabs(static_cast<double>(value)), 448.0);
  int exponent = 0;
  std::frexp(magnitude, &exponent);                                       // magnitude = f * 2^exponent, f in [0.5, 1)
  const int scale = std::max(exponent - 1, -6);                           // of the leading bit; -6: subnormal
  const double steps = std::nearbyint(std::ldexp(magnitude, 3 - scale));  // 8..16, below 8 where subnormal
  const int code = (scale + 7) * 8 + static_cast<int>(steps) - 8;
  return static_cast<std::uint8_t>(sign | code);
}

}  // namespace

const char* name_of(Layout layout) noexcept {
  return layout == Layout::nhd ? "nhd" : "hnd";
}

Batch PagedForest::batch() const {
  Batch out;
  out.qo_indptr = qo_indptr;
  out.kv = {kv_indptr, kv_indices, kv_last_page_len, page_size, pool->num_pages(), -1};
  return out;
}

std::int64_t PagedForest::num_tokens(std::size_t request) const {
  const std::int64_t pages = kv_indptr[request + 1] - kv_indptr[request];
  return pages == 0 ? 0 : (pages - 1) * page_size + kv_last_page_len[request];
}

std::int64_t count_pages(const Forest& forest, int page_size) {
  const std::vector<std::int64_t> length = path_lengths(forest);
  std::int64_t num_pages = 1;
  for (std::size_t i = 0; i < length.size(); ++i) {
    const std::int32_t parent = forest.nodes[i].parent;
    // What lies beyond the full pages above it.
    num_pages += (length[i] + page_size - 1) / page_size -
                 (parent < 0 ? 0 : length[static_cast<std::size_t>(parent)] / page_size);
  }
  return num_pages;
}

PagedForest make_paged(const Forest& forest, int page_size, std::uint64_t seed, bool shuffle_requests,
                       std::int64_t pool_pages) {
  PagedForest out;
  out.page_size = page_size;
  const std::vector<std::int64_t> length = path_lengths(forest);
  const std::int64_t num_pages = std::max(pool_pages, count_pages(forest, page_size));
  if (num_pages > INT32_MAX) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("workload: expected at most {} pages, got {}", INT32_MAX, num_pages));
  }
  out.pool = std::make_unique<PagePool>(static_cast<std::int32_t>(num_pages), page_size);
  PagePool& pool = *out.pool;
  std::vector<cpu::PageCopy> copies;
  std::vector<std::int64_t> slots;

  std::mt19937_64 random(seed);
  // The pool hands pages out in order; in memory they lie at random.
  std::vector<std::int32_t> place(static_cast<std::size_t>(num_pages));
  std::iota(place.begin(), place.end(), 0);
  std::ranges::shuffle(place, random);

  std::vector<SequenceId> sequences(forest.nodes.size());
  for (std::size_t i = 0; i < forest.nodes.size(); ++i) {
    const ForestNode& node = forest.nodes[i];
    const std::int64_t above =
        node.parent < 0 ? 0 : length[static_cast<std::size_t>(node.parent)] / page_size * page_size;
    sequences[i] =
        above > 0 ? pool.clone_detached_prefix(sequences[static_cast<std::size_t>(node.parent)], above) : pool.create();
    const std::int64_t most = std::int64_t{page_size} << 16;  // so that the slots, a number a token, stay few
    for (std::int64_t left = length[i] - above; left > 0; left -= most) {
      pool.prepare_append(sequences[i], std::min(left, most), copies, slots);
    }
  }

  std::vector<std::size_t> order(forest.requests.size());
  std::iota(order.begin(), order.end(), 0);
  if (shuffle_requests) std::ranges::shuffle(order, random);
  out.qo_indptr = out.kv_indptr = {0};
  for (const std::size_t r : order) {
    const auto node = static_cast<std::size_t>(forest.requests[r].node);
    const auto pages = pool.pages(sequences[node]);
    for (const std::int32_t page : pages) out.kv_indices.push_back(place[static_cast<std::size_t>(page)]);
    out.kv_indptr.push_back(static_cast<std::int32_t>(out.kv_indices.size()));
    out.kv_last_page_len.push_back(length[node] == 0 ? 0
                                                     : static_cast<std::int32_t>((length[node] - 1) % page_size + 1));
    out.qo_indptr.push_back(out.qo_indptr.back() + forest.requests[r].num_rows);
  }
  return out;
}

// --- Memory
// -------------------------------------------------------------------------------------------------------------

Buffer::Buffer(std::size_t bytes) : bytes_(round_up(std::max<std::size_t>(bytes, 1), kHugePage)) {
  void* const base = mmap(nullptr, bytes_ + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw Error(ErrorCode::io, fmt::format("benchmark memory: mmap of {} bytes failed", bytes_));
  // Aligned to a huge page; the rest of the mapping is given back.
  auto* const start = static_cast<std::byte*>(base);
  const std::size_t skip =
      round_up(reinterpret_cast<std::uintptr_t>(start), kHugePage) - reinterpret_cast<std::uintptr_t>(start);
  if (skip > 0) munmap(start, skip);
  if (skip < kHugePage) munmap(start + skip + bytes_, kHugePage - skip);
  data_ = start + skip;
  madvise(data_, bytes_, MADV_HUGEPAGE);
}

Buffer::Buffer(std::size_t bytes, std::size_t backing_bytes) : bytes_(round_up(bytes, backing_bytes)) {
  const int file = memfd_create("headwater-bench", 0);
  void* const base = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  bool good = file >= 0 && base != MAP_FAILED && ftruncate(file, static_cast<off_t>(backing_bytes)) == 0;
  for (std::size_t at = 0; good && at < bytes_; at += backing_bytes) {
    good = mmap(static_cast<std::byte*>(base) + at, backing_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
                0) != MAP_FAILED;
  }
  if (file >= 0) close(file);
  if (!good)
    throw Error(ErrorCode::io, fmt::format("benchmark memory: mapping {} bytes onto {} failed", bytes_, backing_bytes));
  data_ = static_cast<std::byte*>(base);
  madvise(data_, bytes_, MADV_HUGEPAGE);
}

Buffer::~Buffer() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

ColdKv::ColdKv(const AttentionShape& shape, std::int64_t num_pages, int page_size, Layout layout, bool mla,
               std::size_t cold_bytes) {
  const std::int64_t element = static_cast<std::int64_t>(size_of(shape.kv_dtype));
  const std::int64_t heads = shape.num_kv_heads;
  const auto side = [&](int head_dim) {  // elements of one page of K or of V
    return heads * page_size * static_cast<std::int64_t>(head_dim);
  };
  const std::int64_t k_elements = side(shape.head_dim_qk) * num_pages;
  const std::int64_t v_elements = mla ? 0 : side(shape.head_dim_vo) * num_pages;
  const std::size_t copy_bytes = round_up(static_cast<std::size_t>((k_elements + v_elements) * element), 4096);
  copy_bytes_ = copy_bytes;
  const std::size_t num_copies = std::clamp<std::size_t>(cold_bytes / std::max<std::size_t>(copy_bytes, 1) + 1, 1, 512);
  const std::size_t total = num_copies * copy_bytes;
  aliased_ = total > memory_budget();
  memory_ = aliased_ ? Buffer(total, kBackingBytes) : Buffer(total);
  const std::size_t filled = aliased_ ? kBackingBytes : total;
  fill_normal(memory_.data(), shape.kv_dtype, filled / static_cast<std::size_t>(element), 1.0F, 17);

  const auto tensor = [&](std::byte* data, int head_dim) {
    PagedTensor out{data, side(head_dim), heads * head_dim, head_dim};
    if (layout == Layout::hnd) {
      out.token_stride = head_dim;
      out.head_stride = static_cast<std::int64_t>(page_size) * head_dim;
    }
    return out;
  };
  for (std::size_t copy = 0; copy < num_copies; ++copy) {
    std::byte* const data = memory_.data() + copy * copy_bytes;
    KvCache cache;
    cache.k = tensor(data, shape.head_dim_qk);
    cache.v = mla ? cache.k : tensor(data + k_elements * element, shape.head_dim_vo);
    cache.dtype = shape.kv_dtype;
    cache.num_pages = num_pages;
    cache.page_size = page_size;
    caches_.push_back(cache);
  }
}

void fill_normal(void* data, DType dtype, std::size_t count, float deviation, std::uint64_t seed) {
  // One table of random values, written again and again; its length is odd so that repetitions do not line up with
  // pages.
  const std::size_t table_count = std::min<std::size_t>(count, (std::size_t{1} << 18) + 1);
  const std::size_t element = size_of(dtype);
  std::vector<std::byte> table(table_count * element);
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0F, deviation);
  for (std::size_t i = 0; i < table_count; ++i) {
    const float value = normal(random);
    std::byte* const at = table.data() + i * element;
    if (dtype == DType::f32) {
      std::memcpy(at, &value, 4);
    } else if (dtype == DType::f8e4m3) {
      const std::uint8_t code = to_f8e4m3(value);
      std::memcpy(at, &code, 1);
    } else {
      const std::uint16_t code = dtype == DType::bf16 ? to_bf16(value) : to_f16(value);
      std::memcpy(at, &code, 2);
    }
  }
  auto* out = static_cast<std::byte*>(data);
  for (std::size_t done = 0; done < count; done += table_count) {
    const std::size_t part = std::min(table_count, count - done);
    std::memcpy(out + done * element, table.data(), part * element);
  }
}

double load_element(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(data)[index];
    case DType::f16:
      return from_f16(static_cast<const std::uint16_t*>(data)[index]);
    case DType::bf16:
      return std::bit_cast<float>(static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(data)[index]) << 16);
    case DType::f8e4m3:
      return from_f8e4m3(static_cast<const std::uint8_t*>(data)[index]);
  }
  return 0;
}

}  // namespace headwater::bench
