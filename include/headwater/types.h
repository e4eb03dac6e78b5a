// Element types, instruction sets and other small enumerations of the public interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace headwater {

/// Element type of a tensor in memory.
enum class DType : std::uint8_t {
  f32,     ///< IEEE binary32
  f16,     ///< IEEE binary16
  bf16,    ///< bfloat16
  f8e4m3,  ///< 8-bit float, 4 exponent and 3 mantissa bits, no infinity (OCP E4M3FN); KV cache only
};

/// Bytes of one element.
[[nodiscard]] constexpr std::size_t size_of(DType t) noexcept {
  switch (t) {
    case DType::f32:
      return 4;
    case DType::f16:
      return 2;
    case DType::bf16:
      return 2;
    case DType::f8e4m3:
      return 1;
  }
  return 0;
}

/// "f32", "f16", "bf16", "f8e4m3".
[[nodiscard]] std::string_view name_of(DType t) noexcept;

/// Instruction-set level of the CPU back end, lowest first. A level implies all lower ones.
enum class Isa : std::uint8_t {
  scalar,       ///< portable C++
  avx2,         ///< AVX2, FMA, F16C
  avx512,       ///< AVX-512 F, BW, DQ, VL
  avx512_bf16,  ///< AVX-512 with bf16 dot products
};

/// "scalar", "avx2", "avx512", "avx512_bf16".
[[nodiscard]] std::string_view name_of(Isa isa) noexcept;

/// Base of the logarithm of a log-sum-exp (LSE).
enum class LseBase : std::uint8_t {
  two,      ///< log2(sum exp2(.)): the default, FlashInfer's convention
  natural,  ///< ln(sum exp(.)): vLLM's and FlashAttention's convention
};

/// How a step was, or is planned to be, executed.
enum class Path : std::uint8_t {
  flat,     ///< every request reads its own KV range
  cascade,  ///< at least one span is read once for two or more requests
};

/// "flat", "cascade".
[[nodiscard]] std::string_view name_of(Path path) noexcept;

}  // namespace headwater
