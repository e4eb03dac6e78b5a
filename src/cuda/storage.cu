// Writing to the cache on the device: new rows, and copies of pages. Bandwidth is all that matters here: every thread
// moves whole 16-byte vectors where addresses and strides permit.
#include <type_traits>

#include "cuda/elements.cuh"
#include "cuda/storage.h"

namespace headwater::cuda {
namespace {

/// Elements that a thread moves at once: 16 bytes of the wider type.
template <class From, class To>
inline constexpr int kVectorWidth = 16 / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));

template <int kWidth, class From, class To>
__device__ void append_row(const AppendParams& p, const AppendSide& side, std::int64_t page, int token) {
  const int per_head = side.head_dim / kWidth;
  const unsigned char* rows = side.rows + blockIdx.x * side.row_stride;
  unsigned char* to = side.cache.data + page * side.cache.page_stride + token * side.cache.token_stride;
  for (int i = static_cast<int>(threadIdx.x); i < per_head * p.num_kv_heads; i += kAppendThreads) {
    const int head = i / per_head;
    const int d = (i - head * per_head) * kWidth;
    const auto x = *reinterpret_cast<const Elements<From, kWidth>*>(rows + head * side.head_stride +
                                                                    d * static_cast<int>(sizeof(From)));
    Elements<To, kWidth> y;
    if constexpr (std::is_same_v<From, To>) {
      y = x;  // also what is no number keeps its bits
    } else {
      float scale = 1.0F;
      if constexpr (sizeof(To) == 1) {
        if (side.scale != nullptr) scale = side.scale[head * side.scale_stride];
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) from_f32(sizeof(To) == 1 ? to_f32(x.at[j]) / scale : to_f32(x.at[j]), y.at[j]);
    }
    *reinterpret_cast<Elements<To, kWidth>*>(to + head * side.cache.head_stride + d * static_cast<int>(sizeof(To))) = y;
  }
}

template <class From, class To>
__global__ void __launch_bounds__(kAppendThreads) append(const __grid_constant__ AppendParams p) {
  const std::int64_t slot = p.token_slots[blockIdx.x];
  if (slot < 0) return;
  const std::int64_t page = slot / p.page_size;
  if (page >= p.num_pages) {
    if (p.num_bad != nullptr && blockIdx.y == 0 && threadIdx.x == 0) atomicAdd(p.num_bad, 1);
    return;
  }
  const int token = static_cast<int>(slot - page * p.page_size);
  const int first = p.first_side + static_cast<int>(blockIdx.y);
  for (int s = first; s < first + p.sides_per_block; ++s) {
    if (s > first) __syncthreads();  // V is a view of K: it has the last word
    const AppendSide& side = p.sides[s];
    if (side.aligned) {
      append_row<kVectorWidth<From, To>, From, To>(p, side, page, token);
    } else {
      append_row<1, From, To>(p, side, page, token);
    }
  }
}

template <class From>
const void* append_kernel_from(DType to) {
  switch (to) {
    case DType::f32:
      return reinterpret_cast<const void*>(&append<From, float>);
    case DType::f16:
      return reinterpret_cast<const void*>(&append<From, __half>);
    case DType::bf16:
      return reinterpret_cast<const void*>(&append<From, __nv_bfloat16>);
    case DType::f8e4m3:
      break;
  }
  return reinterpret_cast<const void*>(&append<From, __nv_fp8_e4m3>);
}

template <class Unit>
__global__ void __launch_bounds__(kCopyThreads) copy(const __grid_constant__ CopyParams p) {
  const cpu::PageCopy c = p.list != nullptr ? p.list[blockIdx.x] : p.copies[blockIdx.x];
  if (c.num_tokens == 0) return;
  if (p.list != nullptr) {  // nobody has looked at it yet
    const bool good = c.src >= 0 && c.src < p.num_pages && c.dst >= 0 && c.dst < p.num_pages && c.src != c.dst &&
                      c.num_tokens > 0 && c.num_tokens <= p.page_size;
    if (!good) {
      if (p.num_bad != nullptr && blockIdx.y == 0 && threadIdx.x == 0) atomicAdd(p.num_bad, 1);
      return;
    }
  }
  for (int s = 0; s < 2; ++s) {
    const CacheSide& side = p.sides[s];
    const int per_token = p.units[s] * p.num_kv_heads;
    const std::int64_t all = static_cast<std::int64_t>(per_token) * c.num_tokens;
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.y) * kCopyThreads + threadIdx.x; i < all;
         i += static_cast<std::int64_t>(gridDim.y) * kCopyThreads) {
      const auto token = static_cast<int>(i / per_token);
      const int rest = static_cast<int>(i - static_cast<std::int64_t>(token) * per_token);
      const int head = rest / p.units[s];
      unsigned char* at = side.data + token * side.token_stride + head * side.head_stride +
                          static_cast<std::int64_t>(rest - head * p.units[s]) * static_cast<int>(sizeof(Unit));
      *reinterpret_cast<Unit*>(at + c.dst * side.page_stride) =
          *reinterpret_cast<const Unit*>(at + c.src * side.page_stride);
    }
  }
}

}  // namespace

const void* append_kernel(DType from, DType to) {
  if (from == DType::f32) return append_kernel_from<float>(to);
  if (from == DType::f16) return append_kernel_from<__half>(to);
  return append_kernel_from<__nv_bfloat16>(to);
}

const void* copy_kernel(int unit) {
  switch (unit) {
    case 16:
      return reinterpret_cast<const void*>(&copy<uint4>);
    case 4:
      return reinterpret_cast<const void*>(&copy<std::uint32_t>);
    case 2:
      return reinterpret_cast<const void*>(&copy<std::uint16_t>);
    default:
      return reinterpret_cast<const void*>(&copy<std::uint8_t>);
  }
}

}  // namespace headwater::cuda
