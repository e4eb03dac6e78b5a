#include "plan/units.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "plan/rows.h"

namespace headwater::detail {
namespace {

constexpr std::int32_t kLeastPart = 128;      ///< tokens
constexpr std::int64_t kManyWorkers = 8;      ///< from here on finer part sizes are tried
constexpr std::size_t kExactBalance = 1'024;  ///< units up to which the makespan is worked out item by item

std::size_t sz(std::int64_t n) {
  return static_cast<std::size_t>(n);
}

/// Cost of each of `parts` equal parts.
std::int64_t part_cost(const CostModel& cost, const Unit& unit, std::int32_t parts) {
  if (parts == 1) return unit.cost;
  const std::int64_t more = parts - unit.parts;
  const std::int64_t added = more * (cost.item_ps(unit.num_rows) + cost.partial_ps(unit.num_rows)) +
                             (unit.parts == 1 ? cost.partial_ps(unit.num_rows) : 0);
  return (unit.cost + added) / parts;
}

/// Puts `load` in the place of the least of a heap.
void replace_least(std::vector<std::int64_t>& heap, std::int64_t load) {
  std::size_t hole = 0;
  for (std::size_t child = 1; child < heap.size(); child = 2 * hole + 1) {
    if (child + 1 < heap.size()) child += heap[child + 1] < heap[child] ? 1 : 0;
    if (load <= heap[child]) break;
    heap[hole] = heap[child];
    hole = child;
  }
  heap[hole] = load;
}

/// Batch-invariant mode: sinks are always a unit of their own, so that no row's states depend on its neighbours.
bool sinks_apart(const PlanOptions& options, const Piece& piece, std::int32_t sinks) {
  return options.batch_invariant && piece.tok_begin < sinks && sinks < piece.tok_end;
}

}  // namespace

Estimate Estimator::estimate(const CostModel& cost, const PlanData& plan, std::span<const Piece> pieces,
                             std::int64_t saved_ps, std::int64_t bar_ps, Units& units) {
  out_ = &units;
  make_units(cost, plan, pieces);
  const Sum sum = cost_units(cost);
  Estimate result;
  if (units.units.empty()) return result;
  result.kv_bytes = sum.tokens * cost.token_bytes();
  const auto predict = [&](std::int64_t work, bool merges) {
    return std::max<std::int64_t>(0, work - saved_ps / cost.num_workers()) + cost.launch_ps() * (merges ? 2 : 1) +
           (sum.many && sum.few ? cost.many_start_ps() : 0);
  };
  // Where even an even share of the work is too long, how it is dealt out does not matter.
  const std::int64_t most_items = std::int64_t{cost.num_workers()} * (cost.teams() ? 1 : plan.shape.num_kv_heads);
  result.predicted_ps = predict(sum.cost / most_items, sum.merges);
  if (result.predicted_ps >= bar_ps) return result;
  const std::int64_t work = balance(cost, plan, sum);
  const bool merges = sum.merges || std::ranges::any_of(units.units, [](const Unit& unit) { return unit.parts > 1; });
  result.predicted_ps = predict(work, merges);
  return result;
}

void Estimator::make_units(const CostModel& cost, const PlanData& plan, std::span<const Piece> pieces) {
  sinks_ = sink_limit(plan.options);
  out_->units.clear();
  out_->rows.clear();
  out_->tiled = false;
  row_states_.assign(plan.rows.size(), 0);
  const Entry* entries = plan.memory->entries.data();
  Unit unit{};
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    unit.piece = static_cast<std::int32_t>(i);
    const Entry& entry = entries[piece.entry];
    const RowRange& row = plan.rows[sz(entry.row_begin)];
    const bool whole = piece.num_members == 1 && entry.row_end - entry.row_begin == 1 && row.lo <= piece.tok_begin &&
                       piece.tok_end <= row.hi && !sinks_apart(plan.options, piece, sinks_);
    if (!whole) {
      make_tiles(cost, plan, piece, unit);
      continue;
    }
    // One row that sees all of it: most pieces of a decode step. Written in place: copies of what was just written in
    // smaller parts stall.
    const auto row_begin = static_cast<std::int32_t>(out_->rows.size());
    out_->rows.push_back(entry.row_begin);
    out_->units.emplace_back() = {
        unit.piece, piece.tok_begin, piece.tok_end, piece.tok_end, row_begin, 1, 1, false, cost.read_ps(1), 0};
    ++row_states_[sz(entry.row_begin)];
  }
}

