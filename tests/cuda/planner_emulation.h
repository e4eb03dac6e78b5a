// Planning on the device without a device: the same steps, run by one thread or by groups of threads that stand for
// thread blocks; block tables as an engine keeps them; and what was planned as a Plan of the host, so that everything
// that checks or runs plans can be used on it.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/device_planner_input.h"
#include "headwater/plan.h"
#include "reference/tables.h"

namespace headwater::cuda_test {

/// A padded block table and what belongs to it. Columns behind a request's pages hold ids that no pool has.
struct BlockTables {
  explicit BlockTables(const reference::PageTables& tables, int spare_columns = 3);

  [[nodiscard]] cuda::DeviceTables view() const;
  /// `max_pages` of the pool and so on; one row each where `qo_indptr` is that.
  [[nodiscard]] cuda::DeviceTableLimits limits() const;
  /// A request without keys, as graphs of a fixed batch are padded with: null pages all along its row.
  void pad(int num_requests);

  int page_size;
  std::int64_t num_pages;
  std::int32_t null_page;
  int num_requests;
  int max_blocks;
  std::int64_t row_stride;
  std::vector<std::int32_t> block_table;
  std::vector<std::int32_t> lengths;
  std::vector<std::int32_t> qo_indptr;
};

/// All that planning leaves.
struct Planned {
  cuda::Header header;
  std::vector<cuda::DeviceItem> items;
  std::vector<cuda::ItemRow> item_rows;
  std::vector<std::int32_t> merge_rows;
  std::vector<std::int32_t> merge_indptr;
  std::vector<std::int32_t> merge_slots;
  std::vector<std::int32_t> empty_rows;
  cuda::DevicePlanStatus status;
  std::vector<cuda::DeviceSpan> spans;
  std::vector<std::int32_t> members;  ///< of all spans
};

/// In canonical bytes.
std::string bytes_of(const Planned& planned);

/// Plans by one thread.
Planned plan_alone(const AttentionShape& shape, const PlanOptions& options, const DeviceModel& model,
                   const BlockTables& tables, const cuda::Capacity* capacity = nullptr);
/// Plans by `blocks` groups of `threads` threads.
Planned plan_by_threads(const AttentionShape& shape, const PlanOptions& options, const DeviceModel& model,
                        const BlockTables& tables, int blocks, int threads);

/// The same as a plan of the host, which the CPU back end can run.
Plan to_plan(const AttentionShape& shape, const PlanOptions& options, const BlockTables& tables,
             const Planned& planned);

}  // namespace headwater::cuda_test
