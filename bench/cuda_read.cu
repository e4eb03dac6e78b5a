// Reading memory on a CUDA device; see cuda_read.h.
#include <cstdint>

#include "bench/cuda_error.h"
#include "bench/cuda_read.h"

namespace headwater::bench {
namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 8;  ///< 16-byte loads that a thread has under way
static_assert(kReadUnit == kThreads * kVectors * sizeof(uint4));

__global__ void __launch_bounds__(kThreads) read_unit(const uint4* data, unsigned* sink) {
  const uint4* at = data + static_cast<std::size_t>(blockIdx.x) * kThreads * kVectors + threadIdx.x;
  uint4 x[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) x[i] = __ldcs(at + i * kThreads);
  unsigned all = 0xffffffffU;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) all &= x[i].x & x[i].y & x[i].z & x[i].w;
  if (all == 0x12345678U) *sink = all;
}

}  // namespace

void read_device(const void* data, std::size_t bytes, unsigned* sink, cuda::Stream stream) {
  const auto blocks = static_cast<unsigned>(bytes / kReadUnit);
  read_unit<<<blocks, kThreads, 0, stream>>>(static_cast<const uint4*>(data), sink);
  require(cudaGetLastError(), "read_device");
}

}  // namespace headwater::bench
