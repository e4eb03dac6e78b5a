// The many-rows kernel: a tile of up to 64 keys against all stacked rows of one KV head, as two matrix products.
//
// Lanes are rows. Q is packed once per head as [unit][rows]; K is broadcast from memory where it lies (or from a tile
// that was converted to fp32 once), giving S^T [key][rows]; softmax runs down the lanes without any shuffle; V, a tile
// of units [key or key pair][d], is broadcast in its turn against P, giving O^T [d][rows], which is transposed once at
// the end. Rows are taken in blocks of NV vectors so that a block's S^T and O^T stay in cache.
//
// Batch-invariant mode: tiles start at fixed offsets of a fixed chunk, a token outside the item's range is an empty
// slot, and states are closed at the end of every chunk. A row's arithmetic is then a function of its own range alone.
#pragma once

#include <cstring>

#include "cpu/simd/row_states.h"

namespace headwater::cpu::simd {

template <class V, class Arith, DType Kv>
class ManyRows : RowStates<V, Arith, Kv> {
  using Base = RowStates<V, Arith, Kv>;
  using Base::dvo_;
  using Base::fold_lse_;
  using Base::for_row_blocks;
  using Base::head_;
  using Base::hi_;
  using Base::k_stride_;
  using Base::k_tile_;
  using Base::kDot;
  using Base::kKeysInPlace;
  using Base::kL;
  using Base::kMaxVectors;
  using Base::kSplit;
  using Base::lo_;
  using Base::max_;
  using Base::narrow_;
  using Base::o_;
  using Base::o_fold_;
  using Base::one_block_;
  using Base::pos_;
  using Base::q_;
  using Base::rows_;
  using Base::scores_;
  using Base::slope_;
  using Base::split_qk_;
  using Base::split_vo_;
  using Base::sum_;
  using Base::units_;
  using Base::v_stride_;
  using Base::v_tile_;
  using Base::view_;
  using typename Base::F;

  /// Keys of a tile. Measured: in fp32, 32 are better than 64 with AVX-512 (L1 of 48 KiB) and worse with AVX2 on Zen 3.
  static constexpr int kTile = kDot || V::kRegisters == 16 ? kTileKeys : kTileKeys / 2;
  static constexpr int kExpDegree = kDot ? 4 : 5;

  struct Tile {
    int begin = 0;  ///< slots [begin, end) hold tokens
    int end = 0;
    std::int32_t pos = 0;  ///< position of slot 0
    const char* k[kTile];
    const char* v[kTile];
  };

 public:
  ManyRows(const AttendParams& p, const detail::WorkItem& item, Scratch scratch) noexcept
      : Base(p, item, scratch), special_(p.logits_soft_cap > 0.0F || p.alibi_slopes != nullptr) {
    product_blocks_ = narrow_ ? kTile / Narrow<V, Arith>::kKeys + dvo_ / (2 * kL) : 0;
    if (narrow_) return;
    for_row_blocks([&]<int NV>(int /*row*/) { product_blocks_ += (kTile + dvo_) / kProductRows<V, NV> + 1; });
  }

  void run() noexcept {
    for (int i = 0; i < rows_; ++i) {
      const bool real = i < view_.num_rows;
      const detail::RowRange range = real ? view_.p.rows[view_.query_row(i)] : detail::RowRange{};
      lo_[i] = range.lo;
      hi_[i] = range.hi;
      pos_[i] = range.pos;
    }
    const int heads_end = view_.item.kv_head_end;
    fill(tiles_[0], view_.item.kv_head_begin, view_.item.pos_begin);
    // NOLINTNEXTLINE(bugprone-infinite-loop): the condition is head_
    for (head_ = view_.item.kv_head_begin; head_ < heads_end; ++head_) run_head();
  }

 private:
  static constexpr int kOpenZero = 0, kOpenKeep = 1, kOpenScale = 2;

  // ---- which tokens a tile and a state cover ----

  std::int32_t item_end() const noexcept { return view_.item.pos_begin + view_.item.num_tokens; }
  std::int32_t chunk_begin(std::int32_t pos) const noexcept { return pos - pos % view_.p.invariant_chunk; }
  std::int32_t state_end(std::int32_t pos) const noexcept {
    if (!view_.p.batch_invariant) return item_end();
    const std::int32_t end = chunk_begin(pos) + view_.p.invariant_chunk;
    return end < item_end() ? end : item_end();
  }

