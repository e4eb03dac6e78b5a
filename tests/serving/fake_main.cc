// The scripted server as a program, for commands that start servers: fake_server --port N --cascade on|off
// [--gap SECONDS] [--not-ready N] [--die].
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "fake_server.h"

int main(int argc, char** argv) {
  headwater::test::FakeOptions options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    const char* const value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--port") options.port = std::atoi(value);
    if (flag == "--cascade") options.cascade = std::string_view(value) == "on";
    if (flag == "--gap") options.gap_s = std::atof(value);
    if (flag == "--not-ready") options.not_ready = std::atoi(value);
    if (flag == "--die") {
      std::fprintf(stderr, "no model here\n");
      return 3;
    }
  }
  std::signal(SIGTERM, [](int) { _exit(0); });
  const headwater::test::FakeServer server(options);
  for (;;) pause();
}
