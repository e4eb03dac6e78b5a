// One owned attention call; see step.h.
#include "bench/step.h"

#include <fmt/format.h>

#include <cstring>

#include "bench/probe.h"

namespace headwater::bench {

Step::Step(Planner& planner, const AttentionShape& shape, const PagedForest& paged, const PlanOptions& options,
           std::optional<Isa> isa)
    : shape_(shape), plan_(planner.plan(shape, paged.batch(), options)), isa_(isa), rows_(paged.num_rows()) {
  const auto count = [&](int head_dim) { return static_cast<std::size_t>(rows_ * shape_.num_qo_heads * head_dim); };
  query_ = Buffer(count(shape.head_dim_qk) * size_of(shape.q_dtype));
  fill_normal(query_.data(), shape.q_dtype, count(shape.head_dim_qk), 1.0F, 29);
  out_bytes_ = count(shape.head_dim_vo) * size_of(shape.out_dtype);
  lse_bytes_ = count(1) * sizeof(float);
  out_ = Buffer(out_bytes_);
  lse_ = Buffer(lse_bytes_);
  workspace_ = Buffer(plan_.workspace_size());
}

void Step::poison() {
  std::memset(out_.data(), 0xFF, out_bytes_);  // NaN in every type
  std::memset(lse_.data(), 0xFF, lse_bytes_);
}

ConstRowsView Step::query() const {
  return {query_.data(), shape_.q_dtype, static_cast<std::int64_t>(shape_.num_qo_heads) * shape_.head_dim_qk,
          shape_.head_dim_qk};
}

RowsView Step::out() const {
  return {out_.data(), shape_.out_dtype, static_cast<std::int64_t>(shape_.num_qo_heads) * shape_.head_dim_vo,
          shape_.head_dim_vo};
}

LseView Step::lse() const {
  return {reinterpret_cast<float*>(lse_.data()), shape_.num_qo_heads, 1, LseBase::two};
}

double Step::run(const KvCache& kv, Executor& executor) {
  cpu::RunArgs args;
  args.q = query();
  args.kv = {&kv, 1};
  args.out = out();
  args.lse = lse();
  args.workspace = {workspace_.data(), plan_.workspace_size()};
  args.isa = isa_;
  const double start = now();
  outcome_ = cpu::run(plan_, args, executor);
  const double seconds = now() - start;
  const PlanStats& planned = plan_.stats();
  if (outcome_.path != planned.path || outcome_.kv_bytes_read != planned.kv_bytes_read ||
      (isa_ && outcome_.isa != *isa_)) {
    throw Error(ErrorCode::internal,
                fmt::format("dispatch proof: planned path {} with {} bytes of KV, got path {} ({}) with {} bytes",
                            name_of(planned.path), planned.kv_bytes_read, name_of(outcome_.path), name_of(outcome_.isa),
                            outcome_.kv_bytes_read));
  }
  return seconds;
}

}  // namespace headwater::bench
