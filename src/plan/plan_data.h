// What a plan is: flat arrays of plain structs, the same for every back end.
//
// A *piece* is a token span together with the query rows that read it in one go. Pieces are cut into *work items* of
// about chunk_tokens tokens and at most max_tile_rows stacked rows. Every item leaves one state (O, LSE) per row:
// straight in the output where it is the row's only one, else in a partial slot; then rows with several states are
// merged in a fixed order (ascending position). Positions are absolute token positions of a request.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "headwater/batch.h"
#include "headwater/options.h"
#include "headwater/plan.h"

namespace headwater::detail {

/// Keys that one query row sees: key p of an item iff p < hi and (p >= lo or p < num_sink_tokens). Items never hold a
/// key below num_sink_tokens that is hidden by a row's first_page_offset. A row that sees nothing has lo = hi.
struct RowRange {
  std::int32_t lo = 0;
  std::int32_t hi = 0;
  std::int32_t pos = 0;  ///< the row's own position q_pos (ALiBi, window)
};

/// A token chunk x a row tile x a range of KV heads: what one worker does in one go.
struct WorkItem {
  std::int32_t pos_begin = 0;    ///< absolute position of the chunk's first token
  std::int32_t num_tokens = 0;   ///< tokens of the chunk
  std::int32_t page_begin = 0;   ///< index into PlanData::page_ids of the page holding pos_begin
  std::int32_t first_token = 0;  ///< offset of pos_begin within that page
  std::int32_t row_begin = 0;    ///< rows are PlanData::item_rows[row_begin .. row_begin + num_rows)
  std::int32_t num_rows = 0;
  std::int32_t partial_begin = -1;  ///< partial slot of row 0, state 0; row j, state s: + s * num_rows + j; -1: direct
  std::int32_t num_states = 1;      ///< states left per row: 1, or in batch-invariant mode one per fixed chunk for a
                                    ///< piece that does not start its rows' range
  std::int16_t kv_head_begin = 0;
  std::int16_t kv_head_end = 0;
  std::int32_t view = 0;            ///< index of the KvCache it reads
  std::int32_t unmasked_end = 0;    ///< tokens [unmasked_begin, unmasked_end) of the chunk (relative to pos_begin) are
  std::int32_t unmasked_begin = 0;  ///< visible to every row of the item: no mask needed there
  std::int64_t cost_ps = 0;
};

/// A span that was split off for several requests, for describe() and the metrics.
struct SharedSpan {
  std::int32_t pos_begin = 0;
  std::int32_t num_tokens = 0;
  std::int32_t num_pages = 0;
  std::int32_t num_members = 0;
  std::int32_t depth = 0;
};

/// Page ids [begin, end) of PlanData::page_ids.
struct PageRange {
  std::int32_t begin = 0;
  std::int32_t end = 0;
};

/// For back ends that keep a copy of a plan's page ids: a copy of the same origin, at most one version old, needs the
/// changed ranges only.
struct PageHistory {
  std::shared_ptr<const char> origin;  ///< made when the plan is made from nothing; its address tells plans apart
  std::uint64_t version = 0;           ///< updates since then
  std::vector<PageRange> changed;      ///< by the last update
};

struct PlanData {
  AttentionShape shape;
  PlanOptions options;
  PlanStats stats;

  std::vector<std::int32_t> page_size;  ///< [views]
  std::vector<std::int64_t> num_pages;  ///< [views] pool size that ids were checked against
  std::vector<std::int32_t> page_ids;   ///< the page ids that items index
  PageHistory page_history;
  std::vector<RowRange> rows;              ///< [R]
  std::vector<std::int32_t> item_rows;     ///< query rows of all items
  std::vector<WorkItem> items;             ///< in the order in which workers should take them: longest first
  std::vector<std::int32_t> merge_rows;    ///< [M] rows with more than one state
  std::vector<std::int32_t> merge_indptr;  ///< [M+1]
  std::vector<std::int32_t> merge_slots;   ///< partial slots, ascending position
  std::vector<std::int32_t> empty_rows;    ///< rows without any visible key: O = 0, LSE = -inf
  std::int32_t num_partials = 0;
  std::vector<SharedSpan> spans;

  // Workspace layout, bytes: partial_o fp32 [num_partials, Hq, Dvo] | partial_lse fp32 [num_partials, Hq] (base 2) |
  // num_workers x scratch memory; each of the three starts at a multiple of kWorkspaceAlignment.
  std::int32_t num_workers = 1;
  std::int32_t max_item_rows = 0;  ///< query rows of the largest item
  std::size_t partial_o_bytes = 0;
  std::size_t scratch_offset = 0;
  std::size_t scratch_bytes_per_worker = 0;
  std::size_t workspace_bytes = 0;

  // What update() needs to start from: owned by the planner (src/plan/planner.cc).
  struct Memory;
  std::unique_ptr<Memory> memory;

  PlanData();
  ~PlanData();
};

}  // namespace headwater::detail
