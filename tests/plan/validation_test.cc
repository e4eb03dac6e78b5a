// One test per message: what is refused, and in which words.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "cpu/expect_error.h"
#include "headwater/plan.h"
#include "reference/tables.h"

namespace headwater {
namespace {

constexpr auto kArgument = ErrorCode::invalid_argument;
constexpr auto kTable = ErrorCode::invalid_page_table;

/// A good call, to be spoilt in one place.
struct Call {
  AttentionShape shape;
  PlanOptions options;
  reference::PageTables tables;
  reference::LevelTables levels;
  bool use_levels = false;
  std::function<void(Batch&)> spoil_batch = [](Batch&) {};

  Call() {
    tables.page_size = 4;
    tables.add({0, 1, 2}, 4);
    tables.add({0, 1, 3, 4}, 2);
    tables.num_pages = 8;
    levels.levels.resize(2);
    levels.levels[0] = {4, 8, {0, 3}, {0, 2}, {0, 1}, {3}};
    levels.levels[1] = {4, 8, {0, 1, 3}, {0, 1, 2}, {2, 3}, {1, 4}};
  }
  void plan() const {
    Batch batch = use_levels ? levels.batch() : tables.batch();
    spoil_batch(batch);
    Planner planner(DeviceModel{});
    (void)planner.plan(shape, batch, options);
  }
};

void refused(ErrorCode code, const std::string& message, const std::function<void(Call&)>& spoil) {
  Call call;
  ASSERT_NO_THROW(call.plan());
  spoil(call);
  expect_error(code, message, [&] { call.plan(); });
}

void levels_refused(ErrorCode code, const std::string& message, const std::function<void(Call&)>& spoil) {
  Call call;
  call.use_levels = true;
  ASSERT_NO_THROW(call.plan());
  spoil(call);
  expect_error(code, message, [&] { call.plan(); });
}

TEST(Validation, Shape) {
  refused(kArgument, "num_kv_heads = 0, expected 1..32767", [](Call& c) { c.shape.num_kv_heads = 0; });
  refused(kArgument, "num_qo_heads = -4, expected 1..32767", [](Call& c) { c.shape.num_qo_heads = -4; });
  refused(kArgument, "num_qo_heads = 30 is not a multiple of num_kv_heads = 8",
          [](Call& c) { c.shape.num_qo_heads = 30; });
  refused(kArgument, "head_dim_qk = 40, expected a multiple of 16 in 16..1024",
          [](Call& c) { c.shape.head_dim_qk = 40; });
  refused(kArgument, "head_dim_vo = 2048, expected a multiple of 16 in 16..1024",
          [](Call& c) { c.shape.head_dim_vo = 2048; });
  refused(kArgument, "q_dtype = f8e4m3, expected f32, f16 or bf16", [](Call& c) { c.shape.q_dtype = DType::f8e4m3; });
  refused(kArgument, "out_dtype = f8e4m3, expected f32, f16 or bf16",
          [](Call& c) { c.shape.out_dtype = DType::f8e4m3; });
  refused(kArgument, "kv_dtype = ?, expected f32, f16, bf16 or f8e4m3",
          [](Call& c) { c.shape.kv_dtype = static_cast<DType>(77); });
}

TEST(Validation, Options) {
  refused(kArgument, "window_left = -2, expected at least -1", [](Call& c) { c.options.window_left = -2; });
  refused(kArgument, "local_chunk = -1 is negative", [](Call& c) { c.options.local_chunk = -1; });
  refused(kArgument, "num_sink_tokens = -1 is negative", [](Call& c) { c.options.num_sink_tokens = -1; });
  refused(kArgument, "min_shared_pages = -1 is negative", [](Call& c) { c.options.min_shared_pages = -1; });
  refused(kArgument, "min_members = -1 is negative", [](Call& c) { c.options.min_members = -1; });
  refused(kArgument, "num_workers = -1, expected 0..65536", [](Call& c) { c.options.num_workers = -1; });
  refused(kArgument, "sm_scale = nan, expected a finite number, at least 0",
          [](Call& c) { c.options.sm_scale = std::nanf(""); });
  for (const auto& [cap, got] : {std::pair(-1.0F, "-1"), {1e-31F, "1e-31"}, {1e31F, "1e+31"}, {std::nanf(""), "nan"}}) {
    refused(kArgument, "logits_soft_cap = " + std::string(got) + ", expected 0 (off) or 1e-30..1e30",
            [cap](Call& c) { c.options.logits_soft_cap = cap; });
  }
  refused(kArgument, "invariant_chunk = 100, expected a multiple of 16 in 16..1048576",
          [](Call& c) { c.options.invariant_chunk = 100; });
  refused(kArgument, "policy = 9, expected 0..4", [](Call& c) { c.options.policy = static_cast<Policy>(9); });
  refused(kArgument, "cascade = 9, expected 0..2", [](Call& c) { c.options.cascade = static_cast<CascadeSwitch>(9); });
  refused(ErrorCode::unsupported,
          "num_sink_tokens = 9 is more than local_chunk = 8 without causal, expected at most local_chunk", [](Call& c) {
            c.options.causal = false;
            c.options.local_chunk = 8;
            c.options.num_sink_tokens = 9;
          });
}

TEST(Validation, Model) {
  DeviceModel m;
  m.num_workers = 0;
  expect_error(kArgument, "model.num_workers = 0, expected 1..65536", [&] { Planner planner(m); });
  m = {};
  m.item_ps = -1;
  expect_error(kArgument, "model.item_ps = -1 is negative", [&] { Planner planner(m); });
  m = {};
  m.dot16.many_row_pad = 0;
  expect_error(kArgument, "model.dot16.many_row_pad = 0, expected 1..65536", [&] { Planner planner(m); });
}

TEST(Validation, QueryRows) {
  refused(kTable, "qo_indptr is empty, expected at least the entry 0",
          [](Call& c) { c.spoil_batch = [](Batch& b) { b.qo_indptr = {}; }; });
  refused(kTable, "qo_indptr[0] = 1, expected 0", [](Call& c) { c.tables.qo_indptr[0] = 1; });
  refused(kTable, "qo_indptr[2] = 0 is less than qo_indptr[1] = 1", [](Call& c) { c.tables.qo_indptr[2] = 0; });
  refused(ErrorCode::unsupported, "qo_indptr[2] = 16777217 rows, expected at most 16777216",
          [](Call& c) { c.tables.qo_indptr[2] = 16'777'217; });
}

TEST(Validation, PageTable) {
  refused(kArgument, "page_size = 0, expected at least 1", [](Call& c) { c.tables.page_size = 0; });
  refused(kArgument, "num_pages = -1, expected 0..2147483647", [](Call& c) { c.tables.num_pages = -1; });
  refused(kTable, "kv_indptr has 2 entries, expected 3 as qo_indptr has",
          [](Call& c) { c.tables.kv_indptr.pop_back(); });
  refused(kTable, "kv_indptr[0] = 1, expected 0", [](Call& c) { c.tables.kv_indptr[0] = 1; });
  refused(kTable, "kv_indptr[2] = 2 is less than kv_indptr[1] = 3", [](Call& c) { c.tables.kv_indptr[2] = 2; });
  refused(kTable, "kv_indices has 6 entries, expected at least kv_indptr[2] = 7",
          [](Call& c) { c.tables.kv_indices.pop_back(); });
  refused(kTable, "kv_last_page_len has 1 entries, expected 2",
          [](Call& c) { c.spoil_batch = [](Batch& b) { b.kv.last_page_len = b.kv.last_page_len.first(1); }; });
  refused(kTable, "kv_last_page_len[1] = 5, expected 1..4 (page_size)", [](Call& c) { c.tables.last_page_len[1] = 5; });
  refused(kTable, "kv_last_page_len[0] = 0, expected 1..4 (page_size)", [](Call& c) { c.tables.last_page_len[0] = 0; });
  refused(kTable, "kv_indices[5] = 8, expected 0..7 (num_pages = 8)", [](Call& c) { c.tables.kv_indices[5] = 8; });
  refused(kTable, "kv_indices[0] = -3, expected 0..7 (num_pages = 8)", [](Call& c) { c.tables.kv_indices[0] = -3; });
}

TEST(Validation, Starts) {
  refused(kTable, "kv_start_page has 1 entries, expected 2 or none", [](Call& c) { c.tables.kv_start_page = {0}; });
  refused(kTable, "kv_start_page[1] = -1 is negative", [](Call& c) { c.tables.kv_start_page = {0, -1}; });
  refused(kTable, "first_page_offset has 3 entries, expected 2 or none", [](Call& c) {
    c.tables.first_page_offset = {0, 0, 0};
  });
  refused(kTable, "first_page_offset[0] = 4, expected 0..3", [](Call& c) { c.tables.first_page_offset = {4, 0}; });
  refused(kTable, "request 1 reaches token position 4000000016, expected at most 1073741823", [](Call& c) {
    c.tables.kv_start_page = {0, 1'000'000'000};
  });
}

TEST(Validation, Levels) {
  levels_refused(kArgument,
                 "levels and a page table (kv, kv_start_page, first_page_offset) are both given, expected one of them",
                 [](Call& c) { c.spoil_batch = [&c](Batch& b) { b.kv = c.tables.batch().kv; }; });
  levels_refused(kTable, "levels[1].qo_indptr[0] = 1, expected 0",
                 [](Call& c) { c.levels.levels[1].qo_indptr[0] = 1; });
  levels_refused(kTable, "levels[0].qo_indptr ends at 4, expected 3 rows as in the last level",
                 [](Call& c) { c.levels.levels[0].qo_indptr[1] = 4; });
  levels_refused(kTable, "levels[0].kv_indptr has 3 entries, expected 2 as levels[0].qo_indptr has", [](Call& c) {
    c.levels.levels[0].kv_indptr = {0, 1, 2};
  });
  levels_refused(kTable, "levels[0].kv_last_page_len[0] = 9, expected 1..4 (page_size)",
                 [](Call& c) { c.levels.levels[0].last_page_len[0] = 9; });
  levels_refused(kTable, "levels[1].kv_indices[1] = 8, expected 0..7 (num_pages = 8)",
                 [](Call& c) { c.levels.levels[1].kv_indices[1] = 8; });
  levels_refused(
      kTable, "levels[1].qo_indptr: rows [1, 3) of node 1 do not lie inside rows [0, 2) of node 0 of the level above",
      [](Call& c) {
        c.levels.levels[0] = {4, 8, {0, 2, 3}, {0, 1, 2}, {0, 1}, {3, 3}};
      });
  levels_refused(kTable, "qo_indptr differs from levels[1].qo_indptr, expected the same or none",
                 [](Call& c) { c.spoil_batch = [&c](Batch& b) { b.qo_indptr = c.tables.qo_indptr; }; });
}

TEST(Validation, WhatIsLegal) {
  // No requests, no rows, no pages, more rows than keys, ids past the length, stale ids left of a window.
  Planner planner(DeviceModel{});
  const AttentionShape shape;
  reference::PageTables none;
  Plan plan = planner.plan(shape, none.batch(), {});
  EXPECT_EQ(plan.stats().num_rows, 0);
  EXPECT_EQ(plan.workspace_size(), 0U);

  reference::PageTables odd;
  odd.page_size = 4;
  odd.add({}, 0, 2);
  odd.add({0}, 1, 5);
  odd.add({1, 2}, 4, 0);
  odd.num_pages = 3;
  odd.kv_indices.push_back(-77);
  plan = planner.plan(shape, odd.batch(), {});
  EXPECT_EQ(plan.stats().num_rows, 7);

  reference::PageTables stale;
  stale.page_size = 4;
  stale.add({999, -1, 2}, 4);
  stale.num_pages = 3;
  PlanOptions window;
  window.window_left = 3;
  EXPECT_NO_THROW((void)planner.plan(shape, stale.batch(), window));
  expect_error(kTable, "kv_indices[0] = 999, expected 0..2 (num_pages = 3)",
               [&] { (void)planner.plan(shape, stale.batch(), {}); });
}

}  // namespace
}  // namespace headwater
