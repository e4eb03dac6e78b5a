// Paged caches as the bulk copy engine of Hopper sees them: four dimensions, element x token in the page x head x page.
#pragma once

#include "cuda/params.h"
#include "headwater/view.h"

namespace headwater::cuda {

/// Whether the engine can read the cache: rows at multiples of 16 bytes, pages of at least 8 tokens.
[[nodiscard]] bool can_map(const KvCache& cache, const CacheView& view) noexcept;

/// Makes maps. The driver's function is looked up by name once: programs need not link the driver.
class MapEncoder {
 public:
  /// Throws Error (device).
  MapEncoder();
  /// The map of one side for boxes of 128 bytes x min(16, page_size) tokens, swizzled as layouts.cuh has it; fp8: of
  /// whole rows, plain. Throws Error (device) if the driver refuses.
  [[nodiscard]] TensorMap map(const PagedBytes& side, int head_dim, int num_heads, const KvCache& cache) const;

 private:
  void* encode_ = nullptr;
};

}  // namespace headwater::cuda
