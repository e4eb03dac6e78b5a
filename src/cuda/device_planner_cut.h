// Which nodes are split off: the rules of src/plan/cut.cc, for nodes above the depth limit.
//
// Policy forest: every node that passes the thresholds. Policy automatic: least predicted time, by the same dynamic
// programme over the forest, all nodes of a depth at once. A node's run begins behind its nearest ancestor that is
// split off; that one's depth plus one is the run's number.
#pragma once

#include "cuda/device_planner_forest.h"

namespace headwater::cuda {

inline constexpr std::int64_t kImpossible = 0x7fffffffffffffff / 8;

/// A node and its ancestors, from the root down.
struct NodePath {
  std::int32_t node[kMaxDepth];
  std::int32_t length;
};

template <class Scratch>
HEADWATER_ON_TEAM NodePath path_to(const Scratch& s, std::int32_t m) {
  NodePath path;
  path.length = s.node_depth[m] + 1;
  HEADWATER_ROLLED
  for (std::int32_t d = path.length; d-- > 0; m = s.node_parent[m]) path.node[d] = m;
  return path;
}

template <class Scratch>
HEADWATER_ON_TEAM bool may_close(const PlannerInput& in, const Scratch& s, std::int32_t m, std::int32_t run) {
  if (node_members(s, m) < detail::greater(2, in.min_members) || s.node_cut[m] <= run) return false;
  const std::int64_t page = std::int64_t{1} << in.page_shift;
  return ((s.node_cut[m] + page - 1) >> in.page_shift) - (run >> in.page_shift) >= in.min_pages;
}

/// Sets node_run of every node above the depth limit by `closes(m, run, depth of the run)`; then node_up and top.
/// Returns whether any is split off.
template <class Team, class Scratch, class Closes>
HEADWATER_ON_TEAM bool close_from_the_root(const Team& team, const PlannerInput& in, Scratch& s, std::int32_t num_nodes,
                                           Closes&& closes) {
  bool any = false;
  team.each(num_nodes, [&](int m) {
    if (s.node_depth[m] >= kMaxDepth) return;
    const NodePath path = path_to(s, m);
    std::int32_t run = 0;
    std::int32_t run_depth = 0;
    std::int32_t up = -1;
    bool closed = false;
    HEADWATER_ROLLED
    for (std::int32_t d = 0; d < path.length; ++d) {
      const std::int32_t at = path.node[d];
      if (closed) {
        run = s.node_cut[path.node[d - 1]];
        run_depth = d;
        up = path.node[d - 1];
      }
      closed = closes(at, run, run_depth);
    }
    s.node_run[m] = closed ? run : -1;
    s.node_up[m] = up;
    any = any || closed;
  });
  const bool result = team.any(any);
  team.each(in.num_requests, [&](int i) {
    const std::int32_t bottom = s.bottom[i];
    s.top[i] = bottom < 0 || s.node_run[bottom] >= 0 ? bottom : s.node_up[bottom];
  });
  team.barrier();
  return result;
}

template <class Team, class Scratch>
HEADWATER_ON_TEAM bool close_forest(const Team& team, const PlannerInput& in, Scratch& s, std::int32_t num_nodes) {
  return close_from_the_root(team, in, s, num_nodes,
                             [&](std::int32_t m, std::int32_t run, std::int32_t) { return may_close(in, s, m, run); });
}

/// Cost of reading tokens [begin, end) for `rows` rows, `read_ps` of it for the reads of a tile.
HEADWATER_ON_TEAM_CALL inline std::int64_t close_ps(const detail::CostModel& cost, std::int32_t begin, std::int32_t end,
                                                    std::int32_t rows, std::int64_t read_ps, bool whole) {
  if (end <= begin) return 0;
  return cost.piece_ps(end - begin, rows) + cost.num_tiles(rows) * read_ps + (whole ? 0 : cost.partial_ps(rows));
}

/// The leaf of request i, for the start of each run that it may end.
template <class Team, class Scratch>
HEADWATER_ON_TEAM void cost_leaf(const Team& team, const detail::CostModel& cost, Scratch& s, std::int32_t i) {
  const std::int32_t up = s.bottom[i];
  if (up < 0) return;
  const std::int32_t begin = s.node_cut[up];
  const std::int32_t end = s.length[i];
  const std::int32_t rows = s.row_indptr[i + 1] - s.row_indptr[i];
  if (end > begin) team.mark(s.cutting.goes_on + up, 1);
  const std::int64_t reads = s.cutting.read_prefix[up] + cost.read_ps(detail::greater(0, end - begin));
  std::int64_t* sums = s.cutting.sums[up];
  std::int32_t above = up;
  HEADWATER_ROLLED
  for (std::int32_t k = s.node_depth[up] + 1; k >= 0; --k) {
    // The run starts at the node below `above`.
    const std::int32_t run = above < 0 ? 0 : s.node_cut[above];
    const std::int64_t read = reads - (above < 0 ? 0 : s.cutting.read_prefix[above]);
    team.add(sums + k, detail::lesser(kImpossible, close_ps(cost, run, end, rows, read, k == 0)));
    if (above >= 0) above = s.node_parent[above];
  }
}

template <class Team, class Scratch>
HEADWATER_ON_TEAM void cost_node(const Team& team, const detail::CostModel& cost, const PlannerInput& in, Scratch& s,
                                 std::int32_t m) {
  const std::int32_t depth = s.node_depth[m];
  const std::int32_t parent = s.node_parent[m];
  const std::int64_t* sums = s.cutting.sums[m];
  const std::int64_t after = sums[depth + 1];
  std::int64_t* up = parent < 0 ? nullptr : s.cutting.sums[parent];
  if (parent >= 0) team.mark(s.cutting.goes_on + parent, 1);
  std::int32_t choice = 0;
  std::int32_t above = parent;
  HEADWATER_ROLLED
  for (std::int32_t k = depth; k >= 0; --k) {
    const std::int32_t run = above < 0 ? 0 : s.node_cut[above];
    const std::int64_t read = s.cutting.read_prefix[m] - (above < 0 ? 0 : s.cutting.read_prefix[above]);
    const bool whole = k == 0 && s.cutting.goes_on[m] == 0;
    const std::int64_t close = may_close(in, s, m, run)
                                   ? close_ps(cost, run, s.node_cut[m], node_rows(s, m), read, whole) + after
                                   : kImpossible;
    if (close < sums[k]) choice |= 1 << k;
    if (up != nullptr) team.add(up + k, detail::lesser(close, sums[k]));
    if (above >= 0) above = s.node_parent[above];
  }
  s.cutting.choice[m] = choice;
}

/// Least predicted time.
template <class Team, class Scratch>
HEADWATER_ON_TEAM bool close_cheapest(const Team& team, const detail::CostModel& cost, const PlannerInput& in,
                                      Scratch& s, std::int32_t num_nodes) {
  std::int32_t deepest = 0;
  team.each(num_nodes, [&](int m) {
    s.cutting.goes_on[m] = 0;
    HEADWATER_ROLLED
    for (int k = 0; k <= kMaxDepth; ++k) s.cutting.sums[m][k] = 0;
    if (s.node_depth[m] >= kMaxDepth) return;
    deepest = detail::greater(deepest, s.node_depth[m]);
    std::int64_t reads = 0;
    HEADWATER_ROLLED
    for (std::int32_t a = m; a >= 0; a = s.node_parent[a]) {
      reads += cost.reread_ps(detail::greater(0, s.node_cut[a] - node_begin(s, a)), s.node_cut[a]);
    }
    s.cutting.read_prefix[m] = reads;
  });
  deepest = team.greatest(deepest);
  team.each(in.num_requests, [&](int i) { cost_leaf(team, cost, s, i); });
  team.barrier();
  HEADWATER_ROLLED
  for (std::int32_t d = deepest; d >= 0; --d) {
    team.each(num_nodes, [&](int m) {
      if (s.node_depth[m] == d) cost_node(team, cost, in, s, m);
    });
    team.barrier();
  }
  return close_from_the_root(team, in, s, num_nodes, [&](std::int32_t m, std::int32_t, std::int32_t run_depth) {
    return (s.cutting.choice[m] >> run_depth & 1) != 0;
  });
}

/// Worker time that a cut saves against its items' costs, which take every read to come from memory: re-reads of
/// stretches that fit the cache. `flat`: nothing is split off.
template <class Team, class Scratch>
HEADWATER_ON_TEAM std::int64_t cached_rereads_ps(const Team& team, const detail::CostModel& cost,
                                                 const PlannerInput& in, Scratch& s, std::int32_t num_nodes,
                                                 bool flat) {
  if (!flat) {
    team.each(num_nodes,
              [&](int m) { s.cutting.readers[m] = s.node_depth[m] < kMaxDepth && s.node_run[m] >= 0 ? 1 : 0; });
    team.barrier();
    const auto read_above = [&](std::int32_t m) {
      HEADWATER_ROLLED
      for (; m >= 0 && s.node_run[m] < 0; m = s.node_parent[m]) team.add(s.cutting.readers + m, 1);
    };
    team.each(num_nodes, [&](int m) {
      if (s.node_depth[m] < kMaxDepth && s.node_run[m] >= 0) read_above(s.node_parent[m]);
    });
    team.each(in.num_requests, [&](int i) { read_above(s.bottom[i]); });
    team.barrier();
  }
  std::int64_t saved = 0;
  team.each(num_nodes, [&](int m) {
    if (s.node_depth[m] >= kMaxDepth) return;
    const std::int32_t tokens = detail::greater(0, s.node_cut[m] - node_begin(s, m));
    const std::int64_t readers = flat ? node_members(s, m) : s.cutting.readers[m];
    if (readers > 1) saved += (readers - 1) * (cost.read_ps(tokens) - cost.reread_ps(tokens, s.node_cut[m]));
  });
  return team.sum(saved);
}

}  // namespace headwater::cuda
