// Who plans: a *team*, which on the device is a thread block (device_planner_team.cuh) and here one thread. The steps
// are written for any: every member runs them.
//
//   each(n, f)         f(i) for i in [0, n), spread over the members; no barrier
//   barrier()          what any member wrote before is seen by all behind it
//   any, sum, greatest of one value per member, not negative; a barrier before and behind
//   scan(n, value, put) put(i, value(0) + ... + value(i - 1)) in 32 bits; returns the sum of all; a barrier before and
//                      behind; scan_wide: in 64 bits
//   order(keys, spare, n, to)  to[r] is the index of the r-th smallest key, equal keys in order, none 0; keys and
//   spare, room to
//                      work in, hold a power of two; a barrier before and behind
//   add, add_two, raise, lower, claim  atomic; their results do not depend on the order of members
//   strips             bundles of kLanes members that work in step: num_strips(), strip(), lane(), *_of_lanes,
//                      lanes_barrier(), least_index(n, value): the first of the least of 0..n-1
//
// A *grid* is several teams that run the same steps, each for some of the requests, and meet in sync().
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef __CUDACC__
#define HEADWATER_ON_TEAM __device__
// Once in the program, loops not unrolled: a plan is made once a step, and most of its code must be fetched first.
#define HEADWATER_ON_TEAM_CALL __device__ __noinline__
#define HEADWATER_ROLLED _Pragma("unroll 1")
#else
#define HEADWATER_ON_TEAM
#define HEADWATER_ON_TEAM_CALL
#define HEADWATER_ROLLED
#endif

namespace headwater::cuda {

/// Four neighbouring ids.
struct FourIds {
  std::int32_t id[4];
};

class LoneTeam {
 public:
  static constexpr int kLanes = 1;
  [[nodiscard]] static int rank() { return 0; }
  [[nodiscard]] static int strip() { return 0; }
  [[nodiscard]] static int num_strips() { return 1; }
  [[nodiscard]] static int lane() { return 0; }
  static void barrier() {}

  template <class Visit>
  static void each(int n, Visit&& visit) {
    for (int i = 0; i < n; ++i) visit(i);
  }
  [[nodiscard]] static bool any(bool value) { return value; }
  [[nodiscard]] static std::int64_t sum(std::int64_t value) { return value; }
  [[nodiscard]] static std::int32_t greatest(std::int32_t value) { return value; }
  template <class Value, class Put>
  static std::int32_t scan(int n, Value&& value, Put&& put) {
    return static_cast<std::int32_t>(
        scan_wide(n, value, [&](int i, std::int64_t before) { put(i, static_cast<std::int32_t>(before)); }));
  }
  template <class Value, class Put>
  static std::int64_t scan_wide(int n, Value&& value, Put&& put) {
    std::int64_t total = 0;
    for (int i = 0; i < n; ++i) {
      const std::int64_t v = value(i);
      put(i, total);
      total += v;
    }
    return total;
  }
  static void order(const std::uint32_t* keys, std::uint64_t* spare, int n, std::int32_t* to) {
    for (int i = 0; i < n; ++i) spare[i] = std::uint64_t{keys[i]} << 32 | static_cast<std::uint64_t>(i);
    std::sort(spare, spare + n);
    for (int i = 0; i < n; ++i) to[i] = static_cast<std::int32_t>(spare[i] & 0xffffffffU);
  }

  template <class T>
  static void add(T* to, T value) {
    *to += value;
  }
  static void add_two(std::int32_t* a, std::int32_t value_a, std::int32_t* b, std::int32_t value_b, int at) {
    add(a + at, value_a);
    add(b + at, value_b);
  }
  /// A number of its own for each caller, from *counter on.
  static std::int32_t next(std::int32_t* counter) { return (*counter)++; }
  static void raise(std::int32_t* to, std::int32_t value) { *to = std::max(*to, value); }
  static void lower(std::int32_t* to, std::int32_t value) { *to = std::min(*to, value); }
  /// Puts `value` in place of `free`; returns what was there.
  static std::int32_t claim(std::int32_t* place, std::int32_t free, std::int32_t value) {
    const std::int32_t old = *place;
    if (old == free) *place = value;
    return old;
  }

  [[nodiscard]] static std::int32_t least_of_lanes(std::int32_t value) { return value; }
  [[nodiscard]] static std::int32_t greatest_of_lanes(std::int32_t value) { return value; }
  [[nodiscard]] static std::int64_t sum_of_lanes(std::int64_t value) { return value; }
  /// Sum of the lanes before this one.
  [[nodiscard]] static std::int32_t before_of_lanes(std::int32_t /*value*/) { return 0; }
  template <class Value>
  [[nodiscard]] static int least_index(int n, Value&& value) {
    int least = 0;
    for (int i = 1; i < n; ++i) {
      if (value(i) < value(least)) least = i;
    }
    return least;
  }
  [[nodiscard]] static bool any_of_lanes(bool value) { return value; }
  static void lanes_barrier() {}
  /// What is at `from`, the same for all lanes, while others may write it.
  [[nodiscard]] static std::int32_t peek_of_lanes(std::int32_t* from) { return *from; }
  /// Writes what others may write, too, the same value.
  static void mark(std::int32_t* to, std::int32_t value) { *to = value; }
  /// Of the caller's tables.
  [[nodiscard]] static FourIds four(const std::int32_t* from) { return {{from[0], from[1], from[2], from[3]}}; }
};

/// A grid of one team.
class LoneGrid {
 public:
  [[nodiscard]] static int block() { return 0; }
  [[nodiscard]] static int num_blocks() { return 1; }
  static void sync() {}
  /// What another team wrote.
  template <class T>
  [[nodiscard]] static T read(const T* from) {
    return *from;
  }
};

}  // namespace headwater::cuda