  /// The tile that holds `pos`, its first token.
  void fill(Tile& tile, int head, std::int32_t pos) const noexcept {
    const std::int32_t origin = view_.p.batch_invariant ? chunk_begin(pos) : view_.item.pos_begin;
    const std::int32_t end = state_end(pos);
    tile.pos = pos - (pos - origin) % kTile;
    tile.begin = pos - tile.pos;
    tile.end = end - tile.pos < kTile ? end - tile.pos : kTile;
    view_.locate(pos - view_.item.pos_begin, tile.end - tile.begin, head, tile.k + tile.begin, tile.v + tile.begin);
  }

  void run_head() noexcept {
    this->pack_queries();
    scale_ = view_.score_factor(head_);
    for (int i = 0; i < rows_; ++i) {
      const bool slope = view_.p.alibi_slopes != nullptr && i < view_.num_rows;
      slope_[i] = slope ? view_.p.alibi_slopes[view_.query_head(i, head_)] * kLog2E : 0.0F;
      fold_lse_[i] = -kInfinity;
    }
    const bool fold = view_.p.batch_invariant && view_.item.num_states == 1;
    if (fold) {
      for (std::int64_t i = 0; i < std::int64_t{rows_} * dvo_; i += kL) V::store(o_fold_ + i, V::zero());
    }
    int state = 0;
    for (std::int32_t pos = view_.item.pos_begin; pos < item_end(); ++state) {
      const std::int32_t end = state_end(pos);
      this->open_state();
      while (pos < end) pos = run_tile();
      for_row_blocks([&]<int NV>(int row) {
        if (fold) {
          this->template fold_state<NV>(row);
          if (end == item_end()) this->template emit<NV>(row, 0, o_fold_, true);
        } else {
          this->template emit<NV>(row, state, o_, false);
        }
      });
    }
  }

  // ---- one tile ----

  /// Processes the current tile, whose successor is prefetched meanwhile; returns the position after it.
  [[gnu::noinline]] std::int32_t run_tile() noexcept {
    const Tile& tile = tiles_[current_];
    const std::int32_t after = tile.pos + tile.end;
    Tile& next = tiles_[current_ ^ 1];
    next.begin = next.end = 0;
    if (after < item_end()) {
      fill(next, head_, after);
    } else if (head_ + 1 < view_.item.kv_head_end) {
      fill(next, head_ + 1, view_.item.pos_begin);
    }
    const int t = tile.pos - view_.item.pos_begin;
    masked_ = t + tile.begin < view_.item.unmasked_begin || t + tile.end > view_.item.unmasked_end;
    if (!narrow_) prepare_keys(tile);
    if (!one_block_) prepare_values(tile);
    const int bytes = static_cast<int>(element_bytes(Kv));
    const int lines = (next.end - next.begin) * ((view_.p.head_dim_qk + dvo_) * bytes / 64);
    ahead_ = {next.k + next.begin, next.k + next.end, view_.p.head_dim_qk * bytes, 0, next.v + next.begin,
              next.v + next.end,   dvo_ * bytes,      lines / product_blocks_ + 1};
    for_row_blocks([&]<int NV>(int row) { run_block<NV>(row, tile); });
    ahead_.rest();
    current_ ^= 1;
    return after;
  }

  /// `soon`: the row whose turn comes shortly after, asked for meanwhile.
  [[gnu::always_inline]] static void convert_row(const char* from, int n, bool split, float* to,
                                                 const char* soon) noexcept {
    const int bytes = n * static_cast<int>(element_bytes(Kv));
    for (int at = 0; at < bytes; at += 64) V::prefetch_near(soon + at);
    if (kSplit && split) {
      for (int d = 0; d < n; d += 2 * kL) {
        F even;
        F odd;
        V::load_bf16_split(from + 2 * d, even, odd);
        V::store(to + d, even);
        V::store(to + d + kL, odd);
      }
    } else {
      for (int d = 0; d < n; d += kL) V::store(to + d, load_as_f32<V, Kv>(from + d * element_bytes(Kv)));
    }
  }

  /// A vector of units of a key, from unit u on.
  [[gnu::always_inline]] F load_units(const char* key, int u, int left) const noexcept {
    if constexpr (kDot) {
      return V::load_first(key + std::int64_t{u} * 4, left);
    } else {
      return load_as_f32<V, Kv>(key + u * element_bytes(Kv));
    }
  }

