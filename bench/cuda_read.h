// Reading memory on a CUDA device as fast as it goes: what a cell's limit starts from.
#pragma once

#include <cstddef>

#include "headwater/cuda.h"

namespace headwater::bench {

inline constexpr std::size_t kReadUnit = std::size_t{32} << 10;  ///< read_device reads whole units

/// Reads `bytes` (a multiple of kReadUnit) at `data` once; `sink` [1] is never written in practice. Throws
/// Error(device).
void read_device(const void* data, std::size_t bytes, unsigned* sink, cuda::Stream stream);

}  // namespace headwater::bench
