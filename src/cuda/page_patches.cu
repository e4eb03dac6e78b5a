#include "cuda/page_patches.h"

namespace headwater::cuda {
namespace {

__global__ void __launch_bounds__(PagePatches::kMost) patch_page_ids(const __grid_constant__ PatchParams p) {
  const auto i = static_cast<std::int32_t>(threadIdx.x);
  if (i < p.patches.count) p.page_ids[p.patches.at[i]] = p.patches.id[i];
}

}  // namespace

const void* patch_kernel() {
  return reinterpret_cast<const void*>(&patch_page_ids);
}

}  // namespace headwater::cuda
