// `headwater bench`: flags, what to measure, where results go. The measuring is in bench/.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>

#include "bench/cpu_processor.h"
#include "bench/cuda_processor.h"
#include "bench/plot.h"
#include "bench/replay.h"
#include "bench/report.h"
#include "bench/suites.h"
#include "cli/command.h"
#include "cli/formats.h"

namespace headwater::cli {
namespace {

struct BenchFlags {
  std::vector<std::string> workloads;
  std::vector<std::int64_t> shared;
  std::vector<std::int64_t> batches;
  std::int64_t tail = 256;
  std::vector<std::string> trees;
  std::vector<std::string> traces;
  std::vector<std::string> cells;
  std::string suite;
  double max_limit_ratio = 0;
  double max_cell_ratio = 0;
  ShapeFlags shape;
  bool mla = false;
  std::string layout = "hnd";
  std::vector<std::string> policies;
  PlanFlags plan;  ///< thresholds only
  std::string device = "cpu";
  int threads = 0;
  std::string isa;
  bool invariant = false;
  int steps = 20;
  int warmup = 3;
  int reps = 5;
  double cell_seconds = 20;
  bool no_overhead_gate = false;
  int max_trees = 20;
  int tree_steps = 4;
  int snapshots = 50;
  std::vector<double> rates = {1, 16};
  std::string csv;
  std::string json;
  std::string plot;
  std::string device_model;
  std::uint64_t seed = 1;
  bool quiet = false;
};

/// Collects results and prints them.
class BenchRun {
 public:
  explicit BenchRun(const BenchFlags& flags);
  int run();

 private:
  bench::Harness& harness(Isa isa);
  void measure(const bench::Workload& workload, const bench::BenchConfig& config, Isa isa);
  void overhead(const bench::Workload& workload, const bench::BenchConfig& config);
  void replay(const std::string& name, const std::vector<bench::ReplayStep>& steps, bench::BenchConfig config);
  void run_suite();
  void judge(const bench::SuiteGroup& group, const std::vector<bench::CellResult>& cells);
  void judge_policies(const bench::CellResult& cell);
  void judge_feature(const bench::CellResult& cell, const bench::CellResult& base, double bound);
  void judge_limits(const std::string& name, double mean, double worst, int throttled_kept, double mean_bound,
                    double cell_bound);
  void judge_limits(const std::string& name, const std::vector<bench::CellResult>& cells, double mean_bound,
                    double cell_bound);
  void note(const std::string& line);
  void gate(bench::Verdict verdict, const std::string& line);
  void gate(const bench::Gate& gate, const std::string& line);
  void write_results();
  [[nodiscard]] bool machine_output_on_stdout() const { return flags_.csv == "-" || flags_.json == "-"; }

