// Names, mapping, and typed access to what gguf_parser.cc has read.
#include "engine/gguf.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <type_traits>
#include <utility>

#include "engine/byte_reader.h"
#include "headwater/error.h"

namespace headwater::engine {
namespace {

std::string shape_text(std::span<const std::uint64_t> shape) {
  std::string out;
  for (const std::uint64_t size : shape) out += (out.empty() ? "[" : ", ") + std::to_string(size);
  return out + "]";
}

}  // namespace

std::string name_of(GgufType type) {
  constexpr std::array<std::string_view, 13> kNames{"u8",      "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                    "boolean", "string", "array", "u64", "i64", "f64"};
  const auto number = static_cast<std::size_t>(type);
  return number < kNames.size() ? std::string(kNames[number]) : fmt::format("type {}", number);
}

std::string_view name_of(GgmlType type) noexcept {
  switch (type) {
    case GgmlType::f32:
      return "F32";
    case GgmlType::f16:
      return "F16";
    case GgmlType::q4_1:
      return "Q4_1";
    case GgmlType::q8_0:
      return "Q8_0";
    case GgmlType::q4_k:
      return "Q4_K";
    case GgmlType::q6_k:
      return "Q6_K";
    case GgmlType::bf16:
      return "BF16";
  }
  return "unknown";
}

std::string quoted(std::string_view text) {
  std::string out = "'";
  for (const char c : text.substr(0, 80)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7F) {
      out += c;
    } else {
      out += fmt::format("\\x{:02x}", byte);
    }
  }
  return out + (text.size() > 80 ? "...'" : "'");
}

Gguf Gguf::open(const std::string& path) {
  const auto system_error = [&](const char* what) {
    throw Error(ErrorCode::io, fmt::format("{}: cannot {}: {}", path, what, std::generic_category().message(errno)));
  };
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) system_error("open");
  struct Closer {
    int fd;
    ~Closer() { ::close(fd); }
  } const closer{fd};
  struct stat info {};
  if (::fstat(fd, &info) != 0) system_error("read its size");
  if (!S_ISREG(info.st_mode)) throw Error(ErrorCode::io, path + ": is not a regular file, expected a GGUF file");
  Gguf file;
  file.name_ = path;
  if (info.st_size > 0) {
    const auto size = static_cast<std::size_t>(info.st_size);
    void* mapping = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (mapping == MAP_FAILED) system_error("map");
    file.mapping_ = mapping;
    file.bytes_ = {static_cast<const std::byte*>(mapping), size};
  }
  file.parse();
  return file;
}

Gguf Gguf::from_bytes(std::span<const std::byte> bytes, std::string name) {
  Gguf file;
  file.name_ = std::move(name);
  file.bytes_ = bytes;
  file.parse();
  return file;
}

Gguf::Gguf(Gguf&& other) noexcept
    : name_(std::move(other.name_)),
      bytes_(std::exchange(other.bytes_, {})),
      mapping_(std::exchange(other.mapping_, nullptr)),
      keys_(std::move(other.keys_)),
      values_(std::move(other.values_)),
      tensors_(std::move(other.tensors_)),
      tensor_index_(std::move(other.tensor_index_)) {}

Gguf& Gguf::operator=(Gguf&& other) noexcept {
  // The mapping changes hands; `other` unmaps what was here.
  std::swap(name_, other.name_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapping_, other.mapping_);
  keys_.swap(other.keys_);
  values_.swap(other.values_);
  tensors_.swap(other.tensors_);
  tensor_index_.swap(other.tensor_index_);
  return *this;
}

Gguf::~Gguf() {
  if (mapping_ != nullptr) ::munmap(mapping_, bytes_.size());
}

void Gguf::drop_resident() const noexcept {
  if (mapping_ != nullptr) ::madvise(mapping_, bytes_.size(), MADV_DONTNEED);
}

