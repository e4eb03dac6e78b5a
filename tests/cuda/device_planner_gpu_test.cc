// Planning on the GPU: bit for bit what host threads plan, every time; attention inside one captured graph whose tables
// change between replays, against the float64 reference.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <stdexcept>

#include "cuda/device_plan.h"
#include "cuda/device_runner.h"
#include "cuda/planner_emulation.h"
#include "headwater/error.h"
#include "property/scenario.h"
#include "reference/call.h"

namespace headwater::cuda_test {
namespace {

using reference::PageTables;
using reference::Rng;
using reference::tree;

const AttentionShape kShape{8, 2, 128, 128, DType::f16, DType::f16, DType::f16};

void ok(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// Block tables in device memory, with room for others of the same limits.
class DeviceSide {
 public:
  explicit DeviceSide(const cuda::DeviceTableLimits& limits)
      : stride_((limits.max_blocks + 3) / 4 * 4),
        table_(static_cast<std::size_t>(limits.max_requests * stride_) * 4),
        lengths_(static_cast<std::size_t>(limits.max_requests) * 4),
        rows_(static_cast<std::size_t>(limits.max_requests + 1) * 4) {}

  /// `odd`: rows that are not aligned.
  cuda::DeviceTables put(const BlockTables& t, bool odd = false) {
    table_.poison();
    const std::int64_t stride = odd ? t.max_blocks : stride_;
    for (int b = 0; b < t.num_requests; ++b) {
      ok(cudaMemcpy(table_.data() + b * stride * 4, t.block_table.data() + b * t.row_stride,
                    static_cast<std::size_t>(t.max_blocks) * 4, cudaMemcpyHostToDevice));
    }
    lengths_.put(t.lengths.data(), t.lengths.size() * 4);
    rows_.put(t.qo_indptr.data(), t.qo_indptr.size() * 4);
    return {ints(table_), stride, ints(lengths_), ints(rows_), t.num_requests};
  }

 private:
  static const std::int32_t* ints(const DeviceMemory& m) { return reinterpret_cast<const std::int32_t*>(m.data()); }
  std::int64_t stride_;
  DeviceMemory table_;
  DeviceMemory lengths_;
  DeviceMemory rows_;
};

template <class Element>
std::vector<Element> fetch(const Element* from, std::int64_t count) {
  std::vector<Element> to(static_cast<std::size_t>(count));
  if (count > 0) ok(cudaMemcpy(to.data(), from, to.size() * sizeof(Element), cudaMemcpyDeviceToHost));
  return to;
}

/// What the planner left, from the device.
Planned fetch_plan(const cuda::DevicePlanner& planner, const cuda::DevicePlan& plan, int num_requests, int num_rows) {
  ok(cudaDeviceSynchronize());
  const cuda::PlanView& view = plan.impl().view;
  Planned p;
  p.header = fetch(view.header, 1)[0];
  p.items = fetch(view.items, p.header.num_items);
  p.item_rows = fetch(view.item_rows, num_rows);
  p.merge_rows = fetch(view.merge_rows, p.header.num_merge_rows);
  p.merge_indptr = fetch(view.merge_indptr, p.header.num_merge_rows + 1);
  p.merge_slots = fetch(view.merge_slots, p.merge_indptr.back());
  p.empty_rows = fetch(view.empty_rows, p.header.num_empty_rows);
  p.status = fetch(planner.status(), 1)[0];
  p.spans = fetch(planner.spans(), p.status.num_spans);
  if (!p.spans.empty()) p.members = fetch(planner.span_members(), num_requests);
  return p;
}

/// The emulation counts page_begin in its own table.
void rebase(Planned& planned, std::int64_t from_stride, std::int64_t to_stride) {
  for (cuda::DeviceItem& item : planned.items) {
    const std::int64_t request = item.page_begin / from_stride;
    item.page_begin = static_cast<std::int32_t>(request * to_stride + item.page_begin % from_stride);
  }
}

std::string gpu_bytes(const AttentionShape& shape, const PlanOptions& options, const DeviceModel& model,
                      const BlockTables& tables, bool odd) {
  cuda::DevicePlanner planner(shape, options, tables.limits(), model);
  cuda::DevicePlan plan(shape, planner.capacity());
  DeviceSide side(tables.limits());
  const cuda::DeviceTables there = side.put(tables, odd);
  planner.plan(plan, there, nullptr);
  Planned planned = fetch_plan(planner, plan, tables.num_requests, tables.qo_indptr.back());
  rebase(planned, there.row_stride, tables.row_stride);
  return bytes_of(planned);
}

TEST(CudaDevicePlanner, TheSameAsHostThreads) {
  HEADWATER_NEEDS_GPU();
  for (std::uint64_t seed = 1; seed <= 120; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(seed);
    reference::ForestOptions forest;
    constexpr std::array kPageSizes{1, 2, 4, 8, 16, 32};
    forest.page_size = rng.pick(kPageSizes);
    forest.max_requests = seed % 3 == 0 ? 300 : 20;
    forest.max_pages = rng.integer(1, 60);
    forest.max_rows = rng.chance(0.4) ? rng.integer(2, 40) : 1;
    forest.null_page = rng.chance(0.3);
    const BlockTables tables(reference::random_forest(rng, forest));
    PlanOptions options;
    options.causal = !rng.chance(0.2);
    const DeviceModel model =
        rng.chance(0.5) ? cuda::h200_model(kShape) : property::eager_model(rng.integer(8, 128), 1 << 20);
    for (const Policy policy : {Policy::automatic, Policy::forest, Policy::flat}) {
      options.policy = policy;
      const std::string expected = bytes_of(plan_alone(kShape, options, model, tables));
      EXPECT_EQ(gpu_bytes(kShape, options, model, tables, seed % 2 == 0), expected) << name_of(policy);
    }
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(CudaDevicePlanner, BigTables) {
  HEADWATER_NEEDS_GPU();
  const DeviceModel model = cuda::h200_model(kShape);
  for (const auto& [nodes, tokens] : {std::pair<std::vector<int>, std::vector<int>>{{256}, {2'048 * 16}},
                                      {{1, 256}, {2'000 * 16, 48 * 16}},
                                      {{1, 4, 32, 256}, {500 * 16, 700 * 16, 400 * 16, 1'000}},
                                      {{1, 4, 1'024}, {1'024, 512, 100}},
                                      {{2, 3'000}, {256, 40}}}) {
    const BlockTables tables(tree(nodes, tokens, 16));
    for (const Policy policy : {Policy::automatic, Policy::forest}) {
      PlanOptions options;
      options.policy = policy;
      const std::string expected = bytes_of(plan_alone(kShape, options, model, tables));
      EXPECT_EQ(gpu_bytes(kShape, options, model, tables, false), expected) << nodes.back();
    }
  }
}

TEST(CudaDevicePlanner, BadInput) {
  HEADWATER_NEEDS_GPU();
  const DeviceModel model = property::eager_model();
  PlanOptions options;
  options.policy = Policy::forest;
  const auto check = [&](const BlockTables& tables, std::uint32_t flag) {
    const Planned expected = plan_alone(kShape, options, model, tables);
    EXPECT_EQ(expected.status.flags, flag);
    EXPECT_EQ(gpu_bytes(kShape, options, model, tables, false), bytes_of(expected));
  };
  const BlockTables good(tree({1, 6}, {640, 32}, 16));
  check(good, 0);
  for (const std::int64_t at : {0, 39, 41}) {
    BlockTables bad = good;
    bad.block_table[static_cast<std::size_t>(3 * bad.row_stride + at)] = at == 0 ? -1 : 1 << 29;
    check(bad, cuda::DevicePlanStatus::kBadPageId);
  }
  BlockTables length = good;
  length.lengths[2] = -3;
  check(length, cuda::DevicePlanStatus::kBadLength);
}

/// The LSE and the bits of O of one query row.
std::pair<std::vector<float>, std::vector<std::uint16_t>> row_of(const cpu::RunArgs& args, int row) {
  std::pair<std::vector<float>, std::vector<std::uint16_t>> out;
  const auto* o = static_cast<const std::uint16_t*>(args.out.data) + row * args.out.row_stride;
  for (int h = 0; h < kShape.num_qo_heads; ++h) {
    out.first.push_back(args.lse.data[row * args.lse.row_stride + h * args.lse.head_stride]);
    out.second.insert(out.second.end(), o + h * args.out.head_stride,
                      o + h * args.out.head_stride + kShape.head_dim_vo);
  }
  return out;
}

TEST(CudaDevicePlanner, AttentionOverBadPageIds) {
  HEADWATER_NEEDS_GPU();
  // Keys of pages that do not exist count as zeros, nothing is read outside the pool, the plan is flat, and other
  // requests have the bits of a flat plan of good tables. Pages as they mostly are (bulk copies), and apart by an
  // element.
  ASSERT_EQ(size_of(kShape.out_dtype), 2U);
  constexpr int kBad = 3;
  for (const std::int64_t padding : {0, 1}) {
    PlanOptions options;
    options.policy = Policy::flat;
    reference::Call call(kShape, options, tree({1, 5}, {160, 40}, 16), {.page_padding = padding}, 31);
    const BlockTables good(call.tables());
    const Plan host = to_plan(kShape, options, good, plan_alone(kShape, options, property::eager_model(), good));
    cuda::DevicePlanner flat(kShape, options, good.limits(), property::eager_model());
    options.policy = Policy::forest;
    cuda::DevicePlanner sharing(kShape, options, good.limits(), property::eager_model());
    cuda::DevicePlan plan(kShape, sharing.capacity());
    DeviceSide side(good.limits());
    const auto runs = [&](const Plan& planned, const cpu::RunArgs& args) {
      DeviceCall there(kShape, args, good.num_requests, plan.workspace_size());
      const auto run = [&](cuda::DevicePlanner& planner, const BlockTables& tables, std::uint32_t flags) {
        there.poison_outputs();
        planner.plan(plan, side.put(tables), nullptr);
        cuda::run(plan, there.args(), nullptr);
        there.fetch_to(args);
        EXPECT_EQ(there.complaint(), "");
        EXPECT_EQ(fetch(planner.status(), 1)[0].flags, flags);
        std::vector<std::pair<std::vector<float>, std::vector<std::uint16_t>>> rows;
        for (int r = 0; r < good.num_requests; ++r) rows.push_back(row_of(args, r));
        return rows;
      };
      const auto right = run(flat, good, 0);
      for (const std::int64_t id : {std::int64_t{-1}, std::int64_t{good.num_pages}, std::int64_t{1} << 29}) {
        BlockTables bad = good;
        bad.block_table[static_cast<std::size_t>(kBad * bad.row_stride + 11)] = static_cast<std::int32_t>(id);
        const auto rows = run(sharing, bad, cuda::DevicePlanStatus::kBadPageId);
        for (int r = 0; r < good.num_requests; ++r) {
          EXPECT_EQ(rows[static_cast<std::size_t>(r)] == right[static_cast<std::size_t>(r)], r != kBad) << "row " << r;
        }
        EXPECT_TRUE(std::ranges::all_of(rows[kBad].first, [](float lse) { return std::isfinite(lse); })) << id;
      }
      run(flat, good, 0);  // what the reference is compared with
      const PlanStats& stats = planned.stats();
      return cpu::RunOutcome{stats.path, Isa::scalar, stats.num_items, stats.kv_bytes_read, 0};
    };
    EXPECT_EQ(call.run_by(runs, host, 0).complaint, "");
  }
}

TEST(CudaDevicePlanner, SameBytesEveryTime) {
  HEADWATER_NEEDS_GPU();
  const BlockTables tables(tree({1, 4, 32, 256}, {2'048, 1'024, 512, 100}, 16));
  cuda::DevicePlanner planner(kShape, {}, tables.limits());
  cuda::DevicePlan plan(kShape, planner.capacity());
  DeviceSide side(tables.limits());
  const cuda::DeviceTables there = side.put(tables);
  std::string first;
  for (int i = 0; i < 200; ++i) {
    planner.plan(plan, there, nullptr);
    const std::string bytes = bytes_of(fetch_plan(planner, plan, 256, 256));
    if (i == 0) first = bytes;
    ASSERT_EQ(bytes, first) << "run " << i;
  }
}

/// The tables with some requests taken out: without keys, ids that no pool has all along their rows.
BlockTables without(const BlockTables& all, const std::vector<bool>& absent) {
  BlockTables some = all;
  for (std::size_t b = 0; b < absent.size(); ++b) {
    if (!absent[b]) continue;
    some.lengths[b] = 0;
    std::fill_n(some.block_table.begin() + static_cast<std::ptrdiff_t>(b) * some.row_stride, some.row_stride, 1 << 30);
  }
  return some;
}

TEST(CudaDevicePlanner, OneGraphPlansAndAttendsTablesThatChange) {
  HEADWATER_NEEDS_GPU();
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreate(&stream));
  std::set<std::int32_t> span_counts;
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(seed);
    reference::ForestOptions forest;
    forest.max_requests = 30;
    forest.max_pages = 30;
    forest.max_rows = seed % 2 == 0 ? 4 : 1;
    PlanOptions options;
    options.policy = seed % 3 == 0 ? Policy::automatic : Policy::forest;
    options.sinks = seed == 4;
    const PageTables page_tables = reference::random_forest(rng, forest);
    reference::Call call(kShape, options, page_tables, {}, seed);
    const BlockTables all(call.tables());
    const int rows = all.qo_indptr.back();
    const DeviceModel model = property::eager_model(64, 1 << 20);
    cuda::DevicePlanner planner(kShape, options, all.limits(), model);
    cuda::DevicePlan plan(kShape, planner.capacity());
    DeviceSide side(all.limits());
    const Plan host = to_plan(kShape, options, all, plan_alone(kShape, options, model, all));
    const auto replays = [&](const Plan& planned, const cpu::RunArgs& args) {
      DeviceCall there(kShape, args, rows, plan.workspace_size());
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      const cuda::DeviceTables view = side.put(all);
      ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      planner.plan(plan, view, stream);
      cuda::run(plan, there.args(), stream);
      ok(cudaStreamEndCapture(stream, &graph));
      ok(cudaGraphInstantiate(&exec, graph, 0));
      ok(cudaGraphDestroy(graph));
      for (int variant = 8; variant >= 0; --variant) {
        std::vector<bool> absent(static_cast<std::size_t>(all.num_requests), false);
        for (std::size_t b = 0; variant > 0 && b < absent.size(); ++b) absent[b] = rng.chance(0.4);
        const BlockTables tables = without(all, absent);
        side.put(tables);
        there.poison_outputs();
        ok(cudaGraphLaunch(exec, stream));
        ok(cudaStreamSynchronize(stream));
        there.fetch_to(args);
        EXPECT_EQ(there.complaint(), "");
        const cuda::DevicePlanStatus status = fetch(planner.status(), 1)[0];
        const Planned emulated = plan_alone(kShape, options, model, tables);
        EXPECT_EQ(status.flags, 0U);
        EXPECT_EQ(status.num_spans, emulated.status.num_spans);
        span_counts.insert(status.num_spans);
        reference::Result expected = call.expected();
        for (std::size_t b = 0; b < absent.size(); ++b) {
          if (!absent[b]) continue;
          for (auto r = all.qo_indptr[b]; r < all.qo_indptr[b + 1]; ++r) {
            for (int h = 0; h < expected.num_heads; ++h) {
              const auto at = static_cast<std::size_t>(r * expected.num_heads + h);
              std::fill_n(expected.o.begin() + static_cast<std::ptrdiff_t>(at) * expected.head_dim, expected.head_dim,
                          0.0);
              expected.lse[at] = options.sinks ? double{args.sinks[h]} : -std::numeric_limits<double>::infinity();
            }
          }
        }
        EXPECT_EQ(reference::compare(kShape, expected, nullptr,
                                     {args.out.data, args.out.dtype, args.out.row_stride, args.out.head_stride},
                                     {args.lse.data, args.lse.row_stride, args.lse.head_stride, args.lse.base})
                      .complaint,
                  "")
            << "variant " << variant;
      }
      ok(cudaGraphExecDestroy(exec));
      const PlanStats& stats = planned.stats();
      return cpu::RunOutcome{stats.path, Isa::scalar, stats.num_items, stats.kv_bytes_read, 0};
    };
    EXPECT_EQ(call.run_by(replays, host, 0).complaint, "");
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GE(span_counts.size(), 5U);
  ok(cudaStreamDestroy(stream));
}

TEST(CudaDevicePlanner, HostAndDeviceDoNotTakeTurns) {
  HEADWATER_NEEDS_GPU();
  const PageTables t = tree({1, 4}, {64, 32}, 16);
  const BlockTables tables(t);
  Planner host;
  const Plan plan = host.plan(kShape, t.batch(), {});
  cuda::DevicePlanner planner(kShape, {}, tables.limits());
  DeviceSide side(tables.limits());
  const cuda::DeviceTables there = side.put(tables);
  cuda::DevicePlan uploaded(kShape, {64, 1'024, 64, 1'024});
  uploaded.upload(plan, nullptr);
  EXPECT_THROW(planner.plan(uploaded, there, nullptr), Error);
  cuda::DevicePlan planned(kShape, planner.capacity());
  planner.plan(planned, there, nullptr);
  EXPECT_THROW(planned.upload(plan, nullptr), Error);
  cuda::DevicePlan small(kShape, {4, 0, 1, 0});
  EXPECT_THROW(planner.plan(small, there, nullptr), Error);
  ok(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace headwater::cuda_test
