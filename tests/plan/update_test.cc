// Planner::update: byte for byte the plan made from nothing, whatever happened in between.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/expect_error.h"
#include "headwater/plan.h"
#include "plan/check.h"
#include "plan/memory.h"
#include "plan/plan_data.h"

namespace headwater::plan_test {
namespace {

using reference::PageTables;
using reference::Rng;

const AttentionShape kShape{8, 2, 64, 64, DType::bf16, DType::bf16, DType::bf16};

/// Requests that live, grow, join (sharing a prefix of another) and leave.
class Population {
 public:
  Population(Rng& rng, int page_size, int requests) : rng_(rng), page_size_(page_size) {
    for (int i = 0; i < requests; ++i) join(0);
  }

  struct Request {
    std::vector<std::int32_t> pages;
    int tokens;
    int rows;
  };

  Request make() {
    Request r{{}, rng_.integer(1, 20 * page_size_), 1};
    if (!requests_.empty() && rng_.chance(0.8)) {
      const Request& other = requests_[static_cast<std::size_t>(rng_.integer(0, count() - 1))];
      const int shared = rng_.integer(0, static_cast<int>(other.pages.size()));
      r.pages.assign(other.pages.begin(), other.pages.begin() + shared);
      r.tokens = std::max(1, rng_.chance(0.2) ? shared * page_size_ : shared * page_size_ + rng_.integer(0, 30));
    }
    fill(r);
    return r;
  }
  void join(int) { requests_.push_back(make()); }
  void replace(int i) { requests_[static_cast<std::size_t>(i)] = make(); }
  void leave(int i) { requests_.erase(requests_.begin() + i); }
  void grow(int i, int tokens) {
    Request& r = requests_[static_cast<std::size_t>(i)];
    r.tokens += tokens;
    fill(r);
  }
  void rows(int i, int n) { requests_[static_cast<std::size_t>(i)].rows = n; }
  [[nodiscard]] int count() const { return static_cast<int>(requests_.size()); }

  /// `window` >= 0: pages that no row sees any more are left out, as engines do.
  [[nodiscard]] PageTables tables(std::int64_t window = -1) const {
    PageTables t;
    t.page_size = page_size_;
    for (const Request& r : requests_) {
      const std::int64_t unseen = window < 0 ? 0 : std::max<std::int64_t>(0, r.tokens - r.rows - window);
      const auto start = static_cast<int>(std::min<std::int64_t>(r.tokens - 1, unseen) / page_size_);
      t.add({r.pages.begin() + start, r.pages.end()}, (r.tokens - 1) % page_size_ + 1, r.rows, start);
    }
    t.num_pages = 1 << 20;
    return t;
  }

 private:
  void fill(Request& r) {
    r.pages.resize(static_cast<std::size_t>((r.tokens + page_size_ - 1) / page_size_), -1);
    for (auto& page : r.pages) {
      if (page < 0) page = next_page_++;
    }
  }

