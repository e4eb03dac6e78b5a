// What the fault tests of the CUDA back end share. Their host part (plans, paths, refusals) runs everywhere; the runs
// need a GPU. A test ends in HEADWATER_NEEDS_GPU(), so that it is counted as skipped where they were left out.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "cuda/device_runner.h"
#include "headwater/error.h"
#include "headwater/plan.h"
#include "plan/plan_data.h"
#include "property/scenario.h"
#include "reference/call.h"

namespace headwater::cuda_test {

inline constexpr AttentionShape kSmallF16{8, 2, 64, 64, DType::f16, DType::f16, DType::f16};
inline constexpr AttentionShape kSmallF32Out{8, 2, 64, 64, DType::f16, DType::f16, DType::f32};

inline bool have_gpu() {
  return cuda::num_devices() > 0;
}

inline void ok(cudaError_t status) {
  ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
}

/// Whether this build has a kernel for a shape.
inline bool in_build(const AttentionShape& shape) {
  try {
    cuda::check_supported(shape, {}, {});
  } catch (const Error&) {
    return false;
  }
  return true;
}

/// Plans under which sharing always pays and spans are cut into many pieces.
inline Planner eager_planner() {
  return Planner(property::eager_model(128, 64));
}

/// Runs `tables` under policies flat and forest and checks O, LSE, fences, path and bytes; the forest arm must take
/// `forest_path`. Shapes that this build has no kernel for are planned, not run.
inline void check_both_paths(const AttentionShape& shape, const reference::PageTables& tables, PlanOptions options = {},
                             const reference::CallOptions& call_options = {}, Path forest_path = Path::cascade) {
  reference::Call call(shape, options, tables, call_options, 50'000);
  Planner planner = eager_planner();
  for (const Policy policy : {Policy::flat, Policy::forest}) {
    options.policy = policy;
    const Plan plan = planner.plan(shape, call.batch(), options);
    EXPECT_EQ(plan.stats().path, policy == Policy::flat ? Path::flat : forest_path) << plan.describe();
    if (!have_gpu() || !in_build(shape)) continue;
    EXPECT_EQ(call.run_by(run_on_device, plan, 0).complaint, "") << name_of(policy);
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

/// A copy on the device of values on the host, between fences.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) : count_(values.size()), memory_(values.size() * sizeof(T)) {
    memory_.put(values.data(), values.size() * sizeof(T));
  }
  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  [[nodiscard]] std::vector<T> get() const {
    std::vector<T> values(count_);
    memory_.get(values.data(), count_ * sizeof(T));
    EXPECT_TRUE(memory_.intact());
    return values;
  }

 private:
  std::size_t count_;
  DeviceMemory memory_;
};

}  // namespace headwater::cuda_test
