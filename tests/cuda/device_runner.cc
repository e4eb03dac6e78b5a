#include "cuda/device_runner.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "plan/plan_data.h"

namespace headwater::cuda_test {
namespace {

constexpr std::size_t kFence = 4096;
constexpr int kPoison = 0xff;  // a NaN in f32, f16, bf16 and fp8

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// Bytes of host memory [begin, end).
struct Extent {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;

  [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(end - begin); }
  [[nodiscard]] bool overlaps(const Extent& other) const { return begin < other.end && other.begin < end; }
  [[nodiscard]] Extent with(const Extent& other) const {
    return {std::min(begin, other.begin), std::max(end, other.end)};
  }
};

Extent extent_of(const PagedTensor& t, const KvCache& cache, int heads, int dim) {
  const auto* begin = static_cast<const std::byte*>(t.data);
  const std::int64_t last = (cache.num_pages - 1) * t.page_stride + (cache.page_size - 1) * t.token_stride +
                            (heads - 1) * t.head_stride + dim;
  return {begin, begin + static_cast<std::size_t>(std::max<std::int64_t>(0, last)) * size_of(cache.dtype)};
}

template <class View>
Extent extent_of_rows(const View& v, std::int64_t rows, int heads, int dim, std::size_t element) {
  const auto* begin = reinterpret_cast<const std::byte*>(v.data);
  if (rows == 0) return {begin, begin};
  const std::int64_t last = (rows - 1) * v.row_stride + (heads - 1) * v.head_stride + dim;
  return {begin, begin + static_cast<std::size_t>(last) * element};
}

}  // namespace

DeviceMemory::DeviceMemory(std::size_t bytes) : bytes_(bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, bytes + 2 * kFence));
  allocation_ = static_cast<std::byte*>(p);
  data_ = allocation_ + kFence;
  check(cudaMemset(allocation_, kPoison, bytes + 2 * kFence));
}

void DeviceMemory::poison() {
  check(cudaMemset(data_, kPoison, bytes_));
}

DeviceMemory::~DeviceMemory() {
  cudaFree(allocation_);
}

void DeviceMemory::put(const void* from, std::size_t bytes) {
  if (bytes > bytes_) throw std::logic_error("put: more bytes than there are");
  if (bytes > 0) check(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice));
}

void DeviceMemory::get(void* to, std::size_t bytes) const {
  if (bytes > bytes_) throw std::logic_error("get: more bytes than there are");
  if (bytes > 0) check(cudaMemcpy(to, data_, bytes, cudaMemcpyDeviceToHost));
}

bool DeviceMemory::intact() const {
  std::vector<unsigned char> fence(kFence);
  for (const std::byte* side : {allocation_, data_ + bytes_}) {
    check(cudaMemcpy(fence.data(), side, kFence, cudaMemcpyDeviceToHost));
    if (std::ranges::any_of(fence, [](unsigned char byte) { return byte != kPoison; })) return false;
  }
  return true;
}

struct DeviceCall::Memory {
  std::vector<std::unique_ptr<DeviceMemory>> inputs;
  std::vector<KvCache> caches;
  Extent out;
  Extent lse;
  std::unique_ptr<DeviceMemory> device_out;
  std::unique_ptr<DeviceMemory> device_lse;
  std::unique_ptr<DeviceMemory> workspace;

  std::byte* put(const Extent& from) {
    inputs.push_back(std::make_unique<DeviceMemory>(from.size()));
    inputs.back()->put(from.begin, from.size());
    return inputs.back()->data();
  }
  const float* put(const float* values, int count) {
    if (values == nullptr) return nullptr;
    const auto* begin = reinterpret_cast<const std::byte*>(values);
    return reinterpret_cast<const float*>(put(Extent{begin, begin + static_cast<std::size_t>(count) * sizeof(float)}));
  }
  KvCache put(const KvCache& cache, const AttentionShape& shape) {
    KvCache there = cache;
    const Extent k = extent_of(cache.k, cache, shape.num_kv_heads, shape.head_dim_qk);
    const Extent v = extent_of(cache.v, cache, shape.num_kv_heads, shape.head_dim_vo);
    if (cache.num_pages == 0) return there;
    if (k.overlaps(v)) {
      const Extent both = k.with(v);
      std::byte* at = put(both);
      there.k.data = at + (k.begin - both.begin);
      there.v.data = at + (v.begin - both.begin);
    } else {
      there.k.data = put(k);
      there.v.data = put(v);
    }
    return there;
  }
};

