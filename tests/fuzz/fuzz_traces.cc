// Trees, traces, the workload notation and files of cells: parse, then ask for a few moments of what was accepted.
#include "cli/formats.h"
#include "fuzz/bytes.h"
#include "fuzz/refuse.h"

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headwater;
  fuzz::Bytes in(data, size);
  const int kind = in.between(0, 4);
  const std::string_view text = in.rest();
  fuzz::accepts([&] {
    if (kind == 0) {
      for (const cli::Tree& tree : cli::parse_trees(text, "trees.jsonl")) {
        const std::int64_t last = tree.last_step();
        for (const std::int64_t step : {std::int64_t{0}, last / 2, last}) {
          (void)bench::count_tokens(tree.at_step(step));
        }
      }
    } else if (kind == 4) {
      for (const bench::Workload& cell : cli::parse_cells(text, "cells.txt")) (void)bench::count_tokens(cell.forest);
    } else if (kind == 3) {
      (void)bench::count_tokens(cli::parse_workload(text));
    } else {
      const cli::Trace trace = cli::parse_trace(text, kind == 1 ? "trace.jsonl" : "trace.csv");
      const double duration = trace.duration(1.0);
      for (const double part : {0.0, 0.5, 1.0}) (void)bench::count_tokens(trace.at_time(part * duration, 1.0));
    }
  });
  return 0;
}
