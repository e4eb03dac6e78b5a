// Units to work items: token chunks, partial slots, merge lists.
//
// Batch-invariant mode: parts are cut at absolute multiples of invariant_chunk only; the item that starts a row's range
// folds its chunks into one state, every later one leaves a state per chunk, and the merge folds them in the same
// order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/cost_model.h"
#include "plan/cost_order.h"
#include "plan/memory.h"
#include "plan/units.h"

namespace headwater::detail {

class Scheduler {
 public:
  /// Fills items, merge lists and empty rows of `plan` from the units of `pieces`.
  void emit(const CostModel& cost, std::span<const Piece> pieces, const Units& units, PlanData& plan);

 private:
  /// A part of a unit: the item of all KV heads.
  struct Draft {
    WorkItem item;
    std::int32_t piece;
    bool later;  ///< batch-invariant mode: its rows have earlier states
  };
  struct Sight {
    std::int32_t num_rows;   ///< rows that see something
    std::int32_t num_later;  ///< of those, rows that also see something earlier (batch-invariant mode)
    std::int32_t begin;      ///< seen by some row
    std::int32_t end;
    std::int32_t all_begin;  ///< seen by all of them
    std::int32_t all_end;
  };

  void make_drafts(const CostModel& cost, std::span<const Piece> pieces, const Units& units, const PlanData& plan);
  [[nodiscard]] Sight look(const PlanData& plan, std::span<const std::int32_t> rows, std::int32_t begin,
                           std::int32_t end) const;
  std::int32_t keep_rows(std::span<const std::int32_t> rows);
  void split_rows(const PlanData& plan, std::span<const std::int32_t> rows, std::int32_t begin, std::int32_t end);
  void add_draft(const CostModel& cost, const Unit& unit, const Piece& piece, std::int32_t page_size,
                 const Sight& sight, std::int32_t row_begin, std::int32_t num_rows);
  bool keep_places(const PlanData& plan);
  void assign_slots(PlanData& plan);
  void make_items(const CostModel& cost, const Units& units, PlanData& plan);
  template <class Visit>
  void for_stretches(Visit&& visit) const;
  [[nodiscard]] std::int32_t state_begin(const Draft& draft, std::int32_t s) const;
  std::int32_t* put_slots(const PlanData& plan, std::span<const Draft> stretch, std::int32_t j, std::int32_t* to) const;
  void sort_slots(PlanData& plan);
  void make_merges(PlanData& plan);

  std::int32_t sinks_ = 0;
  std::int32_t grain_ = 1;
  std::vector<Draft> drafts_;
  std::vector<std::int32_t> item_rows_;  ///< those of the drafts
  std::vector<std::int32_t> first_rows_;
  std::vector<std::int32_t> later_rows_;
  std::vector<std::int32_t> draft_order_;
  CostOrder by_cost_;
  std::vector<std::int32_t> row_drafts_;  ///< [R] drafts of each row
  std::vector<std::int32_t> slot_begin_;  ///< [R + 1] of each row in plan.merge_slots
  std::vector<std::int32_t> slot_end_;
  std::vector<std::int32_t> slot_position_;
};

}  // namespace headwater::detail
