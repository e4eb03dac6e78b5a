// append_kv and copy_pages on the GPU leave exactly the bytes that the CPU's leave, in every type and layout, in
// captured graphs and past 2^32 elements. Refusals, in the CPU's words, need no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu/expect_error.h"
#include "cuda/device_runner.h"
#include "headwater/cuda.h"
#include "reference/element.h"
#include "reference/pool.h"
#include "reference/rng.h"

namespace headwater::cuda_test {
namespace {

using reference::Layout;
using reference::Pool;
using reference::Rng;

constexpr std::array kEveryLayout{Layout::nhd,      Layout::hnd,      Layout::nhd_pair, Layout::hnd_pair,
                                  Layout::nhd_side, Layout::hnd_side, Layout::latent};

void ok(cudaError_t status) {
  ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
}

AttentionShape shape_of(DType kv, int heads, int dim_qk, int dim_vo) {
  return {heads, heads, dim_qk, dim_vo, DType::bf16, kv, DType::bf16};
}

/// A host cache's memory on the device.
class DeviceCache {
 public:
  DeviceCache(const KvCache& host, const AttentionShape& shape) : cache(host) {
    const auto extent = [&](const PagedTensor& t, int dim) {
      const std::int64_t elements = (host.num_pages - 1) * t.page_stride + (host.page_size - 1) * t.token_stride +
                                    (shape.num_kv_heads - 1) * t.head_stride + dim;
      auto* begin = static_cast<std::byte*>(t.data);
      return std::pair{begin, begin + static_cast<std::size_t>(elements) * size_of(host.dtype)};
    };
    auto [k, k_end] = extent(host.k, shape.head_dim_qk);
    auto [v, v_end] = extent(host.v, shape.head_dim_vo);
    if (k < v_end && v < k_end) {
      add(std::min(k, v), std::max(k_end, v_end));
      cache.k.data = parts_[0].memory->data() + (k - parts_[0].host);
      cache.v.data = parts_[0].memory->data() + (v - parts_[0].host);
    } else {
      add(k, k_end);
      add(v, v_end);
      cache.k.data = parts_[0].memory->data();
      cache.v.data = parts_[1].memory->data();
    }
  }

  /// "" where the device's memory, bytes between the elements included, equals the host's.
  [[nodiscard]] std::string difference() const {
    for (const Part& part : parts_) {
      std::vector<std::byte> got(part.bytes);
      part.memory->get(got.data(), got.size());
      if (!part.memory->intact()) return "bytes outside were written";
      for (std::size_t i = 0; i < got.size(); ++i) {
        if (got[i] != part.host[i]) return "byte " + std::to_string(i) + " of " + std::to_string(got.size());
      }
    }
    return "";
  }

  KvCache cache;  ///< on the device

 private:
  struct Part {
    const std::byte* host;
    std::size_t bytes;
    std::unique_ptr<DeviceMemory> memory;
  };
  void add(const std::byte* begin, const std::byte* end) {
    const auto bytes = static_cast<std::size_t>(end - begin);
    parts_.push_back({begin, bytes, std::make_unique<DeviceMemory>(bytes)});
    parts_.back().memory->put(begin, bytes);
  }

  std::vector<Part> parts_;
};

/// An array on the device.
template <class Element>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<Element>& values) : memory_(values.size() * sizeof(Element)) { put(values); }
  void put(const std::vector<Element>& values) { memory_.put(values.data(), values.size() * sizeof(Element)); }
  [[nodiscard]] Element* data() const { return reinterpret_cast<Element*>(memory_.data()); }
  [[nodiscard]] Element first() const {
    Element value;
    memory_.get(&value, sizeof(Element));
    return value;
  }
  [[nodiscard]] bool intact() const { return memory_.intact(); }

 private:
  DeviceMemory memory_;
};

/// New rows [rows, heads, dim] with `gap` elements after each head: normal deviates among zeros, ties, subnormals of
/// every type and numbers beyond the range of some.
struct Rows {
  std::vector<std::byte> data;
  ConstRowsView host;
  std::unique_ptr<DeviceMemory> memory;
  ConstRowsView device;

