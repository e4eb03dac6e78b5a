// What the subcommands share: exit codes, how a subcommand is registered, and flags that several of them have.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "headwater/headwater.h"

namespace CLI {
class App;
}

namespace headwater::cli {

/// Exit codes; docs/commands.md documents them.
enum ExitCode : int {
  kOk = 0,
  kFailed = 1,         ///< a run, a proof or a gate failed
  kUsage = 2,          ///< an unknown flag or a value that a flag does not take
  kBadInput = 3,       ///< a file, workload, table, model or prompt that cannot be used
  kUnsupported = 4,    ///< well formed, but this machine or build cannot do it
  kInterrupted = 130,  ///< Ctrl-C
};

/// Set by a subcommand's callback; main runs it after parsing.
using Action = std::function<int()>;

void add_generate(CLI::App& app, Action& action);
void add_serve(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_bench_serving(CLI::App& app, Action& action);
void add_explain(CLI::App& app, Action& action);
void add_calibrate(CLI::App& app, Action& action);

/// Thrown between pieces of work after Ctrl-C.
struct Interrupted {};
/// From here on Ctrl-C only sets a flag; a second one ends the program at once.
void catch_interrupts();
[[nodiscard]] bool interrupted() noexcept;
void throw_if_interrupted();

/// Checks of a flag's value, for CLI11: empty, or what is wrong. A value that a flag does not take is wrong usage.
[[nodiscard]] std::string check_policy(const std::string& text);
[[nodiscard]] std::string check_dtype(const std::string& text);
[[nodiscard]] std::string check_isa(const std::string& text);

/// --heads, --q-heads, --kv-heads, --head-dim, --page-size, --dtype, --kv-dtype: raw texts and numbers as given.
struct ShapeFlags {
  std::string heads;  ///< "32/8"
  int q_heads = 0;
  int kv_heads = 0;
  std::string head_dim;  ///< "128" or "576:512"
  int page_size = 0;
  std::string dtype;
  std::string kv_dtype;

  void add_to(CLI::App& command);
  /// Overrides of `shape` and `page_size`.
  void apply(AttentionShape& shape, int& page_size_out) const;
};

/// --policy, --cascade, --min-shared-pages, --min-members. A flag beats the variable of the same meaning, a variable
/// beats the default; a policy by flag also beats a switch by variable.
struct PlanFlags {
  std::string policy;
  std::string cascade;
  int min_shared_pages = 0;
  int min_members = 0;

  void add_to(CLI::App& command);
  /// Only the thresholds: for `bench`, which has several policies.
  void add_thresholds_to(CLI::App& command);
  void apply(PlanOptions& options) const;
};
/// The default options with the environment's variables applied.
[[nodiscard]] PlanOptions plan_options_from_environment();

/// The device model: the file given by --device-model ("default": the shipped one), else the calibration cache, else
/// the shipped defaults. `source` says which.
[[nodiscard]] DeviceModel load_device_model(const std::string& path, std::string& source);
/// The same for the CUDA device: a file, else device_model_cuda.json in the cache folder, else none (the library's
/// own). Constants of one KV head of 128, as `calibrate --device cuda` writes them.
[[nodiscard]] std::optional<DeviceModel> load_cuda_model(const std::string& path, std::string& source);
/// $HEADWATER_CACHE, or ~/.cache/headwater; empty where neither that nor HOME is set.
[[nodiscard]] std::string cache_folder();
/// device_model.json, or device_model_cuda.json, in the cache folder; empty without one.
[[nodiscard]] std::string default_device_model_path(bool cuda = false);
/// Processor name and instruction set, for reports.
[[nodiscard]] std::string machine_name();
/// Writes a whole file; Error(io) names it. "-" is standard output.
void write_file(const std::string& path, const std::string& text);

/// A bar on standard error, if that is a terminal; else nothing.
class ProgressBar {
 public:
  explicit ProgressBar(bool wanted = true);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  void show(double fraction, const std::string& text);
  /// Removes the bar, so that other output can be printed.
  void clear();

 private:
  bool enabled_;
  bool drawn_ = false;
  double last_ = -1;
};

}  // namespace headwater::cli
