// Runs a reference::Call on the GPU: copies everything there, between fences, and the results back.
#pragma once

#include <cstddef>
#include <string>

#include "headwater/cuda.h"
#include "reference/call.h"

namespace headwater::cuda_test {

/// In a test's body: skips it where there is no GPU.
#define HEADWATER_NEEDS_GPU() \
  if (headwater::cuda::num_devices() == 0) GTEST_SKIP() << "no CUDA device"

/// Device memory with fences on both sides; every byte poisoned (NaN in every element type).
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  void put(const void* from, std::size_t bytes);
  void get(void* to, std::size_t bytes) const;
  void poison();
  /// Whether the fences still hold the poison.
  [[nodiscard]] bool intact() const;

 private:
  std::size_t bytes_ = 0;
  std::byte* allocation_ = nullptr;
  std::byte* data_ = nullptr;
};

/// A call's tensors on the device, for as many runs as wanted.
class DeviceCall {
 public:
  DeviceCall(const AttentionShape& shape, const cpu::RunArgs& args, std::int64_t num_rows, std::size_t workspace_bytes);
  ~DeviceCall();

  [[nodiscard]] const cuda::RunArgs& args() const noexcept { return args_; }
  /// Poisons out and lse again.
  void poison_outputs();
  /// Waits for the device and copies out and lse to where `args`, with the strides of the constructor's, point.
  void fetch_to(const cpu::RunArgs& args) const;
  [[nodiscard]] std::size_t out_bytes() const noexcept;
  /// What is wrong with the fences; empty: nothing.
  [[nodiscard]] std::string complaint() const;

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
  cuda::RunArgs args_;
};

/// A runner for Call::run_by: plan to a DevicePlan of exactly its capacity, run, copy back. Throws what the library
/// throws.
cpu::RunOutcome run_on_device(const Plan& plan, const cpu::RunArgs& args);

}  // namespace headwater::cuda_test
