// The few-rows kernel: up to a dozen stacked rows, bound by memory. K and V are read once, where they lie.
//
// Tiles of 16 keys are the outer loop and KV heads the inner one, so that a page is read whole while it is near; the
// states of all heads (up to kFewHeads at a time) stay in scratch. While a head's slice of a tile is computed, the
// slice two heads on is asked for. Scores are dot products of 4 keys x a few rows, reduced by a tree that leaves keys
// in lanes; O [row][d] is accumulated in registers over the tile's keys.
#pragma once

#include "cpu/scratch.h"
#include "cpu/simd/item_view.h"
#include "cpu/simd/spans.h"

namespace headwater::cpu::simd {

template <class V, class Span>
class FewRows {
  using F = typename V::F;
  static constexpr int kL = V::kLanes;
  static constexpr int kElements = Span::kElements;
  static constexpr int kParts = Span::kParts;
  static constexpr int kValueParts = Span::kDot ? 2 : kParts;
  static constexpr bool kWide = V::kRegisters == 32;
  /// Rows of a register block. With fp32 products and registers to spare all rows go together (two keys, or one step,
  /// at a time), so that K and V are converted once; a dot product converts nothing and takes four rows by four keys.
  static constexpr int kMaxRows = kWide && !Span::kDot ? 12 : 4;
  static constexpr int kVectors = kFewKeys / kL;  ///< vectors of a tile's scores of one row
  static constexpr int kExpDegree = Span::kDot ? 4 : 5;
  static constexpr int kStepBytes = kElements * Span::kElementBytes;
  static constexpr int kMaxRowLines = kMaxHeadDim * 4 / 64;  ///< cache lines of the longest K or V row, fp32

 public:
  FewRows(const AttendParams& p, const detail::WorkItem& item, Scratch scratch) noexcept
      : view_(p, item),
        rows_(view_.num_rows),
        key_steps_((p.head_dim_qk + kElements - 1) / kElements),
        value_steps_((p.head_dim_vo + kElements - 1) / kElements) {
    const FewScratch at = FewScratch::make(
        {p.num_kv_heads, p.group_size, p.head_dim_qk, p.head_dim_vo, p.batch_invariant}, item.num_rows);
    q_ = reinterpret_cast<float*>(scratch.data + at.q);
    o_ = reinterpret_cast<float*>(scratch.data + at.o);
    state_ = reinterpret_cast<float*>(scratch.data + at.state);
    scores_ = reinterpret_cast<float*>(scratch.data + at.scores);
    row_out_ = reinterpret_cast<float*>(scratch.data + at.row_out);
    special_ = p.logits_soft_cap > 0.0F || p.alibi_slopes != nullptr;
  }

  void run() noexcept {
    const int end = view_.item.kv_head_end;
    for (int head = view_.item.kv_head_begin; head < end; head += kFewHeads) {
      run_heads(head, end - head < kFewHeads ? end - head : kFewHeads);
    }
  }

 private:
  /// Base addresses of a tile's K and V rows for KV head 0.
  struct Tile {
    int begin = 0;  ///< first token, from the item's first
    int count = 0;
    const char* k[kFewKeys];
    const char* v[kFewKeys];
  };

  /// Heads from the slice that is computed to the one that is asked for. Measured: two are better than a whole tile,
  /// and no worse than one.
  static constexpr int kHeadsAhead = 2;

  /// Cache lines of a tile's K or V to ask for in one head's turn, the first head's. Where the heads of a token are
  /// neighbours (NHD) a turn asks for a run of whole tokens of the next tile: memory then sees one sequential stream.
  struct Lines {
    const char* at[kFewKeys * kMaxRowLines];
    int num = 0;
    std::int64_t step = 0;  ///< bytes from one head's lines to the next one's
    bool by_token = false;
  };
  struct TileLines {
    Lines k, v;
  };

