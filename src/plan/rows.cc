#include "plan/rows.h"

#include <algorithm>
#include <limits>

namespace headwater::detail {
namespace {

std::int64_t floor_div(std::int64_t a, std::int64_t b) {
  return a >= 0 ? a / b : -((-a + b - 1) / b);
}

}  // namespace

std::int32_t sink_limit(const PlanOptions& options) noexcept {
  return static_cast<std::int32_t>(
      std::min<std::int64_t>(options.num_sink_tokens, std::numeric_limits<std::int32_t>::max() / 2));
}

void append_rows(const PlanOptions& o, std::int32_t qo_len, std::int32_t first, std::int32_t kv_end,
                 std::vector<RowRange>& rows) {
  for (std::int32_t i = 0; i < qo_len; ++i) {
    const std::int64_t pos = std::int64_t{kv_end} - qo_len + i;
    std::int64_t lo = first;
    std::int64_t hi = o.causal ? std::min<std::int64_t>(pos + 1, kv_end) : kv_end;
    if (o.window_left >= 0)
      lo = std::max(lo, pos - std::min<std::int64_t>(o.window_left, std::numeric_limits<std::int32_t>::max()));
    if (o.local_chunk > 0) {
      const std::int64_t chunk = floor_div(pos, o.local_chunk);
      lo = std::max(lo, chunk * o.local_chunk);
      hi = std::min(hi, (chunk + 1) * o.local_chunk);
    }
    if (lo >= hi) {
      // No key but perhaps sinks, which only a row that is not causal sees from before the first key.
      hi = o.causal ? first : std::clamp<std::int64_t>(o.num_sink_tokens, first, std::max(first, kv_end));
      lo = hi;
    }
    rows.push_back({static_cast<std::int32_t>(lo), static_cast<std::int32_t>(hi), static_cast<std::int32_t>(pos)});
  }
}

void make_rows_and_entries(const PlanOptions& options, int page_size, PlanData::Memory& memory,
                           std::vector<RowRange>& rows) {
  rows.clear();
  memory.entries.clear();
  rows.reserve(static_cast<std::size_t>(memory.qo_indptr.back()));
  const std::int32_t sinks = sink_limit(options);
  const bool fixed = options.batch_invariant;
  memory.row_first.clear();
  const bool plain = options.causal && options.window_left < 0 && options.local_chunk == 0 && sinks == 0;
  for (std::int32_t b = 0; b < memory.num_requests; ++b) {
    const Table& table = memory.tables[static_cast<std::size_t>(b)];
    const TokenSpan tokens = tokens_of(table, page_size);
    const std::int32_t first = tokens.begin + table.first_offset;
    const std::int32_t row_begin = memory.qo_indptr[static_cast<std::size_t>(b)];
    const std::int32_t row_end = memory.qo_indptr[static_cast<std::size_t>(b) + 1];
    if (plain && row_end - row_begin == 1 && first < tokens.end) {  // a request of a decode step sees its whole table
      rows.emplace_back() = {first, tokens.end, tokens.end - 1};
      if (fixed) memory.row_first.push_back(first);
      memory.entries.emplace_back() = {b,
                                       row_begin,
                                       row_end,
                                       first,
                                       tokens.end,
                                       table.start_page,
                                       table.start_page + table.num_pages,
                                       table.region - table.start_page,
                                       1,
                                       false};
      continue;
    }
    append_rows(options, row_end - row_begin, first, tokens.end, rows);

    std::int32_t lo = std::numeric_limits<std::int32_t>::max();
    std::int32_t hi = 0;    // of windows
    std::int32_t last = 0;  // of anything
    for (std::int32_t r = row_begin; r < row_end; ++r) {
      const RowRange& row = rows[static_cast<std::size_t>(r)];
      if (fixed) memory.row_first.push_back(first < sinks && first < row.hi ? first : row.lo);
      last = std::max(last, row.hi);
      if (row.lo >= row.hi) continue;
      lo = std::min(lo, row.lo);
      hi = std::max(hi, row.hi);
    }
    Entry e;
    e.request = b;
    e.row_begin = row_begin;
    e.row_end = row_end;
    e.page_base = table.region - table.start_page;
    // Keys hidden by first_page_offset must not lie in an item among sinks of other requests.
    e.solo = table.first_offset > 0 && tokens.begin < sinks;
    const auto add = [&](std::int32_t begin, std::int32_t end, std::int32_t lane) {
      if (begin >= end) return;
      e.tok_begin = begin;
      e.tok_end = end;
      e.page_begin = begin / page_size;
      e.page_end = (end + page_size - 1) / page_size;
      e.lane = lane;
      memory.entries.push_back(e);
    };
    const std::int32_t sink_end = std::min(sinks, last);
    if (first >= sink_end) {
      add(lo, hi, 1);
    } else if (fixed) {
      // Batch-invariant mode: sinks are always a stretch of their own, so that no row's states depend on its
      // neighbours.
      add(first, sink_end, 0);
      add(std::max(lo, sinks), hi, 1);
    } else if (lo >= hi || sink_end > lo / page_size * page_size - page_size) {
      add(first, std::max(hi, sink_end), 1);
    } else {
      add(first, sink_end, 0);
      add(lo, hi, 1);
    }
  }
}

}  // namespace headwater::detail
