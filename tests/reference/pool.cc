// See pool.h. A layout is nothing but four strides and the offset of V.
#include "reference/pool.h"

#include "reference/element.h"

namespace headwater::reference {

std::string_view name_of(Layout layout) {
  switch (layout) {
    case Layout::nhd:
      return "nhd";
    case Layout::hnd:
      return "hnd";
    case Layout::nhd_pair:
      return "nhd_pair";
    case Layout::hnd_pair:
      return "hnd_pair";
    case Layout::nhd_side:
      return "nhd_side";
    case Layout::hnd_side:
      return "hnd_side";
    case Layout::latent:
      return "latent";
  }
  return "?";
}

Pool::Pool(const AttentionShape& shape, std::int64_t num_pages, int page_size, Layout layout, std::int64_t padding)
    : shape_(shape), layout_(layout) {
  const std::int64_t heads = shape.num_kv_heads;
  const std::int64_t dk = shape.head_dim_qk;
  const std::int64_t dv = shape.head_dim_vo;
  const std::int64_t ps = page_size;
  const auto element = size_of(shape.kv_dtype);
  const bool head_major = layout == Layout::hnd || layout == Layout::hnd_pair || layout == Layout::hnd_side;
  const auto side = [&](std::int64_t width, std::int64_t page_stride) {
    PagedTensor tensor;
    tensor.page_stride = page_stride;
    tensor.token_stride = head_major ? width : heads * width;
    tensor.head_stride = head_major ? ps * width : width;
    return tensor;
  };
  const auto allocate = [&](std::int64_t elements) {
    return FencedBuffer(static_cast<std::size_t>(elements) * element, element);
  };
  std::int64_t v_offset = 0;
  switch (layout) {
    case Layout::nhd:
    case Layout::hnd:
      cache_.k = side(dk, ps * heads * dk + padding);
      cache_.v = side(dv, ps * heads * dv + padding);
      k_ = allocate(num_pages * cache_.k.page_stride);
      v_ = allocate(num_pages * cache_.v.page_stride);
      break;
    case Layout::nhd_pair:
    case Layout::hnd_pair:
      cache_.k = side(dk, ps * heads * (dk + dv) + padding);
      cache_.v = side(dv, ps * heads * (dk + dv) + padding);
      v_offset = ps * heads * dk;
      k_ = allocate(num_pages * cache_.k.page_stride);
      break;
    case Layout::nhd_side:
    case Layout::hnd_side:
      cache_.k = side(dk + dv, ps * heads * (dk + dv) + padding);
      cache_.v = cache_.k;
      v_offset = dk;
      k_ = allocate(num_pages * cache_.k.page_stride);
      break;
    case Layout::latent:
      cache_.k = side(dk, ps * heads * dk + padding);
      cache_.v = cache_.k;
      k_ = allocate(num_pages * cache_.k.page_stride);
      break;
  }
  cache_.k.data = k_.data();
  cache_.v.data =
      v_.size() > 0 ? v_.data() : static_cast<std::byte*>(k_.data()) + static_cast<std::size_t>(v_offset) * element;
  cache_.dtype = shape.kv_dtype;
  cache_.num_pages = num_pages;
  cache_.page_size = page_size;
}

void Pool::fill_token(Rng& rng, std::int32_t page, int offset, double spread) {
  for (int h = 0; h < shape_.num_kv_heads; ++h) {
    const auto at = [&](const PagedTensor& t) {
      return page * t.page_stride + offset * t.token_stride + h * t.head_stride;
    };
    for (int d = 0; d < shape_.head_dim_qk; ++d)
      store(cache_.dtype, cache_.k.data, at(cache_.k) + d, spread * rng.normal());
    if (layout_ == Layout::latent) continue;
    for (int d = 0; d < shape_.head_dim_vo; ++d) store(cache_.dtype, cache_.v.data, at(cache_.v) + d, rng.normal());
  }
}

void Pool::make_read_only() {
  k_.make_read_only();
  v_.make_read_only();
}

}  // namespace headwater::reference
