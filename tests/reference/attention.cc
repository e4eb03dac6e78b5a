// See attention.h. K and V of a path are decoded once per request and KV head; then every row is a dot product, a
// softmax and a weighted sum, as in the textbook.
#include "reference/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <tuple>

#include "reference/element.h"

namespace headwater::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Appends the tokens of one table row; the first covers absolute position `position` (of the start of its page).
void append_tokens(const PageTable& table, std::size_t entry, int view, std::int64_t position, int skip,
                   std::vector<Token>& path) {
  const std::int32_t begin = table.indptr[entry];
  const std::int32_t end = table.indptr[entry + 1];
  for (std::int32_t i = begin; i < end; ++i) {
    const int filled = i + 1 == end ? table.last_page_len[entry] : table.page_size;
    for (int t = 0; t < filled; ++t) {
      if (i == begin && t < skip) continue;
      path.push_back({position + static_cast<std::int64_t>(i - begin) * table.page_size + t, view,
                      table.indices[static_cast<std::size_t>(i)], t});
    }
  }
}

/// Tokens of a table row, the first page counted in full.
std::int64_t length_of(const PageTable& table, std::size_t entry) {
  const std::int64_t pages = table.indptr[entry + 1] - table.indptr[entry];
  return pages == 0 ? 0 : (pages - 1) * table.page_size + table.last_page_len[entry];
}

Rows rows_of_tables(const Batch& batch) {
  Rows result;
  for (std::size_t b = 0; b + 1 < batch.qo_indptr.size(); ++b) {
    const std::int64_t start =
        batch.kv_start_page.empty() ? 0 : static_cast<std::int64_t>(batch.kv_start_page[b]) * batch.kv.page_size;
    const int skip = batch.first_page_offset.empty() ? 0 : batch.first_page_offset[b];
    const std::int64_t length = length_of(batch.kv, b);
    const std::int64_t kv_len = length == 0 ? 0 : start + length;
    std::vector<Token> path;
    append_tokens(batch.kv, b, 0, start, skip, path);
    result.paths.push_back(std::move(path));
    const std::int32_t qo_len = batch.qo_indptr[b + 1] - batch.qo_indptr[b];
    for (std::int32_t i = 0; i < qo_len; ++i) result.rows.push_back({kv_len - qo_len + i, b});
  }
  return result;
}

Rows rows_of_levels(const Batch& batch) {
  Rows result;
  const auto& requests = batch.qo_indptr.empty() ? batch.levels.back().qo_indptr : batch.qo_indptr;
  for (std::size_t b = 0; b + 1 < requests.size(); ++b) {
    const std::int32_t first_row = requests[b];
    const std::int32_t qo_len = requests[b + 1] - first_row;
    std::vector<Token> path;
    std::int64_t kv_len = 0;
    for (std::size_t level = 0; level < batch.levels.size() && qo_len > 0; ++level) {
      const Level& nodes = batch.levels[level];
      for (std::size_t j = 0; j + 1 < nodes.qo_indptr.size(); ++j) {
        if (first_row < nodes.qo_indptr[j] || first_row >= nodes.qo_indptr[j + 1]) continue;
        append_tokens(nodes.kv, j, static_cast<int>(level), kv_len, 0, path);
        kv_len += length_of(nodes.kv, j);
      }
    }
    result.paths.push_back(std::move(path));
    for (std::int32_t i = 0; i < qo_len; ++i) result.rows.push_back({kv_len - qo_len + i, b});
  }
  return result;
}

std::int64_t floor_div(std::int64_t a, std::int64_t b) {
  return a >= 0 ? a / b : -((-a + b - 1) / b);
}

double scale_of(const Scale& scale, int kv_head) {
  if (scale.data == nullptr) return 1.0;
  return scale.data[scale.count == 1 ? 0 : kv_head];
}

