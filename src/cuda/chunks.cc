#include "cuda/chunks.h"

#include <algorithm>
#include <tuple>

#include "plan/rows.h"

namespace headwater::cuda {
void ChunkedPlan::cut(const detail::PlanData& plan) {
  const std::int32_t chunk = plan.options.invariant_chunk;
  const std::int32_t sinks = detail::sink_limit(plan.options);
  items.clear();
  leads.clear();
  hidden_pages.clear();
  states_.clear();
  num_partials = 0;
  for (const detail::WorkItem& item : plan.items) {
    if (item.kv_head_begin != 0) continue;
    const std::int32_t end = item.pos_begin + item.num_tokens;
    const std::int32_t page_size = plan.page_size[static_cast<std::size_t>(item.view)];
    for (std::int32_t begin = item.pos_begin; begin < end;) {
      const std::int32_t next = std::min(end, (begin / chunk + 1) * chunk);
      const std::int32_t lead = begin % kInvariantTokens;
      const std::int32_t token = item.first_token + (begin - item.pos_begin);  // counted from the item's first page
      detail::WorkItem& mine = items.emplace_back(item);
      mine.pos_begin = begin - lead;
      mine.num_tokens = next - begin + lead;
      mine.page_begin = item.page_begin + token / page_size;
      // Pages that hold hidden tokens only are not the item's: there may be none in front of its first.
      const std::int32_t hidden = std::max(0, (lead - token % page_size + page_size - 1) / page_size);
      mine.first_token = token % page_size - lead + hidden * page_size;
      mine.partial_begin = static_cast<std::int32_t>(num_partials);
      mine.num_states = 1;
      const std::int32_t shift = begin - item.pos_begin;  // what all rows see, counted from this part's first token
      const std::int32_t seen = std::clamp(item.unmasked_end - shift, 0, next - begin);
      const std::int32_t from = std::clamp(item.unmasked_begin - shift, 0, seen);
      mine.unmasked_begin = from < seen ? from + lead : 0;
      mine.unmasked_end = from < seen ? seen + lead : 0;
      leads.push_back(lead);
      hidden_pages.push_back(hidden);
      for (std::int32_t j = 0; j < item.num_rows; ++j) {
        const std::int32_t row = plan.item_rows[static_cast<std::size_t>(item.row_begin + j)];
        const detail::TokenSpan part =
            detail::visible_part(plan.rows[static_cast<std::size_t>(row)], sinks, begin, next);
        if (part.begin < part.end) states_.push_back({row, begin, mine.partial_begin + j});
      }
      num_partials += item.num_rows;
      begin = next;
    }
  }
  std::ranges::sort(states_, {}, [](const State& s) { return std::tuple(s.row, s.pos); });
  merge_rows.clear();
  merge_slots.clear();
  merge_indptr.assign(1, 0);
  for (std::size_t i = 0; i < states_.size(); ++i) {
    merge_slots.push_back(states_[i].slot);
    if (i + 1 < states_.size() && states_[i + 1].row == states_[i].row) continue;
    merge_rows.push_back(states_[i].row);
    merge_indptr.push_back(static_cast<std::int32_t>(merge_slots.size()));
  }
}

}  // namespace headwater::cuda
