// The offline engine: a model, a KV cache and a batch of requests, advanced one step at a time.
//
//   auto model = load_model("model.gguf", {});
//   Engine engine(model, {});
//   engine.submit({.prompt = model->tokenizer().encode("..."), .max_tokens = 64});
//   while (engine.has_work()) for (const Event& event : engine.step()) ...;
//
// A step is: scheduler (which rows) -> runner (KV slots, embedding) -> plan (once) -> per layer: append KV, attention
// -> logits -> sampler. Several engines may use one model, one at a time; the engine is not thread safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/request.h"
#include "headwater/device_model.h"
#include "headwater/options.h"
#include "headwater/plan.h"
#include "headwater/prefix_cache.h"
#include "headwater/types.h"

namespace headwater::engine {

class Model;  // engine/model.h: config(), tokenizer(), gguf()

/// Type in which the matrices are kept in memory.
enum class WeightType : std::uint8_t {
  automatic,  ///< bf16 where the processor has AVX-512, else f32
  f32,
  bf16,
};

struct ModelOptions {
  WeightType weights = WeightType::automatic;
  int num_threads = 0;  ///< workers of products and attention alike; 0: the processors of the affinity mask
  std::function<void(double fraction)> progress;  ///< called while matrices are unpacked, 0..1
};

/// Reads a GGUF file of the Llama family. Throws Error (io, unsupported) naming the file and the place.
[[nodiscard]] std::shared_ptr<const Model> load_model(const std::string& path, const ModelOptions& options);

struct EngineOptions {
  DType kv_dtype = DType::bf16;       ///< bf16, f16 or f32
  int page_size = 16;                 ///< tokens per KV page
  std::int64_t kv_bytes = 256 << 20;  ///< size of the KV pool; memory is touched as pages are first used
  std::int64_t num_pages = 0;         ///< overrides kv_bytes; 0: as many as fit
  int max_step_tokens = 512;          ///< token budget of a step: decode rows first, then prompt chunks
  int max_batch = 256;                ///< samples in progress at once; others queue
  bool prefix_cache = true;           ///< adopt pages of prompts seen before
  PlanOptions plan;                   ///< policy, cascade switch, batch_invariant; mask fields are the model's
  DeviceModel device = DeviceModel::default_cpu();
  std::optional<Isa> isa;  ///< force an attention kernel; default: the best
  /// For tests: true lets the cascade launch of that layer of that step fail.
  std::function<bool(std::int64_t step, int layer)> inject_cascade_failure;
};

/// What a step did. Bytes of K and V are summed over all layers.
struct StepStats {
  std::int64_t step = 0;  ///< 1, 2, ...
  int decode_rows = 0;    ///< rows that continue a sample
  int prefill_rows = 0;   ///< prompt tokens computed
  int num_requests = 0;   ///< page tables in the plan
  int preempted = 0;      ///< samples sent back to the queue for want of pages
  PlanStats plan;         ///< of one layer
  Path path = Path::flat;
  std::string cascade_error;  ///< not empty: a cascade launch failed and flat ones took its place; path is then flat
  Isa isa = Isa::scalar;
  std::int64_t kv_bytes_read = 0;    ///< read by the executed work items
  std::int64_t kv_bytes_flat = 0;    ///< what flat attention reads
  std::int64_t kv_bytes_unique = 0;  ///< distinct bytes
  double plan_seconds = 0;
  double attention_seconds = 0;  ///< attention runs, appends excluded
  double append_seconds = 0;     ///< writing keys and values into the cache
  double product_seconds = 0;    ///< matrix products
  double forward_seconds = 0;    ///< the whole forward pass: these and the small operations between them
  double sample_seconds = 0;     ///< choosing tokens from logits
  double step_seconds = 0;       ///< everything, sampling included
};

/// A sample's part in a step.
struct StepRequest {
  RequestId request = 0;
  std::uint64_t tag = 0;  ///< Request::tag
  int sample = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t tokens = 0;  ///< that its rows could see
  int rows = 0;             ///< computed in the step
};

/// Sums since the engine was made.
struct EngineStats {
  std::int64_t steps = 0;
  std::int64_t cascade_steps = 0;
  std::int64_t cascade_failures = 0;      ///< steps in which a cascade launch failed
  std::int64_t prompt_tokens = 0;         ///< of accepted requests
  std::int64_t cached_prompt_tokens = 0;  ///< of those, adopted instead of computed
  std::int64_t computed_tokens = 0;       ///< prompt rows computed
  std::int64_t generated_tokens = 0;
  std::int64_t preemptions = 0;
  std::int64_t kv_bytes_read = 0;
  std::int64_t kv_bytes_flat = 0;
  std::int64_t kv_bytes_unique = 0;
  double attention_seconds = 0;
  double step_seconds = 0;
};

/// How far the waiting and running prompts are, for a progress bar.
struct Progress {
  std::int64_t prompt_tokens_done = 0;  ///< computed or adopted, of requests not yet finished
  std::int64_t prompt_tokens_total = 0;
  int samples_running = 0;
  int samples_waiting = 0;
};

class Engine {
 public:
  Engine(std::shared_ptr<const Model> model, const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Queues a request. Throws Error(invalid_argument) naming the field (token ids out of range, empty or too long
  /// prompt, ...), Error(out_of_pages) when the prompt can never fit the pool.
  RequestId submit(Request request);
  /// Ends all samples of a request before the next step; its events come with that step. False: not known.
  bool cancel(RequestId request);
  void cancel_all();

  [[nodiscard]] bool has_work() const noexcept;
  /// Advances every scheduled sample. Errors of one request become its event; others go on.
  std::vector<Event> step();

  /// Plan of the last step: describe() tells what was shared and why.
  [[nodiscard]] const Plan& last_plan() const noexcept;
  [[nodiscard]] const StepStats& last_step() const noexcept;
  /// Who took part in the last step, in the order of the plan's requests.
  [[nodiscard]] std::span<const StepRequest> last_requests() const noexcept;
  [[nodiscard]] const EngineStats& stats() const noexcept;
  /// Each request's lookup is counted once, when it is first admitted.
  [[nodiscard]] PrefixCacheStats prefix_cache_stats() const noexcept;
  [[nodiscard]] Progress progress() const noexcept;
  [[nodiscard]] const Model& model() const noexcept;
  [[nodiscard]] const EngineOptions& options() const noexcept;
  [[nodiscard]] std::int64_t num_pages() const noexcept;
  [[nodiscard]] std::int64_t num_free_pages() const noexcept;
  /// Pages that the prefix cache alone holds: they are given up when others need them.
  [[nodiscard]] std::int64_t num_idle_cached_pages() const;

  /// Recounts all page references; throws Error(internal) naming the first page whose count is off. For tests.
  void audit() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Hooks of run_to_completion; each may be empty.
struct RunHooks {
  std::function<void(const Event&)> on_event;
  std::function<void(const Engine&)> on_step;  ///< after every step: last_step(), progress(), last_plan()
  std::function<bool()> cancelled;             ///< asked between steps; true: every request is cancelled
};

/// Submits all requests and steps until nothing is left. Completions in the order of requests, then samples. A request
/// that submit refuses becomes a completion with FinishReason::error; the others run.
std::vector<Completion> run_to_completion(Engine& engine, std::span<const Request> requests,
                                          const RunHooks& hooks = {});

}  // namespace headwater::engine
