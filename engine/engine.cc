// See engine.h. The facade keeps what a request asks for and what its samples have said; pages and rows belong to the
// scheduler, numbers to the runner. step() is the pipeline in one place.
#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "engine/model.h"
#include "engine/omp_executor.h"
#include "engine/runner.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "engine/step_planner.h"
#include "engine/stop_strings.h"
#include "headwater/error.h"

namespace headwater::engine {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

[[noreturn]] void refuse(const std::string& field, const std::string& got, const std::string& expected) {
  throw Error(ErrorCode::invalid_argument, field + " = " + got + ", expected " + expected);
}

void check_at_least(const char* field, std::int64_t value, std::int64_t least) {
  if (value < least) refuse(field, std::to_string(value), "at least " + std::to_string(least));
}

constexpr std::int64_t kMostPageSize = 1 << 16;
constexpr std::int64_t kMostPages = std::int64_t{1} << 24;
constexpr std::int64_t kMostPoolBytes = std::int64_t{1} << 46;  // what a process can map, about

/// Options with everything that has a default filled in.
EngineOptions checked(EngineOptions options, const Model& model) {
  if (options.page_size < 1 || options.page_size > kMostPageSize) {
    refuse("page_size", std::to_string(options.page_size), "1.." + std::to_string(kMostPageSize));
  }
  check_at_least("max_step_tokens", options.max_step_tokens, 1);
  check_at_least("max_batch", options.max_batch, 1);
  check_at_least("num_pages", options.num_pages, 0);
  if (options.kv_dtype == DType::f8e4m3) refuse("kv_dtype", "f8e4m3", "f32, f16 or bf16");
  const PlanOptions& plan = options.plan;
  if (!plan.causal || plan.window_left >= 0 || plan.local_chunk != 0 || plan.num_sink_tokens != 0 || plan.alibi ||
      plan.sinks || plan.logits_soft_cap != 0.0F || plan.sm_scale != 0.0F) {
    refuse("plan", "a mask or score option", "the defaults: the model decides what a row sees");
  }
  if (options.plan.num_workers == 0) options.plan.num_workers = model.num_threads();
  return options;
}

KvLayout layout_of(const Model& model, const EngineOptions& options) {
  const ModelConfig& config = model.config();
  return {config.num_layers, config.num_kv_heads, config.head_dim, options.page_size, options.kv_dtype};
}

std::int32_t page_count(const Model& model, const EngineOptions& options) {
  const std::int64_t page_bytes = layout_of(model, options).page_bytes();
  const std::int64_t most = std::min(kMostPages, kMostPoolBytes / page_bytes);
  const std::string page = " pages of " + std::to_string(page_bytes) + " bytes";
  if (options.num_pages > most) {
    refuse("num_pages", std::to_string(options.num_pages), "at most " + std::to_string(most) + page);
  }
  const std::int64_t pages = options.num_pages > 0 ? options.num_pages : options.kv_bytes / page_bytes;
  if (pages < 1 || pages > most) {
    refuse("kv_bytes", std::to_string(options.kv_bytes), "room for 1.." + std::to_string(most) + page);
  }
  return static_cast<std::int32_t>(pages);
}

}  // namespace

struct Engine::Impl {
  /// A sample's text so far. Exists until the sample has finished.
  struct Output {
    TextStream text;
    int num_generated = 0;
  };
  struct Job {
    Request request;  // without its prompt
    std::map<int, Output> outputs;
    std::vector<PlaceLogprobs> prompt_places;  // [prompt_len - 1] of the tokens from the second on, until they are told
  };
  /// A row whose logits are wanted: to sample the token at `position`, or to judge the prompt's.
  struct Wanted {
    ScheduledSample scheduled;
    std::int64_t position = 0;
    bool samples = false;
  };
  struct Chosen {
    std::int32_t token = -1;
    PlaceLogprobs logprobs;  // where they were asked for
  };

  Impl(std::shared_ptr<const Model> model_in, const EngineOptions& options_in)
      : model(std::move(model_in)),
        options(checked(options_in, *model)),
        num_pages(page_count(*model, options)),
        scheduler({num_pages, options.page_size, options.max_step_tokens, options.max_batch, options.prefix_cache}),
        runner(*model, layout_of(*model, options), num_pages, options.plan.batch_invariant, options.isa),
        planner(runner.attention_shape(), options.plan, options.device, options.page_size, num_pages) {}

