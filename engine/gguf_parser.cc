// The structure of a GGUF file: header, metadata, tensor table, places of the tensors' data.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "engine/byte_reader.h"
#include "engine/dequant.h"
#include "engine/gguf.h"

namespace headwater::engine {
namespace {

constexpr std::uint32_t kVersion = 3;
constexpr std::uint64_t kMaxNameBytes = 65535;  // of keys and tensor names, by the format
constexpr int kMaxArrayDepth = 4;
constexpr std::uint64_t kDefaultAlignment = 32;
constexpr std::uint64_t kMaxAlignment = 1 << 20;
// The smallest possible encodings: what a count is checked against before anything is done with it.
constexpr std::uint64_t kMinKeyBytes = 8 + 1 + 4 + 1;  // name length, name, type, value
constexpr std::uint64_t kMinTensorBytes =
    8 + 1 + 4 + 8 + 4 + 8;  // name length, name, dimensions, one size, type, offset

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

}  // namespace

/// Walks the file once from front to back.
class GgufParser {
 public:
  explicit GgufParser(Gguf& file) : file_(file), bytes_(file.bytes_), in_(bytes_, file.name_) {}

  void parse() {
    const auto [num_tensors, num_keys] = parse_header();
    for (std::uint64_t i = 0; i < num_keys; ++i) parse_key(i);
    std::vector<std::uint64_t> offsets;
    for (std::uint64_t i = 0; i < num_tensors; ++i) offsets.push_back(parse_tensor_info(i));
    place_tensors(offsets);
  }

 private:
  struct Counts {
    std::uint64_t tensors;
    std::uint64_t keys;
  };

  Counts parse_header() {
    const auto magic = in_.take(4, "magic");
    if (std::memcmp(magic.data(), "GGUF", 4) != 0) {
      in_.fail("magic at byte 0 is {}, expected 'GGUF'",
               quoted({reinterpret_cast<const char*>(magic.data()), magic.size()}));
    }
    const auto version = in_.number<std::uint32_t>("version");
    if (version != kVersion) {
      const bool swapped = version == (kVersion << 24);
      in_.fail("version at byte 4 is {}, expected {}{}", version, kVersion,
               swapped ? " (this is a big-endian file)" : "");
    }
    const auto num_tensors = in_.number<std::uint64_t>("tensor_count");
    const auto num_keys = in_.number<std::uint64_t>("key_count");
    in_.check_count(num_tensors, kMinTensorBytes, "tensor_count");
    in_.check_count(num_keys, kMinKeyBytes, "key_count");
    return {num_tensors, num_keys};
  }

  /// A key or a tensor's name.
  std::string_view name(const std::string& what) {
    const std::uint64_t start = in_.position();
    const std::string_view text = in_.string(what);
    if (text.empty() || text.size() > kMaxNameBytes) {
      in_.fail("{} at byte {} has {} bytes, expected 1..{}", what, start, text.size(), kMaxNameBytes);
    }
    return text;
  }

  GgufType value_type(const std::string& what) {
    const std::uint64_t start = in_.position();
    const auto type = static_cast<GgufType>(in_.number<std::uint32_t>("type of " + what));
    if (type > GgufType::f64) {
      in_.fail("type of {} at byte {} is {}, expected 0..12", what, start, static_cast<std::uint32_t>(type));
    }
    return type;
  }

  void parse_key(std::uint64_t index) {
    const std::string_view key = name(fmt::format("key[{}]", index));
    const std::string what = "key " + quoted(key);
    const GgufType type = value_type(what);
    GgufValue value = parse_value(type, what);
    if (!file_.values_.emplace(key, std::move(value)).second) {
      in_.fail("key[{}] is {}, which an earlier key has already", index, quoted(key));
    }
    file_.keys_.push_back(key);
  }

  void check_boolean(std::byte value, std::uint64_t position, const std::string& what) const {
    if (value > std::byte{1}) {
      in_.fail("{} at byte {} is {}, expected 0 or 1", what, position, std::to_integer<int>(value));
    }
  }

  GgufValue parse_value(GgufType type, const std::string& what) {
    switch (type) {
      case GgufType::u8:
        return in_.number<std::uint8_t>(what);
      case GgufType::i8:
        return in_.number<std::int8_t>(what);
      case GgufType::u16:
        return in_.number<std::uint16_t>(what);
      case GgufType::i16:
        return in_.number<std::int16_t>(what);
      case GgufType::u32:
        return in_.number<std::uint32_t>(what);
      case GgufType::i32:
        return in_.number<std::int32_t>(what);
      case GgufType::f32:
        return in_.number<float>(what);
      case GgufType::boolean: {
        const std::uint64_t start = in_.position();
        const std::byte value = in_.take(1, what)[0];
        check_boolean(value, start, what);
        return value == std::byte{1};
      }
      case GgufType::string:
        return in_.string(what);
      case GgufType::array:
        return parse_array(what, 1);
      case GgufType::u64:
        return in_.number<std::uint64_t>(what);
      case GgufType::i64:
        return in_.number<std::int64_t>(what);
      case GgufType::f64:
        return in_.number<double>(what);
    }
    in_.fail("{} has no known type", what);
  }

