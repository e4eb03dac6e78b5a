// What the planner knows about a batch, beyond what run reads: tables in a uniform form, entries, the forest.
//
// A *table* is a list of pages with a length: one per request, or one per node of an explicit level. Page ids are kept
// in PlanData::page_ids, one region per table. A region's size is a pure function of the table's length, with slack, so
// that a decode step seldom moves a region, and a plan made by an update equals one made from nothing. An *entry* is
// one request's visible stretch of tokens: one, or two where leading sink tokens lie apart from the window.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/plan_data.h"

namespace headwater::detail {

struct Table {
  std::int32_t num_pages = 0;
  std::int32_t last_len = 0;      ///< tokens in the last page; 0 where there are no pages
  std::int32_t start_page = 0;    ///< absolute page index of the first page
  std::int32_t first_offset = 0;  ///< first visible token within the first page
  std::int32_t region = 0;        ///< index in PlanData::page_ids

  friend bool operator==(const Table&, const Table&) = default;
};

struct Entry {
  std::int32_t request = 0;
  std::int32_t row_begin = 0;  ///< rows of the request
  std::int32_t row_end = 0;
  std::int32_t tok_begin = 0;  ///< absolute positions: the tokens that some row of it sees lie in [tok_begin, tok_end)
  std::int32_t tok_end = 0;
  std::int32_t page_begin = 0;  ///< absolute pages that hold them
  std::int32_t page_end = 0;
  std::int32_t page_base = 0;  ///< page_ids index of absolute page 0 (may be negative)
  std::int32_t lane = 0;       ///< 0: leading sinks apart from the rest; 1: everything else
  bool solo = false;           ///< never shared

  friend bool operator==(const Entry&, const Entry&) = default;
};

/// A node of the sharing forest: a run of pages that the same entries share. Nodes are in depth-first order; the
/// members of a node are contiguous in Forest::order. A node with one member is a leaf, and every path ends in one (it
/// may be empty).
struct Node {
  std::int32_t tok_begin = 0;
  std::int32_t cut =
      0;  ///< where a piece that ends here ends: tok_end, or in batch-invariant mode a chunk border before it
  std::int32_t tok_end = 0;  ///< where what the members have in common ends
  std::int32_t page_begin = 0;
  std::int32_t page_end = 0;
  std::int32_t member_begin = 0;
  std::int32_t num_members = 0;
  std::int32_t num_rows = 0;
  std::int32_t parent = -1;
  std::int32_t depth = 0;
  std::int32_t subtree_end = 0;  ///< nodes (this, subtree_end) are its descendants
  std::int32_t page_base = 0;    ///< page_ids index of the page that holds position `origin`
  std::int32_t origin = 0;
  std::int32_t view = 0;
};

struct Forest {
  std::vector<Node> nodes;
  std::vector<std::int32_t> order;    ///< entries
  std::vector<std::int32_t> leaf_of;  ///< [entries] the leaf where an entry ends
  bool split_entries = false;         ///< some entry takes part in several trees (different starts)
  bool mixed_starts = false;          ///< the entries of a tree need not all start at its root's first page
  bool levels = false;                ///< nodes are an explicit cascade: a piece never spans two of them
};

/// A token span and the entries that read it in one go.
struct Piece {
  std::int32_t tok_begin = 0;
  std::int32_t tok_end = 0;
  std::int32_t page_base = 0;
  std::int32_t origin = 0;
  std::int32_t view = 0;
  std::int32_t member_begin = 0;  ///< in Forest::order; unused with one member
  std::int32_t num_members = 1;
  std::int32_t entry = 0;  ///< the member, where there is one
  std::int32_t depth = 0;
};

/// The rows and slots of a part of a unit (schedule.h).
struct Place {
  std::int32_t row_begin = 0;  ///< in PlanData::item_rows
  std::int32_t num_rows = 0;
  std::int32_t partial_begin = -1;  ///< -1: direct
};
/// No number of rows: Memory::places say nothing.
inline constexpr std::size_t kNotPlaced = static_cast<std::size_t>(-1);

struct PlanData::Memory {
  std::int32_t num_requests = 0;
  std::vector<std::int32_t> qo_indptr;  ///< [num_requests + 1]
  std::vector<Table> tables;
  std::int32_t null_page = -1;

  std::vector<std::int32_t> level_size;                 ///< nodes of each level; empty: page tables of requests
  std::vector<std::vector<std::int32_t>> level_indptr;  ///< qo_indptr of each level

  std::vector<Entry> entries;
  std::vector<std::int32_t> row_first;  ///< batch-invariant mode: a row's first visible position
  Forest forest;
  bool scanned = false;  ///< the forest was looked for
  std::vector<Piece> pieces;
  std::vector<Place> places;  ///< from which slots, merge lists and empty rows of `placed_rows` rows followed
  std::size_t placed_rows = kNotPlaced;
  std::vector<std::uint8_t> closed;  ///< [nodes] split off in this plan
  Policy chosen = Policy::flat;      ///< whose cut the plan uses (automatic: the cost model's)
  DeviceModel model;                 ///< that the plan was made with, for describe()
};

}  // namespace headwater::detail
