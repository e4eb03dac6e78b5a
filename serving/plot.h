// Throughput and time to first token against concurrency as an SVG picture of two panels, readable on light and dark
// backgrounds. One colour an arm; the second quantity of a panel is dashed.
#pragma once

#include <string>
#include <vector>

#include "serving/summary.h"

namespace headwater::serving {

/// Levels in any order; those without an ok request are left out.
[[nodiscard]] std::string plot_svg(const std::vector<LevelResult>& levels, const std::string& title,
                                   const std::string& subtitle);

}  // namespace headwater::serving
