// A thread block as a team (device_planner_team.h), a cooperative launch as a grid.
#pragma once

#include <cooperative_groups.h>

#include "cuda/device_planner_team.h"

namespace headwater::cuda {

inline constexpr int kPlannerThreads = 512;
inline constexpr int kPlannerWarps = kPlannerThreads / 32;
inline constexpr unsigned kAllLanes = 0xffffffffU;

/// Memory of a block's collective operations: two sets, so that one of them needs a single barrier between its writes
/// and reads.
struct BlockSums {
  std::int64_t of_warp[2][kPlannerWarps];
};

class BlockTeam {
 public:
  static constexpr int kLanes = 32;

  __device__ explicit BlockTeam(BlockSums& sums) : sums_(&sums) {}
  [[nodiscard]] __device__ static int rank() { return static_cast<int>(threadIdx.x); }
  [[nodiscard]] __device__ static int strip() { return static_cast<int>(threadIdx.x / 32); }
  [[nodiscard]] __device__ static int num_strips() { return kPlannerWarps; }
  [[nodiscard]] __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static void barrier() { __syncthreads(); }

  template <class Visit>
  __device__ static void each(int n, Visit&& visit) {
#pragma unroll 1
    for (int i = rank(); i < n; i += kPlannerThreads) visit(i);
  }
  [[nodiscard]] __device__ static bool any(bool value) { return __syncthreads_or(value ? 1 : 0) != 0; }
  /// Not negative, below 2^58.
  [[nodiscard]] __device__ std::int64_t sum(std::int64_t value) const {
    value = sum_of_lanes(value);
    __syncthreads();
    if (lane() == 0) sums_->of_warp[0][strip()] = value;
    __syncthreads();
    return sum_of_lanes(lane() < kPlannerWarps ? sums_->of_warp[0][lane()] : 0);
  }
  [[nodiscard]] __device__ std::int32_t greatest(std::int32_t value) const {
    value = greatest_of_lanes(value);
    __syncthreads();
    if (lane() == 0) sums_->of_warp[0][strip()] = value;
    __syncthreads();
    return greatest_of_lanes(static_cast<std::int32_t>(sums_->of_warp[0][lane() % kPlannerWarps]));
  }

  /// Sums below 2^31.
  template <class Value, class Put>
  __device__ std::int32_t scan(int n, Value&& value, Put&& put) const {
    __syncthreads();
    std::int32_t carry = 0;
    int turn = 0;
#pragma unroll 1
    for (int first = 0; first < n; first += kPlannerThreads, turn ^= 1) {
      const int i = first + rank();
      const std::int32_t mine = i < n ? value(i) : 0;
      std::int32_t* of_warp = reinterpret_cast<std::int32_t*>(sums_->of_warp[turn]);
      const std::int32_t before = before_of_lanes(mine);
      if (lane() == 31) of_warp[strip()] = before + mine;
      __syncthreads();
      const std::int32_t warp = lane() < kPlannerWarps ? of_warp[lane()] : 0;
      const std::int32_t warps_before = __reduce_add_sync(kAllLanes, lane() < strip() ? warp : 0);
      if (i < n) put(i, carry + warps_before + before);
      carry += __reduce_add_sync(kAllLanes, warp);
    }
    __syncthreads();
    return carry;
  }

  /// In 64 bits.
  template <class Value, class Put>
  __device__ std::int64_t scan_wide(int n, Value&& value, Put&& put) const {
    __syncthreads();
    std::int64_t carry = 0;
    int turn = 0;
#pragma unroll 1
    for (int first = 0; first < n; first += kPlannerThreads, turn ^= 1) {
      const int i = first + rank();
      const std::int64_t mine = i < n ? value(i) : 0;
      std::int64_t up_to = mine;
#pragma unroll 1
      for (int apart = 1; apart < 32; apart *= 2) {
        const std::int64_t other = __shfl_up_sync(kAllLanes, up_to, apart);
        if (lane() >= apart) up_to += other;
      }
      if (lane() == 31) sums_->of_warp[turn][strip()] = up_to;
      __syncthreads();
      std::int64_t before = carry;
#pragma unroll 1
      for (int w = 0; w < kPlannerWarps; ++w) {
        const std::int64_t warp = sums_->of_warp[turn][w];
        if (w < strip()) before += warp;
        carry += warp;
      }
      if (i < n) put(i, before + up_to - mine);
    }
    __syncthreads();
    return carry;
  }

