// The attend kernel: a grid of as many blocks as fit, which take work until none is left. One piece of work is one work
// item of the plan and one KV head. A block's first piece is its own index, the others come from a queue (work.cuh).
// Items are sorted longest first; which block takes which changes no bits.
#pragma once

#include "cuda/few_rows.cuh"
#include "cuda/kernels.h"
#include "cuda/many_rows.cuh"
#include "cuda/work.cuh"

namespace headwater::cuda {

/// Tiles that a head size leaves registers for.
template <int kDqk, int kDvo>
inline constexpr bool kWide = kDqk > 128 || kDvo > 128;
/// Stacked rows of the largest tile.
template <int kDqk, int kDvo>
inline constexpr int kTileRows = kWide<kDqk, kDvo> ? 64 : 128;

/// In batch-invariant mode every tile is one of the many-rows kernel with so many rows.
inline constexpr int kInvariantRows = 64;

/// Shared memory behind the tiles.
struct BlockState {
  Barriers barriers;
  Work work;
};
inline constexpr int kStateBytes = 512;
static_assert(sizeof(BlockState) <= kStateBytes);

template <class T, int kDqk, int kDvo>
__host__ __device__ constexpr int shared_bytes(int stages) {
  const int few = FewRows<T, kDqk, kDvo, 16>::shared_bytes(stages);
  const int many = ManyRows<T, kDqk, kDvo, kTileRows<kDqk, kDvo>>::shared_bytes();
  return (many > few ? many : few) + kStateBytes;
}

/// `arrivals` of each warp.
__device__ __forceinline__ void init_barriers(Barriers& barriers, int arrivals) {
  constexpr int kFew = kWarps * kMostStages;
  const int i = static_cast<int>(threadIdx.x);
  if (i < kFew) init_barrier(barriers.few[i / kMostStages][i % kMostStages], arrivals);
  if (i >= kFew && i < kFew + 2) init_barrier(barriers.many[i - kFew], kWarps * arrivals);
  publish_shared();
}

/// Attention of stacked rows [begin, begin + count) of an item.
template <class T, int kDqk, int kDvo>
__device__ __forceinline__ void attend_tile(const AttendParams& p, const DeviceItem& item, int head, int begin,
                                            int count, unsigned char* shared, BlockState& state, NextWork& next,
                                            unsigned& phases) {
  const auto run = [&](auto kernel) {
    decltype(kernel)::type::attend(p, item, head, begin, count, shared, state.barriers, next, phases);
  };
  // In batch-invariant mode one kernel serves all: its arithmetic for a row does not depend on the others. How this is
  // written decides where the compiler puts the kernels' code, and code far from the start comes late: with 64 rows put
  // before 128, calls with many rows took 1.1 to 1.3 times as long on an H200.
  const int rows = p.invariant ? kInvariantRows : count;
  if (rows <= 8) {
    run(std::type_identity<FewRows<T, kDqk, kDvo, 8>>());
  } else if (rows <= 16) {
    run(std::type_identity<FewRows<T, kDqk, kDvo, 16>>());
  } else if (kWide<kDqk, kDvo> || rows <= 64) {
    run(std::type_identity<ManyRows<T, kDqk, kDvo, 64>>());
  } else {
    run(std::type_identity<ManyRows<T, kDqk, kDvo, kTileRows<kDqk, kDvo>>>());
  }
}

template <class T, int kDqk, int kDvo>
__global__ void __launch_bounds__(kThreads, kWide<kDqk, kDvo> ? 1 : 2) attend(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int tile = p.invariant ? kInvariantRows : kTileRows<kDqk, kDvo>;
  auto& state = *reinterpret_cast<BlockState*>(shared + shared_bytes<T, kDqk, kDvo>(p.stages) - kStateBytes);
  int piece = static_cast<int>(blockIdx.x);
  fetch_item(p, piece, state.work.items[0]);
  const int total = p.plan.header->num_items * p.num_kv_heads;
  release_dependents();
  init_barriers(state.barriers, KvLoader<T, kDqk, kDvo, kTileKeys>::kArrivals);
  wait_copies();
  __syncthreads();
  unsigned phases = 0;
  for (int slot = 0; piece < total; slot = 1 - slot) {
    const DeviceItem& item = state.work.items[slot];
    const int head = piece % p.num_kv_heads;
    const int stacked = item.num_rows * p.group_size;
    for (int begin = 0; begin < stacked; begin += tile) {
      NextWork next(p, state.work, 1 - slot, begin + tile >= stacked);
      attend_tile<T, kDqk, kDvo>(p, item, head, begin, min(tile, stacked - begin), shared, state, next, phases);
      wait_copies();
      publish_shared();  // the next tile's bulk copies go where this one's states and rows were
      __syncthreads();
    }
    piece = state.work.piece;
  }
}

template <class T, int kDqk, int kDvo>
AttendKernel make_kernel() {
  return {reinterpret_cast<const void*>(&attend<T, kDqk, kDvo>), kThreads, &shared_bytes<T, kDqk, kDvo>};
}

}  // namespace headwater::cuda