  RequestId submit(Request request);
  bool cancel(RequestId id);
  void step(std::vector<Event>& events);
  void compute();
  void want_rows(std::size_t index);
  void sample(int first, int count, const float* logits);
  void sample_row(std::size_t row, std::span<const float> logits, SamplerScratch& memory);
  void accept(Sample& sample, Chosen& one, std::vector<Event>& events);
  void finish(RequestId id, int index, Event event, std::vector<Event>& events);
  void fail(std::unique_ptr<Sample> sample, const Error& error, std::vector<Event>& events);
  void fail_batch(const Error& error, std::vector<Event>& events);
  void record(double step_seconds);

  std::shared_ptr<const Model> model;
  EngineOptions options;
  std::int32_t num_pages;
  Scheduler scheduler;
  Runner runner;
  StepPlanner planner;

  RequestId next_id = 1;
  std::map<RequestId, Job> jobs;
  std::vector<Event> pending;  // of cancelled requests, for the next step
  StepBatch batch;
  std::vector<std::int32_t> logit_rows;     // of the batch
  std::vector<Wanted> wanting;              // what each logit row is for
  std::vector<std::vector<Chosen>> chosen;  // [wanting]: a token for the sample and for each of its forks
  std::vector<SamplerScratch> scratch;      // [workers]
  std::vector<StepRequest> requests;        // of the last step
  StepStats last;
  EngineStats sums;
};

RequestId Engine::Impl::submit(Request request) {
  const ModelConfig& config = model->config();
  if (request.prompt.empty()) refuse("prompt", "no tokens", "at least one");
  if (request.prompt.size() >= static_cast<std::size_t>(config.context)) {
    refuse("prompt", std::to_string(request.prompt.size()) + " tokens",
           "fewer than the model's context of " + std::to_string(config.context));
  }
  for (std::size_t i = 0; i < request.prompt.size(); ++i) {
    if (request.prompt[i] < 0 || request.prompt[i] >= config.vocab) {
      refuse("prompt[" + std::to_string(i) + "]", std::to_string(request.prompt[i]),
             "a token id in [0, " + std::to_string(config.vocab) + ")");
    }
  }
  check_settings(request);
  for (std::size_t i = 0; i < request.sampling.logit_bias.size(); ++i) {
    const std::int32_t token = request.sampling.logit_bias[i].token;
    if (token < 0 || token >= config.vocab) {
      refuse("sampling.logit_bias[" + std::to_string(i) + "].token", std::to_string(token),
             "a token id in [0, " + std::to_string(config.vocab) + ")");
    }
  }
  if (request.num_logprobs > config.vocab) {
    refuse("num_logprobs", std::to_string(request.num_logprobs), "at most " + std::to_string(config.vocab));
  }
  const auto prompt_len = static_cast<std::int64_t>(request.prompt.size());
  const std::int64_t pages = (prompt_len + options.page_size - 1) / options.page_size;
  if (pages > num_pages) {
    throw Error(ErrorCode::out_of_pages, "prompt of " + std::to_string(prompt_len) + " tokens needs " +
                                             std::to_string(pages) + " pages, the pool has " +
                                             std::to_string(num_pages));
  }

  Job job;
  const StopStrings stops(request.stop);
  for (int index = 0; index < request.num_samples; ++index) {
    job.outputs.emplace(index, Output{TextStream(model->tokenizer(), stops), 0});
  }
  auto sample = std::make_unique<Sample>();
  sample->request = next_id;
  sample->tokens = std::move(request.prompt);
  sample->prompt_len = prompt_len;
  sample->salt = request.salt;
  sample->num_forks = request.num_samples - 1;
  sample->adopts = !request.prompt_logprobs;
  if (request.prompt_logprobs) {
    job.prompt_places.resize(static_cast<std::size_t>(prompt_len - 1));
    for (PlaceLogprobs& place : job.prompt_places) {
      place.top.reserve(static_cast<std::size_t>(std::max(request.num_logprobs, 0)));
    }
  }
  job.request = std::move(request);
  jobs.emplace(next_id, std::move(job));
  scheduler.add(std::move(sample));
  sums.prompt_tokens += prompt_len;
  return next_id++;
}

bool Engine::Impl::cancel(RequestId id) {
  const auto job = jobs.find(id);
  if (job == jobs.end()) return false;
  std::vector<Sample*> live;
  for (const auto& sample : scheduler.running()) {
    if (sample->request == id) live.push_back(sample.get());
  }
  for (const auto& sample : scheduler.waiting()) {
    if (sample->request == id) live.push_back(sample.get());
  }
  for (Sample* sample : live) (void)scheduler.remove(*sample);
  while (jobs.contains(id)) {
    Event event;
    event.finish = FinishReason::cancelled;
    finish(id, job->second.outputs.begin()->first, std::move(event), pending);
  }
  return true;
}

