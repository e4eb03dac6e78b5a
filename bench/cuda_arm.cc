// Attention calls on a CUDA device; see cuda_arm.h.
#include "bench/cuda_arm.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "bench/cuda_error.h"
#include "bench/probe.h"

namespace headwater::bench {
namespace {

constexpr std::size_t kMostCopies = 256;
constexpr int kLeastCalls = 8;  ///< of a graph, so that its own start weighs little

std::size_t row_elements(const PagedForest& paged, const AttentionShape& shape, int head_dim) {
  return static_cast<std::size_t>(paged.num_rows()) * static_cast<std::size_t>(shape.num_qo_heads * head_dim);
}

Plan supported_plan(Planner& planner, const AttentionShape& shape, const Batch& batch, const PlanOptions& options) {
  cuda::check_supported(shape, options, batch);
  return planner.plan(shape, batch, options);
}

/// Slopes of ALiBi for a number of heads, 2^(-8 (h + 1) / H); or nothing.
std::vector<float> alibi_slopes(int heads, bool wanted) {
  std::vector<float> out;
  for (int h = 0; wanted && h < heads; ++h) out.push_back(std::exp2(-8.0F * static_cast<float>(h + 1) / heads));
  return out;
}

/// Sink logits about as large as scores are; or nothing.
std::vector<float> sink_logits(int heads, bool wanted) {
  std::vector<float> out;
  for (int h = 0; wanted && h < heads; ++h) out.push_back(static_cast<float>(h % 7) - 1.0F);
  return out;
}

void copy_to(const DeviceBytes& to, const std::vector<float>& from) {
  if (from.empty()) return;
  require(cudaMemcpy(to.data(), from.data(), from.size() * sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
}

}  // namespace

DeviceBytes::DeviceBytes(std::size_t bytes) : bytes_(bytes) {
  require(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<std::size_t>(bytes, 1)), "cudaMalloc");
}

DeviceBytes::~DeviceBytes() {
  cudaFree(data_);
}

Clock::Clock() {
  require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  require(cudaEventCreate(&begin_), "cudaEventCreate");
  require(cudaEventCreate(&end_), "cudaEventCreate");
}

Clock::~Clock() {
  if (begin_ != nullptr) cudaEventDestroy(begin_);
  if (end_ != nullptr) cudaEventDestroy(end_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void Clock::start() {
  require(cudaEventRecord(begin_, stream_), "cudaEventRecord");
}

double Clock::stop() {
  require(cudaEventRecord(end_, stream_), "cudaEventRecord");
  require(cudaEventSynchronize(end_), "cudaEventSynchronize");
  float ms = 0;
  require(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
  return static_cast<double>(ms) / 1e3;
}

CudaKv::CudaKv(const AttentionShape& shape, std::int64_t num_pages, int page_size, Layout layout, bool mla,
               std::size_t cold_bytes)
    : host_(shape, num_pages, page_size, layout, mla, 0) {
  const std::size_t bytes = host_.copy_bytes();
  std::size_t available = 0;
  std::size_t all = 0;
  require(cudaMemGetInfo(&available, &all), "cudaMemGetInfo");
  const std::size_t fitting = std::max<std::size_t>(1, available / 10 * 9 / bytes);
  // A single large copy would be read again by the next call while its end is still in the cache.
  const std::size_t wanted = cold_bytes == 0 ? 1 : std::clamp<std::size_t>(cold_bytes / bytes + 1, 2, kMostCopies);
  const std::size_t count = std::min(wanted, fitting);
  memory_ = std::make_unique<DeviceBytes>(count * bytes);
  const auto* first = static_cast<const std::byte*>(on_host().k.data);
  require(cudaMemcpy(memory_->data(), first, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  for (std::size_t i = 0; i < count; ++i) {
    std::byte* to = memory_->data() + i * bytes;
    if (i > 0) require(cudaMemcpy(to, memory_->data(), bytes, cudaMemcpyDeviceToDevice), "cudaMemcpy");
    KvCache copy = on_host();
    copy.k.data = to;
    copy.v.data = to + (static_cast<const std::byte*>(on_host().v.data) - first);
    copies_.push_back(copy);
  }
}

CudaArm::CudaArm(Planner& planner, const AttentionShape& shape, const PagedForest& paged, const PlanOptions& options,
                 CudaKv& kv, Clock& clock)
    : shape_(shape),
      kv_(kv),
      clock_(clock),
      plan_(supported_plan(planner, shape, paged.batch(), options)),
      device_(shape, cuda::Capacity::of(plan_)),
      host_q_(row_elements(paged, shape, shape.head_dim_qk) * size_of(shape.q_dtype)),
      host_out_(row_elements(paged, shape, shape.head_dim_vo) * size_of(shape.out_dtype)),
      host_lse_(row_elements(paged, shape, 1) * sizeof(float)),
      host_slopes_(alibi_slopes(shape.num_qo_heads, options.alibi)),
      host_sinks_(sink_logits(shape.num_qo_heads, options.sinks)),
      out_bytes_(row_elements(paged, shape, shape.head_dim_vo) * size_of(shape.out_dtype)),
      lse_bytes_(row_elements(paged, shape, 1) * sizeof(float)),
      q_(row_elements(paged, shape, shape.head_dim_qk) * size_of(shape.q_dtype)),
      out_(out_bytes_),
      lse_(lse_bytes_),
      workspace_(device_.workspace_size()),
      slopes_(host_slopes_.size() * sizeof(float)),
      sinks_(host_sinks_.size() * sizeof(float)) {
  copy_to(slopes_, host_slopes_);
  copy_to(sinks_, host_sinks_);
  fill_normal(host_q_.data(), shape.q_dtype, row_elements(paged, shape, shape.head_dim_qk), 1.0F, 29);
  require(cudaMemcpy(q_.data(), host_q_.data(), q_.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  (void)upload();
  cold_ = capture(kv_.copies().size());
  warm_ = capture(1);
}

CudaArm::~CudaArm() {
  for (const Graph& graph : {cold_, warm_}) {
    if (graph.exec != nullptr) cudaGraphExecDestroy(graph.exec);
  }
}

cuda::RunArgs CudaArm::args_for(const KvCache& kv) const {
  cuda::RunArgs args;
  const std::int64_t heads = shape_.num_qo_heads;
  args.q = {q_.data(), shape_.q_dtype, heads * shape_.head_dim_qk, shape_.head_dim_qk};
  args.kv = {&kv, 1};
  args.out = {out_.data(), shape_.out_dtype, heads * shape_.head_dim_vo, shape_.head_dim_vo};
  args.lse = {reinterpret_cast<float*>(lse_.data()), heads, 1, LseBase::two};
  args.workspace = {workspace_.data(), device_.workspace_size()};
  if (!host_slopes_.empty()) args.alibi_slopes = reinterpret_cast<const float*>(slopes_.data());
  if (!host_sinks_.empty()) args.sinks = reinterpret_cast<const float*>(sinks_.data());
  return args;
}

CudaArm::Graph CudaArm::capture(std::size_t num_copies) {
  Graph out;
  cudaGraph_t graph = nullptr;
  require(cudaStreamBeginCapture(clock_.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  while (out.calls < kLeastCalls) {  // whole rounds: every copy is read as often as any other
    for (std::size_t i = 0; i < num_copies; ++i) cuda::run(device_, args_for(kv_.copies()[i]), clock_.stream());
    out.calls += static_cast<int>(num_copies);
  }
  require(cudaStreamEndCapture(clock_.stream(), &graph), "cudaStreamEndCapture");
  const cudaError_t status = cudaGraphInstantiate(&out.exec, graph, 0);
  cudaGraphDestroy(graph);
  require(status, "cudaGraphInstantiate");
  return out;
}

double CudaArm::replay(const Graph& graph) {
  check_stats();
  return clock_.seconds([&] { require(cudaGraphLaunch(graph.exec, clock_.stream()), "cudaGraphLaunch"); }) /
         graph.calls;
}

/// The plan in force on the device is the one whose time is reported.
void CudaArm::check_stats() const {
  const PlanStats& planned = plan_.stats();
  const PlanStats& there = device_.stats();
  if (there.path == planned.path && there.kv_bytes_read == planned.kv_bytes_read) return;
  throw Error(ErrorCode::internal,
              fmt::format("dispatch proof: planned path {} with {} bytes of KV, on the device is path {} with {} bytes",
                          name_of(planned.path), planned.kv_bytes_read, name_of(there.path), there.kv_bytes_read));
}

double CudaArm::upload() {
  const double start = now();
  device_.upload(plan_, clock_.stream());
  require(cudaStreamSynchronize(clock_.stream()), "cudaStreamSynchronize");
  return now() - start;
}

Checked CudaArm::check() {
  auto* const stream = clock_.stream();
  require(cudaMemsetAsync(out_.data(), 0xff, out_.size(), stream), "cudaMemset");  // NaN in every type
  require(cudaMemsetAsync(lse_.data(), 0xff, lse_.size(), stream), "cudaMemset");
  check_stats();
  cuda::run(device_, args_for(kv_.copies().front()), stream);
  require(cudaStreamSynchronize(stream), "attention");
  require(cudaMemcpy(host_out_.data(), out_.data(), out_.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  require(cudaMemcpy(host_lse_.data(), lse_.data(), lse_.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  const cuda::RunArgs args = args_for(kv_.copies().front());
  Checked out;
  out.kv = &kv_.on_host();
  out.q = args.q;
  out.q.data = host_q_.data();
  out.out = args.out;
  out.out.data = host_out_.data();
  out.lse = args.lse;
  out.lse.data = reinterpret_cast<float*>(host_lse_.data());
  out.alibi_slopes = host_slopes_.empty() ? nullptr : host_slopes_.data();
  out.sinks = host_sinks_.empty() ? nullptr : host_sinks_.data();
  out.out_bytes = {host_out_.data(), out_bytes_};
  out.lse_bytes = {host_lse_.data(), lse_bytes_};
  return out;
}

}  // namespace headwater::bench
