#include "plan/schedule.h"

#include <algorithm>
#include <bit>
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
  bool merges = cost_units(cost);
  Estimate result;
  std::int64_t tokens = 0;
  for (const Unit& unit : units_) tokens += unit.tok_end - unit.tok_begin;
  result.kv_bytes = tokens * cost.token_bytes();
  if (units_.empty()) return result;
  const std::int64_t work = balance(cost, plan);
  merges = merges || std::ranges::any_of(units_, [](const Unit& unit) { return unit.parts > 1; });
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
  const Entry* entries = plan.memory->entries.data();
  const std::int32_t* order = plan.memory->forest.order.data();
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const std::int32_t* members = piece.num_members == 1 ? &piece.entry : order + piece.member_begin;
    const auto first = static_cast<std::int32_t>(rows_.size());
    for (std::int32_t k = 0; k < piece.num_members; ++k) {
      const Entry& entry = entries[members[k]];
      for (std::int32_t r = entry.row_begin; r < entry.row_end; ++r) {
        const TokenSpan seen = visible_part(plan.rows[sz(r)], sinks_, piece.tok_begin, piece.tok_end);
        if (seen.begin < seen.end) rows_.push_back(r);
      }
    }
    const auto count = static_cast<std::int32_t>(rows_.size()) - first;
    const std::int32_t tiles = cost.num_tiles(count);
    const std::int32_t per_tile = tiles == 1 ? count : cost.rows_per_tile(count);
    Unit unit{};
    unit.piece = static_cast<std::int32_t>(i);
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
}

/// Adds the units of a row tile: what its rows see, as intervals; one for each run of them without a gap. Tokens in a
/// gap are seen by nobody and may be on pages that no longer belong to the request. `unit` brings the piece and rows.
void Scheduler::add_tile(const CostModel& cost, const PlanData& plan, const Piece& piece, Unit& unit) {
  const std::span<const std::int32_t> rows(rows_.data() + unit.row_begin, sz(unit.num_rows));
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
  // Batch-invariant mode: sinks are always a unit of their own, so that no row's states depend on its neighbours.
  const bool sinks_apart = plan.options.batch_invariant && piece.tok_begin < sinks_ && sinks_ < piece.tok_end;
  if (from_begin && !sinks_apart) return add_unit(cost, unit);
  const std::int32_t window_begin = sinks_apart ? sinks_ : piece.tok_begin;
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
      if (sinks_apart && unit.tok_begin < sinks_ && seen_[i].first == sinks_) break;
      unit.tok_end = std::max(unit.tok_end, seen_[i].second);
    }
    add_unit(cost, unit);
  }
}

void Scheduler::add_unit(const CostModel& cost, Unit& unit) {
  const std::int32_t tokens = unit.tok_end - unit.tok_begin;
  const bool chunked = unit.tiled && tokens * cost.token_bytes() > cost.cache_bytes() / 2;
  unit.parts = chunked ? (tokens + cost.chunk_tokens() - 1) / cost.chunk_tokens() : 1;
  units_.push_back(unit);
  chunked_tiles_ = chunked_tiles_ || unit.tiled;
  const std::int32_t* rows = rows_.data() + unit.row_begin;
  for (std::int32_t j = 0; j < unit.num_rows; ++j) ++row_states_[sz(rows[j])];  // at most: rows may see none of it
}

/// True if some row will have several states.
bool Scheduler::cost_units(const CostModel& cost) {
  std::int64_t all_partials = 0;
  for (Unit& unit : units_) {
    const std::int64_t tokens = unit.tok_end - unit.tok_begin;
    std::int64_t partials = 0;
    for (std::int32_t j = 0; j < unit.num_rows; ++j) {
      if (unit.parts > 1 || row_states_[sz(rows_[sz(unit.row_begin + j)])] > 1) ++partials;
    }
    unit.cost = tokens * unit.read_token_ps + cost.compute_ps(tokens, unit.num_rows) +
                unit.parts * (cost.item_ps(unit.num_rows) + cost.partial_ps(partials));
    all_partials += partials;
  }
  return all_partials > 0;
}

