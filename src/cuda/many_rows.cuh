// Attention of many stacked rows (64 or 128): a shared span with many members, a prefill chunk. Operands as usual,
// S = Q K^T and O = P V: rows on the wide side of the matrix instruction, 16 or 32 of them to each warp.
//
// All warps read the same tile of 64 keys; two tiles are in flight. Each warp copies 16 of a tile's keys.
//
// Shared memory: RowTile | q [kRows, kDqk] | 2 x (K [64, kDqk] | V [64, kDvo]) | a widened tile (fp8).
#pragma once

#include "cuda/rows.cuh"

namespace headwater::cuda {

template <class T, int kDqk, int kDvo, int kRows>
class ManyRows {
  using Loader = KvLoader<T, kDqk, kDvo>;
  using Element = typename T::Element;
  static constexpr int kKeys = kTileKeys * kWarps;
  static constexpr int kStages = 2;
  static constexpr int kRowBlocks = kRows / (16 * kWarps);  ///< of a warp
  static constexpr int kSteps = kDqk / 16;
  static constexpr int kQPitch = kDqk * 2 + kPad;
  static constexpr int kKPitch = kDqk * 2 + kPad;
  static constexpr int kVPitch = kDvo * 2 + kPad;
  static constexpr int kStageBytes = kKeys * (Loader::kKPitch + Loader::kVPitch);
  static constexpr int kWideBytes = T::kFp8 ? kKeys * (kKPitch + kVPitch) : 0;
  static_assert(kRows % (16 * kWarps) == 0 && kRows <= kMaxTile);

 public:
  static constexpr int shared_bytes() {
    return static_cast<int>(sizeof(RowTile)) + kRows * kQPitch + kStages * kStageBytes + kWideBytes;
  }

  __device__ static void attend(const AttendParams& p, const detail::WorkItem& item, int head, int begin, int count,
                                unsigned char* shared) {
    RowTile& tile = *reinterpret_cast<RowTile*>(shared);
    unsigned char* q = shared + sizeof(RowTile);
    ManyRows self(p, item, head, tile, q, q + kRows * kQPitch);
    self.fetch(0);
    fill_rows(tile, p, item, head, begin, count, kRows);
    __syncthreads();
    load_q<kDqk>(q, tile, p, head, begin, kRows);
    commit_copies();
    self.loop();
    self.leave(begin, count);
  }

 private:
  __device__ ManyRows(const AttendParams& p, const detail::WorkItem& item, int head, const RowTile& tile,
                      const unsigned char* q, unsigned char* pipeline)
      : p_(p),
        item_(item),
        head_(head),
        tile_(tile),
        q_(q),
        pipeline_(pipeline),
        loader_(p, item, head),
        lane_(static_cast<int>(threadIdx.x % 32)),
        warp_(static_cast<int>(threadIdx.x / 32)) {
    pages_ = loader_.page_of(warp_ * kTileKeys);
  }

  /// Copies of tile i, if there is one; the pages of tile i + 1 are looked up.
  __device__ void fetch(int i) {
    const std::int32_t first = i * kKeys + warp_ * kTileKeys;
    if (i * kKeys < item_.num_tokens) {
      unsigned char* k = pipeline_ + i % kStages * kStageBytes;
      unsigned char* v = k + kKeys * Loader::kKPitch;
      loader_.load(first, pages_, k + warp_ * kTileKeys * Loader::kKPitch, v + warp_ * kTileKeys * Loader::kVPitch);
      pages_ = loader_.page_of(first + kKeys);
    }
    commit_copies();
  }

  __device__ void loop() {
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
      max_[m][0] = max_[m][1] = minus_infinity();
      sum_[m][0] = sum_[m][1] = 0.0F;
#pragma unroll
      for (int d = 0; d < kDvo / 8; ++d) o_[m][d][0] = o_[m][d][1] = o_[m][d][2] = o_[m][d][3] = 0.0F;
    }
    const float scale = scale_of(p_, head_);
    const int num_tiles = (item_.num_tokens + kKeys - 1) / kKeys;
    for (int i = 0; i < num_tiles; ++i) {
      fetch(i + 1);
      wait_copies<1>();
      unsigned char* k = pipeline_ + i % kStages * kStageBytes;
      unsigned char* v = k + kKeys * Loader::kKPitch;
      const std::int32_t mine = warp_ * kTileKeys;
      const std::int32_t first = i * kKeys;
      if constexpr (T::kFp8) {
        __syncwarp();
        unsigned char* wide_k = pipeline_ + kStages * kStageBytes;
        unsigned char* wide_v = wide_k + kKeys * kKPitch;
        widen_rows<Element, kDqk>(wide_k + mine * kKPitch, k + mine * Loader::kKPitch);
        widen_rows<Element, kDvo>(wide_v + mine * kVPitch, v + mine * Loader::kVPitch);
        k = wide_k;
        v = wide_v;
      }
      const bool masked = first < item_.unmasked_begin || first + kKeys > item_.unmasked_end;
      if (masked) {
        __syncwarp();
        clear_unseen<kDvo * 2, kVPitch>(v + mine * kVPitch, tile_, kRows, p_.num_sink_tokens,
                                        item_.pos_begin + first + mine);
      }
      __syncthreads();
      attend_tile(first, scale, masked, k, v);
      __syncthreads();
    }
    wait_copies<0>();
  }

