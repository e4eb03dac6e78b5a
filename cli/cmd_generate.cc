// `headwater generate`: prompts in, answers out, all in one batch; statistics at the end.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <map>
#include <nlohmann/json.hpp>

#include "bench/probe.h"
#include "bench/report.h"
#include "cli/formats.h"
#include "cli/outcome.h"
#include "cli/session.h"
#include "engine/model.h"

namespace headwater::cli {
namespace {

/// Prompts from arguments, then the question file, then the prompt file; standard input where there is none of these.
std::vector<std::string> collect_prompts(const GenerateFlags& flags) {
  std::vector<std::string> prompts = flags.prompts;
  for (const std::string& path : {flags.questions_file, flags.prompt_file}) {
    if (path.empty()) continue;
    for (std::string& line : lines_of_file(path)) prompts.push_back(std::move(line));
  }
  if (prompts.empty()) {
    std::string text = read_file("-");
    throw_if_interrupted();  // which also ends the reading
    while (text.ends_with('\n')) text.pop_back();
    if (text.empty()) throw Error(ErrorCode::io, "standard input: expected a prompt, got nothing");
    prompts.push_back(std::move(text));
  }
  return prompts;
}

void print_stats(const engine::Engine& engine, double seconds) {
  const engine::EngineStats& stats = engine.stats();
  bench::TextTable table({"<", ""});
  const auto share = [](double part, double whole) { return whole > 0 ? 100 * part / whole : 0.0; };
  table.add({"prompt tokens", fmt::format("{}", stats.prompt_tokens)});
  table.add({"  of them adopted from the prefix cache", fmt::format("{}", stats.cached_prompt_tokens)});
  table.add({"generated tokens", fmt::format("{}", stats.generated_tokens)});
  table.add({"time", fmt::format("{:.2f} s", seconds)});
  table.add({"generated tokens/s, prompts included",
             fmt::format("{:.1f}", static_cast<double>(stats.generated_tokens) / std::max(seconds, 1e-9))});
  table.add({"steps", fmt::format("{}", stats.steps)});
  table.add({"  of them cascade", fmt::format("{}", stats.cascade_steps)});
  table.add({"KV bytes read", bench::human_bytes(static_cast<double>(stats.kv_bytes_read))});
  table.add({"  flat attention would have read", bench::human_bytes(static_cast<double>(stats.kv_bytes_flat))});
  table.add({"attention", fmt::format("{:.0f} % of the time", share(stats.attention_seconds, stats.step_seconds))});
  if (stats.preemptions > 0) table.add({"samples put back for want of pages", fmt::format("{}", stats.preemptions)});
  fmt::print(stderr, "\n{}", table.text());
}

/// Watches a run: streams a single sample, else shows a bar; logs the first step of each path.
class Watcher {
 public:
  Watcher(const GenerateFlags& flags, std::size_t num_samples, ProgressBar& bar)
      : flags_(flags), num_samples_(num_samples), stream_(num_samples == 1 && !flags.json), bar_(bar) {}

  void on_event(const engine::Event& event) {
    if (event.token >= 0) ++tokens_;
    if (!stream_ || event.text.empty()) return;
    bar_.clear();
    fmt::print("{}", event.text);
    std::fflush(stdout);
  }

  void on_step(const engine::Engine& engine) {
    const engine::StepStats& step = engine.last_step();
    const auto path = static_cast<std::size_t>(step.path);
    if (!flags_.quiet && step.decode_rows > 0 && step.prefill_rows == 0 && !announced_[path] &&
        (num_samples_ > 1 || flags_.explain)) {
      announced_[path] = true;
      bar_.clear();
      fmt::print(stderr, "info: {}\n", describe_outcome(engine.last_plan()));
      if (flags_.explain) fmt::print(stderr, "{}\n", engine.last_plan().describe());
    }
    if (stream_ && tokens_ > 0) return;
    const engine::Progress progress = engine.progress();
    const auto wanted = static_cast<double>(num_samples_) * flags_.max_tokens;
    if (tokens_ == 0) {
      const double fraction = progress.prompt_tokens_total > 0 ? static_cast<double>(progress.prompt_tokens_done) /
                                                                     static_cast<double>(progress.prompt_tokens_total)
                                                               : 0;
      bar_.show(fraction, fmt::format("reading {} of {} prompt tokens", progress.prompt_tokens_done,
                                      progress.prompt_tokens_total));
    } else {
      bar_.show(static_cast<double>(tokens_) / wanted,
                fmt::format("{} tokens, {} answers under way, {} waiting", tokens_, progress.samples_running,
                            progress.samples_waiting));
    }
  }

