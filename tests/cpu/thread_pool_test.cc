// The pool: every worker once per region, memory visible both ways, nested and oversubscribed use, parked workers.
#include <gtest/gtest.h>
#include <sched.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "headwater/error.h"
#include "headwater/executor.h"

namespace headwater {
namespace {

struct Counts {
  std::vector<int> of_worker;  ///< not atomic: the pool must order the accesses
  int generation = 0;
  std::atomic<int> wrong{0};
};

void count(void* context, int worker) noexcept {
  auto& c = *static_cast<Counts*>(context);
  if (c.of_worker[static_cast<std::size_t>(worker)] != c.generation) c.wrong.fetch_add(1);
  ++c.of_worker[static_cast<std::size_t>(worker)];
}

class ThreadPoolSizes : public testing::TestWithParam<int> {};

TEST_P(ThreadPoolSizes, RunsEveryWorkerOncePerRegion) {
  ThreadPool pool(GetParam());
  ASSERT_EQ(pool.num_workers(), GetParam());
  Counts counts;
  counts.of_worker.resize(static_cast<std::size_t>(GetParam()));
  for (int i = 0; i < 2000; ++i) {
    counts.generation = i;
    pool.parallel(count, &counts);
    ASSERT_EQ(std::accumulate(counts.of_worker.begin(), counts.of_worker.end(), 0), (i + 1) * GetParam());
  }
  EXPECT_EQ(counts.wrong.load(), 0);
}

INSTANTIATE_TEST_SUITE_P(Workers, ThreadPoolSizes, testing::Values(1, 2, 3, 7));

TEST(ThreadPool, DefaultIsTheAffinityMask) {
  cpu_set_t set;
  CPU_ZERO(&set);
  ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  EXPECT_EQ(ThreadPool().num_workers(), CPU_COUNT(&set));
}

TEST(ThreadPool, CountsAnAffinityMaskThatWasNarrowed) {
  std::thread([] {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(sched_getcpu(), &set);
    ASSERT_EQ(sched_setaffinity(0, sizeof(set), &set), 0);
    EXPECT_EQ(ThreadPool().num_workers(), 1);
  }).join();
}

TEST(ThreadPool, WakesParkedWorkers) {
  ThreadPool pool(3);
  Counts counts;
  counts.of_worker.resize(3);
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));  // beyond the time that workers spin
    counts.generation = i;
    pool.parallel(count, &counts);
  }
  EXPECT_EQ(counts.of_worker, (std::vector<int>{5, 5, 5}));
  EXPECT_EQ(counts.wrong.load(), 0);
}

TEST(ThreadPool, WaitsForSlowWorkers) {
  ThreadPool pool(2);
  std::atomic<int> done{0};
  pool.parallel(
      [](void* context, int worker) noexcept {
        if (worker == 1) std::this_thread::sleep_for(std::chrono::milliseconds(3));
        static_cast<std::atomic<int>*>(context)->fetch_add(1, std::memory_order_relaxed);
      },
      &done);
  EXPECT_EQ(done.load(), 2);
}

// A region in which each share takes a while is shared out among the threads.
TEST(ThreadPool, SeveralThreadsTakePart) {
  ThreadPool pool(2);
  for (int attempt = 0; attempt < 20; ++attempt) {  // a busy machine may run the second thread too late, but not always
    std::array<std::thread::id, 2> ids;
    pool.parallel(
        [](void* context, int worker) noexcept {
          (*static_cast<std::array<std::thread::id, 2>*>(context))[static_cast<std::size_t>(worker)] =
              std::this_thread::get_id();
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        },
        &ids);
    if (ids[0] != ids[1]) return;
  }
  FAIL() << "one thread did everything";
}

// The caller does not wait for a thread that has not started its share.
TEST(ThreadPool, ManyThreadsOnFewProcessors) {
  ThreadPool pool(64);
  Counts counts;
  counts.of_worker.resize(64);
  for (int i = 0; i < 50; ++i) {
    counts.generation = i;
    pool.parallel(count, &counts);
    ASSERT_EQ(std::accumulate(counts.of_worker.begin(), counts.of_worker.end(), 0), (i + 1) * 64);
  }
  EXPECT_EQ(counts.wrong.load(), 0);
}

struct Nested {
  ThreadPool* pool;
  std::atomic<int> calls{0};
};

TEST(ThreadPool, NestedRegionsRunOnTheCaller) {
  ThreadPool pool(2);
  Nested nested{&pool};
  pool.parallel(
      [](void* outer, int) noexcept {
        static_cast<Nested*>(outer)->pool->parallel(
            [](void* inner, int) noexcept { static_cast<Nested*>(inner)->calls.fetch_add(1); }, outer);
      },
      &nested);
  EXPECT_EQ(nested.calls.load(), 4);
}

TEST(ThreadPool, IsCreatedAndDestroyedWithoutWork) {
  for (int i = 0; i < 50; ++i) {
    const auto pool = std::make_unique<ThreadPool>(1 + i % 5);
    EXPECT_EQ(pool->num_workers(), 1 + i % 5);
  }
}

TEST(ThreadPool, RefusesANegativeCount) {
  try {
    ThreadPool pool(-1);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_STREQ(error.what(), "num_workers = -1, expected 0 to 4096 (0: one per processor)");
  }
}

TEST(SerialExecutor, RunsTheOneWorker) {
  SerialExecutor serial;
  Counts counts;
  counts.of_worker.resize(1);
  serial.parallel(count, &counts);
  EXPECT_EQ(counts.of_worker[0], 1);
  EXPECT_EQ(serial.num_workers(), 1);
}

}  // namespace
}  // namespace headwater
