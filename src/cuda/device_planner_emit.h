// Units to what kernels read: work items, rows, merge lists; and the whole of planning.
#pragma once

#include "cuda/device_planner_units.h"

namespace headwater::cuda {

/// The request of row q, in order of position.
template <class Scratch>
HEADWATER_ON_TEAM std::int32_t position_of_row(const PlannerInput& in, const Scratch& s, std::int32_t q) {
  if (in.qo_indptr == nullptr) return q;
  std::int32_t low = 0;
  std::int32_t high = in.num_requests;
  while (high - low > 1) {
    const std::int32_t middle = (low + high) / 2;
    (s.row_begin[middle] <= q ? low : high) = middle;
  }
  return low;
}

/// A row's part of a unit.
struct RowUnit {
  std::int32_t unit;
  std::int32_t tile;   ///< of the unit
  std::int32_t index;  ///< of the row in the tile
};
template <class Scratch>
HEADWATER_ON_TEAM RowUnit row_in_node(const detail::CostModel& cost, const Scratch& s, std::int32_t m, std::int32_t q) {
  const NodeTiles tiles = tiles_of(cost, node_rows(s, m));
  const std::int32_t at = q - s.row_begin[s.position[s.node_leader[m]]];
  const std::int32_t tile = at / tiles.per_tile;
  const std::int32_t unit = s.units.first[m] + (tile >= tiles.full && tiles.full > 0 ? 1 : 0);
  return {unit, tile < tiles.full ? tile : 0, at - tile * tiles.per_tile};
}

/// Calls visit(row's part) for everything that row q reads, from its last token to its first.
template <class Scratch, class Visit>
HEADWATER_ON_TEAM void for_units_of_row(const detail::CostModel& cost, const PlannerInput& in, const Scratch& s,
                                        const UnitList& list, std::int32_t q, Visit&& visit) {
  const std::int32_t i = s.order[position_of_row(in, s, q)];
  const OwnPart own = own_part(in, s, list, i);
  if (own.num_rows > 0 && q >= own.first_row) {
    const std::int32_t per_tile = cost.rows_per_tile(own.num_rows);
    const std::int32_t tile = (q - own.first_row) / per_tile;
    visit(RowUnit{s.units.first[list.num_nodes + i] + tile, 0, q - own.first_row - tile * per_tile});
  }
  if (list.num_nodes == 0) return;
  for (std::int32_t m = s.top[i]; m >= 0; m = s.node_up[m]) visit(row_in_node(cost, s, m, q));
}

/// Results of a row go to the output if it is the row's only one, and the only one of the others in its unit; else to
/// partial slots. Sets unit_slot; returns the number of slots.
template <class Team, class Scratch>
HEADWATER_ON_TEAM std::int32_t place_states(const Team& team, const detail::CostModel& cost, const PlannerInput& in,
                                            Scratch& s, const UnitList& list, std::int32_t num_rows) {
  team.each(list.num_units, [&](int u) { s.units.slot[u] = -1; });
  team.barrier();
  team.each(num_rows, [&](int q) {
    std::int32_t states = 0;
    for_units_of_row(cost, in, s, list, q, [&](const RowUnit& part) { states += s.units.parts[part.unit]; });
    if (states < 2) return;
    for_units_of_row(cost, in, s, list, q, [&](const RowUnit& part) { team.mark(s.units.slot + part.unit, 0); });
  });
  return static_cast<std::int32_t>(team.scan(
      list.num_units,
      [&](int u) {
        const std::int32_t rows = s.units.rows[u] < 0 ? -s.units.rows[u] : s.units.rows[u];
        return s.units.slot[u] < 0 ? std::int64_t{0} : std::int64_t{s.units.parts[u]} * s.units.tiles[u] * rows;
      },
      [&](int u, std::int64_t before) {
        if (s.units.slot[u] >= 0) s.units.slot[u] = static_cast<std::int32_t>(before);
      }));
}

/// Rows, merge lists and empty rows.
template <class Team, class Scratch>
HEADWATER_ON_TEAM void emit_rows(const Team& team, const detail::CostModel& cost, const PlannerInput& in,
                                 const Scratch& s, const UnitList& list, std::int32_t num_rows,
                                 const PlannerOutput& out, Header& header) {
  // Slots, merged rows and empty rows in one number.
  constexpr int kRowBits = 20;
  constexpr std::int64_t kRowMask = (std::int64_t{1} << kRowBits) - 1;
  const auto slots_of = [&](std::int32_t q) {
    std::int32_t states = 0;
    bool partial = false;
    for_units_of_row(cost, in, s, list, q, [&](const RowUnit& part) {
      states += s.units.parts[part.unit];
      partial = partial || s.units.slot[part.unit] >= 0;
    });
    return states == 0 ? -1 : partial ? states : 0;
  };
  const std::int64_t total = team.scan(
      num_rows,
      [&](int q) {
        const std::int32_t slots = slots_of(q);
        return slots < 0 ? std::int64_t{1}
                         : std::int64_t{slots} << (2 * kRowBits) | std::int64_t{slots > 0 ? 1 : 0} << kRowBits;
      },
      [&](int q, std::int64_t before) {
        const std::int32_t p = position_of_row(in, s, q);
        const std::int32_t i = s.order[p];
        const std::int32_t j = q - s.row_begin[p];
        const std::int32_t rows = s.row_indptr[i + 1] - s.row_indptr[i];
        const std::int32_t pos = s.length[i] - rows + j;
        const std::int32_t row = s.row_indptr[i] + j;
        out.item_rows[q] = {row, 0, in.causal ? detail::greater(0, pos + 1) : s.length[i], pos};
        const std::int32_t slots = slots_of(q);
        if (slots < 0) out.empty_rows[before & kRowMask] = row;
        if (slots <= 0) return;
        const auto merge = static_cast<std::int32_t>(before >> kRowBits & kRowMask);
        auto at = static_cast<std::int32_t>(before >> (2 * kRowBits));
        out.merge_rows[merge] = row;
        out.merge_indptr[merge] = at;
        at += slots;
        for_units_of_row(cost, in, s, list, q, [&](const RowUnit& part) {
          const std::int32_t tile_rows =
              s.units.rows[part.unit] < 0 ? -s.units.rows[part.unit] : s.units.rows[part.unit];
          const std::int32_t parts = s.units.parts[part.unit];
          const std::int32_t first = s.units.slot[part.unit] + part.tile * parts * tile_rows + part.index;
          for (std::int32_t k = parts; k-- > 0;) out.merge_slots[--at] = first + k * tile_rows;
        });
      });
  header.num_merge_rows = static_cast<std::int32_t>(total >> kRowBits & kRowMask);
  header.num_empty_rows = static_cast<std::int32_t>(total & kRowMask);
  if (team.rank() == 0) out.merge_indptr[header.num_merge_rows] = static_cast<std::int32_t>(total >> (2 * kRowBits));
}

/// Work items, longest first.
template <class Team, class Scratch>
HEADWATER_ON_TEAM void emit_items(const Team& team, const detail::CostModel& cost, const PlannerInput& in, Scratch& s,
                                  const UnitList& list, const PlannerOutput& out, Header& header) {
  constexpr int kIndexBits = 24;
  constexpr std::uint64_t kIndexMask = (std::uint64_t{1} << kIndexBits) - 1;
  team.each(list.num_units, [&](int u) {
    s.units.keys[u] =
        static_cast<std::uint64_t>(kNoLimit - s.units.cost[u]) << kIndexBits | static_cast<std::uint64_t>(u);
  });
  team.sort(s.units.keys, list.num_units);
  const auto unit_of = [&](int rank) { return static_cast<std::int32_t>(s.units.keys[rank] & kIndexMask); };
  header.num_items = static_cast<std::int32_t>(team.scan(
      list.num_units,
      [&](int rank) { return std::int64_t{s.units.parts[unit_of(rank)]} * s.units.tiles[unit_of(rank)]; },
      [&](int rank, std::int64_t before) { s.units.item[rank] = static_cast<std::int32_t>(before); }));
  team.each(header.num_items, [&](int k) {
    std::int32_t low = 0;
    std::int32_t high = list.num_units;
    while (high - low > 1) {
      const std::int32_t middle = (low + high) / 2;
      (s.units.item[middle] <= k ? low : high) = middle;
    }
    const std::int32_t u = unit_of(low);
    const Unit unit = unit_at(cost, in, s, list, u);
    const std::int32_t parts = s.units.parts[u];
    // The tiles of one part one after the other.
    const std::int32_t at = k - s.units.item[low];
    const std::int32_t part = at / unit.num_tiles;
    const std::int32_t tile = at - part * unit.num_tiles;
    const std::int64_t tokens = unit.end - unit.begin;
    const auto border = [&](std::int32_t p) {
      const auto even = static_cast<std::int32_t>(unit.begin + tokens * p / parts);
      return p == 0 ? unit.begin : p == parts ? unit.end : even >> in.page_shift << in.page_shift;
    };
    detail::WorkItem item;
    item.pos_begin = border(part);
    item.num_tokens = border(part + 1) - item.pos_begin;
    item.page_begin = static_cast<std::int32_t>(unit.request * in.row_stride) + (item.pos_begin >> in.page_shift);
    item.first_token = item.pos_begin & ((1 << in.page_shift) - 1);
    item.row_begin = unit.first_row + tile * unit.num_rows;
    item.num_rows = unit.num_rows;
    if (s.units.slot[u] >= 0) item.partial_begin = s.units.slot[u] + (tile * parts + part) * unit.num_rows;
    item.kv_head_end = static_cast<std::int16_t>(in.num_kv_heads);
    item.unmasked_end = detail::greater(0, detail::lesser(item.num_tokens, unit.all_end - item.pos_begin));
    item.cost_ps = std::int64_t{s.units.cost[u]} << list.shift;
    out.items[k] = item;
  });
}

/// Spans that were split off, in order of nodes; their sums.
template <class Team, class Scratch>
HEADWATER_ON_TEAM void emit_spans(const Team& team, const PlannerInput& in, const Scratch& s, const UnitList& list,
                                  const PlannerOutput& out, DevicePlanStatus& status) {
  std::int64_t tokens = 0;
  std::int64_t members = 0;
  status.num_spans = static_cast<std::int32_t>(team.scan(
      list.num_nodes, [&](int m) { return std::int64_t{s.node_depth[m] < kMaxDepth && s.node_run[m] >= 0 ? 1 : 0}; },
      [&](int m, std::int64_t before) {
        if (s.node_depth[m] >= kMaxDepth || s.node_run[m] < 0) return;
        const std::int32_t first = s.position[s.node_leader[m]];
        out.spans[before] = {s.node_run[m], s.node_cut[m] - s.node_run[m], first, node_members(s, m), s.node_depth[m]};
        tokens += s.node_cut[m] - s.node_run[m];
        members += node_members(s, m);
      }));
  if (list.num_nodes > 0) {
    team.each(in.num_requests, [&](int p) { out.span_members[p] = s.order[p]; });
  }
  status.shared_tokens = team.sum(tokens);
  status.member_sequences = team.sum(members);
}

/// Plans, by all members of all teams; the first team writes the plan.
template <class Team, class Scratch, class Grid>
HEADWATER_ON_TEAM void make_plan(const Team& team, const Grid& grid, const detail::CostModel& cost,
                                 const PlannerInput& in, Scratch& s, const PlannerOutput& out) {
  DevicePlanStatus status;
  status.flags = find_sharing(team, grid, in, s, out.exchange);
  if (grid.block() != 0) return;
  Header header;
  if ((status.flags & DevicePlanStatus::kBadRows) != 0) {  // nothing can be said about any row
    if (team.rank() == 0) {
      *out.header = header;
      *out.status = status;
      out.merge_indptr[0] = 0;
    }
    return;
  }
  if (status.flags != 0) {
    team.each(in.num_requests, [&](int i) { s.parent[i] = -1; });
    team.barrier();
  }
  const ForestSize forest = build_forest(team, in, s);

  // One place that makes units, whatever for: code that has not run yet is slow to fetch.
  enum class Step : std::uint8_t { weigh_flat, cut, flat };
  const bool weighs = forest.num_nodes > 0 && in.policy == Policy::automatic;
  Step step = weighs ? Step::weigh_flat : Step::flat;
  if (forest.num_nodes > 0 && in.policy == Policy::forest && close_forest(team, in, s, forest.num_nodes)) {
    step = Step::cut;
  }
  UnitList list;
  std::int64_t bar_ps = kImpossible;
  for (;;) {
    const bool cut = step == Step::cut;
    const std::int64_t saved = weighs ? cached_rereads_ps(team, cost, in, s, forest.num_nodes, !cut) : 0;
    list = make_units(team, cost, in, s, cut ? forest.num_nodes : 0, saved);
    if (step == Step::flat) break;
    if (step == Step::weigh_flat) {
      bar_ps = list.predicted_ps - list.predicted_ps / 50;
      step = close_cheapest(team, cost, in, s, forest.num_nodes) ? Step::cut : Step::flat;
      continue;
    }
    const bool fits = list.num_units >= 0 && list.fits;
    if (fits && list.predicted_ps < bar_ps) break;
    if (!fits) status.flags |= DevicePlanStatus::kOverCapacity;
    step = Step::flat;
  }

  status.num_partials = place_states(team, cost, in, s, list, forest.num_rows);
  emit_rows(team, cost, in, s, list, forest.num_rows, out, header);
  emit_items(team, cost, in, s, list, out, header);
  emit_spans(team, in, s, list, out, status);
  status.num_items = header.num_items;
  if (team.rank() == 0) {
    *out.header = header;
    *out.status = status;
  }
}

}  // namespace headwater::cuda
