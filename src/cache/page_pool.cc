// PagePool: ids, reference counts and page tables; no tensor memory.
//
// Free pages form a stack, so that pages given back last (still warm in cache) are handed out first; the null page has
// no reference and is not on it. Every public function checks all it needs, then allocates, then changes: an error
// leaves the pool as it was.
#include "headwater/page_pool.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "headwater/error.h"

namespace headwater {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::invalid_argument, message);
}

std::string str(std::int64_t value) {
  return std::to_string(value);
}

std::int64_t pages_for(std::int64_t num_tokens, std::int64_t page_size) {
  return num_tokens / page_size + (num_tokens % page_size != 0 ? 1 : 0);
}

}  // namespace

PagePool::PagePool(std::int32_t num_pages, int page_size, bool reserve_null_page)
    : page_size_(page_size), reserve_null_page_(reserve_null_page) {
  if (num_pages < 1) refuse("num_pages = " + str(num_pages) + ", expected at least 1");
  if (page_size < 1) refuse("page_size = " + str(page_size) + ", expected at least 1");
  refs_.assign(static_cast<std::size_t>(num_pages), 0);
  free_.reserve(static_cast<std::size_t>(num_pages));
  const std::int32_t first = reserve_null_page ? 1 : 0;
  for (std::int32_t page = num_pages - 1; page >= first; --page) free_.push_back(page);
}

std::int32_t PagePool::num_pages() const noexcept {
  return static_cast<std::int32_t>(refs_.size());
}
std::int32_t PagePool::num_free() const noexcept {
  return static_cast<std::int32_t>(free_.size());
}

std::int32_t PagePool::ref_count(std::int32_t page) const {
  if (page < 0 || page >= num_pages()) {
    refuse("page = " + str(page) + ", expected an id in [0, " + str(num_pages()) + ")");
  }
  return refs_[static_cast<std::size_t>(page)];
}

const PagePool::Sequence& PagePool::at(SequenceId sequence) const {
  if (sequence < 0 || static_cast<std::size_t>(sequence) >= sequences_.size()) {
    refuse("sequence = " + str(sequence) + ", expected an id in [0, " +
           str(static_cast<std::int64_t>(sequences_.size())) + ")");
  }
  const Sequence& s = sequences_[static_cast<std::size_t>(sequence)];
  if (!s.live) refuse("sequence = " + str(sequence) + ", expected one that has not been released");
  return s;
}

PagePool::Sequence& PagePool::at(SequenceId sequence) {
  return const_cast<Sequence&>(static_cast<const PagePool*>(this)->at(sequence));
}

void PagePool::check_live(std::span<const std::int32_t> pages) const {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const bool in_range = pages[i] >= 0 && pages[i] < num_pages();
    if (in_range && refs_[static_cast<std::size_t>(pages[i])] > 0) continue;
    refuse("pages[" + str(static_cast<std::int64_t>(i)) + "] = " + str(pages[i]) +
           (in_range ? ", expected a page in use" : ", expected an id in [0, " + str(num_pages()) + ")"));
  }
}

void PagePool::unref(std::int32_t page) noexcept {
  if (--refs_[static_cast<std::size_t>(page)] == 0) free_.push_back(page);
}

/// A new sequence over `pages`, which are live; each is retained. `pages` may belong to a sequence of this pool.
SequenceId PagePool::share(std::span<const std::int32_t> pages, std::int64_t num_tokens) {
  std::vector<std::int32_t> table(pages.begin(), pages.end());
  if (free_sequences_.empty()) {
    if (sequences_.size() >= static_cast<std::size_t>(std::numeric_limits<SequenceId>::max())) {
      refuse("number of sequences = " + str(static_cast<std::int64_t>(sequences_.size())) +
             ", expected fewer: ids are 32 bits");
    }
    if (free_sequences_.capacity() <= sequences_.size()) free_sequences_.reserve(2 * sequences_.size() + 16);
    sequences_.emplace_back();
    free_sequences_.push_back(static_cast<SequenceId>(sequences_.size() - 1));
  }
  const SequenceId id = free_sequences_.back();
  free_sequences_.pop_back();
  for (const std::int32_t page : table) ++refs_[static_cast<std::size_t>(page)];
  sequences_[static_cast<std::size_t>(id)] = {std::move(table), num_tokens, true};
  return id;
}

