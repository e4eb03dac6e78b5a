// PagePool against a naive model: the model keeps, per sequence, the *contents* of its tokens and simulates the tensor
// memory, so that a missing copy, an early free or a wrong slot shows up as a wrong token.
#include "headwater/page_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "headwater/error.h"

namespace headwater {
namespace {

using Copies = std::vector<cpu::PageCopy>;
using Slots = std::vector<std::int64_t>;

/// Code and message of the Error that `f` throws; fails the test when it throws none.
template <typename F>
std::pair<ErrorCode, std::string> error_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return {e.code(), e.what()};
  }
  ADD_FAILURE() << "no Error was thrown";
  return {ErrorCode::ok, ""};
}

template <typename F>
std::string refusal(F&& f) {
  const auto [code, message] = error_of(std::forward<F>(f));
  EXPECT_EQ(code, ErrorCode::invalid_argument) << message;
  return message;
}

/// Appends and returns (copies, slots).
std::pair<Copies, Slots> append(PagePool& pool, SequenceId id, std::int64_t n) {
  Copies copies;
  Slots slots;
  pool.prepare_append(id, n, copies, slots);
  return {copies, slots};
}

std::vector<std::int32_t> pages_of(const PagePool& pool, SequenceId id) {
  const auto pages = pool.pages(id);
  return {pages.begin(), pages.end()};
}

/// A pool, the memory behind it (one int a token slot) and what every sequence should read back.
class Model {
 public:
  Model(std::int32_t num_pages, int page_size)
      : pool(num_pages, page_size),
        memory(static_cast<std::size_t>(num_pages) * static_cast<std::size_t>(page_size), -1) {}

  void append(SequenceId id, std::int64_t n) {
    Copies copies;
    Slots slots;
    pool.prepare_append(id, n, copies, slots);
    ASSERT_LE(copies.size(), 1U);
    ASSERT_EQ(slots.size(), static_cast<std::size_t>(n));
    for (const auto& c : copies) {
      EXPECT_GE(pool.ref_count(c.src), 1);
      for (int t = 0; t < c.num_tokens; ++t) at(c.dst, t) = at(c.src, t);
    }
    for (const std::int64_t slot : slots) {
      // A page that anybody else reads is never written.
      EXPECT_EQ(pool.ref_count(static_cast<std::int32_t>(slot / pool.page_size())), 1);
      memory[static_cast<std::size_t>(slot)] = next;
      contents[id].push_back(next++);
    }
  }

  void check() {
    std::vector<std::int32_t> external(static_cast<std::size_t>(pool.num_pages()), 0);
    for (const std::int32_t page : retained) ++external[static_cast<std::size_t>(page)];
    ASSERT_NO_THROW(pool.audit(external));
    std::int64_t used = 0;
    for (std::int32_t p = 0; p < pool.num_pages(); ++p) used += pool.ref_count(p) > 0 ? 1 : 0;
    EXPECT_EQ(used + pool.num_free(), pool.num_pages());
    for (const auto& [id, tokens] : contents) {
      ASSERT_EQ(pool.num_tokens(id), static_cast<std::int64_t>(tokens.size()));
      const auto pages = pool.pages(id);
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        const auto size = static_cast<std::size_t>(pool.page_size());
        ASSERT_EQ(at(pages[i / size], static_cast<int>(i % size)), tokens[i]) << "sequence " << id << " token " << i;
      }
    }
  }

  int& at(std::int32_t page, int token) {
    return memory[static_cast<std::size_t>(page) * static_cast<std::size_t>(pool.page_size()) +
                  static_cast<std::size_t>(token)];
  }

  PagePool pool;
  std::vector<int> memory;
  std::map<SequenceId, std::vector<int>> contents;
  std::vector<std::int32_t> retained;
  int next = 0;
};

