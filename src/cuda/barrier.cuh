// Barriers in shared memory that count copies under way, and the bulk copy engine of Hopper.
//
// A tile of KV is there when its barrier's phase ends: its loaders have arrived, and all bytes announced have come.
// Ordinary asynchronous copies (sm_80) take part by arriving when they are done.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx.cuh"

namespace headwater::cuda {

inline constexpr int kThreads = 128;  ///< of a block of the attend kernels
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kMostStages = 3;  ///< of a warp of the few-rows kernel

using Barrier = std::uint64_t;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
inline constexpr bool kHasBulkCopies = true;
#else
inline constexpr bool kHasBulkCopies = false;
#endif

/// A block's barriers. Their phases go on from item to item, so each thread remembers all parities, a bit each.
struct Barriers {
  Barrier few[kWarps][kMostStages];  ///< few rows: of a warp's stages
  Barrier many[2];                   ///< many rows: of the stages
};
inline constexpr int kManyPhase = 8;  ///< bit of many[0]; those of few[warp] come first

__device__ __forceinline__ void init_barrier(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(Barrier& barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(shared_address(&barrier))
               : "memory");
}

/// Arrives when all asynchronous copies that this thread has started are done.
__device__ __forceinline__ void arrive_after_copies(Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(shared_address(&barrier)) : "memory");
}

/// Arrives and announces bytes of bulk copies, without which the phase does not end.
__device__ __forceinline__ void arrive_expecting(Barrier& barrier, int bytes) {
  asm volatile(
      "{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}\n" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}

/// True for one lane of the warp, which the compiler then knows to be alone.
__device__ __forceinline__ bool elect_lane() {
  std::uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(elected));
  return elected != 0;
}

/// Waits for the end of the phase of this parity.
__device__ __forceinline__ void wait(Barrier& barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}\n" ::
          "r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}\n" ::"r"(
          shared_address(&barrier)),
      "r"(parity)
      : "memory");
#endif
}

/// A box of a cache, from (element, token in the page, head, page) on, to shared memory; what lies outside is zero.
__device__ __forceinline__ void copy_box(void* to, const TensorMap& map, int element, int token, int head, int page,
                                         Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];\n" ::"r"(shared_address(to)),
      "l"(&map), "r"(element), "r"(token), "r"(head), "r"(page), "r"(shared_address(&barrier))
      : "memory");
}

}  // namespace headwater::cuda
