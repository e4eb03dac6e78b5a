// The CPU as the harness sees it; see cpu_processor.h.
#include "bench/cpu_processor.h"

#include <fmt/format.h>

#include "bench/probe.h"
#include "bench/step.h"

namespace headwater::bench {
namespace {

struct CpuKv final : KvMemory {
  explicit CpuKv(ColdKv memory) : cold(std::move(memory)) {}
  [[nodiscard]] bool aliased() const noexcept override { return cold.aliased(); }
  ColdKv cold;
};

class CpuArm final : public Arm {
 public:
  CpuArm(Step step, ColdKv& kv, Executor& executor) : step_(std::move(step)), kv_(kv), executor_(executor) {}

  [[nodiscard]] Plan& plan() noexcept override { return step_.plan(); }
  Checked check() override {
    const KvCache& kv = kv_.caches().front();
    step_.poison();
    step_.run(kv, executor_);
    return {&kv, step_.query(), step_.out(), step_.lse(), step_.out_bytes(), step_.lse_bytes(), nullptr, nullptr};
  }
  double run() override { return step_.run(kv_.next(), executor_); }

 private:
  Step step_;
  ColdKv& kv_;
  Executor& executor_;
};

class CpuProcessor final : public Processor {
 public:
  CpuProcessor(Executor& executor, Isa isa) : executor_(executor), isa_(isa), probe_(executor, isa) {}

  [[nodiscard]] std::string_view device() const noexcept override { return "cpu"; }
  [[nodiscard]] std::string isa() const override { return std::string(name_of(isa_)); }
  [[nodiscard]] int num_workers() const noexcept override { return executor_.num_workers(); }
  [[nodiscard]] int plan_workers() const noexcept override { return executor_.num_workers(); }
  [[nodiscard]] DeviceModel model_for(const AttentionShape& /*shape*/, const DeviceModel& configured) const override {
    return configured;
  }
  [[nodiscard]] std::string describe() override {
    const Peaks& peaks = probe_.peaks();
    return fmt::format("{} workers, {}; memory {:.1f} GB/s; peak fp32 {:.0f}, bf16 {:.0f} GFLOP/s", num_workers(),
                       name_of(isa_), probe_.memory_gbs(), peaks.fma32, peaks.dot16);
  }

  [[nodiscard]] std::unique_ptr<KvMemory> make_kv(const AttentionShape& shape, std::int64_t num_pages, int page_size,
                                                  Layout layout, bool mla, std::size_t cold_bytes) override {
    return std::make_unique<CpuKv>(ColdKv(shape, num_pages, page_size, layout, mla, cold_bytes));
  }
  [[nodiscard]] std::unique_ptr<Arm> make_arm(Planner& planner, const AttentionShape& shape, const PagedForest& paged,
                                              const PlanOptions& options, KvMemory& kv) override {
    return std::make_unique<CpuArm>(Step(planner, shape, paged, options, isa_), dynamic_cast<CpuKv&>(kv).cold,
                                    executor_);
  }

  [[nodiscard]] Sample sample() override {
    const MachineProbe::Sample taken = probe_.sample();
    return {taken.read_gbs, taken.throttled};
  }
  [[nodiscard]] double peak_gflops(DType q_dtype, DType kv_dtype) const noexcept override {
    return probe_.peak_gflops(q_dtype, kv_dtype);
  }

 private:
  Executor& executor_;
  Isa isa_;
  MachineProbe probe_;
};

}  // namespace

std::unique_ptr<Processor> make_cpu_processor(Executor& executor, Isa isa) {
  return std::make_unique<CpuProcessor>(executor, isa);
}

}  // namespace headwater::bench
