// `headwater generate` and `bench-serving` in a build without the engine and what comes with it.
#include <CLI/CLI.hpp>

#include "cli/command.h"

namespace headwater::cli {
namespace {

void add_refusal(CLI::App& app, Action& action, const std::string& name, const std::string& purpose) {
  CLI::App& command = *app.add_subcommand(name, purpose + ": not in this build");
  command.allow_extras();
  command.callback([&action, name] {
    action = [name]() -> int {
      throw Error(ErrorCode::unsupported, name + ": this build has no engine (CMake option HEADWATER_BUILD_ENGINE)");
    };
  });
}

}  // namespace

void add_generate(CLI::App& app, Action& action) {
  add_refusal(app, action, "generate", "Answer prompts with a model");
}

void add_bench_serving(CLI::App& app, Action& action) {
  add_refusal(app, action, "bench-serving", "Measure a running server under load");
}

}  // namespace headwater::cli