/// K or V of a path for one KV head, [tokens, head_dim].
std::vector<double> decode(const std::vector<Token>& path, std::span<const KvCache> kv, bool value, int kv_head,
                           int head_dim) {
  std::vector<double> out(path.size() * static_cast<std::size_t>(head_dim));
  std::size_t at = 0;
  for (const Token& token : path) {
    const KvCache& cache = kv[static_cast<std::size_t>(token.view)];
    if (token.page < 0 || token.page >= cache.num_pages) {  // a stale id; no row may see it
      std::fill_n(out.begin() + static_cast<std::ptrdiff_t>(at), head_dim, std::numeric_limits<double>::quiet_NaN());
      at += static_cast<std::size_t>(head_dim);
      continue;
    }
    const PagedTensor& side = value ? cache.v : cache.k;
    const std::int64_t base =
        token.page * side.page_stride + token.offset * side.token_stride + kv_head * side.head_stride;
    for (int d = 0; d < head_dim; ++d) out[at++] = load(cache.dtype, side.data, base + d);
  }
  return out;
}

/// The two ways of computing differ only here: exact keeps float64, otherwise fp32 sums and roundings to `type`.
struct Arithmetic {
  bool exact = true;
  DType type = DType::f32;

  [[nodiscard]] double rounded(double x) const { return exact ? x : round_to(type, static_cast<float>(x)); }
  [[nodiscard]] double dot(const double* a, const double* b, int n) const {
    if (exact) {
      double sum = 0.0;
      for (int i = 0; i < n; ++i) sum += a[i] * b[i];
      return sum;
    }
    float sum = 0.0F;
    for (int i = 0; i < n; ++i) sum += static_cast<float>(a[i]) * static_cast<float>(b[i]);
    return sum;
  }
};

/// One query row of one head. `scores` holds a score per visible token, `visible` their indices in the path.
void attend_row(const Problem& problem, const Arithmetic& arithmetic, int head, const std::vector<double>& scores,
                const std::vector<std::size_t>& visible, const std::vector<double>& values, double v_scale, double* o,
                double* lse) {
  const int dim = problem.shape.head_dim_vo;
  const bool with_sink = problem.options.sinks && problem.sinks != nullptr && problem.include_sink;
  const double sink = with_sink ? static_cast<double>(problem.sinks[head]) : -kInfinity;
  double largest = sink;
  for (const double s : scores) largest = std::max(largest, s);
  std::fill(o, o + dim, 0.0);
  *lse = -kInfinity;
  if (largest == -kInfinity) return;
  double denominator = std::exp(sink - largest);
  for (const double s : scores) denominator += std::exp(s - largest);
  for (std::size_t i = 0; i < visible.size(); ++i) {
    const double p = arithmetic.rounded(std::exp(scores[i] - largest) / denominator);
    const double* v = values.data() + visible[i] * static_cast<std::size_t>(dim);
    for (int d = 0; d < dim; ++d) {
      o[d] += p * v[d];
      if (!arithmetic.exact) o[d] = static_cast<float>(o[d]);
    }
  }
  for (int d = 0; d < dim; ++d) o[d] = arithmetic.rounded(o[d] * v_scale);
  *lse = largest + std::log(denominator);
}

