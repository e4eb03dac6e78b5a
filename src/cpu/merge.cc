// Merging of partial attention states that the caller holds (M1): base-2 weights relative to the greatest LSE.
//
// A head of a group is worked on in blocks of head_dim on the stack, so that no scratch memory is needed. Weights are
// scalar and the same at every ISA level; rows are added up and converted by the level's kernels (kernels.h). Groups
// are dealt to workers in contiguous runs. merge_state is the same with groups of two, the second state of each from
// tensors of its own.
#include <algorithm>
#include <cmath>
#include <string>

#include "cpu/kernels.h"
#include "cpu/state.h"
#include "cpu/validate.h"
#include "headwater/cpu.h"

namespace headwater::cpu {
namespace {

constexpr int kBlock = 512;
constexpr int kKeptWeights = 32;  ///< further ones are computed anew where they are needed
/// Elements of v_in below which the calling thread does everything.
constexpr std::int64_t kSerialElements = std::int64_t{32} * 1024;
constexpr float kPlusInfinity = -kMinusInfinity;

/// States of one tensor pair: row i of v, with head h's LSE.
struct States {
  ConstRowsView v;
  ConstLseView lse;

  [[nodiscard]] const std::byte* value(std::int64_t row, int head, int d) const noexcept {
    return static_cast<const std::byte*>(v.data) +
           (row * v.row_stride + head * v.head_stride + d) * static_cast<std::int64_t>(size_of(v.dtype));
  }
  [[nodiscard]] float raw_lse(std::int64_t row, int head) const noexcept {
    return lse.data[row * lse.row_stride + head * lse.head_stride];
  }
};

struct Merge {
  const Kernels& kernels;
  States in;
  const States* second;  ///< not nullptr: group j is row j of `in` and row j of this
  std::span<const std::int32_t> o_indptr;
  std::int64_t num_groups;
  int num_heads;
  int head_dim;
  RowsView v_out;
  LseView lse_out;
  int num_workers;

  void write_lse(std::int64_t group, int head, float lse) const noexcept {
    if (lse_out.data == nullptr) return;
    lse_out.data[group * lse_out.row_stride + head * lse_out.head_stride] =
        lse_out.base == LseBase::two ? lse : lse * kLn2;
  }
};

class HeadMerge {
 public:
  HeadMerge(const Merge& m, std::int64_t group, int head) noexcept
      : m_(m),
        head_(head),
        group_(group),
        begin_(m.second != nullptr ? group : m.o_indptr[static_cast<std::size_t>(group)]),
        count_(m.second != nullptr ? 2 : m.o_indptr[static_cast<std::size_t>(group) + 1] - begin_) {}

  void run() noexcept {
    if (count_ == 1 && lse_of(0) != kMinusInfinity) {
      copy();
    } else {
      merge();
    }
  }

 private:
  /// The tensors and the row of the group's state i.
  [[nodiscard]] const States& states_of(std::int64_t i) const noexcept {
    return m_.second != nullptr && i == 1 ? *m_.second : m_.in;
  }
  [[nodiscard]] std::int64_t row_of(std::int64_t i) const noexcept {
    return m_.second != nullptr ? group_ : begin_ + i;
  }
  [[nodiscard]] const std::byte* in(std::int64_t i, int d) const noexcept {
    return states_of(i).value(row_of(i), head_, d);
  }
  /// LSE of state i in base 2; +inf means "no keys", as -inf does.
  [[nodiscard]] float lse_of(std::int64_t i) const noexcept {
    const States& states = states_of(i);
    const float lse = states.raw_lse(row_of(i), head_);
    if (lse == kPlusInfinity) return kMinusInfinity;
    return states.lse.base == LseBase::two ? lse : lse * kLog2E;
  }
  [[nodiscard]] std::byte* out(int d) const noexcept {
    return static_cast<std::byte*>(m_.v_out.data) +
           (group_ * m_.v_out.row_stride + head_ * m_.v_out.head_stride + d) * bytes_of(m_.v_out.dtype);
  }
  static std::int64_t bytes_of(DType type) noexcept { return static_cast<std::int64_t>(size_of(type)); }

  /// A group of one: the same bits. Only a change of type or base can alter them.
  void copy() noexcept {
    m_.kernels.convert_row(in(0, 0), m_.in.v.dtype, out(0), m_.v_out.dtype, m_.head_dim);
    if (m_.lse_out.data == nullptr) return;
    if (m_.in.lse.base == m_.lse_out.base) {
      m_.lse_out.data[group_ * m_.lse_out.row_stride + head_ * m_.lse_out.head_stride] = m_.in.raw_lse(begin_, head_);
    } else {
      m_.write_lse(group_, head_, lse_of(0));
    }
  }

  void merge() noexcept {
    max_ = kMinusInfinity;
    float sum = 0.0F;
    for (std::int64_t i = 0; i < count_; ++i) max_ = std::max(max_, lse_of(i));
    for (std::int64_t i = 0; i < count_; ++i) {
      const float w = compute_weight(i);
      if (i < kKeptWeights) weights_[i] = w;
      sum += w;
    }
    const float factor = sum == 0.0F ? 0.0F : 1.0F / sum;
    for (int d = 0; d < m_.head_dim; d += kBlock) merge_block(d, std::min(kBlock, m_.head_dim - d), factor);
    m_.write_lse(group_, head_, sum == 0.0F ? kMinusInfinity : max_ + std::log2(sum));
  }

