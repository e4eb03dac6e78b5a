// Predicted times, in integer picoseconds of one worker. On a CPU KV traffic and products add up: measured, they
// overlap little. Where they do overlap (DeviceModel::teams) products count as far as they take longer than reading.
// Host and device compile what is inline here.
#pragma once

#include <cstdint>

#include "headwater/device_model.h"
#include "headwater/options.h"
#include "plan/portable.h"

namespace headwater::detail {

/// a * b, at most a quarter of the largest int64, so that sums of a few cannot overflow.
[[nodiscard]] HEADWATER_HOST_DEVICE inline std::int64_t times(std::int64_t a, std::int64_t b) noexcept {
  constexpr std::int64_t kMost = INT64_MAX / 4;
#ifdef __CUDA_ARCH__
  const std::int64_t product = a * b;
  return __mul64hi(a, b) != product >> 63 || product > kMost ? kMost : product;
#else
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) || product > kMost ? kMost : product;
#endif
}

class CostModel {
 public:
  CostModel(const AttentionShape& shape, const PlanOptions& options, const DeviceModel& model);

  [[nodiscard]] HEADWATER_HOST_DEVICE int num_workers() const noexcept { return num_workers_; }
  /// Most query rows of an item.
  [[nodiscard]] HEADWATER_HOST_DEVICE int tile_rows() const noexcept { return tile_rows_; }
  /// Tiles of `rows` query rows, and the rows of each but perhaps the last.
  [[nodiscard]] HEADWATER_HOST_DEVICE std::int32_t num_tiles(std::int32_t rows) const noexcept {
    return rows <= tile_rows_ ? 1 : (rows + tile_rows_ - 1) / tile_rows_;
  }
  [[nodiscard]] HEADWATER_HOST_DEVICE std::int32_t rows_per_tile(std::int32_t rows) const noexcept;

  /// K and V bytes of one token, all KV heads.
  [[nodiscard]] HEADWATER_HOST_DEVICE std::int64_t token_bytes() const noexcept { return token_bytes_; }
  /// Reading tokens from memory, while all workers read.
  [[nodiscard]] HEADWATER_HOST_DEVICE std::int64_t read_ps(std::int64_t tokens) const noexcept {
    return tokens * read_token_ps_;
  }
  /// Reading tokens again, of a stretch that is `path_tokens` long in all.
  [[nodiscard]] HEADWATER_HOST_DEVICE std::int64_t reread_ps(std::int64_t tokens,
                                                             std::int64_t path_tokens) const noexcept {
    return tokens * (path_tokens * token_bytes_ <= cache_bytes_ ? reread_token_ps_ : read_token_ps_);
  }
  /// Products of `tokens` keys with one tile of `rows` query rows.
  [[nodiscard]] HEADWATER_HOST_DEVICE std::int64_t compute_ps(std::int64_t tokens, std::int32_t rows) const noexcept {
    const std::int64_t products = times(tokens * num_kv_heads_, rows == 1 ? one_row_key_ps_ : key_ps(rows)) / 256;
    return teams_ ? greater<std::int64_t>(0, products - read_ps(tokens)) : products;
  }
  /// Fixed cost of an item of `rows` query rows.
  [[nodiscard]] HEADWATER_HOST_DEVICE std::int64_t item_ps(std::int32_t rows) const noexcept {
    return item_ps_ + rows * item_row_ps_;
  }
  /// Writing and merging one partial state of each of `rows` query rows.
  [[nodiscard]] HEADWATER_HOST_DEVICE std::int64_t partial_ps(std::int64_t rows) const noexcept {
    return rows * partial_row_ps_;
  }
  /// Products and fixed costs of a piece of `tokens` tokens for `rows` query rows, all its tiles.
  [[nodiscard]] HEADWATER_HOST_DEVICE std::int64_t piece_ps(std::int64_t tokens, std::int32_t rows) const noexcept {
    return rows <= tile_rows_ ? compute_ps(tokens, rows) + item_ps(rows) : tiled_piece_ps(tokens, rows);
  }
  /// A worker is a team with a member per KV head.
  [[nodiscard]] HEADWATER_HOST_DEVICE bool teams() const noexcept { return teams_; }
  /// Whether the many-rows kernel serves items of `rows` query rows, and what a run pays once for using it.
  [[nodiscard]] HEADWATER_HOST_DEVICE bool is_many(std::int32_t rows) const noexcept {
    return std::int64_t{rows} * group_size_ > compute_.few_row_max;
  }
  [[nodiscard]] HEADWATER_HOST_DEVICE std::int64_t many_start_ps() const noexcept { return many_start_ps_; }
  [[nodiscard]] HEADWATER_HOST_DEVICE std::int64_t launch_ps() const noexcept { return launch_ps_; }
  [[nodiscard]] HEADWATER_HOST_DEVICE std::int32_t chunk_tokens() const noexcept { return chunk_tokens_; }
  [[nodiscard]] HEADWATER_HOST_DEVICE std::int32_t part_tokens() const noexcept { return part_tokens_; }
  [[nodiscard]] HEADWATER_HOST_DEVICE std::int64_t cache_bytes() const noexcept { return cache_bytes_; }

