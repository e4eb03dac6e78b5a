// Choice of the table, and the rotation angles.
#include "engine/ops.h"

#include <cmath>
#include <string>

#include "headwater/cpu.h"
#include "headwater/error.h"

namespace headwater::engine {

RopeTable::RopeTable(int dim, double base, std::span<const float> factors) : dim_(dim) {
  const auto half = static_cast<std::size_t>(dim / 2);
  if (dim <= 0 || dim % 2 != 0) {
    throw Error(ErrorCode::invalid_argument, "dim = " + std::to_string(dim) + ", expected an even number above 0");
  }
  if (!factors.empty() && factors.size() != half) {
    throw Error(ErrorCode::invalid_argument,
                "factors.size() = " + std::to_string(factors.size()) + ", expected " + std::to_string(half));
  }
  frequencies_.resize(half);
  for (std::size_t i = 0; i < half; ++i) {
    frequencies_[i] = std::pow(base, -2.0 * static_cast<double>(i) / dim) / (factors.empty() ? 1.0 : factors[i]);
  }
}

void RopeTable::extend(int num_positions) {
  if (num_positions <= num_positions_) return;
  values_.resize(static_cast<std::size_t>(num_positions) * static_cast<std::size_t>(dim_));
  for (int position = num_positions_; position < num_positions; ++position) {
    float* out = values_.data() + static_cast<std::size_t>(position) * static_cast<std::size_t>(dim_);
    for (const double frequency : frequencies_) {
      const double angle = position * frequency;
      *out++ = static_cast<float>(std::cos(angle));
      *out++ = static_cast<float>(std::sin(angle));
    }
  }
  num_positions_ = num_positions;
}

std::vector<const Ops*> available_ops() {
  std::vector<const Ops*> tables{&kGenericOps};
#ifdef HEADWATER_ENGINE_X86
  const Isa isa = cpu::detect_isa();
  if (isa >= Isa::avx2) tables.push_back(&kAvx2Ops);
  if (isa >= Isa::avx512) tables.push_back(&kAvx512Ops);
#endif
  return tables;
}

const Ops& best_ops() {
  return *available_ops().back();
}

}  // namespace headwater::engine