std::int32_t Scheduler::parts_for(const Unit& unit, std::int64_t limit) const {
  if (unit.cost <= limit) return unit.parts;
  const std::int64_t wanted = (unit.cost + limit - 1) / limit;
  const std::int64_t most = std::max(1, (unit.tok_end - unit.tok_begin) / least_);
  return static_cast<std::int32_t>(std::max<std::int64_t>(unit.parts, std::min(wanted, most)));
}

/// Cost of each of `parts` equal parts.
std::int64_t Scheduler::part_cost(const CostModel& cost, const Unit& unit, std::int32_t parts) const {
  if (parts == 1) return unit.cost;
  const std::int64_t more = parts - unit.parts;
  const std::int64_t added = more * (cost.item_ps(unit.num_rows) + cost.partial_ps(unit.num_rows)) +
                             (unit.parts == 1 ? cost.partial_ps(unit.num_rows) : 0);
  return (unit.cost + added) / parts;
}

/// Fills by_cost_ with 0..count-1, those of the greatest cost first, equal ones in their order.
template <class CostOf>
void Scheduler::sort_by_cost(std::size_t count, CostOf&& cost_of) {
  // Cost and index in one number each; costs so great that this does not fit are told apart by their higher bits only.
  std::int64_t most = 0;
  for (std::size_t i = 0; i < count; ++i) most = std::max(most, cost_of(i));
  const auto index_bits = static_cast<int>(std::bit_width(count));
  const int dropped = std::max(0, index_bits - std::countl_zero(static_cast<std::uint64_t>(most)));
  keys_.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    keys_[i] = static_cast<std::uint64_t>(most - cost_of(i)) >> dropped << index_bits | i;
  }
  std::ranges::sort(keys_);
  by_cost_.resize(count);
  const std::uint64_t mask = (std::uint64_t{1} << index_bits) - 1;
  for (std::size_t i = 0; i < count; ++i) by_cost_[i] = static_cast<std::int32_t>(keys_[i] & mask);
}

