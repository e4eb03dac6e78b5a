#include "plan/schedule.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "plan/rows.h"

namespace headwater::detail {
namespace {

constexpr std::int32_t kLeastPart = 128;      ///< tokens
constexpr std::size_t kExactBalance = 1'024;  ///< units up to which the makespan is worked out item by item

std::size_t sz(std::int64_t n) {
  return static_cast<std::size_t>(n);
}

}  // namespace

Estimate Scheduler::estimate(const CostModel& cost, const PlanData& plan, std::span<const Piece> pieces,
                             std::int64_t saved_ps) {
  make_units(cost, plan, pieces);
  cost_units(cost, plan);
  Estimate result;
  std::int64_t tokens = 0;
  for (const Unit& unit : units_) tokens += unit.tok_end - unit.tok_begin;
  result.kv_bytes = tokens * cost.token_bytes();
  if (units_.empty()) return result;
  const std::int64_t work = balance(cost, plan, pieces);
  bool merges = false;
  for (const Unit& unit : units_) {
    if (merges) break;
    merges = unit.parts > 1;
    for (std::int32_t j = 0; j < unit.num_rows && !merges; ++j) {
      merges = row_states_[sz(rows_[sz(unit.row_begin + j)])] > 1;
    }
  }
  result.predicted_ps =
      std::max<std::int64_t>(0, work - saved_ps / cost.num_workers()) + cost.launch_ps() * (merges ? 2 : 1);
  return result;
}

void Scheduler::make_units(const CostModel& cost, const PlanData& plan, std::span<const Piece> pieces) {
  sinks_ = sink_limit(plan.options);
  units_.clear();
  rows_.clear();
  chunked_tiles_ = false;
  row_states_.assign(plan.rows.size(), 0);
  for (std::size_t i = 0; i < pieces.size(); ++i) add_piece(cost, plan, pieces[i], static_cast<std::int32_t>(i));
}

void Scheduler::add_piece(const CostModel& cost, const PlanData& plan, const Piece& piece, std::int32_t index) {
  const auto first = static_cast<std::int32_t>(rows_.size());
  const auto add_entry = [&](std::int32_t e) {
    const Entry& entry = plan.memory->entries[sz(e)];
    for (std::int32_t r = entry.row_begin; r < entry.row_end; ++r) {
      const TokenSpan seen = visible_part(plan.rows[sz(r)], sinks_, piece.tok_begin, piece.tok_end);
      if (seen.begin < seen.end) rows_.push_back(r);
    }
  };
  if (piece.num_members == 1) {
    add_entry(piece.entry);
  } else {
    const std::int32_t* order = plan.memory->forest.order.data() + piece.member_begin;
    for (std::int32_t k = 0; k < piece.num_members; ++k) add_entry(order[k]);
  }
  const auto count = static_cast<std::int32_t>(rows_.size()) - first;
  if (count == 0) return;
  const std::int32_t tiles = cost.num_tiles(count);
  const std::int32_t per_tile = cost.rows_per_tile(count);
  for (std::int32_t at = 0; at < count; at += per_tile) {
    add_tile(cost, plan, piece, index, first + at, std::min(per_tile, count - at), tiles);
  }
}

void Scheduler::add_tile(const CostModel& cost, const PlanData& plan, const Piece& piece, std::int32_t index,
                         std::int32_t row_begin, std::int32_t num_rows, std::int32_t tiles) {
  // What the rows see, as intervals; one unit for each run of them without a gap. Tokens in a gap are seen by nobody
  // and may be on pages that no longer belong to the request.
  std::int32_t last = piece.tok_begin;
  bool from_begin = true;
  for (std::int32_t j = 0; j < num_rows; ++j) {
    const RowRange& row = plan.rows[sz(rows_[sz(row_begin + j)])];
    from_begin = from_begin && row.lo <= piece.tok_begin;
    last = std::max(last, std::min(row.hi, piece.tok_end));
  }
  if (from_begin) return add_unit(cost, index, piece.tok_begin, last, row_begin, num_rows, tiles);
  seen_.clear();
  for (std::int32_t j = 0; j < num_rows; ++j) {
    const RowRange& row = plan.rows[sz(rows_[sz(row_begin + j)])];
    const std::int32_t hi = std::min(row.hi, piece.tok_end);
    if (piece.tok_begin < std::min(hi, sinks_)) seen_.emplace_back(piece.tok_begin, std::min(hi, sinks_));
    if (row.lo < hi) seen_.emplace_back(std::max(row.lo, piece.tok_begin), hi);
  }
  std::ranges::sort(seen_);
  for (std::size_t i = 0; i < seen_.size();) {
    const std::int32_t begin = seen_[i].first;
    std::int32_t end = seen_[i].second;
    for (++i; i < seen_.size() && seen_[i].first <= end; ++i) end = std::max(end, seen_[i].second);
    add_unit(cost, index, begin, end, row_begin, num_rows, tiles);
  }
}

void Scheduler::add_unit(const CostModel& cost, std::int32_t piece, std::int32_t begin, std::int32_t end,
                         std::int32_t row_begin, std::int32_t num_rows, std::int32_t tiles) {
  Unit unit{piece, begin, end, row_begin, num_rows, 1, cost.read_ps(1), 0};
  if (tiles > 1) {
    // Every tile is charged the same, so that those of one chunk stay together in the order of items.
    unit.read_token_ps = (cost.read_ps(1) + (tiles - 1) * cost.reread_ps(1, cost.chunk_tokens())) / tiles;
    if ((end - begin) * cost.token_bytes() > cost.cache_bytes() / 2) {
      unit.parts = (end - begin + cost.chunk_tokens() - 1) / cost.chunk_tokens();
    }
    chunked_tiles_ = true;
  }
  units_.push_back(unit);
  for (std::int32_t j = 0; j < num_rows; ++j)
    ++row_states_[sz(rows_[sz(row_begin + j)])];  // at most: rows may see none of it
}

void Scheduler::cost_units(const CostModel& cost, const PlanData&) {
  for (Unit& unit : units_) {
    const std::int64_t tokens = unit.tok_end - unit.tok_begin;
    std::int64_t partials = 0;
    for (std::int32_t j = 0; j < unit.num_rows; ++j) {
      if (unit.parts > 1 || row_states_[sz(rows_[sz(unit.row_begin + j)])] > 1) ++partials;
    }
    unit.cost = tokens * unit.read_token_ps + cost.compute_ps(tokens, unit.num_rows) +
                unit.parts * (cost.item_ps(unit.num_rows) + cost.partial_ps(partials));
  }
}

std::int32_t Scheduler::parts_for(const CostModel&, const Unit& unit, std::int64_t limit) const {
  const std::int64_t wanted = (unit.cost + limit - 1) / limit;
  const std::int64_t most = std::max(1, (unit.tok_end - unit.tok_begin) / least_);
  return static_cast<std::int32_t>(std::max<std::int64_t>(unit.parts, std::min(wanted, most)));
}

/// Cost of each of `parts` equal parts.
std::int64_t Scheduler::part_cost(const CostModel& cost, const Unit& unit, std::int32_t parts) const {
  const std::int64_t more = parts - unit.parts;
  const std::int64_t added = more * (cost.item_ps(unit.num_rows) + cost.partial_ps(unit.num_rows)) +
                             (unit.parts == 1 && more > 0 ? cost.partial_ps(unit.num_rows) : 0);
  return (unit.cost + added) / parts;
}

/// Time until the last worker is done if parts of at most `limit` go, longest unit first, to the least loaded worker.
std::int64_t Scheduler::makespan(const CostModel& cost, std::int64_t limit) {
  loads_.assign(sz(cost.num_workers()), 0);
  const auto later = std::greater<>();
  for (const auto& [unit_cost, index] : by_cost_) {
    const Unit& unit = units_[sz(index)];
    const std::int32_t parts = parts_for(cost, unit, limit);
    const std::int64_t each = part_cost(cost, unit, parts);
    for (std::int32_t p = 0; p < parts; ++p) {
      std::ranges::pop_heap(loads_, later);
      loads_.back() += each;
      std::ranges::push_heap(loads_, later);
    }
  }
  return *std::ranges::max_element(loads_);
}

/// Chooses the parts of all units; returns the predicted makespan.
std::int64_t Scheduler::balance(const CostModel& cost, const PlanData& plan, std::span<const Piece>) {
  const std::int32_t page_size = *std::ranges::max_element(plan.page_size);
  grain_ = plan.options.batch_invariant ? plan.options.invariant_chunk : 1;
  least_ = std::max({kLeastPart, page_size, grain_});
  head_parts_ = 1;
  const std::int64_t workers = cost.num_workers();
  std::int64_t total = 0;
  std::int64_t longest = 0;
  for (const Unit& unit : units_) {
    total += unit.cost;
    longest = std::max(longest, unit.cost / unit.parts);
  }
  const std::int64_t ideal = std::max<std::int64_t>(1, total / workers);
  if (workers == 1) return total;
  if (units_.size() > kExactBalance || longest * 8 <= ideal) {
    const std::int64_t limit = std::max<std::int64_t>(1, ideal / 4);
    std::int64_t sum = 0;
    longest = 0;
    for (Unit& unit : units_) {
      const std::int32_t parts = parts_for(cost, unit, limit);
      const std::int64_t each = part_cost(cost, unit, parts);
      unit.parts = parts;
      sum += each * parts;
      longest = std::max(longest, each);
    }
    return std::max(longest, sum / workers + longest / 2);
  }
  by_cost_.clear();
  for (std::size_t i = 0; i < units_.size(); ++i) by_cost_.emplace_back(-units_[i].cost, static_cast<std::int32_t>(i));
  std::ranges::sort(by_cost_);
  // A quarter of a worker's share leaves room for workers that turn out slower; other sizes only where they gain 2 %.
  std::int64_t limit = std::max<std::int64_t>(1, ideal / 4);
  std::int64_t best = makespan(cost, limit);
  if (best > ideal + ideal / 32) {
    for (const std::int64_t other :
         {ideal / 2, ideal, std::numeric_limits<std::int64_t>::max() / 2, ideal / 8, ideal / 16}) {
      const std::int64_t time = makespan(cost, std::max<std::int64_t>(1, other));
      if (time >= best - best / 50) continue;
      best = time;
      limit = std::max<std::int64_t>(1, other);
    }
  }
  std::int64_t num_items = 0;
  for (Unit& unit : units_) num_items += unit.parts = parts_for(cost, unit, limit);
  // Too few tokens to go round: split the KV heads as well, where an item is long against its fixed cost.
  const std::int32_t heads = plan.shape.num_kv_heads;
  if (num_items < workers && heads > 1 && best > 16 * cost.item_ps(1)) {
    std::int32_t parts = 1;
    while (parts < heads && (heads % parts != 0 || num_items * parts < workers)) ++parts;
    head_parts_ = parts;
    best = best / parts + cost.item_ps(1);
  }
  return best;
}

void Scheduler::emit(const CostModel& cost, std::span<const Piece> pieces, PlanData& plan) {
  plan.item_rows.clear();
  make_drafts(cost, pieces, plan);
  assign_slots(cost, plan);
  make_items(pieces, plan);
  make_merges(plan);
}

/// What the rows of a part see of [begin, end).
Scheduler::Sight Scheduler::look(const PlanData& plan, std::span<const std::int32_t> rows, std::int32_t begin,
                                 std::int32_t end) const {
  const bool fixed = plan.options.batch_invariant;
  Sight sight{0, 0, end, begin, begin, end};
  for (const std::int32_t r : rows) {
    const RowRange& row = plan.rows[sz(r)];
    const TokenSpan seen = visible_part(row, sinks_, begin, end);
    if (seen.begin >= seen.end) continue;
    ++sight.num_rows;
    if (fixed && plan.memory->row_first[sz(r)] < begin) ++sight.num_later;
    sight.begin = std::min(sight.begin, seen.begin);
    sight.end = std::max(sight.end, seen.end);
    sight.all_end = std::min(sight.all_end, row.hi);
    // With sinks that reach the window, or the whole part, nothing is hidden before the window.
    if (begin < sinks_ && (end <= sinks_ || row.lo <= sinks_)) continue;
    sight.all_begin = std::max(sight.all_begin, row.lo);
  }
  return sight;
}

void Scheduler::make_drafts(const CostModel& cost, std::span<const Piece> pieces, PlanData& plan) {
  drafts_.clear();
  row_states_.assign(plan.rows.size(), 0);
  const bool fixed = plan.options.batch_invariant;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const Unit& unit = units_[u];
    const Piece& piece = pieces[sz(unit.piece)];
    const std::int32_t grain = fixed ? grain_ : plan.page_size[sz(piece.view)];
    const std::int32_t origin = fixed ? 0 : piece.origin;
    const std::int64_t tokens = unit.tok_end - unit.tok_begin;
    const std::span<const std::int32_t> rows(rows_.data() + unit.row_begin, sz(unit.num_rows));
    std::int32_t kept = -1;  // where the unit's rows lie in plan.item_rows
    std::int32_t begin = unit.tok_begin;
    for (std::int32_t p = 1; p <= unit.parts && begin < unit.tok_end; ++p) {
      std::int32_t end = unit.tok_end;
      if (p < unit.parts) {
        const auto even = static_cast<std::int32_t>(unit.tok_begin + tokens * p / unit.parts);
        end = origin + (even - origin) / grain * grain;
        if (end <= begin) continue;
      }
      const Sight sight = look(plan, rows, begin, end);
      if (sight.num_rows == unit.num_rows && (sight.num_later == 0 || sight.num_later == unit.num_rows)) {
        if (kept < 0) kept = keep_rows(plan, rows);
        add_draft(cost, plan, static_cast<std::int32_t>(u), sight, kept, unit.num_rows);
      } else if (sight.num_rows > 0) {
        split_rows(plan, rows, begin, end);
        for (const auto* list : {&first_rows_, &later_rows_}) {
          if (list->empty()) continue;
          add_draft(cost, plan, static_cast<std::int32_t>(u), look(plan, *list, begin, end), keep_rows(plan, *list),
                    static_cast<std::int32_t>(list->size()));
        }
      }
      begin = end;
    }
  }
}

