// The command `headwater`. Results go to standard output, everything else to standard error; exit codes are in
// command.h.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <string_view>

#include "cli/command.h"

namespace headwater::cli {
namespace {

int exit_code_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
    case ErrorCode::invalid_page_table:
    case ErrorCode::io:
      return kBadInput;
    case ErrorCode::unsupported:
      return kUnsupported;
    default:
      return kFailed;
  }
}

/// Never throws, whatever standard error is.
void complain(const std::string& message) {
  std::fprintf(stderr, "headwater: %s\n", message.c_str());
}

int run(int argc, char** argv) {
  CLI::App app("Attention that reads every shared page of a paged KV cache once per decode step.", "headwater");
  app.set_version_flag("--version", std::string("headwater ") + version());
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 done, 1 a run, proof or gate failed, 2 wrong usage, 3 unusable input, 4 not supported here, 130 "
      "interrupted.\n"
      "`headwater COMMAND --help` explains a command with examples.");
  Action action;
  add_generate(app, action);
  add_serve(app, action);
  add_bench(app, action);
  add_bench_serving(app, action);
  add_explain(app, action);
  add_calibrate(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    const int code = app.exit(e);
    return code == 0 ? kOk : kUsage;
  }
  // `explain` has no steps to stop after, `serve` has its own way of ending.
  if (!app.got_subcommand("explain") && !app.got_subcommand("serve")) catch_interrupts();
  try {
    const int code = action();
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
    complain("error: standard output cannot be written");
    return kFailed;
  } catch (const Interrupted&) {
    complain("interrupted");
    return kInterrupted;
  } catch (const Error& e) {
    complain(std::string("error: ") + e.what());
    return exit_code_of(e.code());
  } catch (const std::bad_alloc&) {
    complain("error: out of memory");
    return kFailed;
  } catch (const std::exception& e) {
    complain(std::string("error: ") + e.what());
    return kFailed;
  }
}

/// A file or socket opened later must not become a standard stream that was closed: what is meant for people would go
/// there. The places are taken by something that fails to be read or written, as the closed ones did.
void hold_standard_streams() {
  for (int file = 0; file <= 2; ++file) {
    // The lowest free number is the one that is asked for.
    if (fcntl(file, F_GETFD) == -1) (void)open("/dev/null", file == 0 ? O_WRONLY : O_RDONLY);
  }
}

/// Starts the command again with libgomp's workers told to spin only briefly: it reads its environment when it is
/// loaded. Where other programs want the cores, its default of spinning for long makes a step three times as long
/// (omp_executor.h). Whoever has set either variable is left alone, and so is a system without /proc.
void spin_briefly(char** argv) {
  if (std::getenv("GOMP_SPINCOUNT") != nullptr || std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  if (setenv("GOMP_SPINCOUNT", "1000", 0) == 0) execv("/proc/self/exe", argv);
}

}  // namespace
}  // namespace headwater::cli

int main(int argc, char** argv) {
  headwater::cli::hold_standard_streams();
  const std::string_view command = argc > 1 ? argv[1] : "";
  if (command == "generate" || command == "serve") headwater::cli::spin_briefly(argv);
  return headwater::cli::run(argc, argv);
}
