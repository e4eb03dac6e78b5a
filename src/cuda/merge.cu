#include "cuda/merge.h"
#include "cuda/output.cuh"

namespace headwater::cuda {
namespace {

/// A row without keys: O = 0, LSE = -inf, or the sink.
__device__ void write_empty(const MergeParams& p, std::int32_t row, int head, int lane) {
  float lse = minus_infinity();
  add_sink(p.out, head, lse);
  for (int d = 4 * lane; d < p.head_dim; d += 128) store_output4(p.out, row, head, d, {0.0F, 0.0F, 0.0F, 0.0F});
  if (lane == 0) store_lse(p.out, row, head, lse);
}

__device__ void merge_row(const MergeParams& p, std::int32_t row, int head, const std::int32_t* slots, int count,
                          int lane) {
  const auto lse_of = [&](int i) { return p.partial_lse[static_cast<std::int64_t>(slots[i]) * p.num_qo_heads + head]; };
  // Lanes share the states' weights; with more than 32 states each lane holds several in turn.
  float max = minus_infinity();
  for (int i = lane; i < count; i += 32) max = fmaxf(max, lse_of(i));
  for (int lanes = 16; lanes > 0; lanes /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffU, max, lanes));
  const float base = max == minus_infinity() ? 0.0F : max;
  float sum = 0.0F;
  for (int i = lane; i < count; i += 32) sum += exp2f(lse_of(i) - base);
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, lanes);
  float lse = sum == 0.0F ? minus_infinity() : base + log2f(sum);
  const float factor = (sum == 0.0F ? 0.0F : 1.0F / sum) * add_sink(p.out, head, lse);
  for (int d = 4 * lane; d < p.head_dim; d += 128) {
    float4 o{0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const float weight = exp2f(lse_of(i) - base);
      const std::int64_t at = (static_cast<std::int64_t>(slots[i]) * p.num_qo_heads + head) * p.head_dim + d;
      const float4 part = *reinterpret_cast<const float4*>(p.partial_o + at);
      o.x += weight * part.x;
      o.y += weight * part.y;
      o.z += weight * part.z;
      o.w += weight * part.w;
    }
    store_output4(p.out, row, head, d, {o.x * factor, o.y * factor, o.z * factor, o.w * factor});
  }
  if (lane == 0) store_lse(p.out, row, head, lse);
}

__global__ void __launch_bounds__(kMergeThreads) merge_rows(const __grid_constant__ MergeParams p) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const Header& header = p.plan.header();
  const auto* merge_indptr = p.plan.at<std::int32_t>(header.merge_indptr);
  const int merged = header.num_merge_rows;
  const int total = (merged + header.num_empty_rows) * p.num_qo_heads;
  const int warps = static_cast<int>(gridDim.x) * (kMergeThreads / 32);
  for (int i = static_cast<int>(blockIdx.x) * (kMergeThreads / 32) + static_cast<int>(threadIdx.x / 32); i < total;
       i += warps) {
    const int at = i / p.num_qo_heads;
    const int head = i % p.num_qo_heads;
    if (at < merged) {
      const std::int32_t first = merge_indptr[at];
      merge_row(p, p.plan.at<std::int32_t>(header.merge_rows)[at], head,
                p.plan.at<std::int32_t>(header.merge_slots) + first, merge_indptr[at + 1] - first, lane);
    } else {
      write_empty(p, p.plan.at<std::int32_t>(header.empty_rows)[at - merged], head, lane);
    }
  }
}

}  // namespace

const void* merge_kernel() {
  return reinterpret_cast<const void*>(&merge_rows);
}

}  // namespace headwater::cuda
