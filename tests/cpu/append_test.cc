// append_kv and copy_pages: every type and layout, skipped slots, copies that depend on each other, refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/expect_error.h"
#include "headwater/cpu.h"
#include "reference/element.h"
#include "reference/memory.h"
#include "reference/pool.h"
#include "reference/rng.h"

namespace headwater {
namespace {

using reference::Layout;
using reference::Pool;
using reference::Rng;

AttentionShape shape_of(DType kv, int heads, int dim_qk, int dim_vo) {
  AttentionShape shape;
  shape.num_qo_heads = heads;
  shape.num_kv_heads = heads;
  shape.head_dim_qk = dim_qk;
  shape.head_dim_vo = dim_vo;
  shape.kv_dtype = kv;
  return shape;
}

double at(const KvCache& cache, const PagedTensor& side, std::int64_t page, std::int64_t token, int head, int d) {
  return reference::load(cache.dtype, side.data,
                         page * side.page_stride + token * side.token_stride + head * side.head_stride + d);
}

/// New rows [rows, heads, dim] with a gap after each head.
struct Rows {
  std::vector<std::byte> data;
  ConstRowsView view;
  int dim;

  Rows(DType type, std::int64_t rows, int heads, int dim_, Rng& rng) : dim(dim_) {
    const std::int64_t head_stride = dim + 3;
    data.resize(static_cast<std::size_t>(rows * heads * head_stride) * size_of(type));
    view = {data.data(), type, heads * head_stride, head_stride};
    for (std::int64_t i = 0; i < rows * heads * head_stride; ++i) {
      reference::store(type, data.data(), i, 100.0 * rng.normal());
    }
  }
  [[nodiscard]] double at(std::int64_t row, int head, int d) const {
    return reference::load(view.dtype, view.data, row * view.row_stride + head * view.head_stride + d);
  }
};

TEST(AppendKv, EveryTypeAndLayout) {
  Rng rng(1);
  const int heads = 3;
  const float k_scale = 0.75F;
  const float v_scales[heads] = {0.5F, 1.0F, 2.25F};
  ThreadPool pool(3);
  for (const Layout layout : reference::kLayouts) {
    for (const DType from : {DType::f32, DType::f16, DType::bf16}) {
      for (const DType to : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3}) {
        for (const std::int64_t rows : {5, 200}) {
          const int dim_qk = 80;
          const int dim_vo = 64;
          Pool memory(shape_of(to, heads, dim_qk, dim_vo), 40, 7, layout, 5);
          const Rows k(from, rows, heads, dim_qk, rng);
          const Rows v(from, rows, heads, dim_vo, rng);
          std::vector<std::int64_t> slots;
          for (std::int64_t r = 0; r < rows; ++r) slots.push_back(r % 9 == 4 ? -1 : (r * 83 + 11) % (40 * 7));
          const KvCache& cache = memory.cache();
          cpu::append_kv(cache, k.view, v.view, slots, heads, dim_qk, dim_vo, {&k_scale, 1}, {v_scales, heads}, pool);
          ASSERT_TRUE(memory.intact());
          std::vector<bool> written(40 * 7);
          for (std::int64_t r = 0; r < rows; ++r) {
            const std::int64_t slot = slots[static_cast<std::size_t>(r)];
            if (slot < 0) continue;
            written[static_cast<std::size_t>(slot)] = true;
            for (int h = 0; h < heads; ++h) {
              const auto stored = [&](double x, float scale) {
                if (to != DType::f8e4m3) return reference::round_to(to, x);
                return reference::round_to(to, static_cast<double>(static_cast<float>(x) / scale));
              };
              for (int d = 0; d < dim_qk; ++d) {
                ASSERT_EQ(at(cache, cache.k, slot / 7, slot % 7, h, d), stored(k.at(r, h, d), k_scale));
              }
              for (int d = 0; d < dim_vo; ++d) {
                ASSERT_EQ(at(cache, cache.v, slot / 7, slot % 7, h, d), stored(v.at(r, h, d), v_scales[h]));
              }
            }
          }
          for (std::int64_t slot = 0; slot < 40 * 7; ++slot) {
            if (written[static_cast<std::size_t>(slot)]) continue;
            for (int h = 0; h < heads; ++h) ASSERT_TRUE(std::isnan(at(cache, cache.k, slot / 7, slot % 7, h, 0)));
          }
        }
      }
    }
  }
}

TEST(CopyPages, CopiesValidTokensOnly) {
  Rng rng(2);
  for (const Layout layout : reference::kLayouts) {
    for (const int workers : {1, 3}) {
      const AttentionShape shape = shape_of(DType::bf16, 5, 96, 64);
      Pool memory(shape, 8, 64, layout, 0);
      for (int token = 0; token < 64; ++token) memory.fill_token(rng, 2, token);
      const KvCache& cache = memory.cache();
      ThreadPool pool(workers);
      // The second copy reads what the first wrote.
      const std::vector<cpu::PageCopy> copies{{2, 5, 40}, {5, 0, 17}, {2, 7, 64}, {2, 1, 0}};
      cpu::copy_pages(cache, copies, 5, 96, 64, pool);
      ASSERT_TRUE(memory.intact());
      const int valid[8] = {17, 0, 64, 0, 0, 40, 0, 64};
      for (int page = 0; page < 8; ++page) {
        for (int token = 0; token < 64; ++token) {
          for (int h = 0; h < 5; ++h) {
            for (int d = 0; d < 64; ++d) {
              if (token < valid[page]) {
                ASSERT_EQ(at(cache, cache.k, page, token, h, d), at(cache, cache.k, 2, token, h, d));
                ASSERT_EQ(at(cache, cache.v, page, token, h, d), at(cache, cache.v, 2, token, h, d));
              } else {
                ASSERT_TRUE(std::isnan(at(cache, cache.k, page, token, h, d)));
                ASSERT_TRUE(std::isnan(at(cache, cache.v, page, token, h, d)));
              }
            }
          }
        }
      }
    }
  }
}

// Pages lie 2^32 elements and more apart, so every offset cut to 32 bits lands in page 0.
TEST(AppendKv, AndCopiesWithOffsetsPast32Bits) {
  constexpr std::int64_t kPage = (std::int64_t{1} << 32) + 4096;
  const int heads = 2;
  const int dim = 32;
  for (const DType to : {DType::f8e4m3, DType::bf16}) {
    const reference::SparseBuffer memory((2 * kPage + 4096) * size_of(to));
    const auto base = static_cast<std::byte*>(memory.data());
    const PagedTensor k{base, kPage, heads * dim, dim};
    const PagedTensor v{base + 2048 * size_of(to), kPage, heads * dim, dim};
    const KvCache cache{k, v, to, 3, 16};
    Rng rng(4);
    const Rows rows(DType::f32, 2, heads, dim, rng);
    ThreadPool pool(2);
    cpu::append_kv(cache, rows.view, rows.view, std::vector<std::int64_t>{2 * 16 + 3, 16 + 5}, heads, dim, dim, {}, {},
                   pool);
    cpu::copy_pages(cache, std::vector<cpu::PageCopy>{{2, 1, 4}}, heads, dim, dim, pool);
    for (const PagedTensor& side : {k, v}) {
      for (int h = 0; h < heads; ++h) {
        for (int d = 0; d < dim; ++d) {
          const double first = reference::round_to(to, rows.at(0, h, d));
          ASSERT_EQ(at(cache, side, 2, 3, h, d), first);
          ASSERT_EQ(at(cache, side, 1, 3, h, d), first) << "copied";
          ASSERT_EQ(at(cache, side, 1, 5, h, d), reference::round_to(to, rows.at(1, h, d)));
          for (int token = 0; token < 16; ++token) ASSERT_EQ(at(cache, side, 0, token, h, d), 0.0);
        }
      }
    }
  }
}

class AppendRefusals : public testing::Test {
 protected:
  Rng rng_{3};
  Pool memory_{shape_of(DType::f8e4m3, 2, 32, 32), 4, 16, Layout::nhd};
  KvCache cache_ = memory_.cache();
  Rows k_{DType::bf16, 2, 2, 32, rng_};
  Rows v_{DType::bf16, 2, 2, 32, rng_};
  std::vector<std::int64_t> slots_{3, 63};
  std::vector<cpu::PageCopy> copies_{{0, 1, 16}};
  Scale k_scale_;
  Scale v_scale_;
  int heads_ = 2;
  SerialExecutor serial_;

