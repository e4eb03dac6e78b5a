// See hand_plan.h.
#include "cpu/hand_plan.h"

#include <algorithm>
#include <cstddef>
#include <map>

#include "cpu/run.h"
#include "cpu/scratch.h"
#include "plan/plan_data.h"

namespace headwater {
namespace {

using detail::PlanData;
using detail::RowRange;
using detail::WorkItem;

/// Tokens [begin, end) of request `request`'s table, read by `rows`. `first`: it starts its rows' range.
struct Piece {
  int request;
  std::int32_t begin;
  std::int32_t end;
  std::vector<std::int32_t> rows;
  bool first;
};

class Builder {
 public:
  Builder(const AttentionShape& shape, const PlanOptions& options, const reference::PageTables& tables,
          const HandCut& cut)
      : data_(plan_.data()), tables_(tables), cut_(cut) {
    data_.shape = shape;
    data_.options = options;
    data_.page_size = {tables.page_size};
    data_.num_pages = {tables.num_pages};
    data_.page_ids = tables.kv_indices;
  }

  Plan build() {
    add_rows();
    for (const Piece& piece : pieces()) add_items(piece);
    link_states();
    finish();
    return std::move(plan_);
  }

 private:
  [[nodiscard]] std::int32_t start_of(int b) const {
    return tables_.kv_start_page.empty() ? 0 : tables_.kv_start_page[static_cast<std::size_t>(b)] * tables_.page_size;
  }
  [[nodiscard]] std::int32_t first_of(int b) const {
    return start_of(b) +
           (tables_.first_page_offset.empty() ? 0 : tables_.first_page_offset[static_cast<std::size_t>(b)]);
  }
  [[nodiscard]] std::int32_t length_of(int b) const {
    const auto i = static_cast<std::size_t>(b);
    const std::int32_t pages = tables_.kv_indptr[i + 1] - tables_.kv_indptr[i];
    return pages == 0 ? 0 : start_of(b) + (pages - 1) * tables_.page_size + tables_.last_page_len[i];
  }

  void add_rows() {
    const PlanOptions& o = data_.options;
    for (int b = 0; b < tables_.num_requests(); ++b) {
      const std::int32_t qo_len =
          tables_.qo_indptr[static_cast<std::size_t>(b) + 1] - tables_.qo_indptr[static_cast<std::size_t>(b)];
      const std::int32_t kv_len = length_of(b);
      for (std::int32_t i = 0; i < qo_len; ++i) {
        RowRange range;
        range.pos = kv_len - qo_len + i;
        range.hi = std::max(0, o.causal ? range.pos + 1 : kv_len);
        std::int64_t lo = first_of(b);
        if (o.window_left >= 0) lo = std::max(lo, range.pos - o.window_left);
        if (o.local_chunk > 0 && range.pos >= 0) {
          const std::int64_t chunk = range.pos / o.local_chunk * o.local_chunk;
          lo = std::max(lo, chunk);
          range.hi = static_cast<std::int32_t>(std::min<std::int64_t>(range.hi, chunk + o.local_chunk));
        }
        range.lo = static_cast<std::int32_t>(lo);
        data_.rows.push_back(range);
      }
    }
  }

  /// Adds a piece for every stretch of [begin, end) each of whose tokens some of the rows sees: a plan does not make
  /// kernels read what nobody sees.
  void add_stretches(int request, std::int32_t begin, std::int32_t end, const std::vector<std::int32_t>& rows,
                     bool first, std::vector<Piece>& pieces) const {
    const auto seen = [&](std::int32_t pos) {
      return std::any_of(rows.begin(), rows.end(), [&](std::int32_t row) {
        const RowRange& range = data_.rows[static_cast<std::size_t>(row)];
        return pos < range.hi && (pos >= range.lo || pos < data_.options.num_sink_tokens);
      });
    };
    for (std::int32_t pos = begin; pos < end; ++pos) {
      if (!seen(pos)) continue;
      const std::int32_t from = pos;
      while (pos < end && seen(pos)) ++pos;
      pieces.push_back({request, from, pos, rows, first});
      first = false;
    }
  }