SequenceId PagePool::create() {
  return share({}, 0);
}

SequenceId PagePool::adopt(std::span<const std::int32_t> pages) {
  check_live(pages);
  return share(pages, static_cast<std::int64_t>(pages.size()) * page_size_);
}

SequenceId PagePool::clone_detached_prefix(SequenceId source, std::int64_t target_tokens) {
  const Sequence& s = at(source);
  if (target_tokens <= 0 || target_tokens % page_size_ != 0) {
    refuse("target_tokens = " + str(target_tokens) +
           ", expected a positive multiple of page_size = " + str(page_size_));
  }
  if (target_tokens > s.num_tokens) {
    refuse("target_tokens = " + str(target_tokens) + " exceeds the " + str(s.num_tokens) +
           " written tokens of sequence " + str(source));
  }
  return share(std::span(s.pages).first(static_cast<std::size_t>(target_tokens / page_size_)), target_tokens);
}

SequenceId PagePool::fork(SequenceId source) {
  const Sequence& s = at(source);
  return share(s.pages, s.num_tokens);
}

void PagePool::release(SequenceId sequence) {
  Sequence& s = at(sequence);
  // Back to front: the stack then hands the pages out again in their old order.
  for (auto page = s.pages.rbegin(); page != s.pages.rend(); ++page) unref(*page);
  s = Sequence{};
  free_sequences_.push_back(sequence);
}

std::int64_t PagePool::num_tokens(SequenceId sequence) const {
  return at(sequence).num_tokens;
}
std::span<const std::int32_t> PagePool::pages(SequenceId sequence) const {
  return at(sequence).pages;
}

void PagePool::prepare_append(SequenceId sequence, std::int64_t num_tokens, std::vector<cpu::PageCopy>& copies,
                              std::vector<std::int64_t>& token_slots) {
  Sequence& s = at(sequence);
  if (num_tokens < 0) refuse("num_tokens = " + str(num_tokens) + ", expected at least 0");
  if (num_tokens > std::int64_t{num_pages()} * page_size_) {
    throw Error(ErrorCode::out_of_pages, "num_tokens = " + str(num_tokens) + " exceeds the whole pool of " +
                                             str(num_pages()) + " pages of " + str(page_size_) + " tokens");
  }
  const auto tail = static_cast<std::int32_t>(s.num_tokens % page_size_);  // tokens in a partly filled last page
  const bool copy = num_tokens > 0 && tail != 0 && refs_[static_cast<std::size_t>(s.pages.back())] > 1;
  const std::int64_t more =
      pages_for(s.num_tokens + num_tokens, page_size_) - static_cast<std::int64_t>(s.pages.size());
  const std::int64_t needed = more + (copy ? 1 : 0);
  if (needed > num_free()) {
    throw Error(ErrorCode::out_of_pages, "sequence " + str(sequence) + " needs " + str(needed) + " pages for " +
                                             str(num_tokens) + " more tokens, " + str(num_free()) + " are free");
  }
  // Everything that can throw, before anything changes. Page tables grow by doubling, not to the exact size.
  const std::size_t table_size = s.pages.size() + static_cast<std::size_t>(more);
  if (table_size > s.pages.capacity()) s.pages.reserve(std::max(table_size, 2 * s.pages.capacity()));
  token_slots.reserve(static_cast<std::size_t>(num_tokens));
  copies.reserve(1);
  token_slots.clear();
  copies.clear();

  const auto take = [this] {
    const std::int32_t page = free_.back();
    free_.pop_back();
    refs_[static_cast<std::size_t>(page)] = 1;
    return page;
  };
  if (copy) {
    const std::int32_t src = s.pages.back();
    s.pages.back() = take();
    unref(src);
    copies.push_back({src, s.pages.back(), tail});
  }
  for (std::int64_t i = 0; i < more; ++i) s.pages.push_back(take());
  for (std::int64_t pos = s.num_tokens; pos < s.num_tokens + num_tokens; ++pos) {
    token_slots.push_back(std::int64_t{s.pages[static_cast<std::size_t>(pos / page_size_)]} * page_size_ +
                          pos % page_size_);
  }
  s.num_tokens += num_tokens;
}

