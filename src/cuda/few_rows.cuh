// Attention of few stacked rows (8 or 16): the decode case. Operands are swapped, S^T = K Q^T and O^T = V^T P^T, so
// that query rows lie on the narrow side (8) of the matrix instruction and little of it is padding.
//
// The four warps work on 16-key tiles in turn, each with its own pipeline of copies and its own softmax: no barrier of
// the block inside the loop. A column of S^T and of O^T is a stacked row in the same thread, so rescaling needs no
// exchange; P^T becomes the second product's operand by transposing 8x8 blocks in registers. At the end the four states
// are put together through shared memory.
//
// Shared memory: for each warp stages x (K [16, kDqk] | V [16, kDvo]) | a widened tile (fp8); then q [kN, kDqk] |
// RowTile. The states take the place of the stages.
#pragma once

#include "cuda/leave.cuh"
#include "cuda/rows.cuh"
#include "cuda/work.cuh"

namespace headwater::cuda {

template <class T, int kDqk, int kDvo, int kN>
class FewRows {
  using Element = typename T::Element;
  static constexpr int kColumns = kN / 8;
  static constexpr int kSteps = kDqk / 16;
  static constexpr int kBlocks = kDvo / 16;
  using Loader = KvLoader<T, kDqk, kDvo, kTileKeys>;
  using QLayout = TileLayout<kN, kDqk>;
  using KLayout = TileLayout<kTileKeys, kDqk>;
  using VLayout = TileLayout<kTileKeys, kDvo>;
  static constexpr int kKBytes = Loader::KLayout::kBytes;
  static constexpr int kStageBytes = kKBytes + Loader::VLayout::kBytes;
  static constexpr int kWideBytes = T::kFp8 ? KLayout::kBytes + VLayout::kBytes : 0;
  static constexpr int kOPitch = kDvo + 4;           ///< floats
  static constexpr bool kKeepQ = kN * kDqk <= 2048;  ///< q's fragments stay in registers

  __host__ __device__ static constexpr int pipeline_bytes(int stages) {
    const int pipeline = kWarps * (stages * kStageBytes + kWideBytes);
    const int states = kWarps * kN * (kOPitch + 2) * 4;
    return pipeline > states ? pipeline : states;
  }

 public:
  __host__ __device__ static constexpr int shared_bytes(int stages) {
    return pipeline_bytes(stages) + QLayout::kBytes + static_cast<int>(sizeof(RowTile<kN>));
  }

  __device__ static void attend(const AttendParams& p, const DeviceItem& item, int head, int begin, int count,
                                unsigned char* shared, Barriers& barriers, NextWork& next, unsigned& phases) {
    unsigned char* q = shared + pipeline_bytes(p.stages);
    RowTile<kN>& tile = *reinterpret_cast<RowTile<kN>*>(q + QLayout::kBytes);
    FewRows self(p, item, head, tile, q, shared, barriers, phases);
    const RowFiller<kN, kDvo> rows(p, item, head, begin, count);
    self.loop(rows, next);
    phases = self.phases_;
    next.fetch();
    __syncthreads();
    self.leave(count);
  }

 private:
  __device__ FewRows(const AttendParams& p, const DeviceItem& item, int head, RowTile<kN>& tile, unsigned char* q,
                     unsigned char* pipeline, Barriers& barriers, unsigned phases)
      : p_(p),
        item_(item),
        head_(head),
        tile_(tile),
        q_(q),
        states_(reinterpret_cast<float*>(pipeline)),
        warp_(warp_index()),
        lane_(static_cast<int>(threadIdx.x % 32)),
        loader_(p, item, head, warp_),
        mine_(pipeline + warp_ * (p.stages * kStageBytes + kWideBytes)),
        barriers_(barriers.few[warp_]),
        phases_(phases) {
    const int tiles = (item.num_tokens + kTileKeys - 1) / kTileKeys;
    num_tiles_ = tiles > warp_ ? (tiles - warp_ + kWarps - 1) / kWarps : 0;
  }

  [[nodiscard]] __device__ std::int32_t first_of(int i) const { return (warp_ + i * kWarps) * kTileKeys; }

  /// Copies of this warp's tile i, if there is one, into its stage.
  __device__ __forceinline__ void fetch(int i, int stage) {
    if (i >= num_tiles_) return;
    unsigned char* to = mine_ + stage * kStageBytes;
    loader_.load(i, 0, to, to + kKBytes, barriers_[stage]);
  }