/// Adds the units of a piece: those rows of its members that see something of it, in tiles.
void Estimator::make_tiles(const CostModel& cost, const PlanData& plan, const Piece& piece, Unit& unit) {
  const Entry* entries = plan.memory->entries.data();
  const std::int32_t* members =
      piece.num_members == 1 ? &piece.entry : plan.memory->forest.order.data() + piece.member_begin;
  auto& all = out_->rows;
  const auto first = static_cast<std::int32_t>(all.size());
  for (std::int32_t k = 0; k < piece.num_members; ++k) {
    const Entry& entry = entries[members[k]];
    for (std::int32_t r = entry.row_begin; r < entry.row_end; ++r) {
      const TokenSpan seen = visible_part(plan.rows[sz(r)], sinks_, piece.tok_begin, piece.tok_end);
      if (seen.begin < seen.end) all.push_back(r);
    }
  }
  const auto count = static_cast<std::int32_t>(all.size()) - first;
  const std::int32_t tiles = cost.num_tiles(count);
  const std::int32_t per_tile = tiles == 1 ? count : cost.rows_per_tile(count);
  // Every tile is charged the same, so that those of one chunk stay together in the order of items.
  unit.tiled = tiles > 1;
  unit.read_token_ps =
      tiles == 1 ? cost.read_ps(1) : (cost.read_ps(1) + (tiles - 1) * cost.reread_ps(1, cost.chunk_tokens())) / tiles;
  for (std::int32_t at = 0; at < count; at += per_tile) {
    unit.row_begin = first + at;
    unit.num_rows = std::min(per_tile, count - at);
    add_tile(cost, plan, piece, unit);
  }
}

/// Adds the units of a row tile: what its rows see, as intervals; one for each run of them without a gap. Tokens in a
/// gap are seen by nobody and may be on pages that no longer belong to the request. `unit` brings the piece and rows.
void Estimator::add_tile(const CostModel& cost, const PlanData& plan, const Piece& piece, Unit& unit) {
  const std::span<const std::int32_t> rows(out_->rows.data() + unit.row_begin, sz(unit.num_rows));
  unit.tok_begin = piece.tok_begin;
  unit.tok_end = piece.tok_begin;
  unit.all_end = piece.tok_end;
  bool from_begin = true;
  for (const std::int32_t r : rows) {
    const RowRange& row = plan.rows[sz(r)];
    from_begin = from_begin && row.lo <= piece.tok_begin;
    unit.tok_end = std::max(unit.tok_end, std::min(row.hi, piece.tok_end));
    unit.all_end = std::min(unit.all_end, row.hi);
  }
  const bool apart = sinks_apart(plan.options, piece, sinks_);
  if (from_begin && !apart) return add_unit(cost, unit);
  const std::int32_t window_begin = apart ? sinks_ : piece.tok_begin;
  seen_.clear();
  for (const std::int32_t r : rows) {
    const RowRange& row = plan.rows[sz(r)];
    const std::int32_t hi = std::min(row.hi, piece.tok_end);
    if (piece.tok_begin < std::min(hi, sinks_)) seen_.emplace_back(piece.tok_begin, std::min(hi, sinks_));
    if (std::max(row.lo, window_begin) < hi) seen_.emplace_back(std::max(row.lo, window_begin), hi);
  }
  std::ranges::sort(seen_);
  for (std::size_t i = 0; i < seen_.size();) {
    unit.tok_begin = unit.all_end = seen_[i].first;  // what all rows see is not looked for here
    unit.tok_end = seen_[i].second;
    for (++i; i < seen_.size() && seen_[i].first <= unit.tok_end; ++i) {
      if (apart && unit.tok_begin < sinks_ && seen_[i].first == sinks_) break;
      unit.tok_end = std::max(unit.tok_end, seen_[i].second);
    }
    add_unit(cost, unit);
  }
}

