#include "engine/dequant.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>

#include "headwater/error.h"

namespace headwater::engine {
namespace {

float from_bits(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}

/// Two bytes, little-endian, unaligned.
std::uint32_t load16(const std::uint8_t* from) {
  return static_cast<std::uint32_t>(from[0] | from[1] << 8);
}

/// IEEE binary16: shifts exponent and mantissa to their places and lets one multiplication by 2^112 fix the exponent's
/// bias; this also turns subnormals into normals. Infinities and NaNs need their exponent set.
float from_half(std::uint32_t half) {
  const std::uint32_t sign = (half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7FFFU;
  const float scaled = from_bits(magnitude << 13) * from_bits(0x77800000U);
  const std::uint32_t special = magnitude >= 0x7C00U ? 0x7F800000U : 0U;
  return from_bits(sign | std::bit_cast<std::uint32_t>(scaled) | special);
}

float load_half(const std::uint8_t* from) {
  return from_half(load16(from));
}

// Every function below unpacks one block. Multiplications keep the order of the format's reference (scale times
// sub-scale first), so that results are equal bit for bit.

/// Value: float.
void unpack_f32(const std::uint8_t* block, float* out) {
  std::memcpy(out, block, sizeof(float));
}

void unpack_f16(const std::uint8_t* block, float* out) {
  *out = load_half(block);
}

void unpack_bf16(const std::uint8_t* block, float* out) {
  *out = from_bits(load16(block) << 16);
}

/// 32 values: half scale, 32 signed bytes.
void unpack_q8_0(const std::uint8_t* block, float* out) {
  const float scale = load_half(block);
  const std::uint8_t* q = block + 2;
  for (int i = 0; i < 32; ++i) out[i] = scale * static_cast<float>(static_cast<std::int8_t>(q[i]));
}

/// 32 values: half scale, half minimum, 16 bytes; low nibbles are values 0..15, high nibbles 16..31.
void unpack_q4_1(const std::uint8_t* block, float* out) {
  const float scale = load_half(block);
  const float minimum = load_half(block + 2);
  const std::uint8_t* q = block + 4;
  for (int i = 0; i < 16; ++i) out[i] = scale * static_cast<float>(q[i] & 15) + minimum;
  for (int i = 0; i < 16; ++i) out[16 + i] = scale * static_cast<float>(q[i] >> 4) + minimum;
}

/// 256 values in 8 groups of 32: half scale, half scale of the minima, 12 bytes that pack eight 6-bit scales and eight
/// 6-bit minima, 128 bytes. Each 32 bytes hold two groups, in low and high nibbles.
void unpack_q4_k(const std::uint8_t* block, float* out) {
  const float scale = load_half(block);
  const float scale_min = load_half(block + 2);
  const std::uint8_t* packed = block + 4;
  const std::uint8_t* q = block + 16;
  for (std::size_t group = 0; group < 8; ++group, out += 32) {
    int group_scale = 0;
    int group_min = 0;
    if (group < 4) {
      group_scale = packed[group] & 63;
      group_min = packed[group + 4] & 63;
    } else {  // low four bits in bytes 8..11, high two bits on top of the first groups' bytes
      group_scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4;
      group_min = packed[group + 4] >> 4 | (packed[group] >> 6) << 4;
    }
    const float d = scale * static_cast<float>(group_scale);
    const float m = scale_min * static_cast<float>(group_min);
    const std::uint8_t* bytes = q + group / 2 * 32;
    const auto shift = static_cast<int>(group % 2 * 4);
    for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(bytes[i] >> shift & 15) - m;
  }
}

/// 256 values in 16 groups of 16: 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales, half scale.
/// Each half (128 values) has four runs of 32: nibbles low, low + 32 bytes, high, high + 32 bytes.
void unpack_q6_k(const std::uint8_t* block, float* out) {
  const float scale = load_half(block + 208);
  for (std::size_t half = 0; half < 2; ++half) {
    const std::uint8_t* low = block + half * 64;
    const std::uint8_t* high = block + 128 + half * 32;
    const std::uint8_t* scales = block + 192 + half * 8;
    for (std::size_t run = 0; run < 4; ++run, out += 32) {
      const std::uint8_t* nibbles = low + run % 2 * 32;
      const auto low_shift = static_cast<int>(run / 2 * 4);
      const auto high_shift = static_cast<int>(run * 2);
      for (std::size_t part = 0; part < 2; ++part) {
        const float d = scale * static_cast<float>(static_cast<std::int8_t>(scales[run * 2 + part]));
        for (std::size_t i = part * 16; i < part * 16 + 16; ++i) {
          const int q = (nibbles[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4;
          out[i] = d * static_cast<float>(q - 32);
        }
      }
    }
  }
}

template <std::size_t Values, std::size_t Bytes>
void unpack_all(void (*unpack)(const std::uint8_t*, float*), const std::uint8_t* from, std::span<float> out) {
  for (std::size_t at = 0; at < out.size(); at += Values, from += Bytes) unpack(from, out.data() + at);
}

}  // namespace

std::size_t block_values(GgmlType type) noexcept {
  switch (type) {
    case GgmlType::f32:
    case GgmlType::f16:
    case GgmlType::bf16:
      return 1;
    case GgmlType::q4_1:
    case GgmlType::q8_0:
      return 32;
    case GgmlType::q4_k:
    case GgmlType::q6_k:
      return 256;
  }
  return 1;
}

std::size_t block_bytes(GgmlType type) noexcept {
  switch (type) {
    case GgmlType::f32:
      return 4;
    case GgmlType::f16:
    case GgmlType::bf16:
      return 2;
    case GgmlType::q4_1:
      return 20;
    case GgmlType::q8_0:
      return 34;
    case GgmlType::q4_k:
      return 144;
    case GgmlType::q6_k:
      return 210;
  }
  return 1;
}

void dequantize(GgmlType type, std::span<const std::byte> data, std::span<float> out) {
  if (out.size() % block_values(type) != 0) {
    throw Error(ErrorCode::invalid_argument, fmt::format("out.size() = {}, expected a multiple of {} for {}",
                                                         out.size(), block_values(type), name_of(type)));
  }
  const std::size_t expected = out.size() / block_values(type) * block_bytes(type);
  if (data.size() != expected) {
    throw Error(ErrorCode::invalid_argument, fmt::format("data.size() = {}, expected {} for {} values of {}",
                                                         data.size(), expected, out.size(), name_of(type)));
  }
  const auto* from = reinterpret_cast<const std::uint8_t*>(data.data());
  switch (type) {
    case GgmlType::f32:
      return unpack_all<1, 4>(unpack_f32, from, out);
    case GgmlType::f16:
      return unpack_all<1, 2>(unpack_f16, from, out);
    case GgmlType::bf16:
      return unpack_all<1, 2>(unpack_bf16, from, out);
    case GgmlType::q4_1:
      return unpack_all<32, 20>(unpack_q4_1, from, out);
    case GgmlType::q8_0:
      return unpack_all<32, 34>(unpack_q8_0, from, out);
    case GgmlType::q4_k:
      return unpack_all<256, 144>(unpack_q4_k, from, out);
    case GgmlType::q6_k:
      return unpack_all<256, 210>(unpack_q6_k, from, out);
  }
}

void dequantize_rows(const GgufTensor& tensor, std::uint64_t row_begin, std::uint64_t num_rows, std::span<float> out) {
  const std::uint64_t columns = tensor.shape[0];
  const std::uint64_t rows = tensor.num_elements / columns;
  if (row_begin > rows || num_rows > rows - row_begin) {
    throw Error(ErrorCode::invalid_argument, fmt::format("rows {}..{} of tensor '{}', expected within 0..{}", row_begin,
                                                         row_begin + num_rows, tensor.name, rows));
  }
  if (out.size() != num_rows * columns) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("out.size() = {}, expected {} rows of {} values", out.size(), num_rows, columns));
  }
  const std::size_t row_bytes = columns / block_values(tensor.type) * block_bytes(tensor.type);
  dequantize(tensor.type, tensor.data.subspan(row_begin * row_bytes, num_rows * row_bytes), out);
}

}  // namespace headwater::engine