  Rows(DType type, std::int64_t rows, int heads, int dim, int gap, Rng& rng, bool on_device = true) {
    const std::int64_t head_stride = dim + gap;
    data.resize(static_cast<std::size_t>(rows * heads * head_stride) * size_of(type));
    host = device = {data.data(), type, heads * head_stride, head_stride};
    fill(rng);
    if (!on_device) return;
    memory = std::make_unique<DeviceMemory>(data.size());
    upload();
    device.data = memory->data();
  }
  void fill(Rng& rng) {
    const auto count = static_cast<std::int64_t>(data.size() / size_of(host.dtype));
    for (std::int64_t i = 0; i < count; ++i) {
      const double sign = rng.chance(0.5) ? 1.0 : -1.0;
      double x = 100.0 * rng.normal();
      if (rng.chance(0.2)) x = sign * std::ldexp(static_cast<double>(rng.integer(0, 64)) / 4.0, -10);  // ties of fp8
      if (rng.chance(0.1)) x = sign * std::ldexp(1.0 + rng.uniform(), rng.integer(-30, 20));
      reference::store(host.dtype, data.data(), i, x);
    }
  }
  void upload() { memory->put(data.data(), data.size()); }
};

TEST(CudaAppend, EveryTypeAndLayout) {
  HEADWATER_NEEDS_GPU();
  Rng rng(1);
  const int heads = 3;
  SerialExecutor serial;
  const std::vector<float> k_scale{0.75F};
  const std::vector<float> v_scales{0.5F, 1.0F, 2.25F};
  const DeviceArray<float> device_k_scale(k_scale);
  const DeviceArray<float> device_v_scales(v_scales);
  struct Case {
    int dim_qk;
    int dim_vo;
    int page_size;
    std::int64_t padding;
    int gap;
  };
  for (const Layout layout : kEveryLayout) {
    for (const DType from : {DType::f32, DType::f16, DType::bf16}) {
      for (const DType to : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3}) {
        for (const Case& c : {Case{128, 128, 16, 0, 0}, {80, 64, 7, 5, 3}, {192, 128, 8, 64, 16}}) {
          const std::int64_t rows = 90;
          const AttentionShape shape = shape_of(to, heads, c.dim_qk, c.dim_vo);
          Pool memory(shape, 40, c.page_size, layout, c.padding);
          DeviceCache device(memory.cache(), shape);
          const Rows k(from, rows, heads, c.dim_qk, c.gap, rng);
          const Rows v(from, rows, heads, c.dim_vo, c.gap, rng);
          std::vector<std::int64_t> slots;
          for (std::int64_t r = 0; r < rows; ++r) slots.push_back(r % 9 == 4 ? -1 : (r * 83 + 11) % (40 * c.page_size));
          const DeviceArray<std::int64_t> device_slots(slots);
          const DeviceArray<std::int32_t> bad(std::vector<std::int32_t>{0});
          cpu::append_kv(memory.cache(), k.host, v.host, slots, heads, c.dim_qk, c.dim_vo, {k_scale.data(), 1},
                         {v_scales.data(), heads}, serial);
          cuda::append_kv(device.cache, k.device, v.device, device_slots.data(), rows, heads, c.dim_qk, c.dim_vo,
                          {device_k_scale.data(), 1}, {device_v_scales.data(), heads}, nullptr, bad.data());
          ok(cudaDeviceSynchronize());
          ASSERT_EQ(device.difference(), "")
              << reference::name_of(layout) << ", " << name_of(from) << " to " << name_of(to) << ", " << c.dim_qk;
          ASSERT_EQ(bad.first(), 0);
        }
      }
    }
  }
}

