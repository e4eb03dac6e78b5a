// See kv_storage.h.
#include "engine/kv_storage.h"

namespace headwater::engine {

KvStorage::KvStorage(const KvLayout& layout, std::int32_t num_pages)
    : layout_(layout), buffer_(static_cast<std::size_t>(layout.page_bytes()) * static_cast<std::size_t>(num_pages)) {
  const std::int64_t head_stride = std::int64_t{layout.page_size} * layout.head_dim;
  const std::int64_t page_stride = head_stride * layout.num_kv_heads;
  const std::size_t side_bytes =
      static_cast<std::size_t>(page_stride) * static_cast<std::size_t>(num_pages) * size_of(layout.dtype);
  std::byte* next = buffer_.data();
  const auto side = [&] {
    const PagedTensor tensor{next, page_stride, layout.head_dim, head_stride};
    next += side_bytes;
    return tensor;
  };
  for (int i = 0; i < layout.num_layers; ++i) {
    KvCache& cache = layers_.emplace_back();
    cache.k = side();
    cache.v = side();
    cache.dtype = layout.dtype;
    cache.num_pages = num_pages;
    cache.page_size = layout.page_size;
  }
}

}  // namespace headwater::engine
