// See scheduler.h.
#include "engine/scheduler.h"

#include <algorithm>
#include <tuple>

#include "headwater/error.h"

namespace headwater::engine {
namespace {

bool older(const std::unique_ptr<Sample>& a, const std::unique_ptr<Sample>& b) {
  return std::tie(a->request, a->index) < std::tie(b->request, b->index);
}

std::int64_t common_prefix(std::span<const std::int32_t> a, std::span<const std::int32_t> b) {
  const std::size_t most = std::min(a.size(), b.size());
  return std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(most), b.begin()).first - a.begin();
}

}  // namespace

void StepBatch::clear() {
  samples.clear();
  tokens.clear();
  positions.clear();
  token_slots.clear();
  copies.clear();
  qo_indptr.assign(1, 0);
  kv_indptr.assign(1, 0);
  kv_indices.clear();
  kv_last_page_len.clear();
  failed.clear();
  decode_rows = 0;
  prefill_rows = 0;
  num_preempted = 0;
}

Scheduler::Scheduler(const SchedulerOptions& options)
    : options_(options), pool_(options.num_pages, options.page_size), cache_(pool_) {}

Scheduler::~Scheduler() = default;

void Scheduler::add(std::unique_ptr<Sample> sample) {
  sample->serial = next_serial_++;
  waiting_.push_back(std::move(sample));
}

void Scheduler::insert_running(std::unique_ptr<Sample> sample) {
  running_.insert(std::upper_bound(running_.begin(), running_.end(), sample, older), std::move(sample));
}

/// Those that have run wait in order of age before those that have never run.
void Scheduler::insert_waiting(std::unique_ptr<Sample> sample) {
  const auto place =
      std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& other) { return older(sample, other); });
  waiting_.insert(place, std::move(sample));
}

std::int64_t Scheduler::pages_for(std::int64_t num_tokens) const noexcept {
  return (num_tokens + options_.page_size - 1) / options_.page_size;
}

void Scheduler::schedule(StepBatch& batch) {
  batch.clear();
  ++step_;
  // Continuations first, so that a long prompt never stalls them; each group oldest first.
  std::vector<Sample*> order;
  order.reserve(running_.size());
  for (const auto& sample : running_) order.push_back(sample.get());
  std::stable_partition(order.begin(), order.end(), [](const Sample* s) { return s->num_left() == 1; });

  int budget = options_.max_step_tokens;
  bool prompts_begun = false;
  for (Sample* sample : order) {
    if (sample->sequence < 0) continue;  // sent back to the queue by an earlier one
    if (sample->num_left() > 1 && !prompts_begun) {
      prompts_begun = true;
      budget = std::max(budget, options_.page_size);  // prompts move on however many continuations there are
    }
    if (prompts_begun && budget <= 0) break;
    const int num_rows = prompts_begun ? static_cast<int>(std::min<std::int64_t>(sample->num_left(), budget)) : 1;
    if (!reserve(*sample, num_rows, true, batch)) continue;
    place(*sample, num_rows, batch);
    budget -= num_rows;
  }
  if (!prompts_begun) budget = std::max(budget, options_.page_size);  // nor do continuations keep others waiting
  if (batch.num_preempted == 0) admit(budget, batch);
  if (!batch.samples.empty() || running_.empty()) return;

  // Nothing could be scheduled: the oldest has sent all others back and still lacks pages.
  Sample& stuck = *running_.front();
  const std::string error = "out of pages: token " + std::to_string(stuck.computed + 1) + " of request " +
                            std::to_string(stuck.request) + " needs more than the pool's " +
                            std::to_string(options_.num_pages) + " pages of " + std::to_string(options_.page_size) +
                            " tokens";
  batch.failed.push_back({remove(stuck), error});
}

/// Takes pages for num_rows more tokens of `sample`, into slots_ and copies_. Where pages are short, evicts cached ones
/// and (if allowed) sends younger samples back to the queue. False: nothing was taken.
bool Scheduler::reserve(Sample& sample, int num_rows, bool may_preempt, StepBatch& batch) {
  for (;;) {
    try {
      copies_.clear();
      slots_.clear();
      pool_.prepare_append(sample.sequence, num_rows, copies_, slots_);
      return true;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::out_of_pages) throw;
    }
    // One page more than the new tokens can need covers a copy on write.
    const std::int64_t wanted = pages_for(num_rows) + 1 - pool_.num_free();
    if (options_.prefix_cache && cache_.evict(static_cast<std::int32_t>(std::max<std::int64_t>(wanted, 1))) > 0)
      continue;
    if (!may_preempt) return false;
    std::size_t victim = running_.size();
    while (victim-- > 0) {
      const Sample& other = *running_[victim];
      if (&other == &sample) return false;  // only older ones are left
      if (other.scheduled_in != step_) break;
    }
    preempt(victim, batch);
  }
}

