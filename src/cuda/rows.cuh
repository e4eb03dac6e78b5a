// The query rows of a tile, and scores and masks: what both attend kernels have in common.
//
// *Stacked* rows are (query row, query head of one KV head) pairs: stacked row n of an item is query row n / group_size
// and query head n % group_size of the KV head at hand. A tile is 8 to 128 of them.
#pragma once

#include "cuda/kv_loader.cuh"
#include "cuda/output.cuh"

namespace headwater::cuda {

/// Weights of 16 rows x 16 keys (fragments 2 step and 2 step + 1 of a row block) as the first operand of a product.
template <class Element, int kCount>
__device__ __forceinline__ void pack_weights(const float (&s)[kCount][4], int step, std::uint32_t (&a)[4]) {
  a[0] = pack<Element>(s[2 * step][0], s[2 * step][1]);
  a[1] = pack<Element>(s[2 * step][2], s[2 * step][3]);
  a[2] = pack<Element>(s[2 * step + 1][0], s[2 * step + 1][1]);
  a[3] = pack<Element>(s[2 * step + 1][2], s[2 * step + 1][3]);
}

/// A tile's stacked rows: what they see, where their q lies and where their results go. Absent rows have lo = hi = 0
/// and row = -1.
template <int kSize>
struct RowTile {
  static_assert(kSize <= kThreads);
  std::int64_t q_offset[kSize];  ///< bytes
  std::int64_t to[kSize];        ///< elements in the output, or in the partial states
  std::int32_t lo[kSize];
  std::int32_t hi[kSize];
  std::int32_t pos[kSize];
  std::int32_t row[kSize];
  std::int32_t head[kSize];  ///< query head
  float slope[kSize];
};

/// Fills the tile, a thread a row. In two steps, between which other work can hide the first one's latency.
template <int kSize, int kDvo>
class RowFiller {
 public:
  __device__ __forceinline__ RowFiller(const AttendParams& p, const DeviceItem& item, int head, int begin, int count)
      : n_(static_cast<int>(threadIdx.x)) {
    if (n_ >= count) return;
    const int j = (begin + n_) / p.group_size;
    head_ = head * p.group_size + (begin + n_) - j * p.group_size;
    row_ = j == 0 ? item.first_row : p.plan.item_rows[item.row_begin + j];
    slot_ = item.partial_begin < 0 ? -1 : item.partial_begin + j;
  }

  __device__ __forceinline__ void fill(RowTile<kSize>& tile, const AttendParams& p) const {
    if (n_ >= kSize) return;
    tile.q_offset[n_] = row_.row * p.q_row_stride + head_ * p.q_head_stride;
    tile.to[n_] = slot_ < 0 ? row_.row * p.out.row_stride + head_ * p.out.head_stride
                            : (std::int64_t{slot_} * p.num_qo_heads + head_) * kDvo;
    tile.lo[n_] = row_.lo;
    tile.hi[n_] = row_.hi;
    tile.pos[n_] = row_.pos;
    tile.row[n_] = row_.row;
    tile.head[n_] = head_;
    tile.slope[n_] = row_.row >= 0 && p.alibi_slopes != nullptr ? p.alibi_slopes[head_] * kLog2E : 0.0F;
  }