void Estimator::add_unit(const CostModel& cost, Unit& unit) {
  const std::int32_t tokens = unit.tok_end - unit.tok_begin;
  const bool chunked = unit.tiled && tokens * cost.token_bytes() > cost.cache_bytes() / 2;
  unit.parts = chunked ? (tokens + cost.chunk_tokens() - 1) / cost.chunk_tokens() : 1;
  out_->units.push_back(unit);
  out_->tiled = out_->tiled || unit.tiled;
  const std::int32_t* rows = out_->rows.data() + unit.row_begin;
  for (std::int32_t j = 0; j < unit.num_rows; ++j) ++row_states_[sz(rows[j])];  // at most: rows may see none of it
}

Estimator::Sum Estimator::cost_units(const CostModel& cost) {
  Sum sum;
  for (Unit& unit : out_->units) {
    const std::int64_t tokens = unit.tok_end - unit.tok_begin;
    const std::int32_t* rows = out_->rows.data() + unit.row_begin;
    std::int64_t partials = unit.num_rows;
    if (unit.num_rows == 1) {
      partials = unit.parts > 1 || row_states_[sz(*rows)] > 1 ? 1 : 0;
    } else if (unit.parts == 1) {
      partials = 0;
      for (std::int32_t j = 0; j < unit.num_rows; ++j) partials += row_states_[sz(rows[j])] > 1 ? 1 : 0;
    }
    unit.cost = tokens * unit.read_token_ps + cost.compute_ps(tokens, unit.num_rows) +
                unit.parts * (cost.item_ps(unit.num_rows) + cost.partial_ps(partials));
    sum.tokens += tokens;
    sum.cost += unit.cost;
    sum.longest = std::max(sum.longest, part_cost(cost, unit, unit.parts));
    sum.merges = sum.merges || partials > 0;
    sum.many = sum.many || cost.is_many(unit.num_rows);
    sum.few = sum.few || !cost.is_many(unit.num_rows);
  }
  return sum;
}

std::int32_t Estimator::parts_for(const Unit& unit, std::int64_t limit) const {
  if (unit.cost <= limit) return unit.parts;
  const std::int64_t wanted = (unit.cost + limit - 1) / limit;
  const std::int64_t most = std::max(1, (unit.tok_end - unit.tok_begin) / least_);
  return static_cast<std::int32_t>(std::max<std::int64_t>(unit.parts, std::min(wanted, most)));
}

/// Time until the last worker is done if parts of at most `limit` go, longest unit first, to the least loaded worker;
/// at least `enough` where that is sure to be the case.
std::int64_t Estimator::makespan(const CostModel& cost, std::span<const std::int32_t> order, std::int64_t limit,
                                 std::int64_t enough) {
  part_costs_.clear();
  std::int64_t total = 0;
  std::int64_t longest = 0;
  for (const std::int32_t index : order) {
    const Unit& unit = out_->units[sz(index)];
    const std::int32_t parts = parts_for(unit, limit);
    const std::int64_t each = part_cost(cost, unit, parts);
    total += each * parts;
    longest = std::max(longest, each);
    if (longest >= enough) return enough;
    part_costs_.emplace_back(each, parts);
  }
  const std::int64_t share = total / cost.num_workers();
  if (share >= enough) return enough;
  loads_.assign(sz(cost.num_workers()), 0);
  std::int64_t last = 0;
  const auto workers = static_cast<std::int32_t>(loads_.size());
  for (const auto& [each, parts] : part_costs_) {
    std::int32_t p = 0;
    if (parts >= workers && last - loads_.front() <= each) {  // whole rounds: every worker takes one after the other
      p = parts / workers * workers;
      for (std::int64_t& load : loads_) load += each * (parts / workers);
      last += each * (parts / workers);
    }
    for (; p < parts; ++p) {
      const std::int64_t load = loads_.front() + each;
      last = std::max(last, load);
      replace_least(loads_, load);
    }
    if (last >= enough) return enough;
  }
  return last;
}

