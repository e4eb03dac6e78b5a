#include "cuda/merge.h"
#include "cuda/output.cuh"

namespace headwater::cuda {
namespace {

constexpr int kQuads = 2;  ///< groups of four elements that a lane holds: head_dim up to 256

/// A row without keys: O = 0, LSE = -inf, or the sink.
__device__ void write_empty(const MergeParams& p, std::int32_t row, int head, int lane) {
  float lse = minus_infinity();
  add_sink(p.out, head, lse);
  for (int d = 4 * lane; d < p.head_dim; d += 128)
    store_output4(p.out, row * p.out.row_stride + head * p.out.head_stride + d, {0.0F, 0.0F, 0.0F, 0.0F});
  if (lane == 0) store_lse(p.out, row, head, lse);
}

__device__ void merge_row(const MergeParams& p, std::int32_t row, int head, const std::int32_t* slots, int count,
                          int lane) {
  const auto state_of = [&](int i) { return static_cast<std::int64_t>(slots[i]) * p.num_qo_heads + head; };
  // Lane l holds states l, l + 32, ...: of the first 32 also in registers, the usual case.
  const std::int64_t mine = lane < count ? state_of(lane) : 0;
  const float my_lse = lane < count ? p.partial_lse[mine] : minus_infinity();
  float max = my_lse;
  for (int i = lane + 32; i < count; i += 32) max = fmaxf(max, p.partial_lse[state_of(i)]);
  for (int lanes = 16; lanes > 0; lanes /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffU, max, lanes));
  const float base = max == minus_infinity() ? 0.0F : max;

  float sum = 0.0F;
  float4 o[kQuads] = {};
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane;
    const std::int64_t state = first == 0 || i >= count ? mine : state_of(i);
    const float weight = i >= count ? 0.0F : exp2f((first == 0 ? my_lse : p.partial_lse[state]) - base);
    sum += weight;
    const int here = min(32, count - first);
#pragma unroll 8
    for (int j = 0; j < here; ++j) {
      const float w = __shfl_sync(0xffffffffU, weight, j);
      const float* from = p.partial_o + __shfl_sync(0xffffffffU, state, j) * p.head_dim + 4 * lane;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        if (4 * lane + 128 * quad >= p.head_dim) continue;
        const float4 part = *reinterpret_cast<const float4*>(from + 128 * quad);
        o[quad].x += w * part.x;
        o[quad].y += w * part.y;
        o[quad].z += w * part.z;
        o[quad].w += w * part.w;
      }
    }
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, lanes);
  float lse = sum == 0.0F ? minus_infinity() : base + log2f(sum);
  const float factor = (sum == 0.0F ? 0.0F : 1.0F / sum) * add_sink(p.out, head, lse);
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    const int d = 4 * lane + 128 * quad;
    if (d >= p.head_dim) continue;
    store_output4(p.out, row * p.out.row_stride + head * p.out.head_stride + d,
                  {o[quad].x * factor, o[quad].y * factor, o[quad].z * factor, o[quad].w * factor});
  }
  if (lane == 0) store_lse(p.out, row, head, lse);
}

__global__ void __launch_bounds__(32 * kMergeWarps) merge_rows(const __grid_constant__ MergeParams p) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  // Every warp waits, also those without a row: this kernel must not end before the one that it may overtake. The plan
  // was there before that one.
  const Header header = *p.plan.header;
  const int merged = header.num_merge_rows;
  const int total = (merged + header.num_empty_rows) * p.num_qo_heads;
  const int warps = static_cast<int>(gridDim.x) * kMergeWarps;
  wait_for_previous();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.queue = 0;
  for (int i = static_cast<int>(blockIdx.x) * kMergeWarps + static_cast<int>(threadIdx.x / 32); i < total; i += warps) {
    const int at = i / p.num_qo_heads;
    const int head = i % p.num_qo_heads;
    if (at < merged) {
      const std::int32_t first = p.plan.merge_indptr[at];
      merge_row(p, p.plan.merge_rows[at], head, p.plan.merge_slots + first, p.plan.merge_indptr[at + 1] - first, lane);
    } else {
      write_empty(p, p.plan.empty_rows[at - merged], head, lane);
    }
  }
}

}  // namespace

const void* merge_kernel() {
  return reinterpret_cast<const void*>(&merge_rows);
}

}  // namespace headwater::cuda
