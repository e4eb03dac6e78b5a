// A forest with pages: real sequences of a PagePool, their page tables, and cold KV memory behind the page ids.
//
// Pages are taken from a shuffled free list, so that neighbours in a table are not neighbours in memory. A child adopts
// the full pages of its parent (clone_detached_prefix); what lies in the parent's partly filled last page is stored
// again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "bench/forest.h"
#include "headwater/batch.h"
#include "headwater/cpu.h"
#include "headwater/options.h"
#include "headwater/page_pool.h"

namespace headwater::bench {

enum class Layout : std::uint8_t { nhd, hnd };
[[nodiscard]] const char* name_of(Layout layout) noexcept;

/// The page tables of a forest's requests. Owns the pool and its sequences.
struct PagedForest {
  std::unique_ptr<PagePool> pool;
  std::vector<std::int32_t> qo_indptr, kv_indptr, kv_indices, kv_last_page_len;
  int page_size = 16;

  [[nodiscard]] Batch batch() const;
  [[nodiscard]] std::int64_t num_tokens(std::size_t request) const;
  [[nodiscard]] int num_rows() const { return qo_indptr.empty() ? 0 : qo_indptr.back(); }
};

/// Pages that make_paged takes.
[[nodiscard]] std::int64_t count_pages(const Forest& forest, int page_size);

/// Puts a forest into pages. `shuffle_requests`: requests in an order unrelated to the tree, as a server would have
/// them. `pool_pages`: size of the pool, if larger than needed.
[[nodiscard]] PagedForest make_paged(const Forest& forest, int page_size, std::uint64_t seed,
                                     bool shuffle_requests = false, std::int64_t pool_pages = 0);

/// Memory from mmap with huge pages asked for.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes);
  /// `bytes` of address space backed by only `backing_bytes` of memory, mapped again and again: for caches larger than
  /// the machine. Page ids stay distinct, so sharing is what the tables say; reads are real.
  Buffer(std::size_t bytes, std::size_t backing_bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Copies of one KV cache, used in turn so that what a step reads is not in a processor cache from the step before.
class ColdKv {
 public:
  /// Enough copies that they cover at least `cold_bytes` (one copy: warm). With `mla`, V is a view of K's first
  /// head_dim_vo elements. Filled with values of unit variance.
  ColdKv(const AttentionShape& shape, std::int64_t num_pages, int page_size, Layout layout, bool mla,
         std::size_t cold_bytes);

  /// The next copy.
  [[nodiscard]] const KvCache& next() noexcept { return caches_[turn_++ % caches_.size()]; }
  [[nodiscard]] const std::vector<KvCache>& caches() const noexcept { return caches_; }
  [[nodiscard]] bool aliased() const noexcept { return aliased_; }
  /// Of one copy: from K's first element of one to that of the next.
  [[nodiscard]] std::size_t copy_bytes() const noexcept { return copy_bytes_; }

 private:
  Buffer memory_;
  std::vector<KvCache> caches_;
  std::size_t turn_ = 0;
  std::size_t copy_bytes_ = 0;
  bool aliased_ = false;
};

/// Fills `count` elements with normally distributed values of the given standard deviation (a long table, repeated).
void fill_normal(void* data, DType dtype, std::size_t count, float deviation, std::uint64_t seed);

/// One element as a double.
[[nodiscard]] double load_element(const void* data, DType dtype, std::int64_t index);

}  // namespace headwater::bench
