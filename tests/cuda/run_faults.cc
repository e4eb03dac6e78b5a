// Faults of running on the device, one named test each: races in the queue and the merge, capture and allocation, reuse
// of staging memory, workspaces, launches that fail.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "cuda/device_plan.h"
#include "cuda/run_fixture.h"
#include "cuda/spin.h"
#include "faults/count_allocations.h"

namespace headwater::cuda_test {
namespace {

/// Pinned host memory.
struct Pinned {
  explicit Pinned(std::size_t bytes) { ok(cudaMallocHost(&data, bytes)); }
  ~Pinned() { cudaFreeHost(data); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  void* data = nullptr;
};

/// A cascade of far more pieces of work than a device has blocks at once, for both attention kernels.
constexpr AttentionShape kCrowdShape{32, 8, 64, 64, DType::f16, DType::f16, DType::f16};
reference::PageTables crowd() {
  return reference::tree({1, 8, 128}, {256, 64, 20}, 16);
}

/// Replays one captured run again and again, with items in another order every so often and beside kernels that delay
/// its blocks, and compares every replay with the first. Before each, everything that a run writes is poisoned.
class Stress {
 public:
  Stress(Plan& plan, const cpu::RunArgs& args)
      : plan_(plan),
        device_(kCrowdShape, cuda::Capacity::of(plan)),
        there_(kCrowdShape, args, plan.stats().num_rows, device_.workspace_size()),
        lse_bytes_(static_cast<std::size_t>(plan.stats().num_rows) * 32 * sizeof(float)),
        now_(there_.out_bytes() + lse_bytes_ + sizeof(std::int32_t)) {
    device_.upload(plan, stream_.stream);
    cudaGraph_t graph = nullptr;
    const cuda::RunArgs& a = there_.args();
    ok(cudaStreamBeginCapture(stream_.stream, cudaStreamCaptureModeGlobal));
    ok(cudaMemsetAsync(a.out.data, 0xff, there_.out_bytes(), stream_.stream));
    ok(cudaMemsetAsync(a.lse.data, 0xff, lse_bytes_, stream_.stream));
    ok(cudaMemsetAsync(a.workspace.data, 0xff, device_.workspace_size(), stream_.stream));
    cuda::run(device_, a, stream_.stream);
    ok(cudaStreamEndCapture(stream_.stream, &graph));
    ok(cudaGraphInstantiate(&exec_, graph, 0));
    ok(cudaGraphDestroy(graph));
    replay();
    first_ = results();
  }
  ~Stress() { cudaGraphExecDestroy(exec_); }
  Stress(const Stress&) = delete;
  Stress& operator=(const Stress&) = delete;

  [[nodiscard]] int num_blocks() const { return device_.impl().num_blocks; }
  [[nodiscard]] const DeviceCall& there() const { return there_; }

  /// What was wrong; empty: nothing.
  std::string times(int count) {
    std::mt19937 random(1);
    for (int i = 0; i < count; ++i) {
      if (i % 50 == 0) {
        std::shuffle(plan_.data().items.begin(), plan_.data().items.end(), random);
        device_.upload(plan_, stream_.stream);
      }
      if (i % 2 == 1) spin(static_cast<int>(random() % 400), 25, static_cast<unsigned>(i), beside_.stream);
      replay();
      if (queue() != 0) return "replay " + std::to_string(i) + " left " + std::to_string(queue()) + " in the queue";
      if (std::memcmp(first_.data(), now_.data, first_.size()) != 0) {
        return "replay " + std::to_string(i) + " has other bits than the first";
      }
    }
    return "";
  }
  /// Whether a queue that is not zero at the start shows.
  bool notices_a_stale_queue() {
    const std::int32_t stale = 100;
    ok(cudaMemcpy(device_.impl().queue.data, &stale, sizeof stale, cudaMemcpyHostToDevice));
    replay();
    return queue() == 0 && std::memcmp(first_.data(), now_.data, first_.size()) != 0;
  }

