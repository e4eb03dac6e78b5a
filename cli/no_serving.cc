// `headwater bench-serving` in a build without it.
#include <CLI/CLI.hpp>

#include "cli/command.h"

namespace headwater::cli {

void add_bench_serving(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand("bench-serving", "Measure a running server under load: not in this build");
  command.allow_extras();
  command.callback([&action] {
    action = []() -> int {
      throw Error(ErrorCode::unsupported,
                  "bench-serving: this build has no Boost 1.81, or no engine (CMake option HEADWATER_BUILD_ENGINE)");
    };
  });
}

}  // namespace headwater::cli
