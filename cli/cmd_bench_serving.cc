// `headwater bench-serving`: load on an OpenAI-compatible server, and what came of it. What is measured and how is in
// serving/; this is flags, and who prints what.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <utility>

#include "cli/command.h"
#include "cli/formats.h"
#include "serving/measure.h"
#include "serving/plot.h"
#include "serving/report.h"
#include "serving/trace_load.h"

namespace headwater::cli {
namespace {

using nlohmann::json;
using serving::LevelResult;

constexpr double kStartSeconds = 180;

struct ServingFlags {
  std::string url = "http://127.0.0.1:8000";
  std::string model;
  std::string api_key;
  std::string endpoint = "completions";
  std::int64_t shared_prefix_tokens = 2048;
  std::int64_t prompt_tokens = 32;
  std::vector<std::int64_t> concurrency;
  std::int64_t max_tokens = 0;
  int rounds = 0;
  bool cold = false;
  bool stop_at_eos = false;
  double temperature = 0;
  bool metrics = false;
  std::string pair;
  std::string serve_flags;
  double min_ratio = 0;
  std::string trace;
  double time_scale = 1;
  std::int64_t block_tokens = 0;
  std::int64_t requests = 0;
  std::string json;
  std::string plot;
  double timeout = 120;
  std::optional<std::uint64_t> seed;
  bool quiet = false;
};

std::string replaced(std::string text, std::string_view what, std::string_view with) {
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + with.size()))
    text.replace(at, what.size(), with);
  return text;
}

class ServingRun {
 public:
  explicit ServingRun(const ServingFlags& flags) : flags_(flags), bar_(!flags.quiet) {}

  int run() {
    if (flags_.pair.empty()) {
      servers_.push_back(
          std::make_unique<serving::Server>(serving::parse_url(flags_.url), flags_.api_key, options(), flags_.metrics));
    } else {
      start_pair();
    }
    for (const auto& server : servers_) server->find_model();
    serving::PromptMaker maker(servers_.front()->client(), servers_.front()->model(), flags_.endpoint == "chat",
                               *flags_.seed);
    if (flags_.trace.empty()) {
      levels(maker);
    } else {
      replay(maker);
    }
    write_results();
    return failed_ ? kFailed : kOk;
  }

 private:
  [[nodiscard]] bool paired() const { return !flags_.pair.empty(); }
  [[nodiscard]] std::FILE* out() const { return flags_.json == "-" ? stderr : stdout; }

  [[nodiscard]] serving::LoadOptions options() const {
    serving::LoadOptions out;
    out.request = {flags_.model, flags_.endpoint == "chat", !flags_.stop_at_eos, flags_.temperature};
    out.patience_s = flags_.timeout;
    if (!flags_.trace.empty() && !flags_.concurrency.empty()) out.most_running = flags_.concurrency.front();
    return out;
  }

  /// Two servers that differ in the switch only.
  void start_pair() {
    for (const char* arm : {"on", "off"}) {
      const int port = serving::free_port();
      std::string command = flags_.pair;
      if (command == "-") {
        // The shell's quotes around our own path.
        command = fmt::format("'{}' serve --cascade {{cascade}} --port {{port}} {}",
                              replaced(serving::own_program(), "'", "'\\''"), flags_.serve_flags);
      }
      command = replaced(replaced(command, "{cascade}", arm), "{port}", std::to_string(port));
      children_.push_back(std::make_unique<serving::Child>(command));
      servers_.push_back(std::make_unique<serving::Server>(serving::parse_url(fmt::format("127.0.0.1:{}", port)),
                                                           flags_.api_key, options(), true, arm));
    }
    for (std::size_t i = 0; i < servers_.size(); ++i) {
      servers_[i]->wait_until_ready(kStartSeconds, children_[i].get(), [&] {
        throw_if_interrupted();
        bar_.show(0, fmt::format("waiting for the server with cascade {}", servers_[i]->arm()));
      });
    }
  }