  [[nodiscard]] float compute_weight(std::int64_t i) const noexcept {
    const float lse = lse_of(i);
    return lse == kMinusInfinity ? 0.0F : std::exp2(lse - max_);
  }

  void merge_block(int d, int n, float factor) noexcept {
    float o[kBlock];
    std::fill_n(o, n, 0.0F);
    for (std::int64_t i = 0; i < count_; ++i) {
      const float w = i < kKeptWeights ? weights_[i] : compute_weight(i);
      if (w == 0.0F) continue;  // its values may be anything
      m_.kernels.add_weighted_row(in(i, d), states_of(i).v.dtype, w * factor, o, n);
    }
    m_.kernels.convert_row(o, DType::f32, out(d), m_.v_out.dtype, n);
  }

  const Merge& m_;
  int head_;
  std::int64_t group_;
  std::int64_t begin_;
  std::int64_t count_;
  float max_ = kMinusInfinity;
  float weights_[kKeptWeights];
};

void merge_groups(const Merge& m, int worker) noexcept {
  const std::int64_t begin = m.num_groups * worker / m.num_workers;
  const std::int64_t end = m.num_groups * (worker + 1) / m.num_workers;
  for (std::int64_t group = begin; group < end; ++group) {
    for (int head = 0; head < m.num_heads; ++head) HeadMerge(m, group, head).run();
  }
}

void check_groups(std::span<const std::int32_t> o_indptr) {
  if (o_indptr.empty()) {
    refuse(ErrorCode::invalid_argument, "o_indptr.size()", 0, "at least 1 (groups + 1)");
  }
  if (o_indptr[0] != 0) refuse(ErrorCode::invalid_argument, "o_indptr[0]", o_indptr[0], "0");
  for (std::size_t i = 1; i < o_indptr.size(); ++i) {
    if (o_indptr[i] < o_indptr[i - 1]) {
      throw Error(ErrorCode::invalid_argument, "o_indptr[" + std::to_string(i) + "] = " + std::to_string(o_indptr[i]) +
                                                   " is less than o_indptr[" + std::to_string(i - 1) +
                                                   "] = " + std::to_string(o_indptr[i - 1]));
    }
  }
}

void merge(Merge& merge, std::int64_t states, Executor& executor) {
  if (merge.num_workers == 1 || (states + merge.num_groups) * merge.num_heads * merge.head_dim < kSerialElements) {
    merge.num_workers = 1;
    merge_groups(merge, 0);
    return;
  }
  executor.parallel([](void* context, int worker) noexcept { merge_groups(*static_cast<Merge*>(context), worker); },
                    &merge);
}

void check_sizes(int num_heads, int head_dim) {
  if (num_heads < 1) refuse(ErrorCode::invalid_argument, "num_heads", num_heads, "at least 1");
  if (head_dim < 1) refuse(ErrorCode::invalid_argument, "head_dim", head_dim, "at least 1");
}

}  // namespace

void merge_states(ConstRowsView v_in, ConstLseView lse_in, std::span<const std::int32_t> o_indptr, int num_heads,
                  int head_dim, RowsView v_out, LseView lse_out, Executor& executor) {
  check_sizes(num_heads, head_dim);
  check_groups(o_indptr);
  const std::int64_t states = o_indptr.back();
  const auto groups = static_cast<std::int64_t>(o_indptr.size()) - 1;
  check_rows("v_in", v_in, states, num_heads, head_dim);
  check_lse("lse_in", lse_in, states, num_heads);
  check_rows("v_out", v_out, groups, num_heads, head_dim);
  if (lse_out.data != nullptr) check_lse("lse_out", lse_out, groups, num_heads);

  Merge all{kernels_for(default_isa()), {v_in, lse_in}, nullptr, o_indptr, groups, num_heads, head_dim, v_out, lse_out,
            executor.num_workers()};
  merge(all, states, executor);
}

void merge_state(ConstRowsView v_a, ConstLseView lse_a, ConstRowsView v_b, ConstLseView lse_b, std::int64_t num_rows,
                 int num_heads, int head_dim, RowsView v_out, LseView lse_out, Executor& executor) {
  check_sizes(num_heads, head_dim);
  if (num_rows < 0) refuse(ErrorCode::invalid_argument, "num_rows", num_rows, "at least 0");
  check_rows("v_a", v_a, num_rows, num_heads, head_dim);
  check_lse("lse_a", lse_a, num_rows, num_heads);
  check_rows("v_b", v_b, num_rows, num_heads, head_dim);
  check_lse("lse_b", lse_b, num_rows, num_heads);
  check_rows("v_out", v_out, num_rows, num_heads, head_dim);
  if (lse_out.data != nullptr) check_lse("lse_out", lse_out, num_rows, num_heads);

  const States second{v_b, lse_b};
  Merge all{kernels_for(default_isa()), {v_a, lse_a}, &second, {}, num_rows, num_heads, head_dim, v_out, lse_out,
            executor.num_workers()};
  merge(all, 2 * num_rows, executor);
}

}  // namespace headwater::cpu
