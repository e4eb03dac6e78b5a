// cpu::run around the kernels: what it refuses (before anything is written, with which words), which level and how many
// workers it takes, and that the bytes it reports are the bytes that were read.
#include "cpu/run.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <map>
#include <tuple>
#include <vector>

#include "cpu/attend_scalar.h"
#include "cpu/expect_error.h"
#include "cpu/hand_plan.h"
#include "cpu/kernels.h"
#include "cpu/scratch.h"
#include "plan/plan_data.h"
#include "reference/call.h"
#include "reference/memory.h"

namespace headwater {
namespace {

using reference::Call;
using reference::FencedBuffer;
using reference::PageTables;
using reference::Ran;

constexpr int kHeads = 8;
constexpr int kDim = 64;

AttentionShape small_shape() {
  AttentionShape shape;
  shape.num_qo_heads = kHeads;
  shape.num_kv_heads = 2;
  shape.head_dim_qk = kDim;
  shape.head_dim_vo = kDim;
  return shape;
}

/// Three requests whose first two pages are shared.
PageTables small_tables() {
  PageTables tables;
  tables.page_size = 16;
  tables.add({0, 1, 2}, 5);
  tables.add({0, 1, 3, 4}, 16);
  tables.add({0, 1, 5}, 1);
  return tables;
}

/// A call ready to run; each test spoils one thing.
class Refusals : public testing::Test {
 protected:
  static PlanOptions all_options() {
    PlanOptions options;
    options.alibi = true;
    options.sinks = true;
    return options;
  }

  Refusals() : caches_(args_.kv.begin(), args_.kv.end()) {
    args_.out = {out_.data(), DType::bf16, kHeads * kDim, kDim};
    args_.lse = {static_cast<float*>(lse_.data()), kHeads, 1, LseBase::two};
    args_.workspace = {workspace_.data(), workspace_.size()};
    args_.kv = caches_;
    args_.k_scale = {scales_, 2};
    args_.v_scale = {scales_, 1};
  }

  void run() {
    SerialExecutor serial;
    cpu::run(plan_, args_, serial);
  }

  void refused(const std::string& message, ErrorCode code = ErrorCode::invalid_argument) {
    expect_error(code, message, [&] { run(); });
    for (const FencedBuffer* buffer : {&out_, &lse_, &workspace_}) {
      const auto* bytes = static_cast<const unsigned char*>(buffer->data());
      for (std::size_t i = 0; i < buffer->size(); ++i) ASSERT_EQ(bytes[i], 0xFF) << "written before the check";
    }
  }

