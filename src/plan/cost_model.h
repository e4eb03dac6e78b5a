// Predicted times, in integer picoseconds of one worker. On a CPU KV traffic and products add up: measured, they
// overlap little. Where they do overlap (DeviceModel::teams) products count as far as they take longer than reading.
#pragma once

#include <cstdint>
#include <limits>

#include "headwater/device_model.h"
#include "headwater/options.h"

namespace headwater::detail {

/// a * b, at most a quarter of the largest int64, so that sums of a few cannot overflow.
[[nodiscard]] inline std::int64_t times(std::int64_t a, std::int64_t b) noexcept {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() / 4;
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) || product > kMost ? kMost : product;
}

class CostModel {
 public:
  CostModel(const AttentionShape& shape, const PlanOptions& options, const DeviceModel& model);

  [[nodiscard]] int num_workers() const noexcept { return num_workers_; }
  /// Most query rows of an item.
  [[nodiscard]] int tile_rows() const noexcept { return tile_rows_; }
  /// Tiles of `rows` query rows, and the rows of each but perhaps the last.
  [[nodiscard]] std::int32_t num_tiles(std::int32_t rows) const noexcept {
    return rows <= tile_rows_ ? 1 : (rows + tile_rows_ - 1) / tile_rows_;
  }
  [[nodiscard]] std::int32_t rows_per_tile(std::int32_t rows) const noexcept;

  /// K and V bytes of one token, all KV heads.
  [[nodiscard]] std::int64_t token_bytes() const noexcept { return token_bytes_; }
  /// Reading tokens from memory, while all workers read.
  [[nodiscard]] std::int64_t read_ps(std::int64_t tokens) const noexcept { return tokens * read_token_ps_; }
  /// Reading tokens again, of a stretch that is `path_tokens` long in all.
  [[nodiscard]] std::int64_t reread_ps(std::int64_t tokens, std::int64_t path_tokens) const noexcept {
    return tokens * (path_tokens * token_bytes_ <= cache_bytes_ ? reread_token_ps_ : read_token_ps_);
  }
  /// Products of `tokens` keys with one tile of `rows` query rows.
  [[nodiscard]] std::int64_t compute_ps(std::int64_t tokens, std::int32_t rows) const noexcept {
    const std::int64_t products = times(tokens * num_kv_heads_, rows == 1 ? one_row_key_ps_ : key_ps(rows)) / 256;
    return teams_ ? std::max<std::int64_t>(0, products - read_ps(tokens)) : products;
  }
  /// Fixed cost of an item of `rows` query rows.
  [[nodiscard]] std::int64_t item_ps(std::int32_t rows) const noexcept { return item_ps_ + rows * item_row_ps_; }
  /// Writing and merging one partial state of each of `rows` query rows.
  [[nodiscard]] std::int64_t partial_ps(std::int64_t rows) const noexcept { return rows * partial_row_ps_; }
  /// Products and fixed costs of a piece of `tokens` tokens for `rows` query rows, all its tiles.
  [[nodiscard]] std::int64_t piece_ps(std::int64_t tokens, std::int32_t rows) const noexcept {
    return rows <= tile_rows_ ? compute_ps(tokens, rows) + item_ps(rows) : tiled_piece_ps(tokens, rows);
  }
  /// A worker is a team with a member per KV head.
  [[nodiscard]] bool teams() const noexcept { return teams_; }
  /// Whether the many-rows kernel serves items of `rows` query rows, and what a run pays once for using it.
  [[nodiscard]] bool is_many(std::int32_t rows) const noexcept {
    return std::int64_t{rows} * group_size_ > compute_.few_row_max;
  }
  [[nodiscard]] std::int64_t many_start_ps() const noexcept { return many_start_ps_; }
  [[nodiscard]] std::int64_t launch_ps() const noexcept { return launch_ps_; }
  [[nodiscard]] std::int32_t chunk_tokens() const noexcept { return chunk_tokens_; }
  [[nodiscard]] std::int32_t part_tokens() const noexcept { return part_tokens_; }
  [[nodiscard]] std::int64_t cache_bytes() const noexcept { return cache_bytes_; }

 private:
  /// Products of a key with `rows` query rows, for all dimensions, times 256.
  [[nodiscard]] std::int64_t key_ps(std::int32_t rows) const noexcept;
  [[nodiscard]] std::int64_t tiled_piece_ps(std::int64_t tokens, std::int32_t rows) const noexcept;

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

}  // namespace headwater::detail
