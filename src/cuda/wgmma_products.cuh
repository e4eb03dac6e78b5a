// The products of many rows by warpgroup instructions (sm_90a). They run while this warpgroup goes on: the scores of
// the second block are multiplied during the first one's softmax, and its weights times V during the second's.
#pragma once

#include "cuda/rows.cuh"
#include "cuda/wgmma.cuh"

namespace headwater::cuda {

template <class Element, int kDqk, int kDvo, int kRows>
struct WgmmaProducts {
  static constexpr int kKeys = 64;
  static constexpr int kBlocks = kRows / 64;
  using QLayout = TileLayout<kRows, kDqk>;
  using KLayout = TileLayout<kKeys, kDqk>;
  using VLayout = TileLayout<kKeys, kDvo>;

  template <class Soften>
  __device__ __forceinline__ static void attend(const unsigned char* q, const unsigned char* k, const unsigned char* v,
                                                float (&o)[kBlocks][kDvo / 8][4], Soften&& soften) {
    float s[kBlocks][kKeys / 8][4];
    begin_products();
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int step = 0; step < kDqk / 16; ++step) {
        const int block = step / 4;
        const int in_block = step % 4 * 32;
        multiply_rows<Element>(s[m], operand(q + block * QLayout::kBlockBytes + m * 64 * 128 + in_block, 0),
                               operand(k + block * KLayout::kBlockBytes + in_block, 0), step > 0);
      }
      commit_products();
    }
    std::uint32_t a[kBlocks][kKeys / 16][4];
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      // What is under way: the scores of later blocks, and the previous block's O.
      if (m == 0) {
        wait_products<kBlocks - 1>();
      } else {
        wait_products<1>();
      }
      pin(s[m]);
      soften(m, s[m]);
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) pack_weights<Element>(s[m], step, a[m][step]);
      begin_products();
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
        for (int block = 0; block < kDvo / 64; ++block) {
          multiply_columns<Element>(*reinterpret_cast<float(*)[8][4]>(&o[m][block * 8]), a[m][step],
                                    operand(v + block * VLayout::kBlockBytes + step * 16 * 128, VLayout::kBlockBytes));
        }
      }
      commit_products();
    }
    wait_products<0>();
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int block = 0; block < kDvo / 64; ++block) pin(*reinterpret_cast<float(*)[8][4]>(&o[m][block * 8]));
    }
  }
};

}  // namespace headwater::cuda