  std::vector<Piece> pieces() const {
    std::vector<Piece> pieces;
    const std::int32_t shared = cut_.shared_pages * tables_.page_size;
    std::vector<std::int32_t> all_rows;
    for (std::int32_t r = 0; r < static_cast<std::int32_t>(data_.rows.size()); ++r) all_rows.push_back(r);
    add_stretches(0, 0, shared, all_rows, true, pieces);
    for (int b = 0; b < tables_.num_requests(); ++b) {
      std::vector<std::int32_t> rows;
      const auto at = static_cast<std::size_t>(b);
      for (std::int32_t r = tables_.qo_indptr[at]; r < tables_.qo_indptr[at + 1]; ++r) rows.push_back(r);
      add_stretches(b, std::max(first_of(b), shared), length_of(b), rows, shared == 0, pieces);
    }
    return pieces;
  }

  void add_items(const Piece& piece) {
    const auto num_rows = static_cast<std::int32_t>(piece.rows.size());
    for (std::int32_t tile = 0; tile < num_rows; tile += cut_.tile_rows) {
      const std::int32_t tile_rows = std::min(cut_.tile_rows, num_rows - tile);
      const auto row_begin = static_cast<std::int32_t>(data_.item_rows.size());
      data_.item_rows.insert(data_.item_rows.end(), piece.rows.begin() + tile, piece.rows.begin() + tile + tile_rows);
      for (std::int32_t begin = piece.begin; begin < piece.end;) {
        const auto next = (static_cast<std::int64_t>(begin) / cut_.chunk_tokens + 1) * cut_.chunk_tokens;
        const auto end = static_cast<std::int32_t>(std::min<std::int64_t>(piece.end, next));
        add_item(piece, row_begin, tile_rows, begin, end);
        begin = end;
      }
      if (cut_.tile_rows > num_rows) break;  // tile + tile_rows would overflow
    }
  }

