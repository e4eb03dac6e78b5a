// CUDA's return codes as Error(device): "cudaMalloc: out of memory".
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "headwater/error.h"

namespace headwater::bench {

inline void require(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // is not to surface again in the next call
  throw Error(ErrorCode::device, std::string(call) + ": " + cudaGetErrorString(status));
}

}  // namespace headwater::bench
