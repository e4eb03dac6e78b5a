// The scheduler without a model: random requests in small pools, with every invariant checked after every step, and the
// named rules one by one.
#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "headwater/error.h"

namespace headwater::engine {
namespace {

/// A cache that remembers which token was written into which slot: what a row would read is then known exactly.
class SlotMemory {
 public:
  explicit SlotMemory(int page_size) : page_size_(page_size) {}

  void apply(const StepBatch& batch) {
    for (const cpu::PageCopy& copy : batch.copies) {
      for (int i = 0; i < copy.num_tokens; ++i) slots_[slot(copy.dst, i)] = slots_[slot(copy.src, i)];
    }
    for (std::size_t r = 0; r < batch.tokens.size(); ++r) slots_[batch.token_slots[r]] = batch.tokens[r];
  }

  /// The tokens that member b of a batch sees.
  [[nodiscard]] std::vector<std::int32_t> tokens_of(const StepBatch& batch, std::size_t b) const {
    std::vector<std::int32_t> tokens;
    for (std::int32_t entry = batch.kv_indptr[b]; entry < batch.kv_indptr[b + 1]; ++entry) {
      const bool last = entry + 1 == batch.kv_indptr[b + 1];
      for (int i = 0; i < (last ? batch.kv_last_page_len[b] : page_size_); ++i) {
        tokens.push_back(slots_.at(slot(batch.kv_indices[static_cast<std::size_t>(entry)], i)));
      }
    }
    return tokens;
  }