  __device__ void attend_tile(std::int32_t first, float scale, bool masked, const unsigned char* k,
                              const unsigned char* v) {
    float s[kRowBlocks][kKeys / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t a[kRowBlocks][4];
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        load_matrices(a[m],
                      q_ + (warp_ * kRowBlocks * 16 + m * 16 + lane_ % 16) * kQPitch + step * 32 + lane_ / 16 * 16);
      }
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        std::uint32_t b[4];
        load_matrices(b, k + (n * 8 + lane_ / 16 * 8 + lane_ % 8) * kKPitch + step * 32 + lane_ / 8 % 2 * 16);
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
          multiply<Element>(s[m][n], a[m], b[0], b[1]);
          multiply<Element>(s[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) soften(m, s[m], scale, first, masked);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      std::uint32_t a[kRowBlocks][4];
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        a[m][0] = pack<Element>(s[m][2 * step][0], s[m][2 * step][1]);
        a[m][1] = pack<Element>(s[m][2 * step][2], s[m][2 * step][3]);
        a[m][2] = pack<Element>(s[m][2 * step + 1][0], s[m][2 * step + 1][1]);
        a[m][3] = pack<Element>(s[m][2 * step + 1][2], s[m][2 * step + 1][3]);
      }
#pragma unroll
      for (int d = 0; d < kDvo / 8; d += 2) {
        std::uint32_t b[4];
        load_matrices_transposed(b, v + (step * 16 + lane_ % 16) * kVPitch + d * 16 + lane_ / 16 * 16);
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
          multiply<Element>(o_[m][d], a[m], b[0], b[1]);
          multiply<Element>(o_[m][d + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  /// One step of the online softmax of a block of 16 rows; this thread holds rows lane / 4 and lane / 4 + 8.
  __device__ void soften(int m, float (&s)[kKeys / 8][4], float scale, std::int32_t first, bool masked) {
    const bool plain = p_.soft_cap <= 0.0F && p_.alibi_slopes == nullptr;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = (warp_ * kRowBlocks + m) * 16 + lane_ / 4 + 8 * h;
      const std::int32_t lo = tile_.lo[n];
      const std::int32_t hi = min(tile_.hi[n], item_.pos_begin + item_.num_tokens);
      float max = max_[m][h];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[j][2 * h + c];
          const std::int32_t pos = item_.pos_begin + first + j * 8 + 2 * (lane_ % 4) + c;
          x = plain ? x * scale : score(x, scale, p_.soft_cap, tile_.slope[n], pos - tile_.pos[n]);
          if (masked && !sees(lo, hi, p_.num_sink_tokens, pos)) x = minus_infinity();
          max = fmaxf(max, x);
        }
      }
      max = fmaxf(max, __shfl_xor_sync(0xffffffffU, max, 1));
      max = fmaxf(max, __shfl_xor_sync(0xffffffffU, max, 2));
      const float base = max == minus_infinity() ? 0.0F : max;
      const float factor = exp2_fast(max_[m][h] - base);
      max_[m][h] = max;
      float sum = 0.0F;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[j][2 * h + c];
          x = exp2_fast(x - base);
          sum += x;
        }
      }
      sum_[m][h] = sum_[m][h] * factor + sum;
      if (__any_sync(0xffffffffU, factor != 1.0F)) {
#pragma unroll
        for (int d = 0; d < kDvo / 8; ++d) {
          o_[m][d][2 * h] *= factor;
          o_[m][d][2 * h + 1] *= factor;
        }
      }
    }
  }

  /// States of this warp's rows. Neighbouring lanes exchange halves, so that each stores four elements in a row.
  __device__ void leave(int begin, int count) {
    const float v_scale = p_.v_scale.data == nullptr ? 1.0F : p_.v_scale.data[head_ * p_.v_scale.stride];
    const bool odd = lane_ % 2 != 0;
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = sum_[m][h];
        sum += __shfl_xor_sync(0xffffffffU, sum, 1);
        sum += __shfl_xor_sync(0xffffffffU, sum, 2);
        const float factor = sum == 0.0F ? 0.0F : v_scale / sum;
        const float lse = sum == 0.0F ? minus_infinity() : max_[m][h] + log2f(sum);
        const int n = (warp_ * kRowBlocks + m) * 16 + lane_ / 4 + 8 * h;
        const int stacked = begin + n;
        const int qo_head = head_ * p_.group_size + stacked % p_.group_size;
#pragma unroll
        for (int d = 0; d < kDvo / 8; d += 2) {
          // Even lanes take block d, odd ones block d + 1: both need their neighbour's two elements of it.
          const float x = o_[m][d][2 * h] * factor;
          const float y = o_[m][d][2 * h + 1] * factor;
          const float z = o_[m][d + 1][2 * h] * factor;
          const float w = o_[m][d + 1][2 * h + 1] * factor;
          const float from_x = __shfl_xor_sync(0xffffffffU, odd ? x : z, 1);
          const float from_y = __shfl_xor_sync(0xffffffffU, odd ? y : w, 1);
          const float4 o = odd ? float4{from_x, from_y, z, w} : float4{x, y, from_x, from_y};
          const int at = (odd ? d + 1 : d) * 8 + lane_ % 4 / 2 * 4;
          if (n < count) store_state<kDvo>(p_, item_, tile_.row[n], qo_head, stacked / p_.group_size, at, o, lse);
        }
      }
    }
  }

  const AttendParams& p_;
  const detail::WorkItem& item_;
  int head_;
  const RowTile& tile_;
  const unsigned char* q_;
  unsigned char* pipeline_;
  Loader loader_;
  int lane_;
  int warp_;
  std::int32_t pages_;
  float max_[kRowBlocks][2];
  float sum_[kRowBlocks][2];
  float o_[kRowBlocks][kDvo / 8][4];
};

}  // namespace headwater::cuda
