// Double-precision attention of sampled rows; see reference.h.
#include "bench/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace headwater::bench {
namespace {

struct RowResult {
  std::vector<double> out;
  double lse = -std::numeric_limits<double>::infinity();  ///< base 2
};

/// What changes the scores of a row and head.
struct Scores {
  std::int64_t window_left = -1;
  double soft_cap = 0;
  double slope = 0;
  const float* sink = nullptr;
};

/// One query row, one head: keys [0, length) of a request's pages, the last one the row's own position.
RowResult attend_row(const AttentionShape& shape, const PagedForest& paged, const KvCache& kv, const ConstRowsView& q,
                     std::size_t request, std::int64_t row, int head, std::int64_t length, const Scores& how) {
  const int kv_head = head / shape.group_size();
  std::vector<double> query(static_cast<std::size_t>(shape.head_dim_qk));
  for (int d = 0; d < shape.head_dim_qk; ++d) {
    query[static_cast<std::size_t>(d)] = load_element(q.data, q.dtype, row * q.row_stride + head * q.head_stride + d);
  }
  const double scale = 1.0 / std::sqrt(static_cast<double>(shape.head_dim_qk));
  const auto base = [&](const PagedTensor& side, std::int64_t position) {
    const std::int64_t page =
        paged.kv_indices[static_cast<std::size_t>(paged.kv_indptr[request] + position / paged.page_size)];
    return page * side.page_stride + position % paged.page_size * side.token_stride + kv_head * side.head_stride;
  };
  std::vector<double> scores(static_cast<std::size_t>(length));
  double largest = how.sink != nullptr ? double{*how.sink} : -std::numeric_limits<double>::infinity();
  const std::int64_t first = how.window_left < 0 ? 0 : std::max<std::int64_t>(0, length - 1 - how.window_left);
  for (std::int64_t p = first; p < length; ++p) {
    const std::int64_t at = base(kv.k, p);
    double score = 0;
    for (int d = 0; d < shape.head_dim_qk; ++d)
      score += query[static_cast<std::size_t>(d)] * load_element(kv.k.data, kv.dtype, at + d);
    score *= scale;
    if (how.soft_cap > 0) score = how.soft_cap * std::tanh(score / how.soft_cap);
    score += how.slope * static_cast<double>(p - (length - 1));
    scores[static_cast<std::size_t>(p)] = score;
    largest = std::max(largest, score);
  }
  RowResult result;
  result.out.assign(static_cast<std::size_t>(shape.head_dim_vo), 0.0);
  if (length == 0) return result;
  double sum = how.sink != nullptr ? std::exp(*how.sink - largest) : 0.0;
  for (std::int64_t p = first; p < length; ++p) {
    const double weight = std::exp(scores[static_cast<std::size_t>(p)] - largest);
    const std::int64_t at = base(kv.v, p);
    sum += weight;
    for (int d = 0; d < shape.head_dim_vo; ++d)
      result.out[static_cast<std::size_t>(d)] += weight * load_element(kv.v.data, kv.dtype, at + d);
  }
  for (double& value : result.out) value /= sum;
  result.lse = (largest + std::log(sum)) / std::log(2.0);
  return result;
}

}  // namespace

double tolerance(const AttentionShape& shape) {
  const auto has = [&](DType t) { return shape.q_dtype == t || shape.out_dtype == t || shape.kv_dtype == t; };
  if (shape.q_dtype == DType::f32 && shape.out_dtype == DType::f32 && size_of(shape.kv_dtype) == 2) return 5e-3;
  return has(DType::bf16) ? 2e-2 : has(DType::f16) ? 5e-3 : 2e-5;
}

ErrorSample compare_with_reference(const AttentionShape& shape, const PagedForest& paged, const KvCache& kv,
                                   const ConstRowsView& q, const ConstRowsView& out, const LseView& lse, int max_rows,
                                   const PlanOptions& options, const float* slopes, const float* sinks) {
  constexpr std::int64_t kMaxElements = 40'000'000;
  ErrorSample sample;
  double max_error = 0;
  double max_value = 0;
  std::int64_t elements = 0;
  const auto num_requests = static_cast<std::int64_t>(paged.qo_indptr.size()) - 1;
  const std::int64_t num_rows = paged.num_rows();
  const std::int64_t wanted = std::min<std::int64_t>(max_rows, num_rows);
  std::int64_t previous = -1;
  for (std::int64_t i = 0; i < wanted; ++i) {
    const std::int64_t row = wanted == 1 ? 0 : i * (num_rows - 1) / (wanted - 1);
    if (row == previous) continue;
    previous = row;
    const auto request = static_cast<std::size_t>(
        std::ranges::upper_bound(paged.qo_indptr, static_cast<std::int32_t>(row)) - paged.qo_indptr.begin() - 1);
    if (static_cast<std::int64_t>(request) >= num_requests) continue;
    const std::int64_t rows_of_request = paged.qo_indptr[request + 1] - paged.qo_indptr[request];
    const std::int64_t length = paged.num_tokens(request) - rows_of_request + (row - paged.qo_indptr[request]) + 1;
    for (int head = 0; head < shape.num_qo_heads; ++head) {
      if (sample.rows > 0 && elements > kMaxElements) break;
      elements += std::max<std::int64_t>(length, 0) * (shape.head_dim_qk + shape.head_dim_vo);
      const Scores how{options.window_left, options.logits_soft_cap, slopes != nullptr ? slopes[head] : 0.0,
                       sinks != nullptr ? sinks + head : nullptr};
      const RowResult expected =
          attend_row(shape, paged, kv, q, request, row, head, std::max<std::int64_t>(length, 0), how);
      for (int d = 0; d < shape.head_dim_vo; ++d) {
        const double got = load_element(out.data, out.dtype, row * out.row_stride + head * out.head_stride + d);
        const double error = std::fabs(got - expected.out[static_cast<std::size_t>(d)]);
        max_error = std::isnan(error) ? INFINITY : std::max(max_error, error);
        max_value = std::max(max_value, std::fabs(expected.out[static_cast<std::size_t>(d)]));
      }
      if (lse.data != nullptr && length > 0) {
        const double error = std::fabs(lse.data[row * lse.row_stride + head * lse.head_stride] - expected.lse);
        sample.max_lse_error = std::isnan(error) ? INFINITY : std::max(sample.max_lse_error, error);
      }
    }
    ++sample.rows;
  }
  sample.max_rel_error = max_value > 0 ? max_error / max_value : max_error;
  return sample;
}

}  // namespace headwater::bench