 private:
  [[nodiscard]] std::int64_t slot(std::int32_t page, int offset) const {
    return std::int64_t{page} * page_size_ + offset;
  }
  int page_size_;
  std::map<std::int64_t, std::int32_t> slots_;
};

std::unique_ptr<Sample> sample_of(RequestId request, std::vector<std::int32_t> tokens, int forks = 0) {
  auto sample = std::make_unique<Sample>();
  sample->request = request;
  sample->prompt_len = static_cast<std::int64_t>(tokens.size());
  sample->tokens = std::move(tokens);
  sample->num_forks = forks;
  return sample;
}

std::vector<std::int32_t> counting(int begin, int count) {
  std::vector<std::int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(begin + i);
  return tokens;
}

/// Every member sees exactly its own tokens; rows, slots and tables fit together.
void check_batch(const StepBatch& batch, const SlotMemory& memory, const SchedulerOptions& options) {
  ASSERT_EQ(batch.qo_indptr.size(), batch.samples.size() + 1);
  ASSERT_EQ(batch.qo_indptr.back(), static_cast<std::int32_t>(batch.tokens.size()));
  ASSERT_EQ(batch.token_slots.size(), batch.tokens.size());
  ASSERT_EQ(std::set<std::int64_t>(batch.token_slots.begin(), batch.token_slots.end()).size(), batch.tokens.size())
      << "two rows write one slot";
  ASSERT_EQ(batch.decode_rows + batch.prefill_rows, static_cast<int>(batch.tokens.size()));
  for (std::size_t b = 0; b < batch.samples.size(); ++b) {
    const ScheduledSample& s = batch.samples[b];
    ASSERT_EQ(batch.qo_indptr[b + 1] - batch.qo_indptr[b], s.num_rows);
    const auto seen = static_cast<std::ptrdiff_t>(s.begin + s.num_rows);
    const std::vector<std::int32_t> expected(s.sample->tokens.begin(), s.sample->tokens.begin() + seen);
    ASSERT_EQ(memory.tokens_of(batch, b), expected) << "request " << s.sample->request << " sample " << s.sample->index;
    ASSERT_EQ(s.wants_token, seen == static_cast<std::ptrdiff_t>(s.sample->tokens.size()));
  }
  ASSERT_LE(batch.samples.size(), static_cast<std::size_t>(options.max_batch));
}

struct Outcome {
  int finished = 0;
  int failed = 0;
  int preempted = 0;
  int steps = 0;
  std::int64_t prefill_rows = 0;
};

/// Runs everything to its end; "generates" a token that depends on sample and position.
Outcome drive(Scheduler& scheduler, const SchedulerOptions& options, const std::map<RequestId, int>& lengths) {
  SlotMemory memory(options.page_size);
  StepBatch batch;
  Outcome outcome;
  while (!scheduler.empty()) {
    if (++outcome.steps > 20'000) {
      ADD_FAILURE() << "no end in sight";
      break;
    }
    scheduler.schedule(batch);
    memory.apply(batch);
    check_batch(batch, memory, options);
    if (::testing::Test::HasFatalFailure()) break;
    EXPECT_TRUE(!batch.samples.empty() || !batch.failed.empty()) << "a step without progress";
    outcome.failed += static_cast<int>(batch.failed.size());
    outcome.preempted += batch.num_preempted;
    outcome.prefill_rows += batch.prefill_rows;
    scheduler.mark_computed(batch);
    for (const ScheduledSample& s : batch.samples) {
      if (!s.wants_token) continue;
      std::vector<Sample*> family{s.sample};
      for (int i = 1; i <= s.sample->num_forks; ++i) family.push_back(&scheduler.fork(*s.sample, i));
      s.sample->num_forks = 0;
      for (Sample* sample : family) {
        sample->tokens.push_back(static_cast<std::int32_t>(1000 * sample->request + 100 * sample->index) +
                                 static_cast<std::int32_t>(sample->tokens.size()));
        const auto generated = static_cast<std::int64_t>(sample->tokens.size()) - sample->prompt_len;
        if (generated >= lengths.at(sample->request)) {
          (void)scheduler.remove(*sample);
          ++outcome.finished;
        }
      }
    }
    scheduler.audit();
  }
  return outcome;
}

TEST(Scheduler, RandomRequestsKeepEveryInvariant) {
  int preempted = 0;
  int failed = 0;
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto pick = [&](int low, int high) {
      return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
    };
    SchedulerOptions options;
    options.page_size = pick(1, 6);
    options.num_pages = pick(8, 40);
    options.max_step_tokens = pick(1, 20);
    options.max_batch = pick(1, 8);
    options.prefix_cache = pick(0, 3) > 0;
    Scheduler scheduler(options);
    std::map<RequestId, int> lengths;
    int samples = 0;
    for (RequestId request = 1; request <= 10; ++request) {
      std::vector<std::int32_t> prompt = counting(0, pick(0, 20));
      const std::vector<std::int32_t> own = counting(100 * static_cast<int>(request), pick(1, 12));
      prompt.insert(prompt.end(), own.begin(), own.end());
      const int forks = pick(0, 3) == 0 ? pick(1, 4) : 0;
      samples += 1 + forks;
      lengths[request] = pick(1, 15);
      scheduler.add(sample_of(request, prompt, forks));
    }
    const Outcome outcome = drive(scheduler, options, lengths);
    if (HasFatalFailure()) return;
    EXPECT_LE(outcome.finished + outcome.failed, samples);
    // A failed first sample takes its unforked siblings with it.
    if (outcome.failed == 0) {
      EXPECT_EQ(outcome.finished, samples);
    }
    preempted += outcome.preempted;
    failed += outcome.failed;
  }
  // The seeds must have reached the interesting cases.
  EXPECT_GT(preempted, 20);
  EXPECT_GT(failed, 0);
}

TEST(Scheduler, RequestsWaitForAPrefixThatIsBeingComputed) {
  const SchedulerOptions options{200, 4, 16, 8, true};
  Scheduler scheduler(options);
  std::map<RequestId, int> lengths;
  for (RequestId request = 1; request <= 4; ++request) {
    std::vector<std::int32_t> prompt = counting(0, 64);
    prompt.push_back(1000 + static_cast<std::int32_t>(request));
    scheduler.add(sample_of(request, prompt));
    lengths[request] = 3;
  }
  const Outcome outcome = drive(scheduler, options, lengths);
  EXPECT_EQ(outcome.finished, 4);
  EXPECT_EQ(outcome.prefill_rows, 64 + 4) << "the shared 64 tokens are computed once";
  EXPECT_EQ(scheduler.prefix_cache_stats().tokens_hit, 3 * 64);
}

TEST(Scheduler, ALookupIsCountedOnceARequest) {
  // Two of five samples find room at a time: the others try again every step, and some are sent back and come again.
  const SchedulerOptions options{16, 4, 16, 8, true};
  Scheduler scheduler(options);
  std::map<RequestId, int> lengths;
  for (RequestId request = 1; request <= 5; ++request) {
    std::vector<std::int32_t> prompt = counting(0, 8);
    const std::vector<std::int32_t> own = counting(100 * static_cast<int>(request), 13);
    prompt.insert(prompt.end(), own.begin(), own.end());
    scheduler.add(sample_of(request, prompt));
    lengths[request] = 12;
  }
  const Outcome outcome = drive(scheduler, options, lengths);
  EXPECT_EQ(outcome.finished, 5);
  EXPECT_GT(scheduler.cache().stats().lookups, 5) << "nobody tried again: this test shows nothing";
  const PrefixCacheStats stats = scheduler.prefix_cache_stats();
  EXPECT_EQ(stats.lookups, 5);
  EXPECT_EQ(stats.hits, 4);
  EXPECT_EQ(stats.tokens_requested, 5 * 21);
  EXPECT_EQ(stats.tokens_hit, 4 * 8);
  EXPECT_EQ(stats.pages_inserted, scheduler.cache().stats().pages_inserted);
}

TEST(Scheduler, AnotherSaltSharesNothing) {
  const SchedulerOptions options{200, 4, 16, 8, true};
  Scheduler scheduler(options);
  for (RequestId request = 1; request <= 2; ++request) {
    auto sample = sample_of(request, counting(0, 33));
    sample->salt = static_cast<std::uint64_t>(request);
    scheduler.add(std::move(sample));
  }
  EXPECT_EQ(drive(scheduler, options, {{1, 2}, {2, 2}}).prefill_rows, 66);
}

TEST(Scheduler, ContinuationsGoOnBesideALongPrompt) {
  const SchedulerOptions options{200, 4, 8, 8, true};
  Scheduler scheduler(options);
  scheduler.add(sample_of(1, counting(0, 3)));
  StepBatch batch;
  scheduler.schedule(batch);
  scheduler.mark_computed(batch);
  batch.samples[0].sample->tokens.push_back(7);
  scheduler.add(sample_of(2, counting(100, 50)));
  scheduler.schedule(batch);
  ASSERT_EQ(batch.samples.size(), 2U);
  EXPECT_EQ(batch.samples[0].sample->request, 1);
  EXPECT_EQ(batch.decode_rows, 1);
  EXPECT_EQ(batch.prefill_rows, 7) << "the rest of the budget";
}

TEST(Scheduler, ForksShareThePartlyFilledPageUntilTheyAppend) {
  const SchedulerOptions options{200, 8, 32, 8, true};
  Scheduler scheduler(options);
  scheduler.add(sample_of(1, counting(0, 13), 2));
  StepBatch batch;
  scheduler.schedule(batch);
  scheduler.mark_computed(batch);
  Sample& first = *batch.samples[0].sample;
  Sample& second = scheduler.fork(first, 1);
  Sample& third = scheduler.fork(first, 2);
  first.num_forks = 0;
  EXPECT_EQ(200 - scheduler.pool().num_free(), 2) << "three samples, two pages";
  for (Sample* sample : {&first, &second, &third}) sample->tokens.push_back(50 + sample->index);
  scheduler.schedule(batch);
  EXPECT_EQ(batch.samples.size(), 3U);
  EXPECT_EQ(batch.copies.size(), 2U) << "the last one left writes in place";
  EXPECT_EQ(200 - scheduler.pool().num_free(), 4) << "one shared page, three own";
  scheduler.audit();
}

TEST(Scheduler, ForksThatFindNoPlaceWaitBeforeLaterRequests) {
  Scheduler scheduler({64, 4, 64, 2, true});
  StepBatch batch;
  for (RequestId id = 1; id <= 3; ++id) scheduler.add(sample_of(id, counting(static_cast<int>(100 * id), 6), 3));
  scheduler.schedule(batch);  // 1 and 2 run, 3 waits
  scheduler.mark_computed(batch);
  ASSERT_EQ(scheduler.running().size(), 2U);
  // The later one forks first: still behind the older one's.
  for (const std::size_t i : {1U, 0U}) {
    Sample& sample = *batch.samples.at(i).sample;
    for (int fork = 1; fork <= 3; ++fork) (void)scheduler.fork(sample, fork);
    sample.num_forks = 0;
  }
  std::vector<std::pair<RequestId, int>> order;
  for (const auto& sample : scheduler.waiting()) order.emplace_back(sample->request, sample->index);
  const std::vector<std::pair<RequestId, int>> expected{{1, 1}, {1, 2}, {1, 3}, {2, 1}, {2, 2}, {2, 3}, {3, 0}};
  EXPECT_EQ(order, expected);
}

TEST(Scheduler, YoungestIsSentBackWhenPagesRunOut) {
  const SchedulerOptions options{6, 4, 16, 8, false};
  Scheduler scheduler(options);
  scheduler.add(sample_of(1, counting(0, 8)));
  scheduler.add(sample_of(2, counting(100, 8)));
  const Outcome outcome = drive(scheduler, options, {{1, 10}, {2, 10}});
  EXPECT_EQ(outcome.finished, 2);
  EXPECT_EQ(outcome.failed, 0);
  EXPECT_GT(outcome.preempted, 0);
}

TEST(Scheduler, SampleThatCannotFitFailsAloneWithAReason) {
  const SchedulerOptions options{4, 4, 16, 8, true};
  Scheduler scheduler(options);
  scheduler.add(sample_of(1, counting(0, 14)));
  scheduler.add(sample_of(2, counting(100, 5)));
  StepBatch batch;
  std::string error;
  SlotMemory memory(4);
  int finished = 0;
  for (int step = 0; step < 100 && !scheduler.empty(); ++step) {
    scheduler.schedule(batch);
    for (const FailedSample& failed : batch.failed) {
      EXPECT_EQ(failed.sample->request, 1);
      error = failed.error;
    }
    scheduler.mark_computed(batch);
    for (const ScheduledSample& s : batch.samples) {
      if (!s.wants_token) continue;
      s.sample->tokens.push_back(0);
      if (s.sample->request == 2 && s.sample->tokens.size() == 9) {
        (void)scheduler.remove(*s.sample);
        ++finished;
      }
    }
    scheduler.audit();
  }
  EXPECT_EQ(error, "out of pages: token 17 of request 1 needs more than the pool's 4 pages of 4 tokens");
  EXPECT_EQ(finished, 1);
}

}  // namespace
}  // namespace headwater::engine