/// Time until the last worker is done if parts of at most `limit` go, longest unit first, to the least loaded worker.
std::int64_t Scheduler::makespan(const CostModel& cost, std::int64_t limit) {
  loads_.assign(sz(cost.num_workers()), 0);
  const auto later = std::greater<>();
  for (const std::int32_t index : by_cost_) {
    const Unit& unit = units_[sz(index)];
    const std::int32_t parts = parts_for(unit, limit);
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
std::int64_t Scheduler::balance(const CostModel& cost, const PlanData& plan) {
  const std::int32_t page_size = *std::ranges::max_element(plan.page_size);
  grain_ = plan.options.batch_invariant ? plan.options.invariant_chunk : 1;
  least_ = std::max({kLeastPart, page_size, grain_});
  head_parts_ = 1;
  const std::int64_t workers = cost.num_workers();
  std::int64_t total = 0;
  std::int64_t longest = 0;
  for (const Unit& unit : units_) {
    total += unit.cost;
    longest = std::max(longest, part_cost(cost, unit, unit.parts));
  }
  const std::int64_t ideal = std::max<std::int64_t>(1, total / workers);
  if (workers == 1) return total;
  if (units_.size() > kExactBalance || longest * 8 <= ideal) {
    const std::int64_t limit = std::max<std::int64_t>(1, ideal / 4);
    std::int64_t sum = 0;
    longest = 0;
    for (Unit& unit : units_) {
      const std::int32_t parts = parts_for(unit, limit);
      const std::int64_t each = part_cost(cost, unit, parts);
      unit.parts = parts;
      sum += each * parts;
      longest = std::max(longest, each);
    }
    return std::max(longest, sum / workers + longest / 2);
  }
  sort_by_cost(units_.size(), [&](std::size_t i) { return units_[i].cost; });
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
  for (Unit& unit : units_) num_items += unit.parts = parts_for(unit, limit);
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
    std::int32_t kept = -1;       // where the unit's rows lie in plan.item_rows
    std::int32_t kept_times = 0;  // drafts of them
    std::int32_t begin = unit.tok_begin;
    for (std::int32_t p = 1; p <= unit.parts && begin < unit.tok_end; ++p) {
      std::int32_t end = unit.tok_end;
      if (p < unit.parts) {
        const auto even = static_cast<std::int32_t>(unit.tok_begin + tokens * p / unit.parts);
        end = origin + (even - origin) / grain * grain;
        if (end <= begin) continue;
      }
      Sight sight{unit.num_rows, fixed ? unit.num_rows : 0, begin, end, begin, end};
      // Not where all rows see all of it, and in batch-invariant mode something before it.
      if (end > unit.all_end || (fixed && begin == unit.tok_begin)) sight = look(plan, rows, begin, end);
      if (sight.num_rows == unit.num_rows && (sight.num_later == 0 || sight.num_later == unit.num_rows)) {
        if (kept < 0) kept = keep_rows(plan, rows);
        ++kept_times;
        add_draft(cost, static_cast<std::int32_t>(u), sight, kept, unit.num_rows);
      } else if (sight.num_rows > 0) {
        split_rows(plan, rows, begin, end);
        for (const auto* list : {&first_rows_, &later_rows_}) {
          if (list->empty()) continue;
          add_draft(cost, static_cast<std::int32_t>(u), look(plan, *list, begin, end), keep_rows(plan, *list),
                    static_cast<std::int32_t>(list->size()));
          for (const std::int32_t r : *list) ++row_states_[sz(r)];
        }
      }
      begin = end;
    }
    for (const std::int32_t r : rows) row_states_[sz(r)] += kept_times;
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

void Scheduler::add_draft(const CostModel& cost, std::int32_t unit_index, const Sight& sight, std::int32_t row_begin,
                          std::int32_t num_rows) {
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
    const auto order = std::span(draft_order_).subspan(i, end - i);
    if (end - i > 1) std::ranges::stable_sort(order, {}, [&](std::int32_t d) { return drafts_[sz(d)].begin; });
    i = end;
  }
  sort_by_cost(drafts_.size(), [&](std::size_t i) { return drafts_[sz(draft_order_[i])].cost; });
  plan.items.clear();
  plan.max_item_rows = 0;
  plan.items.reserve(drafts_.size() * sz(head_parts_));
  const std::int32_t heads = plan.shape.num_kv_heads / head_parts_;
  for (const std::int32_t rank : by_cost_) {
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
      item.kv_head_begin = static_cast<std::int16_t>(heads * h);
      item.kv_head_end = static_cast<std::int16_t>(heads * (h + 1));
      plan.items.push_back(item);
    }
    plan.max_item_rows = std::max(plan.max_item_rows, draft.num_rows);
  }
}

/// Calls visit(drafts) for each stretch of drafts with the same list of rows (the parts of a unit) that leaves partial
/// states. None of its drafts is direct: a row of several drafts has several states.
template <class Visit>
void Scheduler::for_stretches(Visit&& visit) const {
  for (std::size_t begin = 0; begin < drafts_.size();) {
    std::size_t end = begin + 1;
    while (end < drafts_.size() && drafts_[end].row_begin == drafts_[begin].row_begin) ++end;
    if (drafts_[begin].partial_begin >= 0) visit(std::span(drafts_).subspan(begin, end - begin));
    begin = end;
  }
}

/// Where state s of a draft begins.
std::int32_t Scheduler::state_begin(const Draft& draft, std::int32_t s) const {
  return draft.later ? std::max(draft.begin, (draft.begin / grain_ + s) * grain_) : draft.begin;
}

/// Writes the slots that the j-th row of a stretch leaves; returns where the next one goes.
std::int32_t* Scheduler::put_slots(const PlanData& plan, std::span<const Draft> stretch, std::int32_t j,
                                   std::int32_t* to) const {
  for (const Draft& draft : stretch) {
    if (!draft.later) {
      *to++ = draft.partial_begin + j;
      continue;
    }
    const RowRange& row = plan.rows[sz(plan.item_rows[sz(draft.row_begin + j)])];
    for (std::int32_t s = 0; s < draft.num_states; ++s) {
      // Chunks of which the row sees nothing have no state.
      const std::int32_t end = s + 1 < draft.num_states ? state_begin(draft, s + 1) : draft.end;
      const TokenSpan seen = visible_part(row, sinks_, state_begin(draft, s), end);
      if (seen.begin < seen.end) *to++ = draft.partial_begin + s * draft.num_rows + j;
    }
  }
  return to;
}

void Scheduler::make_merges(PlanData& plan) {
  const std::size_t num_rows = plan.rows.size();
  const auto rows_of = [&](std::span<const Draft> stretch) {
    return std::span(plan.item_rows).subspan(sz(stretch.front().row_begin), sz(stretch.front().num_rows));
  };
  // Room for as many slots of each row as its drafts have states. slot_end_[r]: where those written so far end.
  slot_begin_.assign(num_rows + 1, 0);
  for_stretches([&](std::span<const Draft> stretch) {
    std::int32_t states = 0;
    for (const Draft& draft : stretch) states += draft.num_states;
    for (const std::int32_t r : rows_of(stretch)) slot_begin_[sz(r) + 1] += states;
  });
  std::partial_sum(slot_begin_.begin(), slot_begin_.end(), slot_begin_.begin());
  slot_end_ = slot_begin_;
  auto& slots = plan.merge_slots;
  slots.resize(sz(slot_begin_.back()));
  for_stretches([&](std::span<const Draft> stretch) {
    std::int32_t j = 0;
    for (const std::int32_t r : rows_of(stretch)) {
      std::int32_t& end = slot_end_[sz(r)];
      end = static_cast<std::int32_t>(put_slots(plan, stretch, j++, slots.data() + end) - slots.data());
    }
  });
  if (plan.memory->forest.split_entries) sort_slots(plan);

  plan.merge_rows.clear();
  plan.merge_indptr.assign(1, 0);
  plan.empty_rows.clear();
  std::int32_t* to = slots.data();
  for (std::size_t r = 0; r < num_rows; ++r) {
    if (row_states_[r] == 0) plan.empty_rows.push_back(static_cast<std::int32_t>(r));
    const std::int32_t* begin = slots.data() + slot_begin_[r];
    const std::int32_t* end = slots.data() + slot_end_[r];
    if (begin == end) continue;
    to = begin == to ? slots.data() + slot_end_[r] : std::copy(begin, end, to);
    plan.merge_rows.push_back(static_cast<std::int32_t>(r));
    plan.merge_indptr.push_back(static_cast<std::int32_t>(to - slots.data()));
  }
  slots.resize(sz(plan.merge_indptr.back()));
}

/// Brings the slots of each row in ascending position: pieces come so, but not where entries take part in several
/// trees.
void Scheduler::sort_slots(PlanData& plan) {
  slot_position_.resize(sz(plan.num_partials));
  for (const Draft& draft : drafts_) {
    for (std::int32_t s = 0; draft.partial_begin >= 0 && s < draft.num_states; ++s) {
      std::fill_n(slot_position_.begin() + draft.partial_begin + s * draft.num_rows, draft.num_rows,
                  state_begin(draft, s));
    }
  }
  for (std::size_t r = 0; r < plan.rows.size(); ++r) {
    std::sort(plan.merge_slots.begin() + slot_begin_[r], plan.merge_slots.begin() + slot_end_[r],
              [&](std::int32_t a, std::int32_t b) { return slot_position_[sz(a)] < slot_position_[sz(b)]; });
  }
}

}  // namespace headwater::detail