  /// Few keys: every one is compared with all others, by as many threads as there are for it. Many: bitonic sort.
  __device__ static void order(std::uint32_t* keys, std::uint64_t* spare, int n, std::int32_t* to) {
    if (n > kPlannerThreads) return order_many(keys, spare, n, to);
    const int padded = (n + 3) / 4 * 4;
    if (rank() < padded - n) keys[n + rank()] = ~0U;
    __syncthreads();
    int helpers = 1;  // of a key
    while (2 * helpers * n <= kPlannerThreads && helpers < 32) helpers *= 2;
    const int i = rank() / helpers;
    const bool there = i < n;
    int before = 0;
    if (there) {
      const std::uint32_t mine = keys[i];
      const int own = i / 4 * 4;
      // Equal keys before it come first. No key is 0.
#pragma unroll 4
      for (int j = rank() % helpers * 4; j < padded; j += helpers * 4) {
        const uint4 k = *reinterpret_cast<const uint4*>(keys + j);
        const std::uint32_t most = j < own ? mine : mine - 1;
        before += (k.x <= most) + (k.y <= most) + (k.z <= most) + (k.w <= most);
      }
      if (rank() % helpers == 0) {
        for (int j = own; j < i; ++j) before += keys[j] == mine ? 1 : 0;
      }
    }
    for (int apart = 1; apart < helpers; apart *= 2) before += __shfl_xor_sync(kAllLanes, before, apart);
    if (there && rank() % helpers == 0) to[before] = i;
    __syncthreads();
  }

  // Atomics on one place take turns: a warp that all means the same one goes as one.
  __device__ static void add(std::int32_t* to, std::int32_t value) {
    const unsigned here = __activemask();
    if (same_place(here, to)) {
      value = __reduce_add_sync(here, value);
      if (!is_first(here)) return;
    }
    atomicAdd(to, value);
  }
  /// Two at once: place `at` of each array.
  __device__ static void add_two(std::int32_t* a, std::int32_t value_a, std::int32_t* b, std::int32_t value_b, int at) {
    const unsigned here = __activemask();
    if (same_place(here, a + at)) {
      value_a = __reduce_add_sync(here, value_a);
      value_b = __reduce_add_sync(here, value_b);
      if (!is_first(here)) return;
    }
    atomicAdd(a + at, value_a);
    atomicAdd(b + at, value_b);
  }
  /// Members that add to the same place do so at once: there is no such instruction for 64 bits in shared memory. Three
  /// limbs of 21 bits.
  __device__ __noinline__ static void add(std::int64_t* to, std::int64_t value) {
    const unsigned peers = __match_any_sync(__activemask(), reinterpret_cast<unsigned long long>(to));
    const auto bits = static_cast<unsigned long long>(value);
    constexpr unsigned kLimb = (1U << 21) - 1;
    const unsigned low = __reduce_add_sync(peers, static_cast<unsigned>(bits) & kLimb);
    const unsigned middle = __reduce_add_sync(peers, static_cast<unsigned>(bits >> 21) & kLimb);
    const unsigned high = __reduce_add_sync(peers, static_cast<unsigned>(bits >> 42));
    if (lane() == __ffs(static_cast<int>(peers)) - 1) {
      atomicAdd(reinterpret_cast<unsigned long long*>(to),
                low + (static_cast<unsigned long long>(middle) << 21) + (static_cast<unsigned long long>(high) << 42));
    }
  }
  __device__ static std::int32_t next(std::int32_t* counter) { return atomicAdd(counter, 1); }
  __device__ static void raise(std::int32_t* to, std::int32_t value) {
    const unsigned here = __activemask();
    if (same_place(here, to)) {
      value = __reduce_max_sync(here, value);
      if (!is_first(here)) return;
    }
    if (*const_cast<volatile std::int32_t*>(to) < value) atomicMax(to, value);
  }
  __device__ static void lower(std::int32_t* to, std::int32_t value) {
    const unsigned here = __activemask();
    if (same_place(here, to)) {
      value = __reduce_min_sync(here, value);
      if (!is_first(here)) return;
    }
    if (*const_cast<volatile std::int32_t*>(to) > value) atomicMin(to, value);
  }
  __device__ static std::int32_t claim(std::int32_t* place, std::int32_t free, std::int32_t value) {
    const std::int32_t there = *const_cast<volatile std::int32_t*>(place);
    return there != free ? there : atomicCAS(place, free, value);
  }
  __device__ static void mark(std::int32_t* to, std::int32_t value) { *const_cast<volatile std::int32_t*>(to) = value; }

