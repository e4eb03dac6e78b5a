// How a block comes by its next piece of work: from a counter in device memory, which the merge sets back, so that a
// captured graph can be replayed.
//
// Blocks claim late, or a block with long work would keep a piece from idle ones; but early enough that counter and
// item come while the last tiles are worked on. What is copied ahead: the item, to shared memory.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx.cuh"

namespace headwater::cuda {

/// In shared memory.
struct Work {
  DeviceItem items[2];  ///< the one at hand and the next, by turns
  int piece;            ///< the next
};

/// Starts copying the item of a piece. By the first lanes of a block; past the last item some other one comes.
__device__ __forceinline__ void fetch_item(const AttendParams& p, int piece, DeviceItem& to) {
  if (threadIdx.x >= sizeof(DeviceItem) / 16) return;
  const auto* from =
      reinterpret_cast<const unsigned char*>(p.plan.items + min(piece / p.num_kv_heads, p.plan.max_items - 1));
  const int at = static_cast<int>(threadIdx.x) * 16;
  copy_async16(reinterpret_cast<unsigned char*>(&to) + at, from + at);
}

class NextWork {
 public:
  /// `wanted`: false while further tiles of the item at hand follow.
  __device__ __forceinline__ NextWork(const AttendParams& p, Work& work, int slot, bool wanted)
      : p_(p), work_(work), slot_(slot), wanted_(wanted) {}

  /// By all threads, once, some tiles before the end: every item has tokens, so there is one.
  __device__ __forceinline__ void claim() {
    if (wanted_ && threadIdx.x == 0) claimed_ = static_cast<int>(gridDim.x) + atomicAdd(p_.queue, 1);
  }
  /// By all threads, once, after claim: the item is on its way. It is there after wait_copies and a barrier.
  __device__ __forceinline__ void fetch() {
    if (!wanted_ || threadIdx.x >= 32) return;
    const int piece = __shfl_sync(0xffffffffU, claimed_, 0);
    if (threadIdx.x == 0) work_.piece = piece;
    fetch_item(p_, piece, work_.items[slot_]);
  }

 private:
  const AttendParams& p_;
  Work& work_;
  int slot_;
  bool wanted_;
  int claimed_ = 0;
};

}  // namespace headwater::cuda
