// The demonstration behind `make run`: every question about one document at once, first flat, then cascade.
//
// Six runs: flat and cascade in normal mode in turn, twice, which are measured (a shared machine changes its speed
// within seconds), and one of each in batch-invariant mode, whose tokens must be equal. A run fails unless its path is
// the one asked for, and cascade must read at most 1.1 times the distinct bytes.
#include <fmt/format.h>

#include <algorithm>

#include "bench/report.h"
#include "bench/stats.h"
#include "cli/formats.h"
#include "cli/outcome.h"
#include "cli/session.h"
#include "engine/model.h"

namespace headwater::cli {
namespace {

/// What the decode steps of one run, or of several of the same kind, came to.
struct RunResult {
  std::vector<engine::Completion> completions;
  std::string plan_words;     ///< of the first step in which every answer is under way
  std::string launch;         ///< one line about the same step
  double prompt_seconds = 0;  ///< steps with prompt rows
  double decode_seconds = 0;  ///< steps without
  std::int64_t decode_tokens = 0;
  std::int64_t decode_steps = 0;
  std::int64_t cascade_steps = 0;
  std::int64_t shared_steps = 0;  ///< decode steps with at least two answers under way
  double kv_read = 0;             ///< summed over decode steps
  double kv_unique = 0;
  std::vector<double> full_kv_read;    ///< steps in which every answer is under way
  std::vector<double> full_attention;  ///< seconds
  std::vector<double> full_step;       ///< seconds
  std::string isa;
};

class Demo {
 public:
  explicit Demo(const GenerateFlags& flags) : flags_(flags), bar_(!flags.quiet) {}
  int run();

 private:
  /// Adds a run to `result`.
  void answer(const std::string& title, CascadeSwitch cascade, bool invariant, RunResult& result);
  void check(bool good, const std::string& what);
  void print_comparison(const RunResult& flat, const RunResult& cascade) const;
  void print_answers(const RunResult& run) const;

