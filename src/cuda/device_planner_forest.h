// From who shares with whom to the sharing forest: an order of requests in which the members of every node are
// neighbours, and the nodes.
//
// Every request has a parent, the leader that it stayed with longest (or none), and parts from it behind `attach`
// pages. The nodes that a leader leads end where requests part from it; their members are the leader, and with
// everybody below them those who part there or later. So a leader's subtree in order of descending `attach` has each of
// its nodes' members as a prefix. One sort gives brothers in that order, one scan where their subtrees begin. Nodes of
// a leader are numbered from the deepest to the topmost: the parent of node m is m + 1, or that of the leader's own
// parent.
#pragma once

#include "cuda/device_planner_sharing.h"

namespace headwater::cuda {

struct ForestSize {
  std::int32_t num_nodes = 0;
  std::int32_t num_rows = 0;
};

/// Of a key: the lower bits; above them, the parent.
inline constexpr int kKeyPageBits = 20;
inline constexpr std::uint32_t kKeyPageMask = (1U << kKeyPageBits) - 1;

/// Nodes above node m.
template <class Scratch>
HEADWATER_ON_TEAM std::int32_t depth_of(const Scratch& s, std::int32_t m) {
  std::int32_t depth = -1;
  HEADWATER_ROLLED
  do {
    const std::int32_t leader = s.node_leader[m];
    depth += s.last_node[leader] - m + 1;
    m = s.attach_node[leader];
  } while (m >= 0);
  return depth;
}

/// The deepest node above the depth limit of those that request i is in, or -1.
template <class Scratch>
HEADWATER_ON_TEAM std::int32_t bottom_of(const Scratch& s, std::int32_t i) {
  std::int32_t m = s.first_node[i] >= 0 ? s.first_node[i] : s.attach_node[i];
  HEADWATER_ROLLED
  while (m >= 0 && s.node_depth[m] >= kMaxDepth) {
    const std::int32_t leader = s.node_leader[m];
    const std::int32_t topmost = s.last_node[leader];
    const std::int32_t base = s.node_depth[m] - (topmost - m);
    m = base < kMaxDepth ? topmost - (kMaxDepth - 1 - base) : s.attach_node[leader];
  }
  return m;
}

/// Requests in an order in which the members of nodes are neighbours; the nodes' leaders, pages and ends.
template <class Team, class Scratch>
HEADWATER_ON_TEAM std::int32_t order_requests(const Team& team, const PlannerInput& in, Scratch& s) {
  const std::int32_t n = in.num_requests;
  std::int64_t mine = 0;
  team.each(n, [&](int i) {
    const std::int32_t parent = s.parent[i];
    if (parent >= 0) ++mine;
    s.subtree[i] = 1;
    s.first_node[i] = s.last_node[i] = s.attach_node[i] = s.bottom[i] = -1;
    // Without a parent: last.
    s.finding.keys[i] = parent < 0 ? ~0U
                                   : static_cast<std::uint32_t>(parent) << kKeyPageBits |
                                         (kKeyPageMask - static_cast<std::uint32_t>(s.attach[i]));
  });
  const auto num_children = static_cast<std::int32_t>(team.sum(mine));
  if (num_children == 0) {
    team.each(n, [&](int i) { s.order[i] = s.position[i] = i; });
    team.barrier();
    return 0;
  }
  team.each(n, [&](int i) {
    HEADWATER_ROLLED
    for (std::int32_t p = s.parent[i]; p >= 0; p = s.parent[p]) team.add(s.subtree + p, 1);
  });
  team.order(s.finding.keys, s.finding.spare, n, s.finding.sorted);
  const auto key_at = [&](int k) { return s.finding.keys[s.finding.sorted[k]]; };
  const auto begins_node = [&](int k) { return k < num_children && (k == 0 || key_at(k) != key_at(k - 1)); };
  const auto group_of = [&](int k) { return static_cast<std::int32_t>(key_at(k) >> kKeyPageBits); };
  // Sizes of subtrees in the lower half, nodes in the upper one: 4,096 requests are in at most 7 subtrees each.
  const std::int32_t total = team.scan(
      n,
      [&](int k) {
        const std::int32_t i = s.finding.sorted[k];
        return (begins_node(k) ? 1 << 16 : 0) + s.subtree[i];
      },
      [&](int k, std::int32_t before) {
        const std::int32_t i = s.finding.sorted[k];
        s.finding.before[k] = before & 0xffff;
        if (k >= num_children) return;
        const std::int32_t leader = group_of(k);
        const bool fresh = begins_node(k);
        const std::int32_t node = (before >> 16) + (fresh ? 1 : 0) - 1;
        s.attach_node[i] = node;
        if (k == 0 || group_of(k - 1) != leader) {
          s.finding.seg_first[leader] = k;
          s.first_node[leader] = node;
        }
        if (k + 1 >= num_children || group_of(k + 1) != leader) s.last_node[leader] = node;
        if (k + 1 >= num_children || begins_node(k + 1)) s.node_end[node] = i;  // its last member's root, for now
        if (fresh) {
          s.node_leader[node] = leader;
          s.node_pages[node] = s.attach[i];
        }
      });
  // Places among brothers, then from the root down.
  team.each(n, [&](int k) {
    const std::int32_t i = s.finding.sorted[k];
    s.row_begin[i] = k < num_children ? s.finding.before[k] - s.finding.before[s.finding.seg_first[group_of(k)]] + 1
                                      : s.finding.before[k] - s.finding.before[num_children];
  });
  team.barrier();
  team.each(n, [&](int i) {
    std::int32_t position = s.row_begin[i];
    HEADWATER_ROLLED
    for (std::int32_t p = s.parent[i]; p >= 0; p = s.parent[p]) position += s.row_begin[p];
    s.position[i] = position;
    s.order[position] = i;
  });
  team.barrier();
  const std::int32_t num_nodes = total >> 16;
  team.each(num_nodes, [&](int m) { s.node_end[m] = s.position[s.node_end[m]] + s.subtree[s.node_end[m]]; });
  return num_nodes;
}

/// First key behind those that the first row of request i sees.
template <class Scratch>
HEADWATER_ON_TEAM std::int32_t first_hi(const PlannerInput& in, const Scratch& s, std::int32_t i) {
  if (!in.causal) return s.length[i];
  return detail::greater(0, s.length[i] - (s.row_indptr[i + 1] - s.row_indptr[i]) + 1);
}

template <class Team, class Scratch>
HEADWATER_ON_TEAM ForestSize build_forest(const Team& team, const PlannerInput& in, Scratch& s) {
  const std::int32_t n = in.num_requests;
  ForestSize size;
  size.num_nodes = order_requests(team, in, s);
  size.num_rows = team.scan(
      n, [&](int p) { return s.row_indptr[s.order[p] + 1] - s.row_indptr[s.order[p]]; },
      [&](int p, std::int32_t before) { s.row_begin[p] = before; });
  if (team.rank() == 0) s.row_begin[n] = size.num_rows;
  if (size.num_nodes > 0) {
    team.each(size.num_nodes, [&](int m) {
      const std::int32_t leader = s.node_leader[m];
      s.node_parent[m] = m < s.last_node[leader] ? m + 1 : s.attach_node[leader];
      s.node_depth[m] = depth_of(s, m);
      s.node_cut[m] = 0;
      s.node_all_end[m] = kNowhere;
    });
    team.barrier();
    // A member may end inside a node's last page: what all see, and what some see.
    team.each(n, [&](int i) {
      const std::int32_t bottom = s.bottom[i] = bottom_of(s, i);
      const std::int32_t hi = bottom < 0 ? 0 : first_hi(in, s, i);
      HEADWATER_ROLLED
      for (std::int32_t m = bottom; m >= 0; m = s.node_parent[m]) {
        const std::int64_t end = std::int64_t{s.node_pages[m]} << in.page_shift;
        team.raise(s.node_cut + m, static_cast<std::int32_t>(detail::lesser<std::int64_t>(end, s.length[i])));
        team.lower(s.node_all_end + m, hi);
      }
    });
  }
  team.barrier();
  return size;
}

template <class Scratch>
HEADWATER_ON_TEAM std::int32_t node_rows(const Scratch& s, std::int32_t m) {
  return s.row_begin[s.node_end[m]] - s.row_begin[s.position[s.node_leader[m]]];
}
template <class Scratch>
HEADWATER_ON_TEAM std::int32_t node_members(const Scratch& s, std::int32_t m) {
  return s.node_end[m] - s.position[s.node_leader[m]];
}
/// Where a node's own tokens begin.
template <class Scratch>
HEADWATER_ON_TEAM std::int32_t node_begin(const Scratch& s, std::int32_t m) {
  const std::int32_t parent = s.node_parent[m];
  return parent < 0 ? 0 : s.node_cut[parent];
}

}  // namespace headwater::cuda
