// The query rows of a tile, and KV rows on their way to shared memory: what both attend kernels have in common.
//
// *Stacked* rows are (query row, query head of one KV head) pairs: stacked row n of an item is query row n / group_size
// and query head n % group_size of the KV head at hand. A tile is 8 to 128 of them.
#pragma once

#include "cuda/output.cuh"
#include "cuda/params.h"
#include "cuda/ptx.cuh"

namespace headwater::cuda {

inline constexpr int kThreads = 128;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kTileKeys = 16;  ///< KV rows that a warp loads at once
inline constexpr int kPad = 16;       ///< bytes after each row in shared memory: eight rows lie in eight bank groups

/// Rows of kBytes bytes in shared memory with kPad bytes after each.
template <int kBytes>
struct PaddedLayout {
  __device__ __forceinline__ static int at(int row, int chunk) { return row * (kBytes + kPad) + chunk * 16; }
};

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
  __device__ __forceinline__ RowFiller(const AttendParams& p, const detail::WorkItem& item, int head, int begin,
                                       int count)
      : n_(static_cast<int>(threadIdx.x)) {
    if (n_ >= count) return;
    const int j = (begin + n_) / p.group_size;
    head_ = head * p.group_size + (begin + n_) - j * p.group_size;
    row_ = p.plan.at<std::int32_t>(p.plan.header().item_rows)[item.row_begin + j];
    slot_ = item.partial_begin < 0 ? -1 : item.partial_begin + j;
  }

  __device__ __forceinline__ void fill(RowTile<kSize>& tile, const AttendParams& p) const {
    if (n_ >= kSize) return;
    detail::RowRange range;
    float slope = 0.0F;
    if (row_ >= 0) {
      range = p.plan.at<detail::RowRange>(p.plan.header().rows)[row_];
      if (p.alibi_slopes != nullptr) slope = p.alibi_slopes[head_] * kLog2E;
    }
    tile.q_offset[n_] = row_ * p.q_row_stride + head_ * p.q_head_stride;
    tile.to[n_] = slot_ < 0 ? row_ * p.out.row_stride + head_ * p.out.head_stride
                            : (std::int64_t{slot_} * p.num_qo_heads + head_) * kDvo;
    tile.lo[n_] = range.lo;
    tile.hi[n_] = range.hi;
    tile.pos[n_] = range.pos;
    tile.row[n_] = row_;
    tile.head[n_] = head_;
    tile.slope[n_] = slope;
  }

 private:
  int n_;
  std::int32_t row_ = -1;
  std::int32_t head_ = 0;
  std::int32_t slot_ = -1;
};

/// Bytes [0, 16) at `from` to shared memory, by elements of kElement bytes where `aligned` is false; zeros if unwanted.
template <int kElement>
__device__ __forceinline__ void copy16(unsigned char* to, const unsigned char* from, bool aligned, bool wanted) {
  if (aligned) {
    copy_async16(to, from, wanted);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 16; i += kElement) {
    if constexpr (kElement == 2) {
      *reinterpret_cast<std::uint16_t*>(to + i) =
          wanted ? *reinterpret_cast<const std::uint16_t*>(from + i) : std::uint16_t{0};
    } else {
      to[i] = wanted ? from[i] : static_cast<unsigned char>(0);
    }
  }
}

/// q of a tile's rows, [kSize, kDim]; absent rows are zero. By all threads.
template <int kDim, class Layout, int kSize>
__device__ __forceinline__ void load_q(unsigned char* to, const RowTile<kSize>& tile, const AttendParams& p) {
  constexpr int kChunks = kDim / 8;
#pragma unroll 4
  for (int c = static_cast<int>(threadIdx.x); c < kSize * kChunks; c += kThreads) {
    const int n = c / kChunks;
    const int chunk = c % kChunks;
    const bool present = tile.row[n] >= 0;
    const unsigned char* from = present ? p.q + tile.q_offset[n] + chunk * 16 : p.q;
    copy16<2>(to + Layout::at(n, chunk), from, p.q_aligned, present);
  }
}

/// Rows at, at + 1, ... of 16 tokens, of which only those in `present` are there (the others become zeros), or whose
/// addresses are no multiples of 16. Lane first_lane + t knows token t's address. Seldom needed, so not inlined.
template <int kElement, int kChunks, class Layout>
__device__ __noinline__ void copy_some_rows(const unsigned char* row, int first_lane, unsigned char* to, int at,
                                            unsigned present, bool aligned) {
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x % 32); c < kChunks * kTileKeys; c += 32) {
    const int token = c / kChunks;
    const int chunk = c % kChunks;
    const auto from = reinterpret_cast<const unsigned char*>(
        __shfl_sync(0xffffffffU, reinterpret_cast<unsigned long long>(row), first_lane + token));
    copy16<kElement>(to + Layout::at(at + token, chunk), from + chunk * 16, aligned, (present >> token & 1U) != 0);
  }
}

/// Loads KV rows of one item and head, kTileKeys tokens at a time, by one warp. Lanes 0-15 know where the tokens' K
/// rows lie, lanes 16-31 their V rows; for each copy of 16 bytes a lane asks the one that knows.
/// fp8 rows are padded, to be widened into the layout that is asked for.
template <class T, int kDqk, int kDvo, class WantedKLayout, class WantedVLayout>
struct KvLoader {
  using KLayout = std::conditional_t<T::kFp8, PaddedLayout<kDqk>, WantedKLayout>;
  using VLayout = std::conditional_t<T::kFp8, PaddedLayout<kDvo>, WantedVLayout>;