  /// Sets keys_ and key_step_: in place where every group of four keys is evenly spaced (pages of a multiple of four),
  /// else converted, or copied as they are.
  void prepare_keys(const Tile& tile) noexcept {
    keys_ = tile.k;
    key_step_ = view_.kv.k.token_stride * element_bytes(Kv);
    if (kKeysInPlace && evenly_spaced(tile)) return;
    keys_ = k_rows_;
    key_step_ = k_stride_ * 4;
    for (int s = tile.begin; s < tile.end; ++s) {
      float* to = k_tile_ + std::int64_t{s} * k_stride_;
      k_rows_[s] = reinterpret_cast<const char*>(to);
      if constexpr (kDot) {
        std::memcpy(to, tile.k[s], static_cast<std::size_t>(units_) * 4);
      } else {
        convert_row(tile.k[s], view_.p.head_dim_qk, split_qk_, to, tile.k[s + 4 < tile.end ? s + 4 : s]);
      }
    }
  }

  bool evenly_spaced(const Tile& tile) const noexcept {
    bool even = true;
    for (int s = tile.begin; s + 1 < tile.end; ++s) {
      even = even && ((s + 1 - tile.begin) % 4 == 0 || tile.k[s + 1] - tile.k[s] == key_step_);
    }
    return even;
  }

  void prepare_values(const Tile& tile) noexcept {
    if constexpr (kDot) {
      for (int u = tile.begin / 2; u < (tile.end + 1) / 2; ++u) {
        const bool first = 2 * u >= tile.begin;
        const bool second = 2 * u + 1 < tile.end;
        V::pair_rows(first ? tile.v[2 * u] : nullptr, second ? tile.v[2 * u + 1] : nullptr, dvo_,
                     v_tile_ + std::int64_t{u} * v_stride_);
      }
    } else {
      for (int s = tile.begin; s < tile.end; ++s) {
        convert_row(tile.v[s], dvo_, split_vo_, v_tile_ + std::int64_t{s} * v_stride_,
                    tile.v[s + 4 < tile.end ? s + 4 : s]);
      }
    }
  }

  template <int NV>
  [[gnu::noinline]] void run_block(int row, const Tile& tile) noexcept {
    F tile_max[NV];
    for (int v = 0; v < NV; ++v) tile_max[v] = V::set1(-kInfinity);
    if (NV == 1 && narrow_) {
      narrow_scores(tile, tile_max[0]);
    } else {
      score_block<NV>(row, tile, tile_max);
    }
    if (masked_ || special_) transform_scores<NV>(row, tile, tile_max);
    const int open = softmax_block<NV>(row, tile, tile_max);
    if (open < 0) return;
    if (one_block_ && (kDot || !narrow_)) prepare_values(tile);
    if (NV == 1 && narrow_) {
      narrow_values(tile, open);
    } else {
      add_values<NV>(row, tile, open);
    }
  }

  [[gnu::always_inline]] void narrow_scores(const Tile& tile, F& tile_max) noexcept {
    using Form = Narrow<V, Arith>;
    for (int s = tile.begin; s < tile.end; s += Form::kKeys) {
      const int count = tile.end - s < Form::kKeys ? tile.end - s : Form::kKeys;
      if (kSplit && split_qk_) {
        Form::transpose_pairs(tile.k + s, count, units_, k_tile_);
      } else {
        Form::transpose_keys(
            tile.k + s, count, units_, k_tile_, [&](const char* key, int u, int n) __attribute__((always_inline)) {
              return load_units(key, u, n);
            });
      }
      Form::scores(k_tile_, count, q_, view_.num_rows, units_, V::set1(kDot ? scale_ : 1.0F),
                   scores_ + std::int64_t{s} * kL, tile_max, ahead_);
    }
  }