 private:
  /// Products of a key with `rows` query rows, for all dimensions, times 256.
  [[nodiscard]] HEADWATER_HOST_DEVICE std::int64_t key_ps(std::int32_t rows) const noexcept;
  [[nodiscard]] HEADWATER_HOST_DEVICE std::int64_t tiled_piece_ps(std::int64_t tokens,
                                                                  std::int32_t rows) const noexcept;

  int num_workers_;
  int tile_rows_;
  int group_size_;
  int num_kv_heads_;
  std::int64_t head_dims_;
  ComputeModel compute_;
  std::int64_t one_row_key_ps_;
  std::int64_t token_bytes_;
  std::int64_t read_token_ps_;
  std::int64_t reread_token_ps_;
  std::int64_t cache_bytes_;
  std::int64_t item_ps_;
  std::int64_t item_row_ps_;
  std::int64_t partial_row_ps_;
  std::int64_t many_start_ps_;
  std::int64_t launch_ps_;
  std::int32_t chunk_tokens_;
  std::int32_t part_tokens_;
  bool teams_;
};

inline std::int64_t CostModel::key_ps(std::int32_t rows) const noexcept {
  const std::int64_t stacked = std::int64_t{rows} * group_size_;
  if (stacked <= compute_.few_row_max) return compute_.few_row_ps * stacked * head_dims_;
  const std::int32_t pad = compute_.many_row_pad;
  // 64-bit division is slow on a device.
  const std::int64_t pads = stacked < INT32_MAX - pad
                                ? std::int64_t{(static_cast<std::int32_t>(stacked) + pad - 1) / pad}
                                : (stacked + pad - 1) / pad;
  return (compute_.many_base_ps + compute_.many_row_ps * pads * pad) * head_dims_;
}

inline std::int32_t CostModel::rows_per_tile(std::int32_t rows) const noexcept {
  const std::int32_t tiles = num_tiles(rows);
  if (tiles <= 1) return rows;
  // Full vectors in all tiles but the last, as far as the group size allows.
  const std::int32_t unit = greater(1, compute_.many_row_pad / group_size_);
  const std::int32_t even = (rows + tiles - 1) / tiles;
  return lesser(tile_rows_, (even + unit - 1) / unit * unit);
}

inline std::int64_t CostModel::tiled_piece_ps(std::int64_t tokens, std::int32_t rows) const noexcept {
  const std::int32_t per_tile = rows_per_tile(rows);
  const std::int32_t full = (rows - 1) / per_tile;
  return full * (compute_ps(tokens, per_tile) + item_ps(per_tile)) + compute_ps(tokens, rows - full * per_tile) +
         item_ps(rows - full * per_tile);
}

}  // namespace headwater::detail