TEST(CudaAppend, KeysAndValuesOfDifferentTypes) {
  HEADWATER_NEEDS_GPU();
  Rng rng(2);
  SerialExecutor serial;
  for (const Layout layout : {Layout::hnd, Layout::latent}) {
    const AttentionShape shape = shape_of(DType::bf16, 1, 64, 64);
    Pool memory(shape, 4, 16, layout);
    DeviceCache device(memory.cache(), shape);
    const Rows k(DType::f32, 5, 1, 64, 0, rng);
    const Rows v(DType::f16, 5, 1, 64, 0, rng);
    const std::vector<std::int64_t> slots{3, 60, 17, 40, 0};
    const DeviceArray<std::int64_t> device_slots(slots);
    cpu::append_kv(memory.cache(), k.host, v.host, slots, 1, 64, 64, {}, {}, serial);
    cuda::append_kv(device.cache, k.device, v.device, device_slots.data(), 5, 1, 64, 64, {}, {}, nullptr);
    ok(cudaDeviceSynchronize());
    EXPECT_EQ(device.difference(), "") << reference::name_of(layout);
  }
}

TEST(CudaAppend, SlotsBeyondThePoolAreSkippedAndCounted) {
  HEADWATER_NEEDS_GPU();
  Rng rng(3);
  const AttentionShape shape = shape_of(DType::f16, 2, 64, 64);
  Pool memory(shape, 4, 16, Layout::nhd);
  DeviceCache device(memory.cache(), shape);
  const Rows rows(DType::f16, 4, 2, 64, 0, rng);
  SerialExecutor serial;
  cpu::append_kv(memory.cache(), rows.host, rows.host, std::vector<std::int64_t>{-1, 63, -1, -1}, 2, 64, 64, {}, {},
                 serial);
  const DeviceArray<std::int64_t> slots(std::vector<std::int64_t>{64, 63, std::int64_t{1} << 62, -7});
  const DeviceArray<std::int32_t> bad(std::vector<std::int32_t>{5});
  cuda::append_kv(device.cache, rows.device, rows.device, slots.data(), 4, 2, 64, 64, {}, {}, nullptr, bad.data());
  cuda::append_kv(device.cache, rows.device, rows.device, slots.data(), 4, 2, 64, 64, {}, {}, nullptr);
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(device.difference(), "");
  EXPECT_EQ(bad.first(), 7);
  EXPECT_TRUE(bad.intact());
}

TEST(CudaCopyPages, EveryLayoutAndChainsOfCopies) {
  HEADWATER_NEEDS_GPU();
  Rng rng(4);
  SerialExecutor serial;
  for (const Layout layout : kEveryLayout) {
    for (const DType type : {DType::f32, DType::bf16, DType::f8e4m3}) {
      for (const std::int64_t padding : {0, 5}) {
        const AttentionShape shape = shape_of(type, 5, 96, padding == 0 ? 64 : 63);
        Pool memory(shape, 600, 8, layout, padding);
        for (int page = 0; page < 60; page += 2) {
          for (int token = 0; token < 8; ++token) memory.fill_token(rng, page, token);
        }
        DeviceCache device(memory.cache(), shape);
        // Chains: what the second reads the first has written, the third writes what the first has read, and so on; and
        // more copies than one launch takes.
        std::vector<cpu::PageCopy> copies{{2, 5, 7}, {5, 0, 3}, {2, 7, 8}, {2, 1, 0}, {4, 2, 8}, {6, 2, 5}};
        for (int i = 10; i < 300; ++i) copies.push_back({2 * ((i + 7) % 100), 2 * i + 1 - i % 2, i % 9});
        for (int i = 0; i < 40; ++i) copies.push_back({rng.integer(0, 299), rng.integer(300, 599), rng.integer(0, 8)});
        cpu::copy_pages(memory.cache(), copies, 5, 96, shape.head_dim_vo, serial);
        cuda::copy_pages(device.cache, copies, 5, 96, shape.head_dim_vo, nullptr);
        ok(cudaDeviceSynchronize());
        ASSERT_EQ(device.difference(), "") << reference::name_of(layout) << ", " << name_of(type) << ", " << padding;
      }
    }
  }
}

