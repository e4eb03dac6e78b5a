// Inside of DevicePlan: the device blob, its pinned staging buffers, and what run needs to know of the plan in force.
#pragma once

#include <array>
#include <optional>

#include "cuda/chunks.h"
#include "cuda/device_planner_memory.h"
#include "cuda/kernels.h"
#include "cuda/params.h"
#include "cuda/tensor_map.h"
#include "headwater/cuda.h"
#include "plan/plan_data.h"

struct CUevent_st;

namespace headwater::cuda {

/// Device memory, zero at first; freed with its owner. It is zeroed on a stream of its own, which the constructor waits
/// for: streams made with cudaStreamNonBlocking are not ordered behind the default stream.
struct DeviceBuffer {
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  std::byte* data = nullptr;
};

/// Pinned host memory, and the event after the last copy out of it.
struct Staging {
  Staging() = default;
  explicit Staging(std::size_t bytes);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  std::byte* data = nullptr;
  CUevent_st* copied = nullptr;
};

/// Page ids up to this many are copied with every upload; more of them are kept on the device, and patched.
inline constexpr std::int64_t kFewPageIds = 8'192;

struct DevicePlan::Impl {
  Impl(const AttentionShape& shape, const Capacity& capacity);

  /// Where a DevicePlanner writes its plan; refuses options and limits that this plan cannot take.
  PlannerOutput planner_output(const AttentionShape& its_shape, const PlanOptions& options,
                               const DeviceTableLimits& limits);
  /// From now on this is a plan of a DevicePlanner, whose page ids are the caller's table.
  void take_over(const PlanOptions& options, const DeviceTableLimits& limits, const std::int32_t* block_table);

  AttentionShape shape;
  Capacity capacity;
  const AttendKernel* kernel;
  int stages = 3;
  int shared_bytes = 0;
  bool hopper = false;  ///< the device knows dependent launches and bulk copies (sm_90)
  int num_merge_blocks = 0;
  int num_blocks = 0;  ///< of the attend kernel: as many as the device holds at once
  std::size_t blob_bytes = 0;
  DeviceBuffer blob;
  PlanView view;  ///< the blob's arrays
  DeviceBuffer queue;
  std::optional<MapEncoder> maps;  ///< where the device has a bulk copy engine
  std::array<Staging, 2> staging;
  /// The plan's page ids that lie in the blob as a whole, to be kept up to date by patches; no origin: none do.
  detail::PageHistory mirrored;
  std::int64_t uploaded_ids = 0;  ///< page ids that the last upload copied
  ChunkedPlan chunks;             ///< batch-invariant mode: of the plan being uploaded
  int turn = 0;
  bool uploaded = false;   ///< there is a plan in force
  bool on_device = false;  ///< made by a DevicePlanner
  /// Shape, options, sizes and number of rows of the plan in force, for the checks that all back ends share.
  detail::PlanData facts;
};

}  // namespace headwater::cuda
