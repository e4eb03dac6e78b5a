// The products of many rows by mma.sync (sm_80 and newer).
#pragma once

#include "cuda/rows.cuh"

namespace headwater::cuda {

template <class Element, int kDqk, int kDvo, int kRows>
struct MmaProducts {
  static constexpr int kKeys = 64;
  static constexpr int kBlocks = kRows / 64;
  using QLayout = TileLayout<kRows, kDqk>;
  using KLayout = TileLayout<kKeys, kDqk>;
  using VLayout = TileLayout<kKeys, kDvo>;

  /// o += softmax step of q k^T, times v; `soften(m, s)` turns scores of block m into weights.
  template <class Soften>
  __device__ __forceinline__ static void attend(const unsigned char* q, const unsigned char* k, const unsigned char* v,
                                                float (&o)[kBlocks][kDvo / 8][4], Soften&& soften) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = static_cast<int>(threadIdx.x / 32);
    float s[kBlocks][kKeys / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kDqk / 16; ++step) {
      std::uint32_t a[kBlocks][4];
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        load_matrices(a[m], q + QLayout::at(m * 64 + warp * 16 + lane % 16, step * 2 + lane / 16));
      }
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        std::uint32_t b[4];
        load_matrices(b, k + KLayout::at(n * 8 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) {
          multiply<Element>(s[m][n], a[m], b[0], b[1]);
          multiply<Element>(s[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) soften(m, s[m]);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      std::uint32_t a[kBlocks][4];
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) pack_weights<Element>(s[m], step, a[m]);
#pragma unroll
      for (int d = 0; d < kDvo / 8; d += 2) {
        std::uint32_t b[4];
        load_matrices_transposed(b, v + VLayout::at(step * 16 + lane % 16, d + lane / 16));
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) {
          multiply<Element>(o[m][d], a[m], b[0], b[1]);
          multiply<Element>(o[m][d + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
};

}  // namespace headwater::cuda