  GgufArray parse_array(const std::string& what, int depth) {
    if (depth > kMaxArrayDepth) in_.fail("{} nests arrays deeper than {}", what, kMaxArrayDepth);
    GgufArray array;
    array.type = value_type("elements of " + what);
    array.count = in_.number<std::uint64_t>("length of " + what);
    const std::string length = "length of " + what;
    if (array.type == GgufType::string) {
      in_.check_count(array.count, 8, length);
      for (std::uint64_t i = 0; i < array.count; ++i) array.strings.push_back(in_.string(what));
    } else if (array.type == GgufType::array) {
      in_.check_count(array.count, 4 + 8, length);
      for (std::uint64_t i = 0; i < array.count; ++i) array.arrays.push_back(parse_array(what, depth + 1));
    } else {
      const std::size_t size = fixed_size(array.type);
      in_.check_count(array.count, size, length);
      const std::uint64_t start = in_.position();
      array.bytes = in_.take(array.count * size, what);
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
    const std::string what = "tensor " + quoted(tensor.name);
    if (!file_.tensor_index_.emplace(tensor.name, file_.tensors_.size()).second) {
      in_.fail("tensor[{}] is {}, which an earlier tensor has already", index, quoted(tensor.name));
    }
    const auto num_dims = in_.number<std::uint32_t>(what);
    if (num_dims < 1 || num_dims > 4) in_.fail("{} has {} dimensions, expected 1..4", what, num_dims);
    tensor.num_dims = static_cast<int>(num_dims);
    tensor.num_elements = 1;
    for (std::uint32_t d = 0; d < num_dims; ++d) {
      const auto size = in_.number<std::uint64_t>(what);
      // With at most 2^60 elements no later product of sizes in bytes overflows.
      if (size == 0 || size > (std::uint64_t{1} << 60) / tensor.num_elements) {
        in_.fail("{} has shape[{}] = {}, expected at least 1 and fewer than 2^60 elements in all", what, d, size);
      }
      tensor.shape[d] = size;
      tensor.num_elements *= size;
    }
    const auto type = in_.number<std::uint32_t>(what);
    tensor.type = static_cast<GgmlType>(type);
    if (name_of(tensor.type) == "unknown") {
      in_.fail(
          "{} has element type {}, expected F32 (0), F16 (1), Q4_1 (3), Q8_0 (8), Q4_K (12), Q6_K (14) or BF16 (30)",
          what, type);
    }
    if (const std::size_t block = block_values(tensor.type); tensor.shape[0] % block != 0) {
      in_.fail("{} of type {} has shape[0] = {}, expected a multiple of {}", what, name_of(tensor.type),
               tensor.shape[0], block);
    }
    file_.tensors_.push_back(tensor);
    return in_.number<std::uint64_t>(what);
  }

  [[nodiscard]] std::uint64_t alignment() const {
    const std::uint64_t value = file_.unsigned_integer("general.alignment", kDefaultAlignment);
    if (value < 8 || value > kMaxAlignment || !std::has_single_bit(value)) {
      in_.fail("general.alignment = {}, expected a power of two in 8..{}", value, kMaxAlignment);
    }
    return value;
  }

  void place_tensors(std::span<const std::uint64_t> offsets) {
    const std::uint64_t align = alignment();
    if (offsets.empty()) return;
    const std::uint64_t data_start = (in_.position() + align - 1) / align * align;
    if (data_start > bytes_.size()) {
      in_.fail("tensor data should start at byte {}, but the file has {} bytes (it is truncated)", data_start,
               bytes_.size());
    }
    const auto data = bytes_.subspan(data_start);
    for (std::size_t i = 0; i < offsets.size(); ++i) {
      GgufTensor& tensor = file_.tensors_[i];
      const std::uint64_t size = tensor.num_elements / block_values(tensor.type) * block_bytes(tensor.type);
      if (offsets[i] % align != 0) {
        in_.fail("tensor {} has offset {}, expected a multiple of the alignment {}", quoted(tensor.name), offsets[i],
                 align);
      }
      if (offsets[i] > data.size() || size > data.size() - offsets[i]) {
        in_.fail(
            "tensor {} has offset {} and {} bytes, but the file holds {} bytes of tensor data (it is "
            "truncated or malformed)",
            quoted(tensor.name), offsets[i], size, data.size());
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
        in_.fail("tensors {} and {} overlap: the first ends at byte {}, the second starts at byte {}",
                 quoted(before.name), quoted(order[i]->name), before.data.data() + before.data.size() - bytes_.data(),
                 order[i]->data.data() - bytes_.data());
      }
    }
  }

  Gguf& file_;
  std::span<const std::byte> bytes_;
  ByteReader in_;
};

void Gguf::parse() {
  GgufParser(*this).parse();
}

}  // namespace headwater::engine
