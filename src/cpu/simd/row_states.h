// What the many-rows kernel keeps for the stacked rows of one KV head: packed queries, running maxima and sums, O^T;
// how a state is opened, closed, folded into those before it and sent to the output or to a partial slot.
//
// Row blocks of NV vectors lie one after the other; inside a block everything is [unit or d][NV x lanes]. In narrow
// form (narrow.h; one block) O is [row][Dvo] instead.
#pragma once

#include "cpu/scratch.h"
#include "cpu/simd/item_view.h"
#include "cpu/simd/narrow.h"

namespace headwater::cpu::simd {

template <class V, class Arith, DType Kv>
class ManyRows;

/// The base of ManyRows, for its eyes only.
template <class V, class Arith, DType Kv>
class RowStates {
  template <class, class, DType>
  friend class ManyRows;

  using F = typename V::F;
  static constexpr int kL = V::kLanes;
  static constexpr int kMaxVectors = V::kRegisters == 16 ? 2 : 4;  ///< of a row block
  static constexpr bool kDot = Arith::kPerUnit == 2;
  /// Keys are broadcast from where they lie; with few registers, blocks of six keys ask for evenly spaced ones.
  static constexpr bool kKeysInPlace = kDot || (Kv == DType::f32 && V::kRegisters == 32);
  /// bf16 tiles are converted two vectors at a time, split in even and odd elements: cheaper than widening each. Q is
  /// packed, and O^T kept, in the same order.
  static constexpr bool kSplit = !kDot && Kv == DType::bf16;

  RowStates(const AttendParams& p, const detail::WorkItem& item, Scratch scratch) noexcept
      : view_(p, item),
        rows_((view_.num_rows + kL - 1) / kL * kL),
        units_(p.head_dim_qk / Arith::kPerUnit),
        dvo_(p.head_dim_vo),
        k_stride_(p.head_dim_qk + kTilePad),
        v_stride_(p.head_dim_vo + kTilePad) {
    const ManyScratch at = ManyScratch::make(
        {p.num_kv_heads, p.group_size, p.head_dim_qk, p.head_dim_vo, p.batch_invariant}, item.num_rows);
    q_ = reinterpret_cast<float*>(scratch.data + at.q);
    o_ = reinterpret_cast<float*>(scratch.data + at.o);
    o_fold_ = reinterpret_cast<float*>(scratch.data + at.o_fold);
    scores_ = reinterpret_cast<float*>(scratch.data + at.scores);
    k_tile_ = reinterpret_cast<float*>(scratch.data + at.k_tile);
    v_tile_ = reinterpret_cast<float*>(scratch.data + at.v_tile);
    float* rows = reinterpret_cast<float*>(scratch.data + at.rows);
    max_ = rows;
    sum_ = rows + rows_;
    fold_lse_ = rows + 2 * rows_;
    slope_ = rows + 3 * rows_;
    lo_ = reinterpret_cast<std::int32_t*>(rows + 4 * rows_);
    hi_ = lo_ + rows_;
    pos_ = hi_ + rows_;
    split_qk_ = kSplit && p.head_dim_qk % (2 * kL) == 0;
    split_vo_ = kSplit && p.head_dim_vo % (2 * kL) == 0;
    one_block_ = rows_ <= kMaxVectors * kL && (rows_ & (rows_ - 1)) == 0;
    if (one_block_ && !kKeysInPlace) k_tile_ = v_tile_ = p.head_dim_qk > dvo_ ? k_tile_ : v_tile_;
    narrow_ = p.batch_invariant && view_.num_rows <= Narrow<V, Arith>::kMaxRows;
  }

  /// Where element d of a row lies in a converted row.
  [[gnu::always_inline]] static int order(int d, bool split) noexcept {
    return split ? d / (2 * kL) * (2 * kL) + d % 2 * kL + d % (2 * kL) / 2 : d;
  }

  template <class Body>
  [[gnu::always_inline]] void for_row_blocks(Body&& body) noexcept {
    int row = 0;
    if constexpr (kMaxVectors >= 4) {
      for (; rows_ - row >= 4 * kL; row += 4 * kL) body.template operator()<4>(row);
    }
    for (; rows_ - row >= 2 * kL; row += 2 * kL) body.template operator()<2>(row);
    if (row < rows_) body.template operator()<1>(row);
  }

  // ---- states ----

  void open_state() noexcept {
    for (int i = 0; i < rows_; ++i) {
      max_[i] = -kInfinity;
      sum_[i] = 0.0F;
    }
  }

