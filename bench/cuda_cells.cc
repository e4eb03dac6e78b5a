// Attention on the GPU, cell by cell: forests from a file, one attention call each, timed by graph replay.
//
// A cell is a line: name Hq Hkv D count, then count pairs (parent, tokens); leaves are the requests. Several copies of
// the KV cache are used in turn inside one graph, together larger than the second-level cache, so that KV is cold.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/forest.h"
#include "bench/paged.h"
#include "headwater/cuda.h"

namespace {

using namespace headwater;  // NOLINT(google-build-using-namespace): a program

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

struct Cell {
  std::string name;
  int hq = 0, hkv = 0, dim = 0;
  bench::Forest forest;
};

std::vector<Cell> read_cells(const char* path) {
  std::ifstream in(path);
  std::vector<Cell> cells;
  for (std::string line; std::getline(in, line);) {
    std::istringstream text(line);
    Cell cell;
    int count = 0;
    text >> cell.name >> cell.hq >> cell.hkv >> cell.dim >> count;
    std::vector<bool> inner(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) {
      bench::ForestNode node;
      text >> node.parent >> node.num_tokens;
      if (node.parent >= 0) inner[static_cast<std::size_t>(node.parent)] = true;
      cell.forest.nodes.push_back(node);
    }
    for (int i = 0; i < count; ++i) {
      if (!inner[static_cast<std::size_t>(i)]) cell.forest.requests.push_back({i, 1});
    }
    cells.push_back(std::move(cell));
  }
  return cells;
}

struct Device {
  std::byte* data = nullptr;
  explicit Device(std::size_t bytes) {
    check(cudaMalloc(reinterpret_cast<void**>(&data), std::max<std::size_t>(bytes, 1)));
  }
  ~Device() { cudaFree(data); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
};

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

class Bench {
 public:
  Bench() {
    check(cudaStreamCreate(&stream_));
    check(cudaEventCreate(&begin_));
    check(cudaEventCreate(&end_));
    random_.resize(std::size_t{1} << 24);
    bench::fill_normal(random_.data(), DType::f16, random_.size(), 1.0F, 7);
  }

  void run(const Cell& cell, const std::vector<Policy>& policies) {
    AttentionShape shape{cell.hq, cell.hkv, cell.dim, cell.dim, DType::f16, DType::f16, DType::f16};
    const bench::PagedForest paged = bench::make_paged(cell.forest, 16, 1);
    const std::int64_t pages = bench::count_pages(cell.forest, 16);
    const std::int64_t token = std::int64_t{cell.hkv} * cell.dim;
    const std::size_t side = static_cast<std::size_t>(pages * 16 * token) * 2;
    const int copies = static_cast<int>(std::clamp<std::size_t>((std::size_t{160} << 20) / (2 * side) + 1, 2, 24));
    Device kv(2 * side * static_cast<std::size_t>(copies));
    fill(kv.data, 2 * side * static_cast<std::size_t>(copies));
    std::vector<KvCache> caches(static_cast<std::size_t>(copies));
    for (int i = 0; i < copies; ++i) {
      KvCache& cache = caches[static_cast<std::size_t>(i)];
      cache.dtype = DType::f16;
      cache.num_pages = pages;
      cache.page_size = 16;
      cache.k = {kv.data + 2 * static_cast<std::size_t>(i) * side, 16 * token, token, cell.dim};
      cache.v = {kv.data + (2 * static_cast<std::size_t>(i) + 1) * side, 16 * token, token, cell.dim};
    }
    const std::int64_t rows = paged.num_rows();
    const std::int64_t row = std::int64_t{cell.hq} * cell.dim;
    Device q(static_cast<std::size_t>(rows * row) * 2);
    fill(q.data, static_cast<std::size_t>(rows * row) * 2);
    Device out(static_cast<std::size_t>(rows * row) * 2);
    Device lse(static_cast<std::size_t>(rows * cell.hq) * 4);
    const double gib = 2.0 * static_cast<double>(side);
    const double floor_us = gib / 4.55e6;
    std::printf("%-30s B=%-3lld floor %6.1f", cell.name.c_str(), static_cast<long long>(rows), floor_us);
    for (const Policy policy : policies) {
      PlanOptions options;
      options.policy = policy;
      Planner planner(cuda::device_model(shape));
      Plan plan = planner.plan(shape, paged.batch(), options);
      cuda::DevicePlan device(shape, cuda::Capacity::of(plan));
      Device workspace(device.workspace_size());
      device.upload(plan, stream_);
      cuda::RunArgs args;
      args.q = {q.data, DType::f16, row, cell.dim};
      args.out = {out.data, DType::f16, row, cell.dim};
      args.lse = {reinterpret_cast<float*>(lse.data), cell.hq, 1};
      args.workspace = {workspace.data, device.workspace_size()};
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
      for (int i = 0; i < copies; ++i) {
        args.kv = std::span(&caches[static_cast<std::size_t>(i)], 1);
        cuda::run(device, args, stream_);
      }
      check(cudaStreamEndCapture(stream_, &graph));
      check(cudaGraphInstantiate(&exec, graph, 0));
      std::vector<double> times;
      for (int i = 0; i < 23; ++i) {
        check(cudaEventRecord(begin_, stream_));
        check(cudaGraphLaunch(exec, stream_));
        check(cudaEventRecord(end_, stream_));
        check(cudaEventSynchronize(end_));
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin_, end_));
        if (i >= 3) times.push_back(1000.0 * ms / copies);
      }
      cudaGraphExecDestroy(exec);
      cudaGraphDestroy(graph);
      const auto t0 = std::chrono::steady_clock::now();
      planner.update(plan, paged.batch(), nullptr);
      const double update = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - t0).count();
      std::printf(" | %s %7.2f (predicted %6.1f, items %lld, partials %lld, plan %.0f)",
                  std::string(name_of(policy)).c_str(), median(times),
                  static_cast<double>(plan.stats().predicted_ps) / 1e6, static_cast<long long>(plan.stats().num_items),
                  static_cast<long long>(plan.stats().num_partials), update);
    }
    std::printf("\n");
    std::fflush(stdout);
  }

 private:
  void fill(std::byte* to, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += random_.size() * 2) {
      check(cudaMemcpy(to + at, random_.data(), std::min(bytes - at, random_.size() * 2), cudaMemcpyHostToDevice));
    }
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  std::vector<std::uint16_t> random_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s CELLS [name part]\n", argv[0]);
    return 2;
  }
  try {
    Bench bench;
    for (const Cell& cell : read_cells(argv[1])) {
      if (argc > 2 && cell.name.find(argv[2]) == std::string::npos) continue;
      bench.run(cell, {Policy::flat, Policy::automatic, Policy::forest});
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