  Rng& rng_;
  int page_size_;
  std::vector<Request> requests_;
  std::int32_t next_page_ = 0;
};

void expect_same(const Plan& updated, const Plan& fresh) {
  ASSERT_EQ(updated.serialize(), fresh.serialize());
  ASSERT_EQ(updated.to_json(), fresh.to_json());
  ASSERT_EQ(updated.describe(), fresh.describe());
}

/// A copy of the page ids before an update, patched in the ranges that the plan names, is the page ids after it; a plan
/// made from nothing says so.
void expect_patches(const detail::PageHistory& before, std::vector<std::int32_t> ids, const detail::PlanData& plan) {
  const detail::PageHistory& now = plan.page_history;
  ASSERT_NE(now.origin, nullptr);
  if (now.origin != before.origin) {
    EXPECT_EQ(now.version, 0U);
    return;
  }
  EXPECT_EQ(now.version, before.version + 1);
  ids.resize(plan.page_ids.size(), -2);
  for (const detail::PageRange& range : now.changed) {
    std::copy(plan.page_ids.begin() + range.begin, plan.page_ids.begin() + range.end, ids.begin() + range.begin);
  }
  EXPECT_EQ(ids, plan.page_ids);
}

/// Steps of a population, each of which must leave the plan that is made from nothing. Returns how many of the plans
/// split a span off.
int expect_same_after_steps(Rng& rng, const PlanOptions& options, const DeviceModel& model, Population& people,
                            int steps) {
  // Tables that lose pages in front cannot be told of by Changes: then they are compared.
  const bool slides = options.window_left >= 0 && options.num_sink_tokens == 0 && rng.chance(0.5);
  const auto tables_now = [&] { return people.tables(slides ? options.window_left : -1); };
  Planner planner(model);
  Planner other(model);
  Plan plan = planner.plan(kShape, tables_now().batch(), options);
  int cascades = 0;
  for (int step = 0; step < steps; ++step) {
    std::vector<std::int32_t> grown;
    std::vector<std::int32_t> joined;
    std::vector<std::int32_t> left;
    if (rng.chance(0.1) && people.count() > 1) {
      left.push_back(rng.integer(0, people.count() - 1));
      people.leave(left[0]);
    }
    if (rng.chance(0.1)) {
      people.join(0);
      joined.push_back(people.count() - 1);
    } else if (rng.chance(0.1)) {
      const int who = rng.integer(0, people.count() - 1);
      people.replace(who);
      joined.push_back(who);
      if (rng.chance(0.5)) people.rows(who, rng.integer(0, 3));
    }
    for (int b = 0; b < people.count(); ++b) {
      if (!rng.chance(0.9) || (!joined.empty() && joined[0] == b)) continue;
      people.grow(b, rng.chance(0.8) ? 1 : rng.integer(1, 20));
      grown.push_back(b);
    }
    const PageTables tables = tables_now();
    Changes changes;
    changes.grown = grown;
    changes.joined = joined;
    changes.left = left;
    const detail::PageHistory history = plan.data().page_history;
    const std::vector<std::int32_t> ids = plan.data().page_ids;
    planner.update(plan, tables.batch(), !slides && rng.chance(0.5) ? &changes : nullptr);
    expect_patches(history, ids, plan.data());
    expect_same(plan, other.plan(kShape, tables.batch(), options));
    if (::testing::Test::HasFatalFailure()) return cascades;
    EXPECT_EQ(complaint(plan, tables.batch()), "");
    if (plan.stats().path == Path::cascade) ++cascades;
  }
  return cascades;
}

TEST(Update, EqualsAPlanFromNothing) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(seed);
    PlanOptions options = random_options(rng);
    options.policy =
        rng.pick(std::vector{Policy::automatic, Policy::forest, Policy::flat, Policy::two_level, Policy::vllm});
    if (rng.chance(0.1)) options.cascade = rng.chance(0.5) ? CascadeSwitch::off : CascadeSwitch::on;
    Population people(rng, rng.integer(1, 8), rng.integer(1, 10));
    expect_same_after_steps(rng, options, eager_model(), people, 40);
    if (HasFailure()) return;
  }
}

TEST(Update, OfManyRequestsInSeveralRowTilesAndChunks) {
  // Shared spans of more rows than a tile, read in chunks by tile after tile; several groups of requests.
  DeviceModel model = eager_model(8);
  model.cache_bytes = 1 << 10;
  model.chunk_tokens = 32;
  int cascades = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(seed + 100);
    PlanOptions options = random_options(rng);
    options.policy = rng.pick(std::vector{Policy::automatic, Policy::forest, Policy::two_level});
    Population people(rng, rng.integer(1, 8), rng.integer(20, 40));
    cascades += expect_same_after_steps(rng, options, model, people, 20);
    if (HasFailure()) return;
  }
  EXPECT_GT(cascades, 200);
}

TEST(Update, OfNothingChangesNothing) {
  Rng rng(7);
  Population people(rng, 4, 8);
  Planner planner(eager_model());
  const PageTables tables = people.tables();
  Plan plan = planner.plan(kShape, tables.batch(), {});
  const std::string before = plan.serialize();
  planner.update(plan, tables.batch());
  EXPECT_EQ(plan.serialize(), before);
  const Changes none;
  planner.update(plan, tables.batch(), &none);
  EXPECT_EQ(plan.serialize(), before);
}

