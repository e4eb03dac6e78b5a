// See step_planner.h.
#include "engine/step_planner.h"

#include <utility>

namespace headwater::engine {

StepPlanner::StepPlanner(const AttentionShape& shape, const PlanOptions& options, const DeviceModel& device,
                         int page_size, std::int32_t num_pages)
    : shape_(shape), options_(options), page_size_(page_size), num_pages_(num_pages), planner_(device) {}

/// A sample is the same request as before if it had one row, has one row, and its table has only grown. Anything else
/// counts as a request that left and another that joined. Samples that stay keep their order.
void StepPlanner::find_changes(const StepBatch& batch) {
  grown_.clear();
  joined_.clear();
  left_.clear();
  std::size_t old = 0;
  for (std::size_t i = 0; i < batch.samples.size(); ++i) {
    const ScheduledSample& now = batch.samples[i];
    std::size_t match = old;
    while (match < members_.size() && members_[match].serial != now.sample->serial) ++match;
    const bool same =
        match < members_.size() && members_[match].num_rows == 1 && now.num_rows == 1 && !now.table_replaced;
    if (!same) {
      joined_.push_back(static_cast<std::int32_t>(i));
      continue;
    }
    for (; old < match; ++old) left_.push_back(static_cast<std::int32_t>(old));
    ++old;
    grown_.push_back(static_cast<std::int32_t>(i));
  }
  for (; old < members_.size(); ++old) left_.push_back(static_cast<std::int32_t>(old));
}

Batch StepPlanner::tables_of(const StepBatch& batch) const {
  Batch tables;
  tables.qo_indptr = batch.qo_indptr;
  tables.kv.indptr = batch.kv_indptr;
  tables.kv.indices = batch.kv_indices;
  tables.kv.last_page_len = batch.kv_last_page_len;
  tables.kv.page_size = page_size_;
  tables.kv.num_pages = num_pages_;
  return tables;
}

const Plan& StepPlanner::flat_plan(const StepBatch& batch) {
  PlanOptions options = options_;
  options.cascade = CascadeSwitch::off;
  return flat_ = planner_.plan(shape_, tables_of(batch), options);
}

const Plan& StepPlanner::plan(const StepBatch& batch) {
  const Batch tables = tables_of(batch);
  if (std::exchange(made_, false)) {  // after an error from nothing
    find_changes(batch);
    const Changes changes{grown_, joined_, left_};
    planner_.update(plan_, tables, &changes);
  } else {
    plan_ = planner_.plan(shape_, tables, options_);
  }
  made_ = true;
  members_.clear();
  for (const ScheduledSample& scheduled : batch.samples)
    members_.push_back({scheduled.sample->serial, scheduled.num_rows});
  return plan_;
}

}  // namespace headwater::engine
