// What a parallel region costs, in microseconds: back to back, after the caller worked alone for a while, and with
// workers asleep; and what a whole run costs beyond its kernels. Not a test: prints a table. Usage: cpu_fork_join_bench
// [workers]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cpu/hand_plan.h"
#include "headwater/cpu.h"
#include "headwater/executor.h"
#include "reference/call.h"
#include "reference/memory.h"

namespace {

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

void nothing(void* /*context*/, int /*worker*/) noexcept {}

/// Median and minimum over samples of `repeat` regions each.
template <class Before, class F>
void measure(const char* name, int samples, int repeat, Before before, F f) {
  std::vector<double> times;
  for (int i = 0; i < samples; ++i) {
    before();
    const auto start = Clock::now();
    for (int j = 0; j < repeat; ++j) f();
    times.push_back(microseconds_since(start) / repeat);
  }
  std::sort(times.begin(), times.end());
  std::printf("%-34s median %8.2f us   min %8.2f us\n", name, times[times.size() / 2], times.front());
}

void work_alone(double microseconds) {
  const auto start = Clock::now();
  while (microseconds_since(start) < microseconds) {
  }
}

}  // namespace

int main(int argc, char** argv) {
  using namespace headwater;
  ThreadPool pool(argc > 1 ? std::atoi(argv[1]) : 0);
  std::printf("%d workers\n", pool.num_workers());
  const auto region = [&] { pool.parallel(nothing, nullptr); };
  const auto no_wait = [] {};
  measure("region, back to back", 200, 200, no_wait, region);
  measure(
      "region, 100 us after the last", 300, 1, [] { work_alone(100); }, region);
  measure(
      "region, workers asleep (5 ms)", 100, 1, [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); },
      region);

  // One request of one token: everything but the kernel.
  AttentionShape shape;
  reference::PageTables tables;
  tables.add({0}, 1);
  reference::Call call(shape, {}, tables, {}, 1);
  const Plan plan = hand_plan(shape, {}, call.tables(), {});
  std::vector<std::byte> out(32 * 128 * 2);
  const reference::FencedBuffer workspace(plan.workspace_size());
  cpu::RunArgs args = call.args();
  args.out = {out.data(), DType::bf16, 32 * 128, 128};
  args.workspace = {workspace.data(), workspace.size()};
  measure("run, one request of one token", 200, 200, no_wait, [&] { cpu::run(plan, args, pool); });
  return 0;
}
