// Automatic prefix cache: a radix tree over blocks of page_size tokens whose nodes hold physical pages of a PagePool.
// Requests that start with the same tokens adopt the same pages; that is what makes sharing arise.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "headwater/page_pool.h"

namespace headwater {

struct PrefixCacheStats {
  std::int64_t lookups = 0;
  std::int64_t hits = 0;  ///< lookups that found at least one page
  std::int64_t tokens_requested = 0;
  std::int64_t tokens_hit = 0;
  std::int64_t pages_inserted = 0;
  std::int64_t pages_evicted = 0;
  std::int64_t pages_cached = 0;  ///< now
};

/// Full pages only. Tokens are compared, not only hashes. Leaves are evicted first, least recently used first, and
/// never while anybody but the cache holds them. Not thread safe.
class PrefixCache {
 public:
  /// The pool must outlive the cache. The cache's references are dropped on destruction.
  explicit PrefixCache(PagePool& pool);
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  /// Pages of the longest cached prefix of `tokens`; at most (tokens.size() - 1) / page_size of them, so that at least
  /// the last token is computed. `salt` separates callers that must not share. The pages are valid until the next call
  /// that may evict; adopt them at once (PagePool::adopt).
  [[nodiscard]] std::vector<std::int32_t> lookup(std::span<const std::int32_t> tokens, std::uint64_t salt = 0);

  /// Inserts the full pages of a sequence whose tokens are given; each newly cached page is retained. Where a prefix is
  /// already cached under other pages, the cached ones are kept; the returned list (one id per full page) says which
  /// pages now stand for the prefix, so that a sequence may adopt them (PagePool::replace_prefix). `pages` may be
  /// longer than the full pages (a partly filled last one is ignored). A page that is cached for other tokens is
  /// refused.
  std::vector<std::int32_t> insert(std::span<const std::int32_t> tokens, std::span<const std::int32_t> pages,
                                   std::uint64_t salt = 0);

  /// Evicts until `num_pages` pages have been freed or nothing more can be; returns the number freed. Costs
  /// O((num_pages + cached leaves in use) log leaves).
  std::int32_t evict(std::int32_t num_pages);
  /// Evicts everything that nobody uses.
  void clear();

  [[nodiscard]] const PrefixCacheStats& stats() const noexcept;
  /// References that the cache holds, per page [num_pages]: for PagePool::audit.
  [[nodiscard]] std::vector<std::int32_t> held_pages() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace headwater
