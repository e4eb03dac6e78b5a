// Attention of many stacked rows (64 or 128): a shared span with many members, a prefill chunk. Operands as usual,
// S = Q K^T and O = P V: rows on the wide side of the matrix instruction, 16 of every 64 to each warp.
//
// All warps read the same tile of 64 keys; while it is worked on the next one comes, 16 keys by each warp. The products
// themselves are a class of their own (MmaProducts, WgmmaProducts).
//
// Shared memory: q [kRows, kDqk] | 2 x (K [64, kDqk] | V [64, kDvo]) | a widened tile (fp8) | RowTile.
#pragma once

#include "cuda/leave.cuh"
#include "cuda/mma_products.cuh"
#include "cuda/rows.cuh"
#include "cuda/wgmma_products.cuh"
#include "cuda/work.cuh"

namespace headwater::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
inline constexpr bool kHasWgmma = true;
#else
inline constexpr bool kHasWgmma = false;
#endif

template <class T, int kDqk, int kDvo, int kRows>
class ManyRows {
  using Element = typename T::Element;
  static constexpr int kKeys = kTileKeys * kWarps;
  static constexpr int kStages = 2;
  static constexpr int kBlocks = kRows / 64;
  static constexpr bool kWgmma = kHasWgmma && kDqk % 64 == 0 && kDvo % 64 == 0;
  using Products =
      std::conditional_t<kWgmma, WgmmaProducts<Element, kDqk, kDvo, kRows>, MmaProducts<Element, kDqk, kDvo, kRows>>;
  using Loader = KvLoader<T, kDqk, kDvo, kKeys>;
  using QLayout = TileLayout<kRows, kDqk>;
  using KLayout = TileLayout<kKeys, kDqk>;
  using VLayout = TileLayout<kKeys, kDvo>;
  static_assert(kRows % 64 == 0);

  static constexpr int kQBytes = QLayout::kBytes;
  static constexpr int kKBytes = Loader::KLayout::kBytes;
  static constexpr int kStageBytes = kKBytes + Loader::VLayout::kBytes;
  static constexpr int kWideBytes = T::kFp8 ? KLayout::kBytes + VLayout::kBytes : 0;
  static_assert(kQBytes % 1024 == 0 && kStageBytes % 1024 == 0 && kKBytes % 1024 == 0 && KLayout::kBytes % 1024 == 0,
                "swizzled tiles start at multiples of 1024 bytes");

 public:
  __host__ __device__ static constexpr int shared_bytes() {
    return kQBytes + kStages * kStageBytes + kWideBytes + static_cast<int>(sizeof(RowTile<kRows>));
  }

  __device__ static void attend(const AttendParams& p, const DeviceItem& item, int head, int begin, int count,
                                unsigned char* shared, Barriers& barriers, NextWork& next, unsigned& phases) {
    unsigned char* pipeline = shared + kQBytes;
    auto& tile = *reinterpret_cast<RowTile<kRows>*>(pipeline + kStages * kStageBytes + kWideBytes);
    ManyRows self(p, item, head, tile, shared, pipeline, barriers, phases);
    const RowFiller<kRows, kDvo> rows(p, item, head, begin, count);
    self.loop(rows, next);
    phases = self.phases_;
    next.fetch();
    if (item.partial_begin >= 0) {
      self.template leave<true>(count);
    } else {
      self.template leave<false>(count);
    }
  }

 private:
  __device__ __forceinline__ ManyRows(const AttendParams& p, const DeviceItem& item, int head, RowTile<kRows>& tile,
                                      unsigned char* q, unsigned char* pipeline, Barriers& barriers, unsigned phases)
      : p_(p),
        item_(item),
        head_(head),
        tile_(tile),
        q_(q),
        pipeline_(pipeline),
        warp_(warp_index()),
        lane_(static_cast<int>(threadIdx.x % 32)),
        loader_(p, item, head, warp_),
        barriers_(barriers.many),
        phases_(phases) {}

  /// Copies of this warp's part of tile i, if there is one.
  __device__ __forceinline__ void fetch(int i) {
    if (i * kKeys >= item_.num_tokens) return;
    unsigned char* k = pipeline_ + i % kStages * kStageBytes;
    loader_.load(i, warp_ * kTileKeys, k, k + kKBytes, barriers_[i % kStages]);
  }