void PagePool::truncate(SequenceId sequence, std::int64_t num_tokens) {
  Sequence& s = at(sequence);
  if (num_tokens < 0 || num_tokens > s.num_tokens) {
    refuse("num_tokens = " + str(num_tokens) + ", expected 0 to the " + str(s.num_tokens) +
           " written tokens of sequence " + str(sequence));
  }
  s.num_tokens = num_tokens;
  const auto keep = static_cast<std::size_t>(pages_for(num_tokens, page_size_));
  while (s.pages.size() > keep) {
    unref(s.pages.back());
    s.pages.pop_back();
  }
}

void PagePool::replace_prefix(SequenceId sequence, std::span<const std::int32_t> pages) {
  Sequence& s = at(sequence);
  const std::int64_t full = s.num_tokens / page_size_;
  if (static_cast<std::int64_t>(pages.size()) > full) {
    refuse("pages has " + str(static_cast<std::int64_t>(pages.size())) + " entries, expected at most the " + str(full) +
           " full pages of sequence " + str(sequence));
  }
  check_live(pages);
  // All new ones first: they may be the old ones in another order.
  for (const std::int32_t page : pages) ++refs_[static_cast<std::size_t>(page)];
  for (std::size_t i = 0; i < pages.size(); ++i) unref(std::exchange(s.pages[i], pages[i]));
}

void PagePool::retain(std::int32_t page) {
  if (ref_count(page) == 0) refuse("page = " + str(page) + ", expected a page in use");
  ++refs_[static_cast<std::size_t>(page)];
}

void PagePool::release_page(std::int32_t page) {
  if (ref_count(page) == 0) refuse("page = " + str(page) + ", expected a page in use");
  unref(page);
}

void PagePool::audit(std::span<const std::int32_t> external_refs) const {
  const auto fail = [](const std::string& message) { throw Error(ErrorCode::internal, "page pool audit: " + message); };
  if (!external_refs.empty() && external_refs.size() != refs_.size()) {
    refuse("external_refs has " + str(static_cast<std::int64_t>(external_refs.size())) +
           " entries, expected num_pages = " + str(num_pages()));
  }
  std::vector<std::int32_t> expected(refs_.size(), 0);
  for (std::size_t page = 0; page < external_refs.size(); ++page) expected[page] += external_refs[page];
  for (std::size_t id = 0; id < sequences_.size(); ++id) {
    const Sequence& s = sequences_[id];
    if (static_cast<std::int64_t>(s.pages.size()) != pages_for(s.num_tokens, page_size_)) {
      fail("sequence " + str(static_cast<std::int64_t>(id)) + " has " + str(static_cast<std::int64_t>(s.pages.size())) +
           " pages for " + str(s.num_tokens) + " tokens");
    }
    for (const std::int32_t page : s.pages) ++expected[static_cast<std::size_t>(page)];
  }
  std::vector<std::int32_t> times_free(refs_.size(), 0);
  for (const std::int32_t page : free_) ++times_free[static_cast<std::size_t>(page)];
  for (std::size_t page = 0; page < refs_.size(); ++page) {
    const std::string name = "page " + str(static_cast<std::int64_t>(page));
    if (refs_[page] != expected[page]) {
      fail(name + " has count " + str(refs_[page]) + ", expected " + str(expected[page]));
    }
    const bool null_page = reserve_null_page_ && page == 0;
    if (times_free[page] != (expected[page] == 0 && !null_page ? 1 : 0)) {
      fail(name + " with count " + str(refs_[page]) + " is " + str(times_free[page]) + " times in the free list");
    }
  }
}

}  // namespace headwater