Result attend_with(const Problem& problem, const Arithmetic& arithmetic) {
  const AttentionShape& shape = problem.shape;
  const PlanOptions& options = problem.options;
  const Rows table = rows_of(problem.batch);
  const int group = shape.num_qo_heads / shape.num_kv_heads;
  const double sm_scale = options.sm_scale != 0.0F ? static_cast<double>(options.sm_scale)
                                                   : 1.0 / std::sqrt(static_cast<double>(shape.head_dim_qk));
  Result result;
  result.num_rows = static_cast<std::int64_t>(table.rows.size());
  result.num_heads = shape.num_qo_heads;
  result.head_dim = shape.head_dim_vo;
  const auto heads = static_cast<std::size_t>(shape.num_qo_heads);
  result.o.resize(table.rows.size() * heads * static_cast<std::size_t>(shape.head_dim_vo));
  result.lse.resize(table.rows.size() * heads);

  std::vector<double> query(static_cast<std::size_t>(shape.head_dim_qk));
  std::vector<double> scores;
  std::vector<std::size_t> visible;
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    const double k_scale = scale_of(problem.k_scale, kv_head);
    std::size_t decoded = table.paths.size();
    std::vector<double> keys;
    std::vector<double> values;
    for (std::size_t r = 0; r < table.rows.size(); ++r) {
      const Row& row = table.rows[r];
      const std::vector<Token>& path = table.paths[row.path];
      if (decoded != row.path) {
        keys = decode(path, problem.kv, false, kv_head, shape.head_dim_qk);
        values = decode(path, problem.kv, true, kv_head, shape.head_dim_vo);
        decoded = row.path;
      }
      visible.clear();
      for (std::size_t i = 0; i < path.size(); ++i) {
        if (sees(options, row.position, path[i].position)) visible.push_back(i);
      }
      for (int slot = 0; slot < group; ++slot) {
        const int head = kv_head * group + slot;
        const std::int64_t base = static_cast<std::int64_t>(r) * problem.q.row_stride + head * problem.q.head_stride;
        for (int d = 0; d < shape.head_dim_qk; ++d) {
          query[static_cast<std::size_t>(d)] = load(problem.q.dtype, problem.q.data, base + d);
        }
        scores.clear();
        for (const std::size_t i : visible) {
          const double* key = keys.data() + i * static_cast<std::size_t>(shape.head_dim_qk);
          double s = sm_scale * k_scale * arithmetic.dot(query.data(), key, shape.head_dim_qk);
          if (options.logits_soft_cap > 0.0F) {
            const double cap = options.logits_soft_cap;
            s = cap * std::tanh(s / cap);
          }
          if (options.alibi) {
            s += static_cast<double>(problem.alibi_slopes[head]) * static_cast<double>(path[i].position - row.position);
          }
          scores.push_back(arithmetic.rounded(s));
        }
        const std::size_t at = r * heads + static_cast<std::size_t>(head);
        attend_row(problem, arithmetic, head, scores, visible, values, scale_of(problem.v_scale, kv_head),
                   result.o.data() + at * static_cast<std::size_t>(shape.head_dim_vo), result.lse.data() + at);
      }
    }
  }
  return result;
}

}  // namespace

Rows rows_of(const Batch& batch) {
  return batch.levels.empty() ? rows_of_tables(batch) : rows_of_levels(batch);
}

bool sees(const PlanOptions& options, std::int64_t q_pos, std::int64_t k_pos) {
  if (options.causal && k_pos > q_pos) return false;
  if (k_pos < options.num_sink_tokens) return true;
  if (options.window_left >= 0 && k_pos < q_pos - options.window_left) return false;
  if (options.local_chunk > 0 && floor_div(k_pos, options.local_chunk) != floor_div(q_pos, options.local_chunk)) {
    return false;
  }
  return true;
}

Result attend(const Problem& problem) {
  return attend_with(problem, {});
}

Result attend_naive(const Problem& problem, DType type) {
  return attend_with(problem, {false, type});
}

VisibleBytes visible_bytes(const AttentionShape& shape, const PlanOptions& options, const Batch& batch) {
  const Rows table = rows_of(batch);
  const std::int64_t token_bytes = static_cast<std::int64_t>(shape.head_dim_qk + shape.head_dim_vo) *
                                   shape.num_kv_heads * static_cast<std::int64_t>(size_of(shape.kv_dtype));
  std::set<std::tuple<int, std::int32_t, int>> distinct;
  std::set<std::pair<std::size_t, std::size_t>> per_request;
  for (const Row& row : table.rows) {
    const std::vector<Token>& path = table.paths[row.path];
    for (std::size_t i = 0; i < path.size(); ++i) {
      if (!sees(options, row.position, path[i].position)) continue;
      distinct.insert({path[i].view, path[i].page, path[i].offset});
      per_request.insert({row.path, i});
    }
  }
  return {static_cast<std::int64_t>(distinct.size()) * token_bytes,
          static_cast<std::int64_t>(per_request.size()) * token_bytes};
}

}  // namespace headwater::reference
