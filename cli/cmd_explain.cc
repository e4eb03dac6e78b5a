// `headwater explain`: what the planner sees in a batch, what it decides and why, without running anything.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "bench/paged.h"
#include "bench/workloads.h"
#include "cli/command.h"
#include "cli/formats.h"
#include "cli/outcome.h"

namespace headwater::cli {
namespace {

struct ExplainFlags {
  std::string file;
  std::string workload;
  std::string trees;
  std::string trace;
  int tree = 0;
  std::int64_t step = 0;
  double time = 0;
  double rate = 1;
  ShapeFlags shape;
  PlanFlags plan;
  int threads = 0;
  bool invariant = false;
  std::string device_model;
  bool json = false;
};

/// The forest of a workload, a tree's step or a moment of a trace, and its name.
std::pair<std::string, bench::Forest> forest_of(const ExplainFlags& flags) {
  if (!flags.workload.empty()) {
    std::vector<bench::Workload> found = bench::find_workloads(flags.workload);
    if (found.size() != 1)
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("--workload: expected one workload, got the set \"{}\" of {}", flags.workload, found.size()));
    return {"workload " + found.front().name, std::move(found.front().forest)};
  }
  if (!flags.trees.empty()) {
    const std::vector<Tree> trees = parse_trees(read_file(flags.trees), flags.trees);
    if (flags.tree >= static_cast<int>(trees.size())) {
      throw Error(ErrorCode::invalid_argument, fmt::format("--tree: expected 0..{} ({} trees in {}), got {}",
                                                           trees.size() - 1, trees.size(), flags.trees, flags.tree));
    }
    const Tree& tree = trees[static_cast<std::size_t>(flags.tree)];
    bench::Forest forest = tree.at_step(flags.step);
    if (forest.requests.empty()) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("--step: no leaf is live at step {}; tree {} has steps 1..{}", flags.step, flags.tree,
                              tree.last_step()));
    }
    return {fmt::format("{}, tree {}, decode step {}", flags.trees, flags.tree, flags.step), std::move(forest)};
  }
  const Trace trace = parse_trace(read_file(flags.trace), flags.trace);
  bench::Forest forest = trace.at_time(flags.time, flags.rate);
  if (forest.requests.empty()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--time: no request is alive at {} s; the trace's arrivals end at {:.1f} s", flags.time,
                            trace.duration(flags.rate)));
  }
  return {fmt::format("{}, {} s, {:g}x its rate", flags.trace, flags.time, flags.rate), std::move(forest)};
}

int explain(const ExplainFlags& flags) {
  std::string source;
  const DeviceModel model = load_device_model(flags.device_model, source);
  AttentionShape shape;
  PlanOptions options = plan_options_from_environment();
  PageTableFile table;
  bench::PagedForest paged;
  Batch batch;
  std::string name = flags.file;
  if (!flags.file.empty()) {
    const std::string text = read_file(flags.file);
    throw_if_interrupted();  // which also ends the reading of standard input
    table = parse_page_table(text, flags.file, options);
    shape = table.shape;
    options = table.options;
    flags.shape.apply(shape, table.page_size);
    batch = table.batch();
  } else {
    int page_size = 16;
    flags.shape.apply(shape, page_size);
    auto [title, forest] = forest_of(flags);
    name = std::move(title);
    paged = bench::make_paged(forest, page_size, 1);
    batch = paged.batch();
  }
  flags.plan.apply(options);
  if (flags.threads > 0) options.num_workers = flags.threads;
  options.batch_invariant = options.batch_invariant || flags.invariant;
  Planner planner(model);
  Plan plan;
  try {
    plan = planner.plan(shape, batch, options);
  } catch (const Error& e) {  // the planner does not know where its batch comes from
    throw Error(e.code(), name + ": " + e.what());
  }
  if (flags.json) {
    fmt::print("{}\n", plan.to_json());
    return kOk;
  }
  fmt::print("{}\ncost model: {}\n\n{}", name, source, plan.describe());
  fmt::print("\nlogged as: {}\n", describe_outcome(plan));
  return kOk;
}

}  // namespace

void add_explain(CLI::App& app, Action& action) {
  auto flags = std::make_shared<ExplainFlags>();
  CLI::App& command = *app.add_subcommand(
      "explain", "Print the sharing forest of a batch, the byte model, what is split and why, predicted times");
  auto* const file = command.add_option(
      "file", flags->file,
      "page table as JSON: page_size, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, ...; - for standard input");
  auto* const workload = command.add_option(
      "-w,--workload", flags->workload, "workload in notation, 1,64|8192,256, or the name of a single one, random:7");
  auto* const trees = command.add_option("--trees", flags->trees, "tree file (JSON Lines)");
  auto* const trace = command.add_option("--trace", flags->trace, "trace (JSON Lines or CSV)");
  for (auto* const option : {workload, trees, trace}) option->excludes(file);
  workload->excludes(trees)->excludes(trace);
  trees->excludes(trace);
  command.add_option("--tree", flags->tree, "which tree of the file, from 0")
      ->needs(trees)
      ->check(CLI::NonNegativeNumber);
  command.add_option("--step", flags->step, "decode step of the tree")->needs(trees);
  command.add_option("--time", flags->time, "moment of the trace, seconds")
      ->needs(trace)
      ->check(CLI::NonNegativeNumber);
  command.add_option("--rate", flags->rate, "speed of the trace's arrivals")
      ->needs(trace)
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  flags->shape.add_to(command);
  flags->plan.add_to(command);
  command.add_option("--threads", flags->threads, "workers to plan for")->check(CLI::PositiveNumber);
  command.add_flag("--invariant", flags->invariant, "batch-invariant mode");
  command.add_option("--device-model", flags->device_model, "constants of the cost model: a file, or `default`");
  command.add_flag("--json", flags->json, "print one JSON object instead");
  command.footer(
      "Examples:\n"
      "  headwater explain --workload '1,64|4096,128'\n"
      "  headwater explain batch.json --policy forest\n"
      "  headwater explain --trees trees.jsonl --tree 3 --step 400 --json\n"
      "  headwater explain --trace trace.jsonl --time 120 --rate 16\n\n"
      "Environment: HEADWATER_CASCADE_ATTENTION (--cascade), HEADWATER_CASCADE_MIN_SHARED_PAGES (--min-shared-pages), "
      "HEADWATER_CASCADE_MIN_MEMBERS (--min-members); a page table's own options and flags win.\n"
      "Exit codes: 0 done, 2 wrong usage, 3 unusable input, 4 not supported.");
  command.callback([flags, &action] {
    if (flags->file.empty() && flags->workload.empty() && flags->trees.empty() && flags->trace.empty()) {
      throw CLI::RequiredError("a page table file, --workload, --trees or --trace");
    }
    action = [flags] { return explain(*flags); };
  });
}

}  // namespace headwater::cli
