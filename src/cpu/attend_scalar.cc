// The scalar level's table entry, and merging of a row's partial states.
//
// merge_row needs no scratch: it works in blocks of head_dim and computes the weights anew for every block.
#include "cpu/attend_scalar.h"

#include <algorithm>

namespace headwater::cpu {
namespace {

constexpr int kBlock = 128;

struct States {
  const float* o;    ///< [slots, Hq, Dvo]
  const float* lse;  ///< [slots, Hq]
  const std::int32_t* slots;
  int count;
  int num_heads;
  int head_dim;
  int head;

  std::int64_t at(int i) const noexcept { return static_cast<std::int64_t>(slots[i]) * num_heads + head; }
  float lse_of(int i) const noexcept { return lse[at(i)]; }
  const float* o_of(int i, int d) const noexcept { return o + at(i) * head_dim + d; }
};

/// Left fold in slot order: the arithmetic of a kernel that folds its chunks itself.
float fold_block(const States& s, int d, int n, float* o) noexcept {
  float lse = kMinusInfinity;
  std::fill_n(o, n, 0.0F);
  for (int i = 0; i < s.count; ++i) fold_state(o, lse, s.o_of(i, d), s.lse_of(i), n);
  return lse;
}

/// All states at once, weighted relative to the greatest lse.
float sum_block(const States& s, int d, int n, float* o) noexcept {
  std::fill_n(o, n, 0.0F);
  float max = kMinusInfinity;
  for (int i = 0; i < s.count; ++i) max = std::max(max, s.lse_of(i));
  float sum = 0.0F;
  for (int i = 0; i < s.count; ++i) {
    const float lse = s.lse_of(i);
    if (lse == kMinusInfinity) continue;
    const float weight = std::exp2(lse - max);
    const float* from = s.o_of(i, d);
    for (int k = 0; k < n; ++k) o[k] += weight * from[k];
    sum += weight;
  }
  if (sum == 0.0F) return kMinusInfinity;
  for (int k = 0; k < n; ++k) o[k] /= sum;
  return max + std::log2(sum);
}

void write_block(const AttendParams& p, std::int64_t row, int head, int d, int n, const float* o) noexcept {
  with_type(p.out.dtype, [&](auto tag) {
    auto* to = static_cast<decltype(tag)*>(p.out.data) + row * p.out.row_stride + head * p.out.head_stride + d;
    convert_row(o, to, n);
  });
}

void merge_row(const AttendParams& p, std::int32_t row, const std::int32_t* slots, int count) noexcept {
  float o[kBlock];
  for (int head = 0; head < p.num_qo_heads; ++head) {
    const States states{p.partial_o, p.partial_lse, slots, count, p.num_qo_heads, p.head_dim_vo, head};
    float lse = kMinusInfinity;
    for (int d = 0; d < p.head_dim_vo; d += kBlock) {
      const int n = std::min(kBlock, p.head_dim_vo - d);
      lse = p.batch_invariant ? fold_block(states, d, n, o) : sum_block(states, d, n, o);
      if (p.sinks != nullptr) fold_sink(o, lse, p.sinks[head], n);
      write_block(p, row, head, d, n, o);
    }
    if (p.lse.data != nullptr) {
      p.lse.data[row * p.lse.row_stride + head * p.lse.head_stride] = p.lse.base == LseBase::two ? lse : lse * kLn2;
    }
  }
}

void attend(const AttendParams& p, const detail::WorkItem& item, Scratch scratch) noexcept {
  scalar::UnobservedReads reads;
  scalar::attend(p, item, scratch, reads);
}

std::size_t scratch_bytes(const AttendParams& p, int max_rows) noexcept {
  return scalar::scratch_floats(p, max_rows) * sizeof(float);
}

void convert(const void* from, DType from_type, void* to, DType to_type, int n) noexcept {
  with_type(from_type, [&](auto from_tag) {
    with_type(to_type, [&](auto to_tag) {
      convert_row(static_cast<const decltype(from_tag)*>(from), static_cast<decltype(to_tag)*>(to), n);
    });
  });
}

void add_weighted(const void* from, DType type, float weight, float* sum, int n) noexcept {
  with_type(type, [&](auto tag) {
    const auto* x = static_cast<const decltype(tag)*>(from);
    for (int i = 0; i < n; ++i) sum[i] += weight * to_f32(x[i]);
  });
}

}  // namespace

const Kernels kScalarKernels = {Isa::scalar, attend, scratch_bytes, merge_row, convert, add_weighted};

}  // namespace headwater::cpu