  Call call_{small_shape(), all_options(), small_tables(), {}, 1};
  Plan plan_ = hand_plan(small_shape(), all_options(), call_.tables(), {.shared_pages = 2});
  cpu::RunArgs args_ = call_.args();
  std::vector<KvCache> caches_;
  FencedBuffer out_{3 * kHeads * kDim * 2};
  FencedBuffer lse_{3 * kHeads * sizeof(float)};
  FencedBuffer workspace_{plan_.workspace_size()};
  float scales_[2] = {1.0F, 1.0F};
};

TEST_F(Refusals, NothingOfASoundCall) {
  EXPECT_NO_THROW(run());
}

TEST_F(Refusals, QueryType) {
  args_.q.dtype = DType::f32;
  refused("q.dtype = f32, expected bf16 (the plan's q_dtype)");
}
TEST_F(Refusals, QueryNull) {
  args_.q.data = nullptr;
  refused("q.data = nullptr, expected a tensor");
}
TEST_F(Refusals, QueryMisaligned) {
  args_.q.data = static_cast<const std::byte*>(args_.q.data) + 1;
  refused("q.data = an address 1 bytes off, expected alignment to 2 bytes (bf16)");
}
TEST_F(Refusals, QueryStrides) {
  args_.q.row_stride = 1;
  refused("q.row_stride = 1, expected at least 64 (elements that the inner dimensions span)");
}
TEST_F(Refusals, QueryStrideNegative) {
  args_.q.head_stride = -64;
  refused("q.head_stride = -64, expected at least 64 (elements that the inner dimensions span)");
}
TEST_F(Refusals, OutType) {
  args_.out.dtype = DType::f16;
  refused("out.dtype = f16, expected bf16 (the plan's out_dtype)");
}
TEST_F(Refusals, OutNull) {
  args_.out.data = nullptr;
  refused("out.data = nullptr, expected a tensor");
}
TEST_F(Refusals, OutStrides) {
  args_.out.head_stride = 63;
  refused("out.head_stride = 63, expected at least 64 (elements that the inner dimensions span)");
}
TEST_F(Refusals, LseStrides) {
  args_.lse.row_stride = 7;
  refused("lse.row_stride = 7, expected at least 8 (elements that the inner dimensions span)");
}
TEST_F(Refusals, LseMisaligned) {
  args_.lse.data = reinterpret_cast<float*>(static_cast<std::byte*>(lse_.data()) + 2);
  refused("lse.data = an address 2 bytes off, expected alignment to 4 bytes (f32)");
}
TEST_F(Refusals, LseBase) {
  args_.lse.base = static_cast<LseBase>(7);
  refused("lse.base = 7, expected two or natural");
}
TEST_F(Refusals, NumberOfCaches) {
  args_.kv = {};
  refused("kv.size() = 0, expected 1 (one cache for each level of the batch)");
}
TEST_F(Refusals, CacheType) {
  caches_[0].dtype = DType::f8e4m3;
  refused("kv[0].dtype = f8e4m3, expected bf16 (the plan's kv_dtype)");
}
TEST_F(Refusals, CachePageSize) {
  caches_[0].page_size = 32;
  refused("kv[0].page_size = 32, expected 16 (the plan's page_size)");
}
TEST_F(Refusals, CacheTooFewPages) {
  caches_[0].num_pages = 5;
  refused("kv[0].num_pages = 5, expected at least 6 (the plan's num_pages)");
}
TEST_F(Refusals, CacheNull) {
  caches_[0].v.data = nullptr;
  refused("kv[0].v.data = nullptr, expected a tensor");
}
TEST_F(Refusals, CacheMisaligned) {
  caches_[0].k.data = static_cast<std::byte*>(caches_[0].k.data) + 1;
  refused("kv[0].k.data = an address 1 bytes off, expected alignment to 2 bytes (bf16)");
}
TEST_F(Refusals, CachePageStride) {
  caches_[0].k.page_stride = 2047;
  refused("kv[0].k.page_stride = 2047, expected at least 2048 (elements that the inner dimensions span)");
}
TEST_F(Refusals, CacheTokenStride) {
  caches_[0].v.token_stride = 127;
  refused("kv[0].v.token_stride = 127, expected at least 128 (elements that the inner dimensions span)");
}
TEST_F(Refusals, CacheHeadStride) {
  caches_[0].v.head_stride = 0;
  refused("kv[0].v.head_stride = 0, expected at least 64 (elements that the inner dimensions span)");
}
TEST_F(Refusals, CacheStrideOverflow) {
  caches_[0].v.page_stride = std::int64_t{1} << 62;
  refused("kv[0].v.page_stride = 4611686018427387904, expected at most 461168601842738380 (64-bit offsets)");
}
TEST_F(Refusals, SlopesMissing) {
  args_.alibi_slopes = nullptr;
  refused("alibi_slopes = nullptr, expected num_qo_heads values (options.alibi is on)");
}
TEST_F(Refusals, SlopesAndSinksMisaligned) {
  const auto off_by_two = [](const float* data) {
    return reinterpret_cast<const float*>(reinterpret_cast<const std::byte*>(data) + 2);
  };
  const float* slopes = args_.alibi_slopes;
  args_.alibi_slopes = off_by_two(slopes);
  refused("alibi_slopes.data = an address 2 bytes off, expected alignment to 4 bytes (f32)");
  args_.alibi_slopes = slopes;
  args_.sinks = off_by_two(args_.sinks);
  refused("sinks.data = an address 2 bytes off, expected alignment to 4 bytes (f32)");
}
TEST_F(Refusals, SinksMissing) {
  args_.sinks = nullptr;
  refused("sinks = nullptr, expected num_qo_heads values (options.sinks is on)");
}
TEST_F(Refusals, SinksMayBeMissingWhereTheyAreLeftOut) {
  args_.sinks = nullptr;
  args_.include_sink = false;
  EXPECT_NO_THROW(run());
}
TEST_F(Refusals, SlopesAndSinksNotPromised) {
  plan_ = hand_plan(small_shape(), {}, call_.tables(), {.shared_pages = 2});
  const float* sinks = args_.sinks;
  args_.sinks = nullptr;
  refused("alibi_slopes = a pointer, expected nullptr (options.alibi is off)");
  args_.alibi_slopes = nullptr;
  args_.sinks = sinks;
  refused("sinks = a pointer, expected nullptr (options.sinks is off)");
}
TEST_F(Refusals, ScaleCount) {
  args_.k_scale = {scales_, 3};
  refused("k_scale.count = 3, expected 1 or 2 (num_kv_heads)");
}
TEST_F(Refusals, ScaleWithoutData) {
  args_.v_scale = {nullptr, 1};
  refused("v_scale.count = 1, expected 0: there is no data");
}
TEST_F(Refusals, WorkspaceMissing) {
  args_.workspace = {};
  refused(
      "workspace.bytes = 0, expected at least " + std::to_string(plan_.workspace_size()) + " (plan.workspace_size())",
      ErrorCode::workspace_too_small);
}
TEST_F(Refusals, WorkspaceOneByteShort) {
  args_.workspace.bytes = plan_.workspace_size() - 1;
  refused("workspace.bytes = " + std::to_string(plan_.workspace_size() - 1) + ", expected at least " +
              std::to_string(plan_.workspace_size()) + " (plan.workspace_size())",
          ErrorCode::workspace_too_small);
}
TEST_F(Refusals, WorkspaceMisaligned) {
  args_.workspace.data = static_cast<std::byte*>(args_.workspace.data) + 4;
  refused("workspace.data = an address 4 bytes off, expected alignment to 64 bytes", ErrorCode::workspace_too_small);
}
TEST_F(Refusals, WorkspaceOfThePlanTooSmallForScratch) {
  plan_.data().scratch_bytes_per_worker = 64;
  try {
    run();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::internal);
    EXPECT_NE(std::string(error.what()).find("plan.scratch_bytes_per_worker = 64, expected at least "),
              std::string::npos);
  }
}
TEST_F(Refusals, LevelThatTheProcessorLacks) {
  if (cpu::detect_isa() == Isa::avx512_bf16) GTEST_SKIP() << "this processor has every level";
  args_.isa = Isa::avx512_bf16;
  refused("isa = avx512_bf16, expected at most " + std::string(name_of(cpu::detect_isa())) +
              ": this processor or build lacks it",
          ErrorCode::unsupported);
}

TEST(Kernels, LevelsAreRefusedAboveTheProcessors) {
  for (const Isa highest : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_bf16}) {
    for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_bf16}) {
      if (isa > highest) {
        expect_error(ErrorCode::unsupported,
                     "isa = " + std::string(name_of(isa)) + ", expected at most " + std::string(name_of(highest)) +
                         ": this processor or build lacks it",
                     [&] { (void)cpu::kernels_for(isa, highest); });
      } else if (highest <= cpu::detect_isa()) {
        EXPECT_EQ(cpu::kernels_for(isa, highest).isa, isa);
      }
    }
  }
}

