// What the host decides before anything is planned on the device: refusals, sizes, thresholds.
#pragma once

#include "cuda/device_planner_memory.h"
#include "headwater/cuda.h"

namespace headwater::cuda {

/// Refuses what cannot be planned on the device, with the reason (Error, unsupported or invalid_argument).
void check_planner(const AttentionShape& shape, const PlanOptions& options, const DeviceTableLimits& limits);

/// Room for every flat plan within the limits and, as far as partial states go, for shared spans whose parts leave up
/// to 15 states a row.
[[nodiscard]] Capacity planner_capacity(const detail::CostModel& cost, const DeviceTableLimits& limits);

/// All of PlannerInput but the tables.
[[nodiscard]] PlannerInput planner_input(const AttentionShape& shape, const PlanOptions& options,
                                         const DeviceTableLimits& limits, const Capacity& capacity,
                                         const detail::CostModel& cost);
/// Puts a step's tables into it; refuses those beyond the limits.
void set_tables(PlannerInput& in, const DeviceTables& tables, const DeviceTableLimits& limits);

}  // namespace headwater::cuda
