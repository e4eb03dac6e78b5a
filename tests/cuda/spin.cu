// See spin.h.
#include <cuda_runtime.h>

#include "cuda/spin.h"

namespace headwater::cuda_test {
namespace {

constexpr int kSharedBytes = 96 * 1024;

__global__ void spin_kernel(unsigned microseconds, unsigned seed) {
  const unsigned hash = (blockIdx.x * 2654435761U) ^ (seed * 2246822519U);
  const unsigned long long wanted = 1'000ULL * ((hash >> 8) % (microseconds + 1));
  unsigned long long begin = 0;
  unsigned long long now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < wanted);
}

}  // namespace

void spin(int blocks, int microseconds, unsigned seed, CUstream_st* stream) {
  static const cudaError_t raised =
      cudaFuncSetAttribute(spin_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  (void)raised;
  spin_kernel<<<blocks, 128, kSharedBytes, stream>>>(static_cast<unsigned>(microseconds), seed);
}

}  // namespace headwater::cuda_test
