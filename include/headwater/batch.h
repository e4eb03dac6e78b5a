// One step's requests: how many query rows each has and which pages hold its keys and values.
//
// A request's KV is a page table in CSR form. Entry i of request b covers the absolute positions
//   [(kv_start_page[b] + i) * page_size, ... + page_size), the last entry only kv_last_page_len[b] of them.
// Pages that several requests name at the same absolute position are shared; the planner finds that by comparing ids,
// never from contents or reference counts. All KV of a step must be appended before any attention of that step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace headwater {

/// Page tables of num_requests requests (or, in a Level, of its nodes). Non-owning; read only during plan/update.
struct PageTable {
  std::span<const std::int32_t> indptr;         ///< [B+1], in pages, indptr[0] = 0, non-decreasing
  std::span<const std::int32_t> indices;        ///< [>= indptr[B]]; ids in [0, num_pages)
  std::span<const std::int32_t> last_page_len;  ///< [B], 1..page_size; ignored where a request has no pages
  int page_size = 16;
  std::int64_t num_pages = 0;   ///< pages of the pool, for the range check of ids
  std::int32_t null_page = -1;  ///< an id that never counts as shared (vLLM: block 0); -1: none
};

/// One level of an explicitly given cascade (FlashInfer's form): node j serves the query rows
/// [qo_indptr[j], qo_indptr[j+1]); qo_indptr.back() is the number of rows at every level. A level's row ranges must lie
/// inside the row ranges of the level above. Partly filled pages inside a path are legal. The positions of a node's
/// tokens start where its parent's end. Level l reads KvCache l of RunArgs::kv.
struct Level {
  std::span<const std::int32_t> qo_indptr;  ///< [n+1]
  PageTable kv;
};

/// Either `qo_indptr` + `kv` (sharing is found), or `levels` (sharing is given; then the other members stay empty,
/// except qo_indptr, which defaults to that of the last level).
struct Batch {
  std::span<const std::int32_t> qo_indptr;          ///< [B+1] query row offsets, qo_indptr[0] = 0
  PageTable kv;                                     ///< B requests
  std::span<const std::int32_t> kv_start_page;      ///< [B] or empty (0): absolute page index of a table's first entry
  std::span<const std::int32_t> first_page_offset;  ///< [B] or empty (0): first visible token within the first page
  std::vector<Level> levels;                        ///< empty: find sharing in `kv`
};

/// What changed between the batch of the last plan and this one. Requests keep their index unless listed.
struct Changes {
  std::span<const std::int32_t> grown;   ///< requests whose length grew (their earlier ids are unchanged)
  std::span<const std::int32_t> joined;  ///< indices (in the new batch) that hold a new request
  std::span<const std::int32_t> left;    ///< indices (in the old batch) whose request is gone; later ones move up
};

}  // namespace headwater