TEST(PagePool, RandomOperationsAgreeWithNaiveModel) {
  std::int64_t out_of_pages = 0, copies_made = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    std::mt19937 rng(seed);
    const auto pick = [&rng](std::int64_t n) {
      return n <= 0 ? 0 : std::uniform_int_distribution<std::int64_t>(0, n - 1)(rng);
    };
    const int page_size = static_cast<int>(1 + pick(7));
    Model m(static_cast<std::int32_t>(4 + pick(60)), page_size);
    for (int step = 0; step < 400; ++step) {
      std::vector<SequenceId> ids;
      for (const auto& [id, tokens] : m.contents) ids.push_back(id);
      const SequenceId id =
          ids.empty() ? -1 : ids[static_cast<std::size_t>(pick(static_cast<std::int64_t>(ids.size())))];
      const std::int64_t op = ids.empty() ? 0 : pick(10);
      if (op == 0) {
        m.contents[m.pool.create()] = {};
      } else if (op <= 4) {
        const std::int64_t free_before = m.pool.num_free();
        try {
          const std::int64_t n = pick(3 * page_size + 2);
          const bool shared_tail =
              m.pool.num_tokens(id) % page_size != 0 && m.pool.ref_count(m.pool.pages(id).back()) > 1;
          m.append(id, n);
          copies_made += shared_tail && n > 0 ? 1 : 0;
        } catch (const Error& e) {
          ASSERT_EQ(e.code(), ErrorCode::out_of_pages) << e.what();
          ASSERT_EQ(m.pool.num_free(), free_before);
          ++out_of_pages;
        }
      } else if (op == 5) {
        const SequenceId child = m.pool.fork(id);
        m.contents[child] = m.contents[id];
      } else if (op == 6) {
        const std::int64_t full = m.pool.num_tokens(id) / page_size;
        if (full > 0) {
          const std::int64_t target = (1 + pick(full)) * page_size;
          const SequenceId child = m.pool.clone_detached_prefix(id, target);
          m.contents[child].assign(m.contents[id].begin(), m.contents[id].begin() + target);
        }
      } else if (op == 7) {
        const std::int64_t keep = pick(m.pool.num_tokens(id) + 1);
        m.pool.truncate(id, keep);
        m.contents[id].resize(static_cast<std::size_t>(keep));
      } else if (op == 8) {
        m.pool.release(id);
        m.contents.erase(id);
      } else if (!m.retained.empty() && pick(2) == 0) {
        m.pool.release_page(m.retained.back());
        m.retained.pop_back();
      } else if (m.pool.num_tokens(id) > 0) {
        m.pool.retain(m.pool.pages(id).front());
        m.retained.push_back(m.pool.pages(id).front());
      }
      m.check();
      if (HasFatalFailure()) return;
    }
    while (!m.contents.empty()) {
      m.pool.release(m.contents.begin()->first);
      m.contents.erase(m.contents.begin());
    }
    for (const std::int32_t page : m.retained) m.pool.release_page(page);
    m.pool.audit();
    EXPECT_EQ(m.pool.num_free(), m.pool.num_pages());
  }
  EXPECT_GT(out_of_pages, 100);  // the hard paths were taken
  EXPECT_GT(copies_made, 100);
}

TEST(PagePool, SlotsAreConsecutiveTokensOfThePages) {
  PagePool pool(8, 4);
  const SequenceId id = pool.create();
  EXPECT_EQ(append(pool, id, 3).second.size(), 3U);
  const auto [copies, slots] = append(pool, id, 6);
  EXPECT_TRUE(copies.empty());
  const auto pages = pages_of(pool, id);
  ASSERT_EQ(pages.size(), 3U);
  EXPECT_EQ(slots, (Slots{pages[0] * 4 + 3, pages[1] * 4, pages[1] * 4 + 1, pages[1] * 4 + 2, pages[1] * 4 + 3,
                          pages[2] * 4}));
  EXPECT_EQ(pool.num_tokens(id), 9);
}

TEST(PagePool, SlotsAre64Bit) {
  PagePool pool(3, 1 << 30);
  const SequenceId a = pool.create();
  EXPECT_EQ(append(pool, a, 1).second, Slots{0});
  const SequenceId b = pool.create();
  const SequenceId c = pool.create();
  append(pool, b, 1);
  EXPECT_EQ(append(pool, c, 2).second, (Slots{std::int64_t{2} << 30, (std::int64_t{2} << 30) + 1}));
}

