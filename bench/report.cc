// Results for people and machines; see report.h.
#include "bench/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace headwater::bench {
namespace {

std::string shape_text(const CellResult& cell) {
  const AttentionShape& s = cell.shape;
  const std::string dim = s.head_dim_qk == s.head_dim_vo ? fmt::format("{}", s.head_dim_qk)
                                                         : fmt::format("{}:{}", s.head_dim_qk, s.head_dim_vo);
  const std::string types = s.q_dtype == s.kv_dtype ? std::string(name_of(s.kv_dtype))
                                                    : fmt::format("{}/{}", name_of(s.q_dtype), name_of(s.kv_dtype));
  return fmt::format("{}/{}/{} {} {}", s.num_qo_heads, s.num_kv_heads, dim, types, name_of(cell.layout));
}

/// What every gate has. `passed` is false for one that is missed or not judged.
/// Bytes that are not UTF-8 (a model's answer may be cut inside a character) become U+FFFD.
std::string text_of(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

void append_gate(nlohmann::ordered_json& out, const std::string& workload, std::string_view name, Verdict verdict) {
  out["workload"] = workload;
  out["gate"] = name;
  out["verdict"] = name_of(verdict);
  out["passed"] = verdict == Verdict::passed;
}

/// Width on a terminal: code points, not bytes.
std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

}  // namespace

std::string TextTable::text() const {
  const std::size_t columns = rows_.front().size();
  std::vector<std::size_t> widths(columns, 0);
  std::vector<bool> left(columns, false);
  std::vector<std::vector<std::string>> rows = rows_;
  for (std::size_t c = 0; c < columns; ++c) {
    left[c] = rows[0][c].starts_with('<');
    if (left[c]) rows[0][c].erase(0, 1);
  }
  for (const auto& row : rows) {
    for (std::size_t c = 0; c < columns; ++c) widths[c] = std::max(widths[c], width(row[c]));
  }
  std::string out;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::string line;
    for (std::size_t c = 0; c < columns; ++c) {
      if (c > 0) line += "  ";
      if (!left[c]) line.append(widths[c] - width(rows[r][c]), ' ');
      line += rows[r][c];
      if (left[c]) line.append(widths[c] - width(rows[r][c]), ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line;
    out += "\n";
    if (r == 0) {
      for (std::size_t c = 0; c < columns; ++c) out.append(c == 0 ? 0 : 2, ' ').append(widths[c], '-');
      out += "\n";
    }
  }
  return out;
}

std::string human_bytes(double bytes) {
  static constexpr std::array kUnits = {"B", "kB", "MB", "GB", "TB"};
  std::size_t unit = 0;
  while (bytes >= 1000 && unit + 1 < kUnits.size()) {
    bytes /= 1000;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", bytes, unit == 0 || bytes >= 100 ? 0 : bytes >= 10 ? 1 : 2, kUnits[unit]);
}

std::string human_us(double us) {
  if (us < 1000) return fmt::format("{:.{}f} us", us, us < 100 ? 1 : 0);
  return us < 1e6 ? fmt::format("{:.2f} ms", us / 1e3) : fmt::format("{:.2f} s", us / 1e6);
}

std::string dropped_text(int dropped, int throttled_kept) {
  return throttled_kept > 0 ? fmt::format("{} (KEPT {})", dropped, throttled_kept) : fmt::format("{}", dropped);
}

TextTable cell_table(bool cuda) {
  std::vector<std::string> headings{
      "<workload",       "<shape",  "batch",   "<policy",     "<path",          "<isa",  "median (min, max)",
      "speed-up [95 %]", "KV read", "of flat", "of distinct", "plan cold/warm", "limit", "x limit",
      "read GB/s",       "error",   "dropped"};
  if (cuda) headings.insert(headings.end(), {"warm cache", "upload", "items", "<limited by"});
  return TextTable(std::move(headings));
}

void add_rows(TextTable& table, const CellResult& cell) {
  for (std::size_t a = 0; a < cell.arms.size(); ++a) {
    const ArmResult& arm = cell.arms[a];
    const auto ratio = [&](std::int64_t whole) {
      return whole > 0 ? static_cast<double>(arm.stats.kv_bytes_read) / static_cast<double>(whole) : 0.0;
    };
    const auto [low, high] = std::ranges::minmax_element(arm.rep_medians_us);
    const std::string speedup = a == 0                     ? "1"
                                : arm.same_plan_as_first() ? "same plan"
                                                           : fmt::format("{:.2f} [{:.2f}, {:.2f}]", arm.speedup.middle,
                                                                         arm.speedup.low, arm.speedup.high);
    std::vector<std::string> row{a == 0 ? cell.workload : "",
                                 a == 0 ? shape_text(cell) : "",
                                 a == 0 ? fmt::format("{}", cell.batch) : "",
                                 std::string(name_of(arm.policy)),
                                 std::string(name_of(arm.stats.path)),
                                 cell.isa,
                                 fmt::format("{} ({}, {})", human_us(arm.median_us), human_us(*low), human_us(*high)),
                                 speedup,
                                 human_bytes(static_cast<double>(arm.stats.kv_bytes_read)),
                                 fmt::format("{:.1f} %", 100 * ratio(arm.stats.kv_bytes_flat)),
                                 fmt::format("{:.2f}x", ratio(arm.stats.kv_bytes_unique)),
                                 fmt::format("{:.1f}/{:.1f} us", arm.plan_us, arm.plan_warm_us),
                                 human_us(arm.limit_us),
                                 fmt::format("{:.2f}", arm.times_limit),
                                 a == 0 ? fmt::format("{:.1f}{}", cell.read_gbs, cell.kv_aliased ? "*" : "") : "",
                                 fmt::format("{:.1e}", arm.max_rel_error),
                                 a == 0 ? dropped_text(cell.dropped, cell.throttled_kept) : ""};
    if (cell.device == "cuda") {
      row.insert(row.end(), {human_us(arm.warm_us), human_us(arm.upload_us), fmt::format("{}", arm.stats.num_items),
                             arm.bytes_limit_us >= arm.flops_limit_us ? "bytes" : "products"});
    }
    table.add(std::move(row));
  }
}

void append_json(nlohmann::ordered_json& array, const CellResult& cell) {
  for (const ArmResult& arm : cell.arms) {
    nlohmann::ordered_json out;
    out["workload"] = cell.workload;
    out["policy"] = name_of(arm.policy);
    out["path"] = name_of(arm.stats.path);
    out["batch"] = cell.batch;
    out["dtype"] = name_of(cell.shape.q_dtype);
    out["kv_dtype"] = name_of(cell.shape.kv_dtype);
    out["layout"] = name_of(cell.layout);
    out["num_qo_heads"] = cell.shape.num_qo_heads;
    out["num_kv_heads"] = cell.shape.num_kv_heads;
    out["head_dim_qk"] = cell.shape.head_dim_qk;
    out["head_dim_vo"] = cell.shape.head_dim_vo;
    out["page_size"] = cell.page_size;
    out["isa"] = cell.isa;
    out["batch_invariant"] = cell.batch_invariant;
    out["threads"] = cell.threads;
    out["median_us"] = arm.median_us;
    out["min_us"] = arm.min_us;
    out["max_us"] = arm.max_us;
    out["rep_medians_us"] = arm.rep_medians_us;
    out["plan_us"] = arm.plan_us;
    out["plan_warm_us"] = arm.plan_warm_us;
    out["kv_bytes_unique"] = arm.stats.kv_bytes_unique;
    out["kv_bytes_flat"] = arm.stats.kv_bytes_flat;
    out["kv_bytes_read"] = arm.stats.kv_bytes_read;
    out["flops"] = arm.stats.flops;
    out["num_items"] = arm.stats.num_items;
    out["num_partials"] = arm.stats.num_partials;
    out["num_spans"] = arm.stats.num_spans;
    out["shared_tokens"] = arm.stats.shared_tokens;
    out["member_sequences"] = arm.stats.member_sequences;
    out["predicted_us"] = static_cast<double>(arm.stats.predicted_ps) / 1e6;
    out["predicted_flat_us"] = static_cast<double>(arm.stats.predicted_flat_ps) / 1e6;
    out["limit_us"] = arm.limit_us;
    out["times_limit"] = arm.times_limit;
    out["read_gbs"] = cell.read_gbs;
    out["peak_gflops"] = cell.peak_gflops;
    out["speedup"] = arm.speedup.middle;
    out["speedup_low"] = arm.speedup.low;
    out["speedup_high"] = arm.speedup.high;
    out["same_plan_as_first"] = arm.same_plan_as_first();
    out["bits_equal_first"] = arm.bits_equal_first;
    out["max_rel_error"] = arm.max_rel_error;
    out["max_lse_error"] = arm.max_lse_error;
    out["samples"] = cell.samples;
    out["dropped"] = cell.dropped;
    out["throttled_kept"] = cell.throttled_kept;
    out["kv_aliased"] = cell.kv_aliased;
    out["device"] = cell.device;
    if (cell.device == "cuda") {
      out["warm_us"] = arm.warm_us;
      out["upload_us"] = arm.upload_us;
      out["bytes_limit_us"] = arm.bytes_limit_us;
      out["flops_limit_us"] = arm.flops_limit_us;
    }
    array.push_back(std::move(out));
  }
}

nlohmann::ordered_json to_json(const OverheadResult& overhead) {
  nlohmann::ordered_json out;
  append_gate(out, overhead.workload, "no_sharing_overhead", overhead.verdict());
  out["batch"] = overhead.batch;
  out["pairs"] = overhead.pairs;
  out["flat_us"] = overhead.flat_us;
  out["plan_warm_us"] = overhead.plan_warm_us;
  out["plan_us"] = overhead.plan_cold_us;
  out["ratio"] = overhead.ratio.middle;
  out["ratio_low"] = overhead.ratio.low;
  out["ratio_high"] = overhead.ratio.high;
  out["same_plan"] = overhead.same_plan;
  return out;
}

nlohmann::ordered_json to_json(const ReplaySummary& summary) {
  nlohmann::ordered_json out;
  append_gate(out, summary.name, "replay_never_slower", summary.verdict());
  out["policy"] = name_of(summary.policy);
  out["steps"] = summary.steps;
  out["identical_plans"] = summary.identical_plans;
  out["mean_requests"] = summary.mean_requests;
  out["kv_bytes_read"] = summary.bytes_read;
  out["kv_bytes_flat"] = summary.bytes_flat;
  out["kv_bytes_unique"] = summary.bytes_unique;
  out["times_limit"] = summary.times_limit;
  out["worst_times_limit"] = summary.worst_times_limit;
  out["speedup"] = summary.speedup;
  out["total_speedup"] = summary.total_speedup;
  out["pair_ratio"] = summary.pair_ratio.middle;
  out["pair_ratio_low"] = summary.pair_ratio.low;
  out["pair_ratio_high"] = summary.pair_ratio.high;
  out["pairs"] = summary.pairs;
  out["dropped"] = summary.dropped;
  out["throttled_kept"] = summary.throttled_kept;
  return out;
}

nlohmann::ordered_json to_json(const Gate& gate) {
  nlohmann::ordered_json out;
  append_gate(out, gate.workload, gate.name, gate.verdict);
  out["value"] = gate.value.middle;
  out["low"] = gate.value.low;
  out["high"] = gate.value.high;
  out["bound"] = gate.bound;
  return out;
}

std::string lines_of(const nlohmann::ordered_json& array) {
  std::string out = "[";
  for (std::size_t i = 0; i < array.size(); ++i) out.append(i == 0 ? "\n" : ",\n").append(text_of(array[i]));
  out += "\n]\n";
  return out;
}

std::string csv_of(const nlohmann::ordered_json& array) {
  std::string out;
  std::vector<std::string> columns;
  for (const auto& object : array) {
    std::vector<std::string> keys;
    for (const auto& [key, value] : object.items()) {
      if (!value.is_array()) keys.push_back(key);
    }
    if (keys != columns) {  // a table of another kind starts
      out += out.empty() ? "" : "\n";
      for (std::size_t i = 0; i < keys.size(); ++i) out.append(i == 0 ? "" : ",").append(keys[i]);
      out += "\n";
      columns = std::move(keys);
    }
    for (std::size_t i = 0; i < columns.size(); ++i)
      out.append(i == 0 ? "" : ",").append(text_of(object.at(columns[i])));
    out += "\n";
  }
  return out;
}

}  // namespace headwater::bench
