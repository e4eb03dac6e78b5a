// Batch-invariant mode on the GPU: the bits of a row depend neither on policy, row tile and chunk length, nor on the
// other requests of the batch; chunks of a plan cover what it covers.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "cuda/chunks.h"
#include "cuda/device_runner.h"
#include "headwater/plan.h"
#include "plan/plan_data.h"
#include "property/scenario.h"
#include "reference/call.h"

namespace headwater::property {
namespace {

const Range kRange{.max_rows = 40,
                   .max_pages = 24,
                   .head_dims = {64, 128},
                   .page_sizes = {1, 4, 8, 16, 16, 32, 64},
                   .gpu_types = true};

Scenario invariant_scenario(std::uint64_t seed, const Range& range) {
  Scenario s = random_scenario(seed, range);
  s.options.batch_invariant = true;
  s.options.invariant_chunk = seed % 2 == 0 ? 64 : 128;
  return s;
}

void expect_same_bits(const reference::Ran& a, const reference::Ran& b, const Plan& plan) {
  ASSERT_EQ(a.lse.size(), b.lse.size());
  EXPECT_EQ(std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)), 0) << plan.describe();
  EXPECT_TRUE(a.out == b.out) << plan.describe();
}

TEST(CudaInvariant, BitsDoNotDependOnPolicyOrTiles) {
  HEADWATER_NEEDS_GPU();
  int cascades = 0;
  for (std::uint64_t seed = 20'000; seed < 20'120; ++seed) {
    const Scenario s = invariant_scenario(seed, kRange);
    SCOPED_TRACE(describe(s));
    reference::Call call(s.shape, s.options, s.tables, s.call, seed);
    PlanOptions options = s.options;
    options.policy = Policy::flat;
    Planner plain;
    const Plan flat_plan = plain.plan(s.shape, call.batch(), options);
    const reference::Ran flat = call.run_by(cuda_test::run_on_device, flat_plan, 0);
    ASSERT_EQ(flat.complaint, "");
    int turn = static_cast<int>(seed);
    for (const Policy policy : {Policy::automatic, Policy::two_level, Policy::forest}) {
      options.policy = policy;
      constexpr std::array kTiles{8, 16, 64, 128};
      constexpr std::array kChunkTokens{32, 1024, 128, 100};
      ++turn;
      Planner planner(eager_model(kTiles[static_cast<std::size_t>(turn % 4)],
                                  kChunkTokens[static_cast<std::size_t>(turn / 4 % 4)]));
      const Plan plan = planner.plan(s.shape, call.batch(), options);
      const reference::Ran ran = call.run_by(cuda_test::run_on_device, plan, 0);
      EXPECT_EQ(ran.complaint, "") << name_of(policy);
      if (ran.outcome.path == Path::cascade) ++cascades;
      expect_same_bits(ran, flat, plan);
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(cascades, 40);
}

TEST(CudaInvariant, BitsDoNotDependOnTheRestOfTheBatch) {
  HEADWATER_NEEDS_GPU();
  int cascades = 0;
  for (std::uint64_t seed = 21'000; seed < 21'030; ++seed) {
    const Scenario s = invariant_scenario(seed, kRange);
    SCOPED_TRACE(describe(s));
    reference::Call call(s.shape, s.options, s.tables, s.call, seed);
    PlanOptions options = s.options;
    options.policy = Policy::forest;
    Planner planner(s.model);
    const Plan plan = planner.plan(s.shape, call.batch(), options);
    const reference::Ran together = call.run_by(cuda_test::run_on_device, plan, 0);
    ASSERT_EQ(together.complaint, "");
    if (together.outcome.path == Path::cascade) ++cascades;
    const auto heads = static_cast<std::size_t>(s.shape.num_qo_heads);
    const std::size_t row_bytes = heads * static_cast<std::size_t>(s.shape.head_dim_vo) * size_of(s.shape.out_dtype);
    for (std::size_t b = 0; b < static_cast<std::size_t>(s.tables.num_requests()); ++b) {
      const auto first = static_cast<std::size_t>(s.tables.qo_indptr[b]);
      const auto rows = static_cast<std::size_t>(s.tables.qo_indptr[b + 1]) - first;
      if (rows == 0) continue;
      const SingleRequest alone(call.batch(), b);

      cpu::RunArgs args = call.args();
      args.q.data =
          static_cast<const std::byte*>(args.q.data) +
          static_cast<std::int64_t>(first) * args.q.row_stride * static_cast<std::int64_t>(size_of(s.shape.q_dtype));
      std::vector<unsigned char> out(row_bytes * rows);
      std::vector<float> lse(rows * heads);
      args.out = {out.data(), s.shape.out_dtype, s.shape.num_qo_heads * std::int64_t{s.shape.head_dim_vo},
                  s.shape.head_dim_vo};
      args.lse = {lse.data(), s.shape.num_qo_heads, 1, s.call.lse_base};
      (void)cuda_test::run_on_device(planner.plan(s.shape, alone.batch(), options), args);
      ASSERT_EQ(std::memcmp(out.data(), together.out.data() + first * row_bytes, out.size()), 0) << "request " << b;
      ASSERT_EQ(std::memcmp(lse.data(), together.lse.data() + first * heads, lse.size() * sizeof(float)), 0)
          << "request " << b;
    }
  }
  EXPECT_GT(cascades, 5);
}

TEST(CudaInvariant, NormalModeMayDiffer) {
  // A negative control: were the bits equal without the option too, the tests above would prove nothing.
  HEADWATER_NEEDS_GPU();
  const AttentionShape shape{4, 2, 64, 64, DType::f16, DType::f16, DType::f32};
  PlanOptions options;
  options.policy = Policy::flat;
  reference::Call call(shape, options, reference::tree({1, 8}, {500, 40}, 4), {}, 23'000);
  Planner planner(eager_model(128, 100));
  const reference::Ran flat = call.run_by(cuda_test::run_on_device, planner.plan(shape, call.batch(), options), 0);
  options.policy = Policy::forest;
  const reference::Ran forest = call.run_by(cuda_test::run_on_device, planner.plan(shape, call.batch(), options), 0);
  EXPECT_EQ(flat.complaint, "");
  EXPECT_EQ(forest.complaint, "");
  EXPECT_FALSE(flat.out == forest.out);
}

/// The page that holds key `pos` of a query row's request.
std::int32_t page_at(const reference::PageTables& tables, std::int32_t row, std::int32_t pos) {
  const auto after = std::ranges::upper_bound(tables.qo_indptr, row);
  const auto request = static_cast<std::size_t>(after - tables.qo_indptr.begin()) - 1;
  const std::int32_t start = tables.kv_start_page.empty() ? 0 : tables.kv_start_page[request];
  return tables.kv_indices[static_cast<std::size_t>(tables.kv_indptr[request] + pos / tables.page_size - start)];
}

/// Needs no GPU: every token that a row sees lies in exactly one of the chunks whose states the row merges, and these
/// come in ascending position.
TEST(CudaInvariant, ChunksCoverWhatRowsSee) {
  int cascades = 0;
  int looked_at = 0;
  int hidden = 0;
  for (std::uint64_t seed = 25'000; seed < 25'200; ++seed) {
    const Scenario s = invariant_scenario(seed, kRange);
    SCOPED_TRACE(describe(s));
    reference::Call call(s.shape, s.options, s.tables, s.call, seed);
    PlanOptions options = s.options;
    options.policy = Policy::forest;
    Planner planner(s.model);
    const Plan plan = planner.plan(s.shape, call.batch(), options);
    const detail::PlanData& data = plan.data();
    if (plan.stats().path == Path::cascade) ++cascades;
    cuda::ChunkedPlan chunks;
    chunks.cut(data);
    std::vector<std::size_t> chunk_of(static_cast<std::size_t>(chunks.num_partials));
    for (std::size_t i = 0; i < chunks.items.size(); ++i) {
      const detail::WorkItem& item = chunks.items[i];
      const std::int32_t first = item.pos_begin + chunks.leads[i];
      EXPECT_EQ(item.pos_begin % 64, 0);
      // The page of its first visible token, counted from its first page on, is what is in the request's table.
      const std::int32_t page_size = data.page_size[static_cast<std::size_t>(item.view)];
      EXPECT_GE(item.first_token, 0);
      EXPECT_LT(item.first_token, page_size);
      const std::int32_t page = (item.first_token + chunks.leads[i]) / page_size - chunks.hidden_pages[i];
      EXPECT_GE(page, 0) << "in a hidden page";
      hidden += chunks.hidden_pages[i];
      for (std::int32_t j = 0; j < item.num_rows; ++j) {
        const std::int32_t row = data.item_rows[static_cast<std::size_t>(item.row_begin + j)];
        const detail::RowRange& range = data.rows[static_cast<std::size_t>(row)];
        if (first < range.lo || first >= range.hi) continue;
        EXPECT_EQ(data.page_ids[static_cast<std::size_t>(item.page_begin + page)], page_at(s.tables, row, first));
        ++looked_at;
      }
      EXPECT_EQ(first / options.invariant_chunk, (item.pos_begin + item.num_tokens - 1) / options.invariant_chunk);
      for (std::int32_t j = 0; j < item.num_rows; ++j) chunk_of[static_cast<std::size_t>(item.partial_begin + j)] = i;
    }
    std::vector<std::int64_t> seen(data.rows.size(), 0);
    for (std::size_t m = 0; m < chunks.merge_rows.size(); ++m) {
      const auto r = static_cast<std::size_t>(chunks.merge_rows[m]);
      const detail::RowRange& row = data.rows[r];
      std::int32_t last = -1;
      for (std::int32_t k = chunks.merge_indptr[m]; k < chunks.merge_indptr[m + 1]; ++k) {
        const std::int32_t slot = chunks.merge_slots[static_cast<std::size_t>(k)];
        const std::size_t i = chunk_of[static_cast<std::size_t>(slot)];
        const detail::WorkItem& item = chunks.items[i];
        EXPECT_EQ(data.item_rows[static_cast<std::size_t>(item.row_begin + slot - item.partial_begin)],
                  chunks.merge_rows[m]);
        EXPECT_GT(item.pos_begin + chunks.leads[i], last);
        last = item.pos_begin + chunks.leads[i];
        for (std::int32_t p = last; p < item.pos_begin + item.num_tokens; ++p) {
          if (p < row.hi && (p >= row.lo || p < options.num_sink_tokens)) ++seen[r];
        }
      }
    }
    const auto visible = [&](const detail::RowRange& row) {
      const std::int64_t sinks = std::min<std::int64_t>({options.num_sink_tokens, row.lo, row.hi});
      return std::max<std::int64_t>(0, row.hi - row.lo) + std::max<std::int64_t>(0, sinks);
    };
    for (std::size_t r = 0; r < data.rows.size(); ++r) {
      if (s.tables.kv_start_page.empty()) {
        EXPECT_EQ(seen[r], visible(data.rows[r])) << "row " << r;
      }
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(cascades, 40);
  EXPECT_GT(looked_at, 1'000);
  EXPECT_GT(hidden, 50);
}

}  // namespace
}  // namespace headwater::property