TEST(Update, SeesAnIdThatChangedInTheMiddle) {
  PageTables t;
  t.page_size = 4;
  t.add({0, 1, 2, 3}, 4);
  t.add({0, 1, 2, 4}, 4);
  t.num_pages = 10;
  PlanOptions options;
  options.policy = Policy::forest;
  Planner planner(eager_model());
  Plan plan = planner.plan(kShape, t.batch(), options);
  EXPECT_EQ(plan.stats().shared_tokens, 12);
  t.kv_indices[1] = 9;
  planner.update(plan, t.batch());
  EXPECT_EQ(plan.stats().shared_tokens, 4);
  EXPECT_EQ(plan.serialize(), planner.plan(kShape, t.batch(), options).serialize());
}

TEST(Update, OnErrorThePlanIsAsItWas) {
  Rng rng(3);
  Population people(rng, 4, 6);
  Planner planner(eager_model());
  const PageTables good = people.tables();
  Plan plan = planner.plan(kShape, good.batch(), {});
  const std::string before = plan.serialize();
  const std::string words = plan.describe();
  PageTables bad = good;
  bad.kv_indices[0] = -5;
  expect_error(ErrorCode::invalid_page_table, "kv_indices[0] = -5, expected 0..1048575 (num_pages = 1048576)",
               [&] { planner.update(plan, bad.batch()); });
  bad = good;
  bad.last_page_len[2] = 99;
  expect_error(ErrorCode::invalid_page_table, "kv_last_page_len[2] = 99, expected 1..4 (page_size)",
               [&] { planner.update(plan, bad.batch()); });
  const std::vector<std::int32_t> list{17};
  Changes changes;
  changes.grown = list;
  expect_error(ErrorCode::invalid_argument, "changes.grown[0] = 17, expected 0..5",
               [&] { planner.update(plan, good.batch(), &changes); });
  changes = {};
  changes.left = list;
  expect_error(ErrorCode::invalid_argument, "changes.left[0] = 17, expected 0..5",
               [&] { planner.update(plan, good.batch(), &changes); });
  people.grow(2, 1);
  const PageTables longer = people.tables();
  changes = {};
  expect_error(ErrorCode::invalid_argument,
               "changes: request 2 is not listed, but its page table changed in another way",
               [&] { planner.update(plan, longer.batch(), &changes); });
  EXPECT_EQ(plan.serialize(), before);
  EXPECT_EQ(plan.describe(), words);
  planner.update(plan, longer.batch());
  EXPECT_EQ(plan.serialize(), planner.plan(kShape, longer.batch(), {}).serialize());
}

TEST(Update, SeesThatATableHasGrownToWhereAnotherStarts) {
  PageTables t;
  t.page_size = 4;
  t.add({1, 2}, 4);
  t.add({3}, 4, 1, 2);  // starts at the third page
  PlanOptions options;
  options.policy = Policy::forest;
  Planner planner(eager_model());
  Plan plan = planner.plan(kShape, t.batch(), options);
  EXPECT_EQ(plan.stats().path, Path::flat);
  PageTables grown;
  grown.page_size = 4;
  grown.add({1, 2, 3}, 4);
  grown.add({3}, 4, 1, 2);
  planner.update(plan, grown.batch());
  EXPECT_EQ(plan.serialize(), planner.plan(kShape, grown.batch(), options).serialize());
  EXPECT_EQ(plan.stats().path, Path::cascade);
}

