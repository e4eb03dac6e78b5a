// JSON page tables, as `explain` reads them: parse, then plan what was accepted.
#include "cli/formats.h"
#include "fuzz/bytes.h"
#include "fuzz/refuse.h"
#include "headwater/plan.h"

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headwater;
  fuzz::Bytes in(data, size);
  const std::string_view text = in.rest();
  fuzz::accepts([&] {
    const cli::PageTableFile file = cli::parse_page_table(text, "input.json");
    Planner planner;
    const Plan plan = planner.plan(file.shape, file.batch(), file.options);
    (void)plan.describe();
    (void)plan.to_json();
  });
  fuzz::accepts([&] { (void)cli::parse_device_model(text, "model.json"); });
  return 0;
}
