// See report.h.
#include "serving/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace headwater::serving {
namespace {

using nlohmann::json;

/// 0.1234 -> "123 ms", 2.5 -> "2.50 s".
std::string seconds(double s) {
  return s < 0.9995 ? fmt::format("{:.0f} ms", s * 1e3) : fmt::format("{:.2f} s", s);
}

std::string cascade_share(const LevelResult& level) {
  if (!level.counters || level.counters->launches.empty()) return "-";
  const double total = level.counters->total_launches();
  if (total <= 0) return "no launch";
  return fmt::format("{:.0f} %", 100 * level.counters->cascade_launches() / total);
}

std::string place(const LevelResult& level) {
  return level.arm.empty() ? fmt::format("concurrency {}", level.concurrency)
                           : fmt::format("concurrency {}, cascade {}", level.concurrency, level.arm);
}

void add_counter_remarks(const LevelResult& level, const Counters& counters, std::vector<std::string>& out) {
  if (counters.launches.empty()) {
    out.push_back(place(level) + ": /metrics has no headwater_decode_launches_total; which path ran is not known");
    return;
  }
  std::string paths;
  for (const auto& [path, count] : counters.launches)
    paths += fmt::format("{}{} {:.0f}", paths.empty() ? "" : ", ", path, count);
  if (counters.total_launches() <= 0) {
    out.push_back(place(level) + ": no decode launch was counted");
  } else if (counters.cascade_launches() <= 0 && level.arm == "off") {
    out.push_back(fmt::format("{}: as asked, no cascade (launches: {})", place(level), paths));
  } else if (counters.cascade_launches() <= 0) {
    out.push_back(fmt::format("{}: DID NOT RUN CASCADE (launches: {})", place(level), paths));
  } else {
    std::string line = fmt::format("{}: launches: {}", place(level), paths);
    if (const double spans = counters.total("cascade_spans"); spans > 0) {
      line += fmt::format("; mean shared span {:.0f} tokens, read once for {:.1f} sequences",
                          counters.total("cascade_shared_tokens") / spans,
                          counters.total("cascade_member_sequences") / spans);
    }
    if (level.arm == "off") line += " (UNEXPECTED: this arm has it off)";
    out.push_back(std::move(line));
  }
  if (const double read = counters.total("kv_bytes_read"); read > 0) {
    out.push_back(fmt::format("{}: KV read {:.2f} GB, flat would read {:.2f}x as much", place(level), read / 1e9,
                              (read + counters.total("kv_bytes_saved")) / read));
  }
  if (const double steps = counters.total("steps"); steps > 0) {
    const double whole = counters.total("step_seconds");
    const auto share = [&](const char* name) { return 100 * counters.total(name) / whole; };
    const double kernels = share("product_seconds") + share("attention_seconds") + share("append_seconds");
    // Norms and the like are the model's, scheduling, planning, sampling and detokenising are not.
    const bool split = counters.total("forward_seconds") > 0;
    const std::string rest = split ? fmt::format("the model's small operations {:.1f} %, no model {:.1f} %",
                                                 share("forward_seconds") - kernels, 100 - share("forward_seconds"))
                                   : fmt::format("the rest {:.1f} %", 100 - kernels);
    out.push_back(
        fmt::format("{}: {:.0f} steps of {:.1f} ms: products {:.1f} %, attention {:.1f} %, appends {:.1f} %, {} "
                    "(planning {:.1f} %)",
                    place(level), steps, 1e3 * whole / steps, share("product_seconds"), share("attention_seconds"),
                    share("append_seconds"), rest, share("plan_seconds")));
    out.push_back(fmt::format("{}: between steps {:.1f} % of the time", place(level),
                              100 * std::max(0.0, 1 - whole / level.wall_s)));
  }
}

json interval_json(const bench::Interval& interval) {
  return {{"low", interval.low}, {"median", interval.middle}, {"high", interval.high}};
}

}  // namespace

std::string table_head(bool arms, bool metrics) {
  return fmt::format("{}{:>11} {:>5} {:>5} {:>10} {:>10} {:>13} {:>16}{}\n", arms ? "cascade " : "", "concurrency",
                     "ok", "fail", "TTFT mean", "TTFT p95", "decode tok/s", "aggregate tok/s",
                     metrics ? "   cascade" : "");
}

