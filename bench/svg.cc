// See svg.h. Text never sits on a bar or a line, so that one colour of text does.
#include "bench/svg.h"

#include <fmt/format.h>

namespace headwater::bench {
namespace {

constexpr const char* kLight = R"(<style>
text { font: 12px system-ui, sans-serif; fill: #24292f; }
.title { font-size: 16px; font-weight: 600; }
.quiet { fill: #57606a; }
.grid { stroke: #d0d7de; stroke-width: 1; }
.ground { fill: #ffffff; }
)";

constexpr const char* kDark = R"(@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.quiet { fill: #9da7b3; }
.grid { stroke: #30363d; }
.ground { fill: #0d1117; }
)";

}  // namespace

std::string svg_escaped(std::string_view text) {
  std::string out;
  for (const char c : text) out += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : std::string(1, c);
  return out;
}

std::string svg_begin(double width, double height, std::string_view title, std::string_view light,
                      std::string_view dark) {
  const std::string name = svg_escaped(title);
  std::string label;  // in an attribute
  for (const char c : name) label += c == '"' ? "&quot;" : std::string(1, c);
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" "
             "aria-label=\"{}\">\n",
             width, height, label) +
         kLight + std::string(light) + kDark + std::string(dark) + "}\n</style>\n" +
         fmt::format("<rect class=\"ground\" width=\"{:.0f}\" height=\"{:.0f}\"/>\n", width, height) +
         fmt::format("<text class=\"title\" x=\"16\" y=\"26\">{}</text>\n", name);
}

}  // namespace headwater::bench