std::int32_t Scheduler::keep_rows(PlanData& plan, std::span<const std::int32_t> rows) {
  const auto at = static_cast<std::int32_t>(plan.item_rows.size());
  plan.item_rows.insert(plan.item_rows.end(), rows.begin(), rows.end());
  return at;
}

/// Those rows that see something of [begin, end): first_rows_ and, with earlier states in batch-invariant mode,
/// later_rows_.
void Scheduler::split_rows(const PlanData& plan, std::span<const std::int32_t> rows, std::int32_t begin,
                           std::int32_t end) {
  first_rows_.clear();
  later_rows_.clear();
  for (const std::int32_t r : rows) {
    const TokenSpan seen = visible_part(plan.rows[sz(r)], sinks_, begin, end);
    if (seen.begin >= seen.end) continue;
    const bool later = plan.options.batch_invariant && plan.memory->row_first[sz(r)] < begin;
    (later ? later_rows_ : first_rows_).push_back(r);
  }
}

void Scheduler::add_draft(const CostModel& cost, const PlanData& plan, std::int32_t unit_index, const Sight& sight,
                          std::int32_t row_begin, std::int32_t num_rows) {
  const Unit& unit = units_[sz(unit_index)];
  const std::int64_t tokens = sight.end - sight.begin;
  Draft draft{unit_index, sight.begin, sight.end, row_begin, num_rows, sight.num_later > 0, -1, 1, 0, 0, 0};
  if (draft.later) draft.num_states = (sight.end + grain_ - 1) / grain_ - sight.begin / grain_;
  if (sight.all_begin < sight.all_end) {
    draft.unmasked_begin = std::max(sight.all_begin, sight.begin) - sight.begin;
    draft.unmasked_end = sight.all_end - sight.begin;
  }
  draft.cost = tokens * unit.read_token_ps + cost.compute_ps(tokens, num_rows) + cost.item_ps(num_rows);
  drafts_.push_back(draft);
  for (std::int32_t j = 0; j < num_rows; ++j) ++row_states_[sz(plan.item_rows[sz(row_begin + j)])];
}