TEST(Kernels, EveryForcedLevelRunsAndSaysSo) {
  Call call(small_shape(), {}, small_tables(), {}, 1);
  const Plan plan = hand_plan(small_shape(), {}, call.tables(), {.shared_pages = 2});
  SerialExecutor serial;
  for (const Isa isa : reference::available_isas()) {
    const Ran ran = call.run(plan, serial, isa);
    EXPECT_EQ(ran.complaint, "");
    EXPECT_EQ(ran.outcome.isa, isa);
  }
  EXPECT_EQ(call.run(plan, serial).outcome.isa, cpu::default_isa());
}

TEST(Kernels, ScratchFormulaCoversEveryLevel) {
  for (const Isa isa : reference::available_isas()) {
    for (const int group : {1, 3, 4, 16}) {
      for (const auto& [qk, vo] : {std::pair{32, 32}, {128, 128}, {80, 96}, {576, 512}}) {
        for (const int rows : {1, 2, 5, 32, 128}) {
          for (const bool invariant : {false, true}) {
            cpu::AttendParams p;
            p.num_kv_heads = 2;
            p.num_qo_heads = 2 * group;
            p.group_size = group;
            p.head_dim_qk = qk;
            p.head_dim_vo = vo;
            p.batch_invariant = invariant;
            EXPECT_LE(cpu::kernels_for(isa).scratch_bytes(p, rows),
                      cpu::scratch_bytes({2, group, qk, vo, invariant}, rows));
          }
        }
      }
    }
  }
}

/// Counts regions and can hold fewer or more workers than a plan expects; runs them one after the other, last first.
class CountingExecutor final : public Executor {
 public:
  explicit CountingExecutor(int workers) : workers_(workers) {}
  [[nodiscard]] int num_workers() const noexcept override { return workers_; }
  void parallel(void (*task)(void* context, int worker) noexcept, void* context) override {
    ++regions;
    for (int w = workers_ - 1; w >= 0; --w) task(context, w);
  }
  int regions = 0;

 private:
  int workers_;
};

TEST(Run, TakesAnyNumberOfWorkers) {
  Call call(small_shape(), {}, small_tables(), {}, 1);
  const Plan plan = hand_plan(small_shape(), {}, call.tables(), {.shared_pages = 2, .num_workers = 3});
  std::vector<unsigned char> first;
  for (const int workers : {1, 2, 3, 4, 64}) {
    CountingExecutor executor(workers);
    const Ran ran = call.run(plan, executor);
    EXPECT_EQ(ran.complaint, "") << workers;
    if (first.empty()) first = ran.out;
    EXPECT_EQ(ran.out, first) << workers;
    EXPECT_EQ(executor.regions, workers == 1 ? 0 : 1);  // little to merge: the caller does it
  }
}

