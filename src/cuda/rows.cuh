// The query rows of a tile, and KV rows on their way to shared memory: what both attend kernels have in common.
//
// *Stacked* rows are (query row, query head of one KV head) pairs: stacked row n of an item is query row n / group_size
// and query head n % group_size of the KV head at hand. A tile is at most kMaxTile of them.
#pragma once

#include "cuda/output.cuh"
#include "cuda/params.h"
#include "cuda/ptx.cuh"

namespace headwater::cuda {

inline constexpr int kThreads = 128;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kMaxTile = 128;
inline constexpr int kTileKeys = 16;  ///< KV rows that a warp loads at once
inline constexpr int kPad = 16;       ///< bytes after each row in shared memory: eight rows lie in eight bank groups

/// What a tile's stacked rows see. Absent rows have lo = hi = 0 and row = -1.
struct RowTile {
  std::int32_t lo[kMaxTile];
  std::int32_t hi[kMaxTile];
  std::int32_t pos[kMaxTile];
  std::int32_t row[kMaxTile];
  float slope[kMaxTile];
};

__device__ __forceinline__ void fill_rows(RowTile& tile, const AttendParams& p, const detail::WorkItem& item, int head,
                                          int begin, int count, int size) {
  const int n = static_cast<int>(threadIdx.x);
  if (n >= size) return;
  std::int32_t row = -1;
  detail::RowRange range;
  float slope = 0.0F;
  if (n < count) {
    const int stacked = begin + n;
    row = p.plan.at<std::int32_t>(p.plan.header().item_rows)[item.row_begin + stacked / p.group_size];
    range = p.plan.at<detail::RowRange>(p.plan.header().rows)[row];
    if (p.alibi_slopes != nullptr) slope = p.alibi_slopes[head * p.group_size + stacked % p.group_size] * kLog2E;
  }
  tile.lo[n] = range.lo;
  tile.hi[n] = range.hi;
  tile.pos[n] = range.pos;
  tile.row[n] = row;
  tile.slope[n] = slope;
}

/// Bytes [0, 16) at `from` to shared memory, by elements of kElement bytes where `aligned` is false; zeros if unwanted.
template <int kElement>
__device__ __forceinline__ void copy16(unsigned char* to, const unsigned char* from, bool aligned, bool wanted) {
  if (aligned) {
    copy_async16(to, from, wanted);
    return;
  }
#pragma unroll
  for (int i = 0; i < 16; i += kElement) {
    if constexpr (kElement == 2) {
      *reinterpret_cast<std::uint16_t*>(to + i) =
          wanted ? *reinterpret_cast<const std::uint16_t*>(from + i) : std::uint16_t{0};
    } else {
      to[i] = wanted ? from[i] : static_cast<unsigned char>(0);
    }
  }
}

/// q of a tile's rows, [size, kDim] with kPad bytes between; absent rows are zero. By all threads.
template <int kDim>
__device__ __forceinline__ void load_q(unsigned char* to, const RowTile& tile, const AttendParams& p, int head,
                                       int begin, int size) {
  constexpr int kChunks = kDim / 8;
  for (int c = static_cast<int>(threadIdx.x); c < size * kChunks; c += kThreads) {
    const int n = c / kChunks;
    const int chunk = c % kChunks;
    const std::int32_t row = tile.row[n];
    const int qo_head = head * p.group_size + (begin + n) % p.group_size;
    const unsigned char* from = p.q;
    if (row >= 0) from += row * p.q_row_stride + qo_head * p.q_head_stride + chunk * 16;
    copy16<2>(to + n * (kDim * 2 + kPad) + chunk * 16, from, p.q_aligned, row >= 0);
  }
}

/// Loads KV rows of one item and head, kTileKeys tokens a time, by one warp.
template <class T, int kDqk, int kDvo>
struct KvLoader {
  static constexpr int kKPitch = kDqk * T::kKvBytes + kPad;
  static constexpr int kVPitch = kDvo * T::kKvBytes + kPad;

  const CacheView& cache;
  const std::int32_t* page_ids;  ///< of the item's first page
  std::int32_t first_token;
  std::int32_t num_tokens;
  std::int64_t k_head;
  std::int64_t v_head;

  __device__ __forceinline__ KvLoader(const AttendParams& p, const detail::WorkItem& item, int head)
      : cache(p.kv[item.view]),
        page_ids(p.plan.at<std::int32_t>(p.plan.header().page_ids) + item.page_begin),
        first_token(item.first_token),
        num_tokens(item.num_tokens),
        k_head(head * cache.k.head_stride),
        v_head(head * cache.v.head_stride) {}

  /// Page of token `first + lane % 16` of the item; -1: none.
  [[nodiscard]] __device__ __forceinline__ std::int32_t page_of(std::int32_t first) const {
    const std::int32_t t = first + static_cast<std::int32_t>(threadIdx.x % kTileKeys);
    if (t >= num_tokens) return -1;
    const std::int32_t page = page_ids[(first_token + t) >> cache.page_shift];
    return page < cache.num_pages ? page : -1;
  }

  /// Starts the copies of tokens [first, first + 16), whose pages are `pages` (lane % 16 each). Absent ones are zeros.
  __device__ __forceinline__ void load(std::int32_t first, std::int32_t pages, unsigned char* k,
                                       unsigned char* v) const {
    copy_rows<kDqk * T::kKvBytes / 16, kKPitch>(cache.k, k_head, first, pages, k);
    copy_rows<kDvo * T::kKvBytes / 16, kVPitch>(cache.v, v_head, first, pages, v);
  }

