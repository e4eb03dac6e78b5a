// The step's plan: made from nothing the first time, then updated with what changed (a decode step appends at most a
// page per request, so this costs microseconds). One plan serves every layer.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/scheduler.h"
#include "headwater/plan.h"

namespace headwater::engine {

class StepPlanner {
 public:
  StepPlanner(const AttentionShape& shape, const PlanOptions& options, const DeviceModel& device, int page_size,
              std::int32_t num_pages);

  /// Plan of a batch with at least one row; valid until the next call.
  const Plan& plan(const StepBatch& batch);
  /// A flat plan of the batch, made from nothing; last() stays as it is. Valid until the next call.
  const Plan& flat_plan(const StepBatch& batch);
  [[nodiscard]] const Plan& last() const noexcept { return plan_; }

 private:
  struct Member {
    std::int64_t serial;
    int num_rows;
  };
  void find_changes(const StepBatch& batch);
  [[nodiscard]] Batch tables_of(const StepBatch& batch) const;

  AttentionShape shape_;
  PlanOptions options_;
  int page_size_;
  std::int32_t num_pages_;
  Planner planner_;
  Plan plan_;
  Plan flat_;
  bool made_ = false;
  std::vector<Member> members_;  ///< of plan_
  std::vector<std::int32_t> grown_, joined_, left_;
};

}  // namespace headwater::engine