DeviceCall::DeviceCall(const AttentionShape& shape, const cpu::RunArgs& args, std::int64_t num_rows,
                       std::size_t workspace_bytes)
    : memory_(std::make_unique<Memory>()) {
  Memory& m = *memory_;
  args_.q = args.q;
  args_.q.data = m.put(extent_of_rows(args.q, num_rows, shape.num_qo_heads, shape.head_dim_qk, size_of(args.q.dtype)));
  for (const KvCache& cache : args.kv) m.caches.push_back(m.put(cache, shape));
  args_.kv = m.caches;
  m.out = extent_of_rows(args.out, num_rows, shape.num_qo_heads, shape.head_dim_vo, size_of(args.out.dtype));
  m.device_out = std::make_unique<DeviceMemory>(m.out.size());
  args_.out = args.out;
  args_.out.data = m.device_out->data();
  m.lse = extent_of_rows(args.lse, num_rows, shape.num_qo_heads, 1, sizeof(float));
  m.device_lse = std::make_unique<DeviceMemory>(m.lse.size());
  args_.lse = args.lse;
  args_.lse.data = reinterpret_cast<float*>(m.device_lse->data());
  args_.alibi_slopes = m.put(args.alibi_slopes, shape.num_qo_heads);
  args_.sinks = m.put(args.sinks, shape.num_qo_heads);
  args_.include_sink = args.include_sink;
  args_.k_scale = {m.put(args.k_scale.data, args.k_scale.count), args.k_scale.count};
  args_.v_scale = {m.put(args.v_scale.data, args.v_scale.count), args.v_scale.count};
  m.workspace = std::make_unique<DeviceMemory>(workspace_bytes);
  args_.workspace = {m.workspace->data(), workspace_bytes};
}

DeviceCall::~DeviceCall() = default;

void DeviceCall::poison_outputs() {
  memory_->device_out->poison();
  memory_->device_lse->poison();
}

void DeviceCall::fetch_to(const cpu::RunArgs& args) const {
  check(cudaDeviceSynchronize());
  memory_->device_out->get(args.out.data, memory_->out.size());
  memory_->device_lse->get(args.lse.data, memory_->lse.size());
}

std::size_t DeviceCall::out_bytes() const noexcept {
  return memory_->out.size();
}

std::string DeviceCall::complaint() const {
  std::string wrong;
  if (!memory_->device_out->intact()) wrong += "device out: bytes outside were written; ";
  if (!memory_->device_lse->intact()) wrong += "device lse: bytes outside were written; ";
  if (!memory_->workspace->intact()) wrong += "device workspace: bytes outside were written; ";
  for (const auto& input : memory_->inputs) {
    if (!input->intact()) wrong += "an input: bytes outside were written; ";
  }
  return wrong;
}

cpu::RunOutcome run_on_device(const Plan& plan, const cpu::RunArgs& args) {
  const detail::PlanData& data = plan.data();
  cuda::DevicePlan device(data.shape, cuda::Capacity::of(plan));
  const DeviceCall call(data.shape, args, static_cast<std::int64_t>(data.rows.size()), device.workspace_size());
  device.upload(plan, nullptr);
  cuda::run(device, call.args(), nullptr);
  call.fetch_to(args);
  const std::string wrong = call.complaint();
  if (!wrong.empty()) throw std::runtime_error(wrong);
  const PlanStats& stats = device.stats();
  return {stats.path, Isa::scalar, stats.num_items, stats.kv_bytes_read,
          static_cast<std::int64_t>(data.merge_rows.size())};
}

}  // namespace headwater::cuda_test
