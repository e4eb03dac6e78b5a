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

/// Rows at, at + 1, ... of 16 tokens, of which only those in `present` are there; the others become zeros. Lane
/// first_lane + t knows token t's address.
template <int kElement, int kChunks, class Layout>
__device__ __forceinline__ void copy_rows(const unsigned char* row, int first_lane, unsigned char* to, int at,
                                          unsigned present, bool aligned) {
#pragma unroll 2
  for (int c = static_cast<int>(threadIdx.x % 32); c < kChunks * kTileKeys; c += 32) {
    const int token = c / kChunks;
    const int chunk = c % kChunks;
    const auto from = reinterpret_cast<const unsigned char*>(
        __shfl_sync(0xffffffffU, reinterpret_cast<unsigned long long>(row), first_lane + token));
    copy16<kElement>(to + Layout::at(at + token, chunk), from + chunk * 16, aligned, (present >> token & 1U) != 0);
  }
}

/// Loads into tiles of kRows rows of K and of V.
template <class T, int kDqk, int kDvo, int kRows>
class KvLoader {
 public:
  using KLayout = LoadLayout<T::kFp8, kRows, kDqk>;
  using VLayout = LoadLayout<T::kFp8, kRows, kDvo>;
  static constexpr bool kBulk = kHasBulkCopies && (T::kFp8 || (kDqk % 64 == 0 && kDvo % 64 == 0));

  __device__ __forceinline__ KvLoader(const AttendParams& p, const detail::WorkItem& item, int head)
      : p_(p),
        page_ids_(p.plan.page_ids + item.page_begin),
        first_token_(item.first_token),
        num_tokens_(item.num_tokens),
        view_(item.view),
        head_(head),
        lane_(static_cast<int>(threadIdx.x % 32)) {
    const CacheView& cache = p.kv[view_];
    page_shift_ = cache.page_shift;
    bulk_ = kBulk && cache.mapped && first_token_ % min(kTileKeys, 1 << page_shift_) == 0;
  }

  /// Whether tiles come by the bulk copy engine.
  [[nodiscard]] __device__ __forceinline__ bool bulk() const { return kBulk && bulk_; }

  /// Page of token `first + lane % 16` of the item; -1: none. May lie past the pool.
  [[nodiscard]] __device__ __forceinline__ std::int32_t page_of(std::int32_t first) const {
    const std::int32_t t = first + lane_ % kTileKeys;
    return t < num_tokens_ ? page_ids_[(first_token_ + t) >> page_shift_] : -1;
  }

  /// Starts the copies of tokens [first, first + 16), whose pages are `page` (lane % 16 each), to rows from `at` on of
  /// the tiles k and v. Each lane arrives once at the barrier.
  __device__ __forceinline__ void load(std::int32_t first, std::int32_t page, int at, unsigned char* k,
                                       unsigned char* v, Barrier& barrier) const {
    const std::int32_t in_page = (first_token_ + first + lane_ % kTileKeys) & ((1 << page_shift_) - 1);
    if (kBulk && bulk_) {
      load_boxes(in_page, page, at, k, v, barrier);
    } else {
      load_rows(p_, view_, head_, in_page, page, at, k, v, barrier);
    }
  }

 private:
  static constexpr int kKBoxes = T::kFp8 ? 1 : kDqk / 64;
  static constexpr int kVBoxes = T::kFp8 ? 1 : kDvo / 64;

  /// A lane copies a box: 128 bytes (fp8: a whole row) x the chunk's tokens in one page.
  __device__ __forceinline__ void load_boxes(std::int32_t in_page, std::int32_t page, int at, unsigned char* k,
                                             unsigned char* v, Barrier& barrier) const {
    constexpr int kBoxes = kKBoxes + kVBoxes;
    const int rows = min(kTileKeys, 1 << page_shift_);
    const int row = lane_ / kBoxes * rows;
    const int box = lane_ % kBoxes;
    if (lane_ == 0) expect_bytes(barrier, kTileKeys * (kDqk + kDvo) * T::kKvBytes);
    page = __shfl_sync(0xffffffffU, page, row);
    in_page = __shfl_sync(0xffffffffU, in_page, row);
    if (row < kTileKeys) {
      if (box < kKBoxes) {
        copy_box(k + KLayout::at(at + row, 0) + box * kRows * 128, p_.k_maps[view_], box * 64, in_page, head_, page,
                 barrier);
      } else {
        copy_box(v + VLayout::at(at + row, 0) + (box - kKBoxes) * kRows * 128, p_.v_maps[view_], (box - kKBoxes) * 64,
                 in_page, head_, page, barrier);
      }
    }
    arrive(barrier);
  }

  /// Lanes 0-15 know where the tokens' K rows lie, lanes 16-31 their V rows; for each 16 bytes a lane asks the one that
  /// knows. Not inlined: where the bulk copy engine serves, its instructions are not in the way.
  __device__ __noinline__ static void load_rows(const AttendParams& p, int view, int head, std::int32_t in_page,
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
    if (cache.aligned) {
      arrive_after_copies(barrier);
    } else {
      arrive(barrier);
    }
  }

  const AttendParams& p_;
  const std::int32_t* page_ids_;
  std::int32_t first_token_;
  std::int32_t num_tokens_;
  std::int32_t view_;
  int head_;
  int lane_;
  std::int32_t page_shift_;
  bool bulk_;
};

}  // namespace headwater::cuda
