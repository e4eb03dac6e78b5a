// Which tokens of which samples a step computes, and where their keys and values go. Knows pages and tokens, not
// models.
//
// A sample is a list of tokens of which the first so many have their KV in its pages. It is waiting (no pages), or
// running. A step takes one row of every sample that has one token left to compute, then chunks of prompts, oldest
// first, up to a budget of rows; then it admits waiting samples. Rules:
//   - a waiting sample whose prefix a running one is about to compute waits for it and then adopts the cached pages;
//   - out of pages: cached pages that nobody uses are evicted, then the youngest sample not yet scheduled in this step
//     goes back to the queue (its pages go to the prefix cache and are recomputed if they have been evicted by then);
//     a sample that does not fit the pool even alone fails, the others go on;
//   - samples of one request are forked from the first one when its prompt has been computed: they share all its pages,
//     a partly filled one is copied at the first append.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/request.h"
#include "headwater/page_pool.h"
#include "headwater/prefix_cache.h"

namespace headwater::engine {

struct SchedulerOptions {
  std::int32_t num_pages = 0;
  int page_size = 16;
  int max_step_tokens = 512;
  int max_batch = 256;
  bool prefix_cache = true;
};

struct Sample {
  RequestId request = 0;
  int index = 0;                     ///< which sample of the request
  std::vector<std::int32_t> tokens;  ///< prompt, then generated
  std::int64_t prompt_len = 0;
  std::uint64_t salt = 0;
  int num_forks = 0;   ///< samples still to be forked off when the prompt has been computed
  bool adopts = true;  ///< false: it computes its whole prompt, whatever is cached

  // The scheduler's own.
  std::int64_t serial = 0;        ///< differs for every sample
  SequenceId sequence = -1;       ///< -1: waiting
  std::int64_t computed = 0;      ///< leading tokens whose KV is in the pages
  std::int64_t scheduled_in = 0;  ///< last step that gave it rows
  bool table_replaced = false;    ///< earlier page ids changed since the last step that ran it
  bool counted = false;           ///< its lookup in the prefix cache has been counted
  std::int64_t adopted = 0;       ///< tokens that it found in the prefix cache when it was first admitted
  bool cacheable = true;          ///< false: its pages may hold what is not finite, nobody is to adopt them

  [[nodiscard]] std::int64_t num_left() const noexcept { return static_cast<std::int64_t>(tokens.size()) - computed; }
};

/// Rows of one sample in a step: tokens [begin, begin + num_rows).
struct ScheduledSample {
  Sample* sample = nullptr;
  std::int64_t begin = 0;
  int num_rows = 0;
  bool table_replaced = false;
  bool wants_token = false;  ///< its last token is among the rows: a new one can be sampled
};

/// A sample that cannot go on for want of pages; it has left the scheduler.
struct FailedSample {
  std::unique_ptr<Sample> sample;
  std::string error;
};

/// One step's work, in CSR form.
struct StepBatch {
  std::vector<ScheduledSample> samples;
  std::vector<std::int32_t> tokens;       ///< [R]
  std::vector<std::int32_t> positions;    ///< [R]
  std::vector<std::int64_t> token_slots;  ///< [R]
  std::vector<cpu::PageCopy> copies;      ///< to run before the append, in order
  std::vector<std::int32_t> qo_indptr;    ///< [B+1]
  std::vector<std::int32_t> kv_indptr;    ///< [B+1]
  std::vector<std::int32_t> kv_indices;
  std::vector<std::int32_t> kv_last_page_len;  ///< [B]
  std::vector<FailedSample> failed;
  int decode_rows = 0;
  int prefill_rows = 0;
  int num_preempted = 0;

  void clear();
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerOptions& options);
  ~Scheduler();

  /// Queues a sample with at least one token.
  void add(std::unique_ptr<Sample> sample);
  /// Fills `batch`. Pages for all its rows are reserved.
  void schedule(StepBatch& batch);
  /// To be called when the rows of the last batch have been computed: their tokens count, full pages are cached.
  void mark_computed(const StepBatch& batch);
  /// A copy of `sample`, whose tokens must all be computed, as sample `index` of the same request. It shares all pages,
  /// or waits with its tokens when max_batch samples run.
  Sample& fork(Sample& sample, int index);
  /// Takes a sample out; its pages are cached, then released.
  std::unique_ptr<Sample> remove(Sample& sample);

  [[nodiscard]] const std::vector<std::unique_ptr<Sample>>& running() const noexcept { return running_; }
  [[nodiscard]] const std::deque<std::unique_ptr<Sample>>& waiting() const noexcept { return waiting_; }
  [[nodiscard]] bool empty() const noexcept { return running_.empty() && waiting_.empty(); }
  [[nodiscard]] const PagePool& pool() const noexcept { return pool_; }
  [[nodiscard]] const PrefixCache& cache() const noexcept { return cache_; }
  /// The cache's statistics, with each request's lookup counted once: when it is first admitted. (The cache itself also
  /// counts the tries of a request that waits for room, and those after it was sent back.)
  [[nodiscard]] PrefixCacheStats prefix_cache_stats() const noexcept;
  /// Pages that the prefix cache alone holds.
  [[nodiscard]] std::int64_t num_idle_cached_pages() const;
  /// Throws Error(internal) when a reference count is off.
  void audit() const;

 private:
  [[nodiscard]] bool reserve(Sample& sample, int num_rows, bool may_preempt, StepBatch& batch);
  void place(Sample& sample, int num_rows, StepBatch& batch);
  void preempt(std::size_t index, StepBatch& batch);
  void admit(int budget, StepBatch& batch);
  [[nodiscard]] bool awaits_prefix(const Sample& sample) const;
  [[nodiscard]] std::int64_t pages_for(std::int64_t num_tokens) const noexcept;
  [[nodiscard]] bool has_room_for(std::int64_t missing) const;
  void count_lookup(Sample& sample);
  void cache_pages(Sample& sample);
  void give_up_pages(Sample& sample);
  void insert_running(std::unique_ptr<Sample> sample);
  void insert_waiting(std::unique_ptr<Sample> sample);

  SchedulerOptions options_;
  PagePool pool_;
  PrefixCache cache_;
  std::deque<std::unique_ptr<Sample>> waiting_;
  std::vector<std::unique_ptr<Sample>> running_;  ///< by (request, index): oldest first
  std::int64_t next_serial_ = 1;
  std::int64_t step_ = 0;
  PrefixCacheStats admitted_;  ///< lookups, hits and tokens alone

  std::vector<cpu::PageCopy> copies_;  // scratch of reserve
  std::vector<std::int64_t> slots_;    // scratch of reserve
};

}  // namespace headwater::engine
