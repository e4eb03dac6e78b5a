// A pool of reference-counted KV pages. It hands out page ids and keeps counts; it owns no tensor memory.
//
// A Sequence is the page table of one request: page ids in order and a number of written tokens. Sequences may share
// pages (clone, fork, a cached prefix); a page returns to the free list when its last reference goes. Every operation
// costs O(pages and tokens it touches); on an error nothing has changed. Not thread safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "headwater/cpu.h"

namespace headwater {

/// Index of a sequence inside its pool.
using SequenceId = std::int32_t;

class PagePool {
 public:
  /// num_pages >= 1, page_size >= 1. reserve_null_page keeps page 0 out of circulation (padding of device tables).
  PagePool(std::int32_t num_pages, int page_size, bool reserve_null_page = false);

  [[nodiscard]] int page_size() const noexcept { return page_size_; }
  [[nodiscard]] std::int32_t num_pages() const noexcept;
  [[nodiscard]] std::int32_t num_free() const noexcept;
  [[nodiscard]] std::int32_t ref_count(std::int32_t page) const;  ///< 0 for the null page; Error when out of range

  // Sequences.
  [[nodiscard]] SequenceId create();
  /// A sequence that starts with already written full pages (a cached prefix); each is retained.
  [[nodiscard]] SequenceId adopt(std::span<const std::int32_t> pages);
  /// A new sequence sharing the first target_tokens of `source`: a positive multiple of the page size and at most the
  /// written length. Full pages only; the source lives on.
  [[nodiscard]] SequenceId clone_detached_prefix(SequenceId source, std::int64_t target_tokens);
  /// A new sequence sharing all pages of `source`, a partly filled last one too (copied on the first append to either).
  [[nodiscard]] SequenceId fork(SequenceId source);
  /// The id may be handed out again by the next create, adopt, clone or fork.
  void release(SequenceId sequence);

  [[nodiscard]] std::int64_t num_tokens(SequenceId sequence) const;
  [[nodiscard]] std::span<const std::int32_t> pages(SequenceId sequence) const;

  /// Reserves room for num_tokens more. Replaces the contents of `copies` by the pages to copy first (at most one: a
  /// shared, partly filled last page) and of `token_slots` by the num_tokens slots to write (page * page_size +
  /// offset). On Error(out_of_pages) nothing has changed. The tokens count as written afterwards. The copies of several
  /// sequences may be gathered and run together before all appends, as long as nothing is released in between.
  void prepare_append(SequenceId sequence, std::int64_t num_tokens, std::vector<cpu::PageCopy>& copies,
                      std::vector<std::int64_t>& token_slots);
  /// Keeps the first num_tokens tokens (at most the written length); pages left empty are released.
  void truncate(SequenceId sequence, std::int64_t num_tokens);
  /// Puts `pages` (live, full, with the same keys and values) in the place of the sequence's first full pages, and lets
  /// go of those: how a sequence takes over the pages that PrefixCache::insert returned.
  void replace_prefix(SequenceId sequence, std::span<const std::int32_t> pages);

  // Pages held by others than sequences (PrefixCache).
  void retain(std::int32_t page);
  void release_page(std::int32_t page);

  /// Recounts every reference of sequences plus `external` [num_pages] and throws Error(internal) naming the first page
  /// whose count differs. For tests and debugging.
  void audit(std::span<const std::int32_t> external_refs = {}) const;

 private:
  struct Sequence {
    std::vector<std::int32_t> pages;  // ceil(num_tokens / page_size)
    std::int64_t num_tokens = 0;
    bool live = false;
  };
  [[nodiscard]] const Sequence& at(SequenceId sequence) const;
  [[nodiscard]] Sequence& at(SequenceId sequence);
  [[nodiscard]] SequenceId share(std::span<const std::int32_t> pages, std::int64_t num_tokens);
  void check_live(std::span<const std::int32_t> pages) const;
  void unref(std::int32_t page) noexcept;

  int page_size_;
  bool reserve_null_page_;
  std::vector<std::int32_t> refs_;  // [num_pages]
  std::vector<std::int32_t> free_;  // a stack with room for every page: giving back never allocates
  std::vector<Sequence> sequences_;
  std::vector<SequenceId> free_sequences_;  // a stack with room for every sequence
};

}  // namespace headwater
