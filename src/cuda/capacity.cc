// Capacities: of one plan, and of all plans within bounds. The latter follow from how plans come about (src/plan):
//
//   entries   requests with rows; two of each where sink tokens lie apart
//   pieces    nodes of the sharing forest: of a tree with E leaves at most 2 E - 1; where tables start at different
//             places an entry may take part in several trees, and only its pages bound its pieces
//   path      pieces that one row reads: each but the last has members that the next has not, and each has a page
//   units     pieces x row tiles; with windows, rows of a tile may leave gaps, and each gap is a border between units
//   parts     a unit is cut where it costs more than a limit, which is at least 1/16 of a worker's share of the whole
//             (Estimator::balance): the cuts of all units together are about 16 a worker
//
// Bounds are counted with integers and rounded up. tests/cuda/capacity_test.cc holds them against random plans.
#include <algorithm>
#include <limits>
#include <string>

#include "cuda/chunks.h"
#include "cuda/device_plan.h"
#include "headwater/cuda.h"
#include "plan/cost_model.h"
#include "plan/plan_data.h"
#include "plan/validate.h"

namespace headwater::cuda {
namespace {

constexpr std::int64_t kLeastLimit = 16;               ///< the finest limit is a share divided by this
constexpr std::int64_t kMost = std::int64_t{1} << 40;  ///< of any product here: bounds this large are refused anyway

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// a * b where both are bounds; stays at kMost.
std::int64_t product(std::int64_t a, std::int64_t b) {
  return a != 0 && b > kMost / a ? kMost : a * b;
}

void check_bound(const char* name, std::int64_t value, std::int64_t least) {
  if (value >= least && value <= std::numeric_limits<std::int32_t>::max()) return;
  throw Error(ErrorCode::invalid_argument, std::string("bounds.") + name + " = " + std::to_string(value) +
                                               ", expected " + std::to_string(least) + "..2147483647");
}

/// Cuts for balance of all units together.
std::int64_t most_cuts(const detail::CostModel& cost, std::int64_t least_tokens, const PlanBounds& bounds,
                       std::int64_t units) {
  const std::int64_t workers = cost.num_workers();
  if (workers == 1) return 0;
  // A share is at least this much, or there is nothing to cut: limits lose little by being rounded down to integers.
  const std::int64_t share = std::max<std::int64_t>(1, ceil_div(cost.item_ps(1), workers));
  const std::int64_t rounding = share < kLeastLimit ? 15 : ceil_div(15, share / kLeastLimit);
  const std::int64_t by_cost = product(workers, kLeastLimit + rounding);
  const std::int64_t by_length = bounds.max_pages * bounds.page_size / least_tokens;  // parts of one unit
  return std::min(by_cost, product(units, std::max<std::int64_t>(0, by_length - 1)));
}

}  // namespace

Capacity Capacity::within(const PlanBounds& bounds, const AttentionShape& shape, const PlanOptions& options,
                          const DeviceModel& model) {
  detail::check_shape(shape);
  detail::check_options(options);
  detail::check_model(model);
  check_bound("max_requests", bounds.max_requests, 0);
  check_bound("max_rows", bounds.max_rows, 0);
  check_bound("max_pages", bounds.max_pages, 0);
  check_bound("page_size", bounds.page_size, 1);
  check_bound("max_shared_spans", bounds.max_shared_spans, 0);
  const detail::CostModel cost(shape, options, model);
  const bool windows = options.window_left >= 0 || options.local_chunk > 0;
  const bool gaps = windows || !bounds.same_start;
  const std::int64_t lanes = options.num_sink_tokens > 0 && (windows || options.batch_invariant) ? 2 : 1;
  const std::int64_t rows = bounds.max_rows;
  const std::int64_t pages = bounds.max_pages;
  const std::int64_t requests = std::min<std::int64_t>(bounds.max_requests, rows);
  const std::int64_t tile = std::min<std::int64_t>(cost.tile_rows(), std::max<std::int64_t>(1, rows));
  const std::int64_t entries = lanes * requests;

  std::int64_t path = std::min(pages, gaps ? pages : entries);
  // From one start: shared spans, then pages of one's own; else pages of one's own before each span as well.
  const std::int64_t spans = std::int64_t{bounds.max_shared_spans} * (bounds.same_start ? 1 : 2);
  if (spans > 0) path = std::min(path, spans + 1);
  const std::int64_t pieces =
      gaps ? product(entries, path) : std::min(product(entries, path), std::max<std::int64_t>(0, 2 * entries - 1));
  const std::int64_t readings = product(product(lanes, rows), path);  // pairs of a row and a piece that it reads
  std::int64_t units = std::min(pieces + readings / tile, readings);
  // Some row begins behind every gap, and the sinks before it.
  const std::int64_t states = gaps && options.num_sink_tokens > 0 ? 2 * readings : readings;
  if (gaps) units = states;
  const std::int64_t tokens = pages * bounds.page_size;

  Capacity capacity;
  capacity.max_rows = rows;
  if (options.batch_invariant) {
    // A state for each chunk of what a row reads, wherever it is cut otherwise. Pieces end where chunks do, which may
    // be within a page; what borders on windows' gaps and on sinks may share a chunk.
    const std::int64_t shared_chunks = gaps ? 2 * product(lanes, path) : lanes;
    const std::int64_t chunks = ceil_div(tokens, options.invariant_chunk) + shared_chunks;
    capacity.max_partials = product(rows, chunks);
    capacity.max_items = gaps ? capacity.max_partials : product(requests + rows / tile, chunks);
    // A chunk's items may begin with pages that hold hidden tokens only (chunks.h).
    const std::int64_t hidden = ceil_div(kInvariantTokens - 1, bounds.page_size);
    capacity.max_page_ids = product(gaps ? rows : requests + rows / tile, pages + product(chunks, 1 + hidden));
    return capacity;
  }
  // Several row tiles of one span, longer than half the cache, go through it in step.
  std::int64_t cuts = 0;
  if (rows > tile && product(tokens, cost.token_bytes()) > cost.cache_bytes() / 2) {
    cuts = product(gaps ? states : 2 * readings / tile, ceil_div(tokens, cost.chunk_tokens()) - 1);
  }
  const std::int64_t least_tokens = std::max({128, bounds.page_size, cost.part_tokens()});
  cuts += most_cuts(cost, least_tokens, bounds, units);

  capacity.max_items = units + cuts;
  // A cut is one more state of every row of a tile.
  capacity.max_partials = path <= 1 && cuts == 0 && !gaps ? 0 : states + product(cuts, tile);
  // Every page of a request once for each tile of rows that reads it, cuts lie between pages; with gaps, for each row.
  capacity.max_page_ids = gaps ? product(rows, pages + lanes * path) : product(pages, requests + rows / tile);
  // Many page ids are kept on the device as the plan has them: a table of n ids has room for n / 4, at least 16, more.
  if (capacity.max_page_ids > kFewPageIds) {
    const std::int64_t table = pages + std::max<std::int64_t>(16, pages / 4);
    const std::int64_t most = 2 * capacity.max_page_ids;  // beyond that they are not kept
    capacity.max_page_ids = std::max(capacity.max_page_ids, std::min(most, product(bounds.max_requests, table)));
  }
  return capacity;
}

}  // namespace headwater::cuda
