// Memory of the KV cache: one pool for all layers, HND inside a page ([kv_heads, page_size, head_dim]: the keys of one
// head are contiguous, which is how attention streams them). Huge pages are asked for; memory is taken from the system
// as pages are first written. Layout: [layers][K, V][pages][kv_heads][page_size][head_dim].
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/huge_buffer.h"
#include "headwater/view.h"

namespace headwater::engine {

struct KvLayout {
  int num_layers = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int page_size = 16;
  DType dtype = DType::bf16;

  /// Bytes of K and V of one page in all layers.
  [[nodiscard]] std::int64_t page_bytes() const noexcept {
    return std::int64_t{2} * num_layers * num_kv_heads * head_dim * page_size *
           static_cast<std::int64_t>(size_of(dtype));
  }
};

class KvStorage {
 public:
  KvStorage(const KvLayout& layout, std::int32_t num_pages);

  [[nodiscard]] const KvCache& layer(int index) const { return layers_[static_cast<std::size_t>(index)]; }
  [[nodiscard]] const KvLayout& layout() const noexcept { return layout_; }

 private:
  KvLayout layout_;
  HugeBuffer buffer_;
  std::vector<KvCache> layers_;
};

}  // namespace headwater::engine
