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
  HEADWATER_ROLLED
  while (high - low > 1) {
    const std::int32_t middle = (low + high) / 2;
    (s.row_begin[middle] <= q ? low : high) = middle;
  }
  return low;
}

/// Row q, in order of position, as kernels read it.
template <class Scratch>
HEADWATER_ON_TEAM ItemRow item_row(const PlannerInput& in, const Scratch& s, std::int32_t q) {
  const std::int32_t p = position_of_row(in, s, q);
  const std::int32_t i = s.order[p];
  const std::int32_t j = q - s.row_begin[p];
  const std::int32_t pos = s.length[i] - (s.row_indptr[i + 1] - s.row_indptr[i]) + j;
  return {s.row_indptr[i] + j, 0, in.causal ? detail::greater(0, pos + 1) : s.length[i], pos};
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
  const std::int32_t tile = at < tiles.per_tile ? 0 : at / tiles.per_tile;
  const std::int32_t unit = s.units.first[m] + (tile >= tiles.full && tiles.full > 0 ? 1 : 0);
  return {unit, tile < tiles.full ? tile : 0, at - tile * tiles.per_tile};
}

/// Calls visit(row's part) for everything that row q reads, from its last token to its first.
template <class Scratch, class Visit>
HEADWATER_ON_TEAM void for_units_of_row(const detail::CostModel& cost, const PlannerInput& in, const Scratch& s,
                                        const UnitList& list, std::int32_t i, std::int32_t q, Visit&& visit) {
  constexpr std::int32_t kOwn = -2;
  const OwnPart own = own_part(in, s, list, i);
  const std::int32_t top = list.num_nodes == 0 ? -1 : s.top[i];
  std::int32_t m = own.num_rows > 0 && q >= own.first_row ? kOwn : top;
  HEADWATER_ROLLED
  while (m != -1) {
    if (m == kOwn) {
      const std::int32_t at = q - own.first_row;
      const std::int32_t per_tile = tile_of(cost, own.num_rows);
      const std::int32_t tile = at < per_tile ? 0 : at / per_tile;
      visit(RowUnit{s.units.first[list.num_nodes + i] + tile, 0, at - tile * per_tile});
      m = top;
    } else {
      visit(row_in_node(cost, s, m, q));
      m = s.node_up[m];
    }
  }
}

template <class Scratch>
HEADWATER_ON_TEAM std::int32_t unit_rows(const Scratch& s, std::int32_t u) {
  return s.units.rows[u] < 0 ? -s.units.rows[u] : s.units.rows[u];
}
/// A unit's results go to partial slots if it has several parts or its rows read something else, else to the output.
template <class Scratch>
HEADWATER_ON_TEAM bool is_partial(const Scratch& s, std::int32_t u) {
  return s.units.rows[u] < 0 || s.units.parts[u] > 1;
}

/// Slots of all units; returns their number.
template <class Team, class Scratch>
HEADWATER_ON_TEAM std::int32_t place_states(const Team& team, Scratch& s, const UnitList& list) {
  return team.scan(
      list.num_units,
      [&](int u) { return is_partial(s, u) ? s.units.parts[u] * s.units.tiles[u] * unit_rows(s, u) : 0; },
      [&](int u, std::int32_t before) { s.units.slot[u] = is_partial(s, u) ? before : -1; });
}

