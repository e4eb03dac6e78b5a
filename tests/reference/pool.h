// Paged KV pools for tests, in every layout that engines use, inside fenced memory full of NaNs.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "headwater/options.h"
#include "headwater/view.h"
#include "reference/memory.h"
#include "reference/rng.h"

namespace headwater::reference {

enum class Layout : std::uint8_t {
  nhd,       ///< K and V each [pages, page_size, Hkv, D]
  hnd,       ///< K and V each [pages, Hkv, page_size, D]
  nhd_pair,  ///< [pages, 2, page_size, Hkv, D]
  hnd_pair,  ///< [pages, 2, Hkv, page_size, D]
  nhd_side,  ///< [pages, page_size, Hkv, Dqk + Dvo]: K and V side by side
  hnd_side,  ///< [pages, Hkv, page_size, Dqk + Dvo]
  latent,    ///< [pages, page_size, Hkv, Dqk], V a view of K's first Dvo elements (MLA)
};
inline constexpr std::array kLayouts{Layout::nhd,      Layout::hnd,      Layout::nhd_pair,
                                     Layout::hnd_pair, Layout::nhd_side, Layout::hnd_side};
std::string_view name_of(Layout layout);

/// Owns the memory of one KvCache. Everything is NaN until written.
class Pool {
 public:
  /// `padding`: unused elements between pages. Layout `latent` needs head_dim_vo <= head_dim_qk.
  Pool(const AttentionShape& shape, std::int64_t num_pages, int page_size, Layout layout, std::int64_t padding = 0);

  [[nodiscard]] const KvCache& cache() const noexcept { return cache_; }
  /// Writes K and V of one token, all heads: normal deviates times `spread` (K) and 1 (V).
  void fill_token(Rng& rng, std::int32_t page, int offset, double spread = 1.0);
  void make_read_only();
  [[nodiscard]] bool intact() const { return k_.intact() && v_.intact(); }

 private:
  AttentionShape shape_;
  Layout layout_;
  FencedBuffer k_;
  FencedBuffer v_;  ///< empty where K and V share one buffer
  KvCache cache_;
};

}  // namespace headwater::reference