  void levels(serving::PromptMaker& maker) {
    const serving::LevelPlan plan{flags_.shared_prefix_tokens, flags_.prompt_tokens, flags_.max_tokens, flags_.cold,
                                  flags_.rounds};
    std::vector<serving::Server*> servers;
    for (const auto& server : servers_) servers.push_back(server.get());
    serving::LevelRunner runner(servers, maker, plan);
    bar_.clear();
    fmt::print(out(), "{}: model {}; {} shared + {} own tokens in, {}; {} out; {}; {} round{} a level\n", where(),
               servers_.front()->model(), flags_.shared_prefix_tokens, flags_.prompt_tokens, maker.describe(),
               flags_.max_tokens, flags_.cold ? "a new document every round" : "document in the prefix cache",
               flags_.rounds, flags_.rounds == 1 ? "" : "s");
    const bool metrics = flags_.metrics || paired();
    print(serving::table_head(paired(), metrics));
    for (std::size_t i = 0; i < flags_.concurrency.size(); ++i) {
      const serving::LevelMeasurement level = runner.run(
          flags_.concurrency[i],
          [&](const std::string& arm, int round, const serving::Progress& p) { show_level(i, arm, round, p); });
      for (const LevelResult& result : level.arms) {
        print(serving::table_row(result, paired(), metrics));
        note(result);
      }
      if (paired()) add_ratio(level);
    }
    print_remarks();
  }

  void show_level(std::size_t index, const std::string& arm, int round, const serving::Progress& p) {
    throw_if_interrupted();
    const auto arms = static_cast<double>(servers_.size());
    const double turn = arm == "off" ? 1 : 0;
    const double within = p.total > 0 ? static_cast<double>(p.finished) / static_cast<double>(p.total) : 0;
    const double level = (round + (turn + within) / arms) / flags_.rounds;
    bar_.show(
        (static_cast<double>(index) + level) / static_cast<double>(flags_.concurrency.size()),
        fmt::format("concurrency {}{}, round {}/{}: {} of {} done, {} tokens", flags_.concurrency[index],
                    arm.empty() ? "" : ", cascade " + arm, round + 1, flags_.rounds, p.finished, p.total, p.events));
  }

  void add_ratio(const serving::LevelMeasurement& level) {
    const serving::PairRatio ratio = serving::ratio_of(level);
    ratio_lines_.push_back(serving::ratio_line(ratio));
    if (std::string why = serving::explain_line(level.arms.at(0), level.arms.at(1)); !why.empty())
      ratio_lines_.push_back(std::move(why));
    json entry = serving::to_json(ratio);
    if (flags_.min_ratio > 0) {
      const bench::Verdict verdict = serving::judge(ratio, flags_.min_ratio);
      if (verdict == bench::Verdict::missed) failed_ = true;
      const char* const word = verdict == bench::Verdict::passed   ? "ok"
                               : verdict == bench::Verdict::missed ? "MISSED"
                                                                   : "NOT JUDGED (fewer than 30 rounds)";
      ratio_lines_.push_back(fmt::format("  gate: at least {:g}: {}", flags_.min_ratio, word));
      entry["verdict"] = bench::name_of(verdict);
    }
    pairs_.push_back(std::move(entry));
  }

  void replay(serving::PromptMaker& maker) {
    const Trace trace = parse_trace(read_file(flags_.trace), flags_.trace);
    const auto requests =
        serving::plan_trace(trace, {flags_.time_scale, flags_.block_tokens, flags_.requests, flags_.max_tokens}, maker);
    bar_.clear();
    fmt::print(out(), "{}: model {}; {} requests of {} at {:g}x their rate, {} of {} tokens for a block, {}\n", where(),
               servers_.front()->model(), requests.size(), std::filesystem::path(flags_.trace).filename().string(),
               flags_.time_scale, flags_.block_tokens > 0 ? flags_.block_tokens : trace.block_tokens,
               trace.block_tokens, maker.describe());
    const bool metrics = flags_.metrics || paired();
    print(serving::table_head(paired(), metrics));
    std::vector<std::string> lines;
    for (const auto& server : servers_) {
      const serving::Counters before = metrics ? server->counters() : serving::Counters{};
      const std::vector<serving::Record> records =
          serving::run_replay(server->client(), requests, server->options(), [&](const serving::Progress& p) {
            throw_if_interrupted();
            bar_.show(static_cast<double>(p.finished) / static_cast<double>(p.total),
                      fmt::format("{} of {} done, {} running, {} tokens", p.finished, p.total, p.running, p.events));
          });
      LevelResult result = serving::summarize({records});
      result.concurrency = serving::most_at_once(records);
      result.arm = server->arm();
      if (metrics) result.counters.emplace().add(before, server->counters());
      print(serving::table_row(result, paired(), metrics));
      lines.push_back(serving::replay_line(result));
      note(result);
    }
    for (const std::string& line : lines) print(line + "\n");
    print_remarks();
  }

  [[nodiscard]] std::string where() const {
    return paired() ? "cascade on against off" : servers_.front()->client().url().text();
  }

  void print(const std::string& text) {
    bar_.clear();
    fmt::print(out(), "{}", text);
    std::fflush(out());
  }