TEST(Update, ChecksAnIdThatNoRowSawBefore) {
  // Everything in the table's only page was hidden, so plan() did not look at its id; grown, rows see it.
  PageTables t;
  t.page_size = 16;
  t.add({1'000'000'000}, 3, 1, 0, 5);
  t.num_pages = 8;
  Planner planner(eager_model());
  Plan plan = planner.plan(kShape, t.batch(), {});
  PageTables grown = t;
  grown.last_page_len[0] = 9;
  const char* message = "kv_indices[0] = 1000000000, expected 0..7 (num_pages = 8)";
  expect_error(ErrorCode::invalid_page_table, message, [&] { planner.update(plan, grown.batch()); });
  expect_error(ErrorCode::invalid_page_table, message, [&] { (void)planner.plan(kShape, grown.batch(), {}); });
}

TEST(Update, OfDecodeStepsKeepsMergeListsOnlyWhereTheyHold) {
  // Two batches planned in turn by one planner: pure decode steps, so that rows, slots and the order of items are
  // mostly those of the step before.
  Rng rng(11);
  Population first(rng, 4, 30);
  Population second(rng, 4, 12);
  Planner planner(eager_model());
  Plan plan = planner.plan(kShape, first.tables().batch(), {});
  Plan other = planner.plan(kShape, second.tables().batch(), {});
  int kept = 0;
  for (int step = 0; step < 40; ++step) {
    for (auto [people, p] : {std::pair{&first, &plan}, std::pair{&second, &other}}) {
      for (int b = 0; b < people->count(); ++b) people->grow(b, 1);
      const PageTables tables = people->tables();
      const std::vector<std::int32_t> merges = p->data().merge_slots;
      planner.update(*p, tables.batch());
      expect_same(*p, Planner(eager_model()).plan(kShape, tables.batch(), {}));
      if (HasFatalFailure()) return;
      kept += !merges.empty() && merges == p->data().merge_slots ? 1 : 0;
    }
  }
  EXPECT_GT(kept, 40);
}

TEST(Update, SeesEmptyRowsThatCameOrWent) {
  // The last request has no keys: its rows are in no item, and the items' rows do not tell how many there are.
  const auto tables = [](int empty_rows) {
    PageTables t = reference::tree({1, 4}, {64, 16}, 16);
    t.add({}, 0, empty_rows);
    return t;
  };
  PlanOptions options;
  options.policy = Policy::forest;
  Planner planner(eager_model());
  Plan plan = planner.plan(kShape, tables(1).batch(), options);
  for (const int empty_rows : {3, 0, 2}) {
    const PageTables now = tables(empty_rows);
    planner.update(plan, now.batch());
    EXPECT_EQ(plan.data().empty_rows.size(), static_cast<std::size_t>(empty_rows));
    expect_same(plan, planner.plan(kShape, now.batch(), options));
  }
}

TEST(Update, EmptyPlanIsRefused) {
  Rng rng(6);
  Population people(rng, 4, 2);
  Planner planner(eager_model());
  Plan plan;
  expect_error(ErrorCode::invalid_argument, "plan is empty, expected one made by plan()",
               [&] { planner.update(plan, people.tables().batch()); });
}

TEST(Update, OfLevelsAndOfAnEmptyPlan) {
  Rng rng(5);
  Planner planner(eager_model());
  const reference::LevelTables a = reference::random_levels(rng, 4, 2);
  const reference::LevelTables b = reference::random_levels(rng, 4, 2);
  Plan plan = planner.plan(kShape, a.batch(), {});
  planner.update(plan, b.batch());
  EXPECT_EQ(plan.serialize(), planner.plan(kShape, b.batch(), {}).serialize());
}

TEST(Update, MemoryBeyondPageIdsIsBounded) {
  // 256 requests of 512 pages: 2 MB at most, page ids apart.
  const PageTables t = reference::tree({1, 256}, {256 * 16, 256 * 16}, 16);
  Planner planner(DeviceModel{});
  const Plan plan = planner.plan({}, t.batch(), {});
  const auto& p = plan.data();
  const auto& m = *p.memory;
  const auto bytes = [](const auto& v) { return v.capacity() * sizeof(v[0]); };
  const std::size_t ids = static_cast<std::size_t>(t.kv_indptr.back()) * sizeof(std::int32_t);
  const std::size_t total = bytes(p.page_ids) + bytes(p.rows) + bytes(p.item_rows) + bytes(p.items) +
                            bytes(p.merge_rows) + bytes(p.merge_indptr) + bytes(p.merge_slots) + bytes(p.empty_rows) +
                            bytes(p.spans) + bytes(m.qo_indptr) + bytes(m.tables) + bytes(m.entries) +
                            bytes(m.forest.nodes) + bytes(m.forest.order) + bytes(m.forest.leaf_of) + bytes(m.pieces) +
                            bytes(m.closed) + bytes(m.places);
  EXPECT_LT(total - ids, std::size_t{2} << 20);
}

}  // namespace
}  // namespace headwater::plan_test
