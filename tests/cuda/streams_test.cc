// What debug builds notice: one workspace or plan in use on two streams. This program has a copy of run.cc that
// watches, as in debug builds, whatever the build.
#include "cuda/device_plan.h"
#include "cuda/run_fixture.h"
#include "cuda/stream_watch.h"

namespace headwater::cuda_test {
namespace {

TEST(CudaStreams, TheWatchNoticesMemoryInUseOnAnotherStream) {
  HEADWATER_NEEDS_GPU();
  DeviceMemory memory(4096);
  OwnStream a;
  OwnStream b;
  cudaStream_t blocking = nullptr;
  ok(cudaStreamCreate(&blocking));
  cuda::StreamWatch watch;
  const auto complaint = [&](std::size_t at, std::size_t bytes, cudaStream_t stream) {
    return message_of([&] { watch.check("workspace", memory.data() + at, bytes, stream); });
  };
  {
    Gate gate(a.stream);
    watch.note(memory.data(), 1024, a.stream);
    EXPECT_EQ(complaint(0, 1024, b.stream),
              "workspace is in use by a run on another stream, expected one of its own for each stream");
    EXPECT_NE(complaint(1023, 10, b.stream), "") << "a part of it";
    EXPECT_NE(complaint(0, 1024, nullptr), "");
    EXPECT_NE(complaint(0, 1024, blocking), "");
    EXPECT_EQ(complaint(1024, 1024, b.stream), "") << "other memory";
    EXPECT_EQ(complaint(0, 1024, a.stream), "") << "the same stream";
    cudaGraph_t graph = nullptr;
    ok(cudaStreamBeginCapture(b.stream, cudaStreamCaptureModeGlobal));
    EXPECT_EQ(complaint(0, 1024, b.stream), "") << "what is captured runs some other time";
    watch.note(memory.data(), 1024, b.stream);
    EXPECT_EQ(complaint(0, 1024, a.stream), "") << "questions while another stream is being captured";
    watch.note(memory.data() + 2048, 1024, a.stream);
    EXPECT_EQ(cudaStreamEndCapture(b.stream, &graph), cudaSuccess) << "the capture was broken";
    ok(cudaGraphDestroy(graph));
    gate.open();
    ok(cudaStreamSynchronize(a.stream));
    EXPECT_EQ(complaint(0, 1024, b.stream), "") << "the run is over";
  }
  {
    Gate gate(blocking);
    watch.note(memory.data(), 1024, blocking);
    EXPECT_EQ(complaint(0, 1024, nullptr), "") << "the default stream waits for it";
    EXPECT_NE(complaint(0, 1024, b.stream), "");
  }
  ok(cudaStreamDestroy(blocking));
}

TEST(CudaStreams, OneWorkspaceOnTwoStreamsIsRefused) {
  HEADWATER_NEEDS_GPU();
  Plans plans;
  const auto refused = [&](const Plan& plan, const cpu::RunArgs& args) {
    OwnStream a;
    OwnStream b;
    cuda::DevicePlan first(kSmallF16, plans.both());
    cuda::DevicePlan second(kSmallF16, plans.both());
    const DeviceCall there(kSmallF16, args, plans.num_rows(), first.workspace_size());
    const DeviceCall other(kSmallF16, args, plans.num_rows(), first.workspace_size());
    first.upload(plan, a.stream);
    second.upload(plan, b.stream);
    cuda::run(first, there.args(), a.stream);
    ok(cudaDeviceSynchronize());
    {
      Gate gate(a.stream);
      cuda::run(first, there.args(), a.stream);
      cuda::run(first, there.args(), a.stream);
      const auto complaint = [&](const cuda::DevicePlan& p, const DeviceCall& c) {
        return message_of([&] { cuda::run(p, c.args(), b.stream); }).substr(0, 15);
      };
      EXPECT_EQ(complaint(second, there), "workspace is in");
      EXPECT_EQ(complaint(first, other), "plan is in use ");
      EXPECT_EQ(complaint(second, other), "");
    }
    cuda::run(second, there.args(), b.stream);
    there.fetch_to(args);
    return outcome_of(plan);
  };
  EXPECT_EQ(plans.call.run_by(refused, plans.forest, 0).complaint, "");
}

}  // namespace
}  // namespace headwater::cuda_test
