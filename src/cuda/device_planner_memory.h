// What planning on the device reads, writes and keeps in between. Plain structs for host and device; the steps over
// them are in device_planner_{sharing,forest,cut,units,emit}.h.
//
// Requests are numbered as in the block table. *Positions* number them anew, so that the members of every shared span
// are neighbours; rows are numbered in order of position, so that the rows of a span are neighbours too, and one list
// of rows serves all work items. A *node* is a run of pages that the same requests share (plan/memory.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/params.h"
#include "headwater/cuda.h"
#include "plan/cost_model.h"

namespace headwater::cuda {

/// Nodes above a request that are looked at: spans of depth 0..kMaxDepth-1, as many as the tree has levels.
inline constexpr int kMaxDepth = 6;
/// Part sizes that are weighed against each other.
inline constexpr int kCandidates = 10;
/// Classes of costs: eight to a factor of two.
inline constexpr int kCostClasses = 256;

/// The first pages of a request that are those of its leader, and the id behind them.
struct alignas(8) CommonRun {
  std::int32_t pages;
  std::int32_t next_id;  ///< kNoId: the request ends there, or its page is the null page
};
inline constexpr std::int32_t kNoId = -1;
inline constexpr std::int32_t kBadId = -2;  ///< some id of the request is outside the pool

struct PlannerInput {
  // The tables, device memory.
  const std::int32_t* block_table = nullptr;
  std::int64_t row_stride = 0;  ///< elements
  const std::int32_t* lengths = nullptr;
  const std::int32_t* qo_indptr = nullptr;  ///< nullptr: one row each
  std::int32_t num_requests = 0;
  bool aligned = false;  ///< every row of the table starts at a multiple of 16 bytes

  std::int32_t max_pages = 0;  ///< columns of the table
  std::int32_t page_shift = 4;
  std::int32_t num_pages = 0;  ///< of the pool
  std::int32_t null_page = -1;
  bool causal = true;
  Policy policy = Policy::automatic;  ///< flat, forest or automatic
  std::int32_t min_pages = 1;
  std::int32_t min_members = 2;
  std::int32_t num_kv_heads = 1;

  // What the plan's memory holds.
  std::int32_t max_rows = 0;
  std::int32_t max_items = 0;
  std::int32_t max_partials = 0;
  std::int32_t max_units = 0;
};

/// Where the plan goes, device memory.
struct PlannerOutput {
  Header* header = nullptr;
  detail::WorkItem* items = nullptr;
  ItemRow* item_rows = nullptr;
  std::int32_t* merge_rows = nullptr;
  std::int32_t* merge_indptr = nullptr;
  std::int32_t* merge_slots = nullptr;
  std::int32_t* empty_rows = nullptr;
  DevicePlanStatus* status = nullptr;
  DeviceSpan* spans = nullptr;           ///< [max_requests]
  std::int32_t* span_members = nullptr;  ///< [max_requests] requests by position
  CommonRun* exchange = nullptr;         ///< [2][max_requests] between thread blocks
};

/// A part size's outcome.
struct Candidate {
  std::int64_t total = 0;  ///< scaled cost of all parts
  std::int64_t items = 0;
  std::int64_t partials = 0;
  std::int32_t longest = 0;
  std::int32_t waves = 0;  ///< time that so many parts of some cost or more need, at least
};

/// Memory of a thread block while it plans: shared memory, or global where that is too small.
struct PlannerScratch {
  // Requests.
  std::int32_t* length;       ///< [n] tokens
  std::int32_t* pages;        ///< [n] pages that hold them; 0 where there are no rows
  std::int32_t* row_indptr;   ///< [n + 1] of the caller
  std::int32_t* parent;       ///< [n] the first request that this one shares the most with, or -1
  std::int32_t* attach;       ///< [n] pages that it shares with it
  std::int32_t* subtree;      ///< [n] requests below this one by `parent`, itself included
  std::int32_t* position;     ///< [n]
  std::int32_t* order;        ///< [n] the request at a position
  std::int32_t* row_begin;    ///< [n + 1] rows before a position
  std::int32_t* first_node;   ///< [n] the deepest node that this request leads, or -1
  std::int32_t* last_node;    ///< [n] the topmost
  std::int32_t* attach_node;  ///< [n] the node that it shares with `parent`, or -1
  std::int32_t* bottom;       ///< [n] the deepest node above the depth limit that it is in, or -1
  std::int32_t* top;          ///< [n] the deepest of those that are split off
  // Nodes, fewer than requests.
  std::int32_t* node_leader;
  std::int32_t* node_pages;  ///< where it ends
  std::int32_t* node_end;    ///< position behind its last member
  std::int32_t* node_depth;
  std::int32_t* node_cut;      ///< token where a piece that ends here ends
  std::int32_t* node_all_end;  ///< tokens that every row of its members sees
  std::int32_t* node_run;      ///< token where its piece begins; -1: not split off
  std::int32_t* node_up;       ///< nearest ancestor that is split off, or -1

