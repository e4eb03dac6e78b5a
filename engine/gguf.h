// Reader of GGUF version 3 files: metadata and tensors, as views into the file.
// The file is mapped read-only, so opening costs no copy and pages that nobody reads are never loaded. Every count,
// length, offset and size is checked against the file before it is used; what does not fit is refused with an Error
// (code io) that names the file, the place, what was expected and what was found. Nothing is allocated in proportion to
// a number that the file merely claims. Layout of a file: magic, version, tensor count, key count | keys | tensor infos
// | padding to the alignment | tensor data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

namespace headwater::engine {

/// Kinds of metadata values; the numbers are the file's, and the order that of the alternatives of GgufValue.
enum class GgufType : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };

/// "u8", "string", "array", ...; "type 99" for a number that is none.
[[nodiscard]] std::string name_of(GgufType type);

/// Element formats that can be dequantised; the numbers are the file's.
enum class GgmlType : std::uint32_t { f32 = 0, f16 = 1, q4_1 = 3, q8_0 = 8, q4_k = 12, q6_k = 14, bf16 = 30 };

/// "F32", "Q4_K", ...; "unknown" for a number that is none.
[[nodiscard]] std::string_view name_of(GgmlType type) noexcept;

/// Text from a file as messages may show it: in quotes, printable, at most 80 bytes of it.
[[nodiscard]] std::string quoted(std::string_view text);

/// An array of metadata: exactly one of the three members is used, by the kind of its elements.
struct GgufArray {
  GgufType type = GgufType::u8;           ///< of the elements
  std::uint64_t count = 0;                ///< elements
  std::span<const std::byte> bytes;       ///< numbers and booleans: packed, little-endian, unaligned
  std::vector<std::string_view> strings;  ///< type string
  std::vector<GgufArray> arrays;          ///< type array
};

using GgufValue = std::variant<std::uint8_t, std::int8_t, std::uint16_t, std::int16_t, std::uint32_t, std::int32_t,
                               float, bool, std::string_view, GgufArray, std::uint64_t, std::int64_t, double>;

/// A tensor as stored. shape[0] is the fastest dimension: a matrix [out, in] of a linear layer has shape {in, out}, and
/// its rows are contiguous.
struct GgufTensor {
  std::string_view name;
  GgmlType type = GgmlType::f32;
  int num_dims = 0;                                ///< 1..4
  std::array<std::uint64_t, 4> shape{1, 1, 1, 1};  ///< unused dimensions are 1
  std::uint64_t num_elements = 0;
  std::span<const std::byte> data;  ///< exactly the tensor's bytes, checked to lie in the file
};

/// An open file. Move-only; every view handed out lives as long as the object (moves keep them valid).
class Gguf {
 public:
  /// Maps and checks `path`. The file must not be shortened while it is open.
  [[nodiscard]] static Gguf open(const std::string& path);
  /// The same checks on bytes that the caller keeps alive; `name` stands for the path in messages.
  [[nodiscard]] static Gguf from_bytes(std::span<const std::byte> bytes, std::string name = "memory");

  Gguf(Gguf&& other) noexcept;
  Gguf& operator=(Gguf&& other) noexcept;
  Gguf(const Gguf&) = delete;
  Gguf& operator=(const Gguf&) = delete;
  ~Gguf();

  /// Path, or the name given to from_bytes.
  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  // Metadata. The typed accessors throw Error (io) naming the file and key when the key is missing or of another kind;
  // the forms with a fallback return it when the key is missing, and still throw when it is of another kind.

  /// The value, or nullptr.
  [[nodiscard]] const GgufValue* find(std::string_view key) const noexcept;
  /// Keys in the order of the file.
  [[nodiscard]] std::span<const std::string_view> keys() const noexcept { return keys_; }
  /// Any integer kind, not negative.
  [[nodiscard]] std::uint64_t unsigned_integer(std::string_view key, std::optional<std::uint64_t> fallback = {}) const;
  /// f32 or f64.
  [[nodiscard]] double real(std::string_view key, std::optional<double> fallback = {}) const;
  [[nodiscard]] bool boolean(std::string_view key, std::optional<bool> fallback = {}) const;
  [[nodiscard]] std::string_view string(std::string_view key, std::optional<std::string_view> fallback = {}) const;
  /// An array of strings.
  [[nodiscard]] std::span<const std::string_view> strings(std::string_view key) const;
  /// An array of integers of any kind whose values fit in 32 bits with sign.
  [[nodiscard]] std::vector<std::int32_t> integers(std::string_view key) const;

  // Tensors.

  /// In the order of the file.
  [[nodiscard]] std::span<const GgufTensor> tensors() const noexcept { return tensors_; }
  /// nullptr when there is none of that name.
  [[nodiscard]] const GgufTensor* find_tensor(std::string_view name) const noexcept;
  /// Throws Error (io) when there is none, or when its shape differs from `shape` (fastest dimension first).
  [[nodiscard]] const GgufTensor& tensor(std::string_view name, std::span<const std::uint64_t> shape) const;

  /// Tells the system that mapped pages may be dropped from memory (they are read again when touched): call it once the
  /// weights have been converted. Does nothing for from_bytes.
  void drop_resident() const noexcept;

 private:
  friend class GgufParser;
  Gguf() = default;
  /// Fills everything below bytes_ from it.
  void parse();

  std::string name_;
  std::span<const std::byte> bytes_;
  void* mapping_ = nullptr;  ///< start of the mapping that this object owns, or nullptr
  std::vector<std::string_view> keys_;
  std::unordered_map<std::string_view, GgufValue> values_;
  std::vector<GgufTensor> tensors_;
  std::unordered_map<std::string_view, std::size_t> tensor_index_;
};

}  // namespace headwater::engine
