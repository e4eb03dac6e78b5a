// The command `headwater`. Results go to standard output, everything else to standard error; exit codes are in
// command.h.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>

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
  add_bench(app, action);
  add_explain(app, action);
  add_calibrate(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    const int code = app.exit(e);
    return code == 0 ? kOk : kUsage;
  }
  catch_interrupts();
  try {
    return action();
  } catch (const Interrupted&) {
    fmt::print(stderr, "headwater: interrupted\n");
    return kInterrupted;
  } catch (const Error& e) {
    fmt::print(stderr, "headwater: error: {}\n", e.what());
    return exit_code_of(e.code());
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "headwater: error: out of memory\n");
    return kFailed;
  } catch (const std::exception& e) {
    fmt::print(stderr, "headwater: error: {}\n", e.what());
    return kFailed;
  }
}

}  // namespace
}  // namespace headwater::cli

int main(int argc, char** argv) {
  return headwater::cli::run(argc, argv);
}
