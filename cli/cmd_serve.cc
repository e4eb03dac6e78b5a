// `headwater serve`: OpenAI's HTTP interface in front of the engine. What it answers is in docs/server.md.
#include <fmt/format.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdlib>
#include <filesystem>

#include "cli/command.h"
#include "cli/formats.h"
#include "cli/session.h"
#include "engine/model.h"
#include "server/server.h"

namespace headwater::cli {
namespace {

struct ServeFlags : EngineFlags {
  std::string host = "127.0.0.1";
  std::uint16_t port = 8000;
  std::string served_name;
  std::string api_key;
  int max_batch = 256;
  std::size_t max_pending = 1024;
  std::size_t max_connections = 1024;
  std::size_t max_body_kib = 4096;
  std::size_t max_header_kib = 16;
  std::size_t max_output_kib = 1024;
  int max_choices = 128;
  double read_timeout = 30;
  double write_timeout = 30;
  double idle_timeout = 75;
  double drain_timeout = 60;
  std::string log_file;
  std::string log_format = "text";
};

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

/// For CLI11, whose Range lets NaN through.
std::string check_seconds(const std::string& text) {
  double seconds = 0;
  if (CLI::detail::lexical_cast(text, seconds) && seconds >= 0.01 && seconds <= 1e6) return "";
  return "expected 0.01..1e6 seconds, got " + text;
}

/// Lets the process open as many files as it may; returns how many connections then fit at most.
std::size_t room_for_connections() {
  constexpr rlim_t kOthers = 64;  // log, model, epoll, standard streams, those that are turned away
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return SIZE_MAX;
  if (files.rlim_cur != files.rlim_max) {
    const rlimit raised{files.rlim_max, files.rlim_max};
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) files = raised;
  }
  if (files.rlim_cur == RLIM_INFINITY) return SIZE_MAX;
  return files.rlim_cur > kOthers ? files.rlim_cur - kOthers : 1;
}

/// Why no shared span will be split, whatever comes; empty: they may be.
std::string cascade_off_reason(const PlanOptions& plan, const ServeFlags& flags) {
  if (plan.cascade == CascadeSwitch::off) {
    return flags.plan.cascade == "off" ? "--cascade off" : "HEADWATER_CASCADE_ATTENTION=off";
  }
  if (plan.policy == Policy::flat && plan.cascade != CascadeSwitch::on) return "--policy flat";
  return "";
}

server::ServerOptions options_of(const ServeFlags& flags, const PlanOptions& plan) {
  server::ServerOptions options;
  options.http.host = flags.host;
  options.http.port = flags.port;
  options.http.max_body_bytes = flags.max_body_kib << 10;
  options.http.max_header_bytes = flags.max_header_kib << 10;
  options.http.max_output_bytes = flags.max_output_kib << 10;
  options.http.read_timeout = milliseconds_of(flags.read_timeout);
  options.http.write_timeout = milliseconds_of(flags.write_timeout);
  options.http.idle_timeout = milliseconds_of(flags.idle_timeout);
  options.drain_timeout = milliseconds_of(flags.drain_timeout);
  options.loop.max_pending = flags.max_pending;
  options.limits.max_choices = flags.max_choices;
  options.api_key = flags.api_key;
  const char* key = std::getenv("HEADWATER_API_KEY");
  if (options.api_key.empty() && key != nullptr) options.api_key = key;
  options.cascade_off = cascade_off_reason(plan, flags);
  return options;
}

/// Runs on the engine's thread while the server already listens.
server::Loaded load(const ServeFlags& flags, const engine::EngineOptions& options, const std::string& path,
                    server::Log& log) {
  engine::ModelOptions model_options;
  model_options.num_threads = flags.threads;
  server::Loaded loaded;
  loaded.engine = options;
  loaded.served.model = engine::load_model(path, model_options);
  loaded.served.name = flags.served_name.empty() ? std::filesystem::path(path).stem().string() : flags.served_name;
  loaded.served.system = flags.system;
  std::optional<std::string_view> forced;
  if (!flags.chat_template.empty()) forced = flags.chat_template;
  try {
    loaded.served.chat.emplace(loaded.served.model->gguf(), loaded.served.model->tokenizer(), forced);
  } catch (const Error& error) {
    if (forced || error.code() != ErrorCode::unsupported) throw;
    log.warn("no_chat", {{"reason", std::string(error.what())}});
  }
  return loaded;
}

int serve(const ServeFlags& flags) {
  // Clients and readers of the log may go away at any time, and the log may reach a limit of file sizes.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  engine::EngineOptions options = engine_options(flags);
  options.max_batch = flags.max_batch;
  const std::string path = model_path(flags);
  const auto log = std::make_shared<server::Log>(
      flags.log_file, flags.log_format == "json" ? server::LogFormat::json : server::LogFormat::text);
  server::ServerOptions server_options = options_of(flags, options.plan);
  const std::size_t room = room_for_connections();
  server_options.http.max_connections = std::min(flags.max_connections, room);
  if (room < flags.max_connections) {
    log->warn("max_connections_lowered", {{"asked", static_cast<std::int64_t>(flags.max_connections)},
                                          {"now", static_cast<std::int64_t>(room)},
                                          {"why", std::string("the limit of open files (ulimit -Hn)")}});
  }
  server::Server::Ended ended{};
  {
    server::Server server(
        server_options, [&] { return load(flags, options, path, *log); }, log);
    ended = server.run(true);
    if (ended == server::Server::Ended::stuck) {
      log->flush();
      std::_Exit(kInterrupted);  // what ends otherwise waits for all threads
    }
  }
  // Signals were the server's while it existed; what is left takes no time.
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, SIG_IGN);
  return ended == server::Server::Ended::drained ? kOk : kInterrupted;
}

