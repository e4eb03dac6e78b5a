// Arrays of other Python packages as views of the library, in place.
//
// An argument is imported (import.cc) and checked here for what only Python knows: that it is an array at all, its
// device, dtype, rank and shape, and that its innermost dimension is contiguous. Strides, alignment and ranges are
// checked by the library. Every refusal is a headwater::Error that names the argument. numpy has neither bfloat16 nor
// float8: uint16 stands for the bits of bf16, uint8 for those of f8e4m3.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "headwater/headwater.h"

namespace headwater::python {

namespace nb = nanobind;

/// Throws Error(invalid_argument).
[[noreturn]] void refuse(const std::string& message);

/// Devices that an argument may be asked to be on: the CPU, a CUDA device's number, or whatever it is on.
inline constexpr int kHost = -1;
inline constexpr int kAnyDevice = -2;

[[nodiscard]] bool is_torch_tensor(nb::handle object);

/// An imported array. It keeps its exporter alive, whose memory must stay where it is.
class Array {
 public:
  static constexpr std::size_t kMaxRank = 8;
  Array() = default;
  enum class Access : std::uint8_t { read, write };
  Array(nb::handle object, std::string name, Access access = Access::read, int device = kHost);

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] bool given() const noexcept { return given_; }
  [[nodiscard]] std::size_t rank() const noexcept { return rank_; }
  [[nodiscard]] std::int64_t shape(std::size_t i) const noexcept { return shape_[i]; }
  [[nodiscard]] std::int64_t stride(std::size_t i) const noexcept { return stride_[i]; }
  [[nodiscard]] std::int64_t size() const noexcept;  ///< elements
  [[nodiscard]] void* data() const noexcept { return data_; }
  /// Number of its CUDA device; kHost; kAnyDevice: on a CUDA device that it does not tell.
  [[nodiscard]] int device() const noexcept;
  [[nodiscard]] std::string shape_text() const;

  /// f32, f16, bf16 or f8e4m3, or a refusal.
  [[nodiscard]] DType float_dtype() const;
  void expect_rank(std::size_t rank, const char* layout) const;
  void expect_shape(std::size_t i, std::int64_t expected, const char* what) const;
  void expect_contiguous_rows() const;  ///< stride 1 in the last dimension
  void expect_int32_rows() const;       ///< int32, and as expect_contiguous_rows
  /// A contiguous vector of 32- or 64-bit integers, fp32 numbers or (byte) anything that is contiguous.
  [[nodiscard]] std::span<const std::int32_t> int32s() const;
  [[nodiscard]] std::span<const std::int64_t> int64s() const;
  [[nodiscard]] std::span<const float> floats() const;
  [[nodiscard]] std::span<std::byte> bytes() const;

 private:
  bool import_torch(nb::handle object);
  bool exchange_torch(nb::handle object);
  bool import_cuda_interface(nb::handle object, Access access);
  bool read_cuda_interface(const nb::dict& description, Access access);
  void import_dlpack(nb::handle object, Access access);
  void set_rank(std::size_t rank);
  void expect_vector(nb::dlpack::dtype_code code, int bits, const char* expected) const;

  std::string name_;
  bool given_ = false;
  void* data_ = nullptr;
  std::size_t rank_ = 0;
  std::array<std::int64_t, kMaxRank> shape_{};
  std::array<std::int64_t, kMaxRank> stride_{};  ///< elements
  nb::dlpack::dtype dtype_{};
  int device_type_ = nb::device::cpu::value;
  int device_id_ = 0;
  nb::object owner_;  ///< one of these two keeps the memory
  nb::ndarray<nb::ro> dlpack_;
};

/// A [rows, heads, head_dim] tensor.
struct Rows {
  Array array;
  RowsView view;
  Rows() = default;
  Rows(nb::handle object, const char* name, Array::Access access, int device = kHost);
  [[nodiscard]] ConstRowsView read() const noexcept {
    return {view.data, view.dtype, view.row_stride, view.head_stride};
  }
  [[nodiscard]] std::int64_t rows() const noexcept { return array.shape(0); }
  [[nodiscard]] int heads() const noexcept { return static_cast<int>(array.shape(1)); }
  [[nodiscard]] int head_dim() const noexcept { return static_cast<int>(array.shape(2)); }
};

/// A [rows, heads] fp32 tensor.
struct Lse {
  Array array;
  LseView view;
  Lse() = default;
  Lse(nb::handle object, const char* name, LseBase base, Array::Access access, int device = kHost);
  [[nodiscard]] ConstLseView read() const noexcept { return {view.data, view.row_stride, view.head_stride, view.base}; }
};

/// One layer's cache: an array [pages, 2, ...] or a tuple of two [pages, ...].
struct Cache {
  Array k;
  Array v;
  KvCache view;
  int num_kv_heads = 0;
  int head_dim_qk = 0;
  int head_dim_vo = 0;
  Cache() = default;
  Cache(nb::handle object, const std::string& name, bool nhd, Array::Access access, int device = kHost);
};

/// None, a number (on the host), or fp32 [], [1] or [num_kv_heads].
struct ScaleArg {
  Array array;
  float value = 1.0F;
  int count = 0;
  ScaleArg() = default;
  ScaleArg(nb::handle object, const char* name, int device = kHost);
  /// Borrowed: valid while this object stays where it is.
  [[nodiscard]] Scale view() const noexcept {
    return {count == 0 ? nullptr : array.given() ? static_cast<const float*>(array.data()) : &value, count};
  }
};

/// Names in Python are strings. Each of these refuses an unknown one, naming the argument.
[[nodiscard]] DType parse_dtype(const std::string& text, const char* name);
[[nodiscard]] LseBase parse_base(const std::string& text, const char* name);
[[nodiscard]] Policy parse_policy(const std::string& text, const char* name);
[[nodiscard]] CascadeSwitch parse_cascade(const std::string& text, const char* name);
[[nodiscard]] Isa parse_isa(const std::string& text, const char* name);
[[nodiscard]] bool parse_nhd(const std::string& text);
[[nodiscard]] const char* name_of_cascade(CascadeSwitch value) noexcept;

/// An array of `like`'s framework (see headwater/_alloc.py).
[[nodiscard]] nb::object empty_like(nb::handle like, const std::vector<std::int64_t>& shape, DType dtype);

/// A memoryview that owns a copy of `values`.
[[nodiscard]] nb::object to_memoryview(std::vector<std::int32_t> values);
[[nodiscard]] nb::object to_memoryview(std::vector<std::int64_t> values);

}  // namespace headwater::python
