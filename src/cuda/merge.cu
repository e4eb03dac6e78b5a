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

/// What a warp merges: the plan's part, which was there before the states.
struct MergeRow {
  std::int32_t row = 0;
  std::int32_t count = 0;
  const std::int32_t* slots = nullptr;
  std::int32_t my_slot = 0;  ///< lane l: slots[l], of the first 32

  MergeRow() = default;
  __device__ MergeRow(const PlanView& plan, int at, int lane) {
    const std::int32_t first = plan.merge_indptr[at];
    row = plan.merge_rows[at];
    count = plan.merge_indptr[at + 1] - first;
    slots = plan.merge_slots + first;
    if (lane < count) my_slot = slots[lane];
  }
};

/// Four elements of a state's O, for each of a lane's groups.
__device__ __forceinline__ void load_state(const MergeParams& p, std::int64_t state, int lane, float4 (&o)[kQuads]) {
  const float* from = p.partial_o + state * p.head_dim + 4 * lane;
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    if (4 * lane + 128 * quad < p.head_dim) o[quad] = *reinterpret_cast<const float4*>(from + 128 * quad);
  }
}

__device__ void merge_row(const MergeParams& p, const MergeRow& todo, int head, int lane) {
  constexpr int kEarly = 4;  ///< states whose O is asked for before any LSE has come
  const int count = todo.count;
  const auto state_of = [&](std::int32_t slot) { return std::int64_t{slot} * p.num_qo_heads + head; };
  const std::int64_t mine = state_of(todo.my_slot);
  const float my_lse = lane < count ? p.partial_lse[mine] : minus_infinity();
  float4 early[kEarly][kQuads] = {};
#pragma unroll
  for (int j = 0; j < kEarly; ++j) {
    const std::int64_t state = __shfl_sync(0xffffffffU, mine, j);
    if (j < count) load_state(p, state, lane, early[j]);
  }
  float max = my_lse;
  for (int i = lane + 32; i < count; i += 32) max = fmaxf(max, p.partial_lse[state_of(todo.slots[i])]);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffU, max, lanes));
  const float base = max == minus_infinity() ? 0.0F : max;

  float sum = 0.0F;
  float4 o[kQuads] = {};
  const auto add = [&](float w, const float4(&part)[kQuads]) {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      o[quad].x += w * part[quad].x;
      o[quad].y += w * part[quad].y;
      o[quad].z += w * part[quad].z;
      o[quad].w += w * part[quad].w;
    }
  };
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane;
    const std::int64_t state = first == 0 || i >= count ? mine : state_of(todo.slots[i]);
    const float weight = i >= count ? 0.0F : exp2f((first == 0 ? my_lse : p.partial_lse[state]) - base);
    sum += weight;
    int j = 0;
    if (first == 0) {
#pragma unroll
      for (int e = 0; e < kEarly; ++e) add(__shfl_sync(0xffffffffU, weight, e), early[e]);
      j = kEarly;
    }
    const int here = min(32, count - first);
#pragma unroll 4
    for (; j < here; ++j) {
      float4 part[kQuads] = {};
      load_state(p, __shfl_sync(0xffffffffU, state, j), lane, part);
      add(__shfl_sync(0xffffffffU, weight, j), part);
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, lanes);
  float lse = sum == 0.0F ? minus_infinity() : base + log2f(sum);
  const float factor = (sum == 0.0F ? 0.0F : 1.0F / sum) * add_sink(p.out, head, lse);
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    const int d = 4 * lane + 128 * quad;
    if (d >= p.head_dim) continue;
    store_output4(p.out, todo.row * p.out.row_stride + head * p.out.head_stride + d,
                  {o[quad].x * factor, o[quad].y * factor, o[quad].z * factor, o[quad].w * factor});
  }
  if (lane == 0) store_lse(p.out, todo.row, head, lse);
}

__global__ void __launch_bounds__(32 * kMergeWarps) merge_rows(const __grid_constant__ MergeParams p) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const Header header = *p.plan.header;
  const int merged = header.num_merge_rows;
  const int total = (merged + header.num_empty_rows) * p.num_qo_heads;
  const int warps = static_cast<int>(gridDim.x) * kMergeWarps;
  int i = static_cast<int>(blockIdx.x) * kMergeWarps + static_cast<int>(threadIdx.x / 32);
  MergeRow todo;
  if (i < merged * p.num_qo_heads) todo = MergeRow(p.plan, i / p.num_qo_heads, lane);
  // Every warp waits, also those without a row: this kernel must not end before the one that it may overtake. The plan
  // was there before that one.
  wait_for_previous();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.queue = 0;
  for (; i < total; i += warps) {
    const int at = i / p.num_qo_heads;
    const int head = i % p.num_qo_heads;
    if (at < merged) {
      merge_row(p, todo, head, lane);
      if (i + warps < merged * p.num_qo_heads) todo = MergeRow(p.plan, (i + warps) / p.num_qo_heads, lane);
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