  // Of one step; they share their place.
  std::int32_t* leader;     // finding: [n] of this round, or -1
  std::int32_t* next_id;    // [n]
  std::int32_t* slot;       // [n]
  std::int32_t* run;        // [n] of this block's requests
  std::int32_t* bad;        // [n]
  std::int32_t* hash_rep;   // [hash_size]
  std::int32_t* hash_low;   // [hash_size]
  std::uint64_t* keys;      // ordering: [2^k >= n]
  std::int32_t* before;     // [n]
  std::int32_t* seg_first;  // [n]

  std::int64_t* sums;         // cutting: [n][kMaxDepth + 1]
  std::int64_t* read_prefix;  // [n]
  std::int32_t* choice;       // [n] bit k: close where the run starts at depth k
  std::int32_t* goes_on;      // [n]
  std::int32_t* readers;      // [n]

  std::int64_t* unit_ps;     // scheduling: [max_units] cost
  std::uint64_t* unit_keys;  // [2^k >= max_units]
  std::int32_t* first_unit;  // [2 n + 1] of nodes, then of requests' own parts
  std::int32_t* unit_piece;  // [max_units] node, or -1 - request
  std::int32_t* unit_tile;   // first tile
  std::int32_t* unit_rows;   // of a tile; negative: they read something else, too
  std::int32_t* unit_tiles;
  std::int32_t* unit_most;   // parts at most
  std::int32_t* unit_cost;   // scaled; then that of a part
  std::int32_t* unit_extra;  // scaled: of another part
  std::int32_t* unit_parts;
  std::int32_t* unit_slot;  // -1: results go to the output
  std::int32_t* unit_item;  // [max_units + 1] by rank
  std::int32_t* counts;     // [kCandidates][kCostClasses]
  Candidate* candidates;    // [kCandidates]

  std::int32_t hash_mask;
};

[[nodiscard]] HEADWATER_HOST_DEVICE inline std::int32_t power_of_two_for(std::int32_t n) {
  std::int32_t size = 1;
  while (size < n) size *= 2;
  return size;
}

/// Gives out stretches of memory.
class PlannerCarver {
 public:
  HEADWATER_HOST_DEVICE explicit PlannerCarver(std::byte* to) : to_(to) {}
  template <class Element>
  HEADWATER_HOST_DEVICE void take(Element*& array, std::size_t count) {
    array = reinterpret_cast<Element*>(to_ + at_);
    at_ += (count * sizeof(Element) + 7) / 8 * 8;
    if (at_ > most_) most_ = at_;
  }
  template <class... Element>
  HEADWATER_HOST_DEVICE void take_each(std::size_t count, Element*&... arrays) {
    (take(arrays, count), ...);
  }
  [[nodiscard]] HEADWATER_HOST_DEVICE std::size_t at() const { return at_; }
  HEADWATER_HOST_DEVICE void back_to(std::size_t at) { at_ = at; }
  [[nodiscard]] HEADWATER_HOST_DEVICE std::size_t most() const { return most_; }

 private:
  std::byte* to_;
  std::size_t at_ = 0;
  std::size_t most_ = 0;
};

/// Lays out scratch memory for n requests from `memory` (aligned to 8 bytes); returns its size in bytes.
HEADWATER_HOST_DEVICE inline std::size_t lay_out(PlannerScratch& s, std::byte* memory, std::int32_t requests,
                                                 std::int32_t max_units) {
  const auto n = static_cast<std::size_t>(requests);
  const auto units = static_cast<std::size_t>(max_units);
  PlannerCarver carver(memory);
  carver.take_each(n, s.length, s.pages, s.parent, s.attach, s.subtree, s.position, s.order, s.first_node, s.last_node,
                   s.attach_node, s.bottom, s.top, s.node_leader, s.node_pages, s.node_end, s.node_depth, s.node_cut,
                   s.node_all_end, s.node_run, s.node_up);
  carver.take(s.row_indptr, n + 1);
  carver.take(s.row_begin, n + 1);

  const std::size_t begin = carver.at();
  const std::int32_t hash_size = power_of_two_for(2 * requests);
  s.hash_mask = hash_size - 1;
  carver.take_each(n, s.leader, s.next_id, s.slot, s.run, s.bad, s.before, s.seg_first);
  carver.take(s.hash_rep, static_cast<std::size_t>(hash_size));
  carver.take(s.hash_low, static_cast<std::size_t>(hash_size));
  carver.take(s.keys, static_cast<std::size_t>(power_of_two_for(requests)));

  carver.back_to(begin);
  carver.take(s.sums, n * (kMaxDepth + 1));
  carver.take(s.read_prefix, n);
  carver.take_each(n, s.choice, s.goes_on, s.readers);

  carver.back_to(begin);
  carver.take(s.unit_ps, units);
  carver.take(s.unit_keys, static_cast<std::size_t>(power_of_two_for(max_units)));
  carver.take(s.candidates, kCandidates);
  carver.take(s.counts, std::size_t{kCandidates} * kCostClasses);
  carver.take(s.first_unit, 2 * n + 1);
  carver.take_each(units, s.unit_piece, s.unit_tile, s.unit_rows, s.unit_tiles, s.unit_most, s.unit_cost, s.unit_extra,
                   s.unit_parts, s.unit_slot);
  carver.take(s.unit_item, units + 1);
  return carver.most();
}

}  // namespace headwater::cuda
