// Weights and the KV pool stream through memory, so huge pages are asked for: seen in the flags that the system keeps
// of each mapping.
#include "engine/huge_buffer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "engine/kv_storage.h"
#include "fixture.h"

namespace headwater::test {
namespace {

using namespace headwater::engine;

/// The line of flags of the mapping that holds an address; "hg": huge pages were asked for.
std::string mapping_flags(const void* address) {
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  while (std::getline(maps, line)) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    char dash = 0;
    std::istringstream range(line);
    if (range >> std::hex >> begin >> dash >> end && dash == '-') inside = begin <= wanted && wanted < end;
    if (inside && line.starts_with("VmFlags:")) return line + " ";
  }
  ADD_FAILURE() << "no mapping holds " << address;
  return {};
}

class HugePages : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage/enabled")) {
      GTEST_SKIP() << "this system has no transparent huge pages";
    }
  }
  static bool asked_for(const void* address) { return mapping_flags(address).find(" hg ") != std::string::npos; }
};

TEST_F(HugePages, AreAskedForFromTwoMebibytesOn) {
  const HugeBuffer large(std::size_t{8} << 20);
  EXPECT_TRUE(asked_for(large.data()));
  EXPECT_TRUE(asked_for(large.data() + large.size() - 1));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(large.data()) % (2 << 20), 0U);
  // Negative control: small buffers come from ordinary pages.
  const HugeBuffer small(1 << 20);
  EXPECT_FALSE(asked_for(small.data()));
}

TEST_F(HugePages, HoldTheKvPool) {
  const KvStorage storage({2, 2, 32, 16, DType::bf16}, 512);  // 2 layers * K and V * 512 pages * 2 KiB = 4 MiB
  for (int layer = 0; layer < 2; ++layer) {
    EXPECT_TRUE(asked_for(storage.layer(layer).k.data));
    EXPECT_TRUE(asked_for(storage.layer(layer).v.data));
  }
}

TEST_F(HugePages, HoldTheWeights) {
  TinyModel shape;
  shape.ffn = 1536;  // 2 layers * 3 matrices * 128 * 1536 floats = 4.5 MiB
  const auto model = tiny_model(shape);
  ASSERT_GT(model->weights().packed_bytes(), std::size_t{2} << 20);
  EXPECT_TRUE(asked_for(model->weights().output()));
  for (int layer = 0; layer < 2; ++layer) EXPECT_TRUE(asked_for(model->weights().layer(layer).down));
}

TEST(HugeBuffer, HoldsZerosAndMoves) {
  HugeBuffer buffer(std::size_t{3} << 20);
  for (std::size_t i = 0; i < buffer.size(); i += 4096) ASSERT_EQ(buffer.data()[i], std::byte{0});
  std::byte* const data = buffer.data();
  HugeBuffer other = std::move(buffer);
  EXPECT_EQ(other.data(), data);
  other.reserve(1);
  EXPECT_EQ(other.data(), data) << "never shrinks";
  other.reserve(std::size_t{5} << 20);
  EXPECT_GE(other.size(), std::size_t{5} << 20);
  EXPECT_EQ(HugeBuffer().size(), 0U);
}

}  // namespace
}  // namespace headwater::test