/// Chooses the parts of all units; returns the predicted makespan.
std::int64_t Estimator::balance(const CostModel& cost, const PlanData& plan, const Sum& sum) {
  const std::int32_t page_size = *std::ranges::max_element(plan.page_size);
  out_->grain = plan.options.batch_invariant ? plan.options.invariant_chunk : 1;
  least_ = std::max({kLeastPart, page_size, out_->grain, cost.part_tokens()});
  out_->head_parts = 1;
  auto& units = out_->units;
  const std::int64_t workers = cost.num_workers();
  const std::int64_t ideal = std::max<std::int64_t>(1, (sum.cost + workers - 1) / workers);
  if (workers == 1) return sum.cost;
  if (units.size() > kExactBalance || sum.longest * 8 <= ideal) {
    const std::int64_t limit = std::max<std::int64_t>(1, ideal / 4);
    std::int64_t total = 0;
    std::int64_t longest = 0;
    for (Unit& unit : units) {
      const std::int32_t parts = parts_for(unit, limit);
      const std::int64_t each = part_cost(cost, unit, parts);
      unit.parts = parts;
      total += each * parts;
      longest = std::max(longest, each);
    }
    return std::max(longest, total / workers + longest / 2);
  }
  const auto& order = by_cost_.sort(units.size(), [&](std::size_t i) { return units[i].cost; });
  // A quarter of a worker's share leaves room for workers that turn out slower; other sizes only where they gain 2 %.
  std::int64_t limit = std::max<std::int64_t>(1, ideal / 4);
  std::int64_t best = makespan(cost, order, limit, std::numeric_limits<std::int64_t>::max());
  if (best > ideal + ideal / 32) {
    // Many workers: sizes a little above a share can save a second wave of short items.
    const std::array sizes{ideal / 2,
                           ideal,
                           std::numeric_limits<std::int64_t>::max() / 2,
                           ideal / 8,
                           ideal / 16,
                           ideal + ideal / 8,
                           ideal + ideal / 4,
                           ideal + ideal / 2};
    const std::int64_t whole = units[sz(order.front())].cost;  // from here on no unit is cut
    bool whole_tried = limit >= whole;
    for (const std::int64_t other : std::span(sizes).first(workers < kManyWorkers ? 5 : sizes.size())) {
      const std::int64_t size = std::clamp<std::int64_t>(other, 1, whole);
      if (size == whole && std::exchange(whole_tried, true)) continue;
      const std::int64_t enough = best - best / 50;
      const std::int64_t time = makespan(cost, order, size, enough);
      if (time >= enough) continue;
      best = time;
      limit = size;
    }
  }
  std::int64_t num_items = 0;
  for (Unit& unit : units) num_items += unit.parts = parts_for(unit, limit);
  // Too few tokens to go round: split the KV heads as well, where an item is long against its fixed cost.
  const std::int32_t heads = plan.shape.num_kv_heads;
  if (!cost.teams() && num_items < workers && heads > 1 && best > 16 * cost.item_ps(1)) {
    std::int32_t parts = 1;
    while (parts < heads && (heads % parts != 0 || num_items * parts < workers)) ++parts;
    out_->head_parts = parts;
    best = best / parts + cost.item_ps(1);
  }
  return best;
}

}  // namespace headwater::detail
