// Decoding on a GPU behind a shared prompt, whole: pages from a pool, a plan a step, one graph that is captured once
// and replayed with every later plan. The last step is checked against the CPU back end. Status 77: there is no GPU.
//
// 16 requests of a model with 32 query heads and 8 KV heads of 128, one layer, bf16. K and V are random numbers in
// memory that both sides have, as if the model had written them. (A prompt that ends within a page would be copied on
// write: see cuda::copy_pages, and cuda::append_kv for how a model writes.)
#include <cuda_runtime_api.h>
#include <headwater/cuda.h>
#include <headwater/headwater.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

using namespace headwater;

namespace {

constexpr AttentionShape kShape{32, 8, 128, 128, DType::bf16, DType::bf16, DType::bf16};
constexpr int kRequests = 16;
constexpr int kPageSize = 16;
constexpr int kPages = 512;  // of the pool
constexpr int kPromptTokens = 2'048;
constexpr int kSteps = 100;

using Bf16 = std::uint16_t;

void ok(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

float widened(Bf16 x) {
  return std::bit_cast<float>(std::uint32_t{x} << 16);
}

std::vector<Bf16> random_numbers(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<Bf16> out(count);
  for (Bf16& x : out) x = static_cast<Bf16>(std::bit_cast<std::uint32_t>(normal(random)) >> 16);
  return out;
}

struct Free {
  void operator()(void* memory) const { cudaFree(memory); }
};
using DeviceMemory = std::unique_ptr<void, Free>;

DeviceMemory on_device(const void* from, std::size_t bytes) {
  void* memory = nullptr;
  ok(cudaMalloc(&memory, std::max<std::size_t>(bytes, 1)));
  DeviceMemory out(memory);
  if (from != nullptr) ok(cudaMemcpy(memory, from, bytes, cudaMemcpyHostToDevice));
  return out;
}

/// [pages, page_size, heads, dim], K and V in tensors of their own.
KvCache cache_of(void* k, void* v) {
  const std::int64_t token = std::int64_t{kShape.num_kv_heads} * kShape.head_dim_qk;
  KvCache cache;
  cache.k = {k, kPageSize * token, token, kShape.head_dim_qk};
  cache.v = {v, kPageSize * token, token, kShape.head_dim_vo};
  cache.dtype = kShape.kv_dtype;
  cache.num_pages = kPages;
  cache.page_size = kPageSize;
  return cache;
}

/// The page tables of a step, one query row each, as a Batch points to them.
struct Tables {
  std::vector<std::int32_t> qo_indptr{0};
  std::vector<std::int32_t> indptr{0};
  std::vector<std::int32_t> indices;
  std::vector<std::int32_t> last_page_len;

  Tables(const PagePool& pool, const std::vector<SequenceId>& requests) {
    for (const SequenceId request : requests) {
      const auto pages = pool.pages(request);
      indices.insert(indices.end(), pages.begin(), pages.end());
      indptr.push_back(static_cast<std::int32_t>(indices.size()));
      last_page_len.push_back(static_cast<std::int32_t>((pool.num_tokens(request) - 1) % kPageSize + 1));
      qo_indptr.push_back(qo_indptr.back() + 1);
    }
  }
  [[nodiscard]] Batch batch() const {
    Batch batch;
    batch.qo_indptr = qo_indptr;
    batch.kv = {indptr, indices, last_page_len, kPageSize, kPages};
    return batch;
  }
};

int decode() {
  if (cuda::num_devices() == 0) {
    std::puts("no CUDA device");
    return 77;
  }
  const std::int64_t row = std::int64_t{kShape.num_qo_heads} * kShape.head_dim_vo;
  const std::size_t row_bytes = kRequests * static_cast<std::size_t>(row) * sizeof(Bf16);
  const auto kv_elements = std::size_t{kPages} * kPageSize * 8 * 128;
  std::vector<Bf16> k = random_numbers(kv_elements, 1);
  std::vector<Bf16> v = random_numbers(kv_elements, 2);
  const std::vector<Bf16> q = random_numbers(row_bytes / sizeof(Bf16), 3);
  const DeviceMemory k_there = on_device(k.data(), kv_elements * sizeof(Bf16));
  const DeviceMemory v_there = on_device(v.data(), kv_elements * sizeof(Bf16));
  const DeviceMemory q_there = on_device(q.data(), row_bytes);
  const DeviceMemory out_there = on_device(nullptr, row_bytes);
  const KvCache cache = cache_of(k_there.get(), v_there.get());

  // One prompt, from which all requests go on.
  PagePool pool(kPages, kPageSize);
  std::vector<cpu::PageCopy> copies;
  std::vector<std::int64_t> slots;  // where the model is to write
  const SequenceId prompt = pool.create();
  pool.prepare_append(prompt, kPromptTokens, copies, slots);
  std::vector<SequenceId> requests;
  for (int i = 0; i < kRequests; ++i) requests.push_back(pool.fork(prompt));
  pool.release(prompt);

  // Once: memory for every plan of this decode, and a graph of its attention.
  const PlanOptions options;
  Planner planner(cuda::device_model(kShape));
  const cuda::PlanBounds bounds{.max_requests = kRequests,
                                .max_rows = kRequests,
                                .max_pages = (kPromptTokens + kSteps) / kPageSize + 1,
                                .page_size = kPageSize,
                                .max_shared_spans = 1};
  cuda::DevicePlan device(kShape, cuda::Capacity::within(bounds, kShape, options, planner.model()));
  const DeviceMemory workspace = on_device(nullptr, device.workspace_size());
  cuda::RunArgs args;
  args.q = {q_there.get(), DType::bf16, row, kShape.head_dim_qk};
  args.kv = {&cache, 1};
  args.out = {out_there.get(), DType::bf16, row, kShape.head_dim_vo};
  args.workspace = {workspace.get(), device.workspace_size()};
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreate(&stream));
  cudaGraphExec_t graph = nullptr;

  Plan plan;
  for (int step = 0; step < kSteps; ++step) {
    for (const SequenceId request : requests) pool.prepare_append(request, 1, copies, slots);
    const Tables tables(pool, requests);
    if (step == 0) {
      plan = planner.plan(kShape, tables.batch(), options);
    } else {
      planner.update(plan, tables.batch());
    }
    device.upload(plan, stream);
    if (graph == nullptr) {
      cudaGraph_t captured = nullptr;
      ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
      cuda::run(device, args, stream);  // once a layer
      ok(cudaStreamEndCapture(stream, &captured));
      ok(cudaGraphInstantiate(&graph, captured, 0));
      ok(cudaGraphDestroy(captured));
    }
    ok(cudaGraphLaunch(graph, stream));
  }
  ok(cudaStreamSynchronize(stream));
  std::printf("%s: the last step reads %.1f MB of KV, %.1f MB if each request read its own\n",
              name_of(plan.stats().path).data(), 1e-6 * static_cast<double>(plan.stats().kv_bytes_read),
              1e-6 * static_cast<double>(plan.stats().kv_bytes_flat));

  // The same on the CPU.
  std::vector<Bf16> out(row_bytes / sizeof(Bf16));
  std::vector<Bf16> expected(out.size());
  ok(cudaMemcpy(out.data(), out_there.get(), row_bytes, cudaMemcpyDeviceToHost));
  const KvCache here = cache_of(k.data(), v.data());
  const Plan host = Planner().plan(kShape, Tables(pool, requests).batch(), options);
  std::vector<std::byte> scratch(host.workspace_size() + kWorkspaceAlignment);
  void* aligned = scratch.data();
  std::size_t room = scratch.size();
  std::align(kWorkspaceAlignment, host.workspace_size(), aligned, room);
  cpu::RunArgs on_cpu;
  on_cpu.q = {q.data(), DType::bf16, row, kShape.head_dim_qk};
  on_cpu.kv = {&here, 1};
  on_cpu.out = {expected.data(), DType::bf16, row, kShape.head_dim_vo};
  on_cpu.workspace = {aligned, room};
  ThreadPool threads(2);
  cpu::run(host, on_cpu, threads);
  float worst = 0;
  for (std::size_t i = 0; i < out.size(); ++i)
    worst = std::max(worst, std::abs(widened(out[i]) - widened(expected[i])));
  std::printf("greatest difference from the CPU: %.1e\n", static_cast<double>(worst));
  ok(cudaGraphExecDestroy(graph));
  ok(cudaStreamDestroy(stream));
  return worst < 2e-3F ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return decode();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
