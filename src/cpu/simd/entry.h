// Chooses the kernel and the arithmetic for an item, at one level. Each attend_<level>.cc instantiates this once.
#pragma once

#include "cpu/simd/few_rows.h"
#include "cpu/simd/many_rows.h"
#include "cpu/simd/merge_row.h"
#include "cpu/simd/rows.h"

namespace headwater::cpu::simd {

template <class V>
struct Entry {
  template <class Span>
  [[gnu::noinline]] static void run_few(const AttendParams& p, const detail::WorkItem& item, Scratch scratch) noexcept {
    FewRows<V, Span>(p, item, scratch).run();
  }

  /// Batch-invariant mode has one kernel only: its bits must not depend on the number of rows.
  template <class Arith, DType Kv>
  [[gnu::noinline]] static void run(const AttendParams& p, const detail::WorkItem& item, Scratch scratch) noexcept {
    if (p.batch_invariant || item.num_rows * p.group_size > V::kFewRows) {
      ManyRows<V, Arith, Kv>(p, item, scratch).run();
      return;
    }
    if constexpr (Arith::kPerUnit == 2) {
      run_few<DotSpan<V>>(p, item, scratch);
    } else if constexpr (Kv == DType::bf16) {
      const bool whole_spans = p.head_dim_qk % (2 * V::kLanes) == 0 && p.head_dim_vo % (2 * V::kLanes) == 0;
      whole_spans ? run_few<SplitSpan<V>>(p, item, scratch) : run_few<PlainSpan<V, Kv>>(p, item, scratch);
    } else {
      run_few<PlainSpan<V, Kv>>(p, item, scratch);
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

/// The table of a level.
template <class V>
inline constexpr Kernels kernels_of{V::kIsa,          Entry<V>::attend,     Entry<V>::scratch, Entry<V>::merge_row,
                                    Rows<V>::convert, Rows<V>::add_weighted};

}  // namespace headwater::cpu::simd
