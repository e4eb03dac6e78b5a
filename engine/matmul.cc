// See matmul.h. The blocked format is the one that oneDNN proposes for kFormatRows rows; every other number of rows is
// asked to use it.
#include "engine/matmul.h"

#include <algorithm>
#include <cstring>
#include <dnnl.hpp>
#include <random>
#include <unordered_map>
#include <vector>

#include "engine/ops.h"
#include "headwater/error.h"

namespace headwater::engine {
namespace {

using Desc = dnnl::memory::desc;
using Tag = dnnl::memory::format_tag;
using Type = dnnl::memory::data_type;

constexpr int kFormatRows = 32;

/// oneDNN's name for this processor; it has no other state.
const dnnl::engine& cpu_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

struct Ready {
  dnnl::primitive primitive;
  dnnl::memory x, w, y;
  std::unordered_map<int, dnnl::memory> arguments;
  std::string implementation;
};

}  // namespace

struct Product::Impl {
  ProductShape shape;
  Type type = Type::f32;
  ProductKind kind = ProductKind::automatic;
  Desc packed;  // of W, as oneDNN wants it
  dnnl::stream stream{cpu_engine()};
  std::unordered_map<int, Ready> ready;  // by number of rows

  [[nodiscard]] Ready make(int rows, const Desc& weights) const;
  Ready& at(int rows);
  [[nodiscard]] Desc plain_weights(Type of, Tag tag_2d, Tag tag_4d) const;
  void run_block(const void* weights, const void* x, float* y, int rows);
};

/// W as the operation sees it: [in, out] for a matmul, [out, in] for an inner product, [out, in, 1, 1] for a
/// convolution.
Desc Product::Impl::plain_weights(Type of, Tag tag_2d, Tag tag_4d) const {
  const dnnl::memory::dim in = shape.in_features;
  const dnnl::memory::dim out = shape.out_features;
  switch (kind) {
    case ProductKind::matmul:
      return Desc({in, out}, of, tag_2d);
    case ProductKind::inner_product:
      return Desc({out, in}, of, tag_2d);
    default:
      return Desc({out, in, 1, 1}, of, tag_4d);
  }
}

Ready Product::Impl::make(int rows, const Desc& weights) const {
  const dnnl::memory::dim in = shape.in_features;
  const dnnl::memory::dim out = shape.out_features;
  dnnl::post_ops post;
  if (shape.accumulate) post.append_sum();
  dnnl::primitive_attr attributes;
  attributes.set_post_ops(post);

  Ready made;
  const auto finish = [&](const auto& description, auto primitive_of) {
    made.primitive = primitive_of(description);
    made.implementation = description.impl_info_str();
    made.x = dnnl::memory(description.src_desc(), cpu_engine(), nullptr);
    made.w = dnnl::memory(description.weights_desc(), cpu_engine(), nullptr);
    made.y = dnnl::memory(description.dst_desc(), cpu_engine(), nullptr);
    made.arguments = {{DNNL_ARG_SRC, made.x}, {DNNL_ARG_WEIGHTS, made.w}, {DNNL_ARG_DST, made.y}};
  };
  const auto inference = dnnl::prop_kind::forward_inference;
  switch (kind) {
    case ProductKind::matmul: {
      const dnnl::matmul::desc desc(Desc({rows, in}, type, Tag::ab), weights, Desc({rows, out}, Type::f32, Tag::ab));
      finish(dnnl::matmul::primitive_desc(desc, attributes, cpu_engine()), [](auto& pd) { return dnnl::matmul(pd); });
      break;
    }
    case ProductKind::inner_product: {
      const dnnl::inner_product_forward::desc desc(inference, Desc({rows, in}, type, Tag::ab), weights,
                                                   Desc({rows, out}, Type::f32, Tag::ab));
      finish(dnnl::inner_product_forward::primitive_desc(desc, attributes, cpu_engine()),
             [](auto& pd) { return dnnl::inner_product_forward(pd); });
      break;
    }
    default: {
      // One picture, one line of `rows` points, a channel per feature.
      const dnnl::convolution_forward::desc desc(inference, dnnl::algorithm::convolution_direct,
                                                 Desc({1, in, 1, rows}, type, Tag::nhwc), weights,
                                                 Desc({1, out, 1, rows}, Type::f32, Tag::nhwc), {1, 1}, {0, 0}, {0, 0});
      finish(dnnl::convolution_forward::primitive_desc(desc, attributes, cpu_engine()),
             [](auto& pd) { return dnnl::convolution_forward(pd); });
      break;
    }
  }
  return made;
}

Ready& Product::Impl::at(int rows) {
  const auto found = ready.find(rows);
  if (found != ready.end()) return found->second;
  return ready.emplace(rows, make(rows, packed)).first->second;
}

void Product::Impl::run_block(const void* weights, const void* x, float* y, int rows) {
  Ready& product = at(rows);
  // oneDNN's handles are not const; x and W are only read.
  product.x.set_data_handle(const_cast<void*>(x));
  product.w.set_data_handle(const_cast<void*>(weights));
  product.y.set_data_handle(y);
  product.primitive.execute(stream, product.arguments);
}

bool has_bf16_products() noexcept {
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::sse41:
    case dnnl::cpu_isa::avx:
    case dnnl::cpu_isa::avx2:
    case dnnl::cpu_isa::avx2_vnni:
      return false;
    default:
      return true;
  }
}

