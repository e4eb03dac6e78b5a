// Merges the partial states of one query row.
//
// Weights are computed with lanes = heads (partial_lse is [slot, head]) for a block of states at a time; then each head
// in turn adds up its states in registers and is read once. Between blocks of states the sum waits in the first
// state's slot, which nobody reads again. Normal mode weighs all states against the greatest LSE. Batch-invariant mode
// folds them one by one from the left, starting from the empty state: the same arithmetic as a kernel's own fold.
// `count` is at least 1.
#pragma once

#include "cpu/simd/item_view.h"

namespace headwater::cpu::simd {

template <class V>
class MergeRow {
  using F = typename V::F;
  static constexpr int kL = V::kLanes;
  static constexpr int kStates = 16;  ///< of a block

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
    F base = V::zero();
    if (!p_.batch_invariant) {
      F max = V::set1(-kInfinity);
      for (int s = 0; s < count; ++s) max = V::max(max, state_lse(slots[s], head, heads));
      base = V::select(V::equal(max, V::set1(-kInfinity)), V::zero(), max);
    }
    F sum = V::zero();               // normal mode: of the weights
    F folded = V::set1(-kInfinity);  // batch-invariant mode: LSE so far
    for (int begin = 0; begin < count; begin += kStates) {
      const int states = count - begin < kStates ? count - begin : kStates;
      for (int s = 0; s < states; ++s) {
        const F lse = state_lse(slots[begin + s], head, heads);
        F a = V::set1(1.0F);
        F b;
        if (p_.batch_invariant) {
          const Fold<V> fold = Fold<V>::make(folded, lse);
          folded = fold.lse;
          a = fold.a;
          b = fold.b;
        } else {
          b = exp2<V>(V::sub(lse, base));
          sum = V::add(sum, b);
        }
        V::store(a_[s], a);
        V::store(b_[s], b);
      }
      if (begin + states < count) {
        add_block(head, heads, slots, begin, states);
        continue;
      }
      if (p_.batch_invariant) {
        finish(head, heads, slots, begin, states, folded, V::set1(1.0F));
      } else {
        const auto empty = V::equal(sum, V::zero());
        const F lse = V::select(empty, V::set1(-kInfinity), V::add(base, log2<V>(sum)));
        finish(head, heads, slots, begin, states, lse, V::select(empty, V::zero(), V::div(V::set1(1.0F), sum)));
      }
    }
  }

  /// NV vectors of the sum over states [0, begin + states), of which those before `begin` wait in the first slot.
  template <int NV>
  [[gnu::always_inline]] void sum_states(int i, int head, int d, const std::int32_t* slots, int begin, int states,
                                         F (&acc)[NV]) const noexcept {
    const float* before = state_o(slots[0], head) + d;
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[v] = begin == 0 ? V::zero() : V::load(before + v * kL);
    for (int s = 0; s < states; ++s) {
      const float* from = state_o(slots[begin + s], head) + d;
      const Fold<V> weights{V::broadcast(&a_[s][i]), V::broadcast(&b_[s][i]), V::zero()};
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        V::prefetch_near(reinterpret_cast<const char*>(from + p_.head_dim_vo + v * kL));  // the next head's
        acc[v] = weights.apply(acc[v], V::load(from + v * kL));
      }
    }
  }

  /// Calls f(integral constant NV, d) over a head's vectors.
  template <class Body>
  [[gnu::always_inline]] void for_vectors(Body&& body) const noexcept {
    int d = 0;
    for (; d + 8 * kL <= p_.head_dim_vo; d += 8 * kL) body.template operator()<8>(d);
    for (; d + 4 * kL <= p_.head_dim_vo; d += 4 * kL) body.template operator()<4>(d);
    for (; d < p_.head_dim_vo; d += kL) body.template operator()<1>(d);
  }

  void add_block(int head, int heads, const std::int32_t* slots, int begin, int states) noexcept {
    for (int i = 0; i < heads; ++i) {
      float* to = state_o(slots[0], head + i);
      for_vectors([&]<int NV>(int d) {
        F acc[NV];
        sum_states<NV>(i, head + i, d, slots, begin, states, acc);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) V::store(to + d + v * kL, acc[v]);
      });
    }
  }

  /// Adds the last block and the learned sink, and writes out and lse.
  void finish(int head, int heads, const std::int32_t* slots, int begin, int states, F lse, F factor_of_o) noexcept {
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
        char* to = static_cast<char*>(p_.out.data) +
                   (row_ * p_.out.row_stride + (head + i) * p_.out.head_stride) * element_bytes(T);
        const F factor = V::set1(factors[i]);
        for_vectors([&]<int NV>(int d) {
          F acc[NV];
          sum_states<NV>(i, head + i, d, slots, begin, states, acc);
#pragma GCC unroll 8
          for (int v = 0; v < NV; ++v) {
            store_from_f32<V, T>(to + (d + v * kL) * element_bytes(T), V::mul(acc[v], factor));
          }
        });
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
  alignas(64) float a_[kStates][kL];  ///< weights of the sum so far and of each state of the block: lanes = heads
  alignas(64) float b_[kStates][kL];
};

}  // namespace headwater::cpu::simd