  /// The lines of one turn, taken a few at a time between products, so that they never queue up in front of the loads
  /// that are needed now.
  class Ahead {
   public:
    /// During the turn of `slot`, while `current` is computed and `next` follows it.
    void begin(const Lines& current, const Lines& next, int slot, int heads) noexcept {
      const int distance = current.by_token || heads < kHeadsAhead ? heads : kHeadsAhead;
      const bool here = slot + distance < heads;
      const Lines& lines = here ? current : next;
      at_ = lines.at;
      end_ = at_ + lines.num;
      offset_ = (here ? slot + distance : slot + distance - heads) * lines.step;
    }
    template <int N>
    [[gnu::always_inline]] void take() noexcept {
      if (end_ - at_ < N) return;
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) V::prefetch_far(at_[i] + offset_);
      at_ += N;
    }
    void rest() noexcept {
      for (; at_ < end_; ++at_) V::prefetch_far(*at_ + offset_);
    }

   private:
    const char* const* at_ = nullptr;
    const char* const* end_ = nullptr;
    std::int64_t offset_ = 0;
  };

  std::int64_t q_size() const noexcept { return std::int64_t{key_steps_} * kParts * kL; }
  std::int64_t o_size() const noexcept { return std::int64_t{value_steps_} * kValueParts * kL; }
  float* q_of(int slot) const noexcept { return q_ + slot * rows_ * q_size(); }
  float* o_of(int slot) const noexcept { return o_ + slot * rows_ * o_size(); }
  float* max_of(int slot) const noexcept { return state_ + std::int64_t{slot} * (1 + rows_) * kRowPad; }
  float* sum_of(int slot, int row) const noexcept { return max_of(slot) + std::int64_t{1 + row} * kRowPad; }

  void run_heads(int first_head, int heads) noexcept {
    for (int slot = 0; slot < heads; ++slot) open(first_head + slot, slot);
    fill(tiles_[0], 0);
    list_lines(tiles_[0], first_head, heads, lines_[0]);
    const std::int64_t k_step = view_.kv.k.head_stride * Span::kElementBytes;
    const std::int64_t v_step = view_.kv.v.head_stride * Span::kElementBytes;
    int current = 0;
    for (int t = 0; t < view_.item.num_tokens; t += kFewKeys) {
      const Tile& tile = tiles_[current];
      Tile& next = tiles_[current ^ 1];
      fill(next, t + kFewKeys);
      list_lines(next, first_head, heads, lines_[current ^ 1]);
      masked_ = t < view_.item.unmasked_begin || t + tile.count > view_.item.unmasked_end || tile.count < kFewKeys;
      for (int slot = 0; slot < heads; ++slot) {
        k_ahead_.begin(lines_[current].k, lines_[current ^ 1].k, slot, heads);
        v_ahead_.begin(lines_[current].v, lines_[current ^ 1].v, slot, heads);
        run_tile(first_head + slot, slot, tile, (first_head + slot) * k_step, (first_head + slot) * v_step);
      }
      current ^= 1;
    }
    for (int slot = 0; slot < heads; ++slot) close(first_head + slot, slot);
  }

  /// Slots past the last token repeat it: they are read, and masked.
  void fill(Tile& tile, int begin) const noexcept {
    const int left = view_.item.num_tokens - begin;
    tile.begin = begin;
    tile.count = left < kFewKeys ? (left < 0 ? 0 : left) : kFewKeys;
    if (tile.count == 0) return;
    view_.locate(begin, tile.count, 0, tile.k, tile.v);
    for (int i = tile.count; i < kFewKeys; ++i) {
      tile.k[i] = tile.k[tile.count - 1];
      tile.v[i] = tile.v[tile.count - 1];
    }
  }