  void note(const LevelResult& result) {
    if (result.fail > 0) failed_ = true;
    for (std::string& line : serving::remarks(result)) remarks_.push_back(std::move(line));
    results_.push_back(result);
  }

  void print_remarks() {
    for (const auto* lines : {&remarks_, &ratio_lines_}) {
      for (const std::string& line : *lines) print(line + "\n");
    }
  }

  void write_results() {
    bar_.clear();
    if (!flags_.plot.empty()) {
      const std::string what = flags_.trace.empty()
                                   ? fmt::format("{} shared + {} own tokens in, {} out, {}",
                                                 flags_.shared_prefix_tokens, flags_.prompt_tokens, flags_.max_tokens,
                                                 flags_.cold ? "cold" : "document in the prefix cache")
                                   : flags_.trace;
      write_file(flags_.plot,
                 serving::plot_svg(results_, fmt::format("{}, {}", servers_.front()->model(), where()), what));
    }
    if (flags_.json.empty()) return;
    json levels = json::array();
    for (const LevelResult& result : results_) levels.push_back(serving::to_json(result));
    json document = {{"url", paired() ? json(nullptr) : json(servers_.front()->client().url().text())},
                     {"model", servers_.front()->model()},
                     {"endpoint", flags_.endpoint},
                     {"max_tokens", flags_.max_tokens},
                     {"levels", std::move(levels)}};
    if (flags_.trace.empty()) {
      document["shared_prefix_tokens"] = flags_.shared_prefix_tokens;
      document["prompt_tokens"] = flags_.prompt_tokens;
      document["cold"] = flags_.cold;
    } else {
      document["trace"] = flags_.trace;
      document["time_scale"] = flags_.time_scale;
    }
    if (!pairs_.empty()) document["pairs"] = pairs_;
    write_file(flags_.json, document.dump(1) + "\n");
  }

  const ServingFlags& flags_;
  ProgressBar bar_;
  std::vector<std::unique_ptr<serving::Child>> children_;
  std::vector<std::unique_ptr<serving::Server>> servers_;
  std::vector<LevelResult> results_;
  std::vector<std::string> remarks_;
  std::vector<std::string> ratio_lines_;
  json pairs_ = json::array();
  bool failed_ = false;
};

void add_flags(CLI::App& command, ServingFlags& flags) {
  command.add_option("--url", flags.url, "server; plain HTTP, with or without /v1")->capture_default_str();
  command.add_option("--model", flags.model, "model to ask for; default: the first of /v1/models");
  command.add_option("--api-key", flags.api_key, "bearer token; better in HEADWATER_API_KEY")
      ->envname("HEADWATER_API_KEY");
  command.add_option("--endpoint", flags.endpoint, "completions, or chat: the shared part is the system message")
      ->check(CLI::IsMember({"completions", "chat"}))
      ->capture_default_str();
  command
      .add_option("--shared-prefix-tokens", flags.shared_prefix_tokens, "tokens that every client's prompt begins with")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command.add_option("--prompt-tokens", flags.prompt_tokens, "tokens of its own, new in every request")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      .add_option("--concurrency", flags.concurrency,
                  "clients, one level for each number, 1,4,8,16; default 4,8; "
                  "with --trace: most requests at once, default 1024")
      ->delimiter(',')
      ->check(CLI::Range(1, 65536))
      ->allow_extra_args(false);
  command
      .add_option("--max-tokens", flags.max_tokens,
                  "tokens out; default 128; with --trace a bound, default: as recorded")
      ->check(CLI::PositiveNumber);
  command
      .add_option("--rounds", flags.rounds,
                  "times that all clients of a level start together; default 1, with --pair 6")
      ->check(CLI::PositiveNumber);
  command.add_flag("--cold", flags.cold,
                   "a new document every round, and no request before that brings it into the cache");
  command.add_flag("--stop-at-eos", flags.stop_at_eos,
                   "let answers end where the model ends them (else ignore_eos is sent)");
  command.add_option("--temperature", flags.temperature, "of sampling")
      ->check(CLI::Range(0.0, 2.0))
      ->capture_default_str();
  command.add_flag("--metrics", flags.metrics, "read /metrics around every round and say which path ran");
  command
      .add_option("--pair", flags.pair,
                  "start two servers, cascade on and off, and let rounds take turns; COMMAND may contain {cascade} and "
                  "{port}; default: this program's `serve`")
      ->type_name("[COMMAND]")
      ->expected(0, 1)
      ->default_str("-");
  command.add_option("--serve-flags", flags.serve_flags, "--pair: further flags of `serve`, as one word of the shell");
  command.add_option("--min-ratio", flags.min_ratio, "--pair: gate on on/off of the aggregate rate; needs 30 rounds")
      ->check(CLI::PositiveNumber);
  command.add_option("--trace", flags.trace,
                     "replay a trace (JSON Lines or CSV) by arrival time, shared prefixes included");
  command.add_option("--time-scale", flags.time_scale, "--trace: arrivals so many times as fast as recorded")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      .add_option(
          "--block-tokens", flags.block_tokens,
          "--trace: tokens to send for a block of the trace (512 tokens), so that long prompts fit a small model")
      ->check(CLI::PositiveNumber);
  command.add_option("--requests", flags.requests, "--trace: only the first so many")->check(CLI::PositiveNumber);
  command.add_option("--json", flags.json, "write results as JSON; without FILE to standard output")
      ->type_name("[FILE]")
      ->expected(0, 1)
      ->default_str("-");
  command.add_option("--plot", flags.plot, "draw throughput and time to first token against concurrency as SVG");
  command.add_option("--timeout", flags.timeout, "seconds without a byte after which a request has failed")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command.add_option("--seed", flags.seed,
                     "seed of the words; default: 1, with --cold one of the moment, or a second run would not be cold");
  command.add_flag("--quiet", flags.quiet, "no progress bar");
}

