// The GGUF reader on files made in memory: what is well formed is read back, and each way of being malformed is refused
// by name.
#include "engine/gguf.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "engine_io/expect.h"
#include "support/tiny_gguf.h"

namespace headwater::engine {
namespace {

using test::ByteWriter;
using test::GgufWriter;
using Bytes = std::vector<std::byte>;

void expect_refused(const Bytes& bytes, std::string_view part) {
  test::expect_error(ErrorCode::io, part, [&] { (void)Gguf::from_bytes(bytes, "bad.gguf"); });
  // Every message names the file first.
  test::expect_error(ErrorCode::io, "bad.gguf: ", [&] { (void)Gguf::from_bytes(bytes, "bad.gguf"); });
}

GgufWriter sample() {
  GgufWriter file;
  file.u32("general.alignment", 32).string("name", "x");
  file.tensor("a", GgmlType::f32, {2, 3}, Bytes(24, std::byte{1}))
      .tensor("b", GgmlType::q8_0, {32}, Bytes(34, std::byte{2}));
  return file;
}

/// An array's value: type of the elements, count, and what follows.
ByteWriter array_value(GgufType type, std::uint64_t count) {
  ByteWriter out;
  out.number(static_cast<std::uint32_t>(type)).number(count);
  return out;
}

TEST(Gguf, ValuesOfAllTypes) {
  GgufWriter file;
  file.number<std::uint8_t>("u8", GgufType::u8, 255).number<std::int8_t>("i8", GgufType::i8, -128);
  file.number<std::uint16_t>("u16", GgufType::u16, 65535).number<std::int16_t>("i16", GgufType::i16, -32768);
  file.number<std::uint32_t>("u32", GgufType::u32, 4294967295U).number<std::int32_t>("i32", GgufType::i32, -5);
  file.number<std::uint64_t>("u64", GgufType::u64, ~0ULL).number<std::int64_t>("i64", GgufType::i64, 7);
  file.f32("f32", 1.5F).number<double>("f64", GgufType::f64, 0.1).boolean("yes", true).boolean("no", false);
  file.string("text", "h\xC3\xA9llo").string("empty", "");
  file.strings("names", std::vector<std::string>{"a", "", "bc"});
  file.numbers<std::int16_t>("numbers", GgufType::i16, {-3, 0, 9});
  file.numbers<std::uint64_t>("large", GgufType::u64, {1, 1ULL << 31});
  ByteWriter nested = array_value(GgufType::array, 2);
  nested.number(static_cast<std::uint32_t>(GgufType::u8))
      .number<std::uint64_t>(2)
      .number<std::uint8_t>(1)
      .number<std::uint8_t>(2);
  nested.number(static_cast<std::uint32_t>(GgufType::string)).number<std::uint64_t>(1).string("deep");
  file.value_bytes("nested", GgufType::array, nested);
  const Bytes bytes = file.bytes();
  const Gguf gguf = Gguf::from_bytes(bytes);

  EXPECT_EQ(gguf.keys().size(), 18U);
  EXPECT_EQ(gguf.keys()[0], "u8");
  EXPECT_EQ(gguf.unsigned_integer("u8"), 255U);
  EXPECT_EQ(std::get<std::int8_t>(*gguf.find("i8")), -128);
  EXPECT_EQ(gguf.unsigned_integer("u16"), 65535U);
  EXPECT_EQ(std::get<std::int16_t>(*gguf.find("i16")), -32768);
  EXPECT_EQ(gguf.unsigned_integer("u32"), 4294967295U);
  EXPECT_EQ(std::get<std::int32_t>(*gguf.find("i32")), -5);
  EXPECT_EQ(gguf.unsigned_integer("u64"), ~0ULL);
  EXPECT_EQ(gguf.unsigned_integer("i64"), 7U);
  EXPECT_EQ(gguf.real("f32"), 1.5);
  EXPECT_EQ(gguf.real("f64"), 0.1);
  EXPECT_TRUE(gguf.boolean("yes"));
  EXPECT_FALSE(gguf.boolean("no"));
  EXPECT_EQ(gguf.string("text"), "h\xC3\xA9llo");
  EXPECT_EQ(gguf.string("empty"), "");
  EXPECT_EQ(std::vector<std::string>(gguf.strings("names").begin(), gguf.strings("names").end()),
            (std::vector<std::string>{"a", "", "bc"}));
  EXPECT_EQ(gguf.integers("numbers"), (std::vector<std::int32_t>{-3, 0, 9}));
  const auto& outer = std::get<GgufArray>(*gguf.find("nested"));
  ASSERT_EQ(outer.arrays.size(), 2U);
  EXPECT_EQ(outer.arrays[0].bytes.size(), 2U);
  EXPECT_EQ(outer.arrays[1].strings.at(0), "deep");

  EXPECT_EQ(gguf.find("other"), nullptr);
  EXPECT_EQ(gguf.unsigned_integer("other", 3), 3U);
  EXPECT_EQ(gguf.real("other", 2.5), 2.5);
  EXPECT_EQ(gguf.string("other", "x"), "x");
  EXPECT_TRUE(gguf.boolean("other", true));

  const auto refused = [](std::string_view part, const auto& call) { test::expect_error(ErrorCode::io, part, call); };
  refused("memory: key 'other' is missing, expected an integer", [&] { (void)gguf.unsigned_integer("other"); });
  refused("key 'text' has type string, expected an integer", [&] { (void)gguf.unsigned_integer("text"); });
  refused("key 'text' has type string, expected an integer", [&] { (void)gguf.unsigned_integer("text", 3); });
  refused("key 'yes' has type boolean, expected an integer", [&] { (void)gguf.unsigned_integer("yes"); });
  refused("key 'i32' = -5, expected 0 or more", [&] { (void)gguf.unsigned_integer("i32"); });
  refused("key 'u8' has type u8, expected f32 or f64", [&] { (void)gguf.real("u8"); });
  refused("key 'u8' has type u8, expected boolean", [&] { (void)gguf.boolean("u8"); });
  refused("key 'names' has type array, expected string", [&] { (void)gguf.string("names"); });
  refused("key 'other' is missing, expected an array of strings", [&] { (void)gguf.strings("other"); });
  refused("key 'numbers' is an array of i16, expected an array of strings", [&] { (void)gguf.strings("numbers"); });
  refused("key 'text' has type string, expected an array of strings", [&] { (void)gguf.strings("text"); });
  refused("key 'names' is an array of string, expected an array of integers", [&] { (void)gguf.integers("names"); });
  refused("key 'other' is missing, expected an array of integers", [&] { (void)gguf.integers("other"); });
  refused("key 'large' has [1] = 2147483648, expected a value that fits in 32 bits",
          [&] { (void)gguf.integers("large"); });
}

TEST(Gguf, Tensors) {
  const Bytes bytes = sample().bytes();
  const Gguf gguf = Gguf::from_bytes(bytes);
  ASSERT_EQ(gguf.tensors().size(), 2U);
  const GgufTensor& a = gguf.tensors()[0];
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.num_dims, 2);
  EXPECT_EQ(a.shape, (std::array<std::uint64_t, 4>{2, 3, 1, 1}));
  EXPECT_EQ(a.num_elements, 6U);
  EXPECT_EQ(a.data.size(), 24U);
  EXPECT_EQ(a.data[0], std::byte{1});
  EXPECT_EQ(gguf.find_tensor("b")->data.size(), 34U);
  EXPECT_EQ(gguf.find_tensor("b")->data[33], std::byte{2});
  EXPECT_EQ(gguf.find_tensor("c"), nullptr);
  EXPECT_EQ(&gguf.tensor("a", std::vector<std::uint64_t>{2, 3}), &a);
  test::expect_error(ErrorCode::io, "memory: tensor 'a' has shape [2, 3], expected [3, 2]", [&] {
    (void)gguf.tensor("a", std::vector<std::uint64_t>{3, 2});
  });
  test::expect_error(ErrorCode::io, "memory: tensor 'c' is missing, expected shape [4]",
                     [&] { (void)gguf.tensor("c", std::vector<std::uint64_t>{4}); });
}

TEST(Gguf, OtherAlignment) {
  for (const std::size_t alignment : {8, 64, 4096}) {
    GgufWriter file;
    file.alignment = alignment;
    file.u32("general.alignment", static_cast<std::uint32_t>(alignment));
    file.tensor("a", GgmlType::f16, {1}, Bytes(2, std::byte{1}))
        .tensor("b", GgmlType::f16, {1}, Bytes(2, std::byte{2}));
    const Bytes bytes = file.bytes();
    const Gguf gguf = Gguf::from_bytes(bytes);
    EXPECT_EQ(gguf.find_tensor("b")->data[0], std::byte{2});
  }
}

TEST(Gguf, EmptyButWellFormed) {
  const Bytes bytes = GgufWriter().bytes();
  const Gguf gguf = Gguf::from_bytes(bytes);
  EXPECT_TRUE(gguf.keys().empty());
  EXPECT_TRUE(gguf.tensors().empty());
}

class GgufFile : public testing::Test {
 protected:
  std::string path_ = testing::TempDir() + "headwater_" + std::to_string(::getpid()) + "_" +
                      testing::UnitTest::GetInstance()->current_test_info()->name() + ".gguf";
  ~GgufFile() override { std::filesystem::remove(path_); }
};

TEST_F(GgufFile, MappedAndMoved) {
  sample().write(path_);
  Gguf first = Gguf::open(path_);
  EXPECT_EQ(first.name(), path_);
  const std::byte* data = first.find_tensor("b")->data.data();
  Gguf second = std::move(first);
  EXPECT_EQ(second.find_tensor("b")->data.data(), data);
  second.drop_resident();
  EXPECT_EQ(*data, std::byte{2});
  const Bytes other = GgufWriter().bytes();
  Gguf third = Gguf::from_bytes(other);
  third = std::move(second);
  EXPECT_EQ(*third.find_tensor("b")->data.data(), std::byte{2});
  EXPECT_EQ(third.string("name"), "x");
}

TEST_F(GgufFile, CannotBeOpened) {
  test::expect_error(ErrorCode::io, path_ + ": cannot open: No such file or directory",
                     [&] { (void)Gguf::open(path_); });
  test::expect_error(ErrorCode::io, "is not a regular file, expected a GGUF file",
                     [&] { (void)Gguf::open(testing::TempDir()); });
  std::fclose(std::fopen(path_.c_str(), "w"));
  test::expect_error(ErrorCode::io, path_ + ": magic at byte 0 needs 4 bytes, but the file has 0 left",
                     [&] { (void)Gguf::open(path_); });
}

TEST(GgufMalformed, Header) {
  GgufWriter file = sample();
  file.magic =
      "GG\x01"
      "F";
  expect_refused(file.bytes(), "magic at byte 0 is 'GG\\x01F', expected 'GGUF'");
  file = sample();
  file.version = 2;
  expect_refused(file.bytes(), "version at byte 4 is 2, expected 3");
  file.version = 3U << 24;
  expect_refused(file.bytes(), "version at byte 4 is 50331648, expected 3 (this is a big-endian file)");
}

TEST(GgufMalformed, HugeCounts) {
  for (const std::uint64_t count : {1ULL << 20, 1ULL << 40, ~0ULL}) {
    GgufWriter file = sample();
    file.num_tensors = count;
    expect_refused(file.bytes(), "tensor_count = " + std::to_string(count) + " before byte 24, expected at most ");
    file = sample();
    file.num_keys = count;
    expect_refused(file.bytes(), "key_count = " + std::to_string(count) + " before byte 24, expected at most ");
  }
  for (const std::uint64_t count : {1ULL << 20, 1ULL << 61, ~0ULL}) {
    for (const GgufType type : {GgufType::u8, GgufType::f64, GgufType::string, GgufType::array}) {
      GgufWriter file;
      file.value_bytes("k", GgufType::array, array_value(type, count));
      expect_refused(file.bytes(), "length of key 'k' = " + std::to_string(count) + " before byte ");
    }
    GgufWriter file;
    file.value_bytes("k", GgufType::string, ByteWriter().number(count));
    expect_refused(file.bytes(),
                   "key 'k' at byte 45 needs " + std::to_string(count) + " bytes, but the file has 0 left");
  }
}

TEST(GgufMalformed, Keys) {
  GgufWriter file;
  file.u32("twice", 1).u32("twice", 2);
  expect_refused(file.bytes(), "key[1] is 'twice', which an earlier key has already");
  file = GgufWriter();
  file.u32("", 1);
  expect_refused(file.bytes(), "key[0] at byte 24 has 0 bytes, expected 1..65535");
  file = GgufWriter();
  file.u32(std::string(70000, 'k'), 1);
  expect_refused(file.bytes(), "key[0] at byte 24 has 70000 bytes, expected 1..65535");
  file = GgufWriter();
  file.number<std::uint32_t>("k", static_cast<GgufType>(13), 0);
  expect_refused(file.bytes(), "type of key 'k' at byte 33 is 13, expected 0..12");
  file = GgufWriter();
  file.value_bytes("k", GgufType::array, array_value(static_cast<GgufType>(99), 0));
  expect_refused(file.bytes(), "type of elements of key 'k' at byte 37 is 99, expected 0..12");
  file = GgufWriter();
  file.number<std::uint8_t>("k", GgufType::boolean, 2);
  expect_refused(file.bytes(), "key 'k' at byte 37 is 2, expected 0 or 1");
  file = GgufWriter();
  file.numbers<std::uint8_t>("k", GgufType::boolean, {0, 1, 7});
  expect_refused(file.bytes(), "key 'k' at byte 51 is 7, expected 0 or 1");
  file = GgufWriter();
  ByteWriter nested;
  for (int depth = 0; depth < 5; ++depth) nested.raw(array_value(GgufType::array, 1).bytes);
  nested.raw(array_value(GgufType::u8, 0).bytes);
  file.value_bytes("k", GgufType::array, nested);
  expect_refused(file.bytes(), "key 'k' nests arrays deeper than 4");
  file = GgufWriter();
  file.u32("general.alignment", 24);
  expect_refused(file.bytes(), "general.alignment = 24, expected a power of two in 8..1048576");
  file = GgufWriter();
  file.u32("general.alignment", 0);
  expect_refused(file.bytes(), "general.alignment = 0, expected a power of two in 8..1048576");
  file = GgufWriter();
  file.string("general.alignment", "32");
  expect_refused(file.bytes(), "key 'general.alignment' has type string, expected an integer");
}

TEST(GgufMalformed, Tensors) {
  const auto one = [](std::uint32_t type, std::vector<std::uint64_t> shape) {
    GgufWriter file;
    file.tensor("w", type, std::move(shape), Bytes(64));
    return file.bytes();
  };
  expect_refused(one(0, {}), "tensor 'w' has 0 dimensions, expected 1..4");
  expect_refused(one(0, {1, 1, 1, 1, 1}), "tensor 'w' has 5 dimensions, expected 1..4");
  expect_refused(one(0, {2, 0}), "tensor 'w' has shape[1] = 0, expected at least 1");
  expect_refused(one(0, {1ULL << 32, 1ULL << 32}),
                 "tensor 'w' has shape[1] = 4294967296, expected at least 1 and fewer than 2^60");
  expect_refused(one(0, {~0ULL}), "tensor 'w' has shape[0] = 18446744073709551615, expected");
  expect_refused(one(2, {32}), "tensor 'w' has element type 2, expected F32 (0), F16 (1)");
  expect_refused(one(4000000000U, {32}), "tensor 'w' has element type 4000000000, expected F32 (0)");
  expect_refused(one(8, {33}), "tensor 'w' of type Q8_0 has shape[0] = 33, expected a multiple of 32");
  expect_refused(one(12, {32, 8}), "tensor 'w' of type Q4_K has shape[0] = 32, expected a multiple of 256");
  expect_refused(one(0, {17}), "tensor 'w' has offset 0 and 68 bytes, but the file holds 64 bytes of tensor data");
  expect_refused(one(0, {1ULL << 59}),
                 "tensor 'w' has offset 0 and 2305843009213693952 bytes, but the file holds 64 bytes");

  GgufWriter file = sample();
  file.tensor("a", GgmlType::f32, {1}, Bytes(4));
  expect_refused(file.bytes(), "tensor[2] is 'a', which an earlier tensor has already");
  file = GgufWriter();
  file.tensor("", GgmlType::f32, {1}, Bytes(4));
  expect_refused(file.bytes(), "name of tensor[0] at byte 24 has 0 bytes, expected 1..65535");
}

TEST(GgufMalformed, Offsets) {
  GgufWriter file = sample();
  file.offsets["b"] = 33;
  expect_refused(file.bytes(), "tensor 'b' has offset 33, expected a multiple of the alignment 32");
  file.offsets["b"] = 64;
  expect_refused(file.bytes(), "tensor 'b' has offset 64 and 34 bytes, but the file holds 66 bytes of tensor data");
  file.offsets["b"] = ~0ULL - 31;
  expect_refused(file.bytes(), "tensor 'b' has offset 18446744073709551584 and 34 bytes, but the file holds 66 bytes");
  file.offsets["b"] = 0;
  expect_refused(file.bytes(), " overlap: the first ends at byte ");
  // Cut right after the tensor infos, before the padding.
  file = GgufWriter();
  file.tensor("w", GgmlType::f32, {1}, {});
  Bytes cut = file.bytes();
  cut.resize(24 + 8 + 1 + 4 + 8 + 4 + 8);
  expect_refused(cut, "tensor data should start at byte 64, but the file has 57 bytes (it is truncated)");
  // In reverse order they touch without overlapping.
  file = GgufWriter();
  file.tensor("a", GgmlType::f32, {8}, Bytes(32, std::byte{1}))
      .tensor("b", GgmlType::f32, {8}, Bytes(32, std::byte{2}));
  file.offsets = {{"a", 32}, {"b", 0}};
  const Bytes bytes = file.bytes();
  EXPECT_EQ(Gguf::from_bytes(bytes).find_tensor("a")->data[0], std::byte{2});
}

// Every shorter file is refused, wherever it ends, with the same kind of error.
TEST(GgufMalformed, TruncatedAnywhere) {
  GgufWriter file = sample();
  file.strings("list", std::vector<std::string>{"one", "two"}).numbers<float>("numbers", GgufType::f32, {1, 2, 3});
  const Bytes bytes = file.bytes();
  (void)Gguf::from_bytes(bytes);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    const Bytes cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    test::expect_error(ErrorCode::io, "bad.gguf: ", [&] { (void)Gguf::from_bytes(cut, "bad.gguf"); });
  }
}

