// Inside of DevicePlanner: its memory on the device, and the kernel that plans.
#pragma once

#include <optional>

#include "cuda/device_plan.h"
#include "cuda/device_planner_input.h"

namespace headwater::cuda {

struct PlannerParams {
  PlannerInput in;
  detail::CostModel cost;
  PlannerOutput out;
  std::byte* scratch = nullptr;    ///< of all blocks, where shared memory is too small
  std::int64_t scratch_bytes = 0;  ///< of a block
};

/// The kernel; its one argument is PlannerParams. `shared`: scratch memory is shared memory.
const void* planner_kernel(bool shared);
int planner_threads();

struct DevicePlanner::Impl {
  Impl(const AttentionShape& shape, const PlanOptions& options, const DeviceTableLimits& limits,
       const DeviceModel& model);

  AttentionShape shape;
  PlanOptions options;
  DeviceTableLimits limits;
  detail::CostModel cost;
  Capacity capacity;
  PlannerInput input;
  std::size_t scratch_bytes = 0;
  bool shared = true;  ///< scratch memory is shared memory
  int most_blocks = 1;
  std::optional<DeviceBuffer> scratch;  ///< of all blocks, if not
  DeviceBuffer exchange;
  DeviceBuffer status;
  DeviceBuffer spans;
  DeviceBuffer members;
};

}  // namespace headwater::cuda
