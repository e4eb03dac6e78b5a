// One attention call with everything it needs, owned: plan, query, output, LSE, workspace. Its outcome is checked on
// every run.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "bench/paged.h"
#include "headwater/headwater.h"

namespace headwater::bench {

class Step {
 public:
  /// Plans `paged`; the query has unit variance.
  Step(Planner& planner, const AttentionShape& shape, const PagedForest& paged, const PlanOptions& options,
       std::optional<Isa> isa);

  /// Runs on `kv` and returns the seconds of cpu::run alone. Throws Error(internal) when the path, the instruction set
  /// or the bytes read are not those of the plan.
  double run(const KvCache& kv, Executor& executor);

  [[nodiscard]] Plan& plan() noexcept { return plan_; }
  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }
  [[nodiscard]] const cpu::RunOutcome& outcome() const noexcept { return outcome_; }
  [[nodiscard]] ConstRowsView query() const;
  [[nodiscard]] RowsView out() const;
  [[nodiscard]] LseView lse() const;
  [[nodiscard]] std::span<const std::byte> out_bytes() const noexcept { return {out_.data(), out_bytes_}; }
  [[nodiscard]] std::span<const std::byte> lse_bytes() const noexcept { return {lse_.data(), lse_bytes_}; }
  /// The output is overwritten with a pattern, so that a row that run does not write is noticed.
  void poison();

 private:
  AttentionShape shape_;
  Plan plan_;
  std::optional<Isa> isa_;
  std::int64_t rows_ = 0;
  Buffer query_, out_, lse_, workspace_;
  std::size_t out_bytes_ = 0;
  std::size_t lse_bytes_ = 0;
  cpu::RunOutcome outcome_;
};

}  // namespace headwater::bench
