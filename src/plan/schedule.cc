#include "plan/schedule.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "plan/rows.h"

namespace headwater::detail {
namespace {

std::size_t sz(std::int64_t n) {
  return static_cast<std::size_t>(n);
}

}  // namespace

void Scheduler::emit(const CostModel& cost, std::span<const Piece> pieces, const Units& units, PlanData& plan) {
  grain_ = units.grain;
  sinks_ = sink_limit(plan.options);
  make_drafts(cost, pieces, units, plan);
  if (!keep_places(plan)) {
    plan.item_rows.swap(item_rows_);
    assign_slots(plan);
    make_merges(plan);
  }
  make_items(cost, units, plan);
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

void Scheduler::make_drafts(const CostModel& cost, std::span<const Piece> pieces, const Units& units,
                            const PlanData& plan) {
  drafts_.clear();
  item_rows_.clear();
  const bool fixed = plan.options.batch_invariant;
  for (const Unit& unit : units.units) {
    const Piece& piece = pieces[sz(unit.piece)];
    const std::int32_t page_size = plan.page_size[sz(piece.view)];
    const std::span<const std::int32_t> rows(units.rows.data() + unit.row_begin, sz(unit.num_rows));
    if (unit.parts == 1 && unit.tok_end <= unit.all_end && !fixed) {  // seen in full by all of its rows
      add_draft(cost, unit, piece, page_size,
                {unit.num_rows, 0, unit.tok_begin, unit.tok_end, unit.tok_begin, unit.tok_end}, keep_rows(rows),
                unit.num_rows);
      continue;
    }
    const std::int32_t grain = fixed ? grain_ : (cost.part_tokens() + page_size - 1) / page_size * page_size;
    const std::int32_t origin = fixed ? 0 : piece.origin;
    const std::int64_t tokens = unit.tok_end - unit.tok_begin;
    std::int32_t kept = -1;  // where the unit's rows lie in item_rows_
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
        if (kept < 0) kept = keep_rows(rows);
        add_draft(cost, unit, piece, page_size, sight, kept, unit.num_rows);
      } else if (sight.num_rows > 0) {
        split_rows(plan, rows, begin, end);
        for (const auto* list : {&first_rows_, &later_rows_}) {
          if (list->empty()) continue;
          add_draft(cost, unit, piece, page_size, look(plan, *list, begin, end), keep_rows(*list),
                    static_cast<std::int32_t>(list->size()));
        }
      }
      begin = end;
    }
  }
}