  /// q to shared memory, and what the loop starts from. By all warps, while the first tile comes.
  __device__ __forceinline__ void prepare(const RowFiller<kRows, kDvo>& rows) {
    rows.fill(tile_, p_);
    __syncthreads();
    load_q<kDqk, QLayout>(q_, tile_, p_);
    wait_copies();
    if constexpr (kWgmma) publish_shared();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      max_[m][0] = max_[m][1] = minus_infinity();
      sum_[m][0] = sum_[m][1] = 0.0F;
#pragma unroll
      for (int d = 0; d < kDvo / 8; ++d) o_[m][d][0] = o_[m][d][1] = o_[m][d][2] = o_[m][d][3] = 0.0F;
    }
  }

  __device__ __forceinline__ void loop(const RowFiller<kRows, kDvo>& rows, NextWork& next) {
    const float scale = scale_of(p_, head_);
    const bool plain = p_.soft_cap <= 0.0F && p_.alibi_slopes == nullptr && scale > 0.0F;
    const int num_tiles = (item_.num_tokens + kKeys - 1) / kKeys;
    fetch(0);
    prepare(rows);
    for (int i = 0; i < num_tiles; ++i) {
      if (i + 1 == num_tiles) next.claim();
      if (i > 0) __syncthreads();  // all warps are through with tile i - 1
      fetch(i + 1);
      const int stage = i % kStages;
      wait(barriers_[stage], phases_ >> (kManyPhase + stage) & 1U);
      phases_ ^= 1U << (kManyPhase + stage);
      unsigned char* k = pipeline_ + stage * kStageBytes;
      unsigned char* v = k + kKBytes;
      const std::int32_t mine = warp_ * kTileKeys;
      const std::int32_t first = i * kKeys;
      if constexpr (T::kFp8) {
        unsigned char* wide = pipeline_ + kStages * kStageBytes;
        widen_rows<Element, kDqk, KLayout>(wide, mine, k);
        widen_rows<Element, kDvo, VLayout>(wide + KLayout::kBytes, mine, v);
        k = wide;
        v = wide + KLayout::kBytes;
      }
      const bool masked = first < item_.unmasked_begin || first + kKeys > item_.unmasked_end;
      if (masked) [[unlikely]] {
        __syncwarp();
        clear_unseen<kDvo, VLayout>(v, mine, tile_, p_.num_sink_tokens, item_, first + mine);
      }
      if (masked || T::kFp8 || !loader_.bulk()) [[unlikely]] {
        if constexpr (kWgmma) publish_shared();
        __syncthreads();  // all warps have written
      }
      Products::attend(q_, k, v, o_, [&](int m, float(&s)[kKeys / 8][4]) {
        if (!plain) [[unlikely]]
          adjust(m, s, scale, first);
        if (masked) [[unlikely]]
          mask(m, s, first);
        soften(m, s, plain ? scale : 1.0F);
      });
    }
  }

  /// Stacked row of the tile that this thread holds as row h of block m.
  [[nodiscard]] __device__ __forceinline__ int row_of(int m, int h) const {
    return m * 64 + warp_ * 16 + lane_ / 4 + 8 * h;
  }

  /// Cap and ALiBi, seldom needed: out of the way of the plain path. Leaves scores in base 2.
  __device__ __forceinline__ void adjust(int m, float (&s)[kKeys / 8][4], float scale, std::int32_t first) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = row_of(m, h);
      const float slope = tile_.slope[n];
      const std::int32_t distance = item_.pos_begin + first + 2 * (lane_ % 4) - tile_.pos[n];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[j][2 * h + c];
          x = score(x, scale, p_.soft_cap, slope, distance + j * 8 + c);
        }
      }
    }
  }

  /// Hides keys that a row does not see, or that lie past the item.
  __device__ __forceinline__ void mask(int m, float (&s)[kKeys / 8][4], std::int32_t first) {
    const std::int32_t begin = item_.pos_begin + first + 2 * (lane_ % 4);
    // From unmasked_begin on all rows see keys, up to their ends; if there are none that all see, nothing is known.
    const bool low = first < item_.unmasked_begin || item_.unmasked_end == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = row_of(m, h);
      const std::int32_t hi = min(tile_.hi[n], item_.pos_begin + item_.num_tokens) - begin;
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        if (i / 2 * 8 + i % 2 >= hi) s[i / 2][2 * h + i % 2] = minus_infinity();
      }
      if (!low) continue;
      const std::int32_t lo = tile_.lo[n] - begin;
      const std::int32_t sinks = p_.num_sink_tokens - begin;
      const std::int32_t item_begin = item_.pos_begin + item_.lead - begin;
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        const int at = i / 2 * 8 + i % 2;
        if (at < item_begin || (at < lo && at >= sinks)) s[i / 2][2 * h + i % 2] = minus_infinity();
      }
    }
  }

  /// One step of the online softmax of block m. Scores times `scale` are in base 2. Two rows of two chains each, side
  /// by side: a chain alone would wait for its own results.
  __device__ __forceinline__ void soften(int m, float (&s)[kKeys / 8][4], float scale) {
    float chain[4] = {s[0][0], s[0][1], s[0][2], s[0][3]};
#pragma unroll
    for (int j = 1; j < kKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) chain[i] = fmaxf(chain[i], s[j][i]);
    }
    float base[2];
    float factor[2];
    float max[2] = {fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3])};
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) max[h] = fmaxf(max[h], __shfl_xor_sync(0xffffffffU, max[h], lanes));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      max[h] = fmaxf(max[h] * scale, max_[m][h]);
      base[h] = max[h] == minus_infinity() ? 0.0F : max[h];
      factor[h] = exp2_fast(max_[m][h] - base[h]);
      max_[m][h] = max[h];
    }
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[j][i] = exp2_fast(s[j][i] * scale - base[i / 2]);
        chain[i] = j == 0 ? s[j][i] : chain[i] + s[j][i];
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum_[m][h] = sum_[m][h] * factor[h] + (chain[2 * h] + chain[2 * h + 1]);
    if (!__any_sync(0xffffffffU, factor[0] != 1.0F || factor[1] != 1.0F)) return;
