// The table of attend kernels: one per (types, head sizes), each from a translation unit of its own that CMake writes
// from attend.cu.in. Which are built is the build's choice (HEADWATER_CUDA_HEAD_DIMS).
#pragma once

#include <string>

#include "headwater/options.h"

namespace headwater::cuda {

struct AttendKernel {
  const void* function = nullptr;
  int threads = 0;
  int (*shared_bytes)(int stages) = nullptr;
};

/// Types and head sizes of an instance. `fp8`: KV is fp8, else it has q's type.
struct KernelKey {
  DType q = DType::f16;
  bool fp8 = false;
  int head_dim_qk = 0;
  int head_dim_vo = 0;

  friend bool operator==(const KernelKey&, const KernelKey&) = default;
};

/// The kernel for a shape; nullptr where this build has none.
const AttendKernel* find_kernel(const AttentionShape& shape);

/// Head sizes of this build, for messages: "64, 128, 192/128".
std::string head_dims_built();

}  // namespace headwater::cuda