TEST(Run, ShortWorkStaysOnTheCallingThread) {
  Call call(small_shape(), {}, small_tables(), {}, 1);
  Plan plan = hand_plan(small_shape(), {}, call.tables(), {.shared_pages = 2});
  for (detail::WorkItem& item : plan.data().items) item.cost_ps = 1'000'000;
  CountingExecutor executor(2);
  EXPECT_EQ(call.run(plan, executor).complaint, "");
  EXPECT_EQ(executor.regions, 0);
}

TEST(Run, ManyMergesTakeAllWorkers) {
  PageTables tables;
  tables.page_size = 16;
  for (std::int32_t b = 0; b < 40; ++b) tables.add({0, 1, 2 + b}, 9);
  Call call(small_shape(), {}, tables, {}, 1);
  const Plan plan = hand_plan(small_shape(), {}, call.tables(), {.shared_pages = 2});
  CountingExecutor executor(2);
  const Ran ran = call.run(plan, executor);
  EXPECT_EQ(ran.complaint, "");
  EXPECT_EQ(executor.regions, 2);
  EXPECT_EQ(ran.outcome.merged_rows, 40);
  EXPECT_EQ(ran.outcome.path, Path::cascade);
  ThreadPool pool(3);
  EXPECT_EQ(call.run(plan, pool).out, ran.out);
}

TEST(Run, AnEmptyPlanDoesNothing) {
  const PageTables tables;
  const Plan plan = hand_plan(small_shape(), {}, tables, {});
  cpu::RunArgs args;
  args.q.dtype = DType::bf16;
  args.out.dtype = DType::bf16;
  const KvCache cache;
  args.kv = {&cache, 1};
  SerialExecutor serial;
  const cpu::RunOutcome outcome = cpu::run(plan, args, serial);
  EXPECT_EQ(outcome.items, 0);
  EXPECT_EQ(outcome.kv_bytes_read, 0);
}

/// Counts every read of K and of V by (page, token, KV head).
struct CountedReads {
  std::map<std::tuple<std::int32_t, int, int>, int> keys;
  std::map<std::tuple<std::int32_t, int, int>, int> values;
  void key(std::int32_t page, int token, int head) { ++keys[{page, token, head}]; }
  void value(std::int32_t page, int token, int head) { ++values[{page, token, head}]; }
};

CountedReads count_reads(Call& call, const Plan& plan) {
  const AttentionShape& shape = call.problem().shape;
  FencedBuffer out(static_cast<std::size_t>(plan.stats().num_rows * shape.num_qo_heads * shape.head_dim_vo) * 2);
  FencedBuffer workspace(plan.workspace_size());
  cpu::RunArgs args = call.args();
  args.out = {out.data(), DType::bf16, std::int64_t{shape.num_qo_heads} * shape.head_dim_vo, shape.head_dim_vo};
  args.workspace = {workspace.data(), workspace.size()};
  cpu::check_run_args(plan.data(), args);
  const cpu::AttendParams params = cpu::make_params(plan.data(), args);
  CountedReads reads;
  const cpu::Scratch scratch{static_cast<std::byte*>(workspace.data()) + plan.data().scratch_offset,
                             plan.data().scratch_bytes_per_worker};
  for (const detail::WorkItem& item : plan.data().items) cpu::scalar::attend(params, item, scratch, reads);
  return reads;
}

// The shared pages are read once per KV head for all requests, the others once for their own; the sum is what run
// reports.
TEST(Run, BytesReadAreCountedPageByPage) {
  Call call(small_shape(), {}, small_tables(), {}, 1);
  const std::int64_t side_bytes = kDim * 2;
  for (const int shared : {0, 2}) {
    const Plan plan = hand_plan(small_shape(), {}, call.tables(), {.chunk_tokens = 8, .shared_pages = shared});
    const CountedReads reads = count_reads(call, plan);
    std::int64_t bytes = 0;
    for (const auto* side : {&reads.keys, &reads.values}) {
      for (const auto& [where, times] : *side) {
        const auto& [page, token, head] = where;
        EXPECT_EQ(times, page < 2 && shared == 0 ? 3 : 1) << "page " << page << " token " << token << " head " << head;
        bytes += times * side_bytes;
      }
    }
    EXPECT_EQ(reads.keys.size(), 2 * (32 + 5 + 16 + 16 + 1));
    SerialExecutor serial;
    EXPECT_EQ(call.run(plan, serial).outcome.kv_bytes_read, bytes);
  }
}

}  // namespace
}  // namespace headwater
