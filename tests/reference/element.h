// Element types as the tests understand them: decoding and encoding written from the formats' definitions alone, so
// that a conversion error of the library cannot hide in the reference.
#pragma once

#include <cstdint>

#include "headwater/types.h"

namespace headwater::reference {

/// Element `index` of an array of `type` at `base` (any alignment).
double load(DType type, const void* base, std::int64_t index);

/// Rounds to nearest even and stores; f8e4m3 saturates to +-448, the others overflow to infinity. NaN stays NaN.
void store(DType type, void* base, std::int64_t index, double value);

/// The value after a round trip through `type`.
double round_to(DType type, double value);

/// Distance from 1.0 to the next larger value.
double epsilon_of(DType type);

/// Every byte of a poisoned buffer has this value: it makes a NaN in all four types.
inline constexpr unsigned char kPoisonByte = 0xFF;

}  // namespace headwater::reference
