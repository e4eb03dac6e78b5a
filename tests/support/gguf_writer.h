// Writes GGUF files in memory, well formed or not: every number that the writer would derive (magic, version, counts,
// offsets) can be overridden, so that a test breaks exactly one thing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/gguf.h"

namespace headwater::test {

/// A growing array of bytes; numbers are little-endian.
struct ByteWriter {
  std::vector<std::byte> bytes;

  template <typename T>
  ByteWriter& number(T value) {
    static_assert(std::is_arithmetic_v<T>);
    const auto* from = reinterpret_cast<const std::byte*>(&value);
    bytes.insert(bytes.end(), from, from + sizeof value);
    return *this;
  }
  ByteWriter& raw(std::span<const std::byte> data) {
    bytes.insert(bytes.end(), data.begin(), data.end());
    return *this;
  }
  ByteWriter& raw(std::string_view text) { return raw(std::as_bytes(std::span(text))); }
  /// Length, then bytes.
  ByteWriter& string(std::string_view text) { return number<std::uint64_t>(text.size()).raw(text); }
  ByteWriter& pad_to(std::size_t alignment) {
    while (bytes.size() % alignment != 0) bytes.push_back(std::byte{0});
    return *this;
  }
};

class GgufWriter {
 public:
  // What the file claims; left alone, the truth.
  std::string magic = "GGUF";
  std::uint32_t version = 3;
  std::optional<std::uint64_t> num_tensors;
  std::optional<std::uint64_t> num_keys;
  std::map<std::string, std::uint64_t> offsets;  ///< of tensors, by name
  std::size_t alignment = 32;  ///< used for the layout; a key general.alignment must be added to go with it

  template <typename T>
  GgufWriter& number(std::string_view key, engine::GgufType type, T value) {
    return value_bytes(key, type, ByteWriter().number(value));
  }
  GgufWriter& u32(std::string_view key, std::uint32_t value) { return number(key, engine::GgufType::u32, value); }
  GgufWriter& f32(std::string_view key, float value) { return number(key, engine::GgufType::f32, value); }
  GgufWriter& boolean(std::string_view key, bool value) {
    return number<std::uint8_t>(key, engine::GgufType::boolean, value ? 1 : 0);
  }
  GgufWriter& string(std::string_view key, std::string_view value) {
    return value_bytes(key, engine::GgufType::string, ByteWriter().string(value));
  }
  template <typename Range>
  GgufWriter& strings(std::string_view key, const Range& values) {
    ByteWriter out;
    out.number(static_cast<std::uint32_t>(engine::GgufType::string)).template number<std::uint64_t>(std::size(values));
    for (const auto& value : values) out.string(value);
    return value_bytes(key, engine::GgufType::array, out);
  }
  template <typename T>
  GgufWriter& numbers(std::string_view key, engine::GgufType type, const std::vector<T>& values) {
    ByteWriter out;
    out.number(static_cast<std::uint32_t>(type)).template number<std::uint64_t>(values.size());
    for (const T value : values) out.number(value);
    return value_bytes(key, engine::GgufType::array, out);
  }
  /// A value as it stands in the file, after its type.
  GgufWriter& value_bytes(std::string_view key, engine::GgufType type, const ByteWriter& value) {
    keys_.string(key).number(static_cast<std::uint32_t>(type)).raw(value.bytes);
    ++keys_written_;
    return *this;
  }
  /// shape[0] is the fastest dimension.
  GgufWriter& tensor(std::string_view name, std::uint32_t type, std::vector<std::uint64_t> shape,
                     std::vector<std::byte> data) {
    tensors_.push_back({std::string(name), type, std::move(shape), std::move(data)});
    return *this;
  }
  GgufWriter& tensor(std::string_view name, engine::GgmlType type, std::vector<std::uint64_t> shape,
                     std::vector<std::byte> data) {
    return tensor(name, static_cast<std::uint32_t>(type), std::move(shape), std::move(data));
  }

  [[nodiscard]] std::vector<std::byte> bytes() const {
    ByteWriter out;
    out.raw(magic)
        .number(version)
        .number(num_tensors.value_or(tensors_.size()))
        .number(num_keys.value_or(keys_written_));
    out.raw(keys_.bytes);
    ByteWriter data;
    for (const Tensor& tensor : tensors_) {
      data.pad_to(alignment);
      out.string(tensor.name).number(static_cast<std::uint32_t>(tensor.shape.size()));
      for (const std::uint64_t size : tensor.shape) out.number(size);
      const auto forced = offsets.find(tensor.name);
      out.number(tensor.type).number<std::uint64_t>(forced == offsets.end() ? data.bytes.size() : forced->second);
      data.raw(tensor.data);
    }
    if (!tensors_.empty()) out.pad_to(alignment).raw(data.bytes);
    return std::move(out.bytes);
  }
  void write(const std::string& path) const {
    const std::vector<std::byte> content = bytes();
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(content.data()), static_cast<std::streamsize>(content.size()));
  }

 private:
  struct Tensor {
    std::string name;
    std::uint32_t type;
    std::vector<std::uint64_t> shape;
    std::vector<std::byte> data;
  };
  ByteWriter keys_;
  std::uint64_t keys_written_ = 0;
  std::vector<Tensor> tensors_;
};

}  // namespace headwater::test