void Scheduler::preempt(std::size_t index, StepBatch& batch) {
  std::unique_ptr<Sample> sample = std::move(running_[index]);
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(index));
  give_up_pages(*sample);
  ++batch.num_preempted;
  insert_waiting(std::move(sample));
}

/// Adds the rows that reserve() has just taken pages for.
void Scheduler::place(Sample& sample, int num_rows, StepBatch& batch) {
  const bool decode = num_rows == 1 && sample.num_left() == 1 && sample.computed >= sample.prompt_len;
  ScheduledSample scheduled{&sample, sample.computed, num_rows, sample.table_replaced || !copies_.empty(),
                            sample.num_left() == num_rows};
  batch.samples.push_back(scheduled);
  (decode ? batch.decode_rows : batch.prefill_rows) += num_rows;
  for (int i = 0; i < num_rows; ++i) {
    const std::int64_t position = sample.computed + i;
    batch.tokens.push_back(sample.tokens[static_cast<std::size_t>(position)]);
    batch.positions.push_back(static_cast<std::int32_t>(position));
  }
  batch.token_slots.insert(batch.token_slots.end(), slots_.begin(), slots_.end());
  batch.copies.insert(batch.copies.end(), copies_.begin(), copies_.end());
  const std::span<const std::int32_t> pages = pool_.pages(sample.sequence);
  batch.kv_indices.insert(batch.kv_indices.end(), pages.begin(), pages.end());
  batch.kv_indptr.push_back(static_cast<std::int32_t>(batch.kv_indices.size()));
  batch.qo_indptr.push_back(static_cast<std::int32_t>(batch.tokens.size()));
  batch.kv_last_page_len.push_back(static_cast<std::int32_t>((sample.computed + num_rows - 1) % options_.page_size) +
                                   1);
  sample.table_replaced = false;
  sample.scheduled_in = step_;
}

/// Whether a running sample is about to compute, and cache, more of this sample's prefix than has been computed so far.
bool Scheduler::awaits_prefix(const Sample& sample) const {
  if (!options_.prefix_cache || !sample.adopts) return false;
  const auto adoptable = static_cast<std::int64_t>(sample.tokens.size() - 1) / options_.page_size;
  for (const auto& other : running_) {
    if (other->salt != sample.salt || other->num_left() <= 1) continue;
    const std::int64_t common = std::min(adoptable, common_prefix(sample.tokens, other->tokens) / options_.page_size);
    if (common > other->computed / options_.page_size) return true;
  }
  return false;
}

/// Whether `missing` more pages can be had: free ones and cached ones that nobody uses, less what running prompts still
/// need and a page for each running sample to grow into (else the newcomer would soon be sent back).
bool Scheduler::has_room_for(std::int64_t missing) const {
  std::int64_t room = pool_.num_free() - missing;
  for (const auto& sample : running_) {
    room -= 1 + pages_for(static_cast<std::int64_t>(sample->tokens.size())) -
            static_cast<std::int64_t>(pool_.pages(sample->sequence).size());
  }
  if (room >= 0 || !options_.prefix_cache) return room >= 0;
  return room + num_idle_cached_pages() >= 0;
}

std::int64_t Scheduler::num_idle_cached_pages() const {
  const std::vector<std::int32_t> held = cache_.held_pages();
  std::int64_t count = 0;
  for (std::size_t page = 0; page < held.size(); ++page) {
    if (held[page] > 0 && pool_.ref_count(static_cast<std::int32_t>(page)) == held[page]) ++count;
  }
  return count;
}

