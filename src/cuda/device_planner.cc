#include "cuda/device_planner.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "cuda/error.h"
#include "cuda/launch.h"
#include "headwater/error.h"
#include "plan/validate.h"

namespace headwater::cuda {
namespace {

/// Requests whose tables a block compares, at least: more blocks take longer to meet.
constexpr int kRequestsPerBlock = 2;
/// Blocks whose scratch memory is global: megabytes each.
constexpr int kMostBlocksInGlobal = 32;

std::size_t bytes_for(std::size_t count, std::size_t element) {
  return std::max<std::size_t>(count, 1) * element;
}

int attribute(cudaDeviceAttr which) {
  int device = 0;
  int value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

detail::CostModel checked_cost(const AttentionShape& shape, const PlanOptions& options, const DeviceTableLimits& limits,
                               const DeviceModel& model) {
  check_supported_plan(shape, options, {});
  check_planner(shape, options, limits);
  detail::check_model(model);
  return {shape, options, model};
}

}  // namespace

DevicePlanner::Impl::Impl(const AttentionShape& s, const PlanOptions& o, const DeviceTableLimits& l,
                          const DeviceModel& model)
    : shape(s),
      options(o),
      limits(l),
      cost(checked_cost(s, o, l, model)),
      capacity(planner_capacity(cost, l)),
      input(planner_input(s, o, l, capacity, cost)),
      exchange(bytes_for(2 * static_cast<std::size_t>(l.max_requests), sizeof(CommonRun))),
      status(sizeof(DevicePlanStatus)),
      spans(bytes_for(static_cast<std::size_t>(l.max_requests), sizeof(DeviceSpan))),
      members(bytes_for(static_cast<std::size_t>(l.max_requests), sizeof(std::int32_t))) {
  if (attribute(cudaDevAttrCooperativeLaunch) == 0) {
    throw Error(ErrorCode::unsupported, "this device has no cooperative launches, which planning on it needs");
  }
  const auto room = static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  for (int k = 0; k < kNumPlannerKernels; ++k) {
    kernel = planner_kernel(k);
    if (l.max_requests > kernel.max_requests || input.max_units > kernel.max_units) continue;
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel.function), "cudaFuncGetAttributes");  // loads it
    if (!kernel.shared) break;
    if (kernel.scratch_bytes + attributes.sharedSizeBytes <= room) break;
  }
  most_blocks = std::min(attribute(cudaDevAttrMultiProcessorCount),
                         std::max(3, (l.max_requests + kRequestsPerBlock - 1) / kRequestsPerBlock));
  if (kernel.shared) {
    check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(kernel.scratch_bytes)),
          "cudaFuncSetAttribute");
  } else {
    most_blocks = std::min(most_blocks, kMostBlocksInGlobal);
    scratch.emplace(static_cast<std::size_t>(most_blocks) * kernel.scratch_bytes);
  }
}

DevicePlanner::DevicePlanner(const AttentionShape& shape, const PlanOptions& options, const DeviceTableLimits& limits,
                             const DeviceModel& model)
    : impl_(std::make_unique<Impl>(shape, options, limits, model)) {}
DevicePlanner::DevicePlanner(const AttentionShape& shape, const PlanOptions& options, const DeviceTableLimits& limits)
    : DevicePlanner(shape, options, limits, device_model(shape)) {}
DevicePlanner::~DevicePlanner() = default;
DevicePlanner::DevicePlanner(DevicePlanner&&) noexcept = default;
DevicePlanner& DevicePlanner::operator=(DevicePlanner&&) noexcept = default;

Capacity DevicePlanner::capacity_for(const AttentionShape& shape, const PlanOptions& options,
                                     const DeviceTableLimits& limits, const DeviceModel& model) {
  check_planner(shape, options, limits);
  detail::check_model(model);
  return planner_capacity(detail::CostModel(shape, options, model), limits);
}

const Capacity& DevicePlanner::capacity() const noexcept {
  return impl_->capacity;
}

void DevicePlanner::plan(DevicePlan& plan, const DeviceTables& tables, Stream stream) {
  const Impl& self = *impl_;
  PlannerParams params{
      planner_input(self.shape, self.options, self.limits, plan.capacity(), self.cost), self.cost, {}, nullptr};
  params.in.max_units = std::min(params.in.max_units, self.input.max_units);
  set_tables(params.in, tables, self.limits);
  params.out = plan.impl_->planner_output(self.shape, self.options, self.limits);
  params.out.status = reinterpret_cast<DevicePlanStatus*>(self.status.data);
  params.out.spans = reinterpret_cast<DeviceSpan*>(self.spans.data);
  params.out.span_members = reinterpret_cast<std::int32_t*>(self.members.data);
  params.out.exchange = reinterpret_cast<CommonRun*>(self.exchange.data);
  if (self.scratch) params.scratch = self.scratch->data;

  // Three write; more where many tables are compared.
  const int compare = (tables.num_requests + kRequestsPerBlock - 1) / kRequestsPerBlock;
  const int wanted = std::max(3, params.in.policy == Policy::flat ? 0 : compare);
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(wanted, self.most_blocks)));
  config.blockDim = dim3(static_cast<unsigned>(planner_threads()));
  config.dynamicSmemBytes = self.kernel.shared ? self.kernel.scratch_bytes : 0;
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = 1;
  void* arguments = &params;
  check(cudaLaunchKernelExC(&config, self.kernel.function, &arguments), "plan_on_device");
  plan.impl_->take_over(self.options, self.limits, tables.block_table);
}

const DevicePlanStatus* DevicePlanner::status() const noexcept {
  return reinterpret_cast<const DevicePlanStatus*>(impl_->status.data);
}

const DeviceSpan* DevicePlanner::spans() const noexcept {
  return reinterpret_cast<const DeviceSpan*>(impl_->spans.data);
}

const std::int32_t* DevicePlanner::span_members() const noexcept {
  return reinterpret_cast<const std::int32_t*>(impl_->members.data);
}

}  // namespace headwater::cuda
