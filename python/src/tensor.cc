#include "tensor.h"

#include <nanobind/stl/string.h>

#include <array>
#include <limits>
#include <utility>

namespace headwater::python {
namespace {

using Code = nb::dlpack::dtype_code;

std::string text_of(nb::dlpack::dtype type) {
  const auto bits = std::to_string(type.bits);
  switch (static_cast<Code>(type.code)) {
    case Code::Int:
      return "int" + bits;
    case Code::UInt:
      return "uint" + bits;
    case Code::Float:
      return "float" + bits;
    case Code::Bfloat:
      return "bfloat" + bits;
    case Code::Complex:
      return "complex" + bits;
    case Code::Bool:
      return "bool";
    default:
      return "DLPack type " + std::to_string(type.code) + " of " + bits + " bits";
  }
}

bool is(nb::dlpack::dtype type, Code code, int bits) {
  return type.code == static_cast<std::uint8_t>(code) && type.bits == bits && type.lanes == 1;
}

template <typename E>
E parse(const std::string& text, const char* name, std::initializer_list<std::pair<const char*, E>> values) {
  std::string expected;
  for (const auto& [value_name, value] : values) {
    if (text == value_name) return value;
    expected += (expected.empty() ? "\"" : ", \"") + std::string(value_name) + "\"";
  }
  refuse(std::string(name) + " = \"" + text + "\", expected one of " + expected);
}

template <typename T>
nb::object memoryview_of(std::vector<T> values) {
  auto* moved = new std::vector<T>(std::move(values));
  nb::capsule owner(moved, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::memview, T, nb::ndim<1>>(moved->data(), {moved->size()}, owner).cast();
}

}  // namespace

void refuse(const std::string& message) {
  throw Error(ErrorCode::invalid_argument, message);
}

int Array::device() const noexcept {
  return device_type_ == nb::device::cpu::value || device_type_ == nb::device::cuda_host::value ? kHost : device_id_;
}

std::int64_t Array::size() const noexcept {
  std::int64_t count = 1;
  for (std::size_t i = 0; i < rank_; ++i) count *= shape_[i];
  return count;
}

std::string Array::shape_text() const {
  std::string text = "[";
  for (std::size_t i = 0; i < rank(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape(i));
  return text + "]";
}

DType Array::float_dtype() const {
  const auto type = dtype_;
  if (is(type, Code::Float, 32)) return DType::f32;
  if (is(type, Code::Float, 16)) return DType::f16;
  if (is(type, Code::Bfloat, 16) || is(type, Code::UInt, 16)) return DType::bf16;
  if (is(type, Code::Float8_E4M3FN, 8) || is(type, Code::UInt, 8)) return DType::f8e4m3;
  refuse(name_ + " has dtype " + text_of(type) +
         ", expected float32, float16, bfloat16 or float8_e4m3fn (or uint16 and uint8 for the bits of the latter two)");
}

void Array::expect_rank(std::size_t expected, const char* layout) const {
  if (rank() != expected) {
    refuse(name_ + " has shape " + shape_text() + ", expected " + std::to_string(expected) + " dimensions " + layout);
  }
  for (std::size_t i = 0; i < rank(); ++i) {
    if (shape(i) > std::numeric_limits<std::int32_t>::max()) {
      refuse(name_ + " has shape " + shape_text() + ", expected at most 2147483647 in each dimension");
    }
  }
}

void Array::expect_shape(std::size_t i, std::int64_t expected, const char* what) const {
  if (shape(i) != expected) {
    refuse(name_ + ".shape[" + std::to_string(i) + "] = " + std::to_string(shape(i)) + ", expected " +
           std::to_string(expected) + " (" + what + ")");
  }
}

void Array::expect_contiguous_rows() const {
  for (std::size_t i = 0; i < rank(); ++i) {
    if (shape(i) == 0) return;
  }
  const std::size_t last = rank() - 1;
  if (shape(last) > 1 && stride(last) != 1) {
    refuse(name_ + " has stride " + std::to_string(stride(last)) + " in its last dimension, expected 1 (contiguous)");
  }
}

void Array::expect_int32_rows() const {
  if (!is(dtype_, Code::Int, 32)) refuse(name_ + " has dtype " + text_of(dtype_) + ", expected int32");
  expect_contiguous_rows();
}

void Array::expect_vector(Code code, int bits, const char* expected) const {
  const auto type = dtype_;
  if (!is(type, code, bits)) refuse(name_ + " has dtype " + text_of(type) + ", expected " + expected);
  if (rank() != 1) refuse(name_ + " has shape " + shape_text() + ", expected one dimension");
  if (shape(0) > 1 && stride(0) != 1) {
    refuse(name_ + " has stride " + std::to_string(stride(0)) + ", expected 1 (contiguous)");
  }
  const auto misaligned = reinterpret_cast<std::uintptr_t>(data()) % static_cast<std::uintptr_t>(bits / 8);
  if (size() > 0 && misaligned != 0) refuse(name_ + " is not aligned to its elements");
}

std::span<const std::int32_t> Array::int32s() const {
  expect_vector(Code::Int, 32, "int32");
  return {static_cast<const std::int32_t*>(data()), static_cast<std::size_t>(size())};
}

std::span<const std::int64_t> Array::int64s() const {
  expect_vector(Code::Int, 64, "int64");
  return {static_cast<const std::int64_t*>(data()), static_cast<std::size_t>(size())};
}

std::span<const float> Array::floats() const {
  expect_vector(Code::Float, 32, "float32");
  return {static_cast<const float*>(data()), static_cast<std::size_t>(size())};
}

std::span<std::byte> Array::bytes() const {
  std::int64_t count = 1;
  for (std::size_t i = rank(); i-- > 0;) {
    if (shape(i) > 1 && stride(i) != count) refuse(name_ + " is not contiguous");
    count *= shape(i);
  }
  return {static_cast<std::byte*>(data()), static_cast<std::size_t>(count) * dtype_.bits / 8};
}

Rows::Rows(nb::handle object, const char* name, Array::Access access, int device)
    : array(object, name, access, device) {
  array.expect_rank(3, "[rows, heads, head_dim]");
  array.expect_contiguous_rows();
  view = {array.data(), array.float_dtype(), array.stride(0), array.stride(1)};
}

Lse::Lse(nb::handle object, const char* name, LseBase base, Array::Access access, int device)
    : array(object, name, access, device) {
  array.expect_rank(2, "[rows, heads]");
  if (array.float_dtype() != DType::f32) {
    refuse(array.name() + " has dtype " + std::string(name_of(array.float_dtype())) + ", expected float32");
  }
  view = {static_cast<float*>(array.data()), array.stride(0), array.stride(1), base};
}

namespace {

PagedTensor paged(const Array& a, std::size_t page, std::size_t token, std::size_t head, std::int64_t offset) {
  auto* data = static_cast<std::byte*>(a.data());
  if (data != nullptr) data += offset * static_cast<std::int64_t>(size_of(a.float_dtype()));
  return {data, a.stride(page), a.stride(token), a.stride(head)};
}

}  // namespace

Cache::Cache(nb::handle object, const std::string& name, bool nhd, Array::Access access, int device) {
  if (nb::isinstance<nb::tuple>(object)) {
    if (nb::len(object) != 2) refuse(name + " is a tuple of " + std::to_string(nb::len(object)) + ", expected (k, v)");
    k = Array(object[0], name + "[0]", access, device);
    v = Array(object[1], name + "[1]", access, device);
    const char* layout = nhd ? "[pages, page_size, kv_heads, head_dim]" : "[pages, kv_heads, page_size, head_dim]";
    const std::size_t token = nhd ? 1 : 2;
    const std::size_t head = nhd ? 2 : 1;
    for (const Array* a : {&k, &v}) {
      a->expect_rank(4, layout);
      a->expect_contiguous_rows();
    }
    for (std::size_t i = 0; i < 3; ++i) v.expect_shape(i, k.shape(i), "as k");
    if (v.float_dtype() != k.float_dtype()) {
      refuse(v.name() + " has dtype " + std::string(name_of(v.float_dtype())) + ", expected " +
             std::string(name_of(k.float_dtype())) + " as k");
    }
    view = {paged(k, 0, token, head, 0), paged(v, 0, token, head, 0), k.float_dtype(), k.shape(0),
            static_cast<int>(k.shape(token))};
    num_kv_heads = static_cast<int>(k.shape(head));
    head_dim_qk = static_cast<int>(k.shape(3));
    head_dim_vo = static_cast<int>(v.shape(3));
    return;
  }
  k = Array(object, name, access, device);
  k.expect_rank(5, nhd ? "[pages, 2, page_size, kv_heads, head_dim], or a tuple (k, v)"
                       : "[pages, 2, kv_heads, page_size, head_dim], or a tuple (k, v)");
  k.expect_shape(1, 2, "k and v");
  k.expect_contiguous_rows();
  const std::size_t token = nhd ? 2 : 3;
  const std::size_t head = nhd ? 3 : 2;
  view = {paged(k, 0, token, head, 0), paged(k, 0, token, head, k.stride(1)), k.float_dtype(), k.shape(0),
          static_cast<int>(k.shape(token))};
  num_kv_heads = static_cast<int>(k.shape(head));
  head_dim_qk = head_dim_vo = static_cast<int>(k.shape(4));
}

ScaleArg::ScaleArg(nb::handle object, const char* name, int device) {
  if (object.is_none()) return;
  if (PyFloat_Check(object.ptr()) || PyLong_Check(object.ptr())) {
    if (device != kHost) refuse(std::string(name) + " is a number, expected a float32 array on the device");
    const double number = PyFloat_AsDouble(object.ptr());
    if (number == -1.0 && PyErr_Occurred()) throw nb::python_error();
    value = static_cast<float>(number);
    count = 1;
    return;
  }
  array = Array(object, name, Array::Access::read, device);
  if (array.rank() == 0 && array.float_dtype() == DType::f32) {  // torch's scalars
    count = 1;
    return;
  }
  const auto values = array.floats();
  if (values.empty() || values.size() > 65'536) {
    refuse(std::string(name) + " has shape " + array.shape_text() + ", expected [1] or [num_kv_heads]");
  }
  count = static_cast<int>(values.size());
}

DType parse_dtype(const std::string& text, const char* name) {
  return parse<DType>(text, name,
                      {{"f32", DType::f32},
                       {"f16", DType::f16},
                       {"bf16", DType::bf16},
                       {"f8e4m3", DType::f8e4m3},
                       {"float32", DType::f32},
                       {"float16", DType::f16},
                       {"bfloat16", DType::bf16},
                       {"float8_e4m3fn", DType::f8e4m3}});
}

LseBase parse_base(const std::string& text, const char* name) {
  return parse<LseBase>(text, name, {{"two", LseBase::two}, {"natural", LseBase::natural}});
}

Policy parse_policy(const std::string& text, const char* name) {
  return parse<Policy>(text, name,
                       {{"auto", Policy::automatic},
                        {"flat", Policy::flat},
                        {"two_level", Policy::two_level},
                        {"vllm", Policy::vllm},
                        {"forest", Policy::forest}});
}

CascadeSwitch parse_cascade(const std::string& text, const char* name) {
  return parse<CascadeSwitch>(
      text, name, {{"auto", CascadeSwitch::automatic}, {"on", CascadeSwitch::on}, {"off", CascadeSwitch::off}});
}

Isa parse_isa(const std::string& text, const char* name) {
  return parse<Isa>(
      text, name,
      {{"scalar", Isa::scalar}, {"avx2", Isa::avx2}, {"avx512", Isa::avx512}, {"avx512_bf16", Isa::avx512_bf16}});
}

bool parse_nhd(const std::string& text) {
  return parse<bool>(text, "kv_layout", {{"NHD", true}, {"HND", false}});
}

const char* name_of_cascade(CascadeSwitch value) noexcept {
  return value == CascadeSwitch::on ? "on" : value == CascadeSwitch::off ? "off" : "auto";
}

nb::object empty_like(nb::handle like, const std::vector<std::int64_t>& shape, DType dtype) {
  nb::list dims;
  for (const std::int64_t n : shape) dims.append(n);
  const std::string type(name_of(dtype));
  return nb::module_::import_("headwater._alloc").attr("empty_like")(like, nb::tuple(dims), nb::str(type.c_str()));
}

nb::object to_memoryview(std::vector<std::int32_t> values) {
  return memoryview_of(std::move(values));
}

nb::object to_memoryview(std::vector<std::int64_t> values) {
  return memoryview_of(std::move(values));
}

}  // namespace headwater::python
