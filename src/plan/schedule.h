// Pieces to work items: row tiles, token chunks for balance, partial slots, merge lists.
//
// A *unit* is a piece x a row tile, trimmed to what the tile's rows see. Units too long for an even load are cut into
// parts. Batch-invariant mode: parts are cut at absolute multiples of invariant_chunk only; the item that starts a
// row's range folds its chunks into one state, every later one leaves a state per chunk, and the merge folds them in
// the same order.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "plan/cost_model.h"
#include "plan/memory.h"

namespace headwater::detail {

struct Estimate {
  std::int64_t predicted_ps = 0;  ///< of one layer
  std::int64_t kv_bytes = 0;      ///< K and V bytes read
};

class Scheduler {
 public:
  /// Predicted time of `pieces`; `saved_ps`: worker time saved by cached re-reads. Keeps the units for emit().
  Estimate estimate(const CostModel& cost, const PlanData& plan, std::span<const Piece> pieces, std::int64_t saved_ps);

  /// Fills items, merge lists and empty rows of `plan` from the pieces of the last estimate.
  void emit(const CostModel& cost, std::span<const Piece> pieces, PlanData& plan);

 private:
  struct Unit {
    std::int32_t piece;
    std::int32_t tok_begin;
    std::int32_t tok_end;
    std::int32_t all_end;    ///< all rows see [tok_begin, all_end)
    std::int32_t row_begin;  ///< in rows_
    std::int32_t num_rows;
    std::int32_t parts;
    bool tiled;  ///< one of several tiles of its piece
    std::int64_t read_token_ps;
    std::int64_t cost;
  };
  /// A part of a unit, before slots are known.
  struct Draft {
    std::int32_t unit;
    std::int32_t begin;
    std::int32_t end;
    std::int32_t row_begin;  ///< in plan.item_rows
    std::int32_t num_rows;
    bool later;  ///< batch-invariant mode: its rows have earlier states
    std::int32_t partial_begin;
    std::int32_t num_states;
    std::int32_t unmasked_begin;  ///< relative to begin
    std::int32_t unmasked_end;
    std::int64_t cost;
  };
  struct Sight {
    std::int32_t num_rows;   ///< rows that see something
    std::int32_t num_later;  ///< of those, rows that also see something earlier (batch-invariant mode)
    std::int32_t begin;      ///< seen by some row
    std::int32_t end;
    std::int32_t all_begin;  ///< seen by all of them
    std::int32_t all_end;
  };

  void make_units(const CostModel& cost, const PlanData& plan, std::span<const Piece> pieces);
  void add_tile(const CostModel& cost, const PlanData& plan, const Piece& piece, Unit& unit);
  void add_unit(const CostModel& cost, Unit& unit);
  bool cost_units(const CostModel& cost);
  std::int64_t balance(const CostModel& cost, const PlanData& plan);
  [[nodiscard]] std::int32_t parts_for(const Unit& unit, std::int64_t limit) const;
  [[nodiscard]] std::int64_t part_cost(const CostModel& cost, const Unit& unit, std::int32_t parts) const;
  template <class CostOf>
  void sort_by_cost(std::size_t count, CostOf&& cost_of);
  std::int64_t makespan(const CostModel& cost, std::int64_t limit);
  void make_drafts(const CostModel& cost, std::span<const Piece> pieces, PlanData& plan);
  [[nodiscard]] Sight look(const PlanData& plan, std::span<const std::int32_t> rows, std::int32_t begin,
                           std::int32_t end) const;
  static std::int32_t keep_rows(PlanData& plan, std::span<const std::int32_t> rows);
  void split_rows(const PlanData& plan, std::span<const std::int32_t> rows, std::int32_t begin, std::int32_t end);
  void add_draft(const CostModel& cost, std::int32_t unit_index, const Sight& sight, std::int32_t row_begin,
                 std::int32_t num_rows);
  void assign_slots(const CostModel& cost, PlanData& plan);
  void make_items(std::span<const Piece> pieces, PlanData& plan);
  template <class Visit>
  void for_stretches(Visit&& visit) const;
  [[nodiscard]] std::int32_t state_begin(const Draft& draft, std::int32_t s) const;
  std::int32_t* put_slots(const PlanData& plan, std::span<const Draft> stretch, std::int32_t j, std::int32_t* to) const;
  void sort_slots(PlanData& plan);
  void make_merges(PlanData& plan);

  std::int32_t sinks_ = 0;
  std::int32_t grain_ = 1;  ///< parts are cut at multiples of this many tokens ...
  std::int32_t least_ = 1;  ///< ... and hold at least about so many
  std::int32_t head_parts_ = 1;
  bool chunked_tiles_ = false;  ///< some piece has several row tiles
  std::vector<Unit> units_;
  std::vector<std::int32_t> rows_;
  std::vector<std::pair<std::int32_t, std::int32_t>> seen_;  ///< visible intervals of a tile's rows
  std::vector<std::int32_t> row_states_;                     ///< [R] units, then items of each row
  std::vector<std::uint64_t> keys_;
  std::vector<std::int32_t> by_cost_;
  std::vector<std::int64_t> loads_;
  std::vector<Draft> drafts_;
  std::vector<std::int32_t> first_rows_;
  std::vector<std::int32_t> later_rows_;
  std::vector<std::int32_t> draft_order_;
  std::vector<std::int32_t> slot_begin_;  ///< [R + 1] of each row in plan.merge_slots
  std::vector<std::int32_t> slot_end_;
  std::vector<std::int32_t> slot_position_;
};

}  // namespace headwater::detail
