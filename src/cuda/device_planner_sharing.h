// Who shares with whom: for every request the first one that it has the most pages in common with, and how many.
//
// In rounds. In the first, a request's *leader* is the first request with the same first page; the common run of both
// is looked for, all requests in parallel over many thread blocks, the one step that reads whole tables. Requests that
// leave their leader at the same page with the same id behind it have the first of them as leader in the next round. So
// a round ends all levels along a leader's path, and there are as many rounds as the tree has levels of leaders,
// usually one to three. Every block keeps the whole state and takes the same decisions: blocks exchange common runs
// only.
#pragma once

#include "cuda/device_planner_memory.h"
#include "cuda/device_planner_team.h"

namespace headwater::cuda {

inline constexpr std::int32_t kNowhere = 0x7fffffff;
inline constexpr int kIdsPerLane = 8;

/// Reads lengths and rows; returns flags.
template <class Team, class Scratch>
HEADWATER_ON_TEAM std::uint32_t load_requests(const Team& team, const PlannerInput& in, Scratch& s) {
  const std::int32_t n = in.num_requests;
  const std::int64_t most = std::int64_t{in.max_pages} << in.page_shift;
  bool bad_length = false;
  bool bad_rows = false;
  team.each(n, [&](int i) {
    std::int32_t length = in.lengths[i];
    if (length < 0 || length > most) {
      bad_length = true;
      length = length < 0 ? 0 : static_cast<std::int32_t>(most);
    }
    const std::int32_t row = in.qo_indptr == nullptr ? i : in.qo_indptr[i];
    const std::int32_t end = in.qo_indptr == nullptr ? i + 1 : in.qo_indptr[i + 1];
    if (row < 0 || end < row || end > in.max_rows || (i == 0 && row != 0)) bad_rows = true;
    s.row_indptr[i] = row;
    if (i == n - 1) s.row_indptr[n] = end;
    s.length[i] = length;
    s.pages[i] =
        end > row ? static_cast<std::int32_t>((std::int64_t{length} + (1 << in.page_shift) - 1) >> in.page_shift) : 0;
    s.parent[i] = -1;
    s.attach[i] = 0;
    s.finding.leader[i] = -1;
    s.finding.next_id[i] = kNoId;
  });
  return (team.any(bad_length) ? DevicePlanStatus::kBadLength : 0U) |
         (team.any(bad_rows) ? DevicePlanStatus::kBadRows : 0U);
}

/// Leader of each request with next_id != kNoId: the first one with the same parent, attach and next_id, or -1 for that
/// one itself. Other requests have none.
template <class Team, class Scratch>
HEADWATER_ON_TEAM_CALL void choose_leaders(const Team& team, const PlannerInput& in, Scratch& s) {
  team.each(Scratch::kHashSize, [&](int h) {
    s.finding.hash_rep[h] = -1;
    s.finding.hash_low[h] = kNowhere;
  });
  team.barrier();
  team.each(in.num_requests, [&](int i) {
    if (s.finding.next_id[i] == kNoId) return;
    std::uint32_t hash = static_cast<std::uint32_t>(s.finding.next_id[i]) * 0x9E3779B1U ^
                         static_cast<std::uint32_t>(s.attach[i]) * 0x85EBCA77U ^
                         static_cast<std::uint32_t>(s.parent[i]) * 0xC2B2AE3DU;
    hash = (hash ^ hash >> 15) * 0x2C1B3C6DU;
    hash ^= hash >> 13;
    std::int32_t h = static_cast<std::int32_t>(hash) & (Scratch::kHashSize - 1);
    for (;; h = (h + 1) & (Scratch::kHashSize - 1)) {
      const std::int32_t other = team.claim(s.finding.hash_rep + h, -1, i);
      if (other == -1 || (s.finding.next_id[other] == s.finding.next_id[i] && s.attach[other] == s.attach[i] &&
                          s.parent[other] == s.parent[i])) {
        break;
      }
    }
    team.lower(s.finding.hash_low + h, i);
    s.finding.slot[i] = h;
  });
  team.barrier();
  team.each(in.num_requests, [&](int i) {
    const std::int32_t low = s.finding.next_id[i] == kNoId ? i : s.finding.hash_low[s.finding.slot[i]];
    s.finding.leader[i] = low == i ? -1 : low;
  });
  team.barrier();
}

/// Ids [page, page + 4) of a request; those from `end` on are not read.
template <class Team>
HEADWATER_ON_TEAM FourIds four_ids(const Team& team, const PlannerInput& in, const std::int32_t* row, int page,
                                   int end) {
  FourIds ids{};
  if (page + 4 <= end && in.aligned) return team.four(row + page);
  for (int j = 0; j < 4; ++j) {
    if (page + j < end) ids.id[j] = row[page + j];
  }
  return ids;
}

/// First page of [max(page, from), min(page + 4, end)) where `a` and `b` differ or `a` is the null page.
HEADWATER_ON_TEAM inline std::int32_t first_difference(const FourIds& a, const FourIds& b, int page, int from, int end,
                                                       std::int32_t null_page) {
  std::int32_t first = kNowhere;
  for (int j = 3; j >= 0; --j) {
    const bool differs = a.id[j] != b.id[j] || a.id[j] == null_page;
    if (differs && page + j >= from && page + j < end) first = page + j;
  }
  return first;
}

/// Common runs of this block's requests (block, block + num_blocks, ...) with their leaders, to `to`. In the first
/// round it looks at all their pages and reports ids outside the pool.
template <class Team, class Scratch, class Grid>
HEADWATER_ON_TEAM void find_runs(const Team& team, const Grid& grid, const PlannerInput& in, Scratch& s,
                                 bool first_round, CommonRun* to) {
  const int blocks = grid.num_blocks();
  const int own = (in.num_requests - grid.block() + blocks - 1) / blocks;
  team.each(own, [&](int k) {
    const int i = grid.block() + k * blocks;
    const std::int32_t leader = s.finding.leader[i];
    s.finding.run[k] = leader < 0 ? 0 : detail::lesser(s.pages[i], s.pages[leader]);
    s.finding.bad[k] = 0;
  });
  team.barrier();
  constexpr int kHalf = 4 * Team::kLanes;
  const int strips = (in.max_pages + 2 * kHalf - 1) / (2 * kHalf);
  for (int strip = team.strip(); strip < own * strips; strip += team.num_strips()) {
    const int k = strip / strips;
    const int base = (strip - k * strips) * 2 * kHalf;
    const int i = grid.block() + k * blocks;
    const std::int32_t leader = s.finding.leader[i];
    const std::int32_t shared = leader < 0 ? 0 : team.peek_of_lanes(s.finding.run + k);  // may become less meanwhile
    const std::int32_t looked_at = first_round ? s.pages[i] : shared;
    const std::int32_t from = s.parent[i] < 0 ? 1 : s.attach[i] + 1;  // the page before is known to agree
    if (base >= looked_at) continue;
    const std::int32_t* mine = in.block_table + i * in.row_stride;
    const std::int32_t* theirs = in.block_table + (leader < 0 ? i : leader) * in.row_stride;
    const int page = base + 4 * team.lane();
    const FourIds a0 = four_ids(team, in, mine, page, looked_at);
    const FourIds a1 = four_ids(team, in, mine, page + kHalf, looked_at);
    const FourIds b0 = four_ids(team, in, theirs, page, shared);
    const FourIds b1 = four_ids(team, in, theirs, page + kHalf, shared);
    const std::int32_t first =
        team.least_of_lanes(detail::lesser(first_difference(a0, b0, page, from, shared, in.null_page),
                                           first_difference(a1, b1, page + kHalf, from, shared, in.null_page)));
    if (team.lane() == 0 && first != kNowhere) team.lower(s.finding.run + k, first);
    if (!first_round) continue;
    bool bad = false;
    for (int j = 0; j < 4; ++j) {
      const auto pool = static_cast<std::uint32_t>(in.num_pages);
      bad = bad || (page + j < looked_at && static_cast<std::uint32_t>(a0.id[j]) >= pool) ||
            (page + kHalf + j < looked_at && static_cast<std::uint32_t>(a1.id[j]) >= pool);
    }
    if (team.any_of_lanes(bad) && team.lane() == 0) team.mark(s.finding.bad + k, 1);
  }
  team.barrier();
  team.each(own, [&](int k) {
    const int i = grid.block() + k * blocks;
    if (s.finding.leader[i] < 0 && !first_round) return;
    const std::int32_t pages = s.finding.run[k];
    std::int32_t id = kNoId;
    if (s.finding.bad[k] != 0) {
      id = kBadId;
    } else if (s.finding.leader[i] >= 0 && pages < s.pages[i]) {
      id = in.block_table[i * in.row_stride + pages];
      if (id == in.null_page) id = kNoId;
    }
    to[i] = {pages, id};
  });
}

/// Fills parent and attach; returns flags. By all blocks; only the first one needs the result.
template <class Team, class Scratch, class Grid>
HEADWATER_ON_TEAM std::uint32_t find_sharing(const Team& team, const Grid& grid, const PlannerInput& in, Scratch& s,
                                             CommonRun* exchange) {
  const std::uint32_t flags = load_requests(team, in, s);
  if (in.policy == Policy::flat || flags != 0) return flags;
  team.each(in.num_requests, [&](int i) {
    if (s.pages[i] == 0) return;
    const std::int32_t id = in.block_table[i * in.row_stride];
    // What is outside the pool is looked for in the first round.
    s.finding.next_id[i] = id == in.null_page || id < 0 ? kNoId : id;
  });
  team.barrier();
  choose_leaders(team, in, s);
  for (int round = 0;; ++round) {
    CommonRun* runs = exchange + (round % 2) * in.num_requests;
    find_runs(team, grid, in, s, round == 0, runs);
    grid.sync();
    bool bad = false;
    bool parts = false;  // some request goes on after it left its leader
    team.each(in.num_requests, [&](int i) {
      s.finding.next_id[i] = kNoId;
      if (s.finding.leader[i] < 0 && round > 0) return;
      const CommonRun run = grid.read(runs + i);
      bad = bad || run.next_id == kBadId;
      if (s.finding.leader[i] < 0) return;
      s.parent[i] = s.finding.leader[i];
      s.attach[i] = run.pages;
      s.finding.next_id[i] = run.next_id;
      parts = parts || run.next_id != kNoId;
    });
    if (round == 0 && team.any(bad)) return DevicePlanStatus::kBadPageId;
    if (!team.any(parts) || round + 1 == kMaxDepth) return 0;
    choose_leaders(team, in, s);
    bool follows = false;
    team.each(in.num_requests, [&](int i) { follows = follows || s.finding.leader[i] >= 0; });
    if (!team.any(follows)) return 0;
  }
}

}  // namespace headwater::cuda
