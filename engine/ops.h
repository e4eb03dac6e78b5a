// The small operations between products: RMS norm, rotary position, SwiGLU, conversion. One table of functions per
// instruction set, all compiled from ops_kernels.h (plain loops that the compiler vectorises), chosen once at run time.
// A row's result depends on that row alone. Activations are fp32; what feeds a product is written in the product's
// type.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "headwater/types.h"

namespace headwater::engine {

/// Where a row for a product goes: fp32 or bf16.
struct ProductInput {
  void* data = nullptr;
  DType type = DType::f32;
};

/// Rotation angles of positions: cos and sin of position * base^(-2i / dim) / factor_i.
class RopeTable {
 public:
  RopeTable() = default;
  /// dim even; `factors` (dim / 2 of them, or empty) divide the frequencies.
  RopeTable(int dim, double base, std::span<const float> factors);
  /// Makes rows for positions [0, num_positions); never shrinks.
  void extend(int num_positions);
  /// [dim / 2] pairs (cos, sin).
  [[nodiscard]] const float* at(int position) const noexcept {
    return values_.data() + static_cast<std::size_t>(position) * static_cast<std::size_t>(dim_);
  }

 private:
  int dim_ = 0;
  int num_positions_ = 0;
  std::vector<double> frequencies_;
  std::vector<float> values_;
};

struct Ops {
  std::string_view name;
  /// out = x / sqrt(mean(x^2) + eps) * weight, n values.
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, ProductInput out) noexcept;
  /// Rotates the first `dim` values of each of num_heads heads by interleaved pairs (x0, x1), (x2, x3), ...
  void (*rope)(float* x, int num_heads, int head_dim, const float* table, int dim) noexcept;
  /// out = gate / (1 + exp(-gate)) * up, n values.
  void (*swiglu)(const float* gate, const float* up, int n, ProductInput out) noexcept;
  /// out = x, rounded to nearest even.
  void (*convert)(const float* x, int n, ProductInput out) noexcept;
};

/// The best table for this processor.
[[nodiscard]] const Ops& best_ops();
/// All tables that this processor can run, "generic" first: for tests.
[[nodiscard]] std::vector<const Ops*> available_ops();

extern const Ops kGenericOps;
extern const Ops kAvx2Ops;
extern const Ops kAvx512Ops;

}  // namespace headwater::engine
