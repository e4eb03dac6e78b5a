// Page tables for tests: owning twins of Batch, and random forests of requests.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "headwater/batch.h"
#include "reference/rng.h"

namespace headwater::reference {

/// Owns what a Batch views. The views stay valid as long as this object is neither changed nor destroyed.
struct PageTables {
  int page_size = 16;
  std::int64_t num_pages = 0;
  std::int32_t null_page = -1;
  std::vector<std::int32_t> qo_indptr{0};
  std::vector<std::int32_t> kv_indptr{0};
  std::vector<std::int32_t> kv_indices;
  std::vector<std::int32_t> last_page_len;
  std::vector<std::int32_t> kv_start_page;      ///< empty: all 0
  std::vector<std::int32_t> first_page_offset;  ///< empty: all 0

  [[nodiscard]] Batch batch() const;
  [[nodiscard]] int num_requests() const { return static_cast<int>(last_page_len.size()); }
  /// Appends a request. `pages` empty: no keys.
  void add(const std::vector<std::int32_t>& pages, int last_len, int num_rows = 1, int start_page = 0, int offset = 0);
};

/// One level of LevelTables.
struct LevelTable {
  int page_size = 16;
  std::int64_t num_pages = 0;
  std::vector<std::int32_t> qo_indptr{0};
  std::vector<std::int32_t> kv_indptr{0};
  std::vector<std::int32_t> kv_indices;
  std::vector<std::int32_t> last_page_len;
};

/// Owns a Batch in the form of explicit levels.
struct LevelTables {
  std::vector<LevelTable> levels;
  [[nodiscard]] Batch batch() const;
};

struct ForestOptions {
  int page_size = 16;
  int max_requests = 10;
  int max_pages = 12;            ///< of a request
  int max_rows = 1;              ///< query rows of a request
  bool windows = false;          ///< kv_start_page and first_page_offset
  bool null_page = false;        ///< page 0 is the null page and stands left of windows (see stale_left)
  std::int64_t stale_left = -1;  ///< >= 0: pages wholly left of (kv_len - qo_len - stale_left) hold stale ids
};

/// Requests that share pages in every way: prefixes of random depth, shared partly filled last pages, duplicates,
/// sharing again after a divergence, the same page at different positions, empty requests, unused ids at the end of the
/// index array.
PageTables random_forest(Rng& rng, const ForestOptions& options);

/// Nested levels with partly filled pages anywhere, empty nodes included.
LevelTables random_levels(Rng& rng, int page_size, int max_rows);

/// The tree of the notation `nodes per level | tokens per node per level`: child j's parent is node
/// floor(j * N_{i-1} / N_i); leaves are requests of one row. Nodes' tokens are multiples of the page size except the
/// last level's.
PageTables tree(const std::vector<int>& nodes, const std::vector<int>& tokens, int page_size, int rows_per_leaf = 1);

/// For messages: the tables in a few lines.
std::string to_string(const PageTables& tables);

}  // namespace headwater::reference