  void open(int head, int slot) noexcept {
    const F scale = V::set1(view_.score_factor(head));
    for (int row = 0; row < rows_; ++row) {
      const char* from = view_.query(row, head);
      float* to = q_of(slot) + row * q_size();
      with_float_type(view_.p.q.dtype, [&]<DType T>() {
        for (int s = 0; s < key_steps_; ++s, to += kParts * kL) {
          F x[kParts];
          Span::template pack<T>(from + s * kElements * element_bytes(T), view_.p.head_dim_qk - s * kElements, scale,
                                 x);
          for (int i = 0; i < kParts; ++i) V::store(to + i * kL, x[i]);
        }
      });
    }
    for (std::int64_t i = 0; i < rows_ * o_size(); i += kL) V::store(o_of(slot) + i, V::zero());
    for (int i = 0; i < kRowPad; ++i) max_of(slot)[i] = -kInfinity;
    for (int i = 0; i < rows_ * kRowPad; ++i) sum_of(slot, 0)[i] = 0.0F;
  }

  [[gnu::noinline]] void run_tile(int head, int slot, const Tile& tile, std::int64_t k_at, std::int64_t v_at) noexcept {
    for_row_blocks([&]<int NR>(int row) {
      constexpr int kKeys = NR > 4 || (NR == 4 && !kWide) ? 2 : 4;
      score_rows<NR, kKeys>(slot, row, tile, k_at);
    });

    if (Span::kDot || masked_ || special_) transform_scores(head, tile);
    if (!softmax(slot)) return;  // what was not asked for comes late, not wrong

    k_ahead_.rest();
    for_row_blocks([&]<int NR>(int row) { add_values<NR>(slot, row, tile, v_at); });
    v_ahead_.rest();
  }

  /// Calls f(integral constant NR, row) over the rows in register blocks.
  template <class Body>
  [[gnu::always_inline]] void for_row_blocks(Body&& body) const noexcept {
    int row = 0;
    if constexpr (kMaxRows == 12) {
      if (rows_ - row >= 12) body.template operator()<12>(row), row += 12;
      if (rows_ - row >= 8) body.template operator()<8>(row), row += 8;
    }
    while (rows_ - row >= 4) body.template operator()<4>(row), row += 4;
    if (rows_ - row == 3) body.template operator()<3>(row);
    if (rows_ - row == 2) body.template operator()<2>(row);
    if (rows_ - row == 1) body.template operator()<1>(row);
  }