#pragma unroll
    for (int d = 0; d < kDvo / 8; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_[m][d][i] *= factor[i / 2];
    }
  }

  /// Stores the states of this warp's rows.
  template <bool kPartial>
  __device__ __forceinline__ void leave(int count) {
    const float v_scale = p_.v_scale.data == nullptr ? 1.0F : p_.v_scale.data[head_ * p_.v_scale.stride];
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = sum_[m][h];
        sum += __shfl_xor_sync(0xffffffffU, sum, 1);
        sum += __shfl_xor_sync(0xffffffffU, sum, 2);
        float factor = sum == 0.0F ? 0.0F : 1.0F / sum;
        const int n = row_of(m, h);
        if (lane_ % 4 == 0 && n < count) {
          leave_lse(p_, tile_, kPartial, kDvo, n, sum == 0.0F ? minus_infinity() : max_[m][h] + log2f(sum), factor);
        }
        factor = __shfl_sync(0xffffffffU, factor, lane_ / 4 * 4) * v_scale;
        if (n >= count) continue;
        const auto value = [&](int d) { return float2{o_[m][d][2 * h] * factor, o_[m][d][2 * h + 1] * factor}; };
        if constexpr (kPartial) {
          float* to = p_.partial_o + tile_.to[n] + 2 * (lane_ % 4);
#pragma unroll
          for (int d = 0; d < kDvo / 8; ++d) *reinterpret_cast<float2*>(to + d * 8) = value(d);
        } else {
#pragma unroll
          for (int d = 0; d < kDvo / 8; ++d) store_output2(p_.out, tile_.to[n] + 2 * (lane_ % 4) + d * 8, value(d));
        }
      }
    }
  }

  const AttendParams& p_;
  const DeviceItem& item_;
  int head_;
  RowTile<kRows>& tile_;
  unsigned char* q_;
  unsigned char* pipeline_;
  int warp_;
  int lane_;
  Loader loader_;
  Barrier* barriers_;  ///< of the stages
  unsigned phases_;    ///< bit kManyPhase + s: parity of the phase that stage s's barrier is in
  float max_[kBlocks][2];
  float sum_[kBlocks][2];
  float o_[kBlocks][kDvo / 8][4];
};

}  // namespace headwater::cuda