 private:
  int n_;
  ItemRow row_{-1, 0, 0, 0};
  std::int32_t head_ = 0;
  std::int32_t slot_ = -1;
};

/// q of a tile's rows, [kSize, kDim]; absent rows are zero. By all threads.
template <int kDim, class Layout, int kSize>
__device__ __forceinline__ void load_q(unsigned char* to, const RowTile<kSize>& tile, const AttendParams& p) {
  constexpr int kChunks = kDim / 8;
  const auto load = [&](int c, bool aligned) {
    const int n = c / kChunks;
    const int chunk = c % kChunks;
    const bool present = tile.row[n] >= 0;
    copy16<2>(to + Layout::at(n, chunk), present ? p.q + tile.q_offset[n] + chunk * 16 : p.q, aligned, present);
  };
  const int first = static_cast<int>(threadIdx.x);
  if (p.q_aligned) [[likely]] {
#pragma unroll(kSize <= 32 ? 1 : 4)
    for (int c = first; c < kSize * kChunks; c += kThreads) load(c, true);
  } else {
#pragma unroll 1
    for (int c = first; c < kSize * kChunks; c += kThreads) load(c, false);
  }
}

/// Whether key at position `pos` is seen by the row.
__device__ __forceinline__ bool sees(std::int32_t lo, std::int32_t hi, std::int32_t sinks, std::int32_t pos) {
  return pos < hi && (pos >= lo || pos < sinks);
}

/// Clears those of the V rows [at, at + 16), of the item's tokens from `first` on, that no row of the tile sees or that
/// lie before or past the item: memory nobody sees may hold NaN, which a weight of zero does not hide. (With explicit
/// levels a page may end before its rows' keys do.) By one warp.
template <int kDim, class Layout, int kSize>
__device__ __forceinline__ void clear_unseen(unsigned char* v, int at, const RowTile<kSize>& tile, std::int32_t sinks,
                                             const DeviceItem& item, std::int32_t first) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int32_t token = first + lane % kTileKeys;
  const std::int32_t end = item.pos_begin + item.num_tokens;
  bool seen = false;
  for (int n = lane / kTileKeys; n < kSize; n += 2) {
    seen = seen || (token >= item.lead && sees(tile.lo[n], min(tile.hi[n], end), sinks, item.pos_begin + token));
  }
  const unsigned votes = __ballot_sync(0xffffffffU, seen);
  const unsigned keys = (votes | votes >> kTileKeys) & 0xffffU;
  if (keys == 0xffffU) return;
  for (int c = lane; c < kTileKeys * (kDim / 8); c += 32) {
    const int row = c / (kDim / 8);
    if ((keys >> row & 1U) == 0) {
      *reinterpret_cast<uint4*>(v + Layout::at(at + row, c % (kDim / 8))) = uint4{0, 0, 0, 0};
    }
  }
  __syncwarp();
}

/// Rows [at, at + 16) of fp8, which lie plain, to rows of 16-bit elements, by one warp.
template <class Element, int kDim, class Layout>
__device__ __forceinline__ void widen_rows(unsigned char* to, int at, const unsigned char* from) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < kTileKeys * kDim / 16 / 32; ++i) {
    const int c = lane + 32 * i;
    const int row = at + c / (kDim / 16);
    const int chunk = c % (kDim / 16);
    const uint4 raw = *reinterpret_cast<const uint4*>(from + row * kDim + chunk * 16);
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    std::uint32_t wide[8];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      wide[2 * w] = widen_fp8<Element>(static_cast<std::uint16_t>(words[w] & 0xffffU));
      wide[2 * w + 1] = widen_fp8<Element>(static_cast<std::uint16_t>(words[w] >> 16));
    }
    *reinterpret_cast<uint4*>(to + Layout::at(row, 2 * chunk)) = uint4{wide[0], wide[1], wide[2], wide[3]};
    *reinterpret_cast<uint4*>(to + Layout::at(row, 2 * chunk + 1)) = uint4{wide[4], wide[5], wide[6], wide[7]};
  }
}

/// A score in base 2: scale, cap, ALiBi. `scale` holds log2(e) unless there is a cap.
__device__ __forceinline__ float score(float product, float scale, float cap, float slope, std::int32_t distance) {
  float x = product * scale;
  if (cap > 0.0F) {
    // tanh y = 1 - 2 / (1 + e^(2 y)), exact at both ends: e^(2 y) = 0 and infinity. Near zero its absolute error, times
    // a great cap, would be too much: there the series.
    const float y = x * __frcp_rn(cap);
    const float tanh = fabsf(y) < 0.02F ? y - y * y * y * (1.0F / 3.0F)
                                        : 1.0F - __fdividef(2.0F, 1.0F + exp2_fast(y * (2.0F * kLog2E)));
    x = cap * kLog2E * tanh;
  }
  return x + slope * static_cast<float>(distance);
}

/// Factor of q.k for one KV head (see score).
__device__ __forceinline__ float scale_of(const AttendParams& p, int head) {
  float scale = p.score_scale;
  if (p.k_scale.data != nullptr) scale *= p.k_scale.data[head * p.k_scale.stride];
  return p.soft_cap > 0.0F ? scale : scale * kLog2E;
}

}  // namespace headwater::cuda