TEST(CudaCopyPages, ListOnTheDevice) {
  HEADWATER_NEEDS_GPU();
  Rng rng(5);
  SerialExecutor serial;
  const AttentionShape shape = shape_of(DType::bf16, 2, 128, 128);
  Pool memory(shape, 16, 16, Layout::hnd);
  for (int page = 0; page < 8; ++page) {
    for (int token = 0; token < 16; ++token) memory.fill_token(rng, page, token);
  }
  DeviceCache device(memory.cache(), shape);
  const std::vector<cpu::PageCopy> good{{0, 8, 16}, {0, 9, 3}, {3, 10, 1}, {0, 0, 0}};
  std::vector<cpu::PageCopy> all = good;  // the last of `good` is what a list is padded with: a page onto itself
  for (const cpu::PageCopy bad :
       {cpu::PageCopy{-1, 11, 4}, {16, 11, 4}, {1, -1, 4}, {1, 16, 4}, {1, 11, -1}, {1, 11, 17}, {1, 1, 4}}) {
    all.push_back(bad);
  }
  cpu::copy_pages(memory.cache(), std::span(good).first(3), 2, 128, 128, serial);
  const DeviceArray<cpu::PageCopy> list(all);
  const DeviceArray<std::int32_t> bad(std::vector<std::int32_t>{0});
  cuda::copy_pages(device.cache, list.data(), static_cast<std::int64_t>(all.size()), 2, 128, 128, nullptr, bad.data());
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(device.difference(), "");
  EXPECT_EQ(bad.first(), 7);
}

// One graph, captured once: copies and an append that read their lists, slots and rows anew at every replay.
TEST(CudaAppend, GraphReplaysReadTheirListsAnew) {
  HEADWATER_NEEDS_GPU();
  Rng rng(6);
  SerialExecutor serial;
  const AttentionShape shape = shape_of(DType::f8e4m3, 4, 128, 128);
  Pool memory(shape, 64, 16, Layout::hnd);
  for (int page = 0; page < 32; ++page) {
    for (int token = 0; token < 16; ++token) memory.fill_token(rng, page, token);
  }
  DeviceCache device(memory.cache(), shape);
  Rows k(DType::f16, 8, 4, 128, 0, rng);
  Rows v(DType::f16, 8, 4, 128, 0, rng);
  DeviceArray<std::int64_t> slots(std::vector<std::int64_t>(8, -1));
  DeviceArray<cpu::PageCopy> list(std::vector<cpu::PageCopy>(4));
  const std::vector<cpu::PageCopy> fixed{{1, 62, 9}};
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ok(cudaStreamCreate(&stream));
  ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  {
    std::vector<cpu::PageCopy> gone = fixed;  // is not read again
    cuda::copy_pages(device.cache, gone, 4, 128, 128, stream);
    std::ranges::fill(gone, cpu::PageCopy{3, 4, 16});
  }
  cuda::copy_pages(device.cache, list.data(), 4, 4, 128, 128, stream);
  cuda::append_kv(device.cache, k.device, v.device, slots.data(), 8, 4, 128, 128, {}, {}, stream);
  ok(cudaStreamEndCapture(stream, &graph));
  ok(cudaGraphInstantiate(&exec, graph, 0));
  ok(cudaDeviceSynchronize());
  for (int replay = 0; replay < 3; ++replay) {
    std::vector<std::int64_t> now;
    for (int i = 0; i < 8; ++i) now.push_back(i == replay ? -1 : (std::int64_t{40} + 2 * i) * 16 + replay);
    std::vector<cpu::PageCopy> copies(4);
    for (int i = 0; i <= replay; ++i) copies[static_cast<std::size_t>(i)] = {i, 41 + 2 * i, 5 + replay};
    k.fill(rng);
    v.fill(rng);
    k.upload();
    v.upload();
    slots.put(now);
    list.put(copies);
    ok(cudaGraphLaunch(exec, stream));
    ok(cudaStreamSynchronize(stream));
    cpu::copy_pages(memory.cache(), fixed, 4, 128, 128, serial);
    cpu::copy_pages(memory.cache(), std::span(copies).first(static_cast<std::size_t>(replay) + 1), 4, 128, 128, serial);
    cpu::append_kv(memory.cache(), k.host, v.host, now, 4, 128, 128, {}, {}, serial);
    ASSERT_EQ(device.difference(), "") << "replay " << replay;
  }
  ok(cudaGraphExecDestroy(exec));
  ok(cudaGraphDestroy(graph));
  ok(cudaStreamDestroy(stream));
}

