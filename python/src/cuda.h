// What the CUDA binding files share: plans on a device, the device and the stream of a call. Built where the library
// has its CUDA back end; a package without it has no module `_core.cuda`.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <shared_mutex>

#include "bindings.h"
#include "headwater/cuda.h"

namespace headwater::python {

/// Makes `device` the current one until the end of the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
};

/// The device that an argument names; None: the current one.
[[nodiscard]] int device_of(nb::handle device);

/// The stream that an argument names: an int, or an object of torch or cupy; None: the current stream of the framework
/// that `like` belongs to (torch, cupy), else the default stream.
[[nodiscard]] cuda::Stream stream_of(nb::handle stream, nb::handle like, int device);

/// A plan on a device. As PyPlan: runs share it, what changes it needs it alone.
struct PyDevicePlan {
  AttentionShape shape;
  int device;
  cuda::DevicePlan plan;
  std::shared_mutex in_use;
  std::size_t num_levels = 1;
  /// Rows that q and out must have for plans made on the device, which alone knows how many there are.
  std::int64_t least_rows = 0;
  nb::object block_table;  ///< that the plan in force reads, when a planner made it outside a capture

  PyDevicePlan(const AttentionShape& its_shape, const cuda::Capacity& capacity, int its_device);
  ~PyDevicePlan();
};

void bind_cuda_plans(nb::module_& m);
void bind_cuda_calls(nb::module_& m);

}  // namespace headwater::python