  [[gnu::always_inline]] void narrow_values(const Tile& tile, int open) noexcept {
    alignas(64) float alpha[kL];
    V::store(alpha, alpha_[0]);
    const int begin = tile.begin / Arith::kPerUnit;
    const int units = (tile.end + Arith::kPerUnit - 1) / Arith::kPerUnit - begin;
    const float* pairs = v_tile_ + std::int64_t{begin} * v_stride_;
    const char* const* rows = tile.v + begin;
    Narrow<V, Arith>::values(
        scores_ + std::int64_t{begin} * kL, view_.num_rows, units, dvo_, open == kOpenZero ? nullptr : alpha, o_,
        ahead_, [&]<int NV>(int u, int d, F(&x)[NV]) __attribute__((always_inline)) {
          load_values<NV>(kDot ? nullptr : rows[u], pairs + std::int64_t{u} * v_stride_, d, x);
        });
  }

  /// NV vectors of V from position d of the converted order on: of pairs of rows (dot products), or of a row.
  template <int NV>
  [[gnu::always_inline]] void load_values(const char* row, const float* pairs, int d, F (&x)[NV]) const noexcept {
    if constexpr (NV == 2 && kSplit) {
      if (split_vo_) {
        V::load_bf16_split(row + 2 * d, x[0], x[1]);
        return;
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      if constexpr (kDot) {
        x[v] = V::load(pairs + d + v * kL);
      } else {
        x[v] = load_as_f32<V, Kv>(row + (d + v * kL) * element_bytes(Kv));
      }
    }
  }

  /// S^T of a block, scaled, and its greatest scores.
  template <int NV>
  [[gnu::always_inline]] void score_block(int row, const Tile& tile, F (&tile_max)[NV]) noexcept {
    const char* const* keys = keys_ + tile.begin;
    const float* q = q_ + std::int64_t{row} * units_;
    const F scale = V::set1(scale_);
    for_blocks<kProductRows<V, NV>>(tile.end - tile.begin, [&]<int NM>(int m) {
      ahead_.block();
      F acc[NM][NV];
#pragma GCC unroll 16
      for (int i = 0; i < NM; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[i][v] = V::zero();
      }
      accumulate<V, Arith, NM, NV>(acc, RowUnits<NM, kRowGroup<kProductRows<V, NV>>>{keys + m, key_step_}, q, units_,
                                   NV * kL, PrefetchStep<V, 1>{ahead_});
      float* to = scores_ + std::int64_t{tile.begin + m} * NV * kL;
#pragma GCC unroll 16
      for (int i = 0; i < NM; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          const F x = kDot ? V::mul(acc[i][v], scale) : acc[i][v];
          tile_max[v] = V::max(tile_max[v], x);
          V::store(to + (i * NV + v) * kL, x);
        }
      }
    });
  }

  /// Soft cap, ALiBi and mask; then the greatest scores anew.
  template <int NV>
  [[gnu::noinline]] void transform_scores(int row, const Tile& tile, F (&tile_max)[NV]) noexcept {
    const AttendParams& p = view_.p;
    const F cap = V::set1(p.logits_soft_cap * kLog2E);
    for (int v = 0; v < NV; ++v) tile_max[v] = V::set1(-kInfinity);
    for (int s = tile.begin; s < tile.end; ++s) {
      const std::int32_t pos = tile.pos + s;
      for (int v = 0; v < NV; ++v) {
        float* at = scores_ + (std::int64_t{s} * NV + v) * kL;
        const int lane = row + v * kL;
        F x = V::load(at);
        if (p.logits_soft_cap > 0.0F) x = V::mul(cap, tanh<V>(x));
        if (p.alibi_slopes != nullptr) x = V::fma(V::load(slope_ + lane), V::distance(pos, pos_ + lane), x);
        if (masked_) {
          x = V::select(V::in_range(lo_ + lane, hi_ + lane, pos, pos < p.num_sink_tokens), x, V::set1(-kInfinity));
        }
        tile_max[v] = V::max(tile_max[v], x);
        V::store(at, x);
      }
    }
  }

