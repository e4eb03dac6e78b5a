#include "cuda/launch.h"

#include <cuda_runtime_api.h>

#include <bit>
#include <string>
#include <vector>

#include "cuda/error.h"
#include "cuda/merge.h"
#include "cuda/page_patches.h"
#include "cuda/params.h"
#include "headwater/cuda.h"
#include "plan/validate.h"

namespace headwater::cuda {
namespace {

constexpr int kMaxPageSize = 256;

[[noreturn]] void unsupported(const std::string& why) {
  throw Error(ErrorCode::unsupported, why);
}

}  // namespace

const AttendKernel& supported_kernel(const AttentionShape& shape) {
  detail::check_shape(shape);
  const std::string types =
      "q_dtype = " + std::string(name_of(shape.q_dtype)) + ", kv_dtype = " + std::string(name_of(shape.kv_dtype));
  if (shape.q_dtype != DType::f16 && shape.q_dtype != DType::bf16) unsupported(types + ": on CUDA q is f16 or bf16");
  if (shape.kv_dtype != shape.q_dtype && shape.kv_dtype != DType::f8e4m3) {
    unsupported(types + ": on CUDA KV has q's type or is f8e4m3");
  }
  const AttendKernel* kernel = find_kernel(shape);
  if (kernel == nullptr) {
    unsupported("head_dim_qk = " + std::to_string(shape.head_dim_qk) + ", head_dim_vo = " +
                std::to_string(shape.head_dim_vo) + ": this build has CUDA kernels for " + head_dims_built());
  }
  if (shape.group_size() > 128) {
    unsupported("num_qo_heads / num_kv_heads = " + std::to_string(shape.group_size()) +
                ", expected at most 128 on CUDA");
  }
  return *kernel;
}

void check_supported_plan(const AttentionShape& shape, const PlanOptions& options,
                          std::span<const std::int32_t> page_sizes) {
  supported_kernel(shape);
  detail::check_options(options);
  if (options.batch_invariant && options.invariant_chunk % 64 != 0) {
    unsupported("options.invariant_chunk = " + std::to_string(options.invariant_chunk) +
                ", expected a multiple of 64 on CUDA");
  }
  for (const std::int32_t size : page_sizes) {
    if (size < 1 || size > kMaxPageSize || !std::has_single_bit(static_cast<std::uint32_t>(size))) {
      unsupported("page_size = " + std::to_string(size) + ", expected a power of two in 1..256 on CUDA");
    }
  }
  if (page_sizes.size() > kMaxViews) {
    unsupported(std::to_string(page_sizes.size()) + " levels, expected at most " + std::to_string(kMaxViews) +
                " on CUDA");
  }
}

void check_supported(const AttentionShape& shape, const PlanOptions& options, const Batch& batch) {
  std::vector<std::int32_t> page_sizes;
  for (const Level& level : batch.levels) page_sizes.push_back(level.kv.page_size);
  if (batch.levels.empty()) page_sizes.push_back(batch.kv.page_size);
  check_supported_plan(shape, options, page_sizes);
}

LaunchShape launch_shape(const AttendKernel& kernel) {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  int multiprocessors = 0;
  int most_shared = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "cudaDeviceGetAttribute");
  LaunchShape shape;
  shape.stages = 3;
  shape.shared_bytes = kernel.shared_bytes(shape.stages);
  if (shape.shared_bytes > most_shared) {
    shape.stages = 2;
    shape.shared_bytes = kernel.shared_bytes(shape.stages);
  }
  if (shape.shared_bytes > most_shared) {
    unsupported("the kernel needs " + std::to_string(shape.shared_bytes) + " bytes of shared memory, this device has " +
                std::to_string(most_shared));
  }
  check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes),
        "cudaFuncSetAttribute");
  int each = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel.function, kernel.threads,
                                                      static_cast<std::size_t>(shape.shared_bytes)),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  if (each == 0) unsupported("the kernel does not fit this device");
  shape.num_blocks = each * multiprocessors;
  shape.most_merge_blocks = 8 * multiprocessors;
  // What counts is what the kernels were built from: code for older GPUs, translated by the driver, knows neither.
  shape.hopper = true;
  for (const void* function : {kernel.function, merge_kernel()}) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, function), "cudaFuncGetAttributes");
    shape.hopper = shape.hopper && attributes.ptxVersion >= 90;
  }
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, patch_kernel()),
        "cudaFuncGetAttributes");  // loads it: uploads allocate nothing
  return shape;
}

int num_devices() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

}  // namespace headwater::cuda