void Scheduler::assign_slots(const CostModel& cost, PlanData& plan) {
  std::int64_t slots = 0;
  for (Draft& draft : drafts_) {
    bool direct = !draft.later;
    for (std::int32_t j = 0; j < draft.num_rows && direct; ++j) {
      direct = row_states_[sz(plan.item_rows[sz(draft.row_begin + j)])] == 1;
    }
    if (direct) continue;
    draft.partial_begin = static_cast<std::int32_t>(slots);
    slots += std::int64_t{draft.num_rows} * draft.num_states;
    draft.cost += cost.partial_ps(draft.num_rows);
    if (slots > std::numeric_limits<std::int32_t>::max()) {
      throw Error(ErrorCode::unsupported, "the plan needs more than 2147483647 partial rows");
    }
  }
  plan.num_partials = static_cast<std::int32_t>(slots);
}

void Scheduler::make_items(std::span<const Piece> pieces, PlanData& plan) {
  // Longest first; drafts of equal cost in their order, but the tiles of one chunk one after the other.
  draft_order_.resize(drafts_.size());
  std::iota(draft_order_.begin(), draft_order_.end(), 0);
  const auto piece_of = [&](std::size_t i) { return units_[sz(drafts_[i].unit)].piece; };
  for (std::size_t i = 0; chunked_tiles_ && i < drafts_.size();) {
    std::size_t end = i + 1;
    while (end < drafts_.size() && piece_of(end) == piece_of(i)) ++end;
    if (end - i > 1) {
      std::sort(draft_order_.begin() + static_cast<std::ptrdiff_t>(i),
                draft_order_.begin() + static_cast<std::ptrdiff_t>(end), [&](std::int32_t x, std::int32_t y) {
                  return std::pair(drafts_[sz(x)].begin, x) < std::pair(drafts_[sz(y)].begin, y);
                });
    }
    i = end;
  }
  by_cost_.clear();
  for (std::size_t rank = 0; rank < draft_order_.size(); ++rank) {
    by_cost_.emplace_back(-drafts_[sz(draft_order_[rank])].cost, static_cast<std::int32_t>(rank));
  }
  std::ranges::sort(by_cost_);
  plan.items.clear();
  plan.max_item_rows = 0;
  plan.items.reserve(drafts_.size() * sz(head_parts_));
  const std::int32_t heads = plan.shape.num_kv_heads;
  for (const auto& [minus_cost, rank] : by_cost_) {
    const Draft& draft = drafts_[sz(draft_order_[sz(rank)])];
    const Piece& piece = pieces[sz(units_[sz(draft.unit)].piece)];
    const std::int32_t page_size = plan.page_size[sz(piece.view)];
    WorkItem item;
    item.pos_begin = draft.begin;
    item.num_tokens = draft.end - draft.begin;
    item.page_begin = piece.page_base + (draft.begin - piece.origin) / page_size;
    item.first_token = (draft.begin - piece.origin) % page_size;
    item.row_begin = draft.row_begin;
    item.num_rows = draft.num_rows;
    item.partial_begin = draft.partial_begin;
    item.num_states = draft.num_states;
    item.view = piece.view;
    item.unmasked_begin = draft.unmasked_begin;
    item.unmasked_end = draft.unmasked_end;
    item.cost_ps = draft.cost / head_parts_;
    for (std::int32_t h = 0; h < head_parts_; ++h) {
      item.kv_head_begin = static_cast<std::int16_t>(heads / head_parts_ * h);
      item.kv_head_end = static_cast<std::int16_t>(heads / head_parts_ * (h + 1));
      plan.items.push_back(item);
    }
    plan.max_item_rows = std::max(plan.max_item_rows, draft.num_rows);
  }
}