std::int32_t Scheduler::keep_rows(std::span<const std::int32_t> rows) {
  const auto at = static_cast<std::int32_t>(item_rows_.size());
  if (rows.size() == 1) {
    item_rows_.push_back(rows.front());
  } else {
    item_rows_.insert(item_rows_.end(), rows.begin(), rows.end());
  }
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

void Scheduler::add_draft(const CostModel& cost, const Unit& unit, const Piece& piece, std::int32_t page_size,
                          const Sight& sight, std::int32_t row_begin, std::int32_t num_rows) {
  Draft& draft = drafts_.emplace_back();
  draft.piece = unit.piece;
  draft.later = sight.num_later > 0;
  WorkItem& item = draft.item;
  item.pos_begin = sight.begin;
  item.num_tokens = sight.end - sight.begin;
  item.page_begin = piece.page_base + (sight.begin - piece.origin) / page_size;
  item.first_token = (sight.begin - piece.origin) % page_size;
  item.row_begin = row_begin;
  item.num_rows = num_rows;
  item.view = piece.view;
  if (draft.later) item.num_states = (sight.end + grain_ - 1) / grain_ - sight.begin / grain_;
  if (sight.all_begin < sight.all_end) {
    item.unmasked_begin = std::max(sight.all_begin, sight.begin) - sight.begin;
    item.unmasked_end = sight.all_end - sight.begin;
  }
  const std::int64_t tokens = item.num_tokens;
  item.cost_ps = tokens * unit.read_token_ps + cost.compute_ps(tokens, num_rows) + cost.item_ps(num_rows);
}

/// True where the drafts have the rows of the last plan's, draft by draft, as after most decode steps: then partial
/// slots, merge lists and empty rows follow from those alone and stay what they are. Not in batch-invariant mode, nor
/// where slots are sorted: there they depend on positions too.
bool Scheduler::keep_places(const PlanData& plan) {
  const auto& places = plan.memory->places;
  if (plan.memory->placed_rows != plan.rows.size() || places.size() != drafts_.size()) return false;
  for (std::size_t i = 0; i < places.size(); ++i) {
    WorkItem& item = drafts_[i].item;
    if (places[i].row_begin != item.row_begin || places[i].num_rows != item.num_rows) return false;
    item.partial_begin = places[i].partial_begin;
  }
  return plan.item_rows == item_rows_;
}

/// Calls visit(drafts) for each stretch of drafts with the same list of rows: the parts of a unit.
template <class Visit>
void Scheduler::for_stretches(Visit&& visit) const {
  for (std::size_t begin = 0; begin < drafts_.size();) {
    std::size_t end = begin + 1;
    while (end < drafts_.size() && drafts_[end].item.row_begin == drafts_[begin].item.row_begin) ++end;
    visit(std::span(drafts_).subspan(begin, end - begin));
    begin = end;
  }
}

/// A row of one state writes it to the output; all states of other rows get slots.
void Scheduler::assign_slots(PlanData& plan) {
  PlanData::Memory& memory = *plan.memory;
  const auto rows_of = [&](const Draft& draft) {
    return std::span(plan.item_rows).subspan(sz(draft.item.row_begin), sz(draft.item.num_rows));
  };
  row_drafts_.assign(plan.rows.size(), 0);
  for_stretches([&](std::span<const Draft> stretch) {
    const auto times = static_cast<std::int32_t>(stretch.size());
    for (const std::int32_t r : rows_of(stretch.front())) row_drafts_[sz(r)] += times;
  });
  memory.placed_rows = kNotPlaced;
  memory.places.clear();
  std::int64_t slots = 0;
  for (Draft& draft : drafts_) {
    const bool direct =
        !draft.later && std::ranges::all_of(rows_of(draft), [&](std::int32_t r) { return row_drafts_[sz(r)] == 1; });
    WorkItem& item = draft.item;
    item.partial_begin = direct ? -1 : static_cast<std::int32_t>(slots);
    memory.places.push_back({item.row_begin, item.num_rows, item.partial_begin});
    if (direct) continue;
    slots += std::int64_t{item.num_rows} * item.num_states;
    if (slots > std::numeric_limits<std::int32_t>::max()) {
      throw Error(ErrorCode::unsupported, "the plan needs more than 2147483647 partial rows");
    }
  }
  plan.num_partials = static_cast<std::int32_t>(slots);
  if (!plan.options.batch_invariant && !memory.forest.split_entries) memory.placed_rows = plan.rows.size();
}

void Scheduler::make_items(const CostModel& cost, const Units& units, PlanData& plan) {
  for (Draft& draft : drafts_) {
    if (draft.item.partial_begin >= 0) draft.item.cost_ps += cost.partial_ps(draft.item.num_rows);
  }
  // Longest first; drafts of equal cost in their order, but the tiles of one chunk one after the other.
  draft_order_.resize(drafts_.size());
  std::iota(draft_order_.begin(), draft_order_.end(), 0);
  for (std::size_t i = 0; units.tiled && i < drafts_.size();) {
    std::size_t end = i + 1;
    while (end < drafts_.size() && drafts_[end].piece == drafts_[i].piece) ++end;
    const auto order = std::span(draft_order_).subspan(i, end - i);
    if (end - i > 1) {
      std::ranges::stable_sort(order, {}, [&](std::int32_t d) { return drafts_[sz(d)].item.pos_begin; });
    }
    i = end;
  }
  const auto draft_at = [&](std::size_t i) -> const Draft& { return drafts_[sz(draft_order_[i])]; };
  const auto& ranks = by_cost_.sort(drafts_.size(), [&](std::size_t i) { return draft_at(i).item.cost_ps; });
  plan.max_item_rows = 0;
  plan.items.resize(drafts_.size() * sz(units.head_parts));
  WorkItem* to = plan.items.data();
  const std::int32_t heads = plan.shape.num_kv_heads / units.head_parts;
  for (const std::int32_t rank : ranks) {
    const WorkItem& draft = draft_at(sz(rank)).item;
    for (std::int32_t h = 0; h < units.head_parts; ++h, ++to) {
      *to = draft;
      to->kv_head_begin = static_cast<std::int16_t>(heads * h);
      to->kv_head_end = static_cast<std::int16_t>(heads * (h + 1));
      if (units.head_parts > 1) to->cost_ps /= units.head_parts;
    }
    plan.max_item_rows = std::max(plan.max_item_rows, draft.num_rows);
  }
}

/// Where state s of a draft begins.
std::int32_t Scheduler::state_begin(const Draft& draft, std::int32_t s) const {
  const std::int32_t begin = draft.item.pos_begin;
  return draft.later ? std::max(begin, (begin / grain_ + s) * grain_) : begin;
}

/// Writes the slots that the j-th row of a stretch leaves; returns where the next one goes.
std::int32_t* Scheduler::put_slots(const PlanData& plan, std::span<const Draft> stretch, std::int32_t j,
                                   std::int32_t* to) const {
  for (const Draft& draft : stretch) {
    const WorkItem& item = draft.item;
    if (!draft.later) {
      *to++ = item.partial_begin + j;
      continue;
    }
    const RowRange& row = plan.rows[sz(plan.item_rows[sz(item.row_begin + j)])];
    const std::int32_t last = item.pos_begin + item.num_tokens;
    for (std::int32_t s = 0; s < item.num_states; ++s) {
      // Chunks of which the row sees nothing have no state.
      const std::int32_t end = s + 1 < item.num_states ? state_begin(draft, s + 1) : last;
      const TokenSpan seen = visible_part(row, sinks_, state_begin(draft, s), end);
      if (seen.begin < seen.end) *to++ = item.partial_begin + s * item.num_rows + j;
    }
  }
  return to;
}

void Scheduler::make_merges(PlanData& plan) {
  const std::size_t num_rows = plan.rows.size();
  const auto rows_of = [&](std::span<const Draft> stretch) {
    return std::span(plan.item_rows).subspan(sz(stretch.front().item.row_begin), sz(stretch.front().item.num_rows));
  };
  // Room for as many slots of each row as its drafts have states. slot_end_[r]: where those written so far end.
  slot_begin_.assign(num_rows + 1, 0);
  for_stretches([&](std::span<const Draft> stretch) {
    if (stretch.front().item.partial_begin < 0) return;  // then it is alone: a row of several drafts has several states
    std::int32_t states = 0;
    for (const Draft& draft : stretch) states += draft.item.num_states;
    for (const std::int32_t r : rows_of(stretch)) slot_begin_[sz(r) + 1] += states;
  });
  std::partial_sum(slot_begin_.begin(), slot_begin_.end(), slot_begin_.begin());
  slot_end_ = slot_begin_;
  auto& slots = plan.merge_slots;
  slots.resize(sz(slot_begin_.back()));
  for_stretches([&](std::span<const Draft> stretch) {
    if (stretch.front().item.partial_begin < 0) return;
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
    if (row_drafts_[r] == 0) plan.empty_rows.push_back(static_cast<std::int32_t>(r));
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
    const WorkItem& item = draft.item;
    for (std::int32_t s = 0; item.partial_begin >= 0 && s < item.num_states; ++s) {
      std::fill_n(slot_position_.data() + item.partial_begin + std::int64_t{s} * item.num_rows, item.num_rows,
                  state_begin(draft, s));
    }
  }
  for (std::size_t r = 0; r < plan.rows.size(); ++r) {
    std::sort(plan.merge_slots.begin() + slot_begin_[r], plan.merge_slots.begin() + slot_end_[r],
              [&](std::int32_t a, std::int32_t b) { return slot_position_[sz(a)] < slot_position_[sz(b)]; });
  }
}

}  // namespace headwater::detail