  void append_refused(const std::string& message) {
    expect_error(ErrorCode::invalid_argument, message, [&] {
      cpu::append_kv(cache_, k_.view, v_.view, slots_, heads_, 32, 32, k_scale_, v_scale_, serial_);
    });
    untouched();
  }
  void copy_refused(const std::string& message) {
    expect_error(ErrorCode::invalid_argument, message,
                 [&] { cpu::copy_pages(cache_, copies_, heads_, 32, 32, serial_); });
    untouched();
  }
  void untouched() {
    const KvCache& cache = memory_.cache();
    for (int slot = 0; slot < 64; ++slot) EXPECT_TRUE(std::isnan(at(cache, cache.k, slot / 16, slot % 16, 0, 0)));
  }
};

TEST_F(AppendRefusals, Heads) {
  heads_ = 0;
  append_refused("num_kv_heads = 0, expected at least 1");
}
TEST_F(AppendRefusals, SlotOutOfRange) {
  slots_[1] = 64;
  append_refused("token_slots[1] = 64, expected less than num_pages * page_size = 4 * 16");
}
TEST_F(AppendRefusals, KeyType) {
  k_.view.dtype = DType::f8e4m3;
  append_refused("k.dtype = f8e4m3, expected f32, f16 or bf16");
}
TEST_F(AppendRefusals, ValueNull) {
  v_.view.data = nullptr;
  append_refused("v.data = nullptr, expected a tensor");
}
TEST_F(AppendRefusals, ValueStride) {
  v_.view.head_stride = 16;
  append_refused("v.head_stride = 16, expected at least 32 (elements that the inner dimensions span)");
}
TEST_F(AppendRefusals, ScaleNotPositive) {
  const float zero = 0.0F;
  k_scale_ = {&zero, 1};
  append_refused("k_scale[0] = 0.000000, expected a positive number (values are divided by it)");
}
TEST_F(AppendRefusals, ScaleNotANumber) {
  const float nan[2] = {1.0F, NAN};
  v_scale_ = {nan, 2};
  append_refused("v_scale[1] = nan, expected a positive number (values are divided by it)");
}
TEST_F(AppendRefusals, CachePointer) {
  cache_.k.data = nullptr;
  append_refused("cache.k.data = nullptr, expected a tensor");
}
TEST_F(AppendRefusals, CachePageSize) {
  cache_.page_size = 0;
  append_refused("cache.page_size = 0, expected at least 1");
}
TEST_F(AppendRefusals, CacheStride) {
  cache_.v.token_stride = 32;
  append_refused("cache.v.head_stride = 32, expected at least 512 (elements that the inner dimensions span)");
}
TEST_F(AppendRefusals, CopySource) {
  copies_[0].src = -1;
  copy_refused("copies[0].src = -1, expected a page in [0, 4)");
}
TEST_F(AppendRefusals, CopyDestination) {
  copies_.push_back({1, 4, 3});
  copy_refused("copies[1].dst = 4, expected a page in [0, 4)");
}
TEST_F(AppendRefusals, CopyOntoItself) {
  copies_[0].dst = 0;
  copy_refused("copies[0].dst = 0, expected a page other than src");
}
TEST_F(AppendRefusals, CopyTokens) {
  copies_[0].num_tokens = 17;
  copy_refused("copies[0].num_tokens = 17, expected 0 to page_size = 16");
}

}  // namespace
}  // namespace headwater
