// What this build's kernels can serve, and how they are launched on the current device.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/kernels.h"
#include "headwater/options.h"

namespace headwater::cuda {

/// The kernel of a shape; throws Error (unsupported) with the reason.
const AttendKernel& supported_kernel(const AttentionShape& shape);

/// Everything that a kernel of this build must refuse, with the reason.
void check_supported_plan(const AttentionShape& shape, const PlanOptions& options,
                          std::span<const std::int32_t> page_sizes);

struct LaunchShape {
  int stages = 0;
  int shared_bytes = 0;
  int num_blocks = 0;
  int most_merge_blocks = 0;
  bool hopper = false;  ///< the kernels were built for sm_90 or newer
};
/// For the current device; also raises the kernel's limit of shared memory.
LaunchShape launch_shape(const AttendKernel& kernel);

}  // namespace headwater::cuda
