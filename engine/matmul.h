// Matrix products y = x W^T (+ y) by oneDNN, with W packed once into the library's own blocked format.
// What oneDNN 2.6 calls a product decides its speed with few rows: fp32 as a 1x1 convolution reads blocked weights (a
// matmul or inner product re-packs them in every call: 1.6x to 5x slower at 4 to 16 rows), bf16 as a matmul (needs
// AVX-512). Primitives are made once per number of rows and kept; row counts above 8 are rounded up so that few are
// needed. Layouts: x [rows, in_features], y fp32 [rows, out_features], both dense. Not thread safe.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "headwater/types.h"

namespace headwater::engine {

/// Which oneDNN operation computes a product.
enum class ProductKind : std::uint8_t { automatic, convolution, matmul, inner_product };

struct ProductShape {
  int in_features = 0;
  int out_features = 0;
  bool accumulate = false;  ///< y += x W^T
};

/// More rows than this are computed in blocks of this many: as fast, and fewer primitives.
inline constexpr int kMaxProductRows = 512;

/// Rows that x and y must have room for when `rows` are computed: the rest are computed from whatever is there.
[[nodiscard]] constexpr int padded_rows(int rows) noexcept {
  const int unit = rows <= 8 ? 1 : rows <= 64 ? 4 : rows <= 256 ? 16 : 64;
  return (rows + unit - 1) / unit * unit;
}

/// Whether this processor has products in bf16.
[[nodiscard]] bool has_bf16_products() noexcept;

/// Products of one shape with any number of weight matrices. The number of threads is that of ProductThreads.
class Product {
 public:
  /// `type`: f32 or bf16, of x and W. Throws Error(unsupported) where the processor has none of that type.
  Product(const ProductShape& shape, DType type, ProductKind kind = ProductKind::automatic);
  ~Product();
  Product(Product&&) noexcept;
  Product& operator=(Product&&) noexcept;

  [[nodiscard]] const ProductShape& shape() const noexcept;
  /// Bytes of one packed matrix.
  [[nodiscard]] std::size_t packed_bytes() const;
  /// Packs W fp32 [out_features, in_features] into `packed`, 64-byte aligned.
  void pack(const float* weights, void* packed) const;
  /// x of the given type, y fp32; both with room for padded_rows(rows) rows. With fixed_rows > 0 rows are computed in
  /// blocks of exactly that many, so that the arithmetic of a row cannot depend on how many there are; x and y then
  /// need room for a multiple of fixed_rows.
  void run(const void* packed, const void* x, float* y, int rows, int fixed_rows = 0) const;

  /// Whether a row's result has the same bits for every number of rows up to max_rows: tried with random x on a grid of
  /// row counts, with a matrix that pack() has written.
  [[nodiscard]] bool rows_agree(const void* packed, int max_rows = kMaxProductRows) const;
  /// Name of oneDNN's implementation for a number of rows.
  [[nodiscard]] std::string implementation(int rows) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace headwater::engine
