// KV rows on their way to shared memory: 16 tokens of one item and head at a time, by one warp.
//
// Three ways, chosen once per item: the bulk copy engine (Hopper; pages of at least 8 tokens, rows at multiples of 16
// bytes), asynchronous copies of 16 bytes, and plain loads for rows that lie anywhere. All end at a barrier. Tokens
// past the item's, and pages past the pool, become zeros or whatever their page holds: they are masked.
#pragma once

#include "cuda/barrier.cuh"
#include "cuda/layouts.cuh"

namespace headwater::cuda {

inline constexpr int kTileKeys = 16;  ///< KV rows that a warp loads at once

/// This thread's warp, the same register for all its lanes.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x / 32), 0);
}

/// Bytes [0, 16) at `from` to shared memory, by elements of kElement bytes where `aligned` is false; zeros if unwanted.
template <int kElement>
__device__ __forceinline__ void copy16(unsigned char* to, const unsigned char* from, bool aligned, bool wanted) {
  if (aligned) [[likely]] {
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

/// Rows at, at + 1, ... of 16 tokens, of which only those in `present` are there; the others become zeros. Lane
/// first_lane + t knows token t's address.
template <int kElement, int kChunks, class Layout>
__device__ __forceinline__ void copy_rows(const unsigned char* row, int first_lane, unsigned char* to, int at,
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

/// One warp's loader. The warps take turns: chunk j of warp w are tokens from (j kWarps + w) kTileKeys on. Chunks are
/// loaded in order, into tiles of kRows rows of K and of V.
template <class T, int kDqk, int kDvo, int kRows>
class KvLoader {
 public:
  using KLayout = LoadLayout<T::kFp8, kRows, kDqk>;
  using VLayout = LoadLayout<T::kFp8, kRows, kDvo>;
  /// Whether tiles can come by the bulk copy engine.
  static constexpr bool kBulk = kHasBulkCopies && (T::kFp8 || (kDqk % 64 == 0 && kDvo % 64 == 0));
  /// Arrivals of a warp at a chunk's barrier.
  static constexpr int kArrivals = kBulk ? 1 : 32;

  __device__ __forceinline__ KvLoader(const AttendParams& p, const DeviceItem& item, int head, int warp)
      : p_(p),
        item_(item),
        page_ids_(p.plan.page_ids + item.page_begin),
        first_token_(item.first_token),
        num_tokens_(item.num_tokens),
        view_(item.view),
        head_(head),
        warp_(warp),
        lane_(static_cast<int>(threadIdx.x % 32)) {
    const CacheView& cache = p.kv[view_];
    page_shift_ = cache.page_shift;
    bulk_ = kBulk && cache.mapped && first_token_ % min(kTileKeys, 1 << page_shift_) == 0;
    pages_ = bulk_ ? pages_of_batch(0) : pages_of_chunk(0);
    next_pages_ = bulk_ ? pages_of_batch(1) : -1;
  }

  /// Whether tiles come by the bulk copy engine.
  [[nodiscard]] __device__ __forceinline__ bool bulk() const { return kBulk && bulk_; }

  /// Starts the copies of chunk j to rows from `at` on of the tiles k and v.
  __device__ __forceinline__ void load(int j, int at, unsigned char* k, unsigned char* v, Barrier& barrier) {
    if constexpr (kBulk) {
      if (bulk_) [[likely]] {
        load_boxes(j, at, k, v, barrier);
        return;
      }
    }
    const std::int32_t page = pages_;
    pages_ = pages_of_chunk(j + 1);
    const std::int32_t in_page = (first_token_ + first_of(j) + lane_ % kTileKeys) & ((1 << page_shift_) - 1);
    if constexpr (kBulk) {
      load_rows_apart(p_, view_, head_, in_page, page, at, k, v, barrier);
    } else {
      load_rows(p_, view_, head_, in_page, page, at, k, v, barrier);
    }
  }

 private:
  static constexpr int kKBoxes = T::kFp8 ? 1 : kDqk / 64;
  static constexpr int kVBoxes = T::kFp8 ? 1 : kDvo / 64;
  /// Chunks of each warp whose pages of 16 tokens or more are among the item's first.
  static constexpr int kEarlyChunks = (kFirstPages - 1) / kWarps;

  [[nodiscard]] __device__ __forceinline__ std::int32_t first_of(int j) const {
    return (j * kWarps + warp_) * kTileKeys;
  }

  /// Page of the item's token t; -1: none. May lie past the pool.
  [[nodiscard]] __device__ __forceinline__ std::int32_t page_of(std::int32_t t) const {
    return t < num_tokens_ ? page_ids_[(first_token_ + t) >> page_shift_] : -1;
  }
  /// Lane l: of token l % 16 of chunk j.
  [[nodiscard]] __device__ __forceinline__ std::int32_t pages_of_chunk(int j) const {
    return page_of(first_of(j) + lane_ % kTileKeys);
  }
  /// For the bulk copy engine, which reads one page, or two of 8 tokens, for a chunk: lane l's are the page of chunk
  /// 32 batch + l, or a page of chunk 16 batch + l / 2.
  [[nodiscard]] __device__ __forceinline__ std::int32_t pages_of_batch(int batch) const {
    const bool halves = page_shift_ == 3;
    const int j = halves ? batch * 16 + lane_ / 2 : batch * 32 + lane_;
    return page_of(first_of(j) + (halves ? lane_ % 2 * 8 : 0));
  }

  /// Boxes of 128 bytes (fp8: whole rows) x the chunk's tokens in one page, all by one lane: the engine takes its
  /// arguments from registers of the warp.
  __device__ __forceinline__ void load_boxes(int j, int at, unsigned char* k, unsigned char* v, Barrier& barrier) {
    const bool halves = page_shift_ == 3;
    const int in_batch = halves ? j % 16 : j % 32;
    if (in_batch == 0 && j > 0) [[unlikely]] {
      pages_ = next_pages_;
      next_pages_ = pages_of_batch(halves ? j / 16 + 1 : j / 32 + 1);
    }
    std::int32_t page;
    std::int32_t second = -1;
    const std::int32_t at_page = (first_token_ + first_of(j)) >> page_shift_;
    if (j < kEarlyChunks && !halves) {
      page = first_of(j) < num_tokens_ ? item_.first_pages[at_page] : -1;
    } else {
      page = __shfl_sync(0xffffffffU, pages_, halves ? 2 * in_batch : in_batch);
      second = __shfl_sync(0xffffffffU, pages_, 2 * in_batch + 1);
    }
    if (elect_lane()) {
      arrive_expecting(barrier, kTileKeys * (kDqk + kDvo) * T::kKvBytes);
      const std::int32_t in_page = (first_token_ + first_of(j)) & ((1 << page_shift_) - 1);
#pragma unroll 1
      for (int half = 0; half <= (halves ? 1 : 0); ++half) {
        copy_boxes(at + 8 * half, k, v, in_page, half == 0 ? page : second, barrier);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void copy_boxes(int at, unsigned char* k, unsigned char* v, std::int32_t in_page,
                                             std::int32_t page, Barrier& barrier) const {
#pragma unroll
    for (int box = 0; box < kKBoxes; ++box) {
      copy_box(k + KLayout::at(at, box * 8), p_.k_maps[view_], box * 64, in_page, head_, page, barrier);
    }
#pragma unroll
    for (int box = 0; box < kVBoxes; ++box) {
      copy_box(v + VLayout::at(at, box * 8), p_.v_maps[view_], box * 64, in_page, head_, page, barrier);
    }
  }

  /// Lanes 0-15 know where the tokens' K rows lie, lanes 16-31 their V rows; for each 16 bytes a lane asks the one that
  /// knows.
  __device__ __forceinline__ static void load_rows(const AttendParams& p, int view, int head, std::int32_t in_page,
                                                   std::int32_t page, int at, unsigned char* k, unsigned char* v,
                                                   Barrier& barrier) {
    const CacheView& cache = p.kv[view];
    const PagedBytes& side = threadIdx.x % 32 < kTileKeys ? cache.k : cache.v;
    const bool there = page >= 0 && page < cache.num_pages;
    const unsigned char* row = side.data + head * side.head_stride;
    if (there) row += page * side.page_stride + in_page * side.token_stride;
    const unsigned present = __ballot_sync(0xffffffffU, there);
    copy_rows<T::kKvBytes, kDqk * T::kKvBytes / 16, KLayout>(row, 0, k, at, present, cache.aligned);
    copy_rows<T::kKvBytes, kDvo * T::kKvBytes / 16, VLayout>(row, kTileKeys, v, at, present, cache.aligned);
    if constexpr (kBulk) {
      wait_copies();
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(barrier);
    } else if (cache.aligned) {
      arrive_after_copies(barrier);
    } else {
      arrive(barrier);
    }
  }

  /// The seldom way where bulk copies are the usual one: its instructions are kept out of the others' way.
  __device__ __noinline__ static void load_rows_apart(const AttendParams& p, int view, int head, std::int32_t in_page,
                                                      std::int32_t page, int at, unsigned char* k, unsigned char* v,
                                                      Barrier& barrier) {
    load_rows(p, view, head, in_page, page, at, k, v, barrier);
  }

  const AttendParams& p_;
  const DeviceItem& item_;
  const std::int32_t* page_ids_;
  std::int32_t first_token_;
  std::int32_t num_tokens_;
  std::int32_t view_;
  int head_;
  int warp_;
  int lane_;
  std::int32_t page_shift_;
  bool bulk_;
  std::int32_t pages_;
  std::int32_t next_pages_;
};

}  // namespace headwater::cuda
