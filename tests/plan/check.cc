#include "plan/check.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <tuple>
#include <vector>

#include "plan/plan_data.h"
#include "reference/attention.h"

namespace headwater::plan_test {
namespace {

using detail::PlanData;
using detail::WorkItem;

struct Checker {
  const PlanData& p;
  const PlanOptions& options;
  reference::Rows rows;
  std::ostringstream out;
  /// Of each row and KV head 0: position -> (view, page, offset).
  std::vector<std::map<std::int64_t, std::tuple<int, std::int32_t, int>>> read;
  std::vector<std::vector<const WorkItem*>> items_of;                        ///< KV head 0
  std::map<std::int32_t, std::pair<std::int32_t, std::int64_t>> slot_owner;  ///< slot -> (row, position)

  Checker(const PlanData& plan, const Batch& batch)
      : p(plan),
        options(plan.options),
        rows(reference::rows_of(batch)),
        read(rows.rows.size()),
        items_of(rows.rows.size()) {}

  bool sees(std::int32_t row, std::int64_t pos) const {
    const auto& r = rows.rows[static_cast<std::size_t>(row)];
    const auto& path = rows.paths[r.path];
    if (path.empty() || pos < path.front().position || pos > path.back().position) return false;
    return reference::sees(options, r.position, pos);
  }

  void check_item(const WorkItem& item) {
    const std::int32_t page_size = p.page_size[static_cast<std::size_t>(item.view)];
    if (item.num_tokens <= 0 || item.num_rows <= 0) out << "an item without tokens or rows\n";
    std::set<std::int32_t> distinct;
    for (std::int32_t j = 0; j < item.num_rows; ++j) {
      const std::int32_t row = p.item_rows[static_cast<std::size_t>(item.row_begin + j)];
      if (!distinct.insert(row).second) out << "row " << row << " twice in an item\n";
      if (item.kv_head_begin == 0) items_of[static_cast<std::size_t>(row)].push_back(&item);
      bool any = false;
      for (std::int32_t t = 0; t < item.num_tokens; ++t) {
        const std::int64_t pos = std::int64_t{item.pos_begin} + t;
        const bool seen = sees(row, pos);
        any = any || seen;
        if (!seen && t >= item.unmasked_begin && t < item.unmasked_end) {
          out << "position " << pos << " is unmasked, but row " << row << " does not see it\n";
        }
        if (!seen || item.kv_head_begin != 0) continue;
        const std::int32_t in_pages = item.first_token + t;
        const std::int32_t page = p.page_ids[static_cast<std::size_t>(item.page_begin + in_pages / page_size)];
        const auto [at, fresh] =
            read[static_cast<std::size_t>(row)].try_emplace(pos, std::tuple{item.view, page, in_pages % page_size});
        if (!fresh) out << "row " << row << " reads position " << pos << " twice\n";
      }
      if (!any) out << "row " << row << " sees nothing of an item\n";
      if (item.partial_begin >= 0 && item.kv_head_begin == 0) {
        for (std::int32_t s = 0; s < item.num_states; ++s) {
          const std::int32_t slot = item.partial_begin + s * item.num_rows + j;
          const std::int64_t chunk = options.invariant_chunk;
          const std::int64_t pos = s == 0 ? item.pos_begin : (item.pos_begin / chunk + s) * chunk;
          if (!slot_owner.try_emplace(slot, row, pos).second) out << "slot " << slot << " is used twice\n";
          if (slot >= p.num_partials) out << "slot " << slot << " is out of range\n";
        }
      }
    }
    for (const std::int32_t end : {0, item.num_tokens - 1}) {
      bool any = false;
      for (const std::int32_t row : distinct) any = any || sees(row, std::int64_t{item.pos_begin} + end);
      if (!any) out << "nobody sees position " << item.pos_begin + end << " at an end of an item\n";
    }
    if (item.num_rows > p.max_item_rows) out << "max_item_rows is too small\n";
  }

  void check_rows() {
    for (std::size_t r = 0; r < rows.rows.size(); ++r) {
      for (const reference::Token& token : rows.paths[rows.rows[r].path]) {
        if (!reference::sees(options, rows.rows[r].position, token.position)) continue;
        const auto at = read[r].find(token.position);
        if (at == read[r].end()) {
          out << "row " << r << " misses position " << token.position << "\n";
        } else if (at->second != std::tuple{token.view, token.page, token.offset}) {
          out << "row " << r << " reads position " << token.position << " elsewhere\n";
        }
      }
    }
  }

