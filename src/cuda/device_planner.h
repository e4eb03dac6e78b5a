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
  std::byte* scratch = nullptr;  ///< of all blocks, where shared memory is too small
};

/// A kernel for up to so many requests and units; its one argument is PlannerParams.
struct PlannerKernel {
  const void* function;
  int max_requests;
  int max_units;
  std::size_t scratch_bytes;  ///< of a block
  bool shared;                ///< scratch memory is dynamic shared memory
};
inline constexpr int kNumPlannerKernels = 3;
/// In order of size.
PlannerKernel planner_kernel(int index);
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
  PlannerKernel kernel{};
  int most_blocks = 1;
  std::optional<DeviceBuffer> scratch;  ///< of all blocks, if it is not shared memory
  DeviceBuffer exchange;
  DeviceBuffer status;
  DeviceBuffer spans;
  DeviceBuffer members;
};

}  // namespace headwater::cuda