void add_limits(CLI::App& command, ServeFlags& flags) {
  command.add_option("--max-batch", flags.max_batch, "samples in progress at once; others wait")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  command.add_option("--max-pending", flags.max_pending, "requests accepted and not finished; further ones get 429")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command.add_option("--max-choices", flags.max_choices, "answers of one request: prompts x n")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command.add_option("--max-connections", flags.max_connections, "open connections; further ones get 503")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command.add_option("--max-body-kib", flags.max_body_kib, "longest request body, KiB; longer ones get 413")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command.add_option("--max-header-kib", flags.max_header_kib, "longest request header, KiB")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command
      .add_option("--max-output-kib", flags.max_output_kib,
                  "of a stream that its client has not read; then it is dropped")
      ->check(CLI::Range(16, 1 << 20))
      ->capture_default_str();
  const CLI::Validator seconds(check_seconds, "SECONDS");
  command.add_option("--read-timeout", flags.read_timeout, "seconds for a request to arrive; else 408")
      ->check(seconds)
      ->capture_default_str();
  command.add_option("--write-timeout", flags.write_timeout, "seconds for a client to take what was written")
      ->check(seconds)
      ->capture_default_str();
  command.add_option("--idle-timeout", flags.idle_timeout, "seconds that a connection may rest between requests")
      ->check(seconds)
      ->capture_default_str();
  command.add_option("--drain-timeout", flags.drain_timeout, "seconds for requests under way to end after SIGTERM")
      ->check(seconds)
      ->capture_default_str();
}

}  // namespace

void add_serve(CLI::App& app, Action& action) {
  auto flags = std::make_shared<ServeFlags>();
  CLI::App& command = *app.add_subcommand("serve", "Answer OpenAI's HTTP interface with a model");
  command.add_option("--host", flags->host, "address to listen on; 0.0.0.0: every one of this machine")
      ->capture_default_str();
  command.add_option("--port", flags->port, "0: any free one, told in the log")->capture_default_str();
  command.add_option(
      "--api-key", flags->api_key,
      "clients must send it (Authorization: Bearer KEY); HEADWATER_API_KEY keeps it out of the process list");
  command.add_option("--served-model-name", flags->served_name,
                     "what requests call the model; default: the file's name");
  flags->add_to(command);
  add_limits(command, *flags);
  command.add_option("--log-file", flags->log_file, "default: standard error");
  command.add_option("--log-format", flags->log_format, "text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  command.footer(
      "Examples:\n"
      "  headwater serve\n"
      "  headwater serve --model model.gguf --port 9000 --kv-mib 4096 --cascade auto\n"
      "  HEADWATER_API_KEY=secret headwater serve --host 0.0.0.0\n"
      "  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\\n"
      "    -d '{\"model\": \"SmolLM2-135M-Instruct.Q4_1\", \"messages\": [{\"role\": \"user\", \"content\": \"Name a "
      "river.\"}]}'\n\n"
      "Environment: HEADWATER_CASCADE_ATTENTION (--cascade), HEADWATER_CASCADE_MIN_SHARED_PAGES (--min-shared-pages), "
      "HEADWATER_CASCADE_MIN_MEMBERS (--min-members), HEADWATER_API_KEY (--api-key); read once; flags win.\n"
      "SIGTERM or Ctrl-C: no new requests, those under way are finished, then it ends; a second one ends it at once, "
      "or "
      "after 5 s where a step of the model takes that long.\n"
      "Exit codes: 0 ended after draining, 2 wrong usage, 3 unusable model or address, 4 not supported here, 130 ended "
      "at "
      "once.");
  command.callback([flags, &action] { action = [flags] { return serve(*flags); }; });
}

}  // namespace headwater::cli