 private:
  void replay() {
    const cuda::RunArgs& a = there_.args();
    auto* to = static_cast<std::byte*>(now_.data);
    ok(cudaGraphLaunch(exec_, stream_.stream));
    const auto fetch = [&](const void* from, std::size_t bytes) {
      ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_.stream));
      to += bytes;
    };
    fetch(a.out.data, there_.out_bytes());
    fetch(a.lse.data, lse_bytes_);
    fetch(device_.impl().queue.data, sizeof(std::int32_t));
    ok(cudaStreamSynchronize(stream_.stream));
  }
  [[nodiscard]] std::vector<std::byte> results() const {
    const auto* begin = static_cast<const std::byte*>(now_.data);
    return {begin, begin + there_.out_bytes() + lse_bytes_};
  }
  [[nodiscard]] std::int32_t queue() const {
    std::int32_t value = 0;
    std::memcpy(&value, static_cast<const std::byte*>(now_.data) + there_.out_bytes() + lse_bytes_, sizeof value);
    return value;
  }

  Plan& plan_;
  OwnStream stream_;
  OwnStream beside_;
  cuda::DevicePlan device_;
  DeviceCall there_;
  std::size_t lse_bytes_;
  Pinned now_;
  cudaGraphExec_t exec_ = nullptr;
  std::vector<std::byte> first_;
};

TEST(CudaFaults, Fault20_NoRaceInQueueOrMerge) {
  reference::Call call(kCrowdShape, {}, crowd(), {.check_naive = false}, 52'100);
  Planner planner = eager_planner();
  PlanOptions options;
  options.policy = Policy::forest;
  Plan plan = planner.plan(kCrowdShape, call.batch(), options);
  EXPECT_EQ(plan.stats().path, Path::cascade);
  EXPECT_GE(plan.data().merge_rows.size(), 128U);
  HEADWATER_NEEDS_GPU();
  const auto stressed = [&](const Plan& p, const cpu::RunArgs& args) {
    Stress stress(plan, args);
    EXPECT_GT(p.stats().num_items * 8, stress.num_blocks()) << "the queue is not needed";
    EXPECT_EQ(stress.times(10'000), "");
    stress.there().fetch_to(args);
    EXPECT_EQ(stress.there().complaint(), "");
    EXPECT_TRUE(stress.notices_a_stale_queue());
    return outcome_of(p);
  };
  EXPECT_EQ(call.run_by(stressed, plan, 0).complaint, "");
}

TEST(CudaFaults, Fault16_TheSameSeedGivesTheSameBits) {
  std::vector<std::string> planned;
  for (const std::uint64_t seed : {52'200, 52'200, 52'201}) planned.push_back(Plans(seed).forest.serialize());
  EXPECT_EQ(planned[0], planned[1]);
  HEADWATER_NEEDS_GPU();
  std::vector<reference::Ran> ran;
  for (const std::uint64_t seed : {52'200, 52'200, 52'201}) {
    Plans plans(seed);
    ran.push_back(plans.call.run_by(run_on_device, plans.forest, 0));
    EXPECT_EQ(ran.back().complaint, "");
  }
  EXPECT_EQ(ran[0].out, ran[1].out);
  EXPECT_EQ(ran[0].lse, ran[1].lse);
  EXPECT_NE(ran[0].out, ran[2].out);
}

TEST(CudaFaults, Fault24_RunMayBeCapturedAndNeverAllocates) {
  Plans plans;
  HEADWATER_NEEDS_GPU();
  OwnStream own;
  const auto captured = [&](const Plan& plan, const cpu::RunArgs& args) {
    cuda::DevicePlan device(kSmallF16, plans.both());
    const DeviceCall there(kSmallF16, args, plans.num_rows(), device.workspace_size());
    device.upload(plan, own.stream);
    cuda::run(device, there.args(), own.stream);  // loads kernels
    ok(cudaStreamSynchronize(own.stream));
    std::size_t before = 0;
    std::size_t after = 0;
    std::size_t total = 0;
    ok(cudaMemGetInfo(&before, &total));
    [[maybe_unused]] const std::int64_t allocations = faults::num_allocations();
    for (int i = 0; i < 20; ++i) cuda::run(device, there.args(), own.stream);
#ifdef NDEBUG  // debug builds watch the streams of runs
    EXPECT_EQ(faults::num_allocations(), allocations);
#endif
    ok(cudaStreamSynchronize(own.stream));
    ok(cudaMemGetInfo(&after, &total));
    EXPECT_EQ(before, after);
    // In the strictest mode, which anything that waits or allocates breaks, as the control shows.
    cudaGraph_t graph = nullptr;
    ok(cudaStreamBeginCapture(own.stream, cudaStreamCaptureModeGlobal));
    cuda::run(device, there.args(), own.stream);
    cuda::run(device, there.args(), own.stream);
    ok(cudaStreamEndCapture(own.stream, &graph));
    cudaGraphExec_t exec = nullptr;
    ok(cudaGraphInstantiate(&exec, graph, 0));
    ok(cudaGraphLaunch(exec, own.stream));
    there.fetch_to(args);
    EXPECT_EQ(there.complaint(), "");
    ok(cudaGraphExecDestroy(exec));
    ok(cudaGraphDestroy(graph));
    ok(cudaStreamBeginCapture(own.stream, cudaStreamCaptureModeGlobal));
    void* memory = nullptr;
    EXPECT_NE(cudaMalloc(&memory, 256), cudaSuccess);
    graph = nullptr;
    EXPECT_NE(cudaStreamEndCapture(own.stream, &graph), cudaSuccess);
    cudaGetLastError();
    return outcome_of(plan);
  };
  EXPECT_EQ(plans.call.run_by(captured, plans.forest, 0).complaint, "");
}

TEST(CudaFaults, Fault25_StagingIsNotOverwrittenWhileCopiesAreUnderWay) {
  // Three uploads and runs in a row on a stream that is held up: each run must see its own plan. The host's plans are
  // gone by then. The third upload needs the first one's staging memory and waits for its copy.
  Plans plans;
  HEADWATER_NEEDS_GPU();
  const std::vector<unsigned char> flat = plans.call.run_by(run_on_device, plans.flat, 0).out;
  const std::vector<unsigned char> forest = plans.call.run_by(run_on_device, plans.forest, 0).out;
  ASSERT_NE(flat, forest);
  const auto thrice = [&](const Plan& plan, const cpu::RunArgs& args) {
    OwnStream own;
    cuda::DevicePlan device(kSmallF16, plans.both());
    std::vector<std::unique_ptr<DeviceCall>> there;
    for (int i = 0; i < 3; ++i) {
      there.push_back(std::make_unique<DeviceCall>(kSmallF16, args, plans.num_rows(), device.workspace_size()));
    }
    device.upload(plans.flat, own.stream);
    cuda::run(device, there[0]->args(), own.stream);  // loads kernels, which may wait for the device
    ok(cudaDeviceSynchronize());
    there[0]->poison_outputs();
    ok(cudaDeviceSynchronize());
    Gate gate(own.stream);
    std::thread opener;
    for (std::size_t i = 0; i < 3; ++i) {
      Plan mine =
          plans.planner.plan(kSmallF16, plans.call.batch(), (i == 1 ? plans.forest : plans.flat).data().options);
      if (i == 2) {
        EXPECT_FALSE(gate.is_open()) << "the first two uploads did not wait";
        opener = std::thread([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(30));
          gate.open();
        });
      }
      device.upload(mine, own.stream);
      cuda::run(device, there[i]->args(), own.stream);
    }
    EXPECT_TRUE(gate.is_open()) << "the third upload overwrote staging memory that was still to be copied";
    opener.join();
    for (std::size_t i = 0; i < 3; ++i) {
      there[i]->fetch_to(args);
      EXPECT_EQ(std::memcmp(args.out.data, (i == 1 ? forest : flat).data(), flat.size()), 0) << "upload " << i;
      EXPECT_EQ(there[i]->complaint(), "");
    }
    return outcome_of(plan);
  };
  EXPECT_EQ(plans.call.run_by(thrice, plans.flat, 0).complaint, "");
}

TEST(CudaFaults, Fault25_APlanDoesNotDependOnWhatTheDefaultStreamDoes) {
  // A plan is made, uploaded and run on a stream of its own while the default stream is busy, and run again when it is
  // not: zeroing that was left to the default stream would have taken the plan away by then.
  Plans plans;
  HEADWATER_NEEDS_GPU();
  EXPECT_EQ(plans.call.run_by(run_on_device, plans.forest, 0).complaint, "");  // loads kernels
  const auto beside = [&](const Plan& plan, const cpu::RunArgs& args) {
    OwnStream own;
    spin(64, 300'000, 1, nullptr);
    cuda::DevicePlan device(kSmallF16, plans.both());
    device.upload(plan, own.stream);
    EXPECT_EQ(cudaStreamQuery(nullptr), cudaErrorNotReady) << "the default stream was idle: nothing was tested";
    const DeviceCall there(kSmallF16, args, plans.num_rows(), device.workspace_size());
    ok(cudaDeviceSynchronize());
    cuda::run(device, there.args(), own.stream);
    there.fetch_to(args);
    EXPECT_EQ(there.complaint(), "");
    return outcome_of(plan);
  };
  EXPECT_EQ(plans.call.run_by(beside, plans.forest, 0).complaint, "");
}

TEST(CudaFaults, Fault25_UploadsAreNotCaptured) {
  Plans plans;
  HEADWATER_NEEDS_GPU();
  OwnStream own;
  OwnStream other;
  cuda::DevicePlan device(kSmallF16, plans.both());
  cudaGraph_t graph = nullptr;
  ok(cudaStreamBeginCapture(own.stream, cudaStreamCaptureModeGlobal));
  EXPECT_EQ(message_of([&] { device.upload(plans.flat, own.stream); }).substr(0, 28), "stream: it is being captured");
  device.upload(plans.flat, other.stream);  // beside a capture
  EXPECT_EQ(cudaStreamEndCapture(own.stream, &graph), cudaSuccess) << "the capture was broken";
  ok(cudaGraphDestroy(graph));
  ok(cudaStreamSynchronize(other.stream));
}

TEST(CudaFaults, Fault26_WorkspaceIsExactAndLessIsRefused) {
  // That the exact size is enough is part of every run_on_device (fenced).
  Plans plans;
  const cuda::Capacity capacity = cuda::Capacity::of(plans.forest);
  const std::size_t size = cuda::workspace_size(kSmallF16, capacity);
  EXPECT_EQ(size, static_cast<std::size_t>(plans.forest.stats().num_partials) * 8 * (64 + 1) * sizeof(float));
  ASSERT_GT(size, 0U);
  HEADWATER_NEEDS_GPU();
  const auto refused = [&](const Plan& plan, const cpu::RunArgs& args) {
    cuda::DevicePlan device(kSmallF16, capacity);
    EXPECT_EQ(device.workspace_size(), size);
    const DeviceCall there(kSmallF16, args, plans.num_rows(), size);
    device.upload(plan, nullptr);
    const auto refusal = [&](cpu::Workspace workspace) {
      cuda::RunArgs wrong = there.args();
      wrong.workspace = workspace;
      return message_of([&] { cuda::run(device, wrong, nullptr); });
    };
    void* memory = there.args().workspace.data;
    const std::string small = refusal({memory, size - 1});
    EXPECT_NE(small.find("workspace"), std::string::npos) << small;
    EXPECT_NE(small.find(std::to_string(size)), std::string::npos) << small;
    EXPECT_NE(small.find(std::to_string(size - 1)), std::string::npos) << small;
    const std::string crooked = refusal({static_cast<std::byte*>(memory) + 1, size});
    EXPECT_NE(crooked.find("64"), std::string::npos) << crooked;
    EXPECT_NE(refusal({nullptr, size}).find("workspace"), std::string::npos);
    std::vector<std::uint8_t> out(there.out_bytes());
    ok(cudaMemcpy(out.data(), there.args().out.data, out.size(), cudaMemcpyDeviceToHost));
    EXPECT_TRUE(std::ranges::all_of(out, [](std::uint8_t x) { return x == 0xff; })) << "nothing was launched";
    cuda::run(device, there.args(), nullptr);
    there.fetch_to(args);
    EXPECT_EQ(there.complaint(), "");
    return outcome_of(plan);
  };
  EXPECT_EQ(plans.call.run_by(refused, plans.forest, 0).complaint, "");
}

TEST(CudaErrors, ALaunchThatFailsLeavesThePlanReusable) {
  Plans plans;
  HEADWATER_NEEDS_GPU();
  const std::vector<unsigned char> expected = plans.call.run_by(run_on_device, plans.forest, 0).out;
  const auto failing = [&](const Plan& plan, const cpu::RunArgs& args) {
    cuda::DevicePlan device(kSmallF16, plans.both());
    DeviceCall there(kSmallF16, args, plans.num_rows(), device.workspace_size());
    device.upload(plan, nullptr);
    auto& impl = const_cast<cuda::DevicePlan::Impl&>(device.impl());
    const auto fails = [&](int& field, int value, const std::string& kernel) {
      const int right = std::exchange(field, value);
      try {
        cuda::run(device, there.args(), nullptr);
        ADD_FAILURE() << kernel << " was launched";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::device);
        EXPECT_EQ(std::string(error.what()).substr(0, kernel.size() + 2), kernel + ": ");
        EXPECT_GT(std::string(error.what()).size(), kernel.size() + 5) << "CUDA's words: " << error.what();
      }
      field = right;
      EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "an error that was reported is not left for the next call";
      there.poison_outputs();
      cuda::run(device, there.args(), nullptr);
      there.fetch_to(args);
      EXPECT_EQ(std::memcmp(args.out.data, expected.data(), expected.size()), 0) << "after a failure of " << kernel;
      std::int32_t queue = -1;
      ok(cudaMemcpy(&queue, impl.queue.data, sizeof queue, cudaMemcpyDeviceToHost));
      EXPECT_EQ(queue, 0);
    };
    fails(impl.shared_bytes, 1 << 24, "attend");
    fails(impl.num_blocks, 0, "attend");
    fails(impl.num_merge_blocks, 0, "merge_rows");
    EXPECT_EQ(there.complaint(), "");
    return outcome_of(plan);
  };
  EXPECT_EQ(plans.call.run_by(failing, plans.forest, 0).complaint, "");
}

TEST(CudaErrors, AMergeThatFailsLeavesAnEmptyQueue) {
  // More pieces than blocks, so that attend takes work from the queue; the merge would have set it back.
  reference::Call call(kCrowdShape, {}, crowd(), {.check_naive = false}, 52'100);
  Planner planner = eager_planner();
  const Plan plan = planner.plan(kCrowdShape, call.batch(), {});
  HEADWATER_NEEDS_GPU();
  const auto failing = [&](const Plan& p, const cpu::RunArgs& args) {
    cuda::DevicePlan device(kCrowdShape, cuda::Capacity::of(p));
    DeviceCall there(kCrowdShape, args, p.stats().num_rows, device.workspace_size());
    device.upload(p, nullptr);
    auto& impl = const_cast<cuda::DevicePlan::Impl&>(device.impl());
    EXPECT_GT(p.stats().num_items * 8, impl.num_blocks);
    const int right = std::exchange(impl.num_merge_blocks, 0);
    const std::string message = message_of([&] { cuda::run(device, there.args(), nullptr); });
    EXPECT_EQ(message.substr(0, 12), "merge_rows: ") << message;
    impl.num_merge_blocks = right;
    there.poison_outputs();
    cuda::run(device, there.args(), nullptr);
    there.fetch_to(args);
    return outcome_of(p);
  };
  EXPECT_EQ(call.run_by(failing, plan, 0).complaint, "");
}

}  // namespace
}  // namespace headwater::cuda_test
