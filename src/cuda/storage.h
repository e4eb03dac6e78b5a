// What the kernels of append_kv and copy_pages read. All strides are in bytes.
#pragma once

#include <cstdint>

#include "headwater/cpu.h"
#include "headwater/types.h"

namespace headwater::cuda {

/// One side (K or V) of the cache, to be written.
struct CacheSide {
  unsigned char* data = nullptr;
  std::int64_t page_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

/// New rows of one side and where they go.
struct AppendSide {
  const unsigned char* rows = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
  CacheSide cache;
  const float* scale = nullptr;  ///< fp8 caches: values are divided by it
  std::int32_t scale_stride = 0;
  std::int32_t head_dim = 0;
  bool aligned = false;  ///< whole vectors may be loaded and stored
};

struct AppendParams {
  AppendSide sides[2];                        ///< K, V
  const std::int64_t* token_slots = nullptr;  ///< [gridDim.x]
  std::int64_t num_pages = 0;
  std::int32_t page_size = 1;
  std::int32_t num_kv_heads = 1;
  std::int32_t first_side = 0;
  std::int32_t sides_per_block = 1;  ///< 2: one after the other
  std::int32_t* num_bad = nullptr;   ///< counts slots beyond the pool; may be null
};

inline constexpr int kAppendThreads = 128;

/// Block (r, y) writes row r of sides_per_block sides from first_side + y on. Types: of rows, of the cache.
const void* append_kernel(DType from, DType to);

/// Copies that a launch takes as an argument (of at most 4 KiB).
inline constexpr int kCopiesPerLaunch = 256;

struct CopyParams {
  CacheSide sides[2];
  std::int32_t units[2] = {0, 0};  ///< of one token and head: what a thread copies at once, in each side
  std::int64_t num_pages = 0;
  std::int32_t page_size = 1;
  std::int32_t num_kv_heads = 1;
  const cpu::PageCopy* list = nullptr;  ///< device memory; null: `copies`
  std::int32_t* num_bad = nullptr;      ///< counts entries of `list` that are none of a copy; may be null
  cpu::PageCopy copies[kCopiesPerLaunch] = {};
};

inline constexpr int kCopyThreads = 256;

/// Block (i, y) does a part of copy i. `unit`: bytes that a thread copies at once, 1, 2, 4 or 16.
const void* copy_kernel(int unit);

}  // namespace headwater::cuda
