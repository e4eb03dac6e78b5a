// See call.h.
#include "reference/call.h"

#include <cmath>
#include <cstring>
#include <set>
#include <sstream>

#include "reference/element.h"

namespace headwater::reference {
namespace {

/// Strides of a [rows, heads, dim] tensor whose heads and rows have `padding` unused elements after them.
template <class View>
void set_strides(View& view, int heads, int dim, std::int64_t padding) {
  view.head_stride = dim + padding;
  view.row_stride = heads * view.head_stride + padding;
}

std::vector<float> scales(Rng& rng, int mode, int kv_heads) {
  std::vector<float> values(static_cast<std::size_t>(mode == 0 ? 0 : mode == 1 ? 1 : kv_heads));
  for (float& v : values) v = static_cast<float>(0.5 + rng.uniform());
  return values;
}

/// Whether all bytes of `buffer` that belong to no (row, head) are still poisoned.
bool gaps_intact(const FencedBuffer& buffer, const RowsView& view, std::int64_t rows, int heads, int dim) {
  const auto element = static_cast<std::int64_t>(size_of(view.dtype));
  const auto* bytes = static_cast<const unsigned char*>(buffer.data());
  std::vector<bool> owned(buffer.size(), false);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int h = 0; h < heads; ++h) {
      const auto begin = (r * view.row_stride + h * view.head_stride) * element;
      std::fill_n(owned.begin() + begin, dim * element, true);
    }
  }
  for (std::size_t i = 0; i < buffer.size(); ++i) {
    if (!owned[i] && bytes[i] != kPoisonByte) return false;
  }
  return buffer.intact();
}

}  // namespace

Call::Call(const AttentionShape& shape, const PlanOptions& options, PageTables tables, const CallOptions& call,
           std::uint64_t seed)
    : tables_(std::move(tables)), call_(call) {
  problem_.shape = shape;
  problem_.options = options;
  problem_.batch = tables_.batch();
  prepare({tables_.num_pages}, {tables_.page_size}, seed);
}

Call::Call(const AttentionShape& shape, const PlanOptions& options, LevelTables tables, const CallOptions& call,
           std::uint64_t seed)
    : levels_(std::move(tables)), call_(call) {
  problem_.shape = shape;
  problem_.options = options;
  problem_.batch = levels_.batch();
  std::vector<std::int64_t> num_pages;
  std::vector<int> page_sizes;
  for (const LevelTable& level : levels_.levels) {
    num_pages.push_back(level.num_pages);
    page_sizes.push_back(level.page_size);
  }
  prepare(num_pages, page_sizes, seed);
}

void Call::prepare(const std::vector<std::int64_t>& num_pages, const std::vector<int>& page_sizes, std::uint64_t seed) {
  Rng rng(seed);
  const AttentionShape& shape = problem_.shape;
  for (std::size_t view = 0; view < num_pages.size(); ++view) {
    pools_.emplace_back(shape, num_pages[view], page_sizes[view], call_.layout, call_.page_padding);
  }
  const Rows rows = rows_of(problem_.batch);
  num_rows_ = static_cast<std::int64_t>(rows.rows.size());
  std::set<std::pair<int, std::pair<std::int32_t, int>>> written;
  for (const Row& row : rows.rows) {
    for (const Token& token : rows.paths[row.path]) {
      if (!sees(problem_.options, row.position, token.position)) continue;
      if (!written.insert({token.view, {token.page, token.offset}}).second) continue;
      pools_[static_cast<std::size_t>(token.view)].fill_token(rng, token.page, token.offset, call_.key_spread);
    }
  }
  for (Pool& pool : pools_) {
    pool.make_read_only();
    caches_.push_back(pool.cache());
  }
  problem_.kv = caches_;

  problem_.q.dtype = shape.q_dtype;
  set_strides(problem_.q, shape.num_qo_heads, shape.head_dim_qk, call_.row_padding);
  q_ = FencedBuffer(static_cast<std::size_t>(num_rows_ * problem_.q.row_stride) * size_of(shape.q_dtype),
                    size_of(shape.q_dtype));
  problem_.q.data = q_.data();
  for (std::int64_t r = 0; r < num_rows_; ++r) {
    for (int h = 0; h < shape.num_qo_heads; ++h) {
      for (int d = 0; d < shape.head_dim_qk; ++d) {
        store(shape.q_dtype, q_.data(), r * problem_.q.row_stride + h * problem_.q.head_stride + d, rng.normal());
      }
    }
  }
  q_.make_read_only();

  for (int h = 0; h < shape.num_qo_heads; ++h) {
    slopes_.push_back(static_cast<float>(std::exp2(-8.0 * (h + 1) / shape.num_qo_heads)));
    sinks_.push_back(static_cast<float>(2.0 * rng.normal()));
  }
  problem_.alibi_slopes = problem_.options.alibi ? slopes_.data() : nullptr;
  problem_.sinks = problem_.options.sinks ? sinks_.data() : nullptr;
  problem_.include_sink = call_.include_sink;
  k_scales_ = scales(rng, call_.k_scales, shape.num_kv_heads);
  v_scales_ = scales(rng, call_.v_scales, shape.num_kv_heads);
  if (!k_scales_.empty()) problem_.k_scale = {k_scales_.data(), static_cast<int>(k_scales_.size())};
  if (!v_scales_.empty()) problem_.v_scale = {v_scales_.data(), static_cast<int>(v_scales_.size())};
}