void Scheduler::admit(int budget, StepBatch& batch) {
  for (std::size_t i = 0; i < waiting_.size() && budget > 0;) {
    if (running_.size() >= static_cast<std::size_t>(options_.max_batch)) return;
    Sample& sample = *waiting_[i];
    if (awaits_prefix(sample)) {
      ++i;
      continue;
    }
    std::vector<std::int32_t> cached;
    if (options_.prefix_cache && sample.adopts) cached = cache_.lookup(sample.tokens, sample.salt);
    // Adopted at once: from now on nobody evicts them.
    sample.sequence = cached.empty() ? pool_.create() : pool_.adopt(cached);
    sample.computed = static_cast<std::int64_t>(cached.size()) * options_.page_size;
    const std::int64_t missing =
        pages_for(static_cast<std::int64_t>(sample.tokens.size())) - static_cast<std::int64_t>(cached.size());
    const int num_rows = static_cast<int>(std::min<std::int64_t>(sample.num_left(), budget));
    // Alone, it must be tried: only then can it be said to be too large.
    const bool fits = running_.empty() || has_room_for(missing);
    if (!fits || !reserve(sample, num_rows, false, batch)) {
      pool_.release(sample.sequence);
      sample.sequence = -1;
      sample.computed = 0;
      if (running_.empty()) {
        batch.failed.push_back(
            {std::move(waiting_[i]), "out of pages: request " + std::to_string(sample.request) + " needs " +
                                         std::to_string(missing) + " pages of " + std::to_string(options_.page_size) +
                                         " tokens, the pool has " + std::to_string(options_.num_pages)});
        waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
        continue;
      }
      return;  // in order of arrival: nobody overtakes for want of pages
    }
    count_lookup(sample);
    sample.table_replaced = true;
    place(sample, num_rows, batch);
    budget -= num_rows;
    insert_running(std::move(waiting_[i]));
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

/// To be called when a sample has adopted what it found.
void Scheduler::count_lookup(Sample& sample) {
  if (sample.counted || !options_.prefix_cache || !sample.adopts) return;
  sample.counted = true;
  sample.adopted = sample.computed;
  ++admitted_.lookups;
  admitted_.hits += sample.computed > 0 ? 1 : 0;
  admitted_.tokens_requested += static_cast<std::int64_t>(sample.tokens.size());
  admitted_.tokens_hit += sample.computed;
}

PrefixCacheStats Scheduler::prefix_cache_stats() const noexcept {
  PrefixCacheStats stats = cache_.stats();
  stats.lookups = admitted_.lookups;
  stats.hits = admitted_.hits;
  stats.tokens_requested = admitted_.tokens_requested;
  stats.tokens_hit = admitted_.tokens_hit;
  return stats;
}

void Scheduler::mark_computed(const StepBatch& batch) {
  for (const ScheduledSample& scheduled : batch.samples) {
    Sample& sample = *scheduled.sample;
    const std::int64_t full_before = sample.computed / options_.page_size;
    sample.computed += scheduled.num_rows;
    // Prompts are cached as they grow, for those that wait for them; generated tokens when the sample leaves.
    if (sample.computed <= sample.prompt_len && sample.computed / options_.page_size > full_before) cache_pages(sample);
  }
}

/// Inserts the full pages of what has been computed. Where the same tokens are cached under other pages, and no partly
/// filled page stands in the way, the sample takes those instead of its own.
void Scheduler::cache_pages(Sample& sample) {
  if (!options_.prefix_cache || !sample.cacheable) return;
  const std::int64_t num_full = sample.computed / options_.page_size;
  if (num_full == 0) return;
  const auto num_pages = static_cast<std::size_t>(num_full);
  const std::span<const std::int32_t> pages = pool_.pages(sample.sequence).first(num_pages);
  const auto num_tokens = static_cast<std::size_t>(num_full * options_.page_size);
  const std::vector<std::int32_t> standing =
      cache_.insert(std::span(sample.tokens).first(num_tokens), pages, sample.salt);
  if (num_full * options_.page_size == sample.computed && !std::equal(pages.begin(), pages.end(), standing.begin())) {
    const SequenceId adopted = pool_.adopt(standing);
    pool_.release(sample.sequence);
    sample.sequence = adopted;
    sample.table_replaced = true;
  }
}

void Scheduler::give_up_pages(Sample& sample) {
  if (sample.sequence < 0) return;
  cache_pages(sample);
  pool_.release(sample.sequence);
  sample.sequence = -1;
  sample.computed = 0;
}

Sample& Scheduler::fork(Sample& sample, int index) {
  auto copy = std::make_unique<Sample>(sample);
  copy->index = index;
  copy->num_forks = 0;
  copy->adopts = true;  // the prompt's log probabilities have been told: what is computed again may be adopted
  copy->serial = next_serial_++;
  copy->table_replaced = true;
  Sample& result = *copy;
  if (running_.size() < static_cast<std::size_t>(options_.max_batch)) {
    copy->sequence = pool_.fork(sample.sequence);
    insert_running(std::move(copy));
  } else {
    copy->sequence = -1;
    copy->computed = 0;
    insert_waiting(std::move(copy));
  }
  return result;
}

std::unique_ptr<Sample> Scheduler::remove(Sample& sample) {
  std::unique_ptr<Sample> taken;
  const auto is_sample = [&](const std::unique_ptr<Sample>& other) { return other.get() == &sample; };
  if (const auto it = std::find_if(running_.begin(), running_.end(), is_sample); it != running_.end()) {
    taken = std::move(*it);
    running_.erase(it);
  } else if (const auto queued = std::find_if(waiting_.begin(), waiting_.end(), is_sample); queued != waiting_.end()) {
    taken = std::move(*queued);
    waiting_.erase(queued);
  } else {
    throw Error(ErrorCode::internal, "remove: sample " + std::to_string(sample.index) + " of request " +
                                         std::to_string(sample.request) + " is not scheduled");
  }
  give_up_pages(*taken);
  return taken;
}

void Scheduler::audit() const {
  pool_.audit(cache_.held_pages());
}

}  // namespace headwater::engine