// Flipping any bit gives either a file that is read or an Error (io), never anything else (sanitizers watch).
TEST(GgufMalformed, AnyBitFlipped) {
  GgufWriter file = sample();
  file.strings("list", std::vector<std::string>{"one", "two"}).numbers<float>("numbers", GgufType::f32, {1, 2, 3});
  Bytes bytes = file.bytes();
  int refused = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      bytes[i] ^= std::byte{1} << bit;
      try {
        const Gguf gguf = Gguf::from_bytes(bytes);
        for (const GgufTensor& tensor : gguf.tensors()) {
          EXPECT_GE(tensor.data.data(), bytes.data());
          EXPECT_LE(tensor.data.data() + tensor.data.size(), bytes.data() + bytes.size());
        }
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::io);
        ++refused;
      }
      bytes[i] ^= std::byte{1} << bit;
    }
  }
  EXPECT_GT(refused, 500);
}

TEST(Gguf, TinyModelIsWellFormed) {
  for (const GgmlType type : {GgmlType::f32, GgmlType::f16, GgmlType::bf16, GgmlType::q8_0, GgmlType::q4_1}) {
    test::TinyModel model;
    model.matrices = type;
    model.tied_embeddings = false;
    const Bytes bytes = test::tiny_gguf(model);
    const Gguf gguf = Gguf::from_bytes(bytes);
    EXPECT_EQ(gguf.tensors().size(), 3U + 9U * model.num_layers);
    EXPECT_EQ(bytes, test::tiny_gguf(model));
  }
}

}  // namespace
}  // namespace headwater::engine
