// Cost-model constants for CUDA devices. The schedule's worker is a team of thread blocks, one per KV head: an item
// goes to a team, each of whose blocks serves one head. So a team reads all heads of a token at the same time, and the
// products of a token take as long as those of one head.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/error.h"
#include "headwater/cuda.h"

namespace headwater::cuda {
namespace {

constexpr int kBlocksPerMultiprocessor = 2;  ///< of heads up to 128; one of larger ones

/// Of one KV head of 128.
DeviceModel one_head_model(int multiprocessors) {
  DeviceModel model;
  model.num_workers = kBlocksPerMultiprocessor * multiprocessors;
  model.has_dot16 = true;
  model.teams = true;
  model.memory_ps_per_kib = 226;
  model.worker_ps_per_kib = 11'650;
  model.cache_ps_per_kib = 84;
  model.cache_bytes = 40LL << 20;
  model.item_ps = 3'350'000;
  model.item_row_ps = 119'000;
  model.partial_ps_per_kib = 122'000;
  model.many_start_ps = 2'500'000;
  model.launch_ps = 400'000;
  model.max_tile_rows = 128;
  model.chunk_tokens = 1 << 20;  // row tiles of one span run side by side: no need to keep chunks in a cache
  model.part_tokens = 64;        // a round of all warps' tiles: what is left over is masked
  model.dot16 = {0, 4'200, 250, 64, 16};
  model.fma32 = model.dot16;
  return model;
}

}  // namespace

DeviceModel model_for_shape(const DeviceModel& one_head, const AttentionShape& shape) {
  const bool wide = shape.head_dim_qk > 128 || shape.head_dim_vo > 128;
  const int heads = std::max(1, shape.num_kv_heads);
  DeviceModel model = one_head;
  model.num_workers = std::max(1, one_head.num_workers / (wide ? kBlocksPerMultiprocessor : 1) / heads);
  model.worker_ps_per_kib = one_head.worker_ps_per_kib / heads;
  model.partial_ps_per_kib = one_head.partial_ps_per_kib / heads;
  model.max_tile_rows = wide ? std::max(1, one_head.max_tile_rows / 2) : one_head.max_tile_rows;
  for (ComputeModel* products : {&model.dot16, &model.fma32}) {
    products->few_row_ps /= heads;
    products->many_base_ps /= heads;
    products->many_row_ps = std::max<std::int64_t>(1, products->many_row_ps / heads);
  }
  return model;
}

DeviceModel h200_model(const AttentionShape& shape) {
  return model_for_shape(one_head_model(132), shape);
}

DeviceModel device_model(const AttentionShape& shape) {
  int device = 0;
  int multiprocessors = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return model_for_shape(one_head_model(multiprocessors), shape);
}

}  // namespace headwater::cuda
