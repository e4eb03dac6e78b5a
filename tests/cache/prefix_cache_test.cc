// PrefixCache against a naive model that keeps a list of (salt, tokens up to the block's end) with page and last use,
// and recomputes leaves by looking at everything.
#include "headwater/prefix_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "headwater/error.h"

namespace headwater {
namespace {

using Tokens = std::vector<std::int32_t>;
using Pages = std::vector<std::int32_t>;

/// A sequence with n written tokens.
SequenceId filled(PagePool& pool, std::int64_t n) {
  const SequenceId id = pool.create();
  std::vector<cpu::PageCopy> copies;
  std::vector<std::int64_t> slots;
  pool.prepare_append(id, n, copies, slots);
  return id;
}

Pages pages_of(const PagePool& pool, SequenceId id) {
  const auto pages = pool.pages(id);
  return {pages.begin(), pages.end()};
}

Tokens iota(int first, int count) {
  Tokens t(static_cast<std::size_t>(count));
  std::iota(t.begin(), t.end(), first);
  return t;
}

template <typename F>
std::string refusal(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
    return e.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return "";
}

struct Entry {
  std::int32_t page = 0;
  std::uint64_t last_use = 0;
};

/// The naive cache.
struct Naive {
  using Key = std::pair<std::uint64_t, Tokens>;  // salt, all tokens up to the end of the block
  std::map<Key, Entry> entries;
  std::uint64_t tick = 0;
  std::size_t page_size;

  Tokens prefix(const Tokens& tokens, std::size_t blocks) const {
    return {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(blocks * page_size)};
  }

  Pages lookup(const Tokens& tokens, std::uint64_t salt) {
    ++tick;
    Pages pages;
    for (std::size_t i = 1; i * page_size < tokens.size(); ++i) {
      const auto entry = entries.find({salt, prefix(tokens, i)});
      if (entry == entries.end()) break;
      entry->second.last_use = tick;
      pages.push_back(entry->second.page);
    }
    return pages;
  }

  Pages insert(const Tokens& tokens, const Pages& own, std::uint64_t salt) {
    ++tick;
    Pages pages;
    for (std::size_t i = 1; i * page_size <= tokens.size(); ++i) {
      Entry& e = entries.try_emplace({salt, prefix(tokens, i)}, Entry{own[i - 1], 0}).first->second;
      e.last_use = tick;
      pages.push_back(e.page);
    }
    return pages;
  }

  bool is_leaf(const Key& key) const {
    return std::none_of(entries.begin(), entries.end(), [&](const auto& other) {
      return other.first.first == key.first && other.first.second.size() == key.second.size() + page_size &&
             std::equal(key.second.begin(), key.second.end(), other.first.second.begin());
    });
  }