  /// Normalising factor and LSE of the open state of the vector of rows at `lane`.
  [[gnu::always_inline]] void close_state(int lane, F& factor, F& lse) const noexcept {
    const F sum = V::load(sum_ + lane);
    const auto empty = V::equal(sum, V::zero());
    factor = V::select(empty, V::zero(), V::div(V::set1(view_.value_factor(head_)), sum));
    lse = V::select(empty, V::set1(-kInfinity), V::add(V::load(max_ + lane), log2<V>(sum)));
  }

  /// A block that no row of which saw a key has never been opened: O^T holds what was there before.
  template <int NV>
  void clear_unopened(int row) noexcept {
    for (int v = 0; v < NV; ++v) {
      if (!V::all(V::equal(V::load(sum_ + row + v * kL), V::zero()))) return;
    }
    float* o = o_ + std::int64_t{row} * dvo_;
    for (std::int64_t i = 0; i < std::int64_t{NV} * kL * dvo_; i += kL) V::store(o + i, V::zero());
  }

  /// Folds the closed states of a block into those before it.
  template <int NV>
  [[gnu::noinline]] void fold_state(int row) noexcept {
    clear_unopened<NV>(row);
    for (int v = 0; v < NV; ++v) {
      const int lane = row + v * kL;
      F factor;
      F lse;
      close_state(lane, factor, lse);
      const Fold<V> fold = Fold<V>::make(V::load(fold_lse_ + lane), lse);
      V::store(fold_lse_ + lane, fold.lse);
      if (NV == 1 && narrow_) {
        fold_narrow(fold, factor);
        continue;
      }
      float* from = o_ + std::int64_t{row} * dvo_ + v * kL;
      float* to = o_fold_ + std::int64_t{row} * dvo_ + v * kL;
      for (int d = 0; d < dvo_; ++d, from += NV * kL, to += NV * kL) {
        V::store(to, fold.apply(V::load(to), V::mul(V::load(from), factor)));
      }
    }
  }

  void fold_narrow(const Fold<V>& fold, F factor) noexcept {
    alignas(64) float a[kL];
    alignas(64) float b[kL];
    alignas(64) float factors[kL];
    V::store(a, fold.a);
    V::store(b, fold.b);
    V::store(factors, factor);
    for (int i = 0; i < view_.num_rows; ++i) {
      const Fold<V> weights{V::set1(a[i]), V::set1(b[i]), V::zero()};
      for (std::int64_t at = std::int64_t{i} * dvo_; at < std::int64_t{i + 1} * dvo_; at += kL) {
        const F closed = V::mul(V::load(o_ + at), V::set1(factors[i]));
        V::store(o_fold_ + at, weights.apply(V::load(o_fold_ + at), closed));
      }
    }
  }

  /// Sends a block's states on their way: O^T of `o` (open, or folded and normalised) and the LSE.
  template <int NV>
  [[gnu::noinline]] void emit(int row, int state, const float* o, bool folded) noexcept {
    if (!folded) clear_unopened<NV>(row);
    for (int v = 0; v < NV; ++v) {
      const int lane = row + v * kL;
      const int count = view_.num_rows - lane < kL ? view_.num_rows - lane : kL;
      if (count <= 0) return;
      F factor = V::set1(1.0F);
      F lse = V::load(fold_lse_ + lane);
      if (!folded) close_state(lane, factor, lse);
      F sink_weight = V::set1(1.0F);
      if (view_.direct() && view_.p.sinks != nullptr) {
        float sinks[kL];
        for (int i = 0; i < kL; ++i) sinks[i] = i < count ? view_.sink(lane + i, head_) : -kInfinity;
        const Fold<V> fold = Fold<V>::make(lse, V::load(sinks));
        sink_weight = fold.a;
        lse = fold.lse;
      }
      float lses[kL];
      V::store(lses, lse);
      char* to[kL];
      for (int i = 0; i < count; ++i) {
        view_.store_lse(lane + i, state, head_, lses[i]);
        to[i] = view_.destination(lane + i, state, head_);
      }
      if (NV == 1 && narrow_) {
        emit_narrow(to, o, factor, sink_weight);
        return;
      }
      const float* from = o + std::int64_t{row} * dvo_ + v * kL;
      with_float_type(view_.destination_dtype(), [&]<DType T>() {
        const std::int64_t bytes = element_bytes(T);
        for (int d = 0; d < dvo_; d += kL) {
          F block[kL];
#pragma GCC unroll 16
          for (int i = 0; i < kL; ++i) {
            block[i] =
                V::mul(V::mul(V::load(from + std::int64_t{order(d + i, split_vo_)} * NV * kL), factor), sink_weight);
          }
          V::transpose(block);
#pragma GCC unroll 16
          for (int i = 0; i < kL; ++i) {
            if (i < count) store_from_f32<V, T>(to[i] + d * bytes, block[i]);
          }
        }
      });
    }
  }

