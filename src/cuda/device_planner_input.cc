#include "cuda/device_planner_input.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>

#include "headwater/error.h"
#include "plan/cut.h"
#include "plan/validate.h"

namespace headwater::cuda {
namespace {

constexpr std::int64_t kMostRequests = LargeScratch::kMostRequests;
constexpr std::int64_t kMostBlocks = (1 << 20) - 2;  ///< a sort key has 20 bits for a place, of which none is 0
constexpr std::int64_t kMostRows = (1 << 20) - 1;
constexpr std::int64_t kStatesPerRow = 15;  ///< 256 rows of 32 heads of 128: 60.5 MiB of workspace
constexpr std::int64_t kStatesOfFewRows = 256 * kStatesPerRow;
constexpr std::int32_t kLeastPart = 128;  ///< tokens
constexpr std::int64_t kPartsPerWorker = 8;

[[noreturn]] void unsupported(const std::string& what) {
  throw Error(ErrorCode::unsupported, what + " when plans are made on the device");
}

void check_range(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return;
  throw Error(ErrorCode::invalid_argument, std::string(name) + " = " + std::to_string(value) + ", expected " +
                                               std::to_string(least) + ".." + std::to_string(most));
}

void check_array(const char* name, const std::int32_t* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  if (address != 0 && address % sizeof(std::int32_t) == 0) return;
  throw Error(ErrorCode::invalid_argument,
              std::string(name) + (address == 0 ? " is a null pointer, expected device memory"
                                                : " is not at a multiple of 4 bytes, expected int32"));
}

std::int64_t rows_of(const DeviceTableLimits& limits) {
  return limits.max_rows > 0 ? limits.max_rows : limits.max_requests;
}

Policy policy_of(const PlanOptions& options) {
  if (options.cascade == CascadeSwitch::off) return Policy::flat;
  return options.cascade == CascadeSwitch::on ? Policy::forest : options.policy;
}

}  // namespace

void check_planner(const AttentionShape& shape, const PlanOptions& options, const DeviceTableLimits& limits) {
  detail::check_shape(shape);
  detail::check_options(options);
  if (options.batch_invariant) unsupported("options.batch_invariant: not");
  if (options.window_left >= 0) {
    unsupported("options.window_left = " + std::to_string(options.window_left) + ", expected -1");
  }
  if (options.local_chunk > 0) {
    unsupported("options.local_chunk = " + std::to_string(options.local_chunk) + ", expected 0");
  }
  if (options.num_sink_tokens > 0) {
    unsupported("options.num_sink_tokens = " + std::to_string(options.num_sink_tokens) + ", expected 0");
  }
  const Policy policy = policy_of(options);
  if (policy != Policy::automatic && policy != Policy::flat && policy != Policy::forest) {
    unsupported("options.policy = " + std::string(name_of(policy)) + ", expected auto, flat or forest");
  }
  check_range("limits.max_requests", limits.max_requests, 1, kMostRequests);
  check_range("limits.max_blocks", limits.max_blocks, 1, kMostBlocks);
  check_range("limits.max_rows", limits.max_rows, 0, kMostRows);
  check_range("limits.num_pages", limits.num_pages, 1, std::numeric_limits<std::int32_t>::max());
  if (limits.page_size < 1 || limits.page_size > 256 ||
      !std::has_single_bit(static_cast<std::uint32_t>(limits.page_size))) {
    throw Error(ErrorCode::unsupported, "limits.page_size = " + std::to_string(limits.page_size) +
                                            ", expected a power of two in 1..256 on CUDA");
  }
  check_range("limits.max_blocks * limits.page_size", std::int64_t{limits.max_blocks} * limits.page_size, 1,
              std::numeric_limits<std::int32_t>::max() / 2);
}

Capacity planner_capacity(const detail::CostModel& cost, const DeviceTableLimits& limits) {
  const std::int64_t requests = limits.max_requests;
  const std::int64_t rows = rows_of(limits);
  const std::int64_t parts = kPartsPerWorker * cost.num_workers();
  Capacity capacity;
  capacity.max_rows = rows;
  capacity.max_items = 2 * requests + (kMaxDepth + 1) * (rows / cost.tile_rows()) + parts;
  const std::int64_t rows_each = (rows + requests - 1) / requests;
  const std::int64_t few = std::min(rows * (cost.num_workers() + kMaxDepth), kStatesOfFewRows);
  capacity.max_partials = std::max({kStatesPerRow * rows, few, rows_each * (requests + parts)});
  return capacity;
}

PlannerInput planner_input(const AttentionShape& shape, const PlanOptions& options, const DeviceTableLimits& limits,
                           const Capacity& capacity, const detail::CostModel& cost) {
  const std::int64_t flat = limits.max_requests + rows_of(limits) / cost.tile_rows();
  if (capacity.max_items < flat) {
    throw Error(ErrorCode::capacity_exceeded, "capacity.max_items = " + std::to_string(capacity.max_items) +
                                                  ", expected at least " + std::to_string(flat) + " for flat plans");
  }
  if (capacity.max_rows < rows_of(limits)) {
    throw Error(ErrorCode::capacity_exceeded, "capacity.max_rows = " + std::to_string(capacity.max_rows) +
                                                  ", expected at least " + std::to_string(rows_of(limits)));
  }
  PlannerInput in;
  in.max_pages = limits.max_blocks;
  in.page_shift = std::countr_zero(static_cast<std::uint32_t>(limits.page_size));
  in.num_pages = static_cast<std::int32_t>(limits.num_pages);
  in.null_page = limits.null_page;
  in.causal = options.causal;
  in.policy = policy_of(options);
  const detail::Thresholds thresholds = detail::thresholds_of(options, in.policy);
  in.min_pages = thresholds.min_pages;
  in.min_members = thresholds.min_members;
  in.num_kv_heads = shape.num_kv_heads;
  in.part_grain = (cost.part_tokens() + limits.page_size - 1) / limits.page_size * limits.page_size;
  in.least_part = std::max(kLeastPart, in.part_grain);
  in.max_rows = static_cast<std::int32_t>(rows_of(limits));
  in.max_items = static_cast<std::int32_t>(capacity.max_items);
  // The merge lists are counted in 23 bits.
  in.max_partials = static_cast<std::int32_t>(std::min<std::int64_t>(capacity.max_partials, (1 << 23) - 1));
  if (flat > LargeScratch::kMostUnits) {
    unsupported("limits.max_requests + limits.max_rows / " + std::to_string(cost.tile_rows()) + " = " +
                std::to_string(flat) + ", expected at most " + std::to_string(LargeScratch::kMostUnits));
  }
  // Fewer nodes than requests, each of one unit, or two if it has more rows than a tile.
  const std::int64_t nodes = limits.max_requests + kMaxDepth * (rows_of(limits) / cost.tile_rows());
  in.max_units =
      static_cast<std::int32_t>(std::min({capacity.max_items, flat + nodes, std::int64_t{LargeScratch::kMostUnits}}));
  return in;
}

void set_tables(PlannerInput& in, const DeviceTables& tables, const DeviceTableLimits& limits) {
  check_range("tables.num_requests", tables.num_requests, 0, limits.max_requests);
  if (tables.qo_indptr == nullptr && tables.num_requests > in.max_rows) {
    throw Error(ErrorCode::invalid_argument,
                "tables.qo_indptr = nullptr, expected it where limits.max_rows is less "
                "than the requests");
  }
  const std::int64_t stride = tables.row_stride != 0 ? tables.row_stride : limits.max_blocks;
  check_range("tables.row_stride", stride, limits.max_blocks, std::numeric_limits<std::int32_t>::max());
  check_range("tables.num_requests * tables.row_stride", tables.num_requests * stride, 0,
              std::numeric_limits<std::int32_t>::max());
  if (tables.num_requests > 0) {
    check_array("tables.block_table", tables.block_table);
    check_array("tables.lengths", tables.lengths);
  }
  if (tables.qo_indptr != nullptr) check_array("tables.qo_indptr", tables.qo_indptr);
  in.block_table = tables.block_table;
  in.row_stride = stride;
  in.lengths = tables.lengths;
  in.qo_indptr = tables.qo_indptr;
  in.num_requests = tables.num_requests;
  in.aligned = reinterpret_cast<std::uintptr_t>(tables.block_table) % 16 == 0 && stride % 4 == 0;
}

}  // namespace headwater::cuda