// Pages lie 2^32 elements and more apart, so every offset cut to 32 bits lands in page 0.
TEST(CudaAppend, AndCopiesWithOffsetsPast32Bits) {
  HEADWATER_NEEDS_GPU();
  constexpr std::int64_t kPage = (std::int64_t{1} << 32) + 4096;
  const int heads = 2;
  const int dim = 32;
  for (const DType to : {DType::f8e4m3, DType::bf16}) {
    const std::size_t element = size_of(to);
    const std::size_t bytes = static_cast<std::size_t>(2 * kPage + 4096) * element;
    std::size_t available = 0;
    std::size_t all = 0;
    ok(cudaMemGetInfo(&available, &all));
    if (available < bytes + (std::size_t{64} << 20)) {
      GTEST_SKIP() << "needs " << bytes << " bytes of device memory, " << available << " are left";
    }
    const DeviceMemory memory(bytes);
    const KvCache cache{
        {memory.data(), kPage, heads * dim, dim}, {memory.data() + 2048 * element, kPage, heads * dim, dim}, to, 3, 16};
    Rng rng(7);
    const Rows rows(DType::f32, 2, heads, dim, 0, rng);
    const DeviceArray<std::int64_t> slots(std::vector<std::int64_t>{2 * 16 + 3, 16 + 5});
    cuda::append_kv(cache, rows.device, rows.device, slots.data(), 2, heads, dim, dim, {}, {}, nullptr);
    cuda::copy_pages(cache, std::vector<cpu::PageCopy>{{2, 1, 4}}, heads, dim, dim, nullptr);
    ok(cudaDeviceSynchronize());
    EXPECT_TRUE(memory.intact());
    std::vector<std::vector<std::byte>> pages;
    for (int page = 0; page < 3; ++page) {
      pages.emplace_back(4096 * element);
      ok(cudaMemcpy(pages.back().data(), memory.data() + static_cast<std::size_t>(page * kPage) * element,
                    pages.back().size(), cudaMemcpyDeviceToHost));
    }
    const auto at = [&](int page, int side, int token, int i) {
      return reference::load(to, pages[static_cast<std::size_t>(page)].data(), side * 2048 + token * heads * dim + i);
    };
    for (int side = 0; side < 2; ++side) {
      for (int i = 0; i < heads * dim; ++i) {
        const double first = reference::round_to(to, reference::load(DType::f32, rows.host.data, i));
        ASSERT_EQ(at(2, side, 3, i), first);
        ASSERT_EQ(at(1, side, 3, i), first) << "copied";
        ASSERT_EQ(at(1, side, 5, i),
                  reference::round_to(to, reference::load(DType::f32, rows.host.data, heads * dim + i)));
      }
    }
    for (const std::byte b : pages[0]) ASSERT_EQ(b, std::byte{0xff}) << "page 0 was written";
  }
}

TEST(CudaStorage, NothingToDoLaunchesNothing) {
  const KvCache cache{{}, {}, DType::f16, 0, 16};
  EXPECT_NO_THROW(
      cuda::append_kv(cache, {nullptr, DType::f16}, {nullptr, DType::f16}, nullptr, 0, 2, 64, 64, {}, {}, nullptr));
  EXPECT_NO_THROW(cuda::copy_pages(cache, {}, 2, 64, 64, nullptr));
  EXPECT_NO_THROW(cuda::copy_pages(cache, nullptr, 0, 2, 64, 64, nullptr));
}