  /// q to shared memory, and this thread's fragments of it; what the loop starts from. By all warps, while the first
  /// tiles come.
  __device__ __forceinline__ void prepare(const RowFiller<kN, kDvo>& rows) {
    rows.fill(tile_, p_);
    __syncthreads();
    load_q<kDqk, QLayout>(q_, tile_, p_);
    wait_copies();
    __syncthreads();
    if constexpr (kKeepQ) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) load_q_step(s, q_kept_[s]);
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      max_[j][0] = max_[j][1] = minus_infinity();
      sum_[j][0] = sum_[j][1] = 0.0F;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) o_[b][j][0] = o_[b][j][1] = o_[b][j][2] = o_[b][j][3] = 0.0F;
    }
  }

  /// Copies run stages - 1 tiles ahead of the products.
  __device__ __forceinline__ void loop(const RowFiller<kN, kDvo>& rows, NextWork& next) {
    const float scale = scale_of(p_, head_);
    const int ahead = p_.stages - 1;
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) fetch(i, i);
    prepare(rows);
    const int claim_at = max(0, num_tiles_ - 3);
    int stage = 0;
    for (int i = 0; i < num_tiles_; ++i) {
      if (i == claim_at) next.claim();
      __syncwarp();  // the stage before this one has been read by all lanes
      fetch(i + ahead, stage == 0 ? ahead : stage - 1);
      wait(barriers_[stage], phases_ >> stage & 1U);
      phases_ ^= 1U << stage;
      unsigned char* k = mine_ + stage * kStageBytes;
      unsigned char* v = k + kKBytes;
      stage = stage == ahead ? 0 : stage + 1;
      if constexpr (T::kFp8) {
        unsigned char* wide = mine_ + p_.stages * kStageBytes;
        widen_rows<Element, kDqk, KLayout>(wide, 0, k);
        widen_rows<Element, kDvo, VLayout>(wide + KLayout::kBytes, 0, v);
        __syncwarp();
        k = wide;
        v = wide + KLayout::kBytes;
      }
      attend_tile(first_of(i), scale, k, v);
    }
  }

  /// b operands of S^T: stacked rows x 16 elements of q.
  __device__ __forceinline__ void load_q_step(int step, std::uint32_t (&b)[kColumns][2]) const {
    if constexpr (kColumns == 1) {
      std::uint32_t r[4];
      load_matrices(r, q_ + QLayout::at(lane_ % 8, step * 2 + lane_ / 8 % 2));
      b[0][0] = r[0];
      b[0][1] = r[1];
    } else {
#pragma unroll
      for (int j = 0; j < kColumns; j += 2) {
        std::uint32_t r[4];
        load_matrices(r, q_ + QLayout::at(j * 8 + lane_ / 16 * 8 + lane_ % 8, step * 2 + lane_ / 8 % 2));
        b[j][0] = r[0];
        b[j][1] = r[1];
        b[j + 1][0] = r[2];
        b[j + 1][1] = r[3];
      }
    }
  }

  __device__ __forceinline__ void attend_tile(std::int32_t first, float scale, const unsigned char* k,
                                              unsigned char* v) {
    float s[kColumns][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t a[4];
      load_matrices(a, k + KLayout::at(lane_ % 16, step * 2 + lane_ / 16));
      if constexpr (kKeepQ) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) multiply<Element>(s[j], a, q_kept_[step][j][0], q_kept_[step][j][1]);
      } else {
        std::uint32_t b[kColumns][2];
        load_q_step(step, b);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) multiply<Element>(s[j], a, b[j][0], b[j][1]);
      }
    }
    const bool masked = first < item_.unmasked_begin || first + kTileKeys > item_.unmasked_end;
    if (masked) [[unlikely]] {
      clear_unseen<kDvo, VLayout>(v, 0, tile_, p_.num_sink_tokens, item_, first);
      publish_shared();  // a bulk copy will take this stage's place
    }
    std::uint32_t b[kColumns][2];
    if (p_.soft_cap > 0.0F || p_.alibi_slopes != nullptr || !(scale > 0.0F)) [[unlikely]] {
      adjust(s, scale, item_.pos_begin + first + lane_ / 4);
      scale = 1.0F;
    }
    if (masked) [[unlikely]]
      mask(s, first + lane_ / 4);
    soften(s, scale, b);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      std::uint32_t a[4];
      load_matrices_transposed(a, v + VLayout::at(lane_ / 16 * 8 + lane_ % 8, block * 2 + lane_ / 8 % 2));
