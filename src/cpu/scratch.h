// Scratch memory of the SIMD attention kernels: one formula, used by the planner (workspace_size) and by the kernels
// (who carve their buffers out of it in the same order). It depends on the shape and on the largest item only, never on
// the ISA level, so that a plan's workspace serves every level: rows are padded to the widest vector.
//
// Forced inline: this header is also included by files compiled for newer processors (see convert.h).
//
// Layout for one worker: the few-rows and the many-rows buffers share the same bytes (an item uses one kernel).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace headwater::cpu {

inline constexpr int kScratchAlignment = 64;
inline constexpr int kRowPad = 16;      ///< stacked rows are padded to a multiple of this (widest vector, fp32 lanes)
inline constexpr int kFewRowsMax = 12;  ///< stacked rows (query rows x group_size) of the few-rows kernel
inline constexpr int kFewHeads = 16;    ///< KV heads whose states the few-rows kernel keeps at a time
inline constexpr int kFewKeys = 16;     ///< keys of a few-rows tile
inline constexpr int kTileKeys = 64;    ///< keys of a many-rows tile
inline constexpr int kBlockRows = 64;   ///< most stacked rows of one row block of the many-rows kernel
inline constexpr int kTilePad = 16;     ///< elements added to the row stride of a converted tile (L1 sets)
inline constexpr int kRowArrays = 12;   ///< per-row arrays (range, position, slope, max, sum, LSE, ...)

struct ScratchShape {
  int num_kv_heads = 1;
  int group_size = 1;
  int head_dim_qk = 0;
  int head_dim_vo = 0;
  bool batch_invariant = false;
};

[[nodiscard, gnu::always_inline]] constexpr std::size_t round_up(std::size_t n, std::size_t multiple) noexcept {
  return (n + multiple - 1) / multiple * multiple;
}

/// Byte offsets of the many-rows kernel's buffers for a tile of `max_rows` query rows. Units are 4 bytes: one fp32 or a
/// pair of bf16.
struct ManyScratch {
  std::size_t q = 0;        ///< [row blocks][Dqk][block rows] fp32 (bf16 pairs: half of it)
  std::size_t o = 0;        ///< [row blocks][Dvo][block rows] fp32: open state
  std::size_t o_fold = 0;   ///< the same: folded states (batch-invariant mode only)
  std::size_t scores = 0;   ///< [kTileKeys][kBlockRows] fp32: scores, then probabilities in place
  std::size_t k_tile = 0;   ///< [kTileKeys][Dqk + kTilePad] fp32, converted keys
  std::size_t v_tile = 0;   ///< [kTileKeys][Dvo + kTilePad] fp32, converted values (or [kTileKeys / 2] pairs of bf16)
  std::size_t row_out = 0;  ///< [Dvo] fp32: one row on its way out
  std::size_t rows = 0;     ///< kRowArrays x [padded rows] 4-byte
  std::size_t bytes = 0;

  [[nodiscard, gnu::always_inline]] static constexpr ManyScratch make(const ScratchShape& s, int max_rows) noexcept {
    const std::size_t rows =
        round_up(static_cast<std::size_t>(std::max(max_rows, 1)) * static_cast<std::size_t>(s.group_size), kRowPad);
    const auto dqk = static_cast<std::size_t>(s.head_dim_qk);
    const auto dvo = static_cast<std::size_t>(s.head_dim_vo);
    ManyScratch m;
    std::size_t at = 0;
    const auto take = [&at](std::size_t units) {
      const std::size_t begin = at;
      at += round_up(units * 4, kScratchAlignment);
      return begin;
    };
    m.q = take(rows * dqk);
    m.o = take(rows * dvo);
    m.o_fold = take(s.batch_invariant ? rows * dvo : 0);
    m.scores = take(std::size_t{kTileKeys} * kBlockRows);
    m.k_tile = take(kTileKeys * (dqk + kTilePad));
    m.v_tile = take(kTileKeys * (dvo + kTilePad));
    m.row_out = take(dvo + kTilePad);
    m.rows = take(kRowArrays * rows);
    m.bytes = at;
    return m;
  }
};

/// Byte offsets of the few-rows kernel's buffers; at most kFewRowsMax stacked rows of up to kFewHeads KV heads.
struct FewScratch {
  std::size_t q = 0;        ///< [heads][rows][Dqk padded to 32] fp32 (or bf16)
  std::size_t o = 0;        ///< [heads][rows][Dvo padded to 32] fp32
  std::size_t state = 0;    ///< [heads][kRowPad (max of a row) + rows * kRowPad (lane sums of a row)] fp32
  std::size_t scores = 0;   ///< [kRowPad][kTileKeys] fp32
  std::size_t row_out = 0;  ///< [Dvo] fp32
  std::size_t bytes = 0;

  [[nodiscard, gnu::always_inline]] static constexpr FewScratch make(const ScratchShape& s, int max_rows) noexcept {
    const std::size_t rows = std::min<std::size_t>(
        static_cast<std::size_t>(std::max(max_rows, 1)) * static_cast<std::size_t>(s.group_size), kFewRowsMax);
    const auto heads = static_cast<std::size_t>(std::min(s.num_kv_heads, kFewHeads));
    FewScratch f;
    std::size_t at = 0;
    const auto take = [&at](std::size_t units) {
      const std::size_t begin = at;
      at += round_up(units * 4, kScratchAlignment);
      return begin;
    };
    f.q = take(heads * rows * round_up(static_cast<std::size_t>(s.head_dim_qk), 32));
    f.o = take(heads * rows * round_up(static_cast<std::size_t>(s.head_dim_vo), 32));
    f.state = take(heads * (1 + rows) * kRowPad);
    f.scores = take(std::size_t{kRowPad} * kTileKeys);
    f.row_out = take(round_up(static_cast<std::size_t>(s.head_dim_vo), 32));
    f.bytes = at;
    return f;
  }
};

/// Scratch bytes that one worker needs for items of at most `max_rows` query rows; aligned to kScratchAlignment.
[[nodiscard, gnu::always_inline]] constexpr std::size_t scratch_bytes(const ScratchShape& shape,
                                                                      int max_rows) noexcept {
  return std::max(ManyScratch::make(shape, max_rows).bytes, FewScratch::make(shape, max_rows).bytes);
}

}  // namespace headwater::cpu