const Result& Call::expected() {
  if (!expected_) {
    expected_ = attend(problem_);
    if (call_.check_naive) naive_ = attend_naive(problem_, tolerance_of(problem_.shape).naive);
  }
  return *expected_;
}

cpu::RunArgs Call::args() const {
  cpu::RunArgs args;
  args.q = problem_.q;
  args.kv = problem_.kv;
  args.alibi_slopes = problem_.alibi_slopes;
  args.sinks = problem_.sinks;
  args.include_sink = problem_.include_sink;
  args.k_scale = problem_.k_scale;
  args.v_scale = problem_.v_scale;
  return args;
}

Ran Call::run(const Plan& plan, Executor& executor, std::optional<Isa> isa) {
  const auto on_cpu = [&](const Plan& p, const cpu::RunArgs& args) {
    cpu::RunArgs with_isa = args;
    with_isa.isa = isa;
    return cpu::run(p, with_isa, executor);
  };
  Ran ran = run_by(on_cpu, plan, plan.workspace_size());
  if (isa && ran.outcome.isa != *isa) {
    ran.complaint += "isa " + std::string(headwater::name_of(ran.outcome.isa)) + ", forced " +
                     std::string(headwater::name_of(*isa)) + "; ";
  }
  return ran;
}

Ran Call::run_by(const Runner& runner, const Plan& plan, std::size_t workspace_bytes) {
  const AttentionShape& shape = problem_.shape;
  const int heads = shape.num_qo_heads;
  const int dim = shape.head_dim_vo;
  cpu::RunArgs args = this->args();
  args.out.dtype = shape.out_dtype;
  set_strides(args.out, heads, dim, call_.row_padding);
  const std::size_t element = size_of(shape.out_dtype);
  FencedBuffer out(static_cast<std::size_t>(num_rows_ * args.out.row_stride) * element, element);
  args.out.data = out.data();
  FencedBuffer lse(static_cast<std::size_t>(num_rows_ * heads) * sizeof(float), sizeof(float));
  args.lse = {static_cast<float*>(lse.data()), heads, 1, call_.lse_base};
  if (call_.lse_head_major) {
    args.lse.row_stride = 1;
    args.lse.head_stride = num_rows_;
  }
  FencedBuffer workspace(workspace_bytes, kWorkspaceAlignment);
  args.workspace = {workspace.data(), workspace.size()};

  Ran ran;
  std::ostringstream complaint;
  ran.outcome = runner(plan, args);
  if (!workspace.intact()) complaint << "workspace: bytes outside were written; ";
  if (!gaps_intact(out, args.out, num_rows_, heads, dim)) complaint << "out: bytes outside were written; ";
  if (!lse.intact()) complaint << "lse: bytes outside were written; ";
  const PlanStats& stats = plan.stats();
  if (ran.outcome.path != stats.path) {
    complaint << "path " << headwater::name_of(ran.outcome.path) << ", planned " << headwater::name_of(stats.path)
              << "; ";
  }
  if (ran.outcome.kv_bytes_read != stats.kv_bytes_read) {
    complaint << "kv_bytes_read " << ran.outcome.kv_bytes_read << ", planned " << stats.kv_bytes_read << "; ";
  }
  if (ran.outcome.items != stats.num_items) {
    complaint << "items " << ran.outcome.items << ", planned " << stats.num_items << "; ";
  }
  const Result& reference = expected();
  ran.difference = compare(shape, reference, naive_ ? &*naive_ : nullptr,
                           {args.out.data, args.out.dtype, args.out.row_stride, args.out.head_stride},
                           {args.lse.data, args.lse.row_stride, args.lse.head_stride, args.lse.base});
  complaint << ran.difference.complaint;
  ran.complaint = complaint.str();
  for (std::int64_t r = 0; r < num_rows_; ++r) {
    for (int h = 0; h < heads; ++h) {
      const auto* row = static_cast<const unsigned char*>(args.out.data) +
                        static_cast<std::size_t>(r * args.out.row_stride + h * args.out.head_stride) * element;
      ran.out.insert(ran.out.end(), row, row + static_cast<std::size_t>(dim) * element);
      ran.lse.push_back(args.lse.data[r * args.lse.row_stride + h * args.lse.head_stride]);
    }
  }
  return ran;
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_bf16}) {
    if (isa <= cpu::detect_isa()) isas.push_back(isa);
  }
  return isas;
}

}  // namespace headwater::reference