  [[nodiscard]] __device__ static std::int32_t least_of_lanes(std::int32_t value) {
    return __reduce_min_sync(kAllLanes, value);
  }
  [[nodiscard]] __device__ static std::int32_t greatest_of_lanes(std::int32_t value) {
    return __reduce_max_sync(kAllLanes, value);
  }
  /// In three limbs of 21 bits: not negative, below 2^58.
  [[nodiscard]] __device__ static std::int64_t sum_of_lanes(std::int64_t value) {
    constexpr unsigned kLimb = (1U << 21) - 1;
    const auto bits = static_cast<unsigned long long>(value);
    const unsigned low = __reduce_add_sync(kAllLanes, static_cast<unsigned>(bits) & kLimb);
    const unsigned middle = __reduce_add_sync(kAllLanes, static_cast<unsigned>(bits >> 21) & kLimb);
    const unsigned high = __reduce_add_sync(kAllLanes, static_cast<unsigned>(bits >> 42));
    return static_cast<std::int64_t>(low + (static_cast<unsigned long long>(middle) << 21) +
                                     (static_cast<unsigned long long>(high) << 42));
  }
  /// Which of values 0..n-1 is least, n <= 32; the first of equals.
  template <class Value>
  [[nodiscard]] __device__ static int least_index(int n, Value&& value) {
    const std::int32_t mine = lane() < n ? value(lane()) : 0x7fffffff;
    const std::int32_t least = __reduce_min_sync(kAllLanes, mine);
    return __ffs(static_cast<int>(__ballot_sync(kAllLanes, mine == least))) - 1;
  }
  [[nodiscard]] __device__ static std::int32_t before_of_lanes(std::int32_t value) {
    std::int32_t up_to = value;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      const std::int32_t other = __shfl_up_sync(kAllLanes, up_to, apart);
      if (lane() >= apart) up_to += other;
    }
    return up_to - value;
  }
  __device__ static void lanes_barrier() { __syncwarp(); }
  [[nodiscard]] __device__ static bool any_of_lanes(bool value) { return __any_sync(kAllLanes, value) != 0; }
  [[nodiscard]] __device__ static std::int32_t peek_of_lanes(std::int32_t* from) {
    return __shfl_sync(kAllLanes, *const_cast<volatile std::int32_t*>(from), 0);
  }
  [[nodiscard]] __device__ static FourIds four(const std::int32_t* from) {
    const int4 ids = __ldg(reinterpret_cast<const int4*>(from));
    return {{ids.x, ids.y, ids.z, ids.w}};
  }

 private:
  [[nodiscard]] __device__ static bool same_place(unsigned here, const void* to) {
    int same = 0;
    __match_all_sync(here, static_cast<unsigned>(reinterpret_cast<unsigned long long>(to)), &same);
    return same != 0;
  }
  [[nodiscard]] __device__ static bool is_first(unsigned here) { return lane() == __ffs(static_cast<int>(here)) - 1; }

  __device__ __noinline__ static void order_many(std::uint32_t* keys, std::uint64_t* spare, int n, std::int32_t* to) {
    int size = 1;
    while (size < n) size *= 2;
    __syncthreads();
    for (int i = rank(); i < size; i += kPlannerThreads) {
      spare[i] = i < n ? std::uint64_t{keys[i]} << 32 | static_cast<std::uint64_t>(i) : ~std::uint64_t{0};
    }
    __syncthreads();
    // Pairs at most 32 apart lie within 64 keys of one warp.
#pragma unroll 1
    for (int run = 2; run <= size; run *= 2) {
#pragma unroll 1
      for (int apart = run / 2; apart > 0; apart /= 2) {
#pragma unroll 1
        for (int pair = rank(); pair < size / 2; pair += kPlannerThreads) {
          const int low = 2 * pair - (pair & (apart - 1));
          const std::uint64_t a = spare[low];
          const std::uint64_t b = spare[low + apart];
          if ((a > b) == ((low & run) == 0)) {
            spare[low] = b;
            spare[low + apart] = a;
          }
        }
        if (apart > 32 || (apart == 1 && run >= 64)) {
          __syncthreads();
        } else {
          __syncwarp();
        }
      }
    }
    __syncthreads();
    for (int i = rank(); i < n; i += kPlannerThreads) to[i] = static_cast<std::int32_t>(spare[i] & 0xffffffffU);
    __syncthreads();
  }

  BlockSums* sums_;
};

class CooperativeGrid {
 public:
  [[nodiscard]] __device__ static int block() { return static_cast<int>(blockIdx.x); }
  [[nodiscard]] __device__ static int num_blocks() { return static_cast<int>(gridDim.x); }
  __device__ static void sync() { cooperative_groups::this_grid().sync(); }
  template <class T>
  [[nodiscard]] __device__ static T read(const T* from) {
    static_assert(sizeof(T) == 8);
    const int2 bits = __ldcg(reinterpret_cast<const int2*>(from));
    T value;
    memcpy(&value, &bits, sizeof(value));
    return value;
  }
};

}  // namespace headwater::cuda
