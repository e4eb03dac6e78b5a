// Faults of running: races, allocation inside run, workspaces, silent casts, a feature that never activates.
#include <cstring>
#include <thread>
#include <vector>

#include "faults/count_allocations.h"
#include "faults/fixture.h"

namespace headwater::faults {
namespace {

/// A call with plain outputs for tests that go around Call::run.
struct Plain {
  explicit Plain(const PlanOptions& options)
      : call(kSmallF32, options, reference::tree({1, 6}, {96, 24}, 8), {}, 43'000) {
    plan = planner.plan(kSmallF32, call.batch(), options);
    workspace = reference::FencedBuffer(plan.workspace_size(), kWorkspaceAlignment);
    args = call.args();
    args.out = {out.data(), DType::f32, 8 * 64, 64};
    args.lse = {lse.data(), 8, 1, LseBase::two};
    args.workspace = {workspace.data(), workspace.size()};
  }
  /// Whether no output was written.
  [[nodiscard]] bool untouched() const {
    for (const float x : out) {
      if (x != -7.0F) return false;
    }
    for (const float x : lse) {
      if (x != -7.0F) return false;
    }
    return true;
  }

  reference::Call call;
  Planner planner{property::eager_model()};
  Plan plan;
  reference::FencedBuffer workspace;
  std::vector<float> out = std::vector<float>(6 * 8 * 64, -7.0F);
  std::vector<float> lse = std::vector<float>(6 * 8, -7.0F);
  cpu::RunArgs args;
};

PlanOptions forest_options() {
  PlanOptions options;
  options.policy = Policy::forest;
  return options;
}

TEST(Faults, Fault20_NoRaceInMerge) {
  // Many merges by three workers, again and again, and two runs of one plan at the same time with a workspace each: the
  // results never change. Under ThreadSanitizer this is the race test.
  Plain plain(forest_options());
  ThreadPool pool(3);
  const reference::Ran first = plain.call.run(plain.plan, pool);
  EXPECT_EQ(first.complaint, "");
  EXPECT_GT(first.outcome.merged_rows, 0);
  for (int i = 0; i < 30; ++i) {
    const reference::Ran again = plain.call.run(plain.plan, pool);
    ASSERT_EQ(again.out, first.out);
    ASSERT_EQ(again.lse, first.lse);
  }
  std::vector<std::thread> threads;
  std::vector<std::string> complaints(2);
  for (std::size_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      ThreadPool own(2);
      Plain mine(forest_options());
      reference::FencedBuffer workspace(plain.plan.workspace_size(), kWorkspaceAlignment);
      for (int i = 0; i < 10; ++i) {
        std::vector<float> out(plain.out.size());
        cpu::RunArgs args = mine.call.args();
        args.out = {out.data(), DType::f32, 8 * 64, 64};
        args.workspace = {workspace.data(), workspace.size()};
        cpu::run(plain.plan, args, own);
        if (std::memcmp(out.data(), first.out.data(), first.out.size()) != 0) complaints[t] = "results differ";
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(complaints[0] + complaints[1], "");
}

TEST(Faults, Fault23_CascadeActivatesWithDefaultSettings) {
  // A chat's shape (32/8/128, 16 requests on one 2,048-token prompt), default options and cost model.
  const AttentionShape shape;
  const reference::PageTables tables = reference::tree({1, 16}, {2048, 256}, 16);
  Planner planner;
  const Plan plan = planner.plan(shape, tables.batch(), {});
  EXPECT_EQ(plan.stats().path, Path::cascade) << plan.describe();
  EXPECT_LT(plan.stats().kv_bytes_read, plan.stats().kv_bytes_flat / 3);
}

TEST(Faults, Fault24_RunNeverAllocates) {
  for (const bool invariant : {false, true}) {
    PlanOptions options = forest_options();
    options.batch_invariant = invariant;
    Plain plain(options);
    ThreadPool pool(2);
    for (const Isa isa : property::isas()) {
      plain.args.isa = isa;
      cpu::run(plain.plan, plain.args, pool);  // warm
      const std::int64_t before = num_allocations();
      for (int i = 0; i < 5; ++i) cpu::run(plain.plan, plain.args, pool);
      EXPECT_EQ(num_allocations(), before) << name_of(isa);
    }
  }
  const std::int64_t before = num_allocations();
  ::operator delete(::operator new(8));  // the control: the counter counts
  EXPECT_GT(num_allocations(), before);
}

TEST(Faults, Fault26_WorkspaceIsExactAndLessIsRefused) {
  // That the exact size is enough is part of every Call::run (fenced); one byte less, or a bad alignment, is refused.
  Plain plain(forest_options());
  ASSERT_GT(plain.plan.workspace_size(), 0U);
  SerialExecutor serial;
  const auto refusal = [&](cpu::Workspace workspace) {
    cpu::RunArgs args = plain.args;
    args.workspace = workspace;
    return message_of([&] { cpu::run(plain.plan, args, serial); });
  };
  const std::size_t size = plain.plan.workspace_size();
  const std::string small = refusal({plain.workspace.data(), size - 1});
  EXPECT_NE(small.find("workspace"), std::string::npos) << small;
  EXPECT_NE(small.find(std::to_string(size)), std::string::npos) << small;
  EXPECT_NE(small.find(std::to_string(size - 1)), std::string::npos) << small;
  const std::string crooked = refusal({static_cast<std::byte*>(plain.workspace.data()) + 1, size});
  EXPECT_NE(crooked.find("workspace"), std::string::npos) << crooked;
  EXPECT_NE(crooked.find("64"), std::string::npos) << crooked;
  EXPECT_NE(refusal({nullptr, size}).find("workspace"), std::string::npos);
  EXPECT_TRUE(plain.untouched());
  EXPECT_EQ(refusal({plain.workspace.data(), size}), "");
}

TEST(Faults, Fault30_WrongTypesAreErrorsNotCopies) {
  Plain plain(forest_options());
  SerialExecutor serial;
  const auto refusal = [&](auto change) {
    cpu::RunArgs args = plain.args;
    change(args);
    return message_of([&] { cpu::run(plain.plan, args, serial); });
  };
  const std::string out = refusal([](cpu::RunArgs& a) { a.out.dtype = DType::bf16; });
  EXPECT_NE(out.find("out.dtype = bf16"), std::string::npos) << out;
  EXPECT_NE(out.find("f32"), std::string::npos) << out;
  const std::string q = refusal([](cpu::RunArgs& a) { a.q.dtype = DType::f16; });
  EXPECT_NE(q.find("q.dtype = f16"), std::string::npos) << q;
  KvCache cache = plain.args.kv[0];
  cache.dtype = DType::bf16;
  const std::string kv = refusal([&](cpu::RunArgs& a) { a.kv = {&cache, 1}; });
  EXPECT_NE(kv.find("dtype = bf16"), std::string::npos) << kv;
  EXPECT_TRUE(plain.untouched());
  // States of a type that merge does not read are refused too.
  std::vector<std::int32_t> indptr{0, 1};
  std::vector<float> lse(1);
  std::vector<float> target(16, -7.0F);
  const std::string merge = message_of([&] {
    cpu::merge_states({plain.out.data(), DType::f8e4m3, 16, 16}, {lse.data(), 1, 1, LseBase::two}, indptr, 1, 16,
                      {target.data(), DType::f32, 16, 16}, {lse.data(), 1, 1, LseBase::two}, serial);
  });
  EXPECT_NE(merge.find("f8e4m3"), std::string::npos) << merge;
  EXPECT_EQ(target[0], -7.0F);
}

}  // namespace
}  // namespace headwater::faults
