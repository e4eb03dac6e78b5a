// How tiles lie in shared memory, as offsets of 16-byte chunks of rows. Matrix loads take eight rows at once, which
// must lie in eight groups of banks: by a swizzle where a row is a multiple of 128 bytes (what the bulk copy engine
// writes and warpgroup products read), else by padding.
#pragma once

#include <type_traits>

namespace headwater::cuda {

/// One row after the other.
template <int kRows, int kRowBytes>
struct PlainLayout {
  static constexpr int kBytes = kRows * kRowBytes;
  __device__ __forceinline__ static int at(int row, int chunk) { return row * kRowBytes + chunk * 16; }
};

/// 16 bytes after each row.
template <int kRows, int kRowBytes>
struct PaddedLayout {
  static constexpr int kBytes = kRows * (kRowBytes + 16);
  __device__ __forceinline__ static int at(int row, int chunk) { return row * (kRowBytes + 16) + chunk * 16; }
};

/// Blocks of 128 bytes x kRows, each row's eight chunks permuted by chunk ^ (row % 8). Starts at a multiple of 1024.
template <int kRows, int kRowBytes>
struct SwizzledLayout {
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kBlockBytes = kRows * 128;
  __device__ __forceinline__ static int at(int row, int chunk) {
    return chunk / 8 * kBlockBytes + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
  }
};

/// Of a tile of 16-bit elements that products read.
template <int kRows, int kDim>
using TileLayout = std::conditional_t<kDim % 64 == 0, SwizzledLayout<kRows, kDim * 2>, PaddedLayout<kRows, kDim * 2>>;

/// Of a tile as it is loaded: fp8 lies plain, and is widened into a TileLayout.
template <bool kFp8, int kRows, int kDim>
using LoadLayout = std::conditional_t<kFp8, PlainLayout<kRows, kDim>, TileLayout<kRows, kDim>>;

}  // namespace headwater::cuda
