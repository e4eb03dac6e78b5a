#include "engine/gguf.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <system_error>
#include <type_traits>
#include <utility>

#include "engine/dequant.h"
#include "headwater/error.h"

namespace headwater::engine {
namespace {

static_assert(std::endian::native == std::endian::little, "the file's numbers are little-endian and read in place");
static_assert(sizeof(std::size_t) == 8, "sizes in the file have 64 bits");

constexpr std::uint32_t kVersion = 3;
constexpr std::uint64_t kMaxNameBytes = 65535;  // of keys and tensor names, by the format
constexpr int kMaxArrayDepth = 4;
constexpr std::uint64_t kDefaultAlignment = 32;
constexpr std::uint64_t kMaxAlignment = 1 << 20;
// The smallest possible encodings: what a count is checked against before anything is done with it.
constexpr std::uint64_t kMinKeyBytes = 8 + 1 + 4 + 1;  // name length, name, type, value
constexpr std::uint64_t kMinTensorBytes =
    8 + 1 + 4 + 8 + 4 + 8;  // name length, name, dimensions, one size, type, offset

/// A name from the file as it may be shown: printable and short.
std::string shown(std::string_view text) {
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

/// Bytes of a value of fixed size; 0 for strings and arrays.
constexpr std::size_t fixed_size(GgufType type) {
  switch (type) {
    case GgufType::u8:
    case GgufType::i8:
    case GgufType::boolean:
      return 1;
    case GgufType::u16:
    case GgufType::i16:
      return 2;
    case GgufType::u32:
    case GgufType::i32:
    case GgufType::f32:
      return 4;
    case GgufType::u64:
    case GgufType::i64:
    case GgufType::f64:
      return 8;
    case GgufType::string:
    case GgufType::array:
      break;
  }
  return 0;
}

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

bool is_known(GgmlType type) {
  switch (type) {
    case GgmlType::f32:
    case GgmlType::f16:
    case GgmlType::q4_1:
    case GgmlType::q8_0:
    case GgmlType::q4_k:
    case GgmlType::q6_k:
    case GgmlType::bf16:
      return true;
  }
  return false;
}

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

/// Walks the file once from front to back. `at_` never passes the end: everything read goes through take().
class GgufParser {
 public:
  explicit GgufParser(Gguf& file) : file_(file), bytes_(file.bytes_) {}

  void parse() {
    const std::uint64_t num_tensors = parse_header();
    for (std::uint64_t i = 0; i < num_keys_; ++i) parse_key(i);
    std::vector<std::uint64_t> offsets;
    for (std::uint64_t i = 0; i < num_tensors; ++i) offsets.push_back(parse_tensor_info(i));
    place_tensors(offsets);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorCode::io, fmt::format("{}: {}", file_.name_, what));
  }

  [[nodiscard]] std::uint64_t left() const { return bytes_.size() - at_; }

  std::span<const std::byte> take(std::uint64_t count, std::string_view what) {
    if (count > left()) {
      fail(fmt::format("{} at byte {} needs {} bytes, but the file has {} left (it is truncated or malformed)", what,
                       at_, count, left()));
    }
    const auto out = bytes_.subspan(at_, count);
    at_ += count;
    return out;
  }

  template <typename T>
  T number(std::string_view what) {
    return load<T>(take(sizeof(T), what).data());
  }

  /// Refuses a count of things that cannot all fit in the rest of the file.
  void check_count(std::uint64_t count, std::uint64_t min_bytes_each, std::string_view what) const {
    if (count > left() / min_bytes_each) {
      fail(fmt::format("{} = {} before byte {}, expected at most {}: the file has {} bytes left", what, count, at_,
                       left() / min_bytes_each, left()));
    }
  }

  std::string_view string(const std::string& what) {
    const auto length = number<std::uint64_t>("length of " + what);
    const auto text = take(length, what);
    return {reinterpret_cast<const char*>(text.data()), text.size()};
  }

  std::string_view name(const std::string& what) {
    const std::uint64_t start = at_;
    const std::string_view text = string(what);
    if (text.empty() || text.size() > kMaxNameBytes) {
      fail(fmt::format("{} at byte {} has {} bytes, expected 1..{}", what, start, text.size(), kMaxNameBytes));
    }
    return text;
  }

  std::uint64_t parse_header() {
    const auto magic = take(4, "magic");
    if (std::memcmp(magic.data(), "GGUF", 4) != 0) {
      fail(fmt::format("magic at byte 0 is {}, expected 'GGUF'",
                       shown({reinterpret_cast<const char*>(magic.data()), magic.size()})));
    }
    const auto version = number<std::uint32_t>("version");
    if (version != kVersion) {
      const bool swapped = version == (kVersion << 24);
      fail(fmt::format("version at byte 4 is {}, expected {}{}", version, kVersion,
                       swapped ? " (this is a big-endian file)" : ""));
    }
    const auto num_tensors = number<std::uint64_t>("tensor_count");
    num_keys_ = number<std::uint64_t>("key_count");
    check_count(num_tensors, kMinTensorBytes, "tensor_count");
    check_count(num_keys_, kMinKeyBytes, "key_count");
    return num_tensors;
  }

  GgufType value_type(const std::string& what) {
    const std::uint64_t start = at_;
    const auto type = static_cast<GgufType>(number<std::uint32_t>("type of " + what));
    if (type > GgufType::f64) {
      fail(fmt::format("type of {} at byte {} is {}, expected 0..12", what, start, static_cast<std::uint32_t>(type)));
    }
    return type;
  }

  void parse_key(std::uint64_t index) {
    const std::string_view key = name(fmt::format("key[{}]", index));
    const std::string what = "key " + shown(key);
    const GgufType type = value_type(what);
    GgufValue value = parse_value(type, what);
    if (!file_.values_.emplace(key, std::move(value)).second) {
      fail(fmt::format("key[{}] is {}, which an earlier key has already", index, shown(key)));
    }
    file_.keys_.push_back(key);
  }

  void check_boolean(std::byte value, std::uint64_t position, const std::string& what) const {
    if (value > std::byte{1}) {
      fail(fmt::format("{} at byte {} is {}, expected 0 or 1", what, position, std::to_integer<int>(value)));
    }
  }

  GgufValue parse_value(GgufType type, const std::string& what) {
    switch (type) {
      case GgufType::u8:
        return number<std::uint8_t>(what);
      case GgufType::i8:
        return number<std::int8_t>(what);
      case GgufType::u16:
        return number<std::uint16_t>(what);
      case GgufType::i16:
        return number<std::int16_t>(what);
      case GgufType::u32:
        return number<std::uint32_t>(what);
      case GgufType::i32:
        return number<std::int32_t>(what);
      case GgufType::f32:
        return number<float>(what);
      case GgufType::boolean: {
        const std::uint64_t start = at_;
        const std::byte value = take(1, what)[0];
        check_boolean(value, start, what);
        return value == std::byte{1};
      }
      case GgufType::string:
        return string(what);
      case GgufType::array:
        return parse_array(what, 1);
      case GgufType::u64:
        return number<std::uint64_t>(what);
      case GgufType::i64:
        return number<std::int64_t>(what);
      case GgufType::f64:
        return number<double>(what);
    }
    fail(fmt::format("{} has no known type", what));
  }

  GgufArray parse_array(const std::string& what, int depth) {
    if (depth > kMaxArrayDepth) fail(fmt::format("{} nests arrays deeper than {}", what, kMaxArrayDepth));
    GgufArray array;
    array.type = value_type("elements of " + what);
    array.count = number<std::uint64_t>("length of " + what);
    const std::string length = "length of " + what;
    if (array.type == GgufType::string) {
      check_count(array.count, 8, length);
      for (std::uint64_t i = 0; i < array.count; ++i) array.strings.push_back(string(what));
    } else if (array.type == GgufType::array) {
      check_count(array.count, 4 + 8, length);
      for (std::uint64_t i = 0; i < array.count; ++i) array.arrays.push_back(parse_array(what, depth + 1));
    } else {
      const std::size_t size = fixed_size(array.type);
      check_count(array.count, size, length);
      const std::uint64_t start = at_;
      array.bytes = take(array.count * size, what);
      if (array.type == GgufType::boolean) {
        for (std::size_t i = 0; i < array.bytes.size(); ++i) check_boolean(array.bytes[i], start + i, what);
      }
    }
    return array;
  }

  /// Appends the tensor without its data; returns its offset from the start of the data.
  std::uint64_t parse_tensor_info(std::uint64_t index) {
    GgufTensor tensor;
    tensor.name = name(fmt::format("name of tensor[{}]", index));
    const std::string what = "tensor " + shown(tensor.name);
    if (!file_.tensor_index_.emplace(tensor.name, file_.tensors_.size()).second) {
      fail(fmt::format("tensor[{}] is {}, which an earlier tensor has already", index, shown(tensor.name)));
    }
    const auto num_dims = number<std::uint32_t>(what);
    if (num_dims < 1 || num_dims > 4) fail(fmt::format("{} has {} dimensions, expected 1..4", what, num_dims));
    tensor.num_dims = static_cast<int>(num_dims);
    tensor.num_elements = 1;
    for (std::uint32_t d = 0; d < num_dims; ++d) {
      const auto size = number<std::uint64_t>(what);
      // With at most 2^60 elements no later product of sizes in bytes overflows.
      if (size == 0 || size > (std::uint64_t{1} << 60) / tensor.num_elements) {
        fail(fmt::format("{} has shape[{}] = {}, expected at least 1 and fewer than 2^60 elements in all", what, d,
                         size));
      }
      tensor.shape[d] = size;
      tensor.num_elements *= size;
    }
    const auto type = number<std::uint32_t>(what);
    tensor.type = static_cast<GgmlType>(type);
    if (!is_known(tensor.type)) {
      fail(fmt::format(
          "{} has element type {}, expected F32 (0), F16 (1), Q4_1 (3), Q8_0 (8), Q4_K (12), Q6_K (14) or BF16 (30)",
          what, type));
    }
    if (const std::size_t block = block_values(tensor.type); tensor.shape[0] % block != 0) {
      fail(fmt::format("{} of type {} has shape[0] = {}, expected a multiple of {}", what, name_of(tensor.type),
                       tensor.shape[0], block));
    }
    file_.tensors_.push_back(tensor);
    return number<std::uint64_t>(what);
  }

  [[nodiscard]] std::uint64_t alignment() const {
    const std::uint64_t value = file_.unsigned_integer("general.alignment", kDefaultAlignment);
    if (value < 8 || value > kMaxAlignment || !std::has_single_bit(value)) {
      fail(fmt::format("general.alignment = {}, expected a power of two in 8..{}", value, kMaxAlignment));
    }
    return value;
  }

  void place_tensors(std::span<const std::uint64_t> offsets) {
    const std::uint64_t align = alignment();
    if (offsets.empty()) return;
    const std::uint64_t data_start = (at_ + align - 1) / align * align;
    if (data_start > bytes_.size()) {
      fail(fmt::format("tensor data should start at byte {}, but the file has {} bytes (it is truncated)", data_start,
                       bytes_.size()));
    }
    const auto data = bytes_.subspan(data_start);
    for (std::size_t i = 0; i < offsets.size(); ++i) {
      GgufTensor& tensor = file_.tensors_[i];
      const std::uint64_t size = tensor.num_elements / block_values(tensor.type) * block_bytes(tensor.type);
      if (offsets[i] % align != 0) {
        fail(fmt::format("tensor {} has offset {}, expected a multiple of the alignment {}", shown(tensor.name),
                         offsets[i], align));
      }
      if (offsets[i] > data.size() || size > data.size() - offsets[i]) {
        fail(
            fmt::format("tensor {} has offset {} and {} bytes, but the file holds {} bytes of tensor data (it is "
                        "truncated or malformed)",
                        shown(tensor.name), offsets[i], size, data.size()));
      }
      tensor.data = data.subspan(offsets[i], size);
    }
    check_overlaps();
  }

  void check_overlaps() const {
    std::vector<const GgufTensor*> order;
    order.reserve(file_.tensors_.size());
    for (const GgufTensor& tensor : file_.tensors_) order.push_back(&tensor);
    std::ranges::sort(order, {}, [](const GgufTensor* tensor) { return tensor->data.data(); });
    for (std::size_t i = 1; i < order.size(); ++i) {
      const GgufTensor& before = *order[i - 1];
      if (before.data.data() + before.data.size() > order[i]->data.data()) {
        fail(fmt::format("tensors {} and {} overlap: the first ends at byte {}, the second starts at byte {}",
                         shown(before.name), shown(order[i]->name),
                         before.data.data() + before.data.size() - bytes_.data(),
                         order[i]->data.data() - bytes_.data()));
      }
    }
  }

  Gguf& file_;
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
  std::uint64_t num_keys_ = 0;
};

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
  GgufParser(file).parse();
  return file;
}

Gguf Gguf::from_bytes(std::span<const std::byte> bytes, std::string name) {
  Gguf file;
  file.name_ = std::move(name);
  file.bytes_ = bytes;
  GgufParser(file).parse();
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
                                 ? fmt::format("{}: key {} is missing, expected {}", file.name(), shown(key), expected)
                                 : fmt::format("{}: key {} has type {}, expected {}", file.name(), shown(key),
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
            throw Error(ErrorCode::io, fmt::format("{}: key {} = {}, expected 0 or more", name_, shown(key), number));
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
    throw Error(ErrorCode::io, fmt::format("{}: key {} is an array of {}, expected {}", name_, shown(key),
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
                                           shown(key), index, number));
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
      throw Error(ErrorCode::io, fmt::format("{}: key {} is an array of {}, expected {}", name_, shown(key),
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
                fmt::format("{}: tensor {} is missing, expected shape {}", name_, shown(name), shape_text(shape)));
  }
  const auto got = std::span(found->shape).first(static_cast<std::size_t>(found->num_dims));
  if (!std::ranges::equal(got, shape)) {
    throw Error(ErrorCode::io, fmt::format("{}: tensor {} has shape {}, expected {}", name_, shown(name),
                                           shape_text(got), shape_text(shape)));
  }
  return *found;
}

}  // namespace headwater::engine
