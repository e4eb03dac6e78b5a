// Batch-invariant mode on the device: a plan's items cut at absolute multiples of the fixed chunk, a state for each
// chunk and row, merged in ascending position. What a row's states are then depends on what it sees alone, not on the
// plan.
//
// Unlike the CPU, which folds the chunks of a row's first item in registers, every state goes through memory: one
// arithmetic for all. A chunk's tokens lie in tiles from its start on, wherever the first visible one is.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan_data.h"

namespace headwater::cuda {

/// Keys of a tile of the many-rows kernel, which serves all items here.
inline constexpr std::int32_t kInvariantTokens = 64;

struct ChunkedPlan {
  /// All of one chunk, partial_begin >= 0. pos_begin, num_tokens and first_token count from the start of a tile on: the
  /// first leads[i] tokens are hidden, and of the pages counted so the first hidden_pages[i] are not in the plan's list
  /// but stand before page_begin.
  std::vector<detail::WorkItem> items;
  std::vector<std::int32_t> leads;
  std::vector<std::int32_t> hidden_pages;
  std::vector<std::int32_t> merge_rows;
  std::vector<std::int32_t> merge_indptr;
  std::vector<std::int32_t> merge_slots;
  std::int64_t num_partials = 0;

  /// `plan` must be a batch-invariant one.
  void cut(const detail::PlanData& plan);

 private:
  struct State {
    std::int32_t row;
    std::int32_t pos;
    std::int32_t slot;
  };
  std::vector<State> states_;
};

}  // namespace headwater::cuda
