// Merging of states that the caller holds: one warp for a head of a group. Lanes hold the weights of 32 states at a
// time and hand them round; each lane adds up its own elements of the row.
#include <type_traits>

#include "cuda/elements.cuh"
#include "cuda/states.h"

namespace headwater::cuda {
namespace {

constexpr unsigned kAll = 0xffffffffU;
constexpr float kNoKeys = -__builtin_huge_valf();

/// The states of one head of one group.
struct Group {
  const StatesParams& p;
  std::int64_t group;
  int head;
  std::int64_t first;  ///< row of the first state
  std::int32_t count;

  [[nodiscard]] __device__ const StatesIn& side(int i) const { return p.in[p.o_indptr == nullptr ? i : 0]; }
  [[nodiscard]] __device__ std::int64_t row(int i) const { return p.o_indptr == nullptr ? group : first + i; }
  [[nodiscard]] __device__ float given_lse(int i) const {
    const StatesIn& in = side(i);
    return in.lse[row(i) * in.lse_row_stride + head * in.lse_head_stride];
  }
  /// In base 2; +inf means "no keys", as -inf does.
  [[nodiscard]] __device__ float lse(int i) const {
    const float x = given_lse(i);
    return x == -kNoKeys ? kNoKeys : x * side(i).to_base_two;
  }
  template <class In>
  [[nodiscard]] __device__ const In* v(int i) const {
    const StatesIn& in = side(i);
    return static_cast<const In*>(in.v) + row(i) * in.row_stride + head * in.head_stride;
  }
  template <class Out>
  [[nodiscard]] __device__ Out* out() const {
    return static_cast<Out*>(p.v_out) + group * p.out_row_stride + head * p.out_head_stride;
  }
  __device__ void write_lse(float value) const {
    if (p.lse_out != nullptr) p.lse_out[group * p.lse_out_row_stride + head * p.lse_out_head_stride] = value;
  }
};

__device__ float weight_of(float lse, float max) {
  return lse == kNoKeys ? 0.0F : exp2f(lse - max);
}

/// A single state with keys: the same bits, unless type or base change.
template <class In, class Out, int kWidth>
__device__ void copy_state(const Group& g, int lane) {
  const In* from = g.v<In>(0);
  Out* to = g.out<Out>();
  for (int d = lane * kWidth; d < g.p.head_dim; d += 32 * kWidth) {
    const auto x = *reinterpret_cast<const Elements<In, kWidth>*>(from + d);
    Elements<Out, kWidth> y;
    if constexpr (std::is_same_v<In, Out>) {
      y = x;
    } else {
      for (int j = 0; j < kWidth; ++j) from_f32(to_f32(x.at[j]), y.at[j]);
    }
    *reinterpret_cast<Elements<Out, kWidth>*>(to + d) = y;
  }
  if (lane != 0) return;
  const bool same_base = (g.p.in[0].to_base_two == 1.0F) == (g.p.from_base_two == 1.0F);
  g.write_lse(same_base ? g.given_lse(0) : g.lse(0) * g.p.from_base_two);
}

template <class In, class Out, int kWidth>
__device__ void merge_group(const Group& g, int lane) {
  if (g.count == 1 && g.lse(0) != kNoKeys) {
    copy_state<In, Out, kWidth>(g, lane);
    return;
  }
  float max = kNoKeys;
  for (int i = lane; i < g.count; i += 32) max = fmaxf(max, g.lse(i));
  for (int lanes = 16; lanes > 0; lanes /= 2) max = fmaxf(max, __shfl_xor_sync(kAll, max, lanes));
  float sum = 0.0F;
  for (int i = lane; i < g.count; i += 32) sum += weight_of(g.lse(i), max);
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAll, sum, lanes);
  const float factor = sum == 0.0F ? 0.0F : 1.0F / sum;

  Out* to = g.out<Out>();
  for (int begin = 0; begin < g.p.head_dim; begin += 32 * kWidth) {
    const int d = begin + lane * kWidth;
    float o[kWidth] = {};
    for (int first = 0; first < g.count; first += 32) {
      const float mine = first + lane < g.count ? weight_of(g.lse(first + lane), max) * factor : 0.0F;
      const int here = min(32, g.count - first);
#pragma unroll 4
      for (int i = 0; i < here; ++i) {
        const float w = __shfl_sync(kAll, mine, i);
        if (w == 0.0F || d >= g.p.head_dim) continue;  // its values may be anything
        const auto x = *reinterpret_cast<const Elements<In, kWidth>*>(g.v<In>(first + i) + d);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) o[j] += w * to_f32(x.at[j]);
      }
    }
    if (d >= g.p.head_dim) continue;
    Elements<Out, kWidth> y;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) from_f32(o[j], y.at[j]);
    *reinterpret_cast<Elements<Out, kWidth>*>(to + d) = y;
  }
  __syncwarp();  // the LSE may be written over one that was read
  if (lane == 0) g.write_lse(sum == 0.0F ? kNoKeys : (max + log2f(sum)) * g.p.from_base_two);
}

template <class In, class Out>
__global__ void __launch_bounds__(32 * kStateWarps) merge(const __grid_constant__ StatesParams p) {
  const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * kStateWarps + threadIdx.x / 32;
  if (warp >= p.num_groups * p.num_heads) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  Group g{p, warp / p.num_heads, static_cast<int>(warp % p.num_heads), 0, 2};
  if (p.o_indptr != nullptr) {  // rows that do not exist are not read
    g.first = min(max(std::int64_t{p.o_indptr[g.group]}, std::int64_t{0}), p.num_states);
    const std::int64_t end = min(std::int64_t{p.o_indptr[g.group + 1]}, p.num_states);
    g.count = static_cast<std::int32_t>(max(end - g.first, std::int64_t{0}));
  }
  if (p.aligned) {
    merge_group<In, Out, 4>(g, lane);
  } else {
    merge_group<In, Out, 1>(g, lane);
  }
}

template <class In>
const void* states_kernel_from(DType out) {
  if (out == DType::f32) return reinterpret_cast<const void*>(&merge<In, float>);
  if (out == DType::f16) return reinterpret_cast<const void*>(&merge<In, __half>);
  return reinterpret_cast<const void*>(&merge<In, __nv_bfloat16>);
}

}  // namespace

const void* states_kernel(DType in, DType out) {
  if (in == DType::f32) return states_kernel_from<float>(out);
  if (in == DType::f16) return states_kernel_from<__half>(out);
  return states_kernel_from<__nv_bfloat16>(out);
}

}  // namespace headwater::cuda