 private:
  const GenerateFlags& flags_;
  std::size_t num_samples_;
  bool stream_;
  ProgressBar& bar_;
  std::int64_t tokens_ = 0;
  bool announced_[2] = {false, false};
};

void print_completions(const GenerateFlags& flags, const std::vector<std::string>& prompts,
                       const std::vector<engine::Completion>& completions) {
  std::size_t at = 0;
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (std::size_t p = 0; p < prompts.size(); ++p) {
    // A refused prompt has one completion with an error, others one for each sample.
    const std::size_t count = completions[at].request == 0 ? 1 : static_cast<std::size_t>(flags.parallel);
    for (std::size_t i = 0; i < count; ++i, ++at) {
      const engine::Completion& completion = completions[at];
      if (flags.json) {
        all.push_back({{"prompt", prompts[p]},
                       {"sample", completion.sample},
                       {"text", completion.text},
                       {"tokens", completion.tokens},
                       {"finish", engine::name_of(completion.finish)},
                       {"error", completion.error}});
        continue;
      }
      if (completion.finish == engine::FinishReason::error) {
        fmt::print(stderr, "headwater: error: prompt {}: {}\n", p + 1, completion.error);
        continue;
      }
      if (completions.size() == 1) {
        fmt::print("\n");  // its text has been streamed
        continue;
      }
      const std::string sample = flags.parallel > 1 ? fmt::format(", sample {}", completion.sample + 1) : "";
      fmt::print("[{}{}] {}\n{}\n\n", p + 1, sample, prompts[p], completion.text);
    }
  }
  if (flags.json) fmt::print("{}", bench::lines_of(all));
}

/// A request but for its prompt.
engine::Request settings_of(const GenerateFlags& flags) {
  engine::Request request;
  request.sampling = flags.sampling;
  request.num_samples = flags.parallel;
  request.max_tokens = flags.max_tokens;
  request.stop = flags.stop;
  request.ignore_eos = flags.ignore_eos;
  return request;
}

int generate(const GenerateFlags& flags) {
  if (flags.demo) return run_demo(flags);
  ProgressBar bar(!flags.quiet);
  const engine::EngineOptions options = engine_options(flags);
  const std::string shared = flags.shared_file.empty() ? "" : read_file(flags.shared_file);
  const std::vector<std::string> prompts = collect_prompts(flags);
  const Session session = open_session(flags, bar);
  engine::Engine engine(session.model, options);
  std::vector<engine::Request> requests;
  for (const std::string& prompt : prompts) {
    engine::Request request = settings_of(flags);
    request.prompt = session.tokens_of(shared, prompt);
    requests.push_back(std::move(request));
  }
  Watcher watcher(flags, requests.size() * static_cast<std::size_t>(flags.parallel), bar);
  engine::RunHooks hooks;
  hooks.on_event = [&](const engine::Event& event) { watcher.on_event(event); };
  hooks.on_step = [&](const engine::Engine& running) { watcher.on_step(running); };
  hooks.cancelled = [] { return interrupted(); };
  const double start = bench::now();
  const std::vector<engine::Completion> completions = engine::run_to_completion(engine, requests, hooks);
  const double seconds = bench::now() - start;
  bar.clear();
  print_completions(flags, prompts, completions);
  if (!flags.quiet && !flags.no_stats) print_stats(engine, seconds);
  throw_if_interrupted();
  const bool bad = std::ranges::any_of(
      completions, [](const engine::Completion& c) { return c.finish == engine::FinishReason::error; });
  return bad ? kFailed : kOk;
}

}  // namespace

void add_generate(CLI::App& app, Action& action) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App& command = *app.add_subcommand("generate", "Answer prompts with a model, all in one batch");
  command.add_option("prompt", flags->prompts, "prompts; without any, standard input is one prompt");
  command.add_option("-f,--prompt-file", flags->prompt_file, "prompts, one a line; - for standard input");
  command.add_option("--shared-file", flags->shared_file, "a text that precedes every prompt, a document for instance");
  command.add_option("--questions", flags->questions_file, "questions about the shared text, one a line");
  command.add_flag("--raw", flags->raw, "no chat format: the model continues the prompt");
  command.add_option("-n,--parallel", flags->parallel, "samples of every prompt")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command.add_option("--max-tokens", flags->max_tokens, "longest answer, tokens")
      ->check(CLI::PositiveNumber)
      ->take_last()
      ->capture_default_str();
  command.add_option("-t,--temperature", flags->sampling.temperature, "0: always the most likely token")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  command.add_option("--top-k", flags->sampling.top_k, "sample from the k most likely tokens; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command.add_option("--top-p", flags->sampling.top_p, "sample from the smallest set with this probability")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command.add_option("--seed", flags->sampling.seed, "seed of the sampling")->capture_default_str();
  command.add_option("--stop", flags->stop, "an answer ends before this text; may be repeated")
      ->allow_extra_args(false);
  command.add_flag("--ignore-eos", flags->ignore_eos, "go on after the model says that it is done");
  flags->add_to(command);
  command.add_flag("--explain", flags->explain, "print the plan of the first decode step");
  command.add_flag("--json", flags->json, "print answers as JSON");
  command.add_flag("-q,--quiet", flags->quiet, "answers only");
  command.add_flag("--no-stats", flags->no_stats, "no table at the end");
  command.add_flag("--demo", flags->demo,
                   "all questions about the shared text at once: flat, then cascade, compared and measured");
  command.footer(
      "Examples:\n"
      "  headwater generate 'Name three rivers.'\n"
      "  headwater generate --shared-file LICENSE --questions tools/demo/questions.txt --max-tokens 48\n"
      "  headwater generate --parallel 8 --temperature 0.8 --seed 1 'Write a haiku about rain.'\n"
      "  echo 'What is a delta?' | headwater generate --cascade off\n"
      "  headwater generate --demo --shared-file LICENSE --questions tools/demo/questions.txt\n\n"
      "Environment: HEADWATER_CASCADE_ATTENTION (--cascade), HEADWATER_CASCADE_MIN_SHARED_PAGES (--min-shared-pages), "
      "HEADWATER_CASCADE_MIN_MEMBERS (--min-members); flags win.\n"
      "Exit codes: 0 done, 1 a prompt or proof failed, 2 wrong usage, 3 unusable model or input, 4 not supported here, "
      "130 interrupted.");
  command.callback([flags, &action] {
    if (flags->demo && (flags->shared_file.empty() || flags->questions_file.empty()))
      throw CLI::RequiredError("--demo: --shared-file and --questions");
    try {
      engine::check_settings(settings_of(*flags));
    } catch (const Error& e) {  // before a model is loaded: wrong usage
      throw CLI::ValidationError("generate", e.what());
    }
    action = [flags] { return generate(*flags); };
  });
}

}  // namespace headwater::cli
