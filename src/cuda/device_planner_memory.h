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
  std::int32_t part_grain = 1;    ///< parts are cut at multiples of so many tokens
  std::int32_t least_part = 128;  ///< tokens

  // What the plan's memory holds.
  std::int32_t max_rows = 0;
  std::int32_t max_items = 0;
  std::int32_t max_partials = 0;
  std::int32_t max_units = 0;
};

/// Where the plan goes, device memory.
struct PlannerOutput {
  Header* header = nullptr;
  DeviceItem* items = nullptr;
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

[[nodiscard]] HEADWATER_HOST_DEVICE constexpr int power_of_two_for(int n) {
  int size = 1;
  while (size < n) size *= 2;
  return size;
}

/// What all part sizes have in common: units below the least of them.
struct SmallUnits {
  std::int64_t total;  ///< scaled cost
  std::int32_t items;
  std::int32_t partials;
};

/// A part size's outcome.
struct Candidate {
  std::int32_t time;  ///< scaled
  std::int32_t items;
  std::int32_t partials;
};

/// Memory of a thread block while it plans, for up to kRequests requests and kUnits units: shared memory, or global
/// where that is too small. Sizes are constants so that places are.
template <int kRequests, int kUnits>
struct PlannerScratch {
  static constexpr int kMostRequests = kRequests;
  static constexpr int kMostUnits = kUnits;
  static constexpr int kHashSize = power_of_two_for(4 * kRequests);

  // Requests.
  std::int32_t length[kRequests];          ///< tokens
  std::int32_t pages[kRequests];           ///< pages that hold them; 0 where there are no rows
  std::int32_t row_indptr[kRequests + 1];  ///< of the caller
  std::int32_t parent[kRequests];          ///< the first request that this one shares the most with, or -1
  std::int32_t attach[kRequests];          ///< pages that it shares with it
  std::int32_t subtree[kRequests];         ///< requests below this one by `parent`, itself included
  std::int32_t position[kRequests];
  std::int32_t order[kRequests];          ///< the request at a position
  std::int32_t row_begin[kRequests + 1];  ///< rows before a position
  std::int32_t first_node[kRequests];     ///< the deepest node that this request leads, or -1
  std::int32_t last_node[kRequests];      ///< the topmost
  std::int32_t attach_node[kRequests];    ///< the node that it shares with `parent`, or -1
  std::int32_t bottom[kRequests];         ///< the deepest node above the depth limit that it is in, or -1
  std::int32_t top[kRequests];            ///< the deepest of those that are split off
  // Nodes, fewer than requests.
  std::int32_t node_leader[kRequests];
  std::int32_t node_parent[kRequests];  ///< the node that it is a part of, or -1
  std::int32_t node_pages[kRequests];   ///< where it ends
  std::int32_t node_end[kRequests];     ///< position behind its last member
  std::int32_t node_depth[kRequests];
  std::int32_t node_cut[kRequests];      ///< token where a piece that ends here ends
  std::int32_t node_all_end[kRequests];  ///< tokens that every row of its members sees
  std::int32_t node_run[kRequests];      ///< token where its piece begins; -1: not split off
  std::int32_t node_up[kRequests];       ///< nearest ancestor that is split off, or -1

  struct Finding {
    std::uint64_t spare[power_of_two_for(kRequests)];  ///< for ordering
    alignas(16) std::uint32_t keys[power_of_two_for(kRequests)];
    std::int32_t sorted[kRequests];  ///< brothers one behind the other
    std::int32_t before[kRequests];
    std::int32_t seg_first[kRequests];
    std::int32_t leader[kRequests];  ///< of this round, or -1
    std::int32_t next_id[kRequests];
    std::int32_t slot[kRequests];
    std::int32_t run[kRequests];  ///< of this block's requests
    std::int32_t bad[kRequests];
    std::int32_t hash_rep[kHashSize];
    std::int32_t hash_low[kHashSize];
  };
  struct Cutting {
    std::int64_t sums[kRequests][kMaxDepth + 1];
    std::int64_t read_prefix[kRequests];
    std::int32_t choice[kRequests];  ///< bit k: close where the run starts at depth k
    std::int32_t goes_on[kRequests];
    std::int32_t readers[kRequests];
  };
  struct Units {
    union {
      std::int64_t ps[kUnits];                        ///< cost
      std::uint64_t spare[power_of_two_for(kUnits)];  ///< then, for ordering
    };
    Candidate candidates[kCandidates];
    std::int32_t num_large;
    std::int32_t counts[kCandidates][kCostClasses];  ///< parts of each class of costs
    union {
      std::int32_t costs[kCandidates][kCostClasses];             ///< theirs, scaled, together
      alignas(16) std::uint32_t keys[power_of_two_for(kUnits)];  ///< then, for ordering
    };
    std::int32_t first[2 * kRequests + 1];  ///< of nodes, then of requests' own parts
    std::int32_t piece[kUnits];             ///< node, or -1 - request
    std::int32_t tile[kUnits];              ///< first tile
    std::int32_t rows[kUnits];              ///< of a tile; negative: they read something else, too
    std::int32_t tiles[kUnits];
    std::int32_t ranked[kUnits];  ///< those to be weighed; then all, longest first
    std::int32_t cost[kUnits];    ///< scaled; then that of a part
    std::int32_t parts[kUnits];
    union {
      std::int32_t extra[kUnits];  ///< scaled: of another part
      std::int32_t slot[kUnits];   ///< then; -1: results go to the output
    };
    union {
      std::int32_t most[kUnits];      ///< parts at most
      std::int32_t item[kUnits + 1];  ///< then: first item, by rank
    };
  };
  /// Of one step after the other.
  union {
    Finding finding;
    Cutting cutting;
    Units units;
  };
};

// The sizes there are.
using SmallScratch = PlannerScratch<256, 768>;       ///< shared memory of every device
using MediumScratch = PlannerScratch<1'024, 2'560>;  ///< of a data centre's Hopper
using LargeScratch = PlannerScratch<4'096, 12'288>;  ///< global memory

}  // namespace headwater::cuda