TEST(PagePool, ForkedPartialPageIsCopiedOnFirstAppendToEither) {
  PagePool pool(8, 4);
  const SequenceId a = pool.create();
  append(pool, a, 6);
  const SequenceId b = pool.fork(a);
  EXPECT_EQ(pages_of(pool, a), pages_of(pool, b));
  const std::int32_t shared = pool.pages(a)[1];
  EXPECT_EQ(pool.ref_count(shared), 2);

  const auto [copies, slots] = append(pool, b, 1);
  ASSERT_EQ(copies.size(), 1U);
  EXPECT_EQ(copies[0].src, shared);
  EXPECT_EQ(copies[0].dst, pool.pages(b)[1]);
  EXPECT_EQ(copies[0].num_tokens, 2);
  EXPECT_NE(copies[0].dst, shared);
  EXPECT_EQ(slots, Slots{copies[0].dst * 4 + 2});
  EXPECT_EQ(pool.ref_count(shared), 1);

  // The other one is alone now and writes in place.
  const auto [more, own] = append(pool, a, 1);
  EXPECT_TRUE(more.empty());
  EXPECT_EQ(own, Slots{shared * 4 + 2});
  EXPECT_EQ(pool.pages(a)[0], pool.pages(b)[0]);
  pool.audit();
}

TEST(PagePool, AFullSharedLastPageNeedsNoCopy) {
  PagePool pool(8, 4);
  const SequenceId a = pool.create();
  append(pool, a, 4);
  const SequenceId b = pool.fork(a);
  EXPECT_TRUE(append(pool, b, 1).first.empty());
  EXPECT_EQ(pool.ref_count(pool.pages(a)[0]), 2);
}

TEST(PagePool, APartPageHeldFromOutsideIsCopiedToo) {
  PagePool pool(4, 4);
  const SequenceId a = pool.create();
  append(pool, a, 4);
  pool.retain(pool.pages(a)[0]);  // as a prefix cache does
  pool.truncate(a, 2);
  const auto [copies, slots] = append(pool, a, 1);
  ASSERT_EQ(copies.size(), 1U);
  EXPECT_EQ(copies[0].num_tokens, 2);
  EXPECT_EQ(pool.ref_count(copies[0].src), 1);
  pool.release_page(copies[0].src);
  pool.audit();
}

TEST(PagePool, AppendOfNothingCopiesNothing) {
  PagePool pool(4, 4);
  const SequenceId a = pool.create();
  append(pool, a, 2);
  const SequenceId b = pool.fork(a);
  Copies copies{{1, 2, 3}};
  Slots slots{7};
  pool.prepare_append(b, 0, copies, slots);
  EXPECT_TRUE(copies.empty());
  EXPECT_TRUE(slots.empty());
  EXPECT_EQ(pool.pages(a)[0], pool.pages(b)[0]);
}

TEST(PagePool, OutOfPagesChangesNothing) {
  PagePool pool(4, 4);
  const SequenceId a = pool.create();
  append(pool, a, 10);  // 3 pages, 2 tokens in the last
  const SequenceId b = pool.fork(a);
  const auto before = pages_of(pool, b);
  Copies copies{{9, 9, 9}};
  Slots slots{9};
  // 4 tokens: one new page, and one to copy the shared tail; only one is free.
  const auto [code, message] = error_of([&] { pool.prepare_append(b, 4, copies, slots); });
  EXPECT_EQ(code, ErrorCode::out_of_pages);
  EXPECT_EQ(message, "sequence 1 needs 2 pages for 4 more tokens, 1 are free");
  EXPECT_EQ(pages_of(pool, b), before);
  EXPECT_EQ(pool.num_tokens(b), 10);
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(slots, Slots{9});
  EXPECT_EQ(copies.size(), 1U);
  pool.audit();
  // What fits still works.
  EXPECT_EQ(append(pool, b, 2).first.size(), 1U);
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_EQ(error_of([&] { append(pool, a, std::int64_t{1} << 62); }).first, ErrorCode::out_of_pages);
  pool.audit();
}

