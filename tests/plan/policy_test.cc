// What is split off, by which policy, and what plans say about themselves.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "headwater/plan.h"
#include "plan/check.h"
#include "plan/plan_data.h"

namespace headwater::plan_test {
namespace {

using reference::PageTables;
using reference::tree;

constexpr std::uint64_t kDigest = 7'484'488'084'922'370'103ULL;  ///< of SameBytesFromEveryCompiler

Plan make(const PageTables& tables, Policy policy, PlanOptions options = {}, AttentionShape shape = {},
          DeviceModel model = {}) {
  options.policy = policy;
  Planner planner(model);
  return planner.plan(shape, tables.batch(), options);
}

std::int64_t token_bytes(const AttentionShape& s) {
  return static_cast<std::int64_t>(s.head_dim_qk + s.head_dim_vo) * s.num_kv_heads *
         static_cast<std::int64_t>(size_of(s.kv_dtype));
}

TEST(Policy, ByteModelOfTheSystemPrompt) {
  // N = 64 requests behind a prompt of P = 4096 tokens, S = 128 of their own: N (P + S) = 270,336 against P + N S =
  // 12,288.
  const Plan plan = make(tree({1, 64}, {4096, 128}, 16), Policy::automatic);
  const std::int64_t bytes = token_bytes({});
  EXPECT_EQ(plan.stats().kv_bytes_flat, 270'336 * bytes);
  EXPECT_EQ(plan.stats().kv_bytes_unique, 12'288 * bytes);
  EXPECT_EQ(plan.stats().path, Path::cascade);
  // The span is read once per row tile: 64 rows in tiles of 32.
  EXPECT_EQ(plan.stats().kv_bytes_read, (12'288 + 4'096) * bytes);
  DeviceModel wide;
  wide.max_tile_rows = 256;
  const Plan once = make(tree({1, 64}, {4096, 128}, 16), Policy::automatic, {}, {}, wide);
  EXPECT_EQ(once.stats().kv_bytes_read, 12'288 * bytes);
  EXPECT_EQ(once.stats().shared_tokens, 4'096);
  EXPECT_EQ(once.stats().member_sequences, 64);
  EXPECT_NE(once.describe().find("22.0x less than flat"), std::string::npos) << once.describe();
  EXPECT_EQ(once.stats().flops, 2LL * 256 * 32 * 270'336);
}

TEST(Policy, NothingSharedIsTheFlatPlanByteForByte) {
  for (const int requests : {1, 3, 8}) {
    const PageTables t = tree({requests}, {2048}, 16);
    const Plan flat = make(t, Policy::flat);
    for (const Policy policy : {Policy::automatic, Policy::two_level, Policy::vllm, Policy::forest}) {
      EXPECT_EQ(make(t, policy).serialize(), flat.serialize());
    }
    PlanOptions off;
    off.cascade = CascadeSwitch::off;
    EXPECT_EQ(make(t, Policy::automatic, off).serialize(), flat.serialize());
  }
}

TEST(Policy, AutomaticIsNeverPredictedSlowerThanAnyOther) {
  reference::Rng rng(1);
  for (int i = 0; i < 300; ++i) {
    const std::vector<int> nodes{1, rng.integer(1, 4), rng.integer(4, 24)};
    const std::vector<int> tokens{16 * rng.integer(1, 64), 16 * rng.integer(1, 32), rng.integer(1, 300)};
    const PageTables t = tree(nodes, tokens, 16);
    AttentionShape shape;
    shape.num_kv_heads = rng.pick(std::vector<int>{1, 2, 8, 32});
    const Plan chosen = make(t, Policy::automatic, {}, shape);
    const Plan flat = make(t, Policy::flat, {}, shape);
    EXPECT_EQ(chosen.stats().predicted_flat_ps, flat.stats().predicted_ps);
    EXPECT_LE(chosen.stats().predicted_ps, flat.stats().predicted_ps);
    for (const Policy policy : {Policy::two_level, Policy::forest}) {
      const std::int64_t other = make(t, policy, {}, shape).stats().predicted_ps;
      EXPECT_LE(chosen.stats().predicted_ps, other + other / 40) << name_of(policy);
    }
    if (chosen.stats().path == Path::flat) {
      EXPECT_EQ(chosen.serialize(), flat.serialize());
    }
  }
}

TEST(Policy, SharingPaysInBytesFromTheBreakEvenOn) {
  // In bytes alone a span of l tokens pays for s members when l > 2 G s / (s - 1): with 16-bit KV and fp32 partials,
  // each member gains one piece, whose state is written and read once. A model that charges bytes only: 1 ns per KiB.
  DeviceModel bytes;
  bytes.num_workers = 1;
  bytes.item_ps = bytes.item_row_ps = bytes.launch_ps = 0;
  bytes.memory_ps_per_kib = bytes.worker_ps_per_kib = 1'000'000;
  bytes.partial_ps_per_kib = 1'000'000;  // the state is counted for each of a row's two pieces, here written or read
  bytes.cache_bytes = 0;
  bytes.dot16 = {0, 0, 0, 1, 0};
  bytes.max_tile_rows = 1 << 20;
  const AttentionShape shape;  // G = 4
  for (const int members : {2, 4, 8}) {
    const int break_even = 2 * 4 * members / (members - 1);
    const auto path = [&](int tokens) {
      return make(tree({1, members}, {tokens, 4'000}, 1), Policy::automatic, {}, shape, bytes).stats().path;
    };
    EXPECT_EQ(path(break_even - 3), Path::flat) << members;
    // The plan must gain 2 % in all: a span well above the break-even.
    EXPECT_EQ(path(break_even + 4'000), Path::cascade) << members;
  }
}

TEST(Policy, TwoLevelTakesTheGroupThatSavesMost) {
  // 3 requests share 32 pages, 8 others 20 pages: 32 x 2 < 20 x 7.
  PageTables t;
  t.page_size = 16;
  std::int32_t own = 1'000;
  const auto add = [&](int first, int shared, int count) {
    for (int b = 0; b < count; ++b) {
      std::vector<std::int32_t> pages;
      for (int i = 0; i < shared; ++i) pages.push_back(first + i);
      pages.push_back(own++);
      t.add(pages, 16);
    }
  };
  add(0, 32, 3);
  add(100, 20, 8);
  const Plan plan = make(t, Policy::two_level);
  ASSERT_EQ(plan.stats().num_spans, 1);
  EXPECT_EQ(plan.data().spans[0].num_pages, 20);
  EXPECT_EQ(plan.data().spans[0].num_members, 8);
  EXPECT_EQ(make(t, Policy::forest).stats().num_spans, 2);
}

TEST(Policy, Thresholds) {
  const PageTables t = tree({1, 4}, {15 * 16, 64}, 16);            // 15 pages, 4 members
  EXPECT_EQ(make(t, Policy::two_level).stats().path, Path::flat);  // 16 pages by default
  PlanOptions o;
  o.min_shared_pages = 15;
  EXPECT_EQ(make(t, Policy::two_level, o).stats().path, Path::cascade);
  EXPECT_EQ(make(t, Policy::forest, o).stats().path, Path::cascade);
  o.min_shared_pages = 16;
  EXPECT_EQ(make(t, Policy::forest, o).stats().path, Path::flat);
  o = {};
  o.min_members = 5;
  EXPECT_EQ(make(t, Policy::forest, o).stats().path, Path::flat);
  EXPECT_EQ(make(t, Policy::automatic, o, {}, eager_model()).stats().path, Path::flat);
  o.min_members = 4;
  EXPECT_EQ(make(t, Policy::forest, o).stats().path, Path::cascade);
  // The threshold is each span's own: 10 pages for all, 6 more for two of them.
  const PageTables nested = tree({1, 2, 4}, {160, 96, 32}, 16);
  o = {};
  o.min_shared_pages = 8;
  EXPECT_EQ(make(nested, Policy::forest, o).stats().num_spans, 1);
  o.min_shared_pages = 12;  // no span of its own, but 16 pages in one go for two members
  const Plan deep = make(nested, Policy::forest, o);
  EXPECT_EQ(deep.stats().num_spans, 2);
  EXPECT_EQ(deep.data().spans[0].num_pages, 16);
}

TEST(Policy, Switch) {
  const PageTables t = tree({1, 8}, {2048, 64}, 16);
  PlanOptions o;
  o.cascade = CascadeSwitch::off;
  const Plan off = make(t, Policy::forest, o);
  EXPECT_EQ(off.stats().path, Path::flat);
  EXPECT_EQ(off.serialize(), make(t, Policy::flat).serialize());
  o.cascade = CascadeSwitch::on;
  EXPECT_EQ(make(t, Policy::flat, o).stats().path, Path::cascade);
}

TEST(Policy, VllmHeuristic) {
  const auto path = [](const PageTables& t, PlanOptions o = {}, AttentionShape s = {}, int workers = 132) {
    o.num_workers = workers;
    return make(t, Policy::vllm, o, s).stats().path;
  };
  const PageTables eight = tree({1, 8}, {2048, 64}, 16);
  AttentionShape mha;
  mha.num_kv_heads = 32;
  EXPECT_EQ(path(eight, {}, mha), Path::cascade);                      // MHA: yes
  EXPECT_EQ(path(tree({1, 7}, {2048, 64}, 16), {}, mha), Path::flat);  // fewer than 8 requests
  EXPECT_EQ(path(tree({1, 8}, {240, 64}, 16), {}, mha), Path::flat);   // prefix under 256
  EXPECT_EQ(path(tree({1, 8}, {2048, 64}, 16, 2)), Path::cascade);     // several rows each: yes
  PlanOptions o;
  o.alibi = true;
  EXPECT_EQ(path(eight, o, mha), Path::flat);
  o = {};
  o.window_left = 5'000;
  EXPECT_EQ(path(eight, o, mha), Path::flat);
  // 32/8 on 132 SMs, T = 16: cascade ceil(32 / 132) * 16 = 16; flash-decoding ceil(8 * 8 * 16 / 132) = 8: no.
  EXPECT_EQ(path(eight), Path::flat);
  // 64 requests: ceil(64 * 8 * 16 / 132) = 63: yes.
  EXPECT_EQ(path(tree({1, 64}, {2048, 64}, 16)), Path::cascade);
  // One outsider zeroes the prefix for all.
  PageTables outsider = tree({1, 64}, {2048, 64}, 16);
  outsider.add({static_cast<std::int32_t>(outsider.num_pages)}, 16);
  ++outsider.num_pages;
  EXPECT_EQ(path(outsider), Path::flat);
}

TEST(Schedule, LongRequestsAreCutForAllWorkers) {
  PlanOptions o;
  o.num_workers = 2;
  const Plan one = make(tree({1}, {8192}, 16), Policy::automatic, o);
  EXPECT_GE(one.stats().num_items, 2);
  std::vector<std::int64_t> loads(2, 0);
  for (const auto& item : one.data().items) *std::ranges::min_element(loads) += item.cost_ps;
  EXPECT_LT(loads[0] * 10, loads[1] * 11);
  EXPECT_LT(loads[1] * 10, loads[0] * 11);
  // Eight equal requests on two workers need no cutting: every row is written directly.
  const Plan eight = make(tree({8}, {2048}, 16), Policy::automatic, o);
  EXPECT_EQ(eight.stats().num_items, 8);
  EXPECT_EQ(eight.stats().num_partials, 0);
  // One worker: never.
  o.num_workers = 1;
  EXPECT_EQ(make(tree({1}, {8192}, 16), Policy::automatic, o).stats().num_items, 1);
}

TEST(Schedule, HeadsAreSplitOnlyWhereTokensDoNotSuffice) {
  PlanOptions o;
  o.num_workers = 16;
  const Plan plan = make(tree({1}, {1024}, 16), Policy::automatic, o);
  EXPECT_GE(plan.stats().num_items, 16);
  EXPECT_EQ(complaint(plan, tree({1}, {1024}, 16).batch()), "");
  o.num_workers = 2;
  const Plan narrow = make(tree({1}, {8192}, 16), Policy::automatic, o);
  for (const auto& item : narrow.data().items) EXPECT_EQ(item.kv_head_end - item.kv_head_begin, 8);
}

TEST(Schedule, TilesHoldTheirLimit) {
  DeviceModel m;
  m.max_tile_rows = 64;
  const Plan plan = make(tree({1, 100}, {512, 16}, 16), Policy::forest, {}, {}, m);
  for (const auto& item : plan.data().items) EXPECT_LE(item.num_rows * 4, 64);
  EXPECT_LE(plan.data().max_item_rows, 16);
}

TEST(Invariant, SpansAreCutAtChunksOnly) {
  PlanOptions o;
  o.batch_invariant = true;
  o.invariant_chunk = 128;
  const PageTables t = tree({1, 8}, {500 / 16 * 16, 40}, 16);  // 496 shared tokens
  const Plan plan = make(t, Policy::forest, o);
  ASSERT_EQ(plan.stats().num_spans, 1);
  EXPECT_EQ(plan.data().spans[0].num_tokens, 384);
  EXPECT_EQ(complaint(plan, t.batch()), "");
  EXPECT_EQ(plan.stats().kv_bytes_unique, (496 + 8 * 40) * token_bytes({}));
  // Shorter than a chunk: not split.
  EXPECT_EQ(make(tree({1, 8}, {112, 40}, 16), Policy::forest, o).stats().path, Path::flat);
}

TEST(Plans, SameInputSameBytes) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    reference::Rng rng(seed);
    const PlanOptions options = random_options(rng);
    const PageTables t = random_tables(rng, options);
    Planner used(eager_model());
    (void)used.plan({}, tree({1, 5}, {64, 10}, 4).batch(), {});
    Planner fresh(eager_model());
    EXPECT_EQ(used.plan({}, t.batch(), options).serialize(), fresh.plan({}, t.batch(), options).serialize());
  }
}

/// Tables from a plain rule, so that the digest below depends on the planner alone.
PageTables ruled_tables(std::uint64_t seed) {
  reference::Rng rng(seed);
  PageTables t;
  t.page_size = 1 + static_cast<int>(seed % 16);
  t.num_pages = 100'000;
  std::int32_t next = 0;
  std::vector<std::vector<std::int32_t>> all;
  const int requests = rng.integer(1, 20);
  for (int b = 0; b < requests; ++b) {
    std::vector<std::int32_t> pages;
    if (b > 0) {
      const auto& other = all[static_cast<std::size_t>(rng.integer(0, b - 1))];
      pages.assign(other.begin(), other.begin() + rng.integer(0, static_cast<int>(other.size())));
    }
    const int own = rng.integer(1, 40);
    for (int i = 0; i < own; ++i) pages.push_back(next++);
    const int last = rng.integer(1, t.page_size);
    t.add(pages, last, rng.integer(1, 3));
    all.push_back(pages);
  }
  t.num_pages = 100'000;
  return t;
}

/// A digest of many plans: the same whatever compiler built the library. A change of the planner's decisions changes
/// it; then the new value has to come out of two compilers.
TEST(Plans, SameBytesFromEveryCompiler) {
  DeviceModel model;  // every constant spelt out: defaults may be tuned
  model.num_workers = 2;
  model.has_dot16 = true;
  model.memory_ps_per_kib = 28'000;
  model.worker_ps_per_kib = 40'000;
  model.cache_ps_per_kib = 7'000;
  model.cache_bytes = 16 << 20;
  model.item_ps = 1'500'000;
  model.item_row_ps = 150'000;
  model.partial_ps_per_kib = 60'000;
  model.launch_ps = 4'000'000;
  model.max_tile_rows = 128;
  model.chunk_tokens = 1'024;
  model.dot16 = {2'750, 5'700, 2'330, 16, 12};
  model.fma32 = {5'500, 11'000, 4'660, 16, 12};
  std::uint64_t digest = 14'695'981'039'346'656'037ULL;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    reference::Rng rng(seed + 1'000);
    const PlanOptions options = random_options(rng);
    Planner planner(seed % 2 == 0 ? model : eager_model());
    for (const char c : planner.plan({}, ruled_tables(seed).batch(), options).serialize()) {
      digest = (digest ^ static_cast<unsigned char>(c)) * 1'099'511'628'211ULL;
    }
  }
  EXPECT_EQ(digest, kDigest);
}

TEST(Plans, TellWhatWasDecided) {
  const PageTables t = tree({1, 2, 8}, {2048, 64, 256}, 16);
  const Plan plan = make(t, Policy::automatic);
  const std::string words = plan.describe();
  EXPECT_NE(words.find("path cascade, policy auto"), std::string::npos) << words;
  EXPECT_NE(words.find("[0, 2048) 128 pages, 8 requests: 0-7; split off"), std::string::npos) << words;
  EXPECT_NE(words.find("predicted per layer"), std::string::npos) << words;
  EXPECT_NE(make(t, Policy::flat).describe().find("not split: policy flat"), std::string::npos);
  PlanOptions off;
  off.cascade = CascadeSwitch::off;
  EXPECT_NE(make(t, Policy::automatic, off).describe().find("cascade off: not looked for sharing"), std::string::npos);

  const std::string json = plan.to_json();
  for (const char* part :
       {"\"path\":\"cascade\"", "\"num_qo_heads\":32", "\"forest\":[{\"id\":0,\"parent\":-1,\"begin\":0,\"end\":2048",
        "\"requests\":[0,1,2,3,4,5,6,7]", "\"split\":true", "\"spans\":[{\"begin\":0,\"tokens\":2048"}) {
    EXPECT_NE(json.find(part), std::string::npos) << part << "\n" << json;
  }
  int depth = 0;
  for (const char c : json) {
    depth += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
    ASSERT_GE(depth, 0);
  }
  EXPECT_EQ(depth, 0);
  EXPECT_EQ(Plan().describe(), "empty plan\n");
}

TEST(Workspace, IsExactAndAligned) {
  const PageTables t = tree({1, 8}, {512, 64}, 16);
  const Plan plan = make(t, Policy::forest);
  const auto& p = plan.data();
  EXPECT_EQ(p.partial_o_bytes, static_cast<std::size_t>(p.num_partials) * 32 * 128 * 4);
  EXPECT_EQ(p.scratch_offset % kWorkspaceAlignment, 0U);
  EXPECT_EQ(plan.workspace_size(), p.scratch_offset + 2 * p.scratch_bytes_per_worker);
}

}  // namespace
}  // namespace headwater::plan_test
