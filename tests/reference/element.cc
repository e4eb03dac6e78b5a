// Small floating-point formats by arithmetic on doubles: sign, exponent field, mantissa field; subnormals below the
// smallest normal exponent. One description serves f16, bf16 and f8e4m3.
#include "reference/element.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace headwater::reference {
namespace {

struct Format {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;
  [[nodiscard]] int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  [[nodiscard]] std::uint32_t exponent_mask() const { return (1U << exponent_bits) - 1U; }
  [[nodiscard]] std::uint32_t mantissa_mask() const { return (1U << mantissa_bits) - 1U; }
};

constexpr Format kF16{5, 10, true};
constexpr Format kBf16{8, 7, true};
constexpr Format kF8e4m3{4, 3, false};

double decode(const Format& f, std::uint32_t bits) {
  const bool negative = ((bits >> (f.exponent_bits + f.mantissa_bits)) & 1U) != 0U;
  const std::uint32_t exponent = (bits >> f.mantissa_bits) & f.exponent_mask();
  const std::uint32_t mantissa = bits & f.mantissa_mask();
  double value = 0.0;
  if (exponent == f.exponent_mask() && f.has_infinity) {
    value = mantissa == 0U ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == f.exponent_mask() && mantissa == f.mantissa_mask()) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0U) {
    value = std::ldexp(static_cast<double>(mantissa), 1 - f.bias() - f.mantissa_bits);
  } else {
    value = std::ldexp(static_cast<double>(mantissa + (1U << f.mantissa_bits)),
                       static_cast<int>(exponent) - f.bias() - f.mantissa_bits);
  }
  return negative ? -value : value;
}

std::uint32_t encode(const Format& f, double value) {
  const std::uint32_t sign = std::signbit(value) ? 1U << (f.exponent_bits + f.mantissa_bits) : 0U;
  const std::uint32_t infinity = f.exponent_mask() << f.mantissa_bits;
  if (std::isnan(value)) return sign | infinity | f.mantissa_mask();
  const double magnitude = std::fabs(value);
  if (magnitude == 0.0) return sign;
  // The largest finite value ends in a full mantissa field, but for f8e4m3, where that pattern is the NaN.
  const std::uint32_t largest = f.has_infinity ? infinity - 1U : infinity + f.mantissa_mask() - 1U;
  if (std::isinf(value)) return sign | (f.has_infinity ? infinity : largest);
  int exponent = 0;
  (void)std::frexp(magnitude, &exponent);                                            // magnitude in [2^(e-1), 2^e)
  int unit = exponent - 1 - f.mantissa_bits;                                         // weight of the last kept bit
  if (unit < 1 - f.bias() - f.mantissa_bits) unit = 1 - f.bias() - f.mantissa_bits;  // subnormal
  // nearbyint rounds to nearest even in the default mode. Counting in units of the last bit, a subnormal's count is its
  // field and a normal's is 2^mantissa_bits + mantissa; a carry into the exponent comes out right by itself.
  const auto count = static_cast<std::uint64_t>(std::nearbyint(std::ldexp(magnitude, -unit)));
  const auto steps = static_cast<std::uint64_t>(unit - (1 - f.bias() - f.mantissa_bits));
  const std::uint64_t field = (steps << f.mantissa_bits) + count;
  if (field > largest) return sign | (f.has_infinity ? infinity : largest);
  return sign | static_cast<std::uint32_t>(field);
}

const Format& format_of(DType type) {
  switch (type) {
    case DType::f16:
      return kF16;
    case DType::f8e4m3:
      return kF8e4m3;
    default:
      return kBf16;
  }
}

}  // namespace

double load(DType type, const void* base, std::int64_t index) {
  const auto* bytes = static_cast<const unsigned char*>(base) + index * static_cast<std::int64_t>(size_of(type));
  if (type == DType::f32) {
    float value = 0.0F;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }
  if (type == DType::f8e4m3) return decode(kF8e4m3, *bytes);
  std::uint16_t bits = 0;
  std::memcpy(&bits, bytes, sizeof bits);
  return decode(format_of(type), bits);
}

void store(DType type, void* base, std::int64_t index, double value) {
  auto* bytes = static_cast<unsigned char*>(base) + index * static_cast<std::int64_t>(size_of(type));
  if (type == DType::f32) {
    const auto narrow = static_cast<float>(value);
    std::memcpy(bytes, &narrow, sizeof narrow);
  } else if (type == DType::f8e4m3) {
    *bytes = static_cast<unsigned char>(encode(kF8e4m3, value));
  } else {
    const auto bits = static_cast<std::uint16_t>(encode(format_of(type), value));
    std::memcpy(bytes, &bits, sizeof bits);
  }
}

double round_to(DType type, double value) {
  unsigned char bytes[4];
  store(type, bytes, 0, value);
  return load(type, bytes, 0);
}

double epsilon_of(DType type) {
  if (type == DType::f32) return std::ldexp(1.0, -23);
  return std::ldexp(1.0, -format_of(type).mantissa_bits);
}

}  // namespace headwater::reference
