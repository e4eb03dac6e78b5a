// Batch-invariant mode: the bits of a row depend neither on policy, threads, row tile and chunk length, nor on the
// other requests of the batch; and the cascade arm really reads shared spans once.
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "headwater/plan.h"
#include "property/scenario.h"
#include "reference/call.h"

namespace headwater::property {
namespace {

constexpr std::array kPolicies{Policy::automatic, Policy::flat, Policy::two_level, Policy::vllm, Policy::forest};

Scenario invariant_scenario(std::uint64_t seed, const Range& range) {
  Scenario s = random_scenario(seed, range);
  reference::Rng rng(seed ^ 0x5EEDULL);
  s.options.batch_invariant = true;
  constexpr std::array kChunks{16, 32, 64, 128};
  s.options.invariant_chunk = rng.pick(kChunks);
  return s;
}

int token_bytes(const AttentionShape& shape) {
  return (shape.head_dim_qk + shape.head_dim_vo) * shape.num_kv_heads * static_cast<int>(size_of(shape.kv_dtype));
}

TEST(Invariant, BitsDoNotDependOnPolicyThreadsOrTiles) {
  Executors executors;
  int cascades = 0;
  for (std::uint64_t seed = 20'000; seed < 20'150; ++seed) {
    const Scenario s = invariant_scenario(seed, {.max_pages = 24, .head_dims = {32, 64, 80, 128}});
    SCOPED_TRACE(describe(s));
    reference::Call call(s.shape, s.options, s.tables, s.call, seed);
    for (const Isa isa : isas()) {
      PlanOptions options = s.options;
      options.policy = Policy::flat;
      Planner plain;
      const reference::Ran flat = call.run(plain.plan(s.shape, call.batch(), options), executors.of(1), isa);
      ASSERT_EQ(flat.complaint, "");
      int turn = static_cast<int>(seed);
      for (const Policy policy : kPolicies) {
        options.policy = policy;
        constexpr std::array kTiles{8, 16, 64, 128};
        constexpr std::array kChunkTokens{32, 1024, 128, 100};
        ++turn;
        Planner planner(eager_model(kTiles[static_cast<std::size_t>(turn % 4)],
                                    kChunkTokens[static_cast<std::size_t>(turn / 4 % 4)]));
        const Plan plan = planner.plan(s.shape, call.batch(), options);
        const reference::Ran ran = call.run(plan, executors.of(1 + turn % 3), isa);
        ASSERT_EQ(ran.complaint, "") << name_of(policy);
        if (ran.outcome.path == Path::cascade) ++cascades;
        ASSERT_EQ(ran.lse.size(), flat.lse.size());
        ASSERT_EQ(std::memcmp(ran.lse.data(), flat.lse.data(), ran.lse.size() * sizeof(float)), 0)
            << name_of(policy) << ", " << name_of(isa) << "\n"
            << plan.describe();
        ASSERT_TRUE(ran.out == flat.out) << name_of(policy) << ", " << name_of(isa) << "\n" << plan.describe();
      }
    }
  }
  EXPECT_GT(cascades, 50);
}

TEST(Invariant, BitsOfExplicitLevelsDoNotDependOnPolicyOrThreads) {
  Executors executors;
  int cascades = 0;
  for (std::uint64_t seed = 24'000; seed < 24'080; ++seed) {
    Scenario s = invariant_scenario(seed, {.head_dims = {32, 64, 128}});
    reference::Rng rng(seed);
    const reference::LevelTables levels = reference::random_levels(rng, s.tables.page_size, 3);
    SCOPED_TRACE("levels; options as in " + describe(s));
    reference::Call call(s.shape, s.options, levels, s.call, seed);
    for (const Isa isa : isas()) {
      s.options.policy = Policy::flat;
      Planner plain;
      const reference::Ran flat = call.run(plain.plan(s.shape, call.batch(), s.options), executors.of(1), isa);
      ASSERT_EQ(flat.complaint, "");
      for (const Policy policy : {Policy::automatic, Policy::forest}) {
        s.options.policy = policy;
        Planner planner(eager_model(16, 32));
        const Plan plan = planner.plan(s.shape, call.batch(), s.options);
        const reference::Ran ran = call.run(plan, executors.of(2), isa);
        ASSERT_EQ(ran.complaint, "") << name_of(policy);
        if (ran.outcome.path == Path::cascade) ++cascades;
        ASSERT_EQ(std::memcmp(ran.lse.data(), flat.lse.data(), ran.lse.size() * sizeof(float)), 0)
            << name_of(policy) << ", " << name_of(isa) << "\n"
            << plan.describe();
        ASSERT_TRUE(ran.out == flat.out) << name_of(policy) << ", " << name_of(isa) << "\n" << plan.describe();
      }
    }
  }
  EXPECT_GT(cascades, 30);
}

TEST(Invariant, BitsDoNotDependOnTheRestOfTheBatch) {
  Executors executors;
  int cascades = 0;
  for (std::uint64_t seed = 21'000; seed < 21'080; ++seed) {
    const Scenario s = invariant_scenario(seed, {.max_pages = 24, .head_dims = {32, 64, 128}});
    SCOPED_TRACE(describe(s));
    reference::Call call(s.shape, s.options, s.tables, s.call, seed);
    PlanOptions options = s.options;
    options.policy = Policy::forest;
    Planner planner(s.model);
    for (const Isa isa : isas()) {
      const reference::Ran together = call.run(planner.plan(s.shape, call.batch(), options), executors.of(2), isa);
      ASSERT_EQ(together.complaint, "");
      if (together.outcome.path == Path::cascade) ++cascades;
      // Each request alone: its row of the tables, its rows of q.
      for (std::size_t b = 0; b < static_cast<std::size_t>(s.tables.num_requests()); ++b) {
        const std::int64_t first = s.tables.qo_indptr[b];
        const std::int64_t rows = s.tables.qo_indptr[b + 1] - first;
        if (rows == 0) continue;
        const SingleRequest alone(call.batch(), b);
        const Plan plan = planner.plan(s.shape, alone.batch(), options);

        cpu::RunArgs args = call.args();
        args.isa = isa;
        args.q.data = static_cast<const std::byte*>(args.q.data) +
                      first * args.q.row_stride * static_cast<std::int64_t>(size_of(s.shape.q_dtype));
        const std::int64_t heads = s.shape.num_qo_heads;
        const auto row_bytes = static_cast<std::size_t>(heads * s.shape.head_dim_vo) * size_of(s.shape.out_dtype);
        reference::FencedBuffer out(row_bytes * static_cast<std::size_t>(rows));
        args.out = {out.data(), s.shape.out_dtype, heads * s.shape.head_dim_vo, s.shape.head_dim_vo};
        std::vector<float> lse(static_cast<std::size_t>(rows * heads));
        args.lse = {lse.data(), heads, 1, s.call.lse_base};
        reference::FencedBuffer workspace(plan.workspace_size(), kWorkspaceAlignment);
        args.workspace = {workspace.data(), workspace.size()};
        cpu::run(plan, args, executors.of(1));
        const auto at = static_cast<std::size_t>(first);
        ASSERT_EQ(std::memcmp(out.data(), together.out.data() + at * row_bytes, out.size()), 0)
            << "request " << b << ", " << name_of(isa);
        ASSERT_EQ(std::memcmp(lse.data(), together.lse.data() + at * static_cast<std::size_t>(heads),
                              lse.size() * sizeof(float)),
                  0)
            << "request " << b << ", " << name_of(isa);
      }
    }
  }
  EXPECT_GT(cascades, 20);
}

TEST(Invariant, CascadeReadsDistinctBytesPlusOneChunkPerMemberAndCut) {
  Executors executors;
  struct Tree {
    std::vector<int> nodes;
    std::vector<int> tokens;
    int page_size;
    int chunk;
  };
  const std::vector<Tree> trees{
      {{1, 8}, {512, 40}, 16, 128},       {{1, 8}, {500, 40}, 4, 128},
      {{1, 2, 8}, {300, 170, 33}, 1, 64}, {{1, 2, 4, 12}, {64, 96, 80, 20}, 16, 32},
      {{2, 4}, {256, 100}, 16, 128},      {{1, 6}, {130, 1}, 10, 128},
  };
  for (const Tree& t : trees) {
    const AttentionShape shape{4, 2, 64, 64, DType::bf16, DType::bf16, DType::bf16};
    PlanOptions options;
    options.batch_invariant = true;
    options.invariant_chunk = t.chunk;
    options.policy = Policy::forest;
    reference::Call call(shape, options, reference::tree(t.nodes, t.tokens, t.page_size), {}, 22'000);
    Planner planner(eager_model(128, 1024));
    const Plan plan = planner.plan(shape, call.batch(), options);
    const reference::VisibleBytes visible = reference::visible_bytes(shape, options, call.batch());
    for (const Isa isa : isas()) {
      const reference::Ran ran = call.run(plan, executors.of(2), isa);
      ASSERT_EQ(ran.complaint, "");
      ASSERT_EQ(ran.outcome.path, Path::cascade) << plan.describe();
      EXPECT_LE(ran.outcome.kv_bytes_read,
                visible.distinct + plan.stats().member_sequences * t.chunk * token_bytes(shape))
          << plan.describe();
      EXPECT_LT(ran.outcome.kv_bytes_read, visible.flat);
      EXPECT_EQ(plan.stats().kv_bytes_unique, visible.distinct);
      EXPECT_EQ(plan.stats().kv_bytes_flat, visible.flat);
    }
  }
}

TEST(Invariant, NormalModeMayDiffer) {
  // A negative control: were the bits equal without the option too, the tests above would prove nothing.
  Executors executors;
  const AttentionShape shape{4, 2, 64, 64, DType::f32, DType::f32, DType::f32};
  PlanOptions options;
  options.policy = Policy::flat;
  reference::Call call(shape, options, reference::tree({1, 8}, {500, 40}, 4), {}, 23'000);
  Planner planner(eager_model(128, 100));
  const reference::Ran flat = call.run(planner.plan(shape, call.batch(), options), executors.of(1));
  options.policy = Policy::forest;
  const reference::Ran cascade = call.run(planner.plan(shape, call.batch(), options), executors.of(1));
  EXPECT_EQ(flat.complaint, "");
  EXPECT_EQ(cascade.complaint, "");
  EXPECT_EQ(cascade.outcome.path, Path::cascade);
  EXPECT_FALSE(cascade.out == flat.out);
}

}  // namespace
}  // namespace headwater::property