  GenerateFlags flags_;
  ProgressBar bar_;
  Session session_;
  std::string document_;
  std::vector<std::string> questions_;
  std::vector<engine::Request> requests_;
  bool failed_ = false;
};

void Demo::check(bool good, const std::string& what) {
  failed_ = failed_ || !good;
  fmt::print("{} {}\n", good ? "ok    " : "FAILED", what);
}

void Demo::answer(const std::string& title, CascadeSwitch cascade, bool invariant, RunResult& result) {
  engine::EngineOptions options = engine_options(flags_);
  options.plan.policy = cascade == CascadeSwitch::off         ? Policy::flat
                        : options.plan.policy == Policy::flat ? Policy::automatic
                                                              : options.plan.policy;
  options.plan.cascade = cascade;
  options.plan.batch_invariant = invariant;
  engine::Engine engine(session_.model, options);
  const RunResult before = result;
  std::int64_t tokens = 0;
  engine::RunHooks hooks;
  hooks.cancelled = [] { return interrupted(); };
  hooks.on_event = [&](const engine::Event& event) { tokens += event.token >= 0 ? 1 : 0; };
  hooks.on_step = [&](const engine::Engine& running) {
    const engine::StepStats& step = running.last_step();
    const engine::Progress progress = running.progress();
    if (step.prefill_rows > 0) {
      result.prompt_seconds += step.step_seconds;
      bar_.show(static_cast<double>(progress.prompt_tokens_done) /
                    static_cast<double>(std::max<std::int64_t>(progress.prompt_tokens_total, 1)),
                title + ": reading the document");
      return;
    }
    if (step.decode_rows == 0) return;
    result.decode_seconds += step.step_seconds;
    result.decode_tokens += step.decode_rows;
    ++result.decode_steps;
    result.kv_read += static_cast<double>(step.kv_bytes_read);
    result.kv_unique += static_cast<double>(step.kv_bytes_unique);
    result.shared_steps += step.decode_rows > 1 ? 1 : 0;
    result.cascade_steps += step.path == Path::cascade ? 1 : 0;
    if (step.decode_rows == static_cast<int>(requests_.size())) {
      result.full_kv_read.push_back(static_cast<double>(step.kv_bytes_read));
      result.full_attention.push_back(step.attention_seconds);
      result.full_step.push_back(step.step_seconds);
      if (result.plan_words.empty()) {
        result.plan_words = running.last_plan().describe();
        result.launch = describe_outcome(running.last_plan());
        result.isa = name_of(step.isa);
      }
    }
    bar_.show(static_cast<double>(tokens) /
                  static_cast<double>(requests_.size() * static_cast<std::size_t>(flags_.max_tokens)),
              fmt::format("{}: {} tokens, {} answers under way", title, tokens, progress.samples_running));
  };
  result.completions = engine::run_to_completion(engine, requests_, hooks);
  bar_.clear();
  throw_if_interrupted();
  for (std::size_t i = 0; i < result.completions.size(); ++i) {
    const engine::Completion& completion = result.completions[i];
    if (completion.finish == engine::FinishReason::error)
      throw Error(ErrorCode::invalid_argument, fmt::format("question {}: {}", i + 1, completion.error));
  }
  engine.audit();
  fmt::print("{}: {} tokens in {} decode steps; prompts {:.2f} s, answers {:.2f} s\n", title,
             result.decode_tokens - before.decode_tokens, result.decode_steps - before.decode_steps,
             result.prompt_seconds - before.prompt_seconds, result.decode_seconds - before.decode_seconds);
}

void Demo::print_answers(const RunResult& run) const {
  fmt::print("\n");
  for (std::size_t i = 0; i < questions_.size(); ++i) {
    std::string text = run.completions[i].text;
    if (run.completions[i].finish == engine::FinishReason::length) text += " ...";
    for (std::size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += 5) text.replace(at, 1, "\n    ");
    fmt::print("{:2}. {}\n    {}\n", i + 1, questions_[i], text);
  }
  fmt::print("\n");
}

void Demo::print_comparison(const RunResult& flat, const RunResult& cascade) const {
  bench::TextTable table({"<decoding, normal mode", "flat", "cascade", "ratio"});
  const auto ms = [](double seconds) { return fmt::format("{:.2f} ms", seconds * 1e3); };
  const auto row = [&](const char* name, const std::string& first, const std::string& second, double ratio) {
    table.add({name, first, second, fmt::format("{:.2f}x", ratio)});
  };
  const double read_a = bench::median(flat.full_kv_read);
  const double read_b = bench::median(cascade.full_kv_read);
  row("KV bytes read in a step", bench::human_bytes(read_a), bench::human_bytes(read_b), read_a / read_b);
  const double attention_a = bench::median(flat.full_attention);
  const double attention_b = bench::median(cascade.full_attention);
  row("attention time in a step", ms(attention_a), ms(attention_b), attention_a / attention_b);
  const double step_a = bench::median(flat.full_step);
  const double step_b = bench::median(cascade.full_step);
  row("time of a step", ms(step_a), ms(step_b), step_a / step_b);
  const double speed_a = static_cast<double>(flat.decode_tokens) / flat.decode_seconds;
  const double speed_b = static_cast<double>(cascade.decode_tokens) / cascade.decode_seconds;
  row("tokens/s, all answers together", fmt::format("{:.0f}", speed_a), fmt::format("{:.0f}", speed_b),
      speed_b / speed_a);
  fmt::print(
      "\n{}(medians over the {} and {} steps in which all {} answers were under way; ratio: how much better cascade "
      "is; attention by {})\n",
      table.text(), flat.full_step.size(), cascade.full_step.size(), questions_.size(), cascade.isa);
}

int Demo::run() {
  document_ = read_file(flags_.shared_file);
  questions_ = lines_of_file(flags_.questions_file);
  if (questions_.size() < 2)
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: expected at least two questions, got {}", flags_.questions_file, questions_.size()));
  session_ = open_session(flags_, bar_);
  bar_.clear();
  for (const std::string& question : questions_) {
    engine::Request request;
    request.prompt = session_.tokens_of(document_, question);
    request.sampling = flags_.sampling;
    request.max_tokens = flags_.max_tokens;
    request.ignore_eos = flags_.ignore_eos;
    requests_.push_back(std::move(request));
  }
  const std::size_t document_tokens = session_.model->tokenizer().encode(document_).size();
  fmt::print("{} questions about {} ({} tokens), answered at once by a model with {} threads.\n\n", questions_.size(),
             flags_.shared_file, document_tokens, session_.model->num_threads());

  RunResult flat;
  RunResult cascade;
  for (int turn = 0; turn < 2; ++turn) {
    answer("flat", CascadeSwitch::off, false, flat);
    answer("cascade", CascadeSwitch::automatic, false, cascade);
  }
  print_answers(cascade);
  fmt::print("How the cascade step was planned:\n{}\n{}\n", cascade.plan_words, cascade.launch);
  print_comparison(flat, cascade);

  fmt::print("\n");
  RunResult flat_invariant;
  RunResult cascade_invariant;
  answer("flat, batch-invariant", CascadeSwitch::off, true, flat_invariant);
  answer("cascade, batch-invariant", CascadeSwitch::automatic, true, cascade_invariant);
  std::size_t equal = 0;
  for (std::size_t i = 0; i < questions_.size(); ++i)
    equal += flat_invariant.completions[i].tokens == cascade_invariant.completions[i].tokens ? 1 : 0;

  fmt::print("\n");
  check(flat.cascade_steps == 0 && flat_invariant.cascade_steps == 0,
        fmt::format("flat: path = flat in all {} steps", flat.decode_steps + flat_invariant.decode_steps));
  check(!cascade.full_step.empty() && cascade.cascade_steps == cascade.shared_steps,
        fmt::format("cascade: path = cascade in {} of {} steps with two or more answers under way",
                    cascade.cascade_steps, cascade.shared_steps));
  check(cascade.kv_read <= 1.1 * cascade.kv_unique,
        fmt::format("cascade: {} of KV read, {:.3f} times the distinct bytes (at most 1.1)",
                    bench::human_bytes(cascade.kv_read), cascade.kv_read / cascade.kv_unique));
  check(cascade_invariant.cascade_steps > 0 && equal == questions_.size(),
        fmt::format(
            "batch-invariant mode: flat and cascade gave the same tokens for {} of {} questions (cascade in {} steps)",
            equal, questions_.size(), cascade_invariant.cascade_steps));
  return failed_ ? kFailed : kOk;
}

}  // namespace

int run_demo(const GenerateFlags& flags) {
  return Demo(flags).run();
}

}  // namespace headwater::cli