 private:
  template <int kChunks, int kPitch>
  __device__ __forceinline__ void copy_rows(const PagedBytes& from, std::int64_t head, std::int32_t first,
                                            std::int32_t pages, unsigned char* to) const {
    static_assert(kChunks * kTileKeys % 32 == 0);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::int32_t in_page = (1 << cache.page_shift) - 1;
#pragma unroll
    for (int i = 0; i < kChunks * kTileKeys / 32; ++i) {
      const int c = lane + 32 * i;
      const int token = c / kChunks;
      const int chunk = c % kChunks;
      const std::int32_t page = __shfl_sync(0xffffffffU, pages, token);
      const std::int64_t offset =
          page * from.page_stride + ((first_token + first + token) & in_page) * from.token_stride + head + chunk * 16;
      copy16<T::kKvBytes>(to + token * kPitch + chunk * 16, from.data + (page < 0 ? 0 : offset), cache.aligned,
                          page >= 0);
    }
  }
};

/// Whether key at position `pos` is seen by the row.
__device__ __forceinline__ bool sees(std::int32_t lo, std::int32_t hi, std::int32_t sinks, std::int32_t pos) {
  return pos < hi && (pos >= lo || pos < sinks);
}

/// Clears the V rows of those 16 keys from position `pos` on that no row of the tile sees: memory nobody sees may hold
/// NaN, which a weight of zero does not hide. By one warp.
template <int kRowBytes, int kPitch>
__device__ __forceinline__ void clear_unseen(unsigned char* v, const RowTile& tile, int size, std::int32_t sinks,
                                             std::int32_t pos) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  bool seen = false;
  for (int n = lane / kTileKeys; n < size; n += 2) {
    seen = seen || sees(tile.lo[n], tile.hi[n], sinks, pos + lane % kTileKeys);
  }
  const unsigned votes = __ballot_sync(0xffffffffU, seen);
  const unsigned keys = (votes | votes >> kTileKeys) & 0xffffU;
  if (keys == 0xffffU) return;
  for (int c = lane; c < kTileKeys * (kRowBytes / 16); c += 32) {
    const int token = c / (kRowBytes / 16);
    if ((keys >> token & 1U) == 0) {
      *reinterpret_cast<uint4*>(v + token * kPitch + c % (kRowBytes / 16) * 16) = uint4{0, 0, 0, 0};
    }
  }
  __syncwarp();
}

/// 16 rows of fp8 to rows of 16-bit elements, by one warp.
template <class Element, int kDim>
__device__ __forceinline__ void widen_rows(unsigned char* to, const unsigned char* from) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < kTileKeys * kDim / 16 / 32; ++i) {
    const int c = lane + 32 * i;
    const int token = c / (kDim / 16);
    const int chunk = c % (kDim / 16);
    const uint4 raw = *reinterpret_cast<const uint4*>(from + token * (kDim + kPad) + chunk * 16);
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    std::uint32_t wide[8];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      wide[2 * w] = widen_fp8<Element>(static_cast<std::uint16_t>(words[w] & 0xffffU));
      wide[2 * w + 1] = widen_fp8<Element>(static_cast<std::uint16_t>(words[w] >> 16));
    }
    auto* row = reinterpret_cast<uint4*>(to + token * (kDim * 2 + kPad) + chunk * 32);
    row[0] = uint4{wide[0], wide[1], wide[2], wide[3]};
    row[1] = uint4{wide[4], wide[5], wide[6], wide[7]};
  }
}

/// A score in base 2: scale, cap, ALiBi. `scale` holds log2(e) unless there is a cap.
__device__ __forceinline__ float score(float product, float scale, float cap, float slope, std::int32_t distance) {
  float x = product * scale;
  if (cap > 0.0F) x = cap * kLog2E * tanhf(x / cap);
  return x + slope * static_cast<float>(distance);
}

/// Factor of q.k for one KV head (see score).
__device__ __forceinline__ float scale_of(const AttendParams& p, int head) {
  float scale = p.score_scale;
  if (p.k_scale.data != nullptr) scale *= p.k_scale.data[head * p.k_scale.stride];
  return p.soft_cap > 0.0F ? scale : scale * kLog2E;
}

/// Where the state of a stacked row goes: straight to the output, or to a partial slot. Four elements of O from d on.
template <int kDvo>
__device__ __forceinline__ void store_state(const AttendParams& p, const detail::WorkItem& item, std::int32_t row,
                                            int qo_head, int j, int d, float4 o, float lse) {
  if (item.partial_begin < 0) {
    const float factor = add_sink(p.out, qo_head, lse);
    store_output4(p.out, row, qo_head, d, {o.x * factor, o.y * factor, o.z * factor, o.w * factor});
    if (d == 0) store_lse(p.out, row, qo_head, lse);
    return;
  }
  const std::int64_t at = static_cast<std::int64_t>(item.partial_begin + j) * p.num_qo_heads + qo_head;
  *reinterpret_cast<float4*>(p.partial_o + at * kDvo + d) = o;
  if (d == 0) p.partial_lse[at] = lse;
}

}  // namespace headwater::cuda