/// Refused before anything reaches a device: host memory stands for its memory, and stays as it is.
class CudaStorageRefusals : public testing::Test {
 protected:
  Rng rng_{3};
  Pool memory_{shape_of(DType::f8e4m3, 2, 32, 32), 4, 16, Layout::nhd};
  KvCache cache_ = memory_.cache();
  Rows k_{DType::bf16, 2, 2, 32, 0, rng_, false};
  Rows v_{DType::bf16, 2, 2, 32, 0, rng_, false};
  std::vector<std::int64_t> slots_{3, 63};
  const std::int64_t* slots_at_ = slots_.data();
  std::vector<cpu::PageCopy> copies_{{0, 1, 16}};
  Scale k_scale_;
  std::int64_t num_rows_ = 2;
  int heads_ = 2;

  void append_refused(const std::string& message) {
    expect_error(ErrorCode::invalid_argument, message, [&] {
      cuda::append_kv(cache_, k_.host, v_.host, slots_at_, num_rows_, heads_, 32, 32, k_scale_, {}, nullptr);
    });
  }
  void copy_refused(const std::string& message) {
    expect_error(ErrorCode::invalid_argument, message,
                 [&] { cuda::copy_pages(cache_, copies_, heads_, 32, 32, nullptr); });
  }
};

TEST_F(CudaStorageRefusals, Append) {
  heads_ = 0;
  append_refused("num_kv_heads = 0, expected at least 1");
  heads_ = 2;
  num_rows_ = -1;
  append_refused("num_rows = -1, expected 0..2147483647");
  num_rows_ = 2;
  k_.host.dtype = DType::f8e4m3;
  append_refused("k.dtype = f8e4m3, expected f32, f16 or bf16");
  k_.host.dtype = DType::bf16;
  v_.host.head_stride = 16;
  append_refused("v.head_stride = 16, expected at least 32 (elements that the inner dimensions span)");
  v_.host.head_stride = 32;
  v_.host.data = nullptr;
  append_refused("v.data = nullptr, expected a tensor");
  v_.host.data = v_.data.data();
  cache_.page_size = 0;
  append_refused("cache.page_size = 0, expected at least 1");
  cache_.page_size = 16;
  cache_.k.data = nullptr;
  append_refused("cache.k.data = nullptr, expected a tensor");
  cache_ = memory_.cache();
  cache_.v.token_stride = 32;
  append_refused("cache.v.head_stride = 32, expected at least 512 (elements that the inner dimensions span)");
  cache_ = memory_.cache();
  const float scales[3] = {1.0F, 1.0F, 1.0F};
  k_scale_ = {scales, 3};
  append_refused("k_scale.count = 3, expected 1 or 2 (num_kv_heads)");
  k_scale_ = {};
  slots_at_ = nullptr;
  append_refused("token_slots = nullptr, expected device memory");
  slots_at_ = reinterpret_cast<const std::int64_t*>(reinterpret_cast<const std::byte*>(slots_.data()) + 4);
  append_refused("token_slots = an address 4 bytes off, expected alignment to 8 bytes");
}

TEST_F(CudaStorageRefusals, Copies) {
  copies_[0].src = -1;
  copy_refused("copies[0].src = -1, expected a page in [0, 4)");
  copies_[0] = {0, 1, 17};
  copy_refused("copies[0].num_tokens = 17, expected 0 to page_size = 16");
  copies_ = {{0, 1, 16}, {1, 4, 3}};
  copy_refused("copies[1].dst = 4, expected a page in [0, 4)");
  copies_ = {{2, 2, 3}};
  copy_refused("copies[0].dst = 2, expected a page other than src");
  expect_error(ErrorCode::invalid_argument, "copies = nullptr, expected device memory",
               [&] { cuda::copy_pages(cache_, nullptr, 3, 2, 32, 32, nullptr); });
  expect_error(ErrorCode::invalid_argument, "num_copies = -2, expected 0..2147483647",
               [&] { cuda::copy_pages(cache_, copies_.data(), -2, 2, 32, 32, nullptr); });
}

}  // namespace
}  // namespace headwater::cuda_test