/// Calls visit(row, position, slot) for every partial state that some row has.
template <class Visit>
void Scheduler::for_states(const PlanData& plan, Visit&& visit) const {
  for (const Draft& draft : drafts_) {
    if (draft.partial_begin < 0) continue;
    const std::int32_t* rows = plan.item_rows.data() + draft.row_begin;
    for (std::int32_t s = 0; s < draft.num_states; ++s) {
      const std::int32_t slot = draft.partial_begin + s * draft.num_rows;
      const std::int32_t chunk = draft.later ? (draft.begin / grain_ + s) * grain_ : draft.begin;
      const std::int32_t begin = std::max(chunk, draft.begin);
      for (std::int32_t j = 0; j < draft.num_rows; ++j) {
        if (draft.later) {
          // Chunks of which the row sees nothing have no state.
          const std::int32_t end = std::min(chunk + grain_, draft.end);
          const TokenSpan seen = visible_part(plan.rows[sz(rows[j])], sinks_, begin, end);
          if (seen.begin >= seen.end) continue;
        }
        visit(rows[j], begin, slot + j);
      }
    }
  }
}

void Scheduler::make_merges(PlanData& plan) {
  const std::size_t num_rows = plan.rows.size();
  plan.merge_rows.clear();
  plan.merge_indptr.assign(1, 0);
  plan.merge_slots.clear();
  plan.empty_rows.clear();
  state_indptr_.assign(num_rows + 2, 0);
  for_states(plan, [&](std::int32_t row, std::int32_t, std::int32_t) { ++state_indptr_[sz(row) + 2]; });
  std::partial_sum(state_indptr_.begin(), state_indptr_.end(), state_indptr_.begin());
  states_.resize(sz(state_indptr_.back()));
  for_states(plan, [&](std::int32_t row, std::int32_t position, std::int32_t slot) {
    states_[sz(state_indptr_[sz(row) + 1]++)] = {position, slot};
  });
  // Now state_indptr_[r] is where the states of row r begin.
  plan.merge_slots.reserve(states_.size());
  for (std::size_t r = 0; r < num_rows; ++r) {
    if (row_states_[r] == 0) plan.empty_rows.push_back(static_cast<std::int32_t>(r));
    const auto begin = states_.begin() + state_indptr_[r];
    const auto end = states_.begin() + state_indptr_[r + 1];
    if (begin == end) continue;
    if (!std::is_sorted(begin, end)) std::sort(begin, end);
    for (auto it = begin; it != end; ++it) plan.merge_slots.push_back(it->second);
    plan.merge_rows.push_back(static_cast<std::int32_t>(r));
    plan.merge_indptr.push_back(static_cast<std::int32_t>(plan.merge_slots.size()));
  }
}

}  // namespace headwater::detail
