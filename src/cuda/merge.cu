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

/// What some of a row's states add up to: O not yet divided by the sum of weights 2^(lse - base).
struct Merged {
  float base = 0.0F;  ///< greatest LSE; -inf: no keys
  float sum = 0.0F;
  float4 o[kQuads] = {};
};

/// States first, first + step, ... of a row.
__device__ Merged merge_states(const MergeParams& p, const MergeRow& todo, int head, int first, int step, int lane) {
  constexpr int kEarly = 4;  ///< states whose O is asked for before any LSE has come
  const int count = first < todo.count ? (todo.count - first + step - 1) / step : 0;
  const auto state_of = [&](std::int32_t slot) { return std::int64_t{slot} * p.num_qo_heads + head; };
  const auto slot_of = [&](int i) { return todo.slots[first + i * step]; };
  // Lane l holds states l, l + 32, ... of these: the first 32, the usual case, in registers.
  const std::int32_t my_slot =
      step == 1 ? todo.my_slot : __shfl_sync(0xffffffffU, todo.my_slot, (first + lane * step) % 32);
  const std::int64_t mine = state_of(first + lane * step < 32 || lane >= count ? my_slot : slot_of(lane));
  const float my_lse = lane < count ? p.partial_lse[mine] : minus_infinity();
  float4 early[kEarly][kQuads] = {};
#pragma unroll
  for (int j = 0; j < kEarly; ++j) {
    const std::int64_t state = __shfl_sync(0xffffffffU, mine, j);
    if (j < count) load_state(p, state, lane, early[j]);
  }
  Merged all;
  float max = my_lse;
  for (int i = lane + 32; i < count; i += 32) max = fmaxf(max, p.partial_lse[state_of(slot_of(i))]);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffU, max, lanes));
  all.base = max;
  const float base = max == minus_infinity() ? 0.0F : max;
  const auto add = [&](float w, const float4(&part)[kQuads]) {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      all.o[quad].x += w * part[quad].x;
      all.o[quad].y += w * part[quad].y;
      all.o[quad].z += w * part[quad].z;
      all.o[quad].w += w * part[quad].w;
    }
  };
  for (int begin = 0; begin < count; begin += 32) {
    const int i = begin + lane;
    const std::int64_t state = begin == 0 || i >= count ? mine : state_of(slot_of(i));
    const float weight = i >= count ? 0.0F : exp2f((begin == 0 ? my_lse : p.partial_lse[state]) - base);
    all.sum += weight;
    int j = 0;
    if (begin == 0) {
#pragma unroll
      for (int e = 0; e < kEarly; ++e) add(__shfl_sync(0xffffffffU, weight, e), early[e]);
      j = kEarly;
    }
    const int here = min(32, count - begin);
#pragma unroll 4
    for (; j < here; ++j) {
      float4 part[kQuads] = {};
      load_state(p, __shfl_sync(0xffffffffU, state, j), lane, part);
      add(__shfl_sync(0xffffffffU, weight, j), part);
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) all.sum += __shfl_xor_sync(0xffffffffU, all.sum, lanes);
  return all;
}

/// Adds the other warps' part of a row to the first one's, in their order.
__device__ void gather(Merged& mine, Merged (&others)[kMergeWarps][32], int warp, int lane) {
  others[warp][lane] = mine;
  __syncthreads();
  if (warp == 0) {
    float base = minus_infinity();
    for (int w = 0; w < kMergeWarps; ++w) base = fmaxf(base, others[w][lane].base);
    Merged all;
    all.base = base;
    if (base == minus_infinity()) base = 0.0F;
#pragma unroll
    for (int w = 0; w < kMergeWarps; ++w) {
      const Merged& part = others[w][lane];
      const float weight = exp2f(part.base - base);
      all.sum += weight * part.sum;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        all.o[quad].x += weight * part.o[quad].x;
        all.o[quad].y += weight * part.o[quad].y;
        all.o[quad].z += weight * part.o[quad].z;
        all.o[quad].w += weight * part.o[quad].w;
      }
    }
    mine = all;
  }
  __syncthreads();
}

__device__ void store_row(const MergeParams& p, std::int32_t row, int head, const Merged& all, int lane) {
  float lse = all.sum == 0.0F ? minus_infinity() : all.base + log2f(all.sum);
  const float factor = (all.sum == 0.0F ? 0.0F : 1.0F / all.sum) * add_sink(p.out, head, lse);
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    const int d = 4 * lane + 128 * quad;
    if (d >= p.head_dim) continue;
    const float4 o = all.o[quad];
    store_output4(p.out, row * p.out.row_stride + head * p.out.head_stride + d,
                  {o.x * factor, o.y * factor, o.z * factor, o.w * factor});
  }
  if (lane == 0) store_lse(p.out, row, head, lse);
}

__global__ void __launch_bounds__(32 * kMergeWarps) merge_rows(const __grid_constant__ MergeParams p) {
  __shared__ Merged shared[kMergeWarps][32];
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const Header header = *p.plan.header;
  const int merged = header.num_merge_rows * p.num_qo_heads;
  const int total = merged + header.num_empty_rows * p.num_qo_heads;
  // Where rows are few, all warps of a block share one: their states come at the same time, not one after the other.
  const bool share = !p.invariant && merged <= static_cast<int>(gridDim.x) * 2;
  const int step = static_cast<int>(gridDim.x) * (share ? 1 : kMergeWarps);
  int i = share ? static_cast<int>(blockIdx.x) : static_cast<int>(blockIdx.x) * kMergeWarps + warp;
  MergeRow todo;
  if (i < merged) todo = MergeRow(p.plan, i / p.num_qo_heads, lane);
  // Every warp waits, also those without a row: this kernel must not end before the one that it may overtake. The plan
  // was there before that one.
  wait_for_previous();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.queue = 0;
  for (; i < total; i += step) {
    const int head = i % p.num_qo_heads;
    if (i < merged) {
      Merged all = merge_states(p, todo, head, share ? warp : 0, share ? kMergeWarps : 1, lane);
      if (share) gather(all, shared, warp, lane);
      if (!share || warp == 0) store_row(p, todo.row, head, all, lane);
      if (i + step < merged) todo = MergeRow(p.plan, (i + step) / p.num_qo_heads, lane);
    } else if (!share || warp == 0) {
      write_empty(p, p.plan.empty_rows[(i - merged) / p.num_qo_heads], head, lane);
    }
  }
}

}  // namespace

const void* merge_kernel() {
  return reinterpret_cast<const void*>(&merge_rows);
}

}  // namespace headwater::cuda