/// scheduler -> runner -> plan -> per layer: append KV, attention -> logits -> sampler.
void Engine::Impl::step(std::vector<Event>& events) {
  const auto begin = Clock::now();
  events.swap(pending);
  pending.clear();
  scheduler.schedule(batch);
  for (FailedSample& failed : batch.failed) {
    fail(std::move(failed.sample), Error(ErrorCode::out_of_pages, failed.error), events);
  }
  last = {};
  last.step = sums.steps + 1;
  requests.clear();
  for (const ScheduledSample& scheduled : batch.samples) {
    const Sample& sample = *scheduled.sample;
    requests.push_back({sample.request, jobs.at(sample.request).request.tag, sample.index, sample.prompt_len,
                        scheduled.begin + scheduled.num_rows, scheduled.num_rows});
  }
  if (!batch.samples.empty()) {
    try {
      compute();
    } catch (const Error& error) {
      return fail_batch(error, events);
    } catch (const std::exception& error) {
      return fail_batch(Error(ErrorCode::internal, error.what()), events);
    }
    // Before pages are cached. Those of a prompt's earlier steps, which had no logits, are cached already.
    for (std::size_t i = 0; i < wanting.size(); ++i) {
      if (wanting[i].samples) wanting[i].scheduled.sample->cacheable = chosen[i].front().token >= 0;
    }
    scheduler.mark_computed(batch);
    for (std::size_t i = 0; i < wanting.size(); ++i) {
      if (!wanting[i].samples) continue;
      Sample& sample = *wanting[i].scheduled.sample;
      std::vector<Sample*> family{&sample};
      for (int fork = 1; fork <= sample.num_forks; ++fork) family.push_back(&scheduler.fork(sample, fork));
      sample.num_forks = 0;
      for (std::size_t j = 0; j < family.size(); ++j) accept(*family[j], chosen[i][j], events);
    }
  }
  record(seconds_since(begin));
}

/// Plan, forward pass, and a token for every sample that wants one.
void Engine::Impl::compute() {
  const auto begin = Clock::now();
  const Plan& plan = planner.plan(batch);
  last.plan_seconds = seconds_since(begin);
  logit_rows.clear();
  wanting.clear();
  for (std::size_t i = 0; i < batch.samples.size(); ++i) want_rows(i);
  chosen.assign(wanting.size(), {});
  for (std::size_t i = 0; i < wanting.size(); ++i) {  // here, since the workers must not throw
    if (!wanting[i].samples) continue;
    const Sample& sample = *wanting[i].scheduled.sample;
    chosen[i].resize(static_cast<std::size_t>(sample.num_forks) + 1);
    const int num_top = jobs.at(sample.request).request.num_logprobs;
    for (Chosen& one : chosen[i]) one.logprobs.top.reserve(static_cast<std::size_t>(std::max(num_top, 0)));
  }
  Fallback fallback{[this]() -> const Plan& { return planner.flat_plan(batch); }};
  if (options.inject_cascade_failure) {
    fallback.inject = [this](int layer) { return options.inject_cascade_failure(last.step, layer); };
  }
  const auto forward_begin = Clock::now();
  runner.forward(plan, {batch.tokens, batch.positions, batch.token_slots, batch.copies, logit_rows}, fallback);
  runner.logits([this](int first, int count, const float* logits) {
    const auto sample_begin = Clock::now();
    sample(first, count, logits);
    last.sample_seconds += seconds_since(sample_begin);
  });
  last.forward_seconds = seconds_since(forward_begin) - last.sample_seconds;
}

/// Adds the rows of a scheduled sample whose logits are wanted.
void Engine::Impl::want_rows(std::size_t index) {
  const ScheduledSample& scheduled = batch.samples[index];
  const Sample& sample = *scheduled.sample;
  const std::int32_t begin = batch.qo_indptr[index];
  if (!sample.adopts) {
    for (int row = 0; row < scheduled.num_rows && scheduled.begin + row + 1 < sample.prompt_len; ++row) {
      logit_rows.push_back(begin + row);
      wanting.push_back({scheduled, scheduled.begin + row + 1, false});
    }
  }
  if (!scheduled.wants_token) return;
  logit_rows.push_back(begin + scheduled.num_rows - 1);
  wanting.push_back({scheduled, static_cast<std::int64_t>(sample.tokens.size()), true});
}

