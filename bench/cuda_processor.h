// A CUDA device as the harness sees it. In a build without CUDA the functions refuse with Error(unsupported).
//
// Calls are timed by graph replay: a captured graph holds several calls on copies of the KV cache that together are
// larger than the device's second-level cache, and a sample is its time by events / its calls.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "bench/processor.h"

namespace headwater::bench {

/// The current device. `one_head`: a model that `calibrate_cuda` measured; without one the library's own is used.
/// Error(unsupported) without a device, or in a build without CUDA.
[[nodiscard]] std::unique_ptr<Processor> make_cuda_processor(std::optional<DeviceModel> one_head = {});

/// Measures the cost model of the current device by small plans: the constants of one KV head of 128
/// (cuda::model_for_shape makes those of a shape). `progress` hears what is measured, and how far along it is. Refuses
/// as make_cuda_processor.
[[nodiscard]] DeviceModel calibrate_cuda(DType type, const std::function<void(double, const std::string&)>& progress);

/// Name, architecture and size of the current device, for reports. Refuses as make_cuda_processor.
[[nodiscard]] std::string cuda_device_name();

}  // namespace headwater::bench
