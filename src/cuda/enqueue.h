// One kernel onto a stream: the launch of everything that is neither attend nor merge_rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cpu/validate.h"
#include "cuda/error.h"
#include "headwater/cuda.h"

namespace headwater::cuda {

/// Launches `kernel`, whose one argument is a Params. Throws Error (device) under the name that the caller knows.
template <class Params>
void enqueue(const void* kernel, dim3 blocks, int threads, Params params, Stream stream, const char* name) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  void* arguments[] = {&params};
  check(cudaLaunchKernelExC(&config, kernel, arguments), name);
}

/// An array that only the device can read.
inline void check_device_array(const char* name, const void* data, std::size_t alignment) {
  if (data == nullptr) cpu::refuse(ErrorCode::invalid_argument, name, "nullptr", "device memory");
  const auto misaligned = reinterpret_cast<std::uintptr_t>(data) % alignment;
  if (misaligned != 0) {
    cpu::refuse(ErrorCode::invalid_argument, name, "an address " + std::to_string(misaligned) + " bytes off",
                "alignment to " + std::to_string(alignment) + " bytes");
  }
}

inline bool is_aligned(const void* p, std::int64_t bytes) noexcept {
  return reinterpret_cast<std::uintptr_t>(p) % static_cast<std::uintptr_t>(bytes) == 0;
}

}  // namespace headwater::cuda
