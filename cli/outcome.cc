// The account of a step's outcome; see outcome.h. It looks into the plan's arrays, which the public numbers sum up.
#include "cli/outcome.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "plan/plan_data.h"

namespace headwater::cli {

std::string describe_outcome(const Plan& plan) {
  const detail::PlanData& data = plan.data();
  const PlanStats& stats = plan.stats();
  if (stats.path == Path::flat)
    return fmt::format("flat launch (batch {}; {} chunks)", stats.num_requests, stats.num_items);
  std::int64_t shared_chunks = 0;
  std::vector<std::int32_t> sharing;
  // An item belongs to a shared span if it lies inside one that has as many rows' requests, that is, if it starts
  // within a span and serves several rows.
  for (const detail::WorkItem& item : data.items) {
    const bool inside = std::ranges::any_of(data.spans, [&](const detail::SharedSpan& span) {
      return item.pos_begin >= span.pos_begin && item.pos_begin < span.pos_begin + span.num_tokens && item.num_rows > 1;
    });
    if (!inside) continue;
    ++shared_chunks;
    for (std::int32_t r = 0; r < item.num_rows; ++r)
      sharing.push_back(data.item_rows[static_cast<std::size_t>(item.row_begin + r)]);
  }
  std::ranges::sort(sharing);
  const auto distinct = std::ranges::unique(sharing).begin() - sharing.begin();
  std::int64_t pages = 0;
  for (const detail::SharedSpan& span : data.spans) pages += span.num_pages;
  return fmt::format(
      "cascade launch (batch {}, {} of them sharing {} pages / {} KV tokens read once; {} shared-span chunks, {} "
      "suffix chunks)",
      stats.num_requests, std::min<std::int64_t>(distinct, stats.num_requests), pages, stats.shared_tokens,
      shared_chunks, stats.num_items - shared_chunks);
}

}  // namespace headwater::cli
