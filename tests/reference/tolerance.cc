// See tolerance.h.
#include "reference/tolerance.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <sstream>

#include "reference/element.h"

namespace headwater::reference {
namespace {

constexpr double kClassF32 = 2e-5;
constexpr double kClassF16 = 5e-3;
constexpr double kClassBf16 = 2e-2;
constexpr double kLseF32 = 2e-5;
constexpr double kLse16 = 1e-3;

/// 0: fp32, 1: fp16, 2: bf16.
int coarseness(DType type) {
  return type == DType::bf16 ? 2 : type == DType::f16 ? 1 : 0;
}

bool same_kind(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  if (std::isinf(a) || std::isinf(b)) return a == b;
  return true;
}

std::string place(std::size_t index, int heads, int dim) {
  std::ostringstream text;
  const auto h = static_cast<std::size_t>(heads);
  const auto d = static_cast<std::size_t>(dim);
  text << "[row " << index / (h * d) << ", head " << index / d % h;
  if (dim > 1) text << ", d " << index % d;
  text << "]";
  return text.str();
}

struct Worst {
  double error = 0.0;
  std::size_t at = 0;
  void add(double e, std::size_t i) {
    if (e > error) {
      error = e;
      at = i;
    }
  }
};

}  // namespace

Tolerance tolerance_of(const AttentionShape& shape) {
  const bool narrow_kv = shape.kv_dtype == DType::f16 || shape.kv_dtype == DType::bf16;
  if (shape.q_dtype == DType::f32 && shape.out_dtype == DType::f32) {
    if (narrow_kv) return {kClassF16, kLse16, shape.kv_dtype};
    return {kClassF32, kLseF32, DType::f32};
  }
  DType coarsest = shape.q_dtype;
  if (coarseness(shape.out_dtype) > coarseness(coarsest)) coarsest = shape.out_dtype;
  if (narrow_kv && coarseness(shape.kv_dtype) > coarseness(coarsest)) coarsest = shape.kv_dtype;
  return {coarsest == DType::bf16 ? kClassBf16 : kClassF16, kLse16, coarsest};
}

Difference compare(const AttentionShape& shape, const Result& expected, const Result* naive, ConstRowsView out,
                   ConstLseView lse) {
  const Tolerance tolerance = tolerance_of(shape);
  Difference found;
  std::ostringstream complaint;
  double largest = 0.0;
  double naive_error = 0.0;
  bool naive_usable = naive != nullptr;
  for (std::size_t i = 0; i < expected.o.size(); ++i) {
    largest = std::max(largest, std::fabs(expected.o[i]));
    if (naive == nullptr) continue;
    if (!std::isfinite(naive->o[i])) naive_usable = false;
    naive_error = std::max(naive_error, std::fabs(naive->o[i] - expected.o[i]));
  }
  const int heads = expected.num_heads;
  const int dim = expected.head_dim;

  Worst worst;
  for (std::size_t i = 0; i < expected.o.size(); ++i) {
    const auto d = static_cast<std::int64_t>(i) % dim;
    const auto h = static_cast<std::int64_t>(i) / dim % heads;
    const auto r = static_cast<std::int64_t>(i) / dim / heads;
    const double got = load(out.dtype, out.data, r * out.row_stride + h * out.head_stride + d);
    if (!same_kind(got, expected.o[i])) {
      complaint << "out" << place(i, heads, dim) << " = " << got << ", expected " << expected.o[i] << "; ";
      found.complaint = complaint.str();
      return found;
    }
    if (std::isfinite(got)) worst.add(std::fabs(got - expected.o[i]), i);
  }
  found.o_abs = worst.error;
  found.o_rel = largest > 0.0 ? worst.error / largest : worst.error;
  if (found.o_rel >= tolerance.o) {
    complaint << "out" << place(worst.at, heads, dim) << ": error / max |reference| = " << found.o_rel
              << " is not below " << tolerance.o << " (expected " << expected.o[worst.at] << "); ";
  }
  // Rounding: of the output once, and of each of the operands' products, a few units of the arithmetic.
  const double rounding = largest * (epsilon_of(out.dtype) + 16.0 * epsilon_of(DType::f32) +
                                     (tolerance.naive == DType::f32 ? 0.0 : epsilon_of(tolerance.naive)));
  if (naive_usable && worst.error > 2.0 * naive_error + rounding) {
    complaint << "out" << place(worst.at, heads, dim) << ": error " << worst.error << " is above twice the naive error "
              << naive_error << " + rounding " << rounding << "; ";
  }

  if (lse.data != nullptr) {
    const double unit = lse.base == LseBase::two ? std::numbers::log2e : 1.0;
    Worst worst_lse;
    for (std::size_t i = 0; i < expected.lse.size(); ++i) {
      const auto h = static_cast<std::int64_t>(i) % heads;
      const auto r = static_cast<std::int64_t>(i) / heads;
      const double got = lse.data[r * lse.row_stride + h * lse.head_stride];
      const double want = expected.lse[i] * unit;
      if (!same_kind(got, want)) {
        complaint << "lse" << place(i, heads, 1) << " = " << got << ", expected " << want << "; ";
        found.complaint = complaint.str();
        return found;
      }
      if (std::isfinite(got)) worst_lse.add(std::fabs(got - want) / std::max(1.0, std::fabs(want)), i);
    }
    found.lse = worst_lse.error;
    if (found.lse >= tolerance.lse) {
      complaint << "lse" << place(worst_lse.at, heads, 1) << ": error " << found.lse << " is not below "
                << tolerance.lse << " (expected " << expected.lse[worst_lse.at] * unit << "); ";
    }
  }
  found.complaint = complaint.str();
  return found;
}

}  // namespace headwater::reference
