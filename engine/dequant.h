// Conversion of stored weights to float. A quantised row is a sequence of blocks (32 or 256 values) that carry their
// own scales; each format is one small function in dequant.cc, written from the format's definition and checked against
// recorded blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/gguf.h"

namespace headwater::engine {

/// Values in one block: 1 for plain formats, 32 or 256 for quantised ones.
[[nodiscard]] std::size_t block_values(GgmlType type) noexcept;
/// Bytes of one block.
[[nodiscard]] std::size_t block_bytes(GgmlType type) noexcept;

/// Converts `out.size()` values (a multiple of block_values) that start at `data`. Throws Error (invalid_argument) when
/// data.size() is not exactly their bytes.
void dequantize(GgmlType type, std::span<const std::byte> data, std::span<float> out);

/// Converts rows [row_begin, row_begin + num_rows) of a tensor seen as rows of shape[0] values; out.size() = num_rows *
/// shape[0]. Rows are independent, so callers may split them over threads.
void dequantize_rows(const GgufTensor& tensor, std::uint64_t row_begin, std::uint64_t num_rows, std::span<float> out);

}  // namespace headwater::engine
