// Planning on the device, timed by graph replay: microseconds of a plan for trees of requests, warm (plans one after
// the other) and cold (second-level cache swept before each), and attention by device plans beside host plans. One JSON
// object a line.
//
// `host`: the host's plan of a decode step, update with the changes given and upload, until it is on the device.
//
// A case is named by its tree: requests or nodes per level, and pages per node of that level.
// usage: cuda_plan [attend|host]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "headwater/cuda.h"

namespace {

using namespace headwater;  // NOLINT(google-build-using-namespace): a program

constexpr int kPageSize = 16;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// A tree of requests as in tests/reference: child j of a level hangs below node j * parents / children.
struct Tree {
  const char* name;
  std::vector<int> nodes;
  std::vector<int> pages;
};

struct Tables {
  std::vector<std::int32_t> block_table;
  std::vector<std::int32_t> lengths;
  int max_blocks = 0;
  std::int64_t num_pages = 0;
};

Tables tables_of(const Tree& tree) {
  std::vector<std::vector<std::int32_t>> above{{}};
  std::int32_t next = 1;  // page 0 is the null page
  for (std::size_t level = 0; level < tree.nodes.size(); ++level) {
    std::vector<std::vector<std::int32_t>> here;
    for (int j = 0; j < tree.nodes[level]; ++j) {
      here.push_back(above[static_cast<std::size_t>(j) * above.size() / static_cast<std::size_t>(tree.nodes[level])]);
      for (int i = 0; i < tree.pages[level]; ++i) here.back().push_back(next++);
    }
    above = std::move(here);
  }
  Tables tables;
  tables.max_blocks = (std::accumulate(tree.pages.begin(), tree.pages.end(), 0) + 3) / 4 * 4;
  tables.num_pages = next;
  for (auto& pages : above) {
    tables.lengths.push_back(static_cast<std::int32_t>(pages.size()) * kPageSize - 3);
    pages.resize(static_cast<std::size_t>(tables.max_blocks), 0);
    tables.block_table.insert(tables.block_table.end(), pages.begin(), pages.end());
  }
  return tables;
}

class Device {
 public:
  explicit Device(std::size_t bytes) { check(cudaMalloc(&data_, std::max<std::size_t>(bytes, 1))); }
  ~Device() { cudaFree(data_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  template <class Element>
  Element* as() const {
    return static_cast<Element*>(data_);
  }
  template <class Element>
  void put(const std::vector<Element>& from) {
    check(cudaMemcpy(data_, from.data(), from.size() * sizeof(Element), cudaMemcpyHostToDevice));
  }

 private:
  void* data_ = nullptr;
};

/// Median time of a graph's replay in microseconds, over `count` launches in it.
double time_of(cudaStream_t stream, int count, const std::function<void()>& once) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < count; ++i) once();
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<double> times;
  for (int i = 0; i < 13; ++i) {
    check(cudaEventRecord(begin, stream));
    check(cudaGraphLaunch(exec, stream));
    check(cudaEventRecord(end, stream));
    check(cudaEventSynchronize(end));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(1'000.0 * static_cast<double>(ms) / count);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  std::ranges::sort(times);
  return times[times.size() / 2];
}

struct Side {
  explicit Side(const Tables& t)
      : table(t.block_table.size() * 4), lengths(t.lengths.size() * 4), requests(static_cast<int>(t.lengths.size())) {
    table.put(t.block_table);
    lengths.put(t.lengths);
  }
  [[nodiscard]] cuda::DeviceTables view() const {
    return {table.as<std::int32_t>(), 0, lengths.as<std::int32_t>(), nullptr, requests};
  }
  Device table;
  Device lengths;
  int requests;
};

PlanOptions with(Policy policy) {
  PlanOptions options;
  options.policy = policy;
  return options;
}

const AttentionShape kShape{32, 8, 128, 128, DType::f16, DType::f16, DType::f16};

void time_planning(cudaStream_t stream, const Tree& tree, Policy policy) {
  const Tables tables = tables_of(tree);
  const Side side(tables);
  const cuda::DeviceTableLimits limits{side.requests, tables.max_blocks, 0, kPageSize, tables.num_pages, 0};
  cuda::DevicePlanner planner(kShape, with(policy), limits);
  cuda::DevicePlan plan(kShape, planner.capacity());
  constexpr std::size_t kSweep = 192U << 20;
  const Device sweep(kSweep);
  const double warm = time_of(stream, 40, [&] { planner.plan(plan, side.view(), stream); });
  const auto clear = [&] { check(cudaMemsetAsync(sweep.as<char>(), 0, kSweep, stream)); };
  const double swept = time_of(stream, 10, [&] {
    clear();
    planner.plan(plan, side.view(), stream);
  });
  const double cold = swept - time_of(stream, 10, clear);
  cuda::DevicePlanStatus status;
  check(cudaMemcpy(&status, planner.status(), sizeof(status), cudaMemcpyDeviceToHost));
  std::printf(
      "{\"case\": \"%s\", \"requests\": %d, \"max_blocks\": %d, \"policy\": \"%s\", \"warm_us\": %.2f, "
      "\"cold_us\": %.2f, \"spans\": %d, \"items\": %d, \"partials\": %d, \"flags\": %u}\n",
      tree.name, side.requests, tables.max_blocks, std::string(name_of(policy)).c_str(), warm, cold, status.num_spans,
      status.num_items, status.num_partials, status.flags);
  std::fflush(stdout);
}

/// Attention by the host's plan and by the device's, same tensors.
void time_attention(cudaStream_t stream, const Tree& tree, Policy policy) {
  const Tables tables = tables_of(tree);
  const Side side(tables);
  const int requests = side.requests;
  const cuda::DeviceTableLimits limits{requests, tables.max_blocks, 0, kPageSize, tables.num_pages, 0};
  const std::int64_t page = std::int64_t{kPageSize} * kShape.num_kv_heads * 128;
  const std::size_t kv_bytes = static_cast<std::size_t>(tables.num_pages * page) * 2;
  const Device k(kv_bytes);
  const Device v(kv_bytes);
  const std::size_t row_bytes = static_cast<std::size_t>(requests) * 32 * 128 * 2;
  const Device q(row_bytes);
  const Device out(row_bytes);
  for (const Device* d : {&k, &v}) check(cudaMemset(d->as<char>(), 0, kv_bytes));
  check(cudaMemset(q.as<char>(), 0, row_bytes));
  KvCache cache;
  cache.k = {k.as<char>(), page, kShape.num_kv_heads * 128, 128};
  cache.v = {v.as<char>(), page, kShape.num_kv_heads * 128, 128};
  cache.dtype = DType::f16;
  cache.num_pages = tables.num_pages;
  cache.page_size = kPageSize;
  const auto args_for = [&](const Device& workspace, std::size_t bytes) {
    cuda::RunArgs args;
    args.q = {q.as<char>(), DType::f16, 32 * 128, 128};
    args.kv = {&cache, 1};
    args.out = {out.as<char>(), DType::f16, 32 * 128, 128};
    args.workspace = {workspace.as<std::byte>(), bytes};
    return args;
  };

  std::vector<std::int32_t> qo{0};
  std::vector<std::int32_t> indptr{0};
  std::vector<std::int32_t> indices;
  std::vector<std::int32_t> last;
  for (int b = 0; b < requests; ++b) {
    const std::int32_t length = tables.lengths[static_cast<std::size_t>(b)];
    const int pages = (length + kPageSize - 1) / kPageSize;
    const auto row = tables.block_table.begin() + std::int64_t{b} * tables.max_blocks;
    indices.insert(indices.end(), row, row + pages);
    indptr.push_back(static_cast<std::int32_t>(indices.size()));
    last.push_back(length - (pages - 1) * kPageSize);
    qo.push_back(b + 1);
  }
  Batch batch;
  batch.qo_indptr = qo;
  batch.kv = {indptr, indices, last, kPageSize, tables.num_pages, 0};
  Planner host(cuda::device_model(kShape));
  const Plan plan = host.plan(kShape, batch, with(policy));
  cuda::DevicePlan uploaded(kShape, cuda::Capacity::of(plan));
  uploaded.upload(plan, stream);
  const Device host_space(uploaded.workspace_size());
  const cuda::RunArgs host_args = args_for(host_space, uploaded.workspace_size());

  cuda::DevicePlanner planner(kShape, with(policy), limits);
  cuda::DevicePlan planned(kShape, planner.capacity());
  planner.plan(planned, side.view(), stream);
  const Device device_space(planned.workspace_size());
  const cuda::RunArgs device_args = args_for(device_space, planned.workspace_size());
  double by_host = 1e30;
  double by_device = 1e30;
  for (int i = 0; i < 3; ++i) {
    by_host = std::min(by_host, time_of(stream, 10, [&] { cuda::run(uploaded, host_args, stream); }));
    by_device = std::min(by_device, time_of(stream, 10, [&] { cuda::run(planned, device_args, stream); }));
  }
  std::printf(
      "{\"case\": \"%s\", \"requests\": %d, \"policy\": \"%s\", \"attend_host_plan_us\": %.2f, "
      "\"attend_device_plan_us\": %.2f, \"ratio\": %.4f}\n",
      tree.name, requests, std::string(name_of(policy)).c_str(), by_host, by_device, by_device / by_host);
  std::fflush(stdout);
}

/// A decode: every request grows by a token a step, a sixteenth of them by a page.
void time_host(cudaStream_t stream, const Tree& tree, Policy policy) {
  constexpr int kSteps = 64;
  const Tables tables = tables_of(tree);
  const auto requests = static_cast<int>(tables.lengths.size());
  std::vector<std::vector<std::int32_t>> pages;
  std::vector<std::int32_t> lengths;
  auto next = static_cast<std::int32_t>(tables.num_pages);
  const std::int64_t num_pages = next + std::int64_t{requests} * (kSteps / kPageSize + 2);
  for (int b = 0; b < requests; ++b) {
    lengths.push_back(tables.lengths[static_cast<std::size_t>(b)] - b % kPageSize);
    const auto row = tables.block_table.begin() + std::int64_t{b} * tables.max_blocks;
    pages.emplace_back(row, row + (lengths.back() + kPageSize - 1) / kPageSize);
  }
  std::vector<std::int32_t> qo(static_cast<std::size_t>(requests) + 1);
  std::vector<std::int32_t> grown(static_cast<std::size_t>(requests));
  std::iota(qo.begin(), qo.end(), 0);
  std::iota(grown.begin(), grown.end(), 0);
  std::vector<std::int32_t> indptr;
  std::vector<std::int32_t> indices;
  std::vector<std::int32_t> last;
  const auto batch_now = [&] {
    indptr.assign(1, 0);
    indices.clear();
    last.clear();
    for (std::size_t b = 0; b < pages.size(); ++b) {
      indices.insert(indices.end(), pages[b].begin(), pages[b].end());
      indptr.push_back(static_cast<std::int32_t>(indices.size()));
      last.push_back(lengths[b] - (static_cast<std::int32_t>(pages[b].size()) - 1) * kPageSize);
    }
    Batch batch;
    batch.qo_indptr = qo;
    batch.kv = {indptr, indices, last, kPageSize, num_pages, 0};
    return batch;
  };
  Planner planner(cuda::device_model(kShape));
  Plan plan = planner.plan(kShape, batch_now(), with(policy));
  cuda::Capacity capacity = cuda::Capacity::of(plan);
  capacity.max_page_ids += capacity.max_page_ids / 4;
  capacity.max_items += capacity.max_items;
  capacity.max_partials += capacity.max_partials + 1'024;
  cuda::DevicePlan device(kShape, capacity);
  device.upload(plan, stream);
  std::vector<double> updates;
  std::vector<double> totals;
  for (int step = 0; step < kSteps; ++step) {
    for (std::size_t b = 0; b < pages.size(); ++b) {
      if (++lengths[b] > static_cast<std::int32_t>(pages[b].size()) * kPageSize) pages[b].push_back(next++);
    }
    const Batch batch = batch_now();
    Changes changes;
    changes.grown = grown;
    check(cudaStreamSynchronize(stream));
    const auto microseconds = [from = std::chrono::steady_clock::now()] {
      return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - from).count();
    };
    planner.update(plan, batch, &changes);
    updates.push_back(microseconds());
    device.upload(plan, stream);
    check(cudaStreamSynchronize(stream));
    totals.push_back(microseconds());
  }
  const auto median = [](std::vector<double> v) {
    std::ranges::sort(v);
    return v[v.size() / 2];
  };
  std::printf(
      "{\"case\": \"%s\", \"requests\": %d, \"policy\": \"%s\", \"items\": %lld, \"update_us\": %.2f, "
      "\"update_and_upload_us\": %.2f}\n",
      tree.name, requests, std::string(name_of(policy)).c_str(), static_cast<long long>(plan.stats().num_items),
      median(updates), median(totals));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreate(&stream));
    const bool attend = argc > 1 && std::strcmp(argv[1], "attend") == 0;
    const bool host = argc > 1 && std::strcmp(argv[1], "host") == 0;
    if (argc > 1 && !attend && !host) {
      std::fprintf(stderr, "usage: cuda_plan [attend|host]\n");
      return 2;
    }
    if (host) {
      for (const Tree& tree :
           {Tree{"nothing shared", {256}, {2'048}}, Tree{"one prompt", {1, 256}, {2'000, 48}},
            Tree{"two prompts", {2, 256}, {2'000, 48}}, Tree{"three levels", {1, 8, 256}, {1'024, 976, 48}}}) {
        time_host(stream, tree, Policy::automatic);
      }
    } else if (attend) {
      for (const Tree& tree : {Tree{"nothing shared", {64}, {256}}, Tree{"one request", {1}, {4'096}},
                               Tree{"one prompt", {1, 256}, {512, 16}}, Tree{"one long prompt", {1, 32}, {2'048, 8}},
                               Tree{"two prompts", {2, 256}, {1'024, 32}}, Tree{"eight prompts", {8, 64}, {256, 64}},
                               Tree{"three levels", {1, 4, 64}, {256, 128, 16}},
                               Tree{"four levels", {1, 4, 32, 256}, {256, 128, 64, 6}}}) {
        for (const Policy policy : {Policy::automatic, Policy::forest}) time_attention(stream, tree, policy);
      }
    } else {
      for (const Tree& tree :
           {Tree{"nothing shared", {256}, {2'048}}, Tree{"one prompt", {1, 256}, {2'000, 48}},
            Tree{"two prompts", {2, 256}, {2'000, 48}}, Tree{"three levels", {1, 8, 256}, {1'024, 976, 48}},
            Tree{"four levels", {1, 4, 32, 256}, {1'024, 512, 464, 48}},
            Tree{"one prompt, 32 requests", {1, 32}, {2'000, 48}},
            Tree{"one prompt, 1024 requests", {1, 1'024}, {2'000, 48}}}) {
        for (const Policy policy : {Policy::automatic, Policy::forest, Policy::flat}) {
          time_planning(stream, tree, policy);
        }
      }
    }
    check(cudaStreamDestroy(stream));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cuda_plan: %s\n", error.what());
    return 1;
  }
}
