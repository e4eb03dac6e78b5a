// A CUDA device as the harness sees it; see cuda_processor.h.
#include "bench/cuda_processor.h"

#include <fmt/format.h>

#include <algorithm>

#include "bench/cuda_arm.h"
#include "bench/cuda_error.h"
#include "bench/cuda_read.h"
#include "bench/stats.h"

namespace headwater::bench {
namespace {

struct DeviceFacts {
  std::string name;
  int major = 0;
  int minor = 0;
  int multiprocessors = 0;
  int clock_khz = 0;  ///< the highest
  std::size_t l2_bytes = 0;
  std::size_t memory_bytes = 0;
};

DeviceFacts facts_of_device() {
  if (cuda::num_devices() == 0) {
    throw Error(ErrorCode::unsupported, "device cuda: no CUDA device that this process can use");
  }
  int device = 0;
  require(cudaGetDevice(&device), "cudaGetDevice");
  cudaDeviceProp properties{};
  require(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  DeviceFacts out;
  out.name = properties.name;
  out.major = properties.major;
  out.minor = properties.minor;
  out.multiprocessors = properties.multiProcessorCount;
  out.l2_bytes = static_cast<std::size_t>(properties.l2CacheSize);
  out.memory_bytes = properties.totalGlobalMem;
  require(cudaDeviceGetAttribute(&out.clock_khz, cudaDevAttrClockRate, device), "cudaDeviceGetAttribute");
  return out;
}

/// 16-bit products with fp32 sums, dense, of one multiprocessor in one clock.
int flops_per_clock(int major, int minor) {
  if (major == 8 && minor == 0) return 2048;
  if (major == 9) return 4096;
  if (major == 10) return 8192;
  return 1024;
}

class CudaProcessor final : public Processor {
 public:
  explicit CudaProcessor(std::optional<DeviceModel> one_head)
      : one_head_(one_head),
        facts_(facts_of_device()),
        read_(std::min(std::size_t{1} << 30, facts_.memory_bytes / 8) / kReadUnit * kReadUnit),
        sink_(sizeof(unsigned)) {
    require(cudaMemset(read_.data(), 0, read_.size()), "cudaMemset");
    for (int i = 0; i < 5; ++i) (void)sample();  // clocks rise
  }

  [[nodiscard]] std::string_view device() const noexcept override { return "cuda"; }
  [[nodiscard]] std::string isa() const override { return fmt::format("sm_{}{}", facts_.major, facts_.minor); }
  [[nodiscard]] int num_workers() const noexcept override { return facts_.multiprocessors; }
  [[nodiscard]] int plan_workers() const noexcept override { return 0; }  // the model's
  [[nodiscard]] DeviceModel model_for(const AttentionShape& shape, const DeviceModel& /*configured*/) const override {
    return one_head_ ? cuda::model_for_shape(*one_head_, shape) : cuda::device_model(shape);
  }
  [[nodiscard]] std::string describe() override {
    std::vector<double> rates;
    for (int i = 0; i < 11; ++i) rates.push_back(sample().read_gbs);
    return fmt::format(
        "{} MB of second-level cache; memory {:.0f} GB/s; peak {:.0f} TFLOP/s (16 "
        "bit, {} MHz)",
        facts_.l2_bytes >> 20, median(rates), peak_gflops(DType::f16, DType::f16) / 1e3, facts_.clock_khz / 1000);
  }

  [[nodiscard]] std::unique_ptr<KvMemory> make_kv(const AttentionShape& shape, std::int64_t num_pages, int page_size,
                                                  Layout layout, bool mla, std::size_t cold_bytes) override {
    const std::size_t cold = cold_bytes == 0 ? 0 : std::max(cold_bytes, 3 * facts_.l2_bytes);
    return std::make_unique<CudaKv>(shape, num_pages, page_size, layout, mla, cold);
  }
  [[nodiscard]] std::unique_ptr<Arm> make_arm(Planner& planner, const AttentionShape& shape, const PagedForest& paged,
                                              const PlanOptions& options, KvMemory& kv) override {
    return std::make_unique<CudaArm>(planner, shape, paged, options, dynamic_cast<CudaKv&>(kv), clock_);
  }

  [[nodiscard]] Sample sample() override {
    const double seconds = clock_.seconds(
        [&] { read_device(read_.data(), read_.size(), reinterpret_cast<unsigned*>(sink_.data()), clock_.stream()); });
    return {static_cast<double>(read_.size()) / seconds / 1e9, false};
  }
  /// The tensor cores' at the highest clock: no cell reaches it.
  [[nodiscard]] double peak_gflops(DType /*q_dtype*/, DType /*kv_dtype*/) const noexcept override {
    return 1e-6 * facts_.clock_khz * facts_.multiprocessors * flops_per_clock(facts_.major, facts_.minor);
  }

 private:
  std::optional<DeviceModel> one_head_;
  DeviceFacts facts_;
  Clock clock_;
  DeviceBytes read_;
  DeviceBytes sink_;
};

}  // namespace

std::unique_ptr<Processor> make_cuda_processor(std::optional<DeviceModel> one_head) {
  return std::make_unique<CudaProcessor>(one_head);
}

std::string cuda_device_name() {
  const DeviceFacts facts = facts_of_device();
  return fmt::format("{} (sm_{}{}, {} multiprocessors)", facts.name, facts.major, facts.minor, facts.multiprocessors);
}

}  // namespace headwater::bench
