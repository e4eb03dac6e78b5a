// Dequantisation against values that an independent implementation gave (tools/record_gguf_blocks.py), bit for bit.
#include "engine/dequant.h"

#include <gtest/gtest.h>

#include <bit>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine_io/expect.h"
#include "support/tiny_gguf.h"

namespace headwater::engine {
namespace {

std::vector<std::byte> bytes_from_hex(const std::string& hex) {
  std::vector<std::byte> out;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    out.push_back(static_cast<std::byte>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return out;
}

std::vector<std::uint32_t> words_from_hex(const std::string& hex) {
  std::vector<std::uint32_t> out;
  for (std::size_t i = 0; i < hex.size(); i += 8) {
    out.push_back(static_cast<std::uint32_t>(std::stoul(hex.substr(i, 8), nullptr, 16)));
  }
  return out;
}

std::vector<std::uint32_t> dequantized_bits(GgmlType type, std::span<const std::byte> data, std::size_t num_values) {
  std::vector<float> values(num_values, std::numeric_limits<float>::quiet_NaN());
  dequantize(type, data, values);
  std::vector<std::uint32_t> bits;
  for (const float value : values) bits.push_back(std::bit_cast<std::uint32_t>(value));
  return bits;
}

constexpr std::array kAllTypes{GgmlType::f32,  GgmlType::f16,  GgmlType::bf16, GgmlType::q8_0,
                               GgmlType::q4_1, GgmlType::q4_k, GgmlType::q6_k};

TEST(Dequant, BlocksAreThoseRecorded) {
  const auto data = nlohmann::json::parse(std::ifstream(HEADWATER_TEST_DATA "/gguf_blocks.json"));
  EXPECT_EQ(data["formats"].size(), kAllTypes.size());
  for (const GgmlType type : kAllTypes) {
    const auto& entries = data["formats"][std::string(name_of(type))];
    ASSERT_GE(entries.size(), 5U) << name_of(type);
    std::vector<std::byte> all_blocks;
    std::vector<std::uint32_t> all_bits;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const auto block = bytes_from_hex(entries[i]["block"]);
      const auto expected = words_from_hex(entries[i]["values"]);
      ASSERT_EQ(block.size(), block_bytes(type));
      ASSERT_EQ(expected.size(), block_values(type));
      EXPECT_EQ(dequantized_bits(type, block, expected.size()), expected) << name_of(type) << " block " << i;
      all_blocks.insert(all_blocks.end(), block.begin(), block.end());
      all_bits.insert(all_bits.end(), expected.begin(), expected.end());
    }
    EXPECT_EQ(dequantized_bits(type, all_blocks, all_bits.size()), all_bits) << name_of(type) << ", all blocks at once";
  }
}

// Negative control: every byte of a block has a say.
TEST(Dequant, EveryByteMatters) {
  const auto data = nlohmann::json::parse(std::ifstream(HEADWATER_TEST_DATA "/gguf_blocks.json"));
  for (const GgmlType type : kAllTypes) {
    auto block = bytes_from_hex(data["formats"][std::string(name_of(type))][0]["block"]);
    const auto before = dequantized_bits(type, block, block_values(type));
    for (std::size_t i = 0; i < block.size(); ++i) {
      block[i] ^= std::byte{0x11};
      EXPECT_NE(dequantized_bits(type, block, block_values(type)), before) << name_of(type) << " byte " << i;
      block[i] ^= std::byte{0x11};
    }
  }
}

TEST(Dequant, HalfNanStaysNan) {
  for (const std::uint16_t bits : {0x7C01, 0x7E00, 0xFFFF}) {
    float value = 0;
    dequantize(GgmlType::f16, std::as_bytes(std::span(&bits, 1)), std::span(&value, 1));
    EXPECT_NE(value, value);
  }
}

TEST(Dequant, UnalignedData) {
  const auto data = nlohmann::json::parse(std::ifstream(HEADWATER_TEST_DATA "/gguf_blocks.json"));
  for (const GgmlType type : kAllTypes) {
    const auto& entry = data["formats"][std::string(name_of(type))][1];
    auto block = bytes_from_hex(entry["block"]);
    block.insert(block.begin(), std::byte{0});
    EXPECT_EQ(dequantized_bits(type, std::span(block).subspan(1), block_values(type)), words_from_hex(entry["values"]));
  }
}

TEST(Dequant, RowsOfATensor) {
  std::vector<float> values(5 * 64);
  test::TinyRandom random(3);
  for (float& value : values) value = random.uniform();
  for (const GgmlType type : {GgmlType::f32, GgmlType::f16, GgmlType::bf16, GgmlType::q8_0, GgmlType::q4_1}) {
    test::GgufWriter file;
    file.tensor("w", type, {64, 5}, test::encode_tensor(type, values));
    const auto bytes = file.bytes();
    const Gguf gguf = Gguf::from_bytes(bytes);
    const GgufTensor& tensor = gguf.tensors()[0];
    std::vector<float> all(values.size());
    dequantize_rows(tensor, 0, 5, all);
    for (std::size_t i = 0; i < all.size(); ++i) ASSERT_NEAR(all[i], values[i], 0.08) << name_of(type) << " " << i;
    std::vector<float> two(2 * 64);
    dequantize_rows(tensor, 3, 2, two);
    EXPECT_TRUE(std::equal(two.begin(), two.end(), all.begin() + 3 * 64)) << name_of(type);
    dequantize_rows(tensor, 5, 0, {});
  }
}

TEST(Dequant, Refusals) {
  std::vector<std::byte> data(34);
  std::vector<float> out(32);
  test::expect_error(ErrorCode::invalid_argument, "out.size() = 31, expected a multiple of 32 for Q8_0",
                     [&] { dequantize(GgmlType::q8_0, data, std::span(out).first(31)); });
  test::expect_error(ErrorCode::invalid_argument, "data.size() = 33, expected 34 for 32 values of Q8_0",
                     [&] { dequantize(GgmlType::q8_0, std::span(data).first(33), out); });
  test::GgufWriter file;
  file.tensor("w", GgmlType::q8_0, {32, 1}, data);
  const auto bytes = file.bytes();
  const Gguf gguf = Gguf::from_bytes(bytes);
  test::expect_error(ErrorCode::invalid_argument, "rows 1..2 of tensor 'w', expected within 0..1",
                     [&] { dequantize_rows(gguf.tensors()[0], 1, 1, out); });
  test::expect_error(ErrorCode::invalid_argument, "out.size() = 16, expected 1 rows of 32 values",
                     [&] { dequantize_rows(gguf.tensors()[0], 0, 1, std::span(out).first(16)); });
}

}  // namespace
}  // namespace headwater::engine
