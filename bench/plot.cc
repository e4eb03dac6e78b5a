// The SVG picture of a benchmark; see plot.h. A logarithmic time axis, since cells differ by orders of magnitude.
#include "bench/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "bench/report.h"
#include "bench/svg.h"

namespace headwater::bench {
namespace {

constexpr double kWidth = 960;
constexpr double kLeft = 250;   ///< labels of cells
constexpr double kRight = 170;  ///< numbers behind bars
constexpr double kBar = 14;
constexpr double kGroupGap = 12;
constexpr double kTop = 78;

constexpr const char* kLight = R"(.limit { stroke: #cf222e; stroke-width: 2; }
.flat { fill: #8c959f; } .auto { fill: #0969da; } .two_level { fill: #bf8700; } .vllm { fill: #8250df; } .forest { fill: #1a7f37; }
)";
constexpr const char* kDark = R"(.limit { stroke: #ff7b72; }
.flat { fill: #6e7681; } .auto { fill: #58a6ff; } .two_level { fill: #d29922; } .vllm { fill: #bc8cff; } .forest { fill: #3fb950; }
)";

std::string label(double us) {
  return us < 1000  ? fmt::format("{:g} us", us)
         : us < 1e6 ? fmt::format("{:g} ms", us / 1e3)
                    : fmt::format("{:g} s", us / 1e6);
}

}  // namespace

std::string plot_svg(const std::vector<CellResult>& cells, const std::string& title) {
  double low = 1e12;
  double high = 1;
  double height = kTop;
  for (const CellResult& cell : cells) {
    for (const ArmResult& arm : cell.arms) {
      low = std::min({low, arm.median_us, arm.limit_us});
      high = std::max(high, arm.median_us);
    }
    height += kBar * static_cast<double>(cell.arms.size()) + kGroupGap;
  }
  const double from = std::floor(std::log10(std::max(low, 1e-3)) - 0.2);
  const double to = std::max(from + 1, std::log10(high));
  const auto x_of = [&](double us) {
    return kLeft + (kWidth - kLeft - kRight) * (std::log10(std::max(us, 1e-3)) - from) / (to - from);
  };

  std::string out = svg_begin(kWidth, height + 20, title, kLight, kDark);
  // Legend: the policies of the first cell.
  double x = 16;
  if (!cells.empty()) {
    for (const ArmResult& arm : cells.front().arms) {
      const std::string name(name_of(arm.policy));
      out += fmt::format(
          "<rect class=\"{0}\" x=\"{1:.0f}\" y=\"38\" width=\"12\" height=\"12\"/><text x=\"{2:.0f}\" "
          "y=\"48\">{0}</text>\n",
          name, x, x + 17);
      x += 40 + 7 * static_cast<double>(name.size());
    }
    out += fmt::format(
        "<line class=\"limit\" x1=\"{0:.0f}\" x2=\"{0:.0f}\" y1=\"37\" y2=\"51\"/><text x=\"{1:.0f}\" y=\"48\">limit "
        "of the machine</text>\n",
        x + 6, x + 14);
  }
  for (double decade = from; decade <= to + 1e-9; decade += 1) {
    const double us = std::pow(10, decade);
    out += fmt::format(
        "<line class=\"grid\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.0f}\" y2=\"{2:.0f}\"/><text class=\"quiet\" "
        "x=\"{0:.1f}\" y=\"{3:.0f}\" text-anchor=\"middle\">{4}</text>\n",
        x_of(us), kTop - 4, height, height + 14, label(us));
  }
  double y = kTop;
  for (const CellResult& cell : cells) {
    const double block = kBar * static_cast<double>(cell.arms.size());
    std::string name = cell.workload.size() > 34 ? cell.workload.substr(0, 32) + ".." : cell.workload;
    out += fmt::format("<text x=\"{:.0f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n", kLeft - 10, y + block / 2 + 4,
                       svg_escaped(name));
    for (std::size_t a = 0; a < cell.arms.size(); ++a) {
      const ArmResult& arm = cell.arms[a];
      const double end = x_of(arm.median_us);
      const double limit = x_of(arm.limit_us);
      out += fmt::format("<rect class=\"{}\" x=\"{:.0f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.0f}\" rx=\"2\"/>",
                         name_of(arm.policy), kLeft, y + 1, std::max(end - kLeft, 1.0), kBar - 2);
      out += fmt::format("<line class=\"limit\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\"/>", limit,
                         y, y + kBar);
      const std::string speedup = a == 0 ? "" : fmt::format(", {:.2f}x", arm.speedup.middle);
      out += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}{}</text>\n", std::max(end, limit) + 6, y + kBar - 3,
                         human_us(arm.median_us), speedup);
      y += kBar;
    }
    y += kGroupGap;
  }
  return out + "</svg>\n";
}

}  // namespace headwater::bench
