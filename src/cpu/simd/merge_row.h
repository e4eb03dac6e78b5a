// Merges the partial states of one query row.
//
// Weights are computed with lanes = heads (partial_lse is [slot, head]); O is gathered in place in the first state's
// slot, which nobody reads again. Normal mode weighs all states at once against the greatest LSE. Batch-invariant mode
// folds them one by one from the left, starting from the empty state: the same arithmetic as a kernel's own fold.
// `count` is at least 1.
#pragma once

#include "cpu/simd/item_view.h"

namespace headwater::cpu::simd {

template <class V>
class MergeRow {
  using F = typename V::F;
  static constexpr int kL = V::kLanes;

 public:
  MergeRow(const AttendParams& p, std::int32_t row) noexcept : p_(p), row_(row) {}

  void run(const std::int32_t* slots, int count) noexcept {
    for (int head = 0; head < p_.num_qo_heads; head += kL) run_heads(head, slots, count);
  }

 private:
  [[gnu::always_inline]] float* state_o(std::int32_t slot, int head) const noexcept {
    return p_.partial_o + (std::int64_t{slot} * p_.num_qo_heads + head) * p_.head_dim_vo;
  }
  /// LSE of up to kL heads; the rest are empty.
  [[gnu::always_inline]] F state_lse(std::int32_t slot, int head, int heads) const noexcept {
    const float* from = p_.partial_lse + std::int64_t{slot} * p_.num_qo_heads + head;
    if (heads == kL) return V::load(from);
    float lse[kL];
    for (int i = 0; i < kL; ++i) lse[i] = i < heads ? from[i] : -kInfinity;
    return V::load(lse);
  }

  void run_heads(int head, const std::int32_t* slots, int count) noexcept {
    const int heads = p_.num_qo_heads - head < kL ? p_.num_qo_heads - head : kL;
    if (p_.batch_invariant) {
      fold(head, heads, slots, count);
    } else {
      weigh(head, heads, slots, count);
    }
  }

  void fold(int head, int heads, const std::int32_t* slots, int count) noexcept {
    F lse = V::set1(-kInfinity);
    for (int s = 0; s < count; ++s) {
      const Fold<V> fold = Fold<V>::make(lse, state_lse(slots[s], head, heads));
      lse = fold.lse;
      combine(head, heads, slots[0], slots[s], s == 0, fold.a, fold.b);
    }
    finish(head, heads, slots[0], lse, V::set1(1.0F));
  }

  void weigh(int head, int heads, const std::int32_t* slots, int count) noexcept {
    F max = V::set1(-kInfinity);
    for (int s = 0; s < count; ++s) max = V::max(max, state_lse(slots[s], head, heads));
    max = V::select(V::equal(max, V::set1(-kInfinity)), V::zero(), max);
    F sum = V::zero();
    for (int s = 0; s < count; ++s) {
      const F weight = exp2<V>(V::sub(state_lse(slots[s], head, heads), max));
      sum = V::add(sum, weight);
      combine(head, heads, slots[0], slots[s], s == 0, V::set1(1.0F), weight);
    }
    const auto empty = V::equal(sum, V::zero());
    const F lse = V::select(empty, V::set1(-kInfinity), V::add(max, log2<V>(sum)));
    finish(head, heads, slots[0], lse, V::select(empty, V::zero(), V::div(V::set1(1.0F), sum)));
  }

  /// O of slot `to` := a * it (nothing, at first) + b * O of slot `from`, head by head.
  void combine(int head, int heads, std::int32_t to_slot, std::int32_t from_slot, bool first, F a, F b) noexcept {
    float as[kL];
    float bs[kL];
    V::store(as, a);
    V::store(bs, b);
    for (int i = 0; i < heads; ++i) {
      float* to = state_o(to_slot, head + i);
      const float* from = state_o(from_slot, head + i);
      const Fold<V> weights{V::set1(as[i]), V::set1(bs[i]), V::zero()};
      for (int d = 0; d < p_.head_dim_vo; d += kL) {
        const F before = first ? V::zero() : V::load(to + d);
        V::store(to + d, weights.apply(before, V::load(from + d)));
      }
    }
  }

  /// Adds the learned sink and writes out and lse.
  void finish(int head, int heads, std::int32_t slot, F lse, F factor_of_o) noexcept {
    if (p_.sinks != nullptr) {
      float sinks[kL];
      for (int i = 0; i < kL; ++i) sinks[i] = i < heads ? p_.sinks[head + i] * kLog2E : -kInfinity;
      const Fold<V> fold = Fold<V>::make(lse, V::load(sinks));
      factor_of_o = V::mul(factor_of_o, fold.a);
      lse = fold.lse;
    }
    float lses[kL];
    float factors[kL];
    V::store(lses, lse);
    V::store(factors, factor_of_o);
    with_float_type(p_.out.dtype, [&]<DType T>() {
      for (int i = 0; i < heads; ++i) {
        const float* from = state_o(slot, head + i);
        char* to = static_cast<char*>(p_.out.data) +
                   (row_ * p_.out.row_stride + (head + i) * p_.out.head_stride) * element_bytes(T);
        const F factor = V::set1(factors[i]);
        for (int d = 0; d < p_.head_dim_vo; d += kL) {
          store_from_f32<V, T>(to + d * element_bytes(T), V::mul(V::load(from + d), factor));
        }
      }
    });
    if (p_.lse.data == nullptr) return;
    for (int i = 0; i < heads; ++i) {
      p_.lse.data[row_ * p_.lse.row_stride + (head + i) * p_.lse.head_stride] =
          p_.lse.base == LseBase::two ? lses[i] : lses[i] * kLn2;
    }
  }

  const AttendParams& p_;
  std::int64_t row_;
};

}  // namespace headwater::cpu::simd
