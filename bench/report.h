// Results as a table for people, CSV and JSON for machines.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "bench/replay.h"

namespace headwater::bench {

/// Rows of text with aligned columns; the first row is the heading. Columns whose heading starts with '<' are
/// left-aligned.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> headings) : rows_{std::move(headings)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  [[nodiscard]] bool empty() const { return rows_.size() == 1; }
  [[nodiscard]] std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// 12345678 -> "12.3 MB"; decimal units.
[[nodiscard]] std::string human_bytes(double bytes);
/// 1234.5 us -> "1.23 ms".
[[nodiscard]] std::string human_us(double us);

/// "3", or "40 (KEPT 12)" where samples at less than full speed had to be kept.
[[nodiscard]] std::string dropped_text(int dropped, int throttled_kept);

/// Columns of the table of cells; of a CUDA device there are more.
[[nodiscard]] TextTable cell_table(bool cuda = false);
void add_rows(TextTable& table, const CellResult& cell);

/// One object for each policy of a cell.
void append_json(nlohmann::ordered_json& array, const CellResult& cell);
[[nodiscard]] nlohmann::ordered_json to_json(const OverheadResult& overhead);
[[nodiscard]] nlohmann::ordered_json to_json(const ReplaySummary& summary);

/// A bound that a number is held to.
struct Gate {
  std::string workload;
  std::string
      name;  ///< "limit_mean", "limit_cell", "speedup", "never_slower_than_flat", "near_the_best_policy", "feature"
  Interval value;  ///< without an interval all three are equal
  double bound = 0;
  Verdict verdict = Verdict::not_judged;
};
[[nodiscard]] nlohmann::ordered_json to_json(const Gate& gate);
/// A JSON array with one object a line.
[[nodiscard]] std::string lines_of(const nlohmann::ordered_json& array);
/// The same objects as CSV: a heading, then one line each.
[[nodiscard]] std::string csv_of(const nlohmann::ordered_json& array);

}  // namespace headwater::bench