  void add_item(const Piece& piece, std::int32_t row_begin, std::int32_t num_rows, std::int32_t begin,
                std::int32_t end) {
    WorkItem item;
    item.pos_begin = begin;
    item.num_tokens = end - begin;
    const std::int32_t in_table = begin - start_of(piece.request);
    item.page_begin = tables_.kv_indptr[static_cast<std::size_t>(piece.request)] + in_table / tables_.page_size;
    item.first_token = in_table % tables_.page_size;
    item.row_begin = row_begin;
    item.num_rows = num_rows;
    if (data_.options.batch_invariant && !(piece.first && begin == piece.begin)) {
      const int chunk = data_.options.invariant_chunk;
      item.num_states = (end - 1) / chunk - begin / chunk + 1;
    }
    std::int32_t lo = begin;
    std::int32_t hi = end;
    for (std::int32_t j = 0; j < num_rows; ++j) {
      const RowRange& range =
          data_.rows[static_cast<std::size_t>(data_.item_rows[static_cast<std::size_t>(row_begin + j)])];
      lo = std::max(lo, range.lo);
      hi = std::min(hi, range.hi);
    }
    item.unmasked_begin = lo < hi ? lo - begin : 0;
    item.unmasked_end = lo < hi ? hi - begin : 0;
    item.cost_ps = std::int64_t{1'000'000'000} + end - begin;  // large: run uses all workers
    items_.push_back(item);
  }

  /// Gives partial slots to items whose rows have several states, cuts items by KV heads, lists the merges.
  void link_states() {
    std::stable_sort(items_.begin(), items_.end(),
                     [](const WorkItem& a, const WorkItem& b) { return a.pos_begin < b.pos_begin; });
    std::vector<int> states(data_.rows.size(), 0);
    const auto each_row = [&](const WorkItem& item, auto f) {
      for (std::int32_t j = 0; j < item.num_rows; ++j) {
        f(j, static_cast<std::size_t>(data_.item_rows[static_cast<std::size_t>(item.row_begin + j)]));
      }
    };
    for (const WorkItem& item : items_) {
      each_row(item, [&](std::int32_t, std::size_t row) { states[row] += item.num_states; });
    }
    std::vector<std::vector<std::int32_t>> slots(data_.rows.size());
    for (WorkItem& item : items_) {
      bool direct = true;
      each_row(item, [&](std::int32_t, std::size_t row) { direct = direct && states[row] == 1; });
      if (!direct) {
        item.partial_begin = data_.num_partials;
        data_.num_partials += item.num_rows * item.num_states;
        for (std::int32_t s = 0; s < item.num_states; ++s) {
          each_row(item, [&](std::int32_t j, std::size_t row) {
            slots[row].push_back(item.partial_begin + s * item.num_rows + j);
          });
        }
      }
      for (int h = 0; h < data_.shape.num_kv_heads;) {
        item.kv_head_begin = static_cast<std::int16_t>(h);
        h = static_cast<int>(std::min<std::int64_t>(std::int64_t{h} + cut_.heads_per_item, data_.shape.num_kv_heads));
        item.kv_head_end = static_cast<std::int16_t>(h);
        data_.items.push_back(item);
      }
    }
    data_.merge_indptr = {0};
    for (std::size_t row = 0; row < slots.size(); ++row) {
      if (states[row] == 0) data_.empty_rows.push_back(static_cast<std::int32_t>(row));
      if (slots[row].empty()) continue;
      data_.merge_rows.push_back(static_cast<std::int32_t>(row));
      data_.merge_slots.insert(data_.merge_slots.end(), slots[row].begin(), slots[row].end());
      data_.merge_indptr.push_back(static_cast<std::int32_t>(data_.merge_slots.size()));
    }
  }

  void finish() {
    const AttentionShape& shape = data_.shape;
    const auto partials = static_cast<std::size_t>(data_.num_partials) * static_cast<std::size_t>(shape.num_qo_heads);
    for (const WorkItem& item : data_.items) {
      data_.max_item_rows = std::max(data_.max_item_rows, item.num_rows);
      data_.stats.kv_bytes_read += cpu::kv_bytes_of(shape, item);
    }
    const cpu::ScratchShape scratch{shape.num_kv_heads, shape.group_size(), shape.head_dim_qk, shape.head_dim_vo,
                                    data_.options.batch_invariant};
    data_.num_workers = cut_.num_workers;
    data_.partial_o_bytes =
        cpu::round_up(partials * static_cast<std::size_t>(shape.head_dim_vo) * sizeof(float), kWorkspaceAlignment);
    data_.scratch_offset = data_.partial_o_bytes + cpu::round_up(partials * sizeof(float), kWorkspaceAlignment);
    data_.scratch_bytes_per_worker = data_.items.empty() ? 0 : cpu::scratch_bytes(scratch, data_.max_item_rows);
    data_.workspace_bytes =
        data_.scratch_offset + static_cast<std::size_t>(cut_.num_workers) * data_.scratch_bytes_per_worker;
    data_.stats.path = cut_.shared_pages > 0 ? Path::cascade : Path::flat;
    data_.stats.num_items = static_cast<std::int64_t>(data_.items.size());
    data_.stats.num_rows = static_cast<std::int64_t>(data_.rows.size());
    data_.stats.num_partials = data_.num_partials;
  }

  Plan plan_;
  PlanData& data_;
  const reference::PageTables& tables_;
  HandCut cut_;
  std::vector<WorkItem> items_;
};

}  // namespace

Plan hand_plan(const AttentionShape& shape, const PlanOptions& options, const reference::PageTables& tables,
               const HandCut& cut) {
  return Builder(shape, options, tables, cut).build();
}

}  // namespace headwater
