// See plot.h. Concurrency is on a logarithmic axis with a tick for every level; both quantities start at 0.
#include "serving/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <utility>

#include "bench/svg.h"

namespace headwater::serving {
namespace {

constexpr double kWidth = 960;
constexpr double kHeight = 424;
constexpr double kPanelWidth = 380;
constexpr double kPanelTop = 126;
constexpr double kPanelBottom = 366;

constexpr const char* kLight = R"(.head { font-size: 13px; font-weight: 600; }
.value { paint-order: stroke; stroke: #ffffff; stroke-width: 4px; stroke-linejoin: round; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .dash { stroke-dasharray: 5 4; }
.a0 { stroke: #0969da; } .a1 { stroke: #8c959f; } .any { stroke: #57606a; } .d0 { fill: #0969da; } .d1 { fill: #8c959f; }
)";
constexpr const char* kDark = R"(.value { stroke: #0d1117; }
.a0 { stroke: #58a6ff; } .a1 { stroke: #8b949e; } .any { stroke: #9da7b3; } .d0 { fill: #58a6ff; } .d1 { fill: #8b949e; }
)";

using Value = std::function<double(const LevelResult&)>;

struct Panel {
  double left = 0;
  std::string title;
  Value solid;
  Value dashed;
  std::string solid_name;
  std::string dashed_name;
  std::function<std::string(double)> label;
  bool dashed_above = false;  ///< the dashed line is never below the solid one: numbers go below
};

/// The smallest of 1, 2, 2.5, 5 x 10^k steps of which at most five reach `high`.
double nice_step(double high) {
  const double raw = std::max(high, 1e-9) / 5;
  const double decade = std::pow(10, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 2.5, 5.0}) {
    if (factor * decade >= raw * (1 - 1e-9)) return factor * decade;
  }
  return 10 * decade;
}

std::string rate_label(double value) {
  return value < 10 ? fmt::format("{:.1f}", value) : fmt::format("{:.0f}", value);
}

std::string time_label(double s) {
  return s < 0.01     ? fmt::format("{:.1f} ms", s * 1e3)
         : s < 0.9995 ? fmt::format("{:.0f} ms", s * 1e3)
                      : fmt::format("{:.3g} s", s);
}

class Drawing {
 public:
  Drawing(const std::vector<LevelResult>& levels, std::string out) : out_(std::move(out)) {
    for (const LevelResult& level : levels) {
      if (level.ok == 0) continue;
      if (std::ranges::find(arms_, level.arm) == arms_.end()) arms_.push_back(level.arm);
      levels_.push_back(level);
      ticks_.insert(level.concurrency);
    }
    std::ranges::stable_sort(levels_, {}, &LevelResult::concurrency);
  }

  void draw(const Panel& panel) {
    double high = 0;
    for (const LevelResult& level : levels_) high = std::max({high, panel.solid(level), panel.dashed(level)});
    const double step = nice_step(high * 1.04);
    top_value_ = step * std::ceil(high * 1.04 / step - 1e-9);
    if (!(top_value_ > 0)) top_value_ = 1;
    out_ += fmt::format("<text class=\"head\" x=\"{:.0f}\" y=\"{:.0f}\">{}</text>\n", panel.left, kPanelTop - 44,
                        panel.title);
    legend(panel);
    grid(panel, step);
    for (std::size_t arm = arms_.size(); arm-- > 0;) {  // the first arm on top
      line(panel, arm, panel.dashed, "dash");
      line(panel, arm, panel.solid, "");
      points(panel, arm);
    }
    out_ += std::exchange(numbers_, {});  // above all lines
  }

  /// The colours of a pair.
  void arms(double y) {
    double x = 552;
    for (std::size_t arm = 0; arms_.size() > 1 && arm < arms_.size(); ++arm)
      x = entry(x, y, fmt::format("a{}", arm), "cascade " + arms_[arm]);
  }

  [[nodiscard]] std::string finish() && { return std::move(out_) + "</svg>\n"; }
  [[nodiscard]] bool empty() const noexcept { return levels_.empty(); }

 private:
  [[nodiscard]] double x_of(const Panel& panel, std::int64_t concurrency) const {
    const double low = std::log2(static_cast<double>(*ticks_.begin()));
    const double high = std::log2(static_cast<double>(*ticks_.rbegin()));
    const double share = high > low ? (std::log2(static_cast<double>(concurrency)) - low) / (high - low) : 0.5;
    return panel.left + 24 + share * (kPanelWidth - 48);
  }

  [[nodiscard]] double y_of(double value) const {
    return kPanelBottom - (kPanelBottom - kPanelTop) * value / top_value_;
  }

