// What the project's SVG pictures have in common: text, grid and ground in a light and a dark set of colours.
#pragma once

#include <string>
#include <string_view>

namespace headwater::bench {

/// `text` with &, < and > escaped.
[[nodiscard]] std::string svg_escaped(std::string_view text);
/// Opens a picture: style classes `title`, `quiet`, `grid`, `ground`, and those of `light`; `dark` overrides where the
/// viewer prefers dark; a ground and the title.
[[nodiscard]] std::string svg_begin(double width, double height, std::string_view title, std::string_view light,
                                    std::string_view dark);

}  // namespace headwater::bench
