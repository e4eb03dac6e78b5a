// Attention over a paged KV cache in float64: the one reference that every back end is compared with.
//
// Written from the meaning of the interface alone and as plainly as can be: for each row, walk every token of its page
// table and ask a predicate whether the row sees it. Nothing is shared with the library but its plain structs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "headwater/batch.h"
#include "headwater/options.h"
#include "headwater/view.h"

namespace headwater::reference {

/// One attention call: what was planned and what was run.
struct Problem {
  AttentionShape shape;
  PlanOptions options;
  Batch batch;
  std::span<const KvCache> kv;
  ConstRowsView q;
  const float* alibi_slopes = nullptr;
  const float* sinks = nullptr;
  bool include_sink = true;
  Scale k_scale;
  Scale v_scale;
};

/// A token of a request: its absolute position and where its K and V lie.
struct Token {
  std::int64_t position = 0;
  int view = 0;
  std::int32_t page = 0;
  int offset = 0;  ///< within the page
};

/// A query row: its position and its request's tokens (an index into Rows::paths).
struct Row {
  std::int64_t position = 0;
  std::size_t path = 0;
};

struct Rows {
  std::vector<std::vector<Token>> paths;
  std::vector<Row> rows;
};

/// Walks the page tables (either form) of a batch.
Rows rows_of(const Batch& batch);

/// Whether a row at q_pos sees the key at k_pos.
bool sees(const PlanOptions& options, std::int64_t q_pos, std::int64_t k_pos);

struct Result {
  std::int64_t num_rows = 0;
  int num_heads = 0;
  int head_dim = 0;
  std::vector<double> o;    ///< [rows, heads, head_dim]
  std::vector<double> lse;  ///< [rows, heads], natural logarithm
};

/// The reference.
Result attend(const Problem& problem);

/// The same attention as a careless program would do it in the arithmetic of `type`: products summed in fp32 one after
/// the other, scores, probabilities and output rounded to `type`. Its error is the yardstick of the tolerance.
Result attend_naive(const Problem& problem, DType type);

/// Bytes of K and V of every distinct (view, page, token) that some row sees; and the same per request, summed (what a
/// flat pass over visible tokens reads at least).
struct VisibleBytes {
  std::int64_t distinct = 0;
  std::int64_t flat = 0;
};
VisibleBytes visible_bytes(const AttentionShape& shape, const PlanOptions& options, const Batch& batch);

}  // namespace headwater::reference