std::string table_row(const LevelResult& level, bool arms, bool metrics) {
  return fmt::format("{}{:>11} {:>5} {:>5} {:>10} {:>10} {:>13.1f} {:>16.1f}{}\n",
                     arms ? fmt::format("{:<8}", level.arm) : "", level.concurrency, level.ok, level.fail,
                     seconds(level.ttft_mean_s), seconds(level.ttft_p95_s), level.decode_tps, level.aggregate_tps,
                     metrics ? fmt::format("{:>10}", cascade_share(level)) : "");
}

std::vector<std::string> remarks(const LevelResult& level) {
  std::vector<std::string> out;
  for (const auto& [message, count] : level.errors)
    out.push_back(fmt::format("{}: {} failed: {}", place(level), count, message));
  if (level.counted_events > 0)
    out.push_back(fmt::format("{}: {} answers came without usage; their tokens are counted as events", place(level),
                              level.counted_events));
  if (level.counters) add_counter_remarks(level, *level.counters, out);
  return out;
}

std::string replay_line(const LevelResult& level) {
  std::string line = fmt::format("{} requests in {:.1f} s, at most {} at once, started {} late on average",
                                 level.ok + level.fail, level.wall_s, level.concurrency, seconds(level.late_mean_s));
  line += fmt::format("; {} tokens out", level.completion_tokens);
  if (level.prompt_tokens) line += fmt::format(", {} in", *level.prompt_tokens);
  if (level.prompt_tokens && level.cached_tokens && *level.prompt_tokens > 0)
    line += fmt::format(" ({:.1f} % from the prefix cache)",
                        100.0 * static_cast<double>(*level.cached_tokens) / static_cast<double>(*level.prompt_tokens));
  return line;
}

std::string ratio_line(const PairRatio& ratio) {
  const auto text = [](const bench::Interval& i) {
    return fmt::format("{:.3f} [{:.3f}, {:.3f}]", i.middle, i.low, i.high);
  };
  if (ratio.rounds == 0) return fmt::format("concurrency {}: on/off: no round without failures", ratio.concurrency);
  return fmt::format("concurrency {}: on/off over {} rounds: aggregate tok/s {}, decode tok/s {}, TTFT {}",
                     ratio.concurrency, ratio.rounds, text(ratio.aggregate), text(ratio.decode), text(ratio.ttft));
}

std::string explain_line(const LevelResult& on, const LevelResult& off) {
  if (!on.counters || !off.counters) return "";
  const Counters& a = *on.counters;
  const Counters& b = *off.counters;
  const double attention = b.total("attention_seconds");
  if (attention <= 0 || b.total("kv_bytes_read") <= 0) return "";
  return fmt::format(
      "  KV bytes on/off {:.3f}; attention time on/off {:.3f}, and it is {:.0f} % of the steps with cascade off",
      a.total("kv_bytes_read") / b.total("kv_bytes_read"), a.total("attention_seconds") / attention,
      100 * attention / b.total("step_seconds"));
}

json to_json(const LevelResult& level) {
  json out = {{"concurrency", level.concurrency},
              {"rounds", level.rounds},
              {"ok", level.ok},
              {"fail", level.fail},
              {"wall_s", level.wall_s},
              {"ttft_mean_s", level.ttft_mean_s},
              {"ttft_p50_s", level.ttft_p50_s},
              {"ttft_p95_s", level.ttft_p95_s},
              {"gap_p50_s", level.gap_p50_s},
              {"gap_p95_s", level.gap_p95_s},
              {"decode_tps", level.decode_tps},
              {"aggregate_tps", level.aggregate_tps},
              {"completion_tokens", level.completion_tokens},
              {"counted_events", level.counted_events},
              {"errors", level.errors}};
  if (!level.arm.empty()) out["cascade"] = level.arm;
  out["prompt_tokens"] = level.prompt_tokens ? json(*level.prompt_tokens) : json(nullptr);
  out["cached_tokens"] = level.cached_tokens ? json(*level.cached_tokens) : json(nullptr);
  if (level.late_mean_s > 0) out["late_mean_s"] = level.late_mean_s;
  if (level.counters) {
    out["launches"] = level.counters->launches;
    out["counters"] = level.counters->totals;
  } else {
    out["launches"] = nullptr;
  }
  return out;
}

json to_json(const PairRatio& ratio) {
  return {{"concurrency", ratio.concurrency},
          {"rounds", ratio.rounds},
          {"aggregate_ratio", interval_json(ratio.aggregate)},
          {"decode_ratio", interval_json(ratio.decode)},
          {"ttft_ratio", interval_json(ratio.ttft)}};
}

}  // namespace headwater::serving