/// Rows, merge lists and empty rows.
template <class Team, class Scratch>
HEADWATER_ON_TEAM void emit_rows(const Team& team, const detail::CostModel& cost, const PlannerInput& in,
                                 const Scratch& s, const UnitList& list, std::int32_t num_rows,
                                 const PlannerOutput& out) {
  // Slots, merged rows and empty rows in one number.
  constexpr int kRowBits = 20;
  constexpr std::int64_t kRowMask = (std::int64_t{1} << kRowBits) - 1;
  // -1: an empty row; 0: its only state goes to the output.
  const auto slots_of = [&](std::int32_t i, std::int32_t q) {
    std::int32_t slots = -1;
    for_units_of_row(cost, in, s, list, i, q, [&](const RowUnit& part) {
      slots = detail::greater(0, slots) + (is_partial(s, part.unit) ? s.units.parts[part.unit] : 0);
    });
    return slots;
  };
  const std::int64_t total = team.scan_wide(
      num_rows,
      [&](int q) {
        const std::int32_t slots = slots_of(s.order[position_of_row(in, s, q)], q);
        return slots < 0 ? std::int64_t{1}
                         : std::int64_t{slots} << (2 * kRowBits) | std::int64_t{slots > 0 ? 1 : 0} << kRowBits;
      },
      [&](int q, std::int64_t before) {
        out.item_rows[q] = item_row(in, s, q);
        const std::int32_t row = out.item_rows[q].row;
        const std::int32_t i = s.order[position_of_row(in, s, q)];
        const std::int32_t slots = slots_of(i, q);
        if (slots < 0) out.empty_rows[before & kRowMask] = row;
        if (slots <= 0) return;
        const auto merge = static_cast<std::int32_t>(before >> kRowBits & kRowMask);
        auto at = static_cast<std::int32_t>(before >> (2 * kRowBits));
        out.merge_rows[merge] = row;
        out.merge_indptr[merge] = at;
        at += slots;
        for_units_of_row(cost, in, s, list, i, q, [&](const RowUnit& part) {
          const std::int32_t tile_rows = unit_rows(s, part.unit);
          const std::int32_t parts = s.units.parts[part.unit];
          std::int32_t slot = s.units.slot[part.unit] + ((part.tile + 1) * parts - 1) * tile_rows + part.index;
          HEADWATER_ROLLED
          for (std::int32_t k = 0; k < parts; ++k, slot -= tile_rows) out.merge_slots[--at] = slot;
        });
      });
  if (team.rank() != 0) return;
  const auto merged = static_cast<std::int32_t>(total >> kRowBits & kRowMask);
  out.merge_indptr[merged] = static_cast<std::int32_t>(total >> (2 * kRowBits));
  out.header->num_merge_rows = merged;
  out.header->num_empty_rows = static_cast<std::int32_t>(total & kRowMask);
}

/// Work items, longest first.
template <class Team, class Scratch>
HEADWATER_ON_TEAM void emit_items(const Team& team, const detail::CostModel& cost, const PlannerInput& in, Scratch& s,
                                  const UnitList& list, const PlannerOutput& out) {
  team.each(list.num_units, [&](int u) { s.units.keys[u] = static_cast<std::uint32_t>(kNoLimit - s.units.cost[u]); });
  team.order(s.units.keys, s.units.spare, list.num_units, s.units.ranked);
  const auto unit_of = [&](int rank) { return s.units.ranked[rank]; };
  const std::int32_t num_items = team.scan(
      list.num_units, [&](int rank) { return s.units.parts[unit_of(rank)] * s.units.tiles[unit_of(rank)]; },
      [&](int rank, std::int32_t before) { s.units.item[rank] = before; });
  if (team.rank() == 0) out.header->num_items = num_items;
  team.each(num_items, [&](int k) {
    std::int32_t low = 0;
    std::int32_t high = list.num_units;
    HEADWATER_ROLLED
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
    const std::int32_t tokens = unit.end - unit.begin;
    const std::int32_t share = tokens / parts;
    const std::int32_t rest = tokens - share * parts;
    const auto border = [&](std::int32_t p) {
      if (p == parts) return unit.end;
      const std::int32_t even = unit.begin + share * p + rest * p / parts;
      return p == 0 ? unit.begin : even / in.part_grain * in.part_grain;
    };
    DeviceItem item;
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
    item.first_row = item_row(in, s, item.row_begin);
    const std::int32_t page_mask = (1 << in.page_shift) - 1;
    const std::int32_t pages = (item.first_token + item.num_tokens + page_mask) >> in.page_shift;
    const std::int32_t* from = in.block_table + unit.request * in.row_stride + (item.pos_begin >> in.page_shift);
    for (std::int32_t j = 0; j < kFirstPages; ++j) item.first_pages[j] = j < pages ? from[j] : 0;
    out.items[k] = item;
  });
}

