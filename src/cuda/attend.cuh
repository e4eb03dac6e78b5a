// The attend kernel: a grid of as many blocks as fit, which take work until none is left. One piece of work is one work
// item of the plan and one KV head.
//
// The first piece of each block is its own index, later ones come from a queue in device memory that the last block to
// leave sets back, so that a captured graph can be replayed. Items are sorted longest first; which block takes which
// changes no bits.
#pragma once

#include "cuda/few_rows.cuh"
#include "cuda/kernels.h"
#include "cuda/many_rows.cuh"

namespace headwater::cuda {

/// Tiles that a head size leaves registers for.
template <int kDqk, int kDvo>
inline constexpr bool kWide = kDqk > 128 || kDvo > 128;

/// Shared memory behind the tiles: the block's next piece of work.
inline constexpr int kSlack = 16;

template <class T, int kDqk, int kDvo>
__host__ __device__ constexpr int shared_bytes(int stages) {
  int bytes = FewRows<T, kDqk, kDvo, 16>::shared_bytes(stages);
  if constexpr (kWide<kDqk, kDvo>) {
    const int many = ManyRows<T, kDqk, kDvo, 64>::shared_bytes();
    return (many > bytes ? many : bytes) + kSlack;
  } else {
    bytes = FewRows<T, kDqk, kDvo, 32>::shared_bytes(stages);
    const int many = ManyRows<T, kDqk, kDvo, 128>::shared_bytes();
    return (many > bytes ? many : bytes) + kSlack;
  }
}

/// Attention of stacked rows [begin, begin + count) of an item.
template <class T, int kDqk, int kDvo>
__device__ __forceinline__ void attend_tile(const AttendParams& p, const detail::WorkItem& item, int head, int begin,
                                            int count, unsigned char* shared) {
  if (count <= 8) {
    FewRows<T, kDqk, kDvo, 8>::attend(p, item, head, begin, count, shared);
  } else if (count <= 16) {
    FewRows<T, kDqk, kDvo, 16>::attend(p, item, head, begin, count, shared);
  } else if constexpr (kWide<kDqk, kDvo>) {
    ManyRows<T, kDqk, kDvo, 64>::attend(p, item, head, begin, count, shared);
  } else if (count <= 32) {
    FewRows<T, kDqk, kDvo, 32>::attend(p, item, head, begin, count, shared);
  } else if (count <= 64) {
    ManyRows<T, kDqk, kDvo, 64>::attend(p, item, head, begin, count, shared);
  } else {
    ManyRows<T, kDqk, kDvo, 128>::attend(p, item, head, begin, count, shared);
  }
}

template <class T, int kDqk, int kDvo>
__global__ void __launch_bounds__(kThreads, kWide<kDqk, kDvo> ? 1 : 2) attend(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr int kTile = kWide<kDqk, kDvo> ? 64 : 128;
  int& next = *reinterpret_cast<int*>(shared + shared_bytes<T, kDqk, kDvo>(p.stages) - kSlack);
  const Header& header = p.plan.header();
  const auto* items = p.plan.at<detail::WorkItem>(header.items);
  const int heads = header.heads_per_item;
  const int total = header.num_items * heads;
  release_dependents();
  int work = static_cast<int>(blockIdx.x);
  while (work < total) {
    if (threadIdx.x == 0) next = static_cast<int>(gridDim.x) + atomicAdd(p.queue, 1);
    const detail::WorkItem item = items[work / heads];
    const int head = item.kv_head_begin + work % heads;
    const int stacked = item.num_rows * p.group_size;
    for (int begin = 0; begin < stacked; begin += kTile) {
      attend_tile<T, kDqk, kDvo>(p, item, head, begin, min(kTile, stacked - begin), shared);
      __syncthreads();
    }
    work = next;
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  if (atomicAdd(p.queue + 1, 1) == static_cast<int>(gridDim.x) - 1) {
    p.queue[0] = 0;
    p.queue[1] = 0;
  }
}

template <class T, int kDqk, int kDvo>
AttendKernel make_kernel() {
  return {reinterpret_cast<const void*>(&attend<T, kDqk, kDvo>), kThreads, &shared_bytes<T, kDqk, kDvo>,
          kWide<kDqk, kDvo> ? 64 : 128};
}

}  // namespace headwater::cuda