  BenchFlags flags_;
  bool cuda_;
  bench::BenchConfig config_;
  std::string model_source_;
  ThreadPool pool_;
  ProgressBar bar_;
  std::string label_;
  double done_ = 0;  ///< cells finished, for the bar
  double unit_ = 1;  ///< what the cell under way counts
  double total_ = 1;
  std::unique_ptr<bench::Harness> harness_;
  Isa harness_isa_ = Isa::scalar;
  std::vector<bench::CellResult> cells_;
  nlohmann::ordered_json json_ = nlohmann::ordered_json::array();
  bool failed_ = false;
};

BenchRun::BenchRun(const BenchFlags& flags)
    : flags_(flags), cuda_(flags.device == "cuda"), pool_(cuda_ ? 1 : flags.threads), bar_(!flags.quiet) {
  flags_.shape.apply(config_.shape, config_.page_size);
  if (flags_.mla) {
    config_.mla = true;
    if (flags_.shape.heads.empty() && flags_.shape.kv_heads == 0) config_.shape.num_kv_heads = 1;
    if (flags_.shape.heads.empty() && flags_.shape.q_heads == 0) config_.shape.num_qo_heads = 16;
    if (flags_.shape.head_dim.empty()) {
      config_.shape.head_dim_qk = 576;
      config_.shape.head_dim_vo = 512;
    }
  }
  config_.layout = flags_.layout == "nhd" ? bench::Layout::nhd : bench::Layout::hnd;
  config_.plan = plan_options_from_environment();
  flags_.plan.apply(config_.plan);
  // Policies that are named, or a suite's own, beat a switch by variable.
  if (!flags_.policies.empty() || !flags_.suite.empty()) config_.plan.cascade = CascadeSwitch::automatic;
  config_.batch_invariant = flags_.invariant;
  config_.steps = flags_.steps;
  config_.warmup = flags_.warmup;
  config_.reps = flags_.reps;
  config_.cell_seconds = flags_.cell_seconds;
  config_.seed = flags_.seed;
  if (!cuda_) config_.model = load_device_model(flags_.device_model, model_source_);
  if (!flags_.isa.empty()) config_.isa = parse_isa(flags_.isa, "--isa");
  if (config_.isa && *config_.isa > cpu::detect_isa()) {
    throw Error(ErrorCode::unsupported,
                fmt::format("--isa: this processor has {}, not {}", name_of(cpu::detect_isa()), flags_.isa));
  }
  if (!flags_.policies.empty()) {
    config_.policies.clear();
    for (const std::string& name : flags_.policies) config_.policies.push_back(parse_policy(name, "--policy"));
  }
}

/// The CPU's at a level, or the device's, whatever the level.
bench::Harness& BenchRun::harness(Isa isa) {
  if (cuda_) isa = Isa::scalar;
  if (!harness_ || harness_isa_ != isa) {
    std::unique_ptr<bench::Processor> processor;
    if (cuda_) {
      processor = bench::make_cuda_processor(load_cuda_model(flags_.device_model, model_source_));
    } else {
      processor = bench::make_cpu_processor(pool_, isa);
    }
    harness_ = std::make_unique<bench::Harness>(std::move(processor), [this](double fraction) {
      throw_if_interrupted();
      bar_.show((done_ + fraction * unit_) / total_, label_);
    });
    harness_isa_ = isa;
    note(fmt::format("{}: {}; model: {}", cuda_ ? bench::cuda_device_name() : machine_name(),
                     harness_->processor().describe(), model_source_));
  }
  return *harness_;
}

/// Remarks belong beside the results, but not among machine-readable ones.
void BenchRun::note(const std::string& line) {
  bar_.clear();
  fmt::print(machine_output_on_stdout() ? stderr : stdout, "{}\n", line);
}

void BenchRun::gate(bench::Verdict verdict, const std::string& line) {
  failed_ = failed_ || verdict == bench::Verdict::missed;
  const char* const word = verdict == bench::Verdict::passed   ? "ok"
                           : verdict == bench::Verdict::missed ? "MISSED"
                                                               : "NOT JUDGED";
  note(fmt::format("{:<10} {}", word, line));
}

void BenchRun::gate(const bench::Gate& gate, const std::string& line) {
  json_.push_back(bench::to_json(gate));
  this->gate(gate.verdict, line);
}

void BenchRun::measure(const bench::Workload& workload, const bench::BenchConfig& config, Isa isa) {
  throw_if_interrupted();
  label_ = workload.name;
  bar_.show(done_ / total_, label_);
  cells_.push_back(harness(isa).run(workload, config));
  bench::append_json(json_, cells_.back());
  done_ += 1;
}

void BenchRun::overhead(const bench::Workload& workload, const bench::BenchConfig& config) {
  throw_if_interrupted();
  label_ = "overhead gate, " + workload.name;
  const bench::OverheadResult result = harness(config.isa.value_or(cpu::default_isa())).overhead(workload, config);
  json_.push_back(bench::to_json(result));
  done_ += 1;
  gate(result.verdict(),
       fmt::format("overhead, nothing shared, {} requests of {}: flat {}, planning {:.1f} us warm ({:.2f} %), {:.1f} "
                   "us cold; (flat + planning) / flat {:.4f} [{:.4f}, {:.4f}] in {} pairs; {}",
                   result.batch, result.workload, bench::human_us(result.flat_us), result.plan_warm_us,
                   100 * result.plan_warm_us / result.flat_us, result.plan_cold_us, result.ratio.middle,
                   result.ratio.low, result.ratio.high, result.pairs,
                   result.same_plan ? "the plan is flat's, byte for byte" : "THE PLAN DIFFERS FROM FLAT'S"));
}

void BenchRun::replay(const std::string& name, const std::vector<bench::ReplayStep>& steps, bench::BenchConfig config) {
  // Flat comes first: it is what the others must not be slower than.
  const auto flat = std::ranges::find(config.policies, Policy::flat);
  if (flat != config.policies.begin()) {
    note(fmt::format("{}: flat is {} as the base", name, flat == config.policies.end() ? "added" : "put first"));
    if (flat != config.policies.end()) config.policies.erase(flat);
    config.policies.insert(config.policies.begin(), Policy::flat);
  }
  config.error_rows = std::min(config.error_rows, 1);
  label_ = name;
  const double start = done_;
  unit_ = 1 / std::max(static_cast<double>(steps.size()), 1.0);
  const std::vector<bench::ReplaySummary> summaries = bench::replay(
      harness(config.isa.value_or(cpu::default_isa())), name, steps, config,
      [&](const bench::CellResult& cell) { bench::append_json(json_, cell); },
      [&](double fraction) {
        done_ = start + fraction;
        throw_if_interrupted();
      });
  done_ = start + 1;
  unit_ = 1;
  for (const bench::ReplaySummary& summary : summaries) {
    json_.push_back(bench::to_json(summary));
    gate(summary.verdict(),
         fmt::format(
             "{}, {}: {} steps, {:.1f} requests on average; {} KV read of {} flat ({:.1f}x less), {} distinct; "
             "x limit {:.2f} (worst {:.2f}); speed-up {:.2f} (of total time {:.2f}); time / flat {:.3f} [{:.3f}, "
             "{:.3f}] in {} pairs; {} plans are flat's; {} samples dropped",
             name, name_of(summary.policy), summary.steps, summary.mean_requests,
             bench::human_bytes(summary.bytes_read), bench::human_bytes(summary.bytes_flat),
             summary.bytes_read > 0 ? summary.bytes_flat / summary.bytes_read : 0,
             bench::human_bytes(summary.bytes_unique), summary.times_limit, summary.worst_times_limit, summary.speedup,
             summary.total_speedup, summary.pair_ratio.middle, summary.pair_ratio.low, summary.pair_ratio.high,
             summary.pairs, summary.identical_plans, bench::dropped_text(summary.dropped, summary.throttled_kept)));
    judge_limits(fmt::format("{}, {}", name, name_of(summary.policy)), summary.times_limit, summary.worst_times_limit,
                 summary.throttled_kept, flags_.max_limit_ratio, flags_.max_cell_ratio);
  }
}

void BenchRun::judge_limits(const std::string& name, double mean, double worst, int throttled_kept, double mean_bound,
                            double cell_bound) {
  const auto judge_one = [&](const char* gate_name, const char* words, double value, double bound) {
    if (bound <= 0) return;
    const bench::Verdict verdict = throttled_kept > 0 ? bench::Verdict::not_judged
                                   : value <= bound   ? bench::Verdict::passed
                                                      : bench::Verdict::missed;
    gate(bench::Gate{name, gate_name, {value, value, value}, bound, verdict},
         fmt::format(
             "{}: {} {:.2f}x the limit (bound {:g}){}", name, words, value, bound,
             throttled_kept > 0 ? fmt::format(", with {} samples at less than full speed", throttled_kept) : ""));
  };
  judge_one("limit_mean", "geometric mean", mean, mean_bound);
  judge_one("limit_cell", "worst cell", worst, cell_bound);
}

void BenchRun::judge_limits(const std::string& name, const std::vector<bench::CellResult>& cells, double mean_bound,
                            double cell_bound) {
  std::vector<double> limits;
  int throttled_kept = 0;
  for (const bench::CellResult& cell : cells) {
    limits.push_back(cell.arms.back().times_limit);
    throttled_kept += cell.throttled_kept;
  }
  if (limits.empty()) return;
  judge_limits(name, bench::geometric_mean(limits), *std::ranges::max_element(limits), throttled_kept, mean_bound,
               cell_bound);
}

void BenchRun::judge(const bench::SuiteGroup& group, const std::vector<bench::CellResult>& cells) {
  judge_limits(group.name, cells, flags_.max_limit_ratio > 0 ? flags_.max_limit_ratio : group.mean_bound,
               flags_.max_cell_ratio > 0 ? flags_.max_cell_ratio : group.cell_bound);
  for (const bench::CellResult& cell : cells) {
    if (group.speedup_bound > 0) {
      const bench::ArmResult& arm = cell.arms.back();
      const bench::Interval& s = arm.speedup;
      gate({cell.workload, "speedup", s, group.speedup_bound,
            bench::verdict_of_pairs(arm.samples_us.size(), s.high >= group.speedup_bound)},
           fmt::format("{}: {} over flat {:.2f} [{:.2f}, {:.2f}] in {} pairs (bound {:.1f})", cell.workload,
                       name_of(arm.policy), s.middle, s.low, s.high, arm.samples_us.size(), group.speedup_bound));
    }
    if (group.never_slower) judge_policies(cell);
    if (group.feature_bound > 0) judge_feature(cell, cells.front(), group.feature_bound);
  }
}

/// Time over limit against that of the base, which has the same limit.
void BenchRun::judge_feature(const bench::CellResult& cell, const bench::CellResult& base, double bound) {
  const double ratio = cell.arms.back().times_limit / base.arms.back().times_limit;
  const bench::Verdict verdict = cell.throttled_kept + base.throttled_kept > 0 ? bench::Verdict::not_judged
                                 : ratio <= bound                              ? bench::Verdict::passed
                                                                               : bench::Verdict::missed;
  gate({cell.workload, "feature", {ratio, ratio, ratio}, bound, verdict},
       fmt::format("{}: {} at a limit of {}, {:.2f}x the base (bound {:g})", cell.workload,
                   bench::human_us(cell.arms.back().median_us), bench::human_us(cell.arms.back().limit_us), ratio,
                   bound));
}

/// auto against flat within 2 %, against the best policy within 5 %.
void BenchRun::judge_policies(const bench::CellResult& cell) {
  const bench::ArmResult& automatic = *std::ranges::find(cell.arms, Policy::automatic, &bench::ArmResult::policy);
  const std::size_t pairs = automatic.samples_us.size();
  const std::string name = fmt::format("{} {}/{}", cell.workload, cell.shape.num_qo_heads, cell.shape.num_kv_heads);
  const auto judge_one = [&](const char* gate_name, const bench::ArmResult& other, bool same_plan, double bound) {
    const bench::Interval ratio = bench::pair_ratio(automatic.samples_us, other.samples_us);
    const bench::Verdict verdict =
        same_plan ? bench::Verdict::passed : bench::verdict_of_pairs(pairs, ratio.low <= bound);
    gate({name, gate_name, ratio, bound, verdict},
         fmt::format("{}: auto / {} {:.3f} [{:.3f}, {:.3f}]{} (bound {:g})", name, name_of(other.policy), ratio.middle,
                     ratio.low, ratio.high, same_plan ? ", same plan" : fmt::format(" in {} pairs", pairs), bound));
  };
  judge_one("never_slower_than_flat", cell.arms.front(), automatic.same_plan_as_first(), 1.02);
  const bench::ArmResult& best = *std::ranges::min_element(cell.arms, {}, &bench::ArmResult::median_us);
  judge_one("near_the_best_policy", best, best.same_plan_as == automatic.same_plan_as, 1.05);
}

void BenchRun::run_suite() {
  bench::BenchConfig base = config_;
  if (flags_.policies.empty()) base.policies = {Policy::automatic};
  std::vector<bench::SuiteGroup> groups = bench::find_suite(flags_.suite, base, cuda_);
  total_ = 0;
  for (const bench::SuiteGroup& group : groups) total_ += static_cast<double>(group.workloads.size());
  for (const bench::SuiteGroup& group : groups) {
    note(fmt::format("\n== {}: {}", group.name, group.what));
    const std::size_t first = cells_.size();
    for (const bench::Workload& workload : group.workloads) {
      try {
        measure(workload, group.config, group.isa.value_or(config_.isa.value_or(cpu::default_isa())));
      } catch (const Error& error) {  // a feature for which this build has no kernel
        if (group.feature_bound == 0 || error.code() != ErrorCode::unsupported || cells_.size() == first) throw;
        gate({workload.name, "feature", {}, group.feature_bound, bench::Verdict::not_judged},
             fmt::format("{}: not run: {}", workload.name, error.what()));
      }
    }
    bench::TextTable table = bench::cell_table(cuda_);
    const std::vector<bench::CellResult> cells(cells_.begin() + static_cast<std::ptrdiff_t>(first), cells_.end());
    for (const bench::CellResult& cell : cells) bench::add_rows(table, cell);
    note(table.text());
    judge(group, cells);
  }
}

int BenchRun::run() {
  if (!flags_.suite.empty()) {
    run_suite();
    write_results();
    return failed_ ? kFailed : kOk;
  }
  std::vector<bench::Workload> workloads;
  for (const std::string& name : flags_.workloads) {
    for (bench::Workload& workload : bench::find_workloads(name)) workloads.push_back(std::move(workload));
  }
  for (const std::string& path : flags_.cells) {
    for (bench::Workload& workload : parse_cells(read_file(path), path)) workloads.push_back(std::move(workload));
  }
  for (const std::int64_t shared : flags_.shared) {
    for (const std::int64_t batch : flags_.batches) {
      bench::Workload workload;
      workload.name = fmt::format("1,{}|{},{}", batch, shared, flags_.tail);
      workload.forest = bench::two_level(shared, batch, flags_.tail);
      workloads.push_back(std::move(workload));
    }
  }
  if (!flags_.shape.heads.empty() || flags_.shape.q_heads > 0 || flags_.shape.kv_heads > 0 ||
      !flags_.shape.head_dim.empty() || flags_.shape.page_size > 0 || flags_.mla) {
    for (bench::Workload& workload : workloads) {  // flags win over what a named set asks for
      if (!flags_.shape.heads.empty() || flags_.shape.q_heads > 0 || flags_.shape.kv_heads > 0 || flags_.mla)
        workload.num_qo_heads = workload.num_kv_heads = 0;
      if (!flags_.shape.head_dim.empty() || flags_.mla) workload.head_dim = 0;
      if (flags_.shape.page_size > 0) workload.page_size = 0;
    }
  }
  // On a device, plans are made while it works, once for all layers: they add nothing to a layer's time.
  const bool gate_wanted = !flags_.no_overhead_gate && !workloads.empty() && !cuda_;
  const double rates = static_cast<double>(flags_.traces.size() * flags_.rates.size());
  total_ = static_cast<double>(workloads.size() * (gate_wanted ? 2 : 1) + flags_.trees.size()) + rates;
  const Isa isa = config_.isa.value_or(cpu::default_isa());
  for (const bench::Workload& workload : workloads) measure(workload, config_, isa);
  if (!cells_.empty()) {
    bench::TextTable table = bench::cell_table(cuda_);
    for (const bench::CellResult& cell : cells_) bench::add_rows(table, cell);
    note(table.text());
  }
  judge_limits("all cells", cells_, flags_.max_limit_ratio, flags_.max_cell_ratio);
  if (gate_wanted) {
    for (const bench::Workload& workload : workloads) overhead(workload, config_);
  }
  for (const std::string& path : flags_.trees) {
    const auto steps = bench::steps_of_trees(parse_trees(read_file(path), path), flags_.max_trees, flags_.tree_steps);
    replay(std::filesystem::path(path).stem().string(), steps, config_);
  }
  for (const std::string& path : flags_.traces) {
    const Trace trace = parse_trace(read_file(path), path);
    for (const double rate : flags_.rates) {
      replay(fmt::format("{} at {:g}x", std::filesystem::path(path).stem().string(), rate),
             bench::steps_of_trace(trace, flags_.snapshots, rate), config_);
    }
  }
  write_results();
  return failed_ ? kFailed : kOk;
}

void BenchRun::write_results() {
  bar_.clear();
  if (!flags_.json.empty()) write_file(flags_.json, bench::lines_of(json_));
  if (!flags_.csv.empty()) write_file(flags_.csv, bench::csv_of(json_));
  if (!flags_.plot.empty())
    write_file(flags_.plot, bench::plot_svg(cells_, cuda_ ? "One attention call, " + bench::cuda_device_name()
                                                          : fmt::format("One attention call, {} threads, {}",
                                                                        pool_.num_workers(), name_of(harness_isa_))));
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App& command = *app.add_subcommand(
      "bench", "Measure attention calls: policies against each other and against the machine's limits");
  command
      .add_option("-w,--workload", flags->workloads,
                  "workload in notation or by name; may be repeated; default: three small ones")
      ->allow_extra_args(false);
  command.add_option("--shared", flags->shared, "sweep: shared tokens, 2048,8192")
      ->delimiter(',')
      ->check(CLI::PositiveNumber)
      ->allow_extra_args(false);
  command.add_option("--batches", flags->batches, "sweep: requests, 4,8")
      ->delimiter(',')
      ->check(CLI::PositiveNumber)
      ->allow_extra_args(false);
  command.add_option("--tail", flags->tail, "sweep: own tokens of each request")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command.add_option("--trees", flags->trees, "replay a tree file (JSON Lines); may be repeated")
      ->allow_extra_args(false);
  command.add_option("--trace", flags->traces, "replay a trace (JSON Lines or CSV) by arrival time; may be repeated")
      ->allow_extra_args(false);
  command
      .add_option(
          "--cells", flags->cells,
          "cells from a file, a line each: name, query heads, KV heads, head size, number of nodes, then parent "
          "(-1: a root) and tokens of each node; may be repeated")
      ->allow_extra_args(false);
  command.add_option(
      "--suite", flags->suite,
      "a fixed list of cells with bounds: cells (hnd, nhd, fp32), isa (avx2, fp16, mla), cascade, policies, features");
  command
      .add_option("--max-limit-ratio", flags->max_limit_ratio,
                  "gate: geometric mean of `x limit` of the last policy, over the cells or the steps of a replay")
      ->check(CLI::PositiveNumber);
  command.add_option("--max-cell-ratio", flags->max_cell_ratio, "gate: `x limit` of every cell or step")
      ->check(CLI::PositiveNumber);
  flags->shape.add_to(command);
  command.add_flag("--mla", flags->mla, "V is a view of K (default then: heads 16/1, 576:512)");
  command.add_option("--layout", flags->layout, "memory order of a page")
      ->check(CLI::IsMember({"nhd", "hnd"}))
      ->capture_default_str();
  command
      .add_option("--policy", flags->policies,
                  "policies to compare, the first is the base (replays: always flat); default flat,auto")
      ->delimiter(',')
      ->check(check_policy)
      ->allow_extra_args(false);
  flags->plan.add_thresholds_to(command);
  command.add_option("--device", flags->device, "where attention runs; cuda: by graph replay, in a build that has it")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command.add_option("--threads", flags->threads, "workers; 0: all processors that this process may use")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command.add_option("--isa", flags->isa, "force scalar, avx2, avx512 or avx512_bf16")->check(check_isa);
  command.add_flag("--invariant", flags->invariant, "batch-invariant mode");
  command.add_option("--steps", flags->steps, "timed steps in a repetition")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command.add_option("--warmup", flags->warmup, "untimed steps before")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command.add_option("--reps", flags->reps, "repetitions")->check(CLI::PositiveNumber)->capture_default_str();
  command.add_option("--cell-seconds", flags->cell_seconds, "stop a cell early after this long")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command.add_flag("--no-overhead-gate", flags->no_overhead_gate, "skip the gate on planning where nothing is shared");
  command.add_option("--max-trees", flags->max_trees, "trees of a file")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command.add_option("--tree-steps", flags->tree_steps, "decode steps of a tree")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command.add_option("--snapshots", flags->snapshots, "moments of a trace")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command.add_option("--rates", flags->rates, "speeds of a trace's arrivals")
      ->delimiter(',')
      ->check(CLI::PositiveNumber)
      ->allow_extra_args(false);
  command
      .add_option("--json", flags->json,
                  "write results as JSON, one object a cell and policy; without FILE to standard output")
      ->expected(0, 1)
      ->default_str("-");
  command.add_option("--csv", flags->csv, "the same as CSV")->expected(0, 1)->default_str("-");
  command.add_option("--plot", flags->plot, "draw the cells as SVG");
  command.add_option("--device-model,--model", flags->device_model,
                     "constants of the cost model: a file, or `default`");
  command.add_option("--seed", flags->seed, "seed of page placement")->capture_default_str();
  command.add_flag("--quiet", flags->quiet, "no progress bar");
  command.footer(
      "Workloads:\n" + bench::describe_workload_names() +
      "\nExamples:\n"
      "  headwater bench --workload '1,64|8192,256' --heads 32/8 --head-dim 128 --page-size 16 --dtype bf16\n"
      "  headwater bench --shared 2048,8192 --batches 4,8 --tail 256 --steps 200 --warmup 40 --reps 5 --q-heads 32 "
      "--kv-heads 8\n"
      "  headwater bench --workload fasttree --policy flat,auto,forest --json results.json --plot results.svg\n"
      "  headwater bench --trees trees.jsonl --trace trace.jsonl --rates 1,16\n"
      "  headwater bench --suite cells\n"
      "  headwater bench --device cuda --workload '1,64|8192,256' --heads 32/8 --head-dim 128 --dtype f16\n"
      "  headwater bench --device cuda --cells cells.txt --policy flat,auto,forest --csv results.csv\n\n"
      "Environment: HEADWATER_CASCADE_ATTENTION (where neither --policy nor --suite is given), "
      "HEADWATER_CASCADE_MIN_SHARED_PAGES (--min-shared-pages), HEADWATER_CASCADE_MIN_MEMBERS (--min-members); flags "
      "win.\n"
      "Exit codes: 0 done, 1 a proof or a gate failed, 2 wrong usage, 3 unusable input, 4 not supported here, 130 "
      "interrupted.");
  command.callback([flags, &action] {
    const bool sweep = !flags->shared.empty() || !flags->batches.empty();
    if (sweep && (flags->shared.empty() || flags->batches.empty()))
      throw CLI::ValidationError("--shared and --batches", "give both");
    if ((!flags->trees.empty() || !flags->traces.empty()) && flags->policies == std::vector<std::string>{"flat"})
      throw CLI::ValidationError("--policy", "a replay compares with flat; name another policy");
    if (flags->device == "cuda" && (flags->threads > 0 || !flags->isa.empty()))
      throw CLI::ValidationError("--threads and --isa", "of the CPU, not of --device cuda");
    if (!sweep && flags->workloads.empty() && flags->cells.empty() && flags->trees.empty() && flags->traces.empty() &&
        flags->suite.empty()) {
      flags->workloads = {"1,8|2048,256", "1,8|8192,256", "8|2048"};
    }
    action = [flags] { return BenchRun(*flags).run(); };
  });
}

}  // namespace headwater::cli