  const std::int32_t* page_ids;  ///< of the item's first page
  const unsigned char* data;     ///< K or V of this head, by lane
  std::int64_t page_stride;
  std::int64_t token_stride;
  std::int32_t first_token;
  std::int32_t num_tokens;
  std::int32_t page_shift;
  std::int32_t num_pages;
  bool aligned;
  int lane;

  __device__ __forceinline__ KvLoader(const AttendParams& p, const detail::WorkItem& item, int head)
      : page_ids(p.plan.at<std::int32_t>(p.plan.header().page_ids) + item.page_begin),
        first_token(item.first_token),
        num_tokens(item.num_tokens),
        lane(static_cast<int>(threadIdx.x % 32)) {
    const CacheView& cache = p.kv[item.view];
    const PagedBytes& side = lane < kTileKeys ? cache.k : cache.v;
    data = side.data + head * side.head_stride;
    page_stride = side.page_stride;
    token_stride = side.token_stride;
    page_shift = cache.page_shift;
    num_pages = cache.num_pages;
    aligned = cache.aligned;
  }

  /// Page of token `first + lane % 16` of the item; -1: none.
  [[nodiscard]] __device__ __forceinline__ std::int32_t page_of(std::int32_t first) const {
    const std::int32_t t = first + lane % kTileKeys;
    if (t >= num_tokens) return -1;
    const std::int32_t page = page_ids[(first_token + t) >> page_shift];
    return page < num_pages ? page : -1;
  }

  /// Starts the copies of tokens [first, first + 16), whose pages are `page` (lane % 16 each), to rows from `at` on of
  /// the tiles k and v. Absent ones are zeros.
  __device__ __forceinline__ void load(std::int32_t first, std::int32_t page, int at, unsigned char* k,
                                       unsigned char* v) const {
    const std::int32_t in_page = (first_token + first + lane % kTileKeys) & ((1 << page_shift) - 1);
    const unsigned char* row = data;
    if (page >= 0) row += page * page_stride + in_page * token_stride;
    const unsigned present = __ballot_sync(0xffffffffU, page >= 0);
    if (aligned && present == 0xffffffffU) {
      copy_rows<kDqk * T::kKvBytes / 16, KLayout>(row, 0, k, at);
      copy_rows<kDvo * T::kKvBytes / 16, VLayout>(row, kTileKeys, v, at);
    } else {
      copy_some_rows<T::kKvBytes, kDqk * T::kKvBytes / 16, KLayout>(row, 0, k, at, present, aligned);
      copy_some_rows<T::kKvBytes, kDvo * T::kKvBytes / 16, VLayout>(row, kTileKeys, v, at, present, aligned);
    }
  }

 private:
  template <int kChunks, class Layout>
  __device__ __forceinline__ void copy_rows(const unsigned char* row, int first_lane, unsigned char* to, int at) const {
    static_assert(kChunks * kTileKeys % 32 == 0);
#pragma unroll
    for (int i = 0; i < kChunks * kTileKeys / 32; ++i) {
      const int c = lane + 32 * i;
      const int token = c / kChunks;
      const int chunk = c % kChunks;
      const auto from = reinterpret_cast<const unsigned char*>(
          __shfl_sync(0xffffffffU, reinterpret_cast<unsigned long long>(row), first_lane + token));
      copy_async16(to + Layout::at(at + token, chunk), from + chunk * 16);
    }
  }
};

/// Whether key at position `pos` is seen by the row.
__device__ __forceinline__ bool sees(std::int32_t lo, std::int32_t hi, std::int32_t sinks, std::int32_t pos) {
  return pos < hi && (pos >= lo || pos < sinks);
}

/// Clears those of the V rows [at, at + 16), of keys from position `pos` on, that no row of the tile sees: memory
/// nobody sees may hold NaN, which a weight of zero does not hide. By one warp.
template <int kDim, class Layout, int kSize>
__device__ __forceinline__ void clear_unseen(unsigned char* v, int at, const RowTile<kSize>& tile, std::int32_t sinks,
                                             std::int32_t pos) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  bool seen = false;
  for (int n = lane / kTileKeys; n < kSize; n += 2) {
    seen = seen || sees(tile.lo[n], tile.hi[n], sinks, pos + lane % kTileKeys);
  }
  const unsigned votes = __ballot_sync(0xffffffffU, seen);
  const unsigned keys = (votes | votes >> kTileKeys) & 0xffffU;
  if (keys == 0xffffU) return;
  for (int c = lane; c < kTileKeys * (kDim / 8); c += 32) {
    const int token = c / (kDim / 8);
    if ((keys >> token & 1U) == 0) {
      *reinterpret_cast<uint4*>(v + Layout::at(at + token, c % (kDim / 8))) = uint4{0, 0, 0, 0};
    }
  }
  __syncwarp();
}

/// Rows [at, at + 16) of fp8 to rows of 16-bit elements, by one warp.
template <class Element, int kDim, class Layout>
__device__ __forceinline__ void widen_rows(unsigned char* to, int at, const unsigned char* from) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < kTileKeys * kDim / 16 / 32; ++i) {
    const int c = lane + 32 * i;
    const int row = at + c / (kDim / 16);
    const int chunk = c % (kDim / 16);
    const uint4 raw = *reinterpret_cast<const uint4*>(from + PaddedLayout<kDim>::at(row, chunk));
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