  /// Evicts one by one; `in_use` says which pages somebody else holds. Returns the freed pages in order.
  Pages evict(std::int32_t n, const std::vector<bool>& in_use) {
    Pages freed;
    while (static_cast<std::int32_t>(freed.size()) < n) {
      auto oldest = entries.end();
      for (auto e = entries.begin(); e != entries.end(); ++e) {
        if (in_use[static_cast<std::size_t>(e->second.page)] || !is_leaf(e->first)) continue;
        if (oldest == entries.end() || e->second.last_use < oldest->second.last_use) oldest = e;
      }
      if (oldest == entries.end()) break;
      freed.push_back(oldest->second.page);
      entries.erase(oldest);
    }
    return freed;
  }
};

TEST(PrefixCache, RandomOperationsAgreeWithNaiveModel) {
  std::int64_t hits = 0, adoptions = 0, evictions = 0, skipped_in_use = 0;
  for (unsigned seed = 0; seed < 40; ++seed) {
    std::mt19937 rng(seed);
    const auto pick = [&rng](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(rng); };
    const int page_size = static_cast<int>(1 + pick(3));
    PagePool pool(static_cast<std::int32_t>(12 + pick(40)), page_size);
    auto cache = std::make_unique<PrefixCache>(pool);
    Naive naive;
    naive.page_size = static_cast<std::size_t>(page_size);
    std::vector<std::pair<SequenceId, Tokens>> live;

    for (int step = 0; step < 250; ++step) {
      const std::size_t op = pick(4);
      const std::uint64_t salt = pick(2);
      if (op <= 1) {  // a request: look up, adopt, append the rest, insert, take over
        Tokens tokens(1 + pick(static_cast<std::size_t>(6 * page_size)));
        for (auto& t : tokens) t = static_cast<std::int32_t>(pick(2));
        const Pages found = cache->lookup(tokens, salt);
        ASSERT_EQ(found, naive.lookup(tokens, salt));
        hits += found.empty() ? 0 : 1;
        const SequenceId id = pool.adopt(found);
        std::vector<cpu::PageCopy> copies;
        std::vector<std::int64_t> slots;
        try {
          pool.prepare_append(id, static_cast<std::int64_t>(tokens.size()) - pool.num_tokens(id), copies, slots);
        } catch (const Error& e) {
          ASSERT_EQ(e.code(), ErrorCode::out_of_pages);
          pool.release(id);
          continue;
        }
        ASSERT_TRUE(copies.empty());
        const Pages own = pages_of(pool, id);
        const Pages standing = cache->insert(tokens, own, salt);
        ASSERT_EQ(standing, naive.insert(tokens, own, salt));
        adoptions += std::equal(standing.begin(), standing.end(), own.begin()) ? 0 : 1;
        pool.replace_prefix(id, standing);
        live.emplace_back(id, tokens);
      } else if (op == 2 && !live.empty()) {
        const std::size_t i = pick(live.size());
        pool.release(live[i].first);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        std::vector<bool> in_use(static_cast<std::size_t>(pool.num_pages()), false);
        for (const auto& [id, tokens] : live) {
          for (const std::int32_t page : pool.pages(id)) in_use[static_cast<std::size_t>(page)] = true;
        }
        const auto n = static_cast<std::int32_t>(pick(6));
        const std::int32_t free_before = pool.num_free();
        const std::int32_t freed = cache->evict(n);
        const Pages expected = naive.evict(n, in_use);
        ASSERT_EQ(freed, static_cast<std::int32_t>(expected.size()));
        ASSERT_EQ(pool.num_free(), free_before + freed);
        for (const std::int32_t page : expected) ASSERT_EQ(pool.ref_count(page), 0);
        evictions += freed;
        skipped_in_use += freed < n && cache->stats().pages_cached > 0 ? 1 : 0;
      }
      Pages held(static_cast<std::size_t>(pool.num_pages()), 0);
      for (const auto& [key, entry] : naive.entries) ++held[static_cast<std::size_t>(entry.page)];
      ASSERT_EQ(cache->held_pages(), held);
      ASSERT_EQ(cache->stats().pages_cached, static_cast<std::int64_t>(naive.entries.size()));
      ASSERT_EQ(cache->stats().pages_inserted - cache->stats().pages_evicted, cache->stats().pages_cached);
      ASSERT_NO_THROW(pool.audit(held));
    }
    cache.reset();
    ASSERT_NO_THROW(pool.audit());
    for (const auto& [id, tokens] : live) pool.release(id);
    EXPECT_EQ(pool.num_free(), pool.num_pages());
  }
  EXPECT_GT(hits, 100);  // every path was taken
  EXPECT_GT(adoptions, 20);
  EXPECT_GT(evictions, 100);
  EXPECT_GT(skipped_in_use, 20);
}

TEST(PrefixCache, AtLeastTheLastTokenIsComputed) {
  PagePool pool(8, 4);
  PrefixCache cache(pool);
  const Tokens tokens = iota(0, 8);
  const SequenceId a = filled(pool, 8);
  cache.insert(tokens, pool.pages(a));
  EXPECT_EQ(cache.lookup(tokens).size(), 1U);  // 8 tokens: the second page holds the last token
  EXPECT_EQ(cache.lookup(iota(0, 9)).size(), 2U);
  EXPECT_EQ(cache.lookup(iota(0, 4)).size(), 0U);
  EXPECT_EQ(cache.lookup(iota(0, 5)).size(), 1U);
  EXPECT_EQ(cache.lookup({}).size(), 0U);
}

TEST(PrefixCache, SequencesThatAdoptTheSameEntryHoldTheSamePages) {
  PagePool pool(8, 4);
  PrefixCache cache(pool);
  const SequenceId a = filled(pool, 10);
  const Tokens tokens = iota(0, 10);
  EXPECT_EQ(cache.insert(tokens, pool.pages(a)).size(), 2U);  // the partly filled third page stays out
  const SequenceId b = pool.adopt(cache.lookup(tokens));
  const SequenceId c = pool.adopt(cache.lookup(tokens));
  EXPECT_EQ(pages_of(pool, b), pages_of(pool, c));
  EXPECT_EQ(pool.pages(b)[0], pool.pages(a)[0]);
  EXPECT_EQ(pool.ref_count(pool.pages(a)[0]), 4);
  EXPECT_EQ(pool.ref_count(pool.pages(a)[2]), 1);
  pool.audit(cache.held_pages());
}

TEST(PrefixCache, TheLaterOfTwoEqualSequencesAdoptsTheCachedPages) {
  PagePool pool(8, 4);
  PrefixCache cache(pool);
  const Tokens tokens = iota(0, 9);
  const SequenceId a = filled(pool, 9);
  const SequenceId b = filled(pool, 9);  // computed at the same time, before either was inserted
  cache.insert(tokens, pool.pages(a));
  const Pages standing = cache.insert(tokens, pool.pages(b));
  EXPECT_EQ(standing, (Pages{pool.pages(a)[0], pool.pages(a)[1]}));
  pool.replace_prefix(b, standing);
  EXPECT_EQ(pool.pages(b)[1], pool.pages(a)[1]);
  EXPECT_NE(pool.pages(b)[2], pool.pages(a)[2]);
  EXPECT_EQ(pool.num_free(), 8 - 4);
  EXPECT_EQ(cache.stats().pages_inserted, 2);
  pool.audit(cache.held_pages());
}

TEST(PrefixCache, SaltSeparates) {
  PagePool pool(8, 4);
  PrefixCache cache(pool);
  const Tokens tokens = iota(0, 9);
  const SequenceId a = filled(pool, 9);
  const SequenceId b = filled(pool, 9);
  cache.insert(tokens, pool.pages(a), 1);
  EXPECT_TRUE(cache.lookup(tokens, 2).empty());
  EXPECT_TRUE(cache.lookup(tokens).empty());
  cache.insert(tokens, pool.pages(b), 2);
  EXPECT_EQ(cache.lookup(tokens, 1)[0], pool.pages(a)[0]);
  EXPECT_EQ(cache.lookup(tokens, 2)[0], pool.pages(b)[0]);
}

TEST(PrefixCache, EqualBlocksAtDifferentDepthsAreDifferentEntries) {
  PagePool pool(8, 2);
  PrefixCache cache(pool);
  const Tokens tokens{5, 5, 5, 5, 5, 5, 5};
  const SequenceId a = filled(pool, 7);
  cache.insert(tokens, pool.pages(a));
  EXPECT_EQ(cache.lookup(tokens), (Pages{pool.pages(a)[0], pool.pages(a)[1], pool.pages(a)[2]}));
}

TEST(PrefixCache, EvictsLeastRecentlyUsedLeavesFirst) {
  PagePool pool(8, 1);
  PrefixCache cache(pool);
  // A trunk 1 with branches 2 -> 3 and 4.
  const SequenceId a = filled(pool, 3);
  cache.insert(Tokens{1, 2, 3}, pool.pages(a));
  const SequenceId b = pool.adopt(cache.lookup(Tokens{1, 4}));
  std::vector<cpu::PageCopy> copies;
  std::vector<std::int64_t> slots;
  pool.prepare_append(b, 1, copies, slots);
  cache.insert(Tokens{1, 4}, pool.pages(b));
  const Pages branch = pages_of(pool, a);
  const Pages other = pages_of(pool, b);
  EXPECT_EQ(cache.evict(8), 0);  // everything is in use
  pool.release(a);
  pool.release(b);
  EXPECT_EQ(cache.lookup(Tokens{1, 2, 3, 0}).size(), 3U);  // now branch 2 -> 3 is the younger one

  EXPECT_EQ(cache.evict(1), 1);
  EXPECT_EQ(pool.ref_count(other[1]), 0);
  EXPECT_EQ(cache.evict(1), 1);
  EXPECT_EQ(pool.ref_count(branch[2]), 0);
  EXPECT_EQ(pool.ref_count(branch[1]), 1);
  EXPECT_EQ(cache.evict(5), 2);
  EXPECT_EQ(pool.num_free(), 8);
  EXPECT_EQ(cache.stats().pages_evicted, 4);
  EXPECT_EQ(cache.stats().pages_cached, 0);
}

TEST(PrefixCache, NeverFreesAPageInUse) {
  PagePool pool(8, 1);
  PrefixCache cache(pool);
  const SequenceId a = filled(pool, 3);
  const SequenceId b = filled(pool, 2);
  cache.insert(Tokens{1, 2, 3}, pool.pages(a));
  cache.insert(Tokens{9, 9}, pool.pages(b));
  const SequenceId c = pool.adopt(cache.lookup(Tokens{1, 2, 0}));
  pool.release(a);
  pool.release(b);
  cache.clear();
  EXPECT_EQ(cache.stats().pages_cached, 2);  // 1 and 2, in use by c
  EXPECT_EQ(pool.ref_count(pool.pages(c)[0]), 2);
  EXPECT_EQ(pool.num_free(), 6);
  pool.release(c);
  cache.clear();
  EXPECT_EQ(pool.num_free(), 8);
}

TEST(PrefixCache, HitStatistics) {
  PagePool pool(8, 4);
  PrefixCache cache(pool);
  const SequenceId a = filled(pool, 8);
  (void)cache.lookup(iota(0, 8));
  cache.insert(iota(0, 8), pool.pages(a));
  (void)cache.lookup(iota(0, 10));
  (void)cache.lookup(iota(0, 6));
  (void)cache.lookup(iota(100, 7));
  EXPECT_EQ(cache.stats().lookups, 4);
  EXPECT_EQ(cache.stats().hits, 2);
  EXPECT_EQ(cache.stats().tokens_requested, 8 + 10 + 6 + 7);
  EXPECT_EQ(cache.stats().tokens_hit, 8 + 4);
  EXPECT_EQ(cache.stats().pages_inserted, 2);
}

TEST(PrefixCache, RefusalsChangeNothing) {
  PagePool pool(8, 2, true);
  PrefixCache cache(pool);
  const SequenceId a = filled(pool, 6);
  const Pages own = pages_of(pool, a);
  const auto page = [&](std::size_t i) { return std::to_string(own[i]); };
  EXPECT_EQ(refusal([&] {
              cache.insert(iota(0, 6), Pages{own[0], own[1]});
            }),
            "pages has 2 entries, expected at least the 3 full pages of 6 tokens");
  EXPECT_EQ(refusal([&] {
              cache.insert(iota(0, 4), Pages{own[0], own[0]});
            }),
            "pages[1] = " + page(0) + ", expected a page that is not cached for other tokens");
  EXPECT_EQ(refusal([&] { cache.insert(iota(0, 4), Pages{own[0], 7}); }), "pages[1] = 7, expected a page in use");
  EXPECT_EQ(refusal([&] { cache.insert(iota(0, 4), Pages{own[0], 0}); }), "pages[1] = 0, expected a page in use");
  EXPECT_EQ(refusal([&] { cache.insert(iota(0, 4), Pages{own[0], 8}); }), "pages[1] = 8, expected a page of the pool");
  EXPECT_EQ(cache.stats().pages_cached, 0);
  EXPECT_EQ(cache.held_pages(), Pages(8, 0));
  cache.insert(iota(0, 2), own);
  EXPECT_EQ(refusal([&] { cache.insert(iota(50, 2), own); }),
            "pages[0] = " + page(0) + ", expected a page that is not cached for other tokens");
  EXPECT_EQ(cache.stats().pages_cached, 1);
  pool.audit(cache.held_pages());
}

// Whoever gives the cache's own reference back breaks a rule; the destructor finds out, and must not throw.
TEST(PrefixCache, IsDestroyedInPeaceAfterMisuse) {
  PagePool pool(8, 2);
  {
    PrefixCache cache(pool);
    const SequenceId a = filled(pool, 4);
    const Pages own = pages_of(pool, a);
    cache.insert(iota(0, 4), own);
    pool.release(a);
    pool.release_page(own[0]);
    EXPECT_EQ(pool.ref_count(own[0]), 0);
  }
  EXPECT_EQ(pool.num_free(), 8) << "the other page has been given back";
  pool.audit();
}

// Inserting one long chain and evicting it page by page must not be quadratic.
TEST(PrefixCache, ALongChainCostsLinearTime) {
  constexpr int kTokens = 200'000;
  const auto start = std::chrono::steady_clock::now();
  PagePool pool(kTokens, 1);
  PrefixCache cache(pool);
  const SequenceId a = filled(pool, kTokens);
  cache.insert(iota(0, kTokens), pool.pages(a));
  pool.release(a);
  for (int i = 0; i < kTokens; ++i) ASSERT_EQ(cache.evict(1), 1);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));  // takes 0.2 s; quadratic: minutes
  EXPECT_EQ(pool.num_free(), kTokens);
}

}  // namespace
}  // namespace headwater
