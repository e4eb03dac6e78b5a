// Products of the many-rows kernel for so few rows that lanes = rows would waste most lanes: at most half a vector.
//
// Bit for bit the arithmetic of the wide form (one chain over the head for a score, one over the keys for an output),
// with other lanes: scores have lanes = keys, for which K is transposed in registers; values have lanes = head
// positions, where V lies right already and is converted in registers. Only batch-invariant mode needs this; elsewhere
// the few-rows kernel is faster.
#pragma once

#include "cpu/simd/product.h"

namespace headwater::cpu::simd {

template <class V, class Arith>
struct Narrow {
  using F = typename V::F;
  static constexpr int kL = V::kLanes;
  static constexpr int kMaxRows = kL / 2;
  static constexpr int kKeys = 2 * kL;  ///< keys of one product

  /// Units of kKeys keys as [unit][key]; `keys` past `count` repeat the last. `load(key, u, left)` is a vector of
  /// units.
  template <class Load>
  [[gnu::always_inline]] static inline void transpose_keys(const char* const* keys, int count, int units, float* to,
                                                           const Load& load) noexcept {
    for (int v = 0; v < 2; ++v) {
      const char* key[kL];
      for (int i = 0; i < kL; ++i) key[i] = keys[v * kL + i < count ? v * kL + i : count - 1];
      for (int u = 0; u < units; u += kL) {
        const int left = units - u < kL ? units - u : kL;
        F block[kL];
#pragma GCC unroll 16
        for (int i = 0; i < kL; ++i) block[i] = load(key[i], u, left);
        V::transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kL; ++i) {
          if (i < left) V::store(to + std::int64_t{u + i} * kKeys + v * kL, block[i]);
        }
      }
    }
  }

  /// The same from bf16: pairs are transposed, then split into a vector of even and one of odd elements (the order of
  /// RowStates::order). `units` is a multiple of 2 kL.
  [[gnu::always_inline]] static inline void transpose_pairs(const char* const* keys, int count, int units,
                                                            float* to) noexcept {
    for (int v = 0; v < 2; ++v) {
      const char* key[kL];
      for (int i = 0; i < kL; ++i) key[i] = keys[v * kL + i < count ? v * kL + i : count - 1];
      for (int u = 0; u < units; u += 2 * kL) {
        F block[kL];
#pragma GCC unroll 16
        for (int i = 0; i < kL; ++i) block[i] = V::load_first(key[i] + std::int64_t{u} * 2, kL);
        V::transpose(block);
        float* even = to + std::int64_t{u} * kKeys + v * kL;
#pragma GCC unroll 16
        for (int i = 0; i < kL; ++i) {
          V::store(even + std::int64_t{i} * kKeys, V::even_of_pairs(block[i]));
          V::store(even + std::int64_t{kL + i} * kKeys, V::odd_of_pairs(block[i]));
        }
      }
    }
  }

  /// Scores of up to kKeys keys, as S^T [key][lane = row], times `scale`; rows of padding get 0. `q` is [unit][kL
  /// rows], `transposed` the keys as [unit][kKeys].
  [[gnu::always_inline]] static inline void scores(const float* transposed, int count, const float* q, int rows,
                                                   int units, F scale, float* to, F& greatest,
                                                   TilePrefetch<V>& ahead) noexcept {
    ahead.block();
    alignas(64) float s[kL][kKeys] = {};
    for_blocks<4>(rows, [&]<int NM>(int m) {
      F acc[NM][2];
#pragma GCC unroll 4
      for (int i = 0; i < NM; ++i) acc[i][0] = acc[i][1] = V::zero();
      accumulate<V, Arith, NM, 2>(acc, ColumnUnits{reinterpret_cast<const char*>(q + m), kL * 4}, transposed, units,
                                  kKeys, PrefetchStep<V, 2>{ahead});
#pragma GCC unroll 4
      for (int i = 0; i < NM; ++i) {
        V::store(s[m + i], V::mul(acc[i][0], scale));
        V::store(s[m + i] + kL, V::mul(acc[i][1], scale));
      }
    });
    for (int v = 0; v * kL < count; ++v) {
      F block[kL];
#pragma GCC unroll 16
      for (int i = 0; i < kL; ++i) block[i] = V::load(s[i] + v * kL);
      V::transpose(block);
      const int left = count - v * kL < kL ? count - v * kL : kL;
      for (int i = 0; i < left; ++i) {
        greatest = V::max(greatest, block[i]);
        V::store(to + (v * kL + i) * kL, block[i]);
      }
    }
  }

  /// O [row][dim] (+)= P V; `weights` is [unit][kL rows]; `load<NV>(unit, d, x)` gives NV vectors of V from position d
  /// on. `alpha` corrects what O holds; nullptr: O holds nothing yet.
  template <class Load>
  [[gnu::always_inline]] static inline void values(const float* weights, int rows, int units, int dim,
                                                   const float* alpha, float* o, TilePrefetch<V>& ahead,
                                                   const Load& load) noexcept {
    for_blocks<4>(rows, [&]<int NM>(int m) {
      int d = 0;
      for (; d + 2 * kL <= dim; d += 2 * kL) value_block<NM, 2>(weights + m, units, dim, alpha, m, d, o, ahead, load);
      for (; d < dim; d += kL) value_block<NM, 1>(weights + m, units, dim, alpha, m, d, o, ahead, load);
    });
  }

 private:
  template <int NM, int NV, class Load>
  [[gnu::always_inline]] static inline void value_block(const float* weights, int units, int dim, const float* alpha,
                                                        int row, int d, float* o, TilePrefetch<V>& ahead,
                                                        const Load& load) noexcept {
    ahead.block();
    F acc[NM][NV];
    float* at = o + std::int64_t{row} * dim + d;
#pragma GCC unroll 4
    for (int i = 0; i < NM; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) {
        acc[i][v] = alpha == nullptr ? V::zero()
                                     : V::mul(V::load(at + std::int64_t{i} * dim + v * kL), V::set1(alpha[row + i]));
      }
    }
    const PrefetchStep<V, 2> step{ahead};
    for (int u = 0; u < units; ++u, weights += kL) {
      step();
      F x[NV];
      load(u, d, x);
#pragma GCC unroll 4
      for (int i = 0; i < NM; ++i) {
        const F weight = V::broadcast(weights + i);
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) acc[i][v] = Arith::mac(acc[i][v], weight, x[v]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < NM; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) V::store(at + std::int64_t{i} * dim + v * kL, acc[i][v]);
    }
  }
};

}  // namespace headwater::cpu::simd
