// What the fault tests share: a short way to run one call flat and cascaded on every instruction-set level.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "headwater/plan.h"
#include "property/scenario.h"
#include "reference/call.h"

namespace headwater::faults {

inline constexpr AttentionShape kSmallF32{8, 2, 64, 64, DType::f32, DType::f32, DType::f32};
inline constexpr AttentionShape kSmallBf16{8, 2, 64, 64, DType::bf16, DType::bf16, DType::bf16};

/// Runs `tables` under policies flat and forest on every level with three workers and checks O, LSE, fences, path and
/// bytes; the forest arm must take `forest_path`.
inline void check_both_paths(const AttentionShape& shape, const reference::PageTables& tables, PlanOptions options = {},
                             const reference::CallOptions& call_options = {}, Path forest_path = Path::cascade) {
  ThreadPool pool(3);
  reference::Call call(shape, options, tables, call_options, 40'000);
  Planner planner(property::eager_model(32, 64));
  for (const Policy policy : {Policy::flat, Policy::forest}) {
    options.policy = policy;
    const Plan plan = planner.plan(shape, call.batch(), options);
    EXPECT_EQ(plan.stats().path, policy == Policy::flat ? Path::flat : forest_path) << plan.describe();
    for (const Isa isa : property::isas()) {
      EXPECT_EQ(call.run(plan, pool, isa).complaint, "") << name_of(policy) << ", " << name_of(isa);
    }
  }
}

/// The message of the Error that `action` throws; "" if it throws none.
template <class Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace headwater::faults
