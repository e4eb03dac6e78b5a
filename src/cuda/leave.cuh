// The end of a tile: its rows' states go to the output or, where a row has several states, to partial slots.
#pragma once

#include "cuda/rows.cuh"

namespace headwater::cuda {

/// Ends row n of a tile: stores `lse` (base 2; -inf: no keys). `factor` is what its O is to be multiplied by.
template <int kSize>
__device__ __forceinline__ void leave_lse(const AttendParams& p, const RowTile<kSize>& tile, bool partial, int dim,
                                          int n, float lse, float& factor) {
  if (partial) {
    p.partial_lse[tile.to[n] / dim] = lse;
  } else {
    factor *= add_sink(p.out, tile.head[n], lse);
    store_lse(p.out, tile.row[n], tile.head[n], lse);
  }
}

template <int kSize>
__device__ __forceinline__ void leave_o(const AttendParams& p, const RowTile<kSize>& tile, bool partial, int n, int d,
                                        float4 o) {
  if (partial) {
    *reinterpret_cast<float4*>(p.partial_o + tile.to[n] + d) = o;
  } else {
    store_output4(p.out, tile.to[n] + d, o);
  }
}

}  // namespace headwater::cuda
