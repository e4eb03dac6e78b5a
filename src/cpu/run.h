// Inside of cpu::run, for tests that look at single items.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"

namespace headwater::cpu {

/// Checks `args` against the plan; throws Error before anything is written.
void check_run_args(const detail::PlanData& plan, const RunArgs& args);

/// What kernels read. The arguments must have been checked.
AttendParams make_params(const detail::PlanData& plan, const RunArgs& args) noexcept;

/// K and V bytes that an item reads: each of its tokens once per KV head.
std::int64_t kv_bytes_of(const AttentionShape& shape, const detail::WorkItem& item) noexcept;

}  // namespace headwater::cpu