/// Allocates nothing: what it fills has been given room.
void Engine::Impl::sample_row(std::size_t row, std::span<const float> logits, SamplerScratch& memory) {
  const Wanted& wanted = wanting[row];
  const Sample& sample = *wanted.scheduled.sample;
  Job& job = jobs.at(sample.request);
  const Request& request = job.request;
  if (!wanted.samples) {
    const auto position = static_cast<std::size_t>(wanted.position);
    token_logprobs(logits, sample.tokens[position], std::max(request.num_logprobs, 0), job.prompt_places[position - 1],
                   memory);
    return;
  }
  const std::span<const std::int32_t> generated =
      std::span(sample.tokens).subspan(static_cast<std::size_t>(sample.prompt_len));
  const std::span<const float> adjusted = adjusted_logits(logits, request.sampling, generated, memory);
  for (std::size_t fork = 0; fork < chosen[row].size(); ++fork) {
    Chosen& one = chosen[row][fork];
    one.token =
        sample_token(adjusted, request.sampling, sample.index + static_cast<int>(fork), wanted.position, memory);
    if (request.num_logprobs >= 0) token_logprobs(logits, one.token, request.num_logprobs, one.logprobs, memory);
  }
}

void Engine::Impl::sample(int first, int count, const float* logits) {
  const auto vocab = static_cast<std::size_t>(model->config().vocab);
  const std::size_t most = std::max(vocab, static_cast<std::size_t>(model->config().context));
  Executor& executor = model->executor();
  scratch.resize(static_cast<std::size_t>(executor.num_workers()));
  for (SamplerScratch& memory : scratch) {  // here, since the workers must not throw
    memory.candidates.reserve(most);
    memory.weights.reserve(vocab);
    memory.logits.reserve(vocab);
  }
  const auto choose = [&](int worker, int workers) {
    for (int i = worker; i < count; i += workers) {
      const std::span<const float> values(logits + static_cast<std::size_t>(i) * vocab, vocab);
      sample_row(static_cast<std::size_t>(first + i), values, scratch[static_cast<std::size_t>(worker)]);
    }
  };
  if (count == 1) return choose(0, 1);
  struct Context {
    const decltype(choose)* fn;
    int workers;
  } context{&choose, executor.num_workers()};
  executor.parallel(
      [](void* opaque, int worker) noexcept {
        const auto& c = *static_cast<const Context*>(opaque);
        (*c.fn)(worker, c.workers);
      },
      &context);
}

void Engine::Impl::accept(Sample& sample, Chosen& one, std::vector<Event>& events) {
  const std::int32_t token = one.token;
  if (token < 0) {
    const std::string where = "logits at position " + std::to_string(sample.tokens.size()) + " are not finite";
    fail(scheduler.remove(sample), Error(ErrorCode::internal, where), events);
    return;
  }
  Job& job = jobs.at(sample.request);
  const Request& request = job.request;
  Output& output = job.outputs.at(sample.index);
  sample.tokens.push_back(token);
  ++output.num_generated;
  ++sums.generated_tokens;
  Event event;
  event.request = sample.request;
  event.sample = sample.index;
  event.token = token;
  event.text = output.text.push(token);
  event.held_bytes = output.text.held();
  event.cached_tokens = sample.adopted;
  if (request.num_logprobs >= 0) event.logprobs = std::move(one.logprobs);
  if (sample.index == 0) {
    event.prompt_logprobs = std::move(job.prompt_places);
    job.prompt_places.clear();
    sample.adopts = true;  // told once
  }
  const bool ends = !request.ignore_eos && model->tokenizer().ends_generation(token);
  const bool stops =
      std::find(request.stop_tokens.begin(), request.stop_tokens.end(), token) != request.stop_tokens.end();
  if (ends || stops || output.text.stopped()) {
    event.finish = FinishReason::stop;
  } else if (output.num_generated >= request.max_tokens ||
             sample.tokens.size() >= static_cast<std::size_t>(model->config().context)) {
    event.finish = FinishReason::length;
  }
  if (!event.finish) {
    events.push_back(std::move(event));
    return;
  }
  const std::unique_ptr<Sample> done = scheduler.remove(sample);
  finish(done->request, done->index, std::move(event), events);
}

/// Last event of a sample: adds the text held back, and forgets the sample.
void Engine::Impl::finish(RequestId id, int index, Event event, std::vector<Event>& events) {
  const auto job = jobs.find(id);
  const auto output = job->second.outputs.find(index);
  event.request = id;
  event.sample = index;
  event.text += output->second.text.finish();
  event.held_bytes = output->second.text.held();
  job->second.outputs.erase(output);
  if (job->second.outputs.empty()) jobs.erase(job);
  events.push_back(std::move(event));
}