/// Spans that were split off, in order of nodes; the status.
template <class Team, class Scratch>
HEADWATER_ON_TEAM void emit_spans(const Team& team, const PlannerInput& in, const Scratch& s, const UnitList& list,
                                  const PlannerOutput& out, DevicePlanStatus& status) {
  std::int64_t items = 0;
  team.each(list.num_units, [&](int u) { items += s.units.parts[u] * s.units.tiles[u]; });
  status.num_items = static_cast<std::int32_t>(team.sum(items));
  if (list.num_nodes > 0) {
    std::int64_t tokens = 0;
    std::int64_t members = 0;
    status.num_spans = team.scan(
        list.num_nodes, [&](int m) { return std::int64_t{s.node_depth[m] < kMaxDepth && s.node_run[m] >= 0 ? 1 : 0}; },
        [&](int m, std::int32_t before) {
          if (s.node_depth[m] >= kMaxDepth || s.node_run[m] < 0) return;
          const std::int32_t first = s.position[s.node_leader[m]];
          const std::int32_t length = s.node_cut[m] - s.node_run[m];
          out.spans[before] = {s.node_run[m], length, first, node_members(s, m), s.node_depth[m]};
          tokens += length;
          members += node_members(s, m);
        });
    team.each(in.num_requests, [&](int p) { out.span_members[p] = s.order[p]; });
    status.shared_tokens = team.sum(tokens);
    status.member_sequences = team.sum(members);
  }
  if (team.rank() == 0) *out.status = status;
}

/// Whether no flat plan can be as fast as `cut_ps`, but for 2 %.
template <class Team, class Scratch>
HEADWATER_ON_TEAM bool beats_flat(const Team& team, const detail::CostModel& cost, const PlannerInput& in, Scratch& s,
                                  std::int32_t num_nodes, std::int64_t cut_ps) {
  std::int64_t mine = 0;
  team.each(in.num_requests, [&](int i) {
    const std::int32_t rows = s.row_indptr[i + 1] - s.row_indptr[i];
    const std::int32_t length = detail::greater(0, in.causal ? s.length[i] - rows + 1 : s.length[i]);
    if (rows > 0) mine += cost.read_ps(length) + cost.compute_ps(length, 1);
  });
  const std::int64_t least = team.sum(mine) - cached_rereads_ps(team, cost, in, s, num_nodes, true);
  const std::int64_t time = least / cost.num_workers();
  return cut_ps < time - time / 50;
}

/// Plans, by all members of all teams; the first three write the plan.
template <class Team, class Scratch, class Grid>
HEADWATER_ON_TEAM void make_plan(const Team& team, const Grid& grid, const detail::CostModel& cost,
                                 const PlannerInput& in, Scratch& s, const PlannerOutput& out) {
  DevicePlanStatus status;
  status.flags = find_sharing(team, grid, in, s, out.exchange);
  if (grid.block() > 2) return;
  if ((status.flags & DevicePlanStatus::kBadRows) != 0) {  // nothing can be said about any row
    if (team.rank() == 0 && grid.block() == 0) {
      *out.header = Header{};
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

  // Units are made in one place, whatever for: code that has not run yet is slow to fetch. First of the cut; policy
  // auto then compares with flat plans: with the least that one can take, which nearly always decides, or with the
  // best.
  const std::int32_t nodes = forest.num_nodes;
  const bool weighs = in.policy == Policy::automatic;
  bool cut = nodes > 0 && (weighs ? close_cheapest(team, cost, in, s, nodes)
                                  : in.policy == Policy::forest && close_forest(team, in, s, nodes));
  bool decided = !cut;
  std::int64_t cut_ps = 0;
  UnitList list;
  for (;;) {
    const bool undecided = weighs && !decided;
    const std::int64_t saved = undecided ? cached_rereads_ps(team, cost, in, s, nodes, !cut) : 0;
    list = make_units(team, cost, in, s, cut ? nodes : 0, saved);
    if (decided) break;
    if (cut) {
      if (list.num_units < 0 || !list.fits) {
        status.flags |= DevicePlanStatus::kOverCapacity;
        decided = true;
        cut = false;
      } else if (!weighs || beats_flat(team, cost, in, s, nodes, list.predicted_ps)) {
        break;
      } else {
        cut_ps = list.predicted_ps;
        cut = false;
      }
    } else {
      cut = cut_ps < list.predicted_ps - list.predicted_ps / 50;
      decided = true;
      if (!cut) break;
    }
  }

  // All blocks know all by now: each of the first three writes its share.
  const auto writes = [&](int share) { return grid.block() == share % grid.num_blocks(); };
  status.num_partials = place_states(team, s, list);
  if (writes(0)) emit_items(team, cost, in, s, list, out);
  if (writes(1)) emit_rows(team, cost, in, s, list, forest.num_rows, out);
  if (writes(2)) emit_spans(team, in, s, list, out, status);
}

}  // namespace headwater::cuda
