#include "cuda/tensor_map.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <bit>
#include <string>

#include "cuda/error.h"

namespace headwater::cuda {
namespace {

static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));

using Encode = decltype(&cuTensorMapEncodeTiled);

}  // namespace

bool can_map(const KvCache& cache, const CacheView& view) noexcept {
  constexpr std::int64_t kMostStride = std::int64_t{1} << 40;
  const auto in_range = [](const PagedBytes& side) {
    return std::ranges::all_of(std::array{side.page_stride, side.token_stride, side.head_stride},
                               [](std::int64_t stride) { return stride >= 0 && stride < kMostStride; });
  };
  return view.aligned && cache.page_size >= 8 && cache.num_pages > 0 && in_range(view.k) && in_range(view.v);
}

MapEncoder::MapEncoder() {
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode_, 12000, cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess)
    throw Error(ErrorCode::device, "cuTensorMapEncodeTiled: not in this driver");
}

TensorMap MapEncoder::map(const PagedBytes& side, int head_dim, int num_heads, const KvCache& cache) const {
  const bool fp8 = cache.dtype == DType::f8e4m3;
  const auto extent = [](std::int64_t n) { return static_cast<cuuint64_t>(std::max<std::int64_t>(n, 1)); };
  // A stride of a dimension of one is never used, but must look like one.
  const auto stride = [](std::int64_t bytes) { return static_cast<cuuint64_t>(std::max<std::int64_t>(bytes, 16)); };
  const cuuint64_t dims[4] = {extent(head_dim), extent(cache.page_size), extent(num_heads), extent(cache.num_pages)};
  const cuuint64_t strides[3] = {stride(side.token_stride), stride(side.head_stride), stride(side.page_stride)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(fp8 ? head_dim : 64),
                             static_cast<cuuint32_t>(std::min(cache.page_size, 16)), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type = fp8                          ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : cache.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  CUtensorMap map;
  const CUresult status = reinterpret_cast<Encode>(encode_)(
      &map, type, 4, const_cast<unsigned char*>(side.data), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      fp8 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(ErrorCode::device, "cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(status)));
  }

  return std::bit_cast<TensorMap>(map);
}

}  // namespace headwater::cuda