TEST(PagePool, CloneDetachedPrefixSharesFullPagesOnly) {
  PagePool pool(8, 4);
  const SequenceId a = pool.create();
  append(pool, a, 10);
  const SequenceId b = pool.clone_detached_prefix(a, 8);
  EXPECT_EQ(pool.num_tokens(b), 8);
  ASSERT_EQ(pool.pages(b).size(), 2U);
  EXPECT_EQ(pool.ref_count(pool.pages(a)[0]), 2);
  EXPECT_EQ(pool.ref_count(pool.pages(a)[1]), 2);
  EXPECT_EQ(pool.ref_count(pool.pages(a)[2]), 1);
  EXPECT_EQ(append(pool, a, 1).second.size(), 1U);  // the source lives on, its tail is its own
  const auto kept = pages_of(pool, b);
  pool.release(a);
  EXPECT_EQ(pages_of(pool, b), kept);
  EXPECT_EQ(pool.ref_count(kept[0]), 1);
  pool.audit();
}

TEST(PagePool, CloneDetachedPrefixRefusals) {
  PagePool pool(8, 4);
  const SequenceId a = pool.create();
  append(pool, a, 10);
  EXPECT_EQ(refusal([&] { (void)pool.clone_detached_prefix(a, 0); }),
            "target_tokens = 0, expected a positive multiple of page_size = 4");
  EXPECT_EQ(refusal([&] { (void)pool.clone_detached_prefix(a, -4); }),
            "target_tokens = -4, expected a positive multiple of page_size = 4");
  EXPECT_EQ(refusal([&] { (void)pool.clone_detached_prefix(a, 6); }),
            "target_tokens = 6, expected a positive multiple of page_size = 4");
  EXPECT_EQ(refusal([&] { (void)pool.clone_detached_prefix(a, 12); }),
            "target_tokens = 12 exceeds the 10 written tokens of sequence 0");
  pool.audit();
}

TEST(PagePool, ForkOfAForkSurvivesReallocationOfTheSequences) {
  PagePool pool(4, 4);
  SequenceId id = pool.create();
  append(pool, id, 6);
  std::vector<SequenceId> ids{id};
  for (int i = 0; i < 100; ++i) ids.push_back(pool.fork(ids.back()));
  EXPECT_EQ(pool.ref_count(pool.pages(ids.back())[0]), 101);
  pool.audit();
  for (const SequenceId s : ids) pool.release(s);
  EXPECT_EQ(pool.num_free(), 4);
}

TEST(PagePool, AdoptAndReplacePrefix) {
  PagePool pool(8, 2);
  const SequenceId a = pool.create();
  append(pool, a, 4);
  const auto cached = pages_of(pool, a);
  const SequenceId b = pool.adopt(cached);
  EXPECT_EQ(pool.num_tokens(b), 4);
  EXPECT_EQ(pages_of(pool, b), cached);

  const SequenceId c = pool.create();
  append(pool, c, 5);
  const auto own = pages_of(pool, c);
  pool.replace_prefix(c, cached);
  EXPECT_EQ(pages_of(pool, c), (std::vector<std::int32_t>{cached[0], cached[1], own[2]}));
  EXPECT_EQ(pool.num_tokens(c), 5);
  EXPECT_EQ(pool.ref_count(cached[0]), 3);
  EXPECT_EQ(pool.ref_count(own[0]), 0);
  pool.replace_prefix(c, cached);                                           // once more: no change
  pool.replace_prefix(c, std::vector<std::int32_t>{cached[1], cached[0]});  // its own pages in another order
  pool.audit();
  pool.replace_prefix(c, cached);
  EXPECT_EQ(pool.ref_count(cached[0]), 3);
  pool.audit();
  const std::vector<std::int32_t> three{cached[0], cached[1], cached[0]};
  EXPECT_EQ(refusal([&] { pool.replace_prefix(c, three); }),
            "pages has 3 entries, expected at most the 2 full pages of sequence 2");
  EXPECT_EQ(refusal([&] {
              (void)pool.adopt(std::vector<std::int32_t>{cached[0], own[0]});
            }),
            "pages[1] = " + std::to_string(own[0]) + ", expected a page in use");
  EXPECT_EQ(refusal([&] { (void)pool.adopt(std::vector<std::int32_t>{8}); }), "pages[0] = 8, expected an id in [0, 8)");
  EXPECT_EQ(refusal([&] { (void)pool.adopt(std::vector<std::int32_t>{-1}); }),
            "pages[0] = -1, expected an id in [0, 8)");
  pool.audit();
}

