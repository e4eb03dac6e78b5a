// `headwater generate` in a build without the engine.
#include <CLI/CLI.hpp>

#include "cli/command.h"

namespace headwater::cli {

void add_generate(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand("generate", "Answer prompts with a model: not in this build");
  command.allow_extras();
  command.callback([&action] {
    action = []() -> int {
      throw Error(ErrorCode::unsupported, "generate: this build has no engine (CMake option HEADWATER_BUILD_ENGINE)");
    };
  });
}

}  // namespace headwater::cli