  void emit_narrow(char* const* to, const float* o, F factor, F sink_weight) noexcept {
    alignas(64) float factors[kL];
    alignas(64) float sinks[kL];
    V::store(factors, factor);
    V::store(sinks, sink_weight);
    with_float_type(view_.destination_dtype(), [&]<DType T>() {
      for (int i = 0; i < view_.num_rows; ++i) {
        const float* from = o + std::int64_t{i} * dvo_;
        for (int d = 0; d < dvo_;) {
          F x[2] = {V::load(from + d), split_vo_ ? V::load(from + d + kL) : V::zero()};
          if constexpr (kSplit) {
            if (split_vo_) V::join_split(x[0], x[1], x[0], x[1]);
          }
          for (int k = 0; k < (split_vo_ ? 2 : 1); ++k, d += kL) {
            const F y = V::mul(V::mul(x[k], V::set1(factors[i])), V::set1(sinks[i]));
            store_from_f32<V, T>(to[i] + d * element_bytes(T), y);
          }
        }
      }
    });
  }

  // ---- queries ----

  /// Q of the head as [row block][unit][rows]; fp32 queries are scaled here, rows of padding are zero.
  void pack_queries() noexcept {
    for_row_blocks([&]<int NV>(int row) {
      for (int v = 0; v < NV; ++v) {
        const int lane = row + v * kL;
        const char* from[kL];
        for (int i = 0; i < kL; ++i) from[i] = lane + i < view_.num_rows ? view_.query(lane + i, head_) : nullptr;
        float* to = q_ + std::int64_t{row} * units_ + v * kL;
        if constexpr (kDot) {
          pack_pairs<NV>(from, to);
        } else {
          with_float_type(view_.p.q.dtype, [&]<DType T>() { pack_f32<NV, T>(from, to); });
        }
      }
    });
  }

  template <int NV, DType T>
  [[gnu::noinline]] void pack_f32(const char* const* from, float* to) noexcept {
    const F scale = V::set1(view_.score_factor(head_));
    for (int d = 0; d < units_; d += kL) {
      F block[kL];
#pragma GCC unroll 16
      for (int i = 0; i < kL; ++i) {
        block[i] = from[i] == nullptr ? V::zero() : V::mul(load_as_f32<V, T>(from[i] + d * element_bytes(T)), scale);
      }
      V::transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kL; ++i) V::store(to + std::int64_t{order(d + i, split_qk_)} * NV * kL, block[i]);
    }
  }

  /// Pairs of bf16 as they are; the last block may be half full (head_dim 48, 80, ...).
  template <int NV>
  [[gnu::noinline]] void pack_pairs(const char* const* from, float* to) noexcept {
    for (int u = 0; u < units_; u += kL) {
      const int count = units_ - u < kL ? units_ - u : kL;
      F block[kL];
#pragma GCC unroll 16
      for (int i = 0; i < kL; ++i) {
        block[i] = from[i] == nullptr ? V::zero() : V::load_first(from[i] + std::int64_t{u} * 4, count);
      }
      V::transpose(block);
      for (int i = 0; i < count; ++i) V::store(to + std::int64_t{u + i} * NV * kL, block[i]);
    }
  }

  ItemView view_;
  int rows_;   ///< stacked rows, padded
  int units_;  ///< 32-bit units of a key
  int dvo_;
  std::int64_t k_stride_;  ///< fp32 elements of a row of k_tile
  std::int64_t v_stride_;  ///< units of a row of v_tile
  float* q_;               ///< [row blocks][units][NV x lanes]
  float* o_;               ///< [row blocks][Dvo][NV x lanes]
  float* o_fold_;          ///< the same
  float* scores_;          ///< [slots][NV x lanes]
  float* k_tile_;
  float* v_tile_;
  float* max_;  ///< [rows], base-2 units
  float* sum_;
  float* fold_lse_;
  float* slope_;  ///< [rows], times log2 e
  std::int32_t* lo_;
  std::int32_t* hi_;
  std::int32_t* pos_;
  int head_ = 0;
  bool narrow_ = false;     ///< O is [row][Dvo] and products take other lanes: narrow.h
  bool one_block_ = false;  ///< of rows: V may be converted over K, whose scores are done
  bool split_qk_ = false;
  bool split_vo_ = false;
};

}  // namespace headwater::cpu::simd
