// Pieces to units, and into how many parts each is cut: src/plan/units.cc as far as it is local, in 32 bits.
//
// A piece is a node that is split off, or what is left of a request. A *unit* is equal row tiles of a piece, which read
// the same tokens: the full tiles of a node, its last one, or a tile of a request. Units too long for an even load are
// cut into parts; a part of a tile is a work item. The host works out when the last worker is done item by item; here
// it is estimated from totals and from how many parts are as long as each. Units that no part size cuts are summed up
// once.
#pragma once

#include "cuda/device_planner_cut.h"

namespace headwater::cuda {

inline constexpr std::int32_t kMostParts = 0x7fff;
inline constexpr int kCostBits = 26;  ///< of all costs together, scaled
inline constexpr std::int32_t kNoLimit = 0x7fffffff;
inline constexpr int kFinest = 4;  ///< the candidate of the shortest parts

struct Unit {
  std::int32_t first_row;  ///< in order of position
  std::int32_t num_rows;   ///< of a tile
  std::int32_t num_tiles;
  std::int32_t begin;  ///< tokens
  std::int32_t end;
  std::int32_t all_end;  ///< all rows see [begin, all_end)
  std::int32_t request;  ///< whose pages are read
  bool shared;           ///< its rows read something else, too
};

/// The plan that is weighed.
struct UnitList {
  std::int32_t num_nodes = 0;  ///< 0: nothing is split off
  std::int32_t num_units = 0;
  std::int32_t shift = 0;         ///< scaled costs are picoseconds >> shift
  std::int32_t limit = kNoLimit;  ///< scaled cost of a part, about
  std::int64_t predicted_ps = 0;
  bool fits = false;
};

/// Rows of a tile where there are several.
HEADWATER_ON_TEAM_CALL inline std::int32_t rows_per_tile(const detail::CostModel& cost, std::int32_t rows) {
  return cost.rows_per_tile(rows);
}
HEADWATER_ON_TEAM inline std::int32_t tile_of(const detail::CostModel& cost, std::int32_t rows) {
  return rows <= cost.tile_rows() ? rows : rows_per_tile(cost, rows);
}

/// Rows of a node, in tiles.
struct NodeTiles {
  std::int32_t per_tile;
  std::int32_t full;
  std::int32_t rest;  ///< rows of the last tile if it is not full
};
HEADWATER_ON_TEAM inline NodeTiles tiles_of(const detail::CostModel& cost, std::int32_t rows) {
  if (rows <= cost.tile_rows()) return {rows, 1, 0};
  const std::int32_t per_tile = rows_per_tile(cost, rows);
  const std::int32_t full = rows / per_tile;
  return {per_tile, full, rows - full * per_tile};
}

/// What request i reads alone.
struct OwnPart {
  std::int32_t begin;      ///< token
  std::int32_t first_row;  ///< the first one that sees something of it
  std::int32_t num_rows;
};
template <class Scratch>
HEADWATER_ON_TEAM OwnPart own_part(const PlannerInput& in, const Scratch& s, const UnitList& list, std::int32_t i) {
  const std::int32_t top = list.num_nodes == 0 ? -1 : s.top[i];
  const std::int32_t begin = top < 0 ? 0 : s.node_cut[top];
  const std::int32_t rows = s.row_indptr[i + 1] - s.row_indptr[i];
  const std::int32_t length = s.length[i];
  // Row j of a causal request sees [0, length - rows + j + 1).
  std::int32_t skipped = in.causal ? detail::greater(0, begin - (length - rows)) : 0;
  if (begin >= length) skipped = rows;
  return {begin, s.row_begin[s.position[i]] + skipped, detail::greater(0, rows - skipped)};
}

template <class Scratch>
HEADWATER_ON_TEAM std::int32_t units_of_node(const detail::CostModel& cost, const Scratch& s, std::int32_t m) {
  if (s.node_depth[m] >= kMaxDepth || s.node_run[m] < 0) return 0;
  const NodeTiles tiles = tiles_of(cost, node_rows(s, m));
  return (tiles.full > 0 ? 1 : 0) + (tiles.rest > 0 ? 1 : 0);
}

template <class Scratch>
HEADWATER_ON_TEAM std::int32_t units_of_request(const detail::CostModel& cost, const PlannerInput& in, const Scratch& s,
                                                const UnitList& list, std::int32_t i) {
  const std::int32_t rows = own_part(in, s, list, i).num_rows;
  if (rows == 0) return 0;
  if (rows <= cost.tile_rows()) return 1;
  const std::int32_t per_tile = rows_per_tile(cost, rows);
  return (rows + per_tile - 1) / per_tile;
}

template <class Scratch>
HEADWATER_ON_TEAM Unit unit_at(const detail::CostModel& cost, const PlannerInput& in, const Scratch& s,
                               const UnitList& list, std::int32_t u) {
  const std::int32_t piece = s.units.piece[u];
  const std::int32_t tile = s.units.tile[u];
  Unit unit;
  if (piece >= 0) {
    const std::int32_t leader = s.node_leader[piece];
    const NodeTiles tiles = tiles_of(cost, node_rows(s, piece));
    unit.first_row = s.row_begin[s.position[leader]] + tile * tiles.per_tile;
    unit.num_rows = tile < tiles.full ? tiles.per_tile : tiles.rest;
    unit.num_tiles = tile < tiles.full ? tiles.full : 1;
    unit.begin = s.node_run[piece];
    unit.end = s.node_cut[piece];
    unit.all_end = detail::lesser(unit.end, s.node_all_end[piece]);
    unit.request = leader;
    unit.shared = true;
    return unit;
  }
  const std::int32_t i = -1 - piece;
  const OwnPart part = own_part(in, s, list, i);
  const std::int32_t per_tile = tile_of(cost, part.num_rows);
  unit.first_row = part.first_row + tile * per_tile;
  unit.num_rows = detail::lesser(per_tile, part.num_rows - tile * per_tile);
  unit.num_tiles = 1;
  unit.begin = part.begin;
  unit.end = unit.all_end = s.length[i];
  if (in.causal) {
    // What its last row sees, and its first.
    const std::int32_t behind = s.row_begin[s.position[i] + 1];  // rows up to here
    unit.end -= behind - (unit.first_row + unit.num_rows);
    unit.all_end -= behind - (unit.first_row + 1);
  }
  unit.request = i;
  unit.shared = part.begin > 0;
  return unit;
}

/// Fills the units with their costs; num_units < 0: there is no room for so many. Returns the sum of costs in
/// picoseconds.
template <class Team, class Scratch>
HEADWATER_ON_TEAM std::int64_t list_units(const Team& team, const detail::CostModel& cost, const PlannerInput& in,
                                          Scratch& s, UnitList& list) {
  const std::int32_t nodes = list.num_nodes;
  std::int64_t mine = 0;
  const std::int32_t total = team.scan(
      nodes + in.num_requests,
      [&](int x) { return x < nodes ? units_of_node(cost, s, x) : units_of_request(cost, in, s, list, x - nodes); },
      [&](int x, std::int32_t first) {
        s.units.first[x] = first;
        const bool node = x < nodes;
        if (node && s.node_run[x] < 0) return;
        // A node has full tiles and a last one, a request any number of tiles, each for itself.
        OwnPart part{};
        NodeTiles tiles{};
        std::int32_t num_tiles = 1;
        if (node) {
          if (s.node_depth[x] >= kMaxDepth) return;
          tiles = tiles_of(cost, node_rows(s, x));
          num_tiles = tiles.full + (tiles.rest > 0 ? 1 : 0);
        } else {
          part = own_part(in, s, list, x - nodes);
          const std::int32_t per_tile = tile_of(cost, part.num_rows);
          if (part.num_rows > per_tile) num_tiles = (part.num_rows + per_tile - 1) / per_tile;
          if (part.num_rows == 0) num_tiles = 0;
          tiles = {per_tile, num_tiles, 0};
        }
        std::int64_t read = cost.read_ps(1);
        if (num_tiles > 1) {
          read = (read + (num_tiles - 1) * cost.reread_ps(1, cost.chunk_tokens())) / num_tiles;
        }
        HEADWATER_ROLLED
        for (std::int32_t tile = 0, u = first; tile < num_tiles && u < in.max_units; ++u) {
          std::int32_t rows = tiles.per_tile;
          std::int32_t tokens = 0;
          s.units.tile[u] = tile;
          if (node) {
            rows = tile < tiles.full ? tiles.per_tile : tiles.rest;
            tokens = s.node_cut[x] - s.node_run[x];
            s.units.tiles[u] = tile < tiles.full ? tiles.full : 1;
          } else {
            rows = detail::lesser(rows, part.num_rows - tile * tiles.per_tile);
            tokens = s.length[x - nodes] - part.begin;
            // A causal row sees no more than itself.
            if (in.causal) tokens -= part.num_rows - tile * tiles.per_tile - rows;
            s.units.tiles[u] = 1;
          }
          const bool shared = node || part.begin > 0;
          const std::int64_t ps =
              tokens * read + cost.compute_ps(tokens, rows) + cost.item_ps(rows) + cost.partial_ps(shared ? rows : 0);
          s.units.piece[u] = node ? x : -1 - (x - nodes);
          s.units.ps[u] = ps;
          s.units.most[u] = detail::lesser(kMostParts, detail::greater(1, tokens / in.least_part));
          s.units.rows[u] = shared ? -rows : rows;
          mine += ps * s.units.tiles[u];
          tile += s.units.tiles[u];
        }
      });
  list.num_units = total <= in.max_units ? total : -1;
  return team.sum(mine);
}

/// A part's share of a unit's cost, scaled.
template <class Scratch>
HEADWATER_ON_TEAM std::int32_t part_cost(const Scratch& s, std::int32_t u, std::int32_t parts) {
  const auto whole = static_cast<std::uint32_t>(s.units.cost[u]);
  if (parts == 1) return s.units.cost[u];
  const std::uint64_t all =
      whole + static_cast<std::uint64_t>(parts - 1) * static_cast<std::uint32_t>(s.units.extra[u]);
  const auto capped = static_cast<std::uint32_t>(detail::lesser<std::uint64_t>(all, 0x7fffffff));
  return static_cast<std::int32_t>(capped / static_cast<std::uint32_t>(parts));
}

/// Parts of a unit so that none costs more than about `limit`.
template <class Scratch>
HEADWATER_ON_TEAM std::int32_t parts_for(const Scratch& s, std::int32_t u, std::int32_t limit) {
  const auto cost = static_cast<std::uint32_t>(s.units.cost[u]);
  const auto most = static_cast<std::uint32_t>(limit);
  if (cost <= most) return 1;
  return detail::lesser(static_cast<std::int32_t>((cost + most - 1) / most), s.units.most[u]);
}

/// Costs 2^e (1 + f / 8) and up share class 8 e + f.
HEADWATER_ON_TEAM inline std::int32_t cost_class(std::int32_t cost) {
  const auto c = static_cast<std::uint32_t>(detail::greater(1, cost));
  const int e = detail::top_bit(c);
  return 8 * e + static_cast<std::int32_t>((e >= 3 ? c >> (e - 3) : c << (3 - e)) & 7U);
}

/// Part sizes to be weighed, in order of preference. A quarter of a worker's share leaves room for workers that turn
/// out slower; sizes a little above a share can save a second wave of short items.
HEADWATER_ON_TEAM inline std::int32_t candidate_limit(int c, std::int64_t ideal) {
  std::int64_t limit = ideal / 4;
  if (c == 1) limit = ideal / 2;
  if (c == 2) limit = ideal;
  if (c == 3) limit = kNoLimit;
  if (c == 4) limit = ideal / 8;
  if (c == 5) limit = ideal + ideal / 8;
  if (c == 6) limit = ideal + ideal / 4;
  if (c == 7) limit = ideal + ideal / 2;
  if (c == 8) limit = ideal * 2;  // where room is short
  if (c == 9) limit = ideal * 4;
  return static_cast<std::int32_t>(detail::greater<std::int64_t>(1, limit));
}

/// What part size c gives, by one strip of a team.
template <class Team, class Scratch>
HEADWATER_ON_TEAM void weigh_candidate(const Team& team, const detail::CostModel& cost, Scratch& s,
                                       const SmallUnits& small, int c, std::int32_t limit) {
  constexpr int kLanes = Team::kLanes;
  std::int32_t* counts = s.units.counts[c];
  std::int32_t* costs = s.units.costs[c];
  for (int k = team.lane(); k < kCostClasses; k += kLanes) counts[k] = costs[k] = 0;
  team.lanes_barrier();
  std::int64_t total = 0;
  std::int64_t items = 0;
  std::int64_t partials = 0;
  std::int32_t longest = 0;
  HEADWATER_ROLLED
  for (int k = team.lane(); k < s.units.num_large; k += kLanes) {
    const std::int32_t u = s.units.ranked[k];
    const std::int32_t parts = parts_for(s, u, limit);
    const std::int32_t each = part_cost(s, u, parts);
    const std::int32_t mine = parts * s.units.tiles[u];
    const std::int32_t rows = s.units.rows[u];  // negative: they read something else, too
    total += std::int64_t{each} * mine;
    items += mine;
    partials += std::int64_t{mine} * (rows < 0 ? -rows : parts > 1 ? rows : 0);
    longest = detail::greater(longest, each);
    team.add_two(counts, mine, costs, each * mine, cost_class(each));
  }
  team.lanes_barrier();
  // So many parts of some cost or more take so many rounds of all workers, at least. Lanes take classes from above.
  constexpr int kEach = kCostClasses / kLanes;
  const int top = kCostClasses - 1 - team.lane() * kEach;
  std::int32_t seen = 0;
  for (int k = 0; k < kEach; ++k) seen += counts[top - k];
  seen = team.before_of_lanes(seen);
  const auto workers = static_cast<std::uint32_t>(cost.num_workers());
  std::int32_t time = longest;
  HEADWATER_ROLLED
  for (int k = 0; k < kEach; ++k) {
    const std::int32_t count = counts[top - k];
    if (count == 0) continue;
    seen += count;
    const std::uint32_t mean = static_cast<std::uint32_t>(costs[top - k]) / static_cast<std::uint32_t>(count);
    const std::uint32_t rounds = (static_cast<std::uint32_t>(seen) + workers - 1) / workers;
    time = detail::greater(time, static_cast<std::int32_t>(detail::lesser<std::uint64_t>(std::uint64_t{mean} * rounds,
                                                                                         std::uint64_t{kNoLimit})));
  }
  time = team.greatest_of_lanes(time);
  total = small.total + team.sum_of_lanes(total);
  items = small.items + team.sum_of_lanes(items);
  partials = small.partials + team.sum_of_lanes(partials);
  if (team.lane() != 0) return;
  const auto capped = [](std::int64_t n) {
    return static_cast<std::int32_t>(detail::lesser<std::int64_t>(n, kNoLimit));
  };
  const std::int32_t even = static_cast<std::int32_t>(static_cast<std::uint32_t>(capped(total)) / workers);
  s.units.candidates[c] = {detail::greater(time, even), capped(items), capped(partials)};
}

/// Chooses the parts of all units.
template <class Team, class Scratch>
HEADWATER_ON_TEAM void balance(const Team& team, const detail::CostModel& cost, const PlannerInput& in, Scratch& s,
                               UnitList& list, std::int64_t sum_ps, std::int64_t saved_ps) {
  list.shift = detail::greater(0, detail::top_bit(static_cast<unsigned long long>(sum_ps) | 1U) + 1 - kCostBits);
  const auto scaled = static_cast<std::uint32_t>(sum_ps >> list.shift);
  const auto workers = static_cast<std::uint32_t>(cost.num_workers());
  const auto ideal = detail::greater(1, static_cast<std::int32_t>((scaled + workers - 1) / workers));
  const std::int32_t least = candidate_limit(kFinest, ideal);
  if (team.rank() == 0) s.units.num_large = 0;
  team.barrier();
  // Units that no part size cuts are summed up once.
  std::int64_t total = 0;
  std::int64_t items_and_partials = 0;
  team.each(list.num_units, [&](int u) {
    const std::int32_t rows = s.units.rows[u] < 0 ? -s.units.rows[u] : s.units.rows[u];
    const std::int64_t extra = cost.item_ps(rows) + cost.partial_ps(rows);
    const auto one = static_cast<std::int32_t>(detail::greater<std::int64_t>(1, s.units.ps[u] >> list.shift));
    s.units.cost[u] = one;
    s.units.extra[u] = static_cast<std::int32_t>(detail::lesser<std::int64_t>(kNoLimit, extra >> list.shift));
    if (one > least) {
      s.units.ranked[team.next(&s.units.num_large)] = u;
      return;
    }
    const std::int32_t tiles = s.units.tiles[u];
    total += std::int64_t{one} * tiles;
    items_and_partials += std::int64_t{tiles} << 32 | (s.units.rows[u] < 0 ? tiles * rows : 0);
  });
  total = team.sum(total);
  items_and_partials = team.sum(items_and_partials);
  const SmallUnits small{total, static_cast<std::int32_t>(items_and_partials >> 32),
                         static_cast<std::int32_t>(items_and_partials & 0xffffffff)};
  HEADWATER_ROLLED
  for (int c = team.strip(); c < kCandidates; c += team.num_strips()) {
    weigh_candidate(team, cost, s, small, c, candidate_limit(c, ideal));
  }
  team.barrier();
  // The first one that fits, or the best, if that gains 2 %.
  const auto time_of = [&](int c) {
    const Candidate& candidate = s.units.candidates[c];
    return candidate.items > in.max_items || candidate.partials > in.max_partials ? kNoLimit : candidate.time;
  };
  const int first = team.least_index(kCandidates, [&](int c) { return time_of(c) == kNoLimit ? 1 : 0; });
  const int fastest = team.least_index(kCandidates, time_of);
  std::int32_t best = time_of(first);
  list.fits = best != kNoLimit;
  if (!list.fits) return;
  const bool better = best > ideal + ideal / 32 && time_of(fastest) < best - best / 50;
  list.limit = candidate_limit(better ? fastest : first, ideal);
  if (better) best = time_of(fastest);
  bool cut = false;
  bool many = false;
  bool few = false;
  team.each(list.num_units, [&](int u) {
    const std::int32_t parts = parts_for(s, u, list.limit);
    s.units.cost[u] = part_cost(s, u, parts);
    s.units.parts[u] = parts;
    cut = cut || parts > 1 || s.units.rows[u] < 0;
    const bool by_many = cost.is_many(s.units.rows[u] < 0 ? -s.units.rows[u] : s.units.rows[u]);
    many = many || by_many;
    few = few || !by_many;
  });
  if (in.policy != Policy::automatic) return team.barrier();
  const bool merges = team.any(cut);
  const bool both = team.any(many) && team.any(few);
  const std::int64_t work = std::int64_t{best} << list.shift;
  const std::int64_t saved = saved_ps == 0 ? 0 : saved_ps / cost.num_workers();  // seldom: a slow division
  list.predicted_ps = detail::greater<std::int64_t>(0, work - saved) + cost.launch_ps() * (merges ? 2 : 1) +
                      (both ? cost.many_start_ps() : 0);
}

/// Units and parts of the cut in force, or, with num_nodes = 0, of none.
template <class Team, class Scratch>
HEADWATER_ON_TEAM UnitList make_units(const Team& team, const detail::CostModel& cost, const PlannerInput& in,
                                      Scratch& s, std::int32_t num_nodes, std::int64_t saved_ps) {
  UnitList list;
  list.num_nodes = num_nodes;
  const std::int64_t sum = list_units(team, cost, in, s, list);
  if (list.num_units < 0) return list;
  if (list.num_units == 0) {
    list.fits = true;
    return list;
  }
  balance(team, cost, in, s, list, sum, saved_ps);
  return list;
}

}  // namespace headwater::cuda