/// Ends a sample, and those that would have been forked from it, with an error.
void Engine::Impl::fail(std::unique_ptr<Sample> sample, const Error& error, std::vector<Event>& events) {
  for (int index = sample->index; index <= sample->index + sample->num_forks; ++index) {
    Event event;
    event.finish = FinishReason::error;
    event.error = error.what();
    event.error_code = error.code();
    finish(sample->request, index, std::move(event), events);
  }
}

void Engine::Impl::fail_batch(const Error& error, std::vector<Event>& events) {
  for (const ScheduledSample& scheduled : batch.samples) fail(scheduler.remove(*scheduled.sample), error, events);
}

void Engine::Impl::record(double step_seconds) {
  const std::int64_t layers = model->config().num_layers;
  last.decode_rows = batch.decode_rows;
  last.prefill_rows = batch.prefill_rows;
  last.num_requests = static_cast<int>(batch.samples.size());
  last.preempted = batch.num_preempted;
  last.step_seconds = step_seconds;
  ++sums.steps;
  sums.preemptions += batch.num_preempted;
  sums.cached_prompt_tokens = scheduler.prefix_cache_stats().tokens_hit;
  sums.step_seconds += step_seconds;
  if (batch.samples.empty()) return;
  const ForwardStats& forward = runner.stats();
  last.plan = planner.last().stats();
  last.path = forward.path;
  last.cascade_error = forward.cascade_error;
  last.isa = forward.isa;
  last.kv_bytes_read = forward.kv_bytes_read;
  last.kv_bytes_flat = last.plan.kv_bytes_flat * layers;
  last.kv_bytes_unique = last.plan.kv_bytes_unique * layers;
  last.attention_seconds = forward.attention_seconds;
  last.append_seconds = forward.append_seconds;
  last.product_seconds = forward.product_seconds;
  sums.cascade_steps += forward.path == Path::cascade ? 1 : 0;
  sums.cascade_failures += forward.cascade_error.empty() ? 0 : 1;
  sums.computed_tokens += batch.prefill_rows;
  sums.kv_bytes_read += last.kv_bytes_read;
  sums.kv_bytes_flat += last.kv_bytes_flat;
  sums.kv_bytes_unique += last.kv_bytes_unique;
  sums.attention_seconds += last.attention_seconds;
}

Engine::Engine(std::shared_ptr<const Model> model, const EngineOptions& options)
    : impl_(std::make_unique<Impl>(std::move(model), options)) {}

Engine::~Engine() = default;

RequestId Engine::submit(Request request) {
  return impl_->submit(std::move(request));
}
bool Engine::cancel(RequestId request) {
  return impl_->cancel(request);
}

void Engine::cancel_all() {
  while (!impl_->jobs.empty()) impl_->cancel(impl_->jobs.begin()->first);
}

bool Engine::has_work() const noexcept {
  return !impl_->jobs.empty() || !impl_->pending.empty();
}

std::vector<Event> Engine::step() {
  std::vector<Event> events;
  impl_->step(events);
  return events;
}

const Plan& Engine::last_plan() const noexcept {
  return impl_->planner.last();
}
const StepStats& Engine::last_step() const noexcept {
  return impl_->last;
}
std::span<const StepRequest> Engine::last_requests() const noexcept {
  return impl_->requests;
}
const EngineStats& Engine::stats() const noexcept {
  return impl_->sums;
}
PrefixCacheStats Engine::prefix_cache_stats() const noexcept {
  return impl_->scheduler.prefix_cache_stats();
}
const Model& Engine::model() const noexcept {
  return *impl_->model;
}
const EngineOptions& Engine::options() const noexcept {
  return impl_->options;
}
std::int64_t Engine::num_pages() const noexcept {
  return impl_->num_pages;
}
std::int64_t Engine::num_free_pages() const noexcept {
  return impl_->scheduler.pool().num_free();
}
std::int64_t Engine::num_idle_cached_pages() const {
  return impl_->scheduler.num_idle_cached_pages();
}
void Engine::audit() const {
  impl_->scheduler.audit();
}

Progress Engine::progress() const noexcept {
  Progress progress;
  const auto add = [&](const Sample& sample) {
    progress.prompt_tokens_total += sample.prompt_len;
    progress.prompt_tokens_done += std::min(sample.computed, sample.prompt_len);
  };
  for (const auto& sample : impl_->scheduler.running()) add(*sample);
  for (const auto& sample : impl_->scheduler.waiting()) add(*sample);
  progress.samples_running = static_cast<int>(impl_->scheduler.running().size());
  progress.samples_waiting = static_cast<int>(impl_->scheduler.waiting().size());
  return progress;
}

}  // namespace headwater::engine
