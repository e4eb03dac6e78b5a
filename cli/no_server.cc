// `headwater serve` in a build without the server.
#include <CLI/CLI.hpp>

#include "cli/command.h"

namespace headwater::cli {

void add_serve(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand("serve", "Answer OpenAI's HTTP interface: not in this build");
  command.allow_extras();
  command.callback([&action] {
    action = []() -> int {
      throw Error(ErrorCode::unsupported, "serve: this build has no server (CMake option HEADWATER_BUILD_SERVER)");
    };
  });
}

}  // namespace headwater::cli