Product::Product(const ProductShape& shape, DType type, ProductKind kind) : impl_(std::make_unique<Impl>()) {
  if (shape.in_features <= 0 || shape.out_features <= 0) {
    throw Error(ErrorCode::invalid_argument, "shape = " + std::to_string(shape.in_features) + " x " +
                                                 std::to_string(shape.out_features) +
                                                 " features, expected at least 1 of each");
  }
  if (type != DType::f32 && type != DType::bf16) {
    throw Error(ErrorCode::unsupported, "type = " + std::string(name_of(type)) + ", expected f32 or bf16");
  }
  if (type == DType::bf16 && !has_bf16_products()) {
    throw Error(ErrorCode::unsupported, "type = bf16, expected f32: this processor lacks AVX-512");
  }
  impl_->shape = shape;
  impl_->type = type == DType::bf16 ? Type::bf16 : Type::f32;
  impl_->kind = kind != ProductKind::automatic ? kind
                : type == DType::bf16          ? ProductKind::matmul
                                               : ProductKind::convolution;
  const Ready proposal = impl_->make(kFormatRows, impl_->plain_weights(impl_->type, Tag::any, Tag::any));
  impl_->packed = proposal.w.get_desc();
}

Product::~Product() = default;
Product::Product(Product&&) noexcept = default;
Product& Product::operator=(Product&&) noexcept = default;

const ProductShape& Product::shape() const noexcept {
  return impl_->shape;
}
std::size_t Product::packed_bytes() const {
  return impl_->packed.get_size();
}
std::string Product::implementation(int rows) const {
  return impl_->at(padded_rows(rows)).implementation;
}

void Product::pack(const float* weights, void* packed) const {
  const Tag tag_2d = impl_->kind == ProductKind::matmul ? Tag::ba : Tag::ab;  // [out, in] in memory either way
  dnnl::memory from(impl_->plain_weights(Type::f32, tag_2d, Tag::oihw), cpu_engine(), const_cast<float*>(weights));
  dnnl::memory to(impl_->packed, cpu_engine(), packed);
  dnnl::reorder(from, to).execute(impl_->stream, from, to);
  impl_->stream.wait();
}

void Product::run(const void* packed, const void* x, float* y, int rows, int fixed_rows) const {
  const std::size_t x_row_bytes =
      static_cast<std::size_t>(impl_->shape.in_features) * (impl_->type == Type::bf16 ? 2 : 4);
  const auto y_row = static_cast<std::size_t>(impl_->shape.out_features);
  const int block = fixed_rows > 0 ? fixed_rows : kMaxProductRows;
  for (int row = 0; row < rows; row += block) {
    const auto offset = static_cast<std::size_t>(row);
    const int count = fixed_rows > 0 ? fixed_rows : padded_rows(std::min(block, rows - row));
    impl_->run_block(packed, static_cast<const std::byte*>(x) + offset * x_row_bytes, y + offset * y_row, count);
  }
}

bool Product::rows_agree(const void* packed, int max_rows) const {
  const auto in = static_cast<std::size_t>(impl_->shape.in_features);
  const auto out = static_cast<std::size_t>(impl_->shape.out_features);
  const auto room = static_cast<std::size_t>(padded_rows(max_rows));
  std::mt19937 random(1);  // the same numbers every time
  std::normal_distribution<float> normal;
  std::vector<float> x(room * in);
  for (float& value : x) value = normal(random);
  std::vector<std::uint16_t> x16(impl_->type == Type::bf16 ? x.size() : 0);
  best_ops().convert(x.data(), static_cast<int>(x16.size()), {x16.data(), DType::bf16});
  const void* input = x16.empty() ? static_cast<const void*>(x.data()) : x16.data();

  std::vector<float> reference(room * out);
  impl_->run_block(packed, input, reference.data(), static_cast<int>(room));
  std::vector<float> y(room * out);
  for (const int rows : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 32, 48, 64, 80, 128, 256, 320, 448}) {
    if (rows >= static_cast<int>(room)) break;
    std::fill(y.begin(), y.end(), 0.0F);
    impl_->run_block(packed, input, y.data(), rows);
    if (std::memcmp(y.data(), reference.data(), static_cast<std::size_t>(rows) * out * sizeof(float)) != 0)
      return false;
  }
  return true;
}

}  // namespace headwater::engine