#pragma unroll
      for (int j = 0; j < kColumns; ++j) multiply<Element>(o_[block][j], a, b[j][0], b[j][1]);
    }
  }

  /// Cap and ALiBi, seldom needed: out of the way of the plain path. Leaves scores in base 2. This thread holds keys
  /// `pos` and pos + 8 of columns 8 j + 2 (lane % 4) + {0, 1}.
  __device__ __forceinline__ void adjust(float (&s)[kColumns][4], float scale, std::int32_t pos) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 8 * j + 2 * (lane_ % 4) + i % 2;
        s[j][i] = score(s[j][i], scale, p_.soft_cap, tile_.slope[n], pos + i / 2 * 8 - tile_.pos[n]);
      }
    }
  }

  /// Hides keys that a row does not see, or that lie past the item.
  __device__ __forceinline__ void mask(float (&s)[kColumns][4], std::int32_t token) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 8 * j + 2 * (lane_ % 4) + i % 2;
        const std::int32_t t = token + i / 2 * 8;
        const std::int32_t hi = min(tile_.hi[n], item_.pos_begin + item_.num_tokens);
        if (t < item_.lead || !sees(tile_.lo[n], hi, p_.num_sink_tokens, item_.pos_begin + t)) {
          s[j][i] = minus_infinity();
        }
      }
    }
  }

  /// One step of the online softmax. Scores times `scale` are in base 2.
  __device__ __forceinline__ void soften(float (&s)[kColumns][4], float scale, std::uint32_t (&b)[kColumns][2]) {
    bool grew = false;
    float factor[kColumns][2];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x0 = s[j][c];
        float& x1 = s[j][c + 2];
        float max = fmaxf(x0, x1);
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffU, max, lanes));
        max = fmaxf(max * scale, max_[j][c]);
        const float base = max == minus_infinity() ? 0.0F : max;
        factor[j][c] = exp2_fast(max_[j][c] - base);
        grew = grew || max > max_[j][c];
        max_[j][c] = max;
        x0 = exp2_fast(x0 * scale - base);
        x1 = exp2_fast(x1 * scale - base);
        sum_[j][c] = sum_[j][c] * factor[j][c] + (x0 + x1);
      }
      b[j][0] = transpose(pack<Element>(s[j][0], s[j][1]));
      b[j][1] = transpose(pack<Element>(s[j][2], s[j][3]));
    }
    if (!__any_sync(0xffffffffU, grew)) return;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        o_[block][j][0] *= factor[j][0];
        o_[block][j][1] *= factor[j][1];
        o_[block][j][2] *= factor[j][0];
        o_[block][j][3] *= factor[j][1];
      }
    }
  }

  /// Puts the warps' states together and stores them. states_: O [warps, kN, kOPitch] | max [warps, kN] | sum, which
  /// become the warps' weights.
  __device__ __forceinline__ void leave(int count) {
    float* weights = states_ + kWarps * kN * kOPitch;
    float* sums = weights + kWarps * kN;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int n = 8 * j + 2 * (lane_ % 4) + c;
        float sum = sum_[j][c];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffffU, sum, lanes);
        if (lane_ < 4) {
          weights[warp_ * kN + n] = max_[j][c];
          sums[warp_ * kN + n] = sum;
        }
        float* o = states_ + (warp_ * kN + n) * kOPitch + lane_ / 4;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          o[block * 16] = o_[block][j][c];
          o[block * 16 + 8] = o_[block][j][c + 2];
        }
      }
    }
    __syncthreads();
    const bool partial = item_.partial_begin >= 0;
    if (static_cast<int>(threadIdx.x) < count) weigh(static_cast<int>(threadIdx.x), partial, weights, sums);
    __syncthreads();
    constexpr int kQuads = kDvo / 4;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count * kQuads; i += kThreads) {
      const int n = i / kQuads;
      const int d = i % kQuads * 4;
      float4 o{0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float weight = weights[w * kN + n];
        const float4 part = *reinterpret_cast<const float4*>(states_ + (w * kN + n) * kOPitch + d);
        o.x += weight * part.x;
        o.y += weight * part.y;
        o.z += weight * part.z;
        o.w += weight * part.w;
      }
      leave_o(p_, tile_, partial, n, d, o);
    }
  }

  /// Row n: from the warps' maxima and sums to the weights of their O; stores its LSE.
  __device__ __forceinline__ void weigh(int n, bool partial, float* weights, const float* sums) const {
    float max = minus_infinity();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) max = fmaxf(max, weights[w * kN + n]);
    const float base = max == minus_infinity() ? 0.0F : max;
    float sum = 0.0F;
    float weight[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      weight[w] = exp2_fast(weights[w * kN + n] - base);
      sum += weight[w] * sums[w * kN + n];
    }
    float factor = sum == 0.0F ? 0.0F : 1.0F / sum;
    leave_lse(p_, tile_, partial, kDvo, n, sum == 0.0F ? minus_infinity() : max + log2f(sum), factor);
    if (p_.v_scale.data != nullptr) factor *= p_.v_scale.data[head_ * p_.v_scale.stride];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) weights[w * kN + n] = weight[w] * factor;
  }

  const AttendParams& p_;
  const DeviceItem& item_;
  int head_;
  RowTile<kN>& tile_;
  unsigned char* q_;
  float* states_;
  int warp_;
  int lane_;
  Loader loader_;
  unsigned char* mine_;
  Barrier* barriers_;  ///< of this warp's stages
  unsigned phases_;    ///< bit s: parity of the phase that stage s's barrier is in
  int num_tiles_;
  float max_[kColumns][2];
  float sum_[kColumns][2];
  float o_[kBlocks][kColumns][4];
  std::uint32_t q_kept_[kKeepQ ? kSteps : 1][kColumns][2];
};

}  // namespace headwater::cuda