TEST(PagePool, TruncateReleasesEmptyPages) {
  PagePool pool(8, 4);
  const SequenceId a = pool.create();
  append(pool, a, 9);
  EXPECT_EQ(pool.num_free(), 5);
  pool.truncate(a, 8);
  EXPECT_EQ(pool.num_free(), 6);
  pool.truncate(a, 5);
  EXPECT_EQ(pool.num_free(), 6);
  pool.truncate(a, 0);
  EXPECT_EQ(pool.num_free(), 8);
  EXPECT_EQ(refusal([&] { pool.truncate(a, 1); }), "num_tokens = 1, expected 0 to the 0 written tokens of sequence 0");
  EXPECT_EQ(refusal([&] { pool.truncate(a, -1); }),
            "num_tokens = -1, expected 0 to the 0 written tokens of sequence 0");
}

TEST(PagePool, TheNullPageIsNeverHandedOut) {
  PagePool pool(3, 2, true);
  EXPECT_EQ(pool.num_free(), 2);
  const SequenceId a = pool.create();
  append(pool, a, 4);
  EXPECT_EQ(pages_of(pool, a), (std::vector<std::int32_t>{1, 2}));
  EXPECT_EQ(error_of([&] { append(pool, a, 1); }).first, ErrorCode::out_of_pages);
  EXPECT_EQ(refusal([&] { pool.retain(0); }), "page = 0, expected a page in use");
  pool.audit();
}

TEST(PagePool, Refusals) {
  EXPECT_EQ(refusal([] { PagePool(0, 4); }), "num_pages = 0, expected at least 1");
  EXPECT_EQ(refusal([] { PagePool(4, 0); }), "page_size = 0, expected at least 1");
  PagePool pool(4, 4);
  const SequenceId a = pool.create();
  EXPECT_EQ(refusal([&] { (void)pool.pages(-1); }), "sequence = -1, expected an id in [0, 1)");
  EXPECT_EQ(refusal([&] { (void)pool.num_tokens(1); }), "sequence = 1, expected an id in [0, 1)");
  EXPECT_EQ(refusal([&] { append(pool, a, -1); }), "num_tokens = -1, expected at least 0");
  EXPECT_EQ(refusal([&] { (void)pool.ref_count(4); }), "page = 4, expected an id in [0, 4)");
  EXPECT_EQ(refusal([&] { pool.release_page(0); }), "page = 0, expected a page in use");
  pool.release(a);
  EXPECT_EQ(refusal([&] { pool.release(a); }), "sequence = 0, expected one that has not been released");
  EXPECT_EQ(refusal([&] { pool.audit(std::vector<std::int32_t>{1}); }),
            "external_refs has 1 entries, expected num_pages = 4");
}

// Negative control: the audit does find a leaked and a stolen reference.
TEST(PagePool, AuditFindsALeakAndATheft) {
  PagePool pool(4, 4);
  const SequenceId a = pool.create();
  append(pool, a, 4);
  const std::int32_t page = pool.pages(a)[0];
  pool.retain(page);
  const auto [code, message] = error_of([&] { pool.audit(); });
  EXPECT_EQ(code, ErrorCode::internal);
  EXPECT_EQ(message, "page pool audit: page 0 has count 2, expected 1");
  pool.release_page(page);
  pool.audit();
  pool.release_page(page);
  EXPECT_EQ(error_of([&] { pool.audit(); }).second, "page pool audit: page 0 has count 0, expected 1");
}

}  // namespace
}  // namespace headwater
