// Chooses the kernel and the arithmetic for an item, at one level. Each attend_<level>.cc instantiates this once.
#pragma once

#include <type_traits>

#include "cpu/simd/few_rows.h"
#include "cpu/simd/many_rows.h"
#include "cpu/simd/merge_row.h"

namespace headwater::cpu::simd {

template <class V>
struct Entry {
  template <DType Kv, bool Dot>
  struct SpanOf {
    using type = PlainSpan<V, Kv>;
  };
  template <bool Dot>
  struct SpanOf<DType::bf16, Dot> {
    using type =
        std::conditional_t<Dot, DotSpan<V>, std::conditional_t<V::kSplitBf16, SplitSpan<V>, PlainSpan<V, DType::bf16>>>;
  };

  /// Batch-invariant mode has one kernel only: its bits must not depend on the number of rows.
  template <class Arith, DType Kv>
  [[gnu::noinline]] static void run(const AttendParams& p, const detail::WorkItem& item, Scratch scratch) noexcept {
    if (!p.batch_invariant && item.num_rows * p.group_size <= V::kFewRows) {
      FewRows<V, typename SpanOf<Kv, Arith::kPerUnit == 2>::type>(p, item, scratch).run();
    } else {
      ManyRows<V, Arith, Kv>(p, item, scratch).run();
    }
  }

  static void attend(const AttendParams& p, const detail::WorkItem& item, Scratch scratch) noexcept {
    switch (p.kv[item.view].dtype) {
      case DType::f32:
        run<Fma32<V>, DType::f32>(p, item, scratch);
        break;
      case DType::f16:
        run<Fma32<V>, DType::f16>(p, item, scratch);
        break;
      case DType::f8e4m3:
        run<Fma32<V>, DType::f8e4m3>(p, item, scratch);
        break;
      case DType::bf16:
        if constexpr (V::kDotBf16) {
          if (p.q.dtype == DType::bf16) {
            run<Dot16<V>, DType::bf16>(p, item, scratch);
            break;
          }
        }
        run<Fma32<V>, DType::bf16>(p, item, scratch);
        break;
    }
  }

  static std::size_t scratch(const AttendParams& p, int max_rows) noexcept {
    return scratch_bytes({p.num_kv_heads, p.group_size, p.head_dim_qk, p.head_dim_vo, p.batch_invariant}, max_rows);
  }

  static void merge_row(const AttendParams& p, std::int32_t row, const std::int32_t* slots, int count) noexcept {
    MergeRow<V>(p, row).run(slots, count);
  }
};

}  // namespace headwater::cpu::simd