void check_flags(ServingFlags& flags) {
  const bool trace = !flags.trace.empty();
  if (!trace && (flags.time_scale != 1 || flags.block_tokens > 0 || flags.requests > 0))
    throw CLI::ValidationError("--time-scale, --block-tokens and --requests", "need --trace");
  if (trace && flags.min_ratio > 0) throw CLI::ValidationError("--min-ratio", "not with --trace, which has no ratio");
  if (trace && flags.cold) throw CLI::ValidationError("--cold", "not with --trace");
  if (trace && flags.concurrency.size() > 1) throw CLI::ValidationError("--concurrency", "one number with --trace");
  if (flags.pair.empty() && (!flags.serve_flags.empty() || flags.min_ratio > 0))
    throw CLI::ValidationError("--serve-flags and --min-ratio", "need --pair");
  if (!flags.serve_flags.empty() && flags.pair != "-")
    throw CLI::ValidationError("--serve-flags", "not with a COMMAND of --pair, which has its own");
  if (!trace && flags.concurrency.empty()) flags.concurrency = {4, 8};
  if (!trace && flags.max_tokens == 0) flags.max_tokens = 128;
  if (!flags.seed) flags.seed = flags.cold ? std::random_device{}() : 1;
  if (flags.rounds == 0) flags.rounds = flags.pair.empty() ? 1 : 6;
}

}  // namespace

void add_bench_serving(CLI::App& app, Action& action) {
  auto flags = std::make_shared<ServingFlags>();
  CLI::App& command =
      *app.add_subcommand("bench-serving", "Measure a running OpenAI-compatible server under load, or two in turns");
  add_flags(command, *flags);
  command.footer(
      "Every client sends the same document and a question of its own, and streams the answer. Columns:\n"
      "  TTFT             from just before the connection is opened to the first event with text\n"
      "  decode tok/s     of one stream: (tokens - 1) / (last event with text - first); mean over streams\n"
      "  aggregate tok/s  all tokens of ok requests / time from the first start to the last end, prompts included\n"
      "  cascade          share of decode launches that read a shared span once, from /metrics\n"
      "  p95              the smallest value that at least 95 % of the values do not exceed\n"
      "Tokens are the server's own count (usage).\n\n"
      "Examples:\n"
      "  headwater bench-serving --shared-prefix-tokens 2048 --prompt-tokens 32 --concurrency 4,8 --max-tokens 256 "
      "--metrics\n"
      "  headwater bench-serving --url http://127.0.0.1:9000 --concurrency 1,4,8,16 --json r.json --plot r.svg\n"
      "  headwater bench-serving --pair --serve-flags '--threads 2' --concurrency 8,16 --rounds 30 --min-ratio 0.99\n"
      "  headwater bench-serving --trace conversation.jsonl --time-scale 4 --block-tokens 32 --requests 200\n\n"
      "Environment: HEADWATER_API_KEY (--api-key).\n"
      "Exit codes: 0 done, 1 a request failed or a gate was missed, 2 wrong usage, 3 no server, or unusable input, 130 "
      "interrupted.");
  command.callback([flags, &action] {
    check_flags(*flags);
    action = [flags] { return ServingRun(*flags).run(); };
  });
}

}  // namespace headwater::cli
