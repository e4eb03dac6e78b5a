// The one matrix-product loop of the many-rows kernel:  acc[m][lane] += sum over u of a[m][u] * b[u][lane].
//
// `a` is never packed: its 32-bit units are broadcast from memory (one fp32, or two bf16 that a dot instruction
// multiplies and adds); `b` holds one unit for each stacked row, lanes side by side. Scores: m = key, u = position in
// the head, a = K. Values: m = position in the head, u = key (or key pair), a = V, b = probabilities. An accumulator is
// one chain over u whatever the blocking, so a row's bits do not depend on the other rows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headwater::cpu::simd {

/// fp32 products; a unit is one fp32.
template <class V>
struct Fma32 {
  static constexpr int kPerUnit = 1;
  [[gnu::always_inline]] static inline typename V::F mac(typename V::F acc, typename V::F a, typename V::F b) noexcept {
    return V::fma(a, b, acc);
  }
};

/// bf16 products accumulated in fp32; a unit is a pair of bf16.
template <class V>
struct Dot16 {
  static constexpr int kPerUnit = 2;
  [[gnu::always_inline]] static inline typename V::F mac(typename V::F acc, typename V::F a, typename V::F b) noexcept {
    return V::dot_bf16(acc, a, b);
  }
};

/// Units of row m: consecutive in memory. Rows come in groups of `Group` that are `stride` bytes apart, groups lie
/// anywhere: a pointer for each of a dozen rows would not fit the register file beside the rest of the loop.
template <int Rows, int Group>
struct RowUnits {
  static constexpr int kGroups = (Rows + Group - 1) / Group;
  const char* group[kGroups];
  std::int64_t stride;
  /// `rows` points to the addresses of all rows, of which each group's first is used.
  [[gnu::always_inline]] inline RowUnits(const char* const* rows, std::int64_t row_stride) noexcept
      : stride(row_stride) {
    for (int i = 0; i < kGroups; ++i) group[i] = rows[i * Group];
  }
  [[gnu::always_inline]] inline const void* at(int m) const noexcept { return group[m / Group] + m % Group * stride; }
  [[gnu::always_inline]] inline void next() noexcept {
#pragma GCC unroll 8
    for (int i = 0; i < kGroups; ++i) group[i] += 4;
  }
};

/// Units of row m: column m of a matrix with `stride` bytes from unit to unit.
struct ColumnUnits {
  const char* base;
  std::size_t stride;
  [[gnu::always_inline]] inline const void* at(int m) const noexcept { return base + 4 * m; }
  [[gnu::always_inline]] inline void next() noexcept { base += stride; }
};

/// The cache lines of the next tile's rows, K then V, to be asked for a few at a time between products, so that they
/// never queue up in front of the loads that are needed now.
template <class V>
struct TilePrefetch {
  const char* const* row = nullptr;
  const char* const* end = nullptr;
  int bytes = 0;  ///< of a row
  int at = 0;
  const char* const* v_row = nullptr;  ///< what follows
  const char* const* v_end = nullptr;
  int v_bytes = 0;
  int share = 0;  ///< lines before a register block

  static constexpr bool kInLoop = V::kRegisters == 32;

  [[gnu::always_inline]] inline void block() noexcept {
    if constexpr (!kInLoop) {
      for (int i = 0; i < share; ++i) one();
    }
  }
  [[gnu::always_inline]] inline void one() noexcept {
    if (row == end) return;
    V::prefetch_far(*row + at);
    at += 64;
    if (at < bytes) return;
    at = 0;
    if (++row != end) return;
    row = v_row;
    end = v_end;
    bytes = v_bytes;
    v_row = v_end;
  }
  void rest() noexcept {
    while (row != end) one();
  }
};

/// N lines at every step of a product.
template <class V, int N>
struct PrefetchStep {
  TilePrefetch<V>& lines;
  [[gnu::always_inline]] inline void operator()() const noexcept {
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      if constexpr (TilePrefetch<V>::kInLoop) lines.one();
    }
  }
};

/// Accumulates NM x NV vectors over `units`; b advances by `b_step` floats a unit; `step` is called
/// once a unit.
template <class V, class Arith, int NM, int NV, class Units, class Step>
[[gnu::always_inline]] inline void accumulate(typename V::F (&acc)[NM][NV], Units a, const float* b, int units,
                                              std::int64_t b_step, const Step& step) noexcept {
  using F = typename V::F;
  for (int u = 0; u < units; ++u) {
    step();
    F lanes[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) lanes[v] = V::load(b + v * V::kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < NM; ++m) {
      const F x = V::broadcast(a.at(m));
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[m][v] = Arith::mac(acc[m][v], x, lanes[v]);
    }
    b += b_step;
    a.next();
  }
}

/// Accumulators that fit the register file beside NV operands and a broadcast.
template <class V, int NV>
inline constexpr int kProductRows = V::kRegisters == 16 ? (NV == 1   ? 12
                                                           : NV == 2 ? 6
                                                                     : 4)
                                                        : (NV == 1   ? 16
                                                           : NV == 2 ? 12
                                                                     : 6);

/// Blocks of at most Max rows begin at multiples of this, save single ones and the last pair.
template <int Max>
inline constexpr int kRowGroup = Max % 4 == 0 ? 4 : 2;

/// Calls f(integral constant NM, m) over [0, n) in register blocks: as many of the largest size as leave no small rest.
template <int Max, class F>
[[gnu::always_inline]] inline void for_blocks(int n, F&& f) noexcept {
  int m = 0;
  if constexpr (Max == 16) {
    for (; n - m >= 16; m += 16) f.template operator()<16>(m);
  }
  if constexpr (Max == 12) {
    for (; n - m >= 12; m += 12) f.template operator()<12>(m);
  }
  if constexpr (Max >= 12) {
    for (; n - m >= 8; m += 8) f.template operator()<8>(m);
  }
  if constexpr (Max == 6) {
    for (; n - m >= 6 && n - m != 8; m += 6) f.template operator()<6>(m);
  }
  for (; n - m >= 4; m += 4) f.template operator()<4>(m);
  for (; n - m >= 2; m += 2) f.template operator()<2>(m);
  for (; n - m >= 1; m += 1) f.template operator()<1>(m);
}

}  // namespace headwater::cpu::simd