  /// Raw scores of NR rows with the tile's keys, NK at a time, to scores_[row][key].
  template <int NR, int NK>
  [[gnu::noinline]] void score_rows(int slot, int row, const Tile& tile, std::int64_t k_at) noexcept {
    const float* q = q_of(slot) + row * q_size();
    const std::int64_t q_row = q_size();
    for (int key = 0; key < tile.count; key += NK) {
      const char* k[NK];
      for (int i = 0; i < NK; ++i) k[i] = tile.k[key + i] + k_at;
      F acc[NR][NK];
#pragma GCC unroll 12
      for (int r = 0; r < NR; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < NK; ++i) acc[r][i] = V::zero();
      }
      const float* qs = q;
      for (int s = 0, left = view_.p.head_dim_qk; s < key_steps_; ++s, left -= kElements, qs += kParts * kL) {
        k_ahead_.template take<(NK * kStepBytes >= 64 ? NK * kStepBytes / 64 : 1)>();
        add_part<NR, NK, 0>(acc, k, s, left, qs, q_row);
        if constexpr (kParts == 2) add_part<NR, NK, 1>(acc, k, s, left, qs + kL, q_row);
      }
      float* to = scores_ + row * kTileKeys + key;
      if constexpr (NK == 4) {
#pragma GCC unroll 4
        for (int r = 0; r < NR; ++r) V::reduce_add4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], to + r * kTileKeys);
      } else {
        static_assert(NK == 2 && NR % 2 == 0);
#pragma GCC unroll 6
        for (int r = 0; r < NR; r += 2, to += 2 * kTileKeys) {
          V::reduce_add2x2(acc[r][0], acc[r][1], acc[r + 1][0], acc[r + 1][1], to, to + kTileKeys);
        }
      }
    }
  }

  /// One part of step s: its vector of each key against that of each row.
  template <int NR, int NK, int Part>
  [[gnu::always_inline]] static void add_part(F (&acc)[NR][NK], const char* const (&k)[NK], int s, int left,
                                              const float* q, std::int64_t q_row) noexcept {
    F x[NK];
#pragma GCC unroll 4
    for (int i = 0; i < NK; ++i) x[i] = Span::template load_key<Part>(k[i] + std::int64_t{s} * kStepBytes, left);
#pragma GCC unroll 12
    for (int r = 0; r < NR; ++r) {
      const F lanes = V::load(q + r * q_row);
#pragma GCC unroll 4
      for (int i = 0; i < NK; ++i) acc[r][i] = Span::mac(acc[r][i], x[i], lanes);
    }
  }

  void list_lines(const Tile& tile, int first_head, int heads, TileLines& lines) const noexcept {
    list_tensor(tile.k, tile.count, view_.kv.k, view_.p.head_dim_qk, first_head, heads, lines.k);
    list_tensor(tile.v, tile.count, view_.kv.v, view_.p.head_dim_vo, first_head, heads, lines.v);
  }

  void list_tensor(const char* const* rows, int count, const PagedTensor& tensor, int dim, int first_head, int heads,
                   Lines& lines) const noexcept {
    const std::int64_t head_bytes = tensor.head_stride * Span::kElementBytes;
    const std::int64_t token_bytes = tensor.token_stride * Span::kElementBytes;
    const int tokens = (kFewKeys + heads - 1) / heads;
    const bool one_page = count == kFewKeys && rows[kFewKeys - 1] - rows[0] == (kFewKeys - 1) * token_bytes;
    lines.by_token = heads > 1 && tensor.head_stride == dim && one_page &&
                     tokens * heads * (dim * Span::kElementBytes / 64 + 1) <= kFewKeys * kMaxRowLines;
    lines.step = lines.by_token ? tokens * token_bytes : head_bytes;
    lines.num = 0;
    const int num_rows = lines.by_token ? tokens : count;
    const int bytes = dim * Span::kElementBytes * (lines.by_token ? heads : 1);
    for (int i = 0; i < num_rows; ++i) {
      for (int at = 0; at < bytes; at += 64) lines.at[lines.num++] = rows[i] + first_head * head_bytes + at;
    }
  }

  /// Scale (dot products), soft cap, ALiBi, mask.
  [[gnu::noinline]] void transform_scores(int head, const Tile& tile) noexcept {
    const AttendParams& p = view_.p;
    const F scale = V::set1(Span::kDot ? view_.score_factor(head) : 1.0F);
    const F cap = V::set1(p.logits_soft_cap * kLog2E);
    const std::int32_t pos = view_.item.pos_begin + tile.begin;
    const std::int32_t tile_end = pos + tile.count;
    for (int row = 0; row < rows_; ++row) {
      const detail::RowRange& range = p.rows[view_.query_row(row)];
      const std::int32_t hi = range.hi < tile_end ? range.hi : tile_end;
      const auto sinks = static_cast<std::int32_t>(p.num_sink_tokens < hi ? p.num_sink_tokens : hi);
      for (int v = 0; v < kVectors; ++v) {
        float* at = scores_ + row * kTileKeys + v * kL;
        F x = V::load(at);
        if constexpr (Span::kDot) x = V::mul(x, scale);
        if (p.logits_soft_cap > 0.0F) x = V::mul(cap, tanh<V>(x));
        if (p.alibi_slopes != nullptr) {
          const F slope = V::set1(p.alibi_slopes[view_.query_head(row, head)] * kLog2E);
          x = V::fma(slope, V::iota(pos + v * kL - range.pos), x);
        }
        if (masked_) x = V::select(V::positions_in_range(range.lo, hi, sinks, pos + v * kL), x, V::set1(-kInfinity));
        V::store(at, x);
      }
    }
  }

  /// P in place of the scores, maxima and sums updated, correction of O in alpha_; false where no row sees any key.
  [[gnu::always_inline]] bool softmax(int slot) noexcept {
    alignas(64) float tile_max[kRowPad];
    for (int row = 0; row < kRowPad; row += kL) V::store(tile_max + row, V::set1(-kInfinity));
    for (int row = 0; row < rows_; row += 4) {
      F x[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const float* at = scores_ + (row + r < rows_ ? row + r : rows_ - 1) * kTileKeys;
        x[r] = V::load(at);
        for (int v = 1; v < kVectors; ++v) x[r] = V::max(x[r], V::load(at + v * kL));
      }
      V::reduce_max4(x[0], x[1], x[2], x[3], tile_max + row);
    }
    float* max = max_of(slot);
    alignas(64) float base[kRowPad];
    bool none = true;
    for (int row = 0; row < rows_; row += kL) {
      const F old = V::load(max + row);
      const F now = V::max(old, V::load(tile_max + row));
      const auto empty = V::equal(now, V::set1(-kInfinity));
      none = none && V::all(V::equal(V::load(tile_max + row), V::set1(-kInfinity)));
      const F finite = V::select(empty, V::zero(), now);
      V::store(max + row, now);
      V::store(base + row, finite);
      V::store(alpha_ + row, exp2<V>(V::sub(old, finite)));
    }
    if (none) return false;
    for (int row = 0; row < rows_; ++row) {
      float* at = scores_ + row * kTileKeys;
      const F shift = V::set1(base[row]);
      F sum = V::mul(V::load(sum_of(slot, row)), V::set1(alpha_[row]));
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const F e = exp2<V, kExpDegree>(V::sub(V::load(at + v * kL), shift));
        sum = V::add(sum, e);
        if constexpr (Span::kDot) {
          V::store_weights(reinterpret_cast<char*>(at) + v * kL * 2, e);
        } else {
          V::store(at + v * kL, e);
        }
      }
      V::store(sum_of(slot, row), sum);
    }
    return true;
  }

  /// O[row..row + NR) = alpha * O + P V over the tile's keys.
  template <int NR>
  [[gnu::noinline]] void add_values(int slot, int row, const Tile& tile, std::int64_t v_at) noexcept {
    constexpr int kAccumulators = !kWide ? 8 : NR > 4 ? 24 : 16;
    constexpr int kSteps = kAccumulators / (NR * kValueParts) > 0 ? kAccumulators / (NR * kValueParts) : 1;
    int step = 0;
    for (; step + kSteps <= value_steps_; step += kSteps) add_value_steps<NR, kSteps>(slot, row, tile, v_at, step);
    if constexpr (kSteps > 1) {
      for (; step < value_steps_; ++step) add_value_steps<NR, 1>(slot, row, tile, v_at, step);
    }
  }

  template <int NR, int NS>
  [[gnu::always_inline]] void add_value_steps(int slot, int row, const Tile& tile, std::int64_t v_at,
                                              int step) noexcept {
    float* o = o_of(slot) + row * o_size() + std::int64_t{step} * kValueParts * kL;
    const std::int64_t o_row = o_size();
    F acc[NR][NS * kValueParts];
#pragma GCC unroll 12
    for (int r = 0; r < NR; ++r) {
      const F alpha = V::set1(alpha_[row + r]);
#pragma GCC unroll 16
      for (int i = 0; i < NS * kValueParts; ++i) acc[r][i] = V::mul(V::load(o + r * o_row + i * kL), alpha);
    }
    const std::int64_t at = v_at + std::int64_t{step} * kStepBytes;
    const int left = view_.p.head_dim_vo - step * kElements;
    const float* weights = scores_ + row * kTileKeys;
    for (int key = 0; key < kFewKeys; key += Span::kKeys) {
      v_ahead_.template take<(NS * kStepBytes * Span::kKeys >= 64 ? NS * kStepBytes * Span::kKeys / 64 : 1)>();
      F weight[NR];
#pragma GCC unroll 12
      for (int r = 0; r < NR; ++r) weight[r] = V::broadcast(weights + r * kTileKeys + key / Span::kKeys);
#pragma GCC unroll 8
      for (int s = 0; s < NS; ++s) {
        F x[kValueParts];
        Span::load_value(tile.v + key, at + std::int64_t{s} * kStepBytes, left - s * kElements, x);
#pragma GCC unroll 2
        for (int i = 0; i < kValueParts; ++i) {
#pragma GCC unroll 12
          for (int r = 0; r < NR; ++r) {
            acc[r][s * kValueParts + i] = Span::mac(acc[r][s * kValueParts + i], x[i], weight[r]);
          }
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < NR; ++r) {
#pragma GCC unroll 16
      for (int i = 0; i < NS * kValueParts; ++i) V::store(o + r * o_row + i * kL, acc[r][i]);
    }
  }

  /// Normalises the rows of a head, adds the learned sink and sends them on their way.
  void close(int head, int slot) noexcept {
    alignas(64) float sums[kRowPad];
    alignas(64) float factors[kRowPad];
    alignas(64) float lses[kRowPad];
    const auto sum_at = [&](int row) { return V::load(sum_of(slot, row < rows_ ? row : rows_ - 1)); };
    for (int row = 0; row < rows_; row += 4) {
      V::reduce_add4(sum_at(row), sum_at(row + 1), sum_at(row + 2), sum_at(row + 3), sums + row);
    }
    for (int row = (rows_ + 3) / 4 * 4; row < kRowPad; ++row) sums[row] = 0.0F;
    for (int row = 0; row < rows_; row += kL) {
      const F sum = V::load(sums + row);
      const auto empty = V::equal(sum, V::zero());
      F factor = V::select(empty, V::zero(), V::div(V::set1(view_.value_factor(head)), sum));
      F lse = V::select(empty, V::set1(-kInfinity), V::add(V::load(max_of(slot) + row), log2<V>(sum)));
      if (view_.direct() && view_.p.sinks != nullptr) {
        float sinks[kL];
        for (int i = 0; i < kL; ++i) sinks[i] = row + i < rows_ ? view_.sink(row + i, head) : -kInfinity;
        const Fold<V> fold = Fold<V>::make(lse, V::load(sinks));
        factor = V::mul(factor, fold.a);
        lse = fold.lse;
      }
      V::store(factors + row, factor);
      V::store(lses + row, lse);
    }
    for (int row = 0; row < rows_; ++row) {
      view_.store_lse(row, 0, head, lses[row]);
      store_row(o_of(slot) + row * o_size(), V::set1(factors[row]), view_.destination(row, 0, head));
    }
  }

  void store_row(const float* from, F factor, char* to) noexcept {
    for (int s = 0; s < value_steps_; ++s, from += kValueParts * kL) {
      F x[kValueParts];
      for (int i = 0; i < kValueParts; ++i) x[i] = V::mul(V::load(from + i * kL), factor);
      Span::restore(x);
      for (int i = 0; i < kValueParts; ++i) V::store(row_out_ + (s * kValueParts + i) * kL, x[i]);
    }
    with_float_type(view_.destination_dtype(), [&]<DType T>() {
      for (int d = 0; d < view_.p.head_dim_vo; d += kL) {
        store_from_f32<V, T>(to + d * element_bytes(T), V::load(row_out_ + d));
      }
    });
  }

  ItemView view_;
  int rows_;  ///< stacked rows, at most kFewRowsMax
  int key_steps_;
  int value_steps_;
  float* q_;  ///< [heads][rows][steps][parts][lanes]
  float* o_;  ///< the same, in the order of load_value
  float* state_;
  float* scores_;  ///< [rows][kTileKeys]
  float* row_out_;
  bool special_ = false;
  bool masked_ = false;
  alignas(64) float alpha_[kRowPad];
  Tile tiles_[2];
  TileLines lines_[2];  ///< of the tiles
  Ahead k_ahead_;
  Ahead v_ahead_;
};

}  // namespace headwater::cpu::simd
