// Pieces to units, and what they will take: row tiles, parts for balance, predicted time.
//
// A *unit* is a piece x a row tile, trimmed to what the tile's rows see. Units too long for an even load are cut into
// parts. Every cut that the planner weighs is brought this far; only the best one's units become work items
// (schedule.h). Data layout: units in the order of their pieces, the rows of all units in one list.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "plan/cost_model.h"
#include "plan/cost_order.h"
#include "plan/memory.h"

namespace headwater::detail {

struct Estimate {
  std::int64_t predicted_ps = 0;  ///< of one layer
  std::int64_t kv_bytes = 0;      ///< K and V bytes read
};

struct Unit {
  std::int32_t piece;
  std::int32_t tok_begin;
  std::int32_t tok_end;
  std::int32_t all_end;    ///< all rows see [tok_begin, all_end)
  std::int32_t row_begin;  ///< in Units::rows
  std::int32_t num_rows;
  std::int32_t parts;
  bool tiled;  ///< one of several tiles of its piece
  std::int64_t read_token_ps;
  std::int64_t cost;
};

struct Units {
  std::vector<Unit> units;
  std::vector<std::int32_t> rows;
  std::int32_t grain = 1;       ///< batch-invariant mode: parts are cut at multiples of this many tokens
  std::int32_t head_parts = 1;  ///< every part is read by so many items, each for some of the KV heads
  bool tiled = false;           ///< some piece has several row tiles
};

/// Fills Units and predicts their time. Holds scratch memory.
class Estimator {
 public:
  /// Predicted time of `pieces`; `saved_ps`: worker time saved by cached re-reads. A time that is sure to reach
  /// `bar_ps` is not worked out: then the result is what it is at least, and the units are not for use.
  Estimate estimate(const CostModel& cost, const PlanData& plan, std::span<const Piece> pieces, std::int64_t saved_ps,
                    std::int64_t bar_ps, Units& units);

 private:
  void make_units(const CostModel& cost, const PlanData& plan, std::span<const Piece> pieces);
  void make_tiles(const CostModel& cost, const PlanData& plan, const Piece& piece, Unit& unit);
  void add_tile(const CostModel& cost, const PlanData& plan, const Piece& piece, Unit& unit);
  void add_unit(const CostModel& cost, Unit& unit);
  /// Of all units, before they are cut for balance.
  struct Sum {
    std::int64_t tokens = 0;
    std::int64_t cost = 0;
    std::int64_t longest = 0;  ///< cost of a part
    bool merges = false;       ///< some row has several states
    bool many = false;         ///< the many-rows kernel has work
    bool few = false;          ///< the other one has
  };
  Sum cost_units(const CostModel& cost);
  std::int64_t balance(const CostModel& cost, const PlanData& plan, const Sum& sum);
  [[nodiscard]] std::int32_t parts_for(const Unit& unit, std::int64_t limit) const;
  std::int64_t makespan(const CostModel& cost, std::span<const std::int32_t> order, std::int64_t limit,
                        std::int64_t enough);

  Units* out_ = nullptr;
  std::int32_t sinks_ = 0;
  std::int32_t least_ = 1;                                   ///< parts hold at least about so many tokens
  std::vector<std::pair<std::int32_t, std::int32_t>> seen_;  ///< visible intervals of a tile's rows
  std::vector<std::int32_t> row_states_;                     ///< [R] units of each row
  CostOrder by_cost_;
  std::vector<std::pair<std::int64_t, std::int32_t>> part_costs_;  ///< of one makespan: of a part, and how many
  std::vector<std::int64_t> loads_;                                ///< of the workers, a heap
};

}  // namespace headwater::detail
