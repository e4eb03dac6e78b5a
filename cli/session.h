// A model with its chat format, and requests made from texts: what `generate` and its demonstration have in common.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "engine/chat_template.h"
#include "engine/engine.h"

namespace headwater::cli {

/// The model and how the engine runs it: flags that `generate` and `serve` share.
struct EngineFlags {
  std::string model;
  std::string chat_template;
  std::string system;
  bool raw = false;
  PlanFlags plan;
  bool batch_invariant = false;
  bool no_prefix_cache = false;
  int threads = 0;
  int page_size = 16;
  std::string kv_dtype = "bf16";
  std::int64_t kv_mib = 256;
  int max_step_tokens = 512;
  std::string isa;
  std::string device_model;

  /// All but --raw.
  void add_to(CLI::App& command);
};

struct GenerateFlags : EngineFlags {
  std::vector<std::string> prompts;
  std::string prompt_file;
  std::string shared_file;
  std::string questions_file;
  int parallel = 1;
  int max_tokens = 128;
  engine::SamplingParams sampling;
  std::vector<std::string> stop;
  bool ignore_eos = false;
  bool explain = false;
  bool json = false;
  bool quiet = false;
  bool no_stats = false;
  bool demo = false;
};

/// A loaded model and how its prompts are written.
struct Session {
  std::shared_ptr<const engine::Model> model;
  std::optional<engine::ChatTemplate> chat;  ///< empty: prompts are used as they are
  std::string system;

  /// The tokens of one prompt: `shared` and `question` in one user message (or, without a chat format, one after the
  /// other).
  [[nodiscard]] std::vector<std::int32_t> tokens_of(const std::string& shared, const std::string& question) const;
};

/// Loads the model (default: SmolLM2-135M-Instruct in the cache folder) with a progress bar.
[[nodiscard]] Session open_session(const EngineFlags& flags, ProgressBar& bar);
/// --model, or the model in the cache folder. Throws Error(io) where neither exists.
[[nodiscard]] std::string model_path(const EngineFlags& flags);
/// Engine options from the flags and, where a flag is absent, the environment.
[[nodiscard]] engine::EngineOptions engine_options(const EngineFlags& flags);
/// Lines that are not blank.
[[nodiscard]] std::vector<std::string> lines_of_file(const std::string& path);

/// The demonstration: every question about one document at once, flat, then cascade.
int run_demo(const GenerateFlags& flags);

}  // namespace headwater::cli