  /// Every row is written once: directly, by a merge, or as empty.
  void check_merges() {
    std::vector<int> written(rows.rows.size(), 0);
    for (std::size_t r = 0; r < items_of.size(); ++r) {
      for (const WorkItem* item : items_of[r]) {
        if (item->partial_begin < 0) ++written[r];
      }
      if (written[r] > 0 && items_of[r].size() != 1) out << "row " << r << " is direct, but has several items\n";
    }
    for (std::size_t m = 0; m < p.merge_rows.size(); ++m) {
      const auto row = p.merge_rows[m];
      ++written[static_cast<std::size_t>(row)];
      std::int64_t last = -1;
      for (std::int32_t i = p.merge_indptr[m]; i < p.merge_indptr[m + 1]; ++i) {
        const auto owner = slot_owner.find(p.merge_slots[static_cast<std::size_t>(i)]);
        if (owner == slot_owner.end() || owner->second.first != row) {
          out << "row " << row << " merges a slot of another row\n";
          continue;
        }
        if (owner->second.second <= last) out << "row " << row << " is not merged in ascending position\n";
        last = owner->second.second;
      }
    }
    for (const std::int32_t row : p.empty_rows) {
      ++written[static_cast<std::size_t>(row)];
      if (!items_of[static_cast<std::size_t>(row)].empty()) out << "row " << row << " is empty, but has items\n";
    }
    for (std::size_t r = 0; r < written.size(); ++r) {
      if (written[r] != 1) out << "row " << r << " is written " << written[r] << " times\n";
    }
  }

  void check_invariant() {
    const std::int64_t chunk = options.invariant_chunk;
    for (std::size_t r = 0; r < items_of.size(); ++r) {
      auto items = items_of[r];
      std::ranges::sort(items, {}, &WorkItem::pos_begin);
      for (std::size_t i = 0; i < items.size(); ++i) {
        const WorkItem& item = *items[i];
        const std::int64_t end = std::int64_t{item.pos_begin} + item.num_tokens;
        const std::int64_t chunks = (end + chunk - 1) / chunk - item.pos_begin / chunk;
        if (item.num_states != (i == 0 ? 1 : chunks)) out << "row " << r << ": wrong number of states\n";
        if (i == 0) continue;
        const std::int64_t begin = item.pos_begin;
        // The row's own keys go on from the item before: then only at a border.
        const bool goes_on = sees(static_cast<std::int32_t>(r), begin) && sees(static_cast<std::int32_t>(r), begin - 1);
        const bool level_border = items[i - 1]->view != item.view;
        if (goes_on && begin % chunk != 0 && begin != options.num_sink_tokens && !level_border) {
          out << "row " << r << " is cut at position " << begin << "\n";
        }
      }
    }
  }

  std::string run() {
    for (const WorkItem& item : p.items) check_item(item);
    check_rows();
    check_merges();
    if (options.batch_invariant) check_invariant();
    std::vector<std::int64_t> costs;
    for (const WorkItem& item : p.items) costs.push_back(item.cost_ps);
    if (!std::ranges::is_sorted(costs, std::ranges::greater())) out << "items are not sorted longest first\n";
    if (p.workspace_bytes % kWorkspaceAlignment != 0 || p.scratch_offset % kWorkspaceAlignment != 0) {
      out << "the workspace is not aligned\n";
    }
    return out.str();
  }
};

}  // namespace

std::string complaint(const Plan& plan, const Batch& batch) {
  return Checker(plan.data(), batch).run();
}

PlanOptions random_options(reference::Rng& rng) {
  PlanOptions o;
  o.causal = !rng.chance(0.2);
  if (rng.chance(0.3)) o.window_left = rng.integer(0, 80);
  if (rng.chance(0.15)) o.local_chunk = rng.integer(8, 60);
  if (rng.chance(0.3)) o.num_sink_tokens = rng.integer(1, o.local_chunk > 0 ? 8 : 40);
  if (rng.chance(0.3)) o.min_shared_pages = rng.integer(1, 4);
  if (rng.chance(0.3)) o.min_members = rng.integer(2, 4);
  if (rng.chance(0.3)) {
    o.batch_invariant = true;
    o.invariant_chunk = 16 * rng.integer(1, 3);
  }
  o.num_workers = rng.integer(0, 3);
  return o;
}

DeviceModel eager_model(int max_tile_rows) {
  DeviceModel m;
  m.item_ps = 0;
  m.item_row_ps = 0;
  m.partial_ps_per_kib = 0;
  m.launch_ps = 0;
  m.cache_bytes = 0;
  m.memory_ps_per_kib = 1'000'000;
  m.max_tile_rows = max_tile_rows;
  m.chunk_tokens = 48;
  return m;
}

reference::PageTables random_tables(reference::Rng& rng, const PlanOptions& options) {
  reference::ForestOptions f;
  f.page_size = rng.integer(1, 16);
  f.max_requests = rng.integer(1, 12);
  f.max_pages = rng.integer(1, 30);
  f.max_rows = rng.chance(0.3) ? rng.integer(2, 20) : 1;
  f.windows = rng.chance(0.4);
  f.null_page = rng.chance(0.2);
  if (options.window_left >= 0 && options.num_sink_tokens == 0) f.stale_left = options.window_left;
  return reference::random_forest(rng, f);
}

}  // namespace headwater::plan_test
