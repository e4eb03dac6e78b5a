// The account of a step's outcome; see outcome.h. It looks into the plan's arrays, which the public numbers sum up.
#include "cli/outcome.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "plan/memory.h"

namespace headwater::cli {

std::string describe_outcome(const Plan& plan) {
  const detail::PlanData& data = plan.data();
  const detail::PlanData::Memory& memory = *data.memory;
  const PlanStats& stats = plan.stats();
  if (stats.path == Path::flat)
    return fmt::format("flat launch (batch {}; {} chunks)", stats.num_requests, stats.num_items);
  // Of each request, the shared pieces that it is a member of. Rows alone do not tell: a request may have several, and
  // a tile of a shared piece may hold rows of one request only.
  std::vector<std::vector<const detail::Piece*>> shared(static_cast<std::size_t>(memory.num_requests));
  for (const detail::Piece& piece : memory.pieces) {
    if (piece.num_members < 2) continue;
    for (std::int32_t m = 0; m < piece.num_members; ++m) {
      const std::int32_t entry = memory.forest.order[static_cast<std::size_t>(piece.member_begin + m)];
      const std::int32_t request = memory.entries[static_cast<std::size_t>(entry)].request;
      shared[static_cast<std::size_t>(request)].push_back(&piece);
    }
  }
  const auto shared_chunks = std::ranges::count_if(data.items, [&](const detail::WorkItem& item) {
    const std::int32_t row = data.item_rows[static_cast<std::size_t>(item.row_begin)];
    const auto request = std::ranges::upper_bound(memory.qo_indptr, row) - memory.qo_indptr.begin() - 1;
    return std::ranges::any_of(shared[static_cast<std::size_t>(request)], [&](const detail::Piece* piece) {
      return item.pos_begin >= piece->tok_begin && item.pos_begin < piece->tok_end;
    });
  });
  const auto sharing = std::ranges::count_if(shared, [](const auto& pieces) { return !pieces.empty(); });
  std::int64_t pages = 0;
  for (const detail::SharedSpan& span : data.spans) pages += span.num_pages;
  return fmt::format(
      "cascade launch (batch {}, {} of them sharing {} pages / {} KV tokens read once; {} shared-span chunks, {} "
      "suffix chunks)",
      stats.num_requests, sharing, pages, stats.shared_tokens, shared_chunks, stats.num_items - shared_chunks);
}

}  // namespace headwater::cli
