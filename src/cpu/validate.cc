// Checks of the caller's tensors.
#include "cpu/validate.h"

#include <array>
#include <cstddef>

namespace headwater::cpu {
namespace {

constexpr std::int64_t kMaxBytes = std::int64_t{1} << 62;

}  // namespace

std::string ArgName::field(std::string_view name) const {
  std::string s(base);
  if (index >= 0) s.append("[").append(std::to_string(index)).append("]");
  s += side;
  s += name;
  return s;
}

void refuse(ErrorCode code, std::string_view name, std::string_view got, std::string_view expected) {
  std::string message(name);
  message += " = ";
  message += got;
  message += ", expected ";
  message += expected;
  throw Error(code, message);
}

void refuse(ErrorCode code, std::string_view name, std::int64_t got, std::string_view expected) {
  refuse(code, name, std::to_string(got), expected);
}

void check_strides(const ArgName& name, std::initializer_list<Dim> dims, std::int64_t inner, DType dtype) {
  std::array<Dim, 4> sorted{};  // by stride, innermost first
  std::size_t n = 0;
  for (const Dim& dim : dims) {
    if (dim.count <= 1) continue;  // never strided over
    std::size_t at = n++;
    for (; at > 0 && sorted[at - 1].stride > dim.stride; --at) sorted[at] = sorted[at - 1];
    sorted[at] = dim;
  }
  const std::int64_t limit = kMaxBytes / static_cast<std::int64_t>(size_of(dtype));
  std::int64_t extent = inner;  // elements from the first to the last of the dimensions so far
  for (std::size_t i = 0; i < n; ++i) {
    const auto& [dim_name, count, stride] = sorted[i];
    if (stride < extent) {
      refuse(ErrorCode::invalid_argument, name.field(std::string(".") + dim_name), stride,
             "at least " + std::to_string(extent) + " (elements that the inner dimensions span)");
    }
    if (stride > (limit - extent) / (count - 1)) {
      refuse(ErrorCode::invalid_argument, name.field(std::string(".") + dim_name), stride,
             "at most " + std::to_string((limit - extent) / (count - 1)) + " (64-bit offsets)");
    }
    extent += (count - 1) * stride;
  }
}

void check_pointer(const ArgName& name, const void* data, DType dtype) {
  if (data == nullptr) refuse(ErrorCode::invalid_argument, name.field(".data"), "nullptr", "a tensor");
  const auto misaligned = reinterpret_cast<std::uintptr_t>(data) % size_of(dtype);
  if (misaligned != 0) {
    refuse(ErrorCode::invalid_argument, name.field(".data"), "an address " + std::to_string(misaligned) + " bytes off",
           "alignment to " + std::to_string(size_of(dtype)) + " bytes (" + std::string(name_of(dtype)) + ")");
  }
}

void check_rows(const ArgName& name, const ConstRowsView& view, std::int64_t rows, int heads, int head_dim) {
  if (view.dtype == DType::f8e4m3 || name_of(view.dtype) == "?") {
    refuse(ErrorCode::invalid_argument, name.field(".dtype"), name_of(view.dtype), "f32, f16 or bf16");
  }
  if (rows == 0) return;
  check_pointer(name, view.data, view.dtype);
  check_strides(name, {{"row_stride", rows, view.row_stride}, {"head_stride", heads, view.head_stride}}, head_dim,
                view.dtype);
}

void check_rows(const ArgName& name, const RowsView& view, std::int64_t rows, int heads, int head_dim) {
  check_rows(name, ConstRowsView{view.data, view.dtype, view.row_stride, view.head_stride}, rows, heads, head_dim);
}

void check_lse(const ArgName& name, const ConstLseView& view, std::int64_t rows, int heads) {
  if (view.base != LseBase::two && view.base != LseBase::natural) {
    refuse(ErrorCode::invalid_argument, name.field(".base"), static_cast<int>(view.base), "two or natural");
  }
  if (rows == 0) return;
  check_pointer(name, view.data, DType::f32);
  check_strides(name, {{"row_stride", rows, view.row_stride}, {"head_stride", heads, view.head_stride}}, 1, DType::f32);
}

void check_lse(const ArgName& name, const LseView& view, std::int64_t rows, int heads) {
  check_lse(name, ConstLseView{view.data, view.row_stride, view.head_stride, view.base}, rows, heads);
}

void check_cache(const char* name, std::int64_t index, const KvCache& cache, int num_kv_heads, int head_dim_qk,
                 int head_dim_vo) {
  const ArgName cache_name(name, index);
  if (name_of(cache.dtype) == "?") {
    refuse(ErrorCode::invalid_argument, cache_name.field(".dtype"), static_cast<int>(cache.dtype),
           "f32, f16, bf16 or f8e4m3");
  }
  if (cache.page_size < 1) {
    refuse(ErrorCode::invalid_argument, cache_name.field(".page_size"), cache.page_size, "at least 1");
  }
  if (cache.num_pages < 0) {
    refuse(ErrorCode::invalid_argument, cache_name.field(".num_pages"), cache.num_pages, "at least 0");
  }
  if (cache.num_pages == 0) return;
  const auto check_side = [&](const char* side, const PagedTensor& x, int head_dim) {
    const ArgName side_name(name, index, side);
    check_pointer(side_name, x.data, cache.dtype);
    check_strides(side_name,
                  {{"page_stride", cache.num_pages, x.page_stride},
                   {"token_stride", cache.page_size, x.token_stride},
                   {"head_stride", num_kv_heads, x.head_stride}},
                  head_dim, cache.dtype);
  };
  check_side(".k", cache.k, head_dim_qk);
  check_side(".v", cache.v, head_dim_vo);
}

void check_scale(const ArgName& name, const Scale& scale, int num_kv_heads) {
  if (scale.data == nullptr) {
    if (scale.count != 0) refuse(ErrorCode::invalid_argument, name.field(".count"), scale.count, "0: there is no data");
    return;
  }
  check_pointer(name, scale.data, DType::f32);
  if (scale.count != 1 && scale.count != num_kv_heads) {
    refuse(ErrorCode::invalid_argument, name.field(".count"), scale.count,
           "1 or " + std::to_string(num_kv_heads) + " (num_kv_heads)");
  }
}

void check_heads(int num_kv_heads, int head_dim_qk, int head_dim_vo) {
  if (num_kv_heads < 1) refuse(ErrorCode::invalid_argument, "num_kv_heads", num_kv_heads, "at least 1");
  if (head_dim_qk < 1) refuse(ErrorCode::invalid_argument, "head_dim_qk", head_dim_qk, "at least 1");
  if (head_dim_vo < 1) refuse(ErrorCode::invalid_argument, "head_dim_vo", head_dim_vo, "at least 1");
}

void check_copies(const KvCache& cache, std::span<const PageCopy> copies) {
  for (std::size_t i = 0; i < copies.size(); ++i) {
    const PageCopy& copy = copies[i];
    const auto name = [i](const char* field) { return "copies[" + std::to_string(i) + "]." + field; };
    const std::string pages = "a page in [0, " + std::to_string(cache.num_pages) + ")";
    if (copy.src < 0 || copy.src >= cache.num_pages) {
      refuse(ErrorCode::invalid_argument, name("src"), copy.src, pages);
    }
    if (copy.dst < 0 || copy.dst >= cache.num_pages) {
      refuse(ErrorCode::invalid_argument, name("dst"), copy.dst, pages);
    }
    if (copy.src == copy.dst) {
      refuse(ErrorCode::invalid_argument, name("dst"), copy.dst, "a page other than src");
    }
    if (copy.num_tokens < 0 || copy.num_tokens > cache.page_size) {
      refuse(ErrorCode::invalid_argument, name("num_tokens"), copy.num_tokens,
             "0 to page_size = " + std::to_string(cache.page_size));
    }
  }
}

}  // namespace headwater::cpu