const GgufValue* Gguf::find(std::string_view key) const noexcept {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

namespace {

[[noreturn]] void fail_key(const Gguf& file, std::string_view key, std::string_view expected, const GgufValue* got) {
  throw Error(ErrorCode::io, got == nullptr
                                 ? fmt::format("{}: key {} is missing, expected {}", file.name(), quoted(key), expected)
                                 : fmt::format("{}: key {} has type {}, expected {}", file.name(), quoted(key),
                                               name_of(static_cast<GgufType>(got->index())), expected));
}

template <typename T>
constexpr bool kIsInteger = std::is_integral_v<T> && !std::is_same_v<T, bool>;

}  // namespace

// std::get_if of a null pointer is null, so a missing key needs no case of its own below.

std::uint64_t Gguf::unsigned_integer(std::string_view key, std::optional<std::uint64_t> fallback) const {
  const GgufValue* value = find(key);
  if (value == nullptr && fallback) return *fallback;
  if (value == nullptr) fail_key(*this, key, "an integer", nullptr);
  return std::visit(
      [&](const auto& number) -> std::uint64_t {
        if constexpr (kIsInteger<std::decay_t<decltype(number)>>) {
          if (std::cmp_less(number, 0)) {
            throw Error(ErrorCode::io, fmt::format("{}: key {} = {}, expected 0 or more", name_, quoted(key), number));
          }
          return static_cast<std::uint64_t>(number);
        } else {
          fail_key(*this, key, "an integer", value);
        }
      },
      *value);
}

double Gguf::real(std::string_view key, std::optional<double> fallback) const {
  const GgufValue* value = find(key);
  if (value == nullptr && fallback) return *fallback;
  if (const auto* number = std::get_if<float>(value)) return *number;
  if (const auto* number = std::get_if<double>(value)) return *number;
  fail_key(*this, key, "f32 or f64", value);
}

bool Gguf::boolean(std::string_view key, std::optional<bool> fallback) const {
  const GgufValue* value = find(key);
  if (value == nullptr && fallback) return *fallback;
  if (const auto* flag = std::get_if<bool>(value)) return *flag;
  fail_key(*this, key, "boolean", value);
}

std::string_view Gguf::string(std::string_view key, std::optional<std::string_view> fallback) const {
  const GgufValue* value = find(key);
  if (value == nullptr && fallback) return *fallback;
  if (const auto* text = std::get_if<std::string_view>(value)) return *text;
  fail_key(*this, key, "string", value);
}

std::span<const std::string_view> Gguf::strings(std::string_view key) const {
  constexpr std::string_view kExpected = "an array of strings";
  const GgufValue* value = find(key);
  const auto* array = std::get_if<GgufArray>(value);
  if (array == nullptr) fail_key(*this, key, kExpected, value);
  if (array->type != GgufType::string) {
    throw Error(ErrorCode::io, fmt::format("{}: key {} is an array of {}, expected {}", name_, quoted(key),
                                           name_of(array->type), kExpected));
  }
  return array->strings;
}

namespace {

template <typename T>
void append_integers(const GgufArray& array, std::vector<std::int32_t>& out, const auto& out_of_range) {
  for (std::uint64_t i = 0; i < array.count; ++i) {
    const T value = load<T>(array.bytes.data() + i * sizeof(T));
    if (!std::in_range<std::int32_t>(value)) out_of_range(i, value);
    out.push_back(static_cast<std::int32_t>(value));
  }
}

}  // namespace

std::vector<std::int32_t> Gguf::integers(std::string_view key) const {
  constexpr std::string_view kExpected = "an array of integers";
  const GgufValue* value = find(key);
  const auto* array = std::get_if<GgufArray>(value);
  if (array == nullptr) fail_key(*this, key, kExpected, value);
  const auto out_of_range = [&](std::uint64_t index, auto number) {
    throw Error(ErrorCode::io, fmt::format("{}: key {} has [{}] = {}, expected a value that fits in 32 bits", name_,
                                           quoted(key), index, number));
  };
  std::vector<std::int32_t> out;
  switch (array->type) {
    case GgufType::u8:
      append_integers<std::uint8_t>(*array, out, out_of_range);
      break;
    case GgufType::i8:
      append_integers<std::int8_t>(*array, out, out_of_range);
      break;
    case GgufType::u16:
      append_integers<std::uint16_t>(*array, out, out_of_range);
      break;
    case GgufType::i16:
      append_integers<std::int16_t>(*array, out, out_of_range);
      break;
    case GgufType::u32:
      append_integers<std::uint32_t>(*array, out, out_of_range);
      break;
    case GgufType::i32:
      append_integers<std::int32_t>(*array, out, out_of_range);
      break;
    case GgufType::u64:
      append_integers<std::uint64_t>(*array, out, out_of_range);
      break;
    case GgufType::i64:
      append_integers<std::int64_t>(*array, out, out_of_range);
      break;
    default:
      throw Error(ErrorCode::io, fmt::format("{}: key {} is an array of {}, expected {}", name_, quoted(key),
                                             name_of(array->type), kExpected));
  }
  return out;
}

const GgufTensor* Gguf::find_tensor(std::string_view name) const noexcept {
  const auto found = tensor_index_.find(name);
  return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

const GgufTensor& Gguf::tensor(std::string_view name, std::span<const std::uint64_t> shape) const {
  const GgufTensor* found = find_tensor(name);
  if (found == nullptr) {
    throw Error(ErrorCode::io,
                fmt::format("{}: tensor {} is missing, expected shape {}", name_, quoted(name), shape_text(shape)));
  }
  const auto got = std::span(found->shape).first(static_cast<std::size_t>(found->num_dims));
  if (!std::ranges::equal(got, shape)) {
    throw Error(ErrorCode::io, fmt::format("{}: tensor {} has shape {}, expected {}", name_, quoted(name),
                                           shape_text(got), shape_text(shape)));
  }
  return *found;
}

}  // namespace headwater::engine