  /// One entry at `x`; returns where the next one goes.
  double entry(double x, double y, const std::string& classes, const std::string& name) {
    out_ += fmt::format(
        "<path class=\"line {}\" d=\"M{:.0f} {:.0f}h22\"/><text class=\"quiet\" x=\"{:.0f}\" y=\"{:.0f}\">{}</text>\n",
        classes, x, y - 4, x + 28, y, bench::svg_escaped(name));
    return x + 48 + 6.4 * static_cast<double>(name.size());
  }

  void legend(const Panel& panel) {
    const std::string color = arms_.size() > 1 ? "any" : "a0";
    const double x = entry(panel.left, kPanelTop - 20, color, panel.solid_name);
    entry(x, kPanelTop - 20, color + " dash", panel.dashed_name);
  }

  void grid(const Panel& panel, double step) {
    for (double value = 0; value <= top_value_ * (1 + 1e-9); value += step) {
      out_ += fmt::format(
          "<path class=\"grid\" d=\"M{:.1f} {:.1f}h{:.0f}\"/><text class=\"quiet\" x=\"{:.1f}\" y=\"{:.1f}\" "
          "text-anchor=\"end\">{}</text>\n",
          panel.left, y_of(value), kPanelWidth, panel.left - 6, y_of(value) + 4,
          value > 0 ? panel.label(value) : std::string("0"));
    }
    double last = -1e9;
    for (const std::int64_t tick : ticks_) {
      const double x = x_of(panel, tick);
      if (x - last < 26) continue;  // its label would touch the one before
      last = x;
      out_ += fmt::format("<text class=\"quiet\" x=\"{:.1f}\" y=\"{:.0f}\" text-anchor=\"middle\">{}</text>\n", x,
                          kPanelBottom + 18, tick);
    }
    out_ += fmt::format("<text class=\"quiet\" x=\"{:.1f}\" y=\"{:.0f}\" text-anchor=\"middle\">concurrency</text>\n",
                        panel.left + kPanelWidth / 2, kPanelBottom + 38);
  }

  void line(const Panel& panel, std::size_t arm, const Value& value, const char* dash) {
    std::string path;
    for (const LevelResult& level : levels_) {
      if (level.arm != arms_[arm]) continue;
      path +=
          fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x_of(panel, level.concurrency), y_of(value(level)));
    }
    out_ += fmt::format("<path class=\"line a{} {}\" d=\"{}\"/>\n", arm, dash, path);
  }

  /// Above its point or below? The larger of a pair's values above, the smaller one below.
  [[nodiscard]] bool above(const Panel& panel, const LevelResult& level) const {
    for (const LevelResult& other : levels_) {
      if (other.concurrency != level.concurrency || other.arm == level.arm) continue;
      const double difference = panel.solid(level) - panel.solid(other);
      return difference > 0 || (difference == 0 && level.arm == arms_.front());
    }
    return !panel.dashed_above;
  }

  void points(const Panel& panel, std::size_t arm) {
    double last = -1e9;
    for (const LevelResult& level : levels_) {
      if (level.arm != arms_[arm]) continue;
      const double x = x_of(panel, level.concurrency);
      const double y = y_of(panel.solid(level));
      out_ += fmt::format("<circle class=\"d{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\"/>", arm, x, y);
      out_ += fmt::format("<circle class=\"d{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2.5\"/>\n", arm, x,
                          y_of(panel.dashed(level)));
      if (x - last < 40) continue;  // its number would touch the one before
      bool up = above(panel, level);
      if (!up && y + 24 > kPanelBottom) {  // no room between point and axis
        if (arms_.size() > 1) continue;
        up = true;
      }
      last = x;
      numbers_ += fmt::format("<text class=\"value{}\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>\n",
                              arm == 0 ? "" : " quiet", x, y + (up ? -9 : 19), panel.label(panel.solid(level)));
    }
  }

  std::string out_;
  std::string numbers_;
  std::vector<LevelResult> levels_;
  std::vector<std::string> arms_;
  std::set<std::int64_t> ticks_;
  double top_value_ = 1;
};

}  // namespace

std::string plot_svg(const std::vector<LevelResult>& levels, const std::string& title, const std::string& subtitle) {
  std::string out = bench::svg_begin(kWidth, kHeight, title, kLight, kDark);
  out += fmt::format("<text class=\"quiet\" x=\"16\" y=\"44\">{}</text>\n", bench::svg_escaped(subtitle));
  Drawing drawing(levels, std::move(out));
  if (!drawing.empty()) {
    drawing.arms(44);
    drawing.draw({64, "Throughput, tokens/s", [](const LevelResult& l) { return l.aggregate_tps; },
                  [](const LevelResult& l) { return l.decode_tps; }, "all streams", "one stream", rate_label, false});
    drawing.draw({552, "Time to first token", [](const LevelResult& l) { return l.ttft_mean_s; },
                  [](const LevelResult& l) { return l.ttft_p95_s; }, "mean", "p95", time_label, true});
  }
  return std::move(drawing).finish();
}

}  // namespace headwater::serving