  /// P in place of S^T; updates max and sum. Returns how O^T must be opened, or -1 where no row sees any key.
  template <int NV>
  [[gnu::always_inline]] int softmax_block(int row, const Tile& tile, F (&tile_max)[NV]) noexcept {
    F max[NV];
    F sum[NV];
    bool none = true;
    bool keep = true;
    bool fresh = true;
    for (int v = 0; v < NV; ++v) {
      const F old = V::load(max_ + row + v * kL);
      const F now = V::max(old, tile_max[v]);
      none = none && V::all(V::equal(tile_max[v], V::set1(-kInfinity)));
      V::store(max_ + row + v * kL, now);
      max[v] = V::select(V::equal(now, V::set1(-kInfinity)), V::zero(), now);
      const F alpha = exp2<V>(V::sub(old, max[v]));
      keep = keep && V::all(V::equal(old, now));
      fresh = fresh && V::all(V::equal(old, V::set1(-kInfinity)));
      alpha_[v] = alpha;
      sum[v] = V::mul(V::load(sum_ + row + v * kL), alpha);
    }
    if (none) return -1;
    if constexpr (kDot) {
      if (tile.begin % 2 != 0) clear_slot<NV>(tile.begin - 1);
      if (tile.end % 2 != 0) clear_slot<NV>(tile.end);
      for (int u = tile.begin / 2; u < (tile.end + 1) / 2; ++u) {
        const float* from = scores_ + std::int64_t{u} * 2 * NV * kL;
        F pairs[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          const F a = exp2<V, kExpDegree>(V::sub(V::load(from + v * kL), max[v]));
          const F b = exp2<V, kExpDegree>(V::sub(V::load(from + (NV + v) * kL), max[v]));
          sum[v] = V::add(V::add(sum[v], a), b);
          pairs[v] = V::pair_bf16(a, b);
        }
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) V::store(scores_ + (std::int64_t{u} * NV + v) * kL, pairs[v]);
      }
    } else {
      for (int s = tile.begin; s < tile.end; ++s) {
        float* at = scores_ + std::int64_t{s} * NV * kL;
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          const F e = exp2<V, kExpDegree>(V::sub(V::load(at + v * kL), max[v]));
          sum[v] = V::add(sum[v], e);
          V::store(at + v * kL, e);
        }
      }
    }
    for (int v = 0; v < NV; ++v) V::store(sum_ + row + v * kL, sum[v]);
    if (fresh) return kOpenZero;
    return keep ? kOpenKeep : kOpenScale;
  }

  template <int NV>
  [[gnu::always_inline]] void clear_slot(int slot) noexcept {
    for (int v = 0; v < NV; ++v) V::store(scores_ + (std::int64_t{slot} * NV + v) * kL, V::set1(-kInfinity));
  }

  /// O^T += V^T P^T.
  template <int NV>
  [[gnu::always_inline]] void add_values(int row, const Tile& tile, int open) noexcept {
    float* o = o_ + std::int64_t{row} * dvo_;
    const int begin = tile.begin / Arith::kPerUnit;
    const int units = (tile.end + Arith::kPerUnit - 1) / Arith::kPerUnit - begin;
    const float* weights = scores_ + std::int64_t{begin} * NV * kL;
    const auto* values = reinterpret_cast<const char*>(v_tile_ + std::int64_t{begin} * v_stride_);
    const std::size_t stride = static_cast<std::size_t>(v_stride_) * 4;
    for_blocks<kProductRows<V, NV>>(dvo_, [&]<int NM>(int m) {
      ahead_.block();
      F acc[NM][NV];
      float* at = o + std::int64_t{m} * NV * kL;
#pragma GCC unroll 16
      for (int i = 0; i < NM; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[i][v] = open == kOpenZero ? V::zero() : V::load(at + (i * NV + v) * kL);
      }
      if (open == kOpenScale) {
#pragma GCC unroll 16
        for (int i = 0; i < NM; ++i) {
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) acc[i][v] = V::mul(acc[i][v], alpha_[v]);
        }
      }
      accumulate<V, Arith, NM, NV>(acc, ColumnUnits{values + 4 * m, stride}, weights, units, NV * kL,
                                   PrefetchStep<V, 1>{ahead_});
#pragma GCC unroll 16
      for (int i = 0; i < NM; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) V::store(at + (i * NV + v) * kL, acc[i][v]);
      }
    });
  }

  float scale_ = 1.0F;
  bool special_;        ///< scores need more than a factor
  int product_blocks_;  ///< register blocks of a tile's products, about
  bool masked_ = false;
  int current_ = 0;
  TilePrefetch<V> ahead_;
  F alpha_[kMaxVectors];
  Tile tiles_[2];
  const char* const* keys_ = nullptr;  ///< [slots] where the tile's keys lie
  std::int64_t key_step_ = 0;          ///< bytes from one key of a group of four to the next
  const char* k_rows_[kTile];
};

}  // namespace headwater::cpu::simd
