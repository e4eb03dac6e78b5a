// The attend kernel: a grid of as many blocks as fit, which take work until none is left. One piece of work is one work
// item of the plan and one KV head.
//
// The first piece of each block is its own index, later ones come from a queue in device memory that the merge sets
// back, so that a captured graph can be replayed. Items are sorted longest first; which block takes which
// changes no bits.
#pragma once

#include "cuda/few_rows.cuh"
#include "cuda/kernels.h"
#include "cuda/many_rows.cuh"

namespace headwater::cuda {

/// Tiles that a head size leaves registers for.
template <int kDqk, int kDvo>
inline constexpr bool kWide = kDqk > 128 || kDvo > 128;

/// Shared memory behind the tiles.
struct BlockState {
  Barriers barriers;
  int next;  ///< piece of work
};
inline constexpr int kStateBytes = 128;
static_assert(sizeof(BlockState) <= kStateBytes);

template <class T, int kDqk, int kDvo>
__host__ __device__ constexpr int shared_bytes(int stages) {
  int bytes = FewRows<T, kDqk, kDvo, 16>::shared_bytes(stages);
  if constexpr (kWide<kDqk, kDvo>) {
    const int many = ManyRows<T, kDqk, kDvo, 64>::shared_bytes();
    return (many > bytes ? many : bytes) + kStateBytes;
  } else {
    bytes = FewRows<T, kDqk, kDvo, 32>::shared_bytes(stages);
    const int many = ManyRows<T, kDqk, kDvo, 128>::shared_bytes();
    return (many > bytes ? many : bytes) + kStateBytes;
  }
}

__device__ __forceinline__ void init_barriers(Barriers& barriers) {
  constexpr int kFew = 12;
  const int i = static_cast<int>(threadIdx.x);
  if (i < kFew) init_barrier(barriers.few[0][i], 32);
  if (i >= kFew && i < kFew + 2) init_barrier(barriers.many[i - kFew], kThreads);
  publish_shared();
}

/// Attention of stacked rows [begin, begin + count) of an item.
template <class T, int kDqk, int kDvo>
__device__ __forceinline__ void attend_tile(const AttendParams& p, const detail::WorkItem& item, int head, int begin,
                                            int count, unsigned char* shared, Barriers& barriers, unsigned& phases) {
  if (count <= 8) {
    FewRows<T, kDqk, kDvo, 8>::attend(p, item, head, begin, count, shared, barriers, phases);
  } else if (count <= 16) {
    FewRows<T, kDqk, kDvo, 16>::attend(p, item, head, begin, count, shared, barriers, phases);
  } else if constexpr (kWide<kDqk, kDvo>) {
    ManyRows<T, kDqk, kDvo, 64>::attend(p, item, head, begin, count, shared, barriers, phases);
  } else if (count <= 32) {
    FewRows<T, kDqk, kDvo, 32>::attend(p, item, head, begin, count, shared, barriers, phases);
  } else if (count <= 64) {
    ManyRows<T, kDqk, kDvo, 64>::attend(p, item, head, begin, count, shared, barriers, phases);
  } else {
    ManyRows<T, kDqk, kDvo, 128>::attend(p, item, head, begin, count, shared, barriers, phases);
  }
}

template <class T, int kDqk, int kDvo>
__global__ void __launch_bounds__(kThreads, kWide<kDqk, kDvo> ? 1 : 2) attend(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr int kTile = kWide<kDqk, kDvo> ? 64 : 128;
  auto& state = *reinterpret_cast<BlockState*>(shared + shared_bytes<T, kDqk, kDvo>(p.stages) - kStateBytes);
  const int total = p.plan.header->num_items * p.num_kv_heads;
  release_dependents();
  init_barriers(state.barriers);
  __syncthreads();
  unsigned phases = 0;
  int work = static_cast<int>(blockIdx.x);
  while (work < total) {
    if (threadIdx.x == 0) state.next = static_cast<int>(gridDim.x) + atomicAdd(p.queue, 1);
    const detail::WorkItem item = p.plan.items[work / p.num_kv_heads];
    const int head = work % p.num_kv_heads;
    const int stacked = item.num_rows * p.group_size;
    for (int begin = 0; begin < stacked; begin += kTile) {
      attend_tile<T, kDqk, kDvo>(p, item, head, begin, min(kTile, stacked - begin), shared, state.barriers, phases);
      publish_shared();  // the next tile's bulk copies go where this one's states and rows were
      __syncthreads();
    }
    work = state.next;
    __syncthreads();
  }
}

template <class T, int kDqk, int kDvo>
AttendKernel make_kernel() {
  return {reinterpret_cast<const void*>(&attend<T, kDqk, kDvo>), kThreads, &shared_bytes<T, kDqk, kDvo>};
}

}  // namespace headwater::cuda
