// Faults of the attention itself: masks, extreme scores, heads, types, poison.
#include <cmath>
#include <limits>

#include "faults/fixture.h"
#include "reference/element.h"

namespace headwater::faults {
namespace {

using reference::PageTables;

TEST(Faults, Fault01_LseOfSplitGroupsIsCompared) {
  // Wrong LSE with swapped GQA groups: every comparison covers LSE. Heads of one group have different LSE here, so a
  // swap cannot pass; the control swaps two heads and must be noticed.
  check_both_paths(kSmallF32, reference::tree({1, 6}, {96, 24}, 8));
  reference::Call call(kSmallF32, {}, reference::tree({1, 6}, {96, 24}, 8), {}, 40'100);
  const reference::Result& expected = call.expected();
  std::vector<float> out(expected.o.begin(), expected.o.end());
  std::vector<float> lse(expected.lse.begin(), expected.lse.end());
  const auto complaint = [&] {
    return reference::compare(kSmallF32, expected, nullptr, {out.data(), DType::f32, 8 * 64, 64},
                              {lse.data(), 8, 1, LseBase::natural})
        .complaint;
  };
  EXPECT_EQ(complaint(), "");
  std::swap(lse[0], lse[1]);
  EXPECT_NE(complaint(), "");
}

TEST(Faults, Fault03_EmptySplitsWriteTheRightSlot) {
  // Requests without keys among sharing ones, and rows that see nothing of a shared span.
  PageTables tables;
  tables.page_size = 4;
  tables.add({}, 0, 2);
  tables.add({0, 1, 2, 3, 4}, 1, 1);
  tables.add({}, 0, 1);
  tables.add({0, 1, 2, 3, 5}, 4, 3);
  tables.add({0}, 1, 1);
  tables.add({}, 0, 0);
  check_both_paths(kSmallF32, tables);
}

TEST(Faults, Fault04_RowsWithoutKeysHaveMinusInfinity) {
  PageTables tables;
  tables.page_size = 4;
  tables.add({}, 0, 1);
  reference::Call call(kSmallF32, {}, tables, {}, 40'200);
  Planner planner;
  SerialExecutor serial;
  for (const Isa isa : property::isas()) {
    const reference::Ran ran = call.run(planner.plan(kSmallF32, call.batch(), {}), serial, isa);
    EXPECT_EQ(ran.complaint, "");
    for (const float lse : ran.lse) EXPECT_EQ(lse, -std::numeric_limits<float>::infinity());
  }
}

TEST(Faults, Fault06_HugeNegativeLogits) {
  // One head, k = -c q: scores far below -5e4. Softmax must still be exact and LSE finite, flat and cascaded.
  const AttentionShape shape{1, 1, 32, 32, DType::f32, DType::f32, DType::f32};
  for (const double size : {1e5, 1e6, 1e8, 1e30}) {
    std::vector<float> q(32 * 2, 0.0F);
    std::vector<float> k(32 * 16, 0.0F);
    std::vector<float> v(32 * 16, 0.0F);
    q[0] = q[32] = 1.0F;
    for (int t = 0; t < 16; ++t) {
      k[static_cast<std::size_t>(t) * 32] = static_cast<float>(-size);
      v[static_cast<std::size_t>(t) * 32] = static_cast<float>(t);
    }
    PageTables tables;
    tables.page_size = 4;
    tables.add({0, 1, 2}, 4);
    tables.add({0, 1, 3}, 4);
    const KvCache cache{{k.data(), 128, 32, 32}, {v.data(), 128, 32, 32}, DType::f32, 4, 4};
    PlanOptions options;
    options.sm_scale = 1.0F;
    for (const Policy policy : {Policy::flat, Policy::forest}) {
      options.policy = policy;
      Planner planner(property::eager_model());
      const Plan plan = planner.plan(shape, tables.batch(), options);
      EXPECT_EQ(plan.stats().path, policy == Policy::flat ? Path::flat : Path::cascade);
      for (const Isa isa : property::isas()) {
        std::vector<float> out(64);
        std::vector<float> lse(2);
        reference::FencedBuffer workspace(plan.workspace_size());
        cpu::RunArgs args;
        args.q = {q.data(), DType::f32, 32, 32};
        args.kv = {&cache, 1};
        args.out = {out.data(), DType::f32, 32, 32};
        args.lse = {lse.data(), 1, 1, LseBase::natural};
        args.workspace = {workspace.data(), workspace.size()};
        args.isa = isa;
        SerialExecutor serial;
        cpu::run(plan, args, serial);
        // All scores are equal: a plain mean of the visible values; LSE = -size + ln 12. Past 2^24 an fp32 LSE no
        // longer tells 4 keys from 8, so merged pieces weigh alike: still a mean of values, and finite.
        const bool exact = size < 1e7 || policy == Policy::flat;
        EXPECT_NEAR(out[0], 5.5F, exact ? 1e-4 : 2.0) << size << ' ' << name_of(isa);
        EXPECT_NEAR(out[32], (28.0F + 12 + 13 + 14 + 15) / 12.0F, exact ? 1e-4 : 2.0) << size << ' ' << name_of(isa);
        EXPECT_NEAR(lse[0], -size + std::log(12.0), 1e-6 * size) << name_of(isa);
        EXPECT_TRUE(std::isfinite(lse[1]));
      }
    }
  }
}

TEST(Faults, Fault07_FullyMaskedRowsOneKeyRowsEmptyChunks) {
  // More query rows than keys: the first rows see nothing; one key; a window of one; a local chunk that starts at the
  // row.
  PageTables tables;
  tables.page_size = 4;
  tables.add({0}, 3, 6);
  tables.add({1}, 1, 1);
  tables.add({0, 2, 3}, 1, 4);
  tables.add({0, 2, 4}, 1, 8);
  check_both_paths(kSmallF32, tables, {}, {}, Path::cascade);
  PlanOptions window;
  window.window_left = 0;
  reference::Call call(kSmallF32, window, tables, {}, 40'300);
  Planner planner;
  SerialExecutor serial;
  for (const Isa isa : property::isas()) {
    EXPECT_EQ(call.run(planner.plan(kSmallF32, call.batch(), window), serial, isa).complaint, "");
  }
  PlanOptions local;
  local.local_chunk = 8;
  check_both_paths(kSmallF32, tables, local, {}, Path::cascade);
}

TEST(Faults, Fault08_OneToOneHundredTwentyEightHeads) {
  for (const int heads : {1, 2, 3, 7, 16, 31, 64, 96, 128}) {
    check_both_paths({heads, heads, 128, 128, DType::bf16, DType::bf16, DType::bf16},
                     reference::tree({1, 3}, {32, 9}, 16));
  }
  check_both_paths({96, 8, 128, 128, DType::f32, DType::f32, DType::f32}, reference::tree({1, 3}, {32, 9}, 16));
  check_both_paths({128, 1, 64, 64, DType::f16, DType::f16, DType::f16}, reference::tree({1, 3}, {32, 9}, 16));
}

TEST(Faults, Fault12_RowsSeeOnlyTheirOwnLengthOfASharedPage) {
  // One page filled in this very step, named by requests of different lengths: each sees its own part.
  PageTables tables;
  tables.page_size = 16;
  for (const int length : {1, 3, 3, 9, 16}) tables.add({0, 1}, length);
  check_both_paths(kSmallF32, tables);
  check_both_paths(kSmallBf16, tables);
}

TEST(Faults, Fault14_TwoWindowsTwoPlansOneBatch) {
  // A model with windowed and full layers: one plan each, run in turn on the same tensors.
  const PageTables tables = reference::tree({1, 5}, {160, 20}, 16);
  ThreadPool pool(2);
  Planner planner(property::eager_model());
  PlanOptions full;
  full.policy = Policy::forest;
  PlanOptions windowed = full;
  windowed.window_left = 40;
  reference::Call full_call(kSmallF32, full, tables, {}, 40'400);
  reference::Call windowed_call(kSmallF32, windowed, tables, {}, 40'400);
  const Plan full_plan = planner.plan(kSmallF32, full_call.batch(), full);
  const Plan windowed_plan = planner.plan(kSmallF32, windowed_call.batch(), windowed);
  EXPECT_LT(windowed_plan.stats().kv_bytes_read, full_plan.stats().kv_bytes_read);
  for (int layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(full_call.run(full_plan, pool).complaint, "");
    EXPECT_EQ(windowed_call.run(windowed_plan, pool).complaint, "");
  }
}

TEST(Faults, Fault15_LearnedSinksCountOnceWhateverTheNumberOfPieces) {
  PlanOptions options;
  options.sinks = true;
  // Many pieces: deep tree, short chunks; and no pieces at all.
  check_both_paths(kSmallF32, reference::tree({1, 2, 4, 8}, {64, 40, 30, 9}, 2), options);
  check_both_paths(kSmallF32, reference::tree({1, 2, 4, 8}, {64, 40, 30, 9}, 2), options, {.include_sink = false});
  PageTables empty;
  empty.page_size = 4;
  empty.add({}, 0, 2);
  check_both_paths(kSmallF32, empty, options, {}, Path::flat);
  // The control: a sink counted twice is outside tolerance.
  reference::Call call(kSmallF32, options, reference::tree({1, 2}, {16, 4}, 4), {}, 40'500);
  const reference::Result once = call.expected();
  reference::Problem twice = call.problem();
  std::vector<float> doubled;
  for (int h = 0; h < 8; ++h) doubled.push_back(twice.sinks[h] + std::log(2.0F));
  twice.sinks = doubled.data();
  const reference::Result wrong = reference::attend(twice);
  const std::vector<float> out(wrong.o.begin(), wrong.o.end());
  const std::vector<float> lse(wrong.lse.begin(), wrong.lse.end());
  EXPECT_NE(reference::compare(kSmallF32, once, nullptr, {out.data(), DType::f32, 8 * 64, 64},
                               {lse.data(), 8, 1, LseBase::natural})
                .complaint,
            "");
}

TEST(Faults, Fault19_EveryGroupSizeFromOneToSixteen) {
  for (int group = 1; group <= 16; ++group) {
    check_both_paths({2 * group, 2, 64, 64, DType::f32, DType::f32, DType::f32}, reference::tree({1, 5}, {48, 7}, 8));
    check_both_paths({3 * group, 3, 128, 128, DType::bf16, DType::bf16, DType::bf16},
                     reference::tree({1, 5}, {48, 7}, 8));
  }
}

TEST(Faults, Fault21_PoisonOutsideTheVisibleTokensNeverShows) {
  // Call fills everything that no row sees with NaN: unused pages, page tails, stale pages left of a window, padding
  // between pages. A NaN anywhere in the output is a complaint.
  PageTables tables;
  tables.page_size = 16;
  tables.add({9, 2, 5}, 3);
  tables.add({9, 2, 7}, 11);
  tables.add({9, 2, 5}, 3);
  tables.num_pages = 12;
  check_both_paths(kSmallBf16, tables, {}, {.page_padding = 8});
  PlanOptions window;
  window.window_left = 20;
  check_both_paths(kSmallBf16, tables, window, {.page_padding = 8});
  check_both_paths(kSmallF32, tables, window, {.layout = reference::Layout::hnd_side, .page_padding = 1});
}

TEST(Faults, Fault22_Fp8CacheWithScales) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    for (const int scales : {0, 1, 2}) {
      check_both_paths({8, 2, 64, 64, type, DType::f8e4m3, type}, reference::tree({1, 4}, {64, 20}, 16), {},
                       {.k_scales = scales, .v_scales = 2 - scales});
    }
  }
}

TEST(Faults, Fault27_PoolBeyondTwoToTheThirtyTwoElements) {
  // 8 GiB of address space in fp8, touched in a few pages only: page 3 begins past 2^32 elements, and a 32-bit product
  // of the page index would wrap onto other pages.
  const AttentionShape shape{2, 1, 32, 32, DType::f32, DType::f8e4m3, DType::f32};
  constexpr std::int64_t kPageStride = (1LL << 31) - 64;
  const reference::SparseBuffer memory(4ULL * kPageStride);
  const auto base = static_cast<unsigned char*>(memory.data());
  const KvCache cache{{base, kPageStride, 64, 64}, {base + 32, kPageStride, 64, 64}, DType::f8e4m3, 4, 4};
  reference::Rng rng(40'600);
  for (const std::int64_t page : {0, 1, 2, 3}) {
    for (int i = 0; i < 4 * 64; ++i) reference::store(DType::f8e4m3, base + page * kPageStride, i, rng.normal());
  }
  PageTables tables;
  tables.page_size = 4;
  tables.add({3, 1, 2}, 4);
  tables.add({3, 1, 0}, 2);
  std::vector<float> q;
  for (int i = 0; i < 2 * 64; ++i) q.push_back(static_cast<float>(rng.normal()));
  for (const Policy policy : {Policy::flat, Policy::forest}) {
    PlanOptions options;
    options.policy = policy;
    reference::Problem problem;
    problem.shape = shape;
    problem.options = options;
    problem.batch = tables.batch();
    problem.kv = {&cache, 1};
    problem.q = {q.data(), DType::f32, 64, 32};
    const reference::Result expected = reference::attend(problem);
    Planner planner(property::eager_model());
    const Plan plan = planner.plan(shape, tables.batch(), options);
    EXPECT_EQ(plan.stats().path, policy == Policy::flat ? Path::flat : Path::cascade);
    for (const Isa isa : property::isas()) {
      std::vector<float> out(q.size());
      std::vector<float> lse(4);
      reference::FencedBuffer workspace(plan.workspace_size());
      cpu::RunArgs args;
      args.q = problem.q;
      args.kv = problem.kv;
      args.out = {out.data(), DType::f32, 64, 32};
      args.lse = {lse.data(), 2, 1, LseBase::two};
      args.workspace = {workspace.data(), workspace.size()};
      args.isa = isa;
      SerialExecutor serial;
      cpu::run(plan, args, serial);
      EXPECT_EQ(reference::compare(shape, expected, nullptr, {out.data(), DType::f32, 64, 32},
                                   {lse.data(), 2, 1, LseBase::two})
                    .complaint,
                "")
          << name_of(isa);
    }
  }
}

}  // namespace
}  // namespace headwater::faults
