// Cells as an SVG picture: bars of time for every policy, a mark at the limit. Readable on light and dark backgrounds.
#pragma once

#include <string>
#include <vector>

#include "bench/harness.h"

namespace headwater::bench {

[[nodiscard]] std::string plot_svg(const std::vector<CellResult>& cells, const std::string& title);

}  // namespace headwater::bench
