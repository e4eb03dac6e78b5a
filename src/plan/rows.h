// What every query row sees, and each request's visible stretch of tokens (entries). Formulas: options.h.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/memory.h"

namespace headwater::detail {

/// Range of the rows of one request of `qo_len` rows whose keys are [table_begin, kv_end), of which the first visible
/// one is `first`. Appends to `rows`.
void append_rows(const PlanOptions& options, std::int32_t qo_len, std::int32_t first, std::int32_t kv_end,
                 std::vector<RowRange>& rows);

/// First and one past the last absolute token position of a table in page-table form.
struct TokenSpan {
  std::int32_t begin = 0;
  std::int32_t end = 0;
};
[[nodiscard]] inline TokenSpan tokens_of(const Table& t, int page_size) noexcept {
  if (t.num_pages == 0) return {0, 0};
  const std::int32_t begin = t.start_page * page_size;
  return {begin, begin + (t.num_pages - 1) * page_size + t.last_len};
}

/// The stretch of [begin, end) from the first to the last key that `row` sees; empty: begin = end. A hole between sinks
/// and window is not cut out. A row that sees sinks at all must see those in [begin, end) from begin on.
[[nodiscard]] inline TokenSpan visible_part(const RowRange& row, std::int32_t sinks, std::int32_t begin,
                                            std::int32_t end) noexcept {
  const std::int32_t to = row.hi < end ? row.hi : end;
  if (to <= begin) return {begin, begin};
  if (row.lo <= begin) return {begin, to};
  if (begin < sinks) return {begin, row.lo < to || to < sinks ? to : sinks};
  return row.lo < to ? TokenSpan{row.lo, to} : TokenSpan{begin, begin};
}

/// num_sink_tokens as a position.
[[nodiscard]] std::int32_t sink_limit(const PlanOptions& options) noexcept;

/// Fills rows and entries of requests with page tables; in batch-invariant mode also memory.row_first.
void make_rows_and_entries(const PlanOptions& options, int page_size, PlanData::Memory& memory,
                           std::vector<RowRange>& rows);

}  // namespace headwater::detail
