// Kernels of every ISA level against float64, on plans cut by hand: types, sizes, layouts, masks, score options, sinks
// and every way of cutting. Memory that must not be read is NaN, pools are read-only, workspaces exact and fenced
// (Call::run).
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpu/hand_plan.h"
#include "plan/plan_data.h"
#include "reference/call.h"
#include "reference/memory.h"

namespace headwater {
namespace {

using reference::Call;
using reference::CallOptions;
using reference::Layout;
using reference::PageTables;
using reference::Ran;
using reference::Rng;

constexpr float kInf = std::numeric_limits<float>::infinity();

AttentionShape shape_of(int qo_heads, int kv_heads, int dim_qk, int dim_vo, DType q, DType kv, DType out) {
  AttentionShape shape;
  shape.num_qo_heads = qo_heads;
  shape.num_kv_heads = kv_heads;
  shape.head_dim_qk = dim_qk;
  shape.head_dim_vo = dim_vo;
  shape.q_dtype = q;
  shape.kv_dtype = kv;
  shape.out_dtype = out;
  return shape;
}

AttentionShape f32_shape(int qo_heads = 8, int kv_heads = 2, int dim = 64) {
  return shape_of(qo_heads, kv_heads, dim, dim, DType::f32, DType::f32, DType::f32);
}

/// Requests of the given lengths that share their first `shared_pages` pages.
PageTables requests(const std::vector<int>& lengths, int page_size, int shared_pages = 0, int rows = 1) {
  PageTables tables;
  tables.page_size = page_size;
  std::int32_t next = shared_pages;
  for (const int length : lengths) {
    std::vector<std::int32_t> pages;
    for (std::int32_t p = 0; p * page_size < length; ++p) pages.push_back(p < shared_pages ? p : next++);
    tables.add(pages, length == 0 ? 0 : (length - 1) % page_size + 1, rows);
  }
  return tables;
}

class Attend : public testing::TestWithParam<Isa> {
 protected:
  void check(Call& call, const HandCut& cut, const std::string& what) {
    const Plan plan = hand_plan(call.problem().shape, call.problem().options, call.tables(), cut);
    SerialExecutor serial;
    ThreadPool pool(2);
    const Ran alone = call.run(plan, serial, GetParam());
    EXPECT_EQ(alone.complaint, "") << what << ", serial";
    const Ran together = call.run(plan, pool, GetParam());
    EXPECT_EQ(together.complaint, "") << what << ", two workers";
    EXPECT_EQ(alone.out, together.out) << what << ": the number of workers changed bits";
  }

  void check(const AttentionShape& shape, const PlanOptions& options, const PageTables& tables,
             const CallOptions& call_options, const HandCut& cut, const std::string& what) {
    Call call(shape, options, tables, call_options, 17);
    check(call, cut, what);
  }

  void SetUp() override {
    if (GetParam() > cpu::detect_isa()) GTEST_SKIP() << "this processor lacks " << name_of(GetParam());
  }
};

INSTANTIATE_TEST_SUITE_P(Isa, Attend, testing::Values(Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_bf16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

TEST_P(Attend, EveryTypeOfQueryCacheAndOutput) {
  for (const DType q : {DType::f32, DType::f16, DType::bf16}) {
    for (const DType kv : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3}) {
      for (const DType out : {DType::f32, DType::f16, DType::bf16}) {
        const std::string what =
            std::string(name_of(q)) + " on " + std::string(name_of(kv)) + " to " + std::string(name_of(out));
        const AttentionShape shape = shape_of(8, 2, 64, 64, q, kv, out);
        check(shape, {}, requests({131, 70, 1, 97}, 16, 3), {}, {}, what);
        check(shape, {}, requests({131, 70, 65, 97}, 16, 3), {}, {.chunk_tokens = 40, .shared_pages = 3},
              what + ", shared");
      }
    }
  }
}

TEST_P(Attend, HeadDims) {
  for (const DType type : {DType::f32, DType::bf16}) {
    for (int dim = 32; dim <= 256; dim += 16) {
      const AttentionShape shape = shape_of(4, 2, dim, dim, type, type, DType::f32);
      check(shape, {}, requests({67, 50}, 16, 2, 3), {}, {.chunk_tokens = 32, .shared_pages = 2}, std::to_string(dim));
    }
    for (const auto& [qk, vo] : {std::pair{192, 128}, {128, 192}, {64, 32}, {32, 256}, {80, 96}, {576, 512}}) {
      const AttentionShape shape = shape_of(4, 2, qk, vo, type, type, type);
      check(shape, {}, requests({67, 50}, 16, 2), {}, {.shared_pages = 2},
            std::to_string(qk) + "/" + std::to_string(vo));
    }
  }
}

TEST_P(Attend, MultiHeadLatentAttention) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    const AttentionShape shape = shape_of(16, 1, 576, 512, type, type, type);
    CallOptions latent;
    latent.layout = Layout::latent;
    check(shape, {}, requests({90, 77, 120}, 16, 4), latent, {.shared_pages = 4}, std::string(name_of(type)));
    check(shape, {}, requests({90, 77, 120}, 16, 4), latent, {.chunk_tokens = 33}, std::string(name_of(type)));
  }
}

TEST_P(Attend, GroupSizes) {
  for (const DType type : {DType::f32, DType::bf16}) {
    for (int group = 1; group <= 16; ++group) {
      const AttentionShape shape = shape_of(2 * group, 2, 64, 64, type, type, DType::f32);
      check(shape, {}, requests({45, 60, 33}, 8, 3), {}, {}, std::to_string(group));
      check(shape, {}, requests({45, 60, 33}, 8, 3, 2), {}, {.chunk_tokens = 16, .shared_pages = 3},
            std::to_string(group));
    }
  }
}

TEST_P(Attend, PageSizes) {
  for (const int page_size : {1, 2, 3, 5, 16, 24, 32, 64, 128, 1000}) {
    const AttentionShape shape = shape_of(8, 2, 64, 64, DType::bf16, DType::bf16, DType::bf16);
    const int shared = std::max(1, 64 / page_size);
    check(shape, {}, requests({203, 131, page_size * shared + 1}, page_size, shared), {}, {.chunk_tokens = 50},
          std::to_string(page_size));
    if (page_size <= 64) {
      check(shape, {}, requests({203, 131, 99}, page_size, shared), {}, {.chunk_tokens = 50, .shared_pages = shared},
            std::to_string(page_size) + ", shared");
    }
  }
}

TEST_P(Attend, LayoutsAndStrides) {
  for (const Layout layout : reference::kLayouts) {
    for (const std::int64_t padding : {0, 48}) {
      for (const DType type : {DType::f32, DType::bf16, DType::f8e4m3}) {
        const DType other = type == DType::f8e4m3 ? DType::bf16 : type;
        const AttentionShape shape = shape_of(6, 3, 80, 64, other, type, other);
        CallOptions options;
        options.layout = layout;
        options.page_padding = padding;
        options.row_padding = padding / 3;
        options.lse_head_major = padding != 0;
        options.lse_base = padding != 0 ? LseBase::natural : LseBase::two;
        check(shape, {}, requests({100, 83}, 16, 4, 2), options, {.chunk_tokens = 32, .shared_pages = 4},
              std::string(name_of(layout)) + " " + std::string(name_of(type)));
      }
    }
  }
}

TEST_P(Attend, WaysOfCutting) {
  for (const DType type : {DType::f32, DType::bf16}) {
    const AttentionShape shape = shape_of(12, 4, 64, 64, type, type, DType::f32);
    Call call(shape, {}, requests({150, 131, 99, 200, 97}, 16, 6, 3), {}, 17);
    for (const int chunk : {7, 16, 64, 100, 1 << 30}) {
      for (const int tile : {1, 2, 4, 1 << 30}) {
        for (const int heads : {1, 3, 4}) {
          for (const int shared : {0, 6}) {
            check(call, {chunk, tile, heads, shared, 2},
                  "chunk " + std::to_string(chunk) + " tile " + std::to_string(tile) + " heads " +
                      std::to_string(heads) + " shared " + std::to_string(shared));
          }
        }
      }
    }
  }
}

TEST_P(Attend, Masks) {
  std::vector<PlanOptions> masks(9);
  masks[1].causal = false;
  masks[2].window_left = 20;
  masks[3].window_left = 0;
  masks[4].local_chunk = 32;
  masks[5].window_left = 20;
  masks[5].num_sink_tokens = 5;
  masks[6].num_sink_tokens = 1000;
  masks[7].causal = false;
  masks[7].window_left = 9;
  masks[8].local_chunk = 48;
  masks[8].window_left = 30;
  masks[8].num_sink_tokens = 17;
  for (std::size_t i = 0; i < masks.size(); ++i) {
    for (const DType type : {DType::f32, DType::bf16}) {
      for (const int rows : {1, 3, 8}) {
        const AttentionShape shape = shape_of(8, 2, 64, 64, type, type, DType::f32);
        const PageTables tables = requests({100, 83, 97, 66}, 16, 4, rows);
        const std::string what = "mask " + std::to_string(i) + " rows " + std::to_string(rows);
        check(shape, masks[i], tables, {}, {}, what);
        check(shape, masks[i], tables, {}, {.chunk_tokens = 16, .tile_rows = 3}, what);
        check(shape, masks[i], tables, {}, {.chunk_tokens = 48, .shared_pages = 4}, what + ", shared");
      }
    }
  }
}

TEST_P(Attend, WindowsThatStartMidPage) {
  PageTables tables;
  tables.page_size = 16;
  tables.add({3, 1, 4}, 7, 2, 5, 9);  // absolute positions 89 .. 119
  tables.add({5}, 3, 1, 2, 1);
  tables.add({0, 2}, 16, 1, 0, 0);
  PlanOptions options;
  options.window_left = 40;
  for (const DType type : {DType::f32, DType::bf16}) {
    check(shape_of(8, 2, 64, 64, type, type, DType::f32), options, tables, {}, {}, "whole");
    check(shape_of(8, 2, 64, 64, type, type, DType::f32), options, tables, {}, {.chunk_tokens = 8}, "chunks");
  }
}

TEST_P(Attend, ScoreOptions) {
  for (int mode = 0; mode < 32; ++mode) {
    PlanOptions options;
    options.logits_soft_cap = (mode & 1) != 0 ? 3.0F : 0.0F;
    options.alibi = (mode & 2) != 0;
    options.sinks = (mode & 4) != 0;
    options.sm_scale = (mode & 8) != 0 ? 0.31F : 0.0F;
    CallOptions call;
    call.k_scales = (mode & 16) != 0 ? 1 : 0;
    call.v_scales = (mode & 16) != 0 ? 2 : 0;
    for (const DType type : {DType::f32, DType::bf16}) {
      const AttentionShape shape = shape_of(8, 2, 64, 64, type, type, DType::f32);
      const std::string what = "mode " + std::to_string(mode);
      check(shape, options, requests({80, 65, 200}, 16, 3), call, {}, what);
      check(shape, options, requests({80, 65, 200}, 16, 3, 2), call, {.chunk_tokens = 32, .shared_pages = 3},
            what + ", shared");
    }
  }
}

// A cap far above the scores leaves them as they are, however far; one far below makes them all alike.
TEST_P(Attend, SoftCapsOfAnySize) {
  for (const float cap : {1e-30F, 0.01F, 0.5F, 50.0F, 1000.0F, 1e6F, 1.768842863e9F, 1e30F}) {
    PlanOptions options;
    options.logits_soft_cap = cap;
    for (const bool invariant : {false, true}) {
      options.batch_invariant = invariant;
      for (const int rows : {1, 2, 16}) {  // of both kernels
        const std::string what = "cap " + std::to_string(cap) + ", rows " + std::to_string(rows);
        check(f32_shape(), options, requests({80, 65, 1}, 16, 0, rows), {}, {.tile_rows = 16}, what);
      }
    }
  }
}

TEST_P(Attend, ScalesPerHeadWithAn8BitCache) {
  for (const int k_scales : {0, 1, 2}) {
    for (const int v_scales : {0, 1, 2}) {
      CallOptions call;
      call.k_scales = k_scales;
      call.v_scales = v_scales;
      const AttentionShape shape = shape_of(6, 3, 128, 128, DType::bf16, DType::f8e4m3, DType::bf16);
      check(shape, {}, requests({80, 65}, 16, 3), call, {.chunk_tokens = 32, .shared_pages = 3}, "scales");
    }
  }
}

// Learned sinks count once whatever the number of states, also where a row has no key at all, and not at all on
// request.
TEST_P(Attend, SinksCountOnce) {
  PlanOptions options;
  options.sinks = true;
  for (const bool include : {true, false}) {
    for (const LseBase base : {LseBase::two, LseBase::natural}) {
      for (const bool invariant : {false, true}) {
        CallOptions call;
        call.include_sink = include;
        call.lse_base = base;
        options.batch_invariant = invariant;
        options.invariant_chunk = 32;
        const PageTables tables = requests({0, 80, 65, 1}, 16, 0);
        for (const int chunk : {32, 64, 1 << 30}) {
          check(f32_shape(), options, tables, call, {.chunk_tokens = chunk}, "chunk " + std::to_string(chunk));
        }
      }
    }
  }
}

TEST_P(Attend, RowsWithoutKeys) {
  PlanOptions options;
  for (const bool causal : {true, false}) {
    options.causal = causal;
    check(f32_shape(), options, requests({0, 5, 0, 33}, 16), {}, {}, "empty requests");
    check(f32_shape(), options, requests({3, 5, 0, 33}, 16, 0, 8), {}, {}, "more rows than keys");
    check(f32_shape(), options, requests({3, 5, 0, 33}, 16, 0, 8), {}, {.chunk_tokens = 2, .tile_rows = 3}, "cut");
    check(f32_shape(), options, requests({1, 1}, 16), {}, {}, "one key");
  }
}

// Scores far below any sentinel that one might use for "masked" are still scores.
TEST_P(Attend, HugeNegativeLogits) {
  for (const DType type : {DType::f32, DType::bf16}) {
    const AttentionShape shape = shape_of(4, 2, 64, 64, type, type, DType::f32);
    for (const float scale : {-300.0F, -30000.0F}) {
      PlanOptions options;
      options.sm_scale = scale;
      options.alibi = true;
      CallOptions call;
      call.check_naive = false;
      Call problem(shape, options, requests({40, 37}, 16, 2), call, 5);
      const Plan plan = hand_plan(shape, options, problem.tables(), {.chunk_tokens = 16, .shared_pages = 2});
      SerialExecutor serial;
      const Ran ran = problem.run(plan, serial, GetParam());
      for (const float x : ran.lse) EXPECT_TRUE(std::isfinite(x)) << x;
      EXPECT_LT(ran.difference.lse, 1e-3) << ran.complaint;
    }
  }
}

/// q = +1 and K = value everywhere, so that every score is exactly value * 64 * sm_scale.
TEST_P(Attend, EqualScoresOfAnySize) {
  const AttentionShape shape = f32_shape(2, 1, 64);
  for (const float key : {-1e6F, -1e4F, -1e2F, 0.0F, 1e4F, 1e6F}) {
    PlanOptions options;
    options.sm_scale = 1.0F;
    const PageTables tables = requests({48}, 16);
    std::vector<float> q(2 * 64, 1.0F);
    std::vector<float> k(48 * 64, key);
    std::vector<float> v(48 * 64);
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / 64);
    KvCache cache{{k.data(), 16 * 64, 64, 64}, {v.data(), 16 * 64, 64, 64}, DType::f32, 3, 16};
    for (const int chunk : {16, 1 << 30}) {
      const Plan plan = hand_plan(shape, options, tables, {.chunk_tokens = chunk});
      std::vector<float> out(2 * 64, NAN);
      std::vector<float> lse(2, NAN);
      reference::FencedBuffer workspace(plan.workspace_size());
      cpu::RunArgs args;
      args.q = {q.data(), DType::f32, 128, 64};
      args.kv = {&cache, 1};
      args.out = {out.data(), DType::f32, 128, 64};
      args.lse = {lse.data(), 2, 1, LseBase::natural};
      args.workspace = {workspace.data(), workspace.size()};
      args.isa = GetParam();
      SerialExecutor serial;
      cpu::run(plan, args, serial);
      const double expected = 64.0 * static_cast<double>(key) + std::log(48.0);
      for (const float x : lse) EXPECT_NEAR(x, expected, 2e-6 * std::max(1.0, std::abs(expected))) << key;
      for (const float x : out) EXPECT_NEAR(x, 23.5, 1e-4) << key;
    }
  }
}

// M3: stacked rows are ordered kv_head, member, slot of the group. Reading them member-major is visibly wrong.
TEST_P(Attend, TheOrderOfStackedRowsMatters) {
  const AttentionShape shape = f32_shape(8, 2, 64);
  Call call(shape, {}, requests({100, 100, 100}, 16, 5), {}, 3);
  const Plan plan = hand_plan(shape, {}, call.tables(), {.shared_pages = 5});
  SerialExecutor serial;
  const Ran ran = call.run(plan, serial, GetParam());
  ASSERT_EQ(ran.complaint, "");
  ASSERT_EQ(ran.outcome.path, Path::cascade);
  const auto* out = reinterpret_cast<const float*>(ran.out.data());
  const reference::Result& expected = call.expected();
  double error = 0.0;
  double greatest = 0.0;
  const int members = 3;
  const int group = 4;
  for (int kv = 0; kv < 2; ++kv) {
    for (int m = 0; m < members; ++m) {
      for (int g = 0; g < group; ++g) {
        // The row that a member-major reading (m * Hq + kv * G + g) would take for (member m, head kv * G + g).
        const int stacked = kv * members * group + m * group + g;
        const int wrong_member = stacked / 8;
        const int wrong_head = stacked % 8;
        for (int d = 0; d < 64; ++d) {
          const double e = expected.o[static_cast<std::size_t>((m * 8 + kv * group + g) * 64 + d)];
          const double x = static_cast<double>(out[(wrong_member * 8 + wrong_head) * 64 + d]);
          error = std::max(error, std::abs(x - e));
          greatest = std::max(greatest, std::abs(e));
        }
      }
    }
  }
  EXPECT_GT(error / greatest, 1e-2);
}

// Offsets beyond 2^32 elements (and 2^32 bytes): pages at both ends of a sparse pool.
TEST_P(Attend, PoolsBeyond32BitOffsets) {
  const AttentionShape shape = shape_of(4, 2, 64, 64, DType::bf16, DType::bf16, DType::f32);
  constexpr std::int64_t kPages = 3'000'000;
  constexpr std::int64_t kPageElements = 16 * 2 * 64;
  static_assert(kPages * kPageElements > (std::int64_t{1} << 32));
  const reference::SparseBuffer k(kPages * kPageElements * 2);
  const reference::SparseBuffer v(kPages * kPageElements * 2);
  const KvCache cache{{k.data(), kPageElements, 128, 64}, {v.data(), kPageElements, 128, 64}, DType::bf16, kPages, 16};

  PageTables tables;
  tables.page_size = 16;
  tables.add({kPages - 1, 0, 2'100'000}, 11);
  tables.add({kPages - 1, 2'097'152, 1}, 4);
  tables.num_pages = kPages;
  // One small page each in a dense pool gives the same bits.
  PageTables dense;
  dense.page_size = 16;
  dense.add({0, 1, 2}, 11);
  dense.add({0, 3, 4}, 4);
  const std::vector<std::int64_t> where{kPages - 1, 0, 2'100'000, 2'097'152, 1};
  std::vector<std::uint16_t> small_k(5 * kPageElements);
  std::vector<std::uint16_t> small_v(5 * kPageElements);
  Rng rng(4);
  for (std::size_t page = 0; page < where.size(); ++page) {
    for (std::int64_t i = 0; i < kPageElements; ++i) {
      const auto bits_k = static_cast<std::uint16_t>(0x3E00 + rng.integer(0, 0x1FF) + (rng.chance(0.5) ? 0x8000 : 0));
      const auto bits_v = static_cast<std::uint16_t>(0x3E00 + rng.integer(0, 0x1FF));
      small_k[page * kPageElements + static_cast<std::size_t>(i)] = bits_k;
      small_v[page * kPageElements + static_cast<std::size_t>(i)] = bits_v;
      static_cast<std::uint16_t*>(k.data())[where[page] * kPageElements + i] = bits_k;
      static_cast<std::uint16_t*>(v.data())[where[page] * kPageElements + i] = bits_v;
    }
  }
  const KvCache small{
      {small_k.data(), kPageElements, 128, 64}, {small_v.data(), kPageElements, 128, 64}, DType::bf16, 5, 16};

  std::vector<std::uint16_t> q(2 * 4 * 64);
  for (auto& x : q) x = static_cast<std::uint16_t>(0x3E00 + rng.integer(0, 0x1FF));
  const auto attend = [&](const KvCache& from, const PageTables& t) {
    const Plan plan = hand_plan(shape, {}, t, {.shared_pages = 1});
    std::vector<float> out(2 * 4 * 64, NAN);
    reference::FencedBuffer workspace(plan.workspace_size());
    cpu::RunArgs args;
    args.q = {q.data(), DType::bf16, 256, 64};
    args.kv = {&from, 1};
    args.out = {out.data(), DType::f32, 256, 64};
    args.workspace = {workspace.data(), workspace.size()};
    args.isa = GetParam();
    SerialExecutor serial;
    cpu::run(plan, args, serial);
    return out;
  };
  const std::vector<float> expected = attend(small, dense);
  for (const float x : expected) ASSERT_TRUE(std::isfinite(x) && x != 0.0F);
  EXPECT_EQ(attend(cache, tables), expected);
}

// Batch-invariant mode: the same bits for every cut, tile and number of workers, and for a request alone.
TEST_P(Attend, InvariantBitsWhateverTheCut) {
  for (const DType type : {DType::f32, DType::bf16}) {
    for (const bool decorated : {false, true}) {
      PlanOptions options;
      options.batch_invariant = true;
      options.invariant_chunk = 32;
      options.sinks = decorated;
      options.alibi = decorated;
      if (decorated) options.window_left = 70;
      const AttentionShape shape = shape_of(8, 2, 64, 64, type, type, DType::f32);
      Call call(shape, options, requests({200, 131, 97, 170, 97}, 16, 6, 2), {}, 8);
      SerialExecutor serial;
      ThreadPool pool(3);
      std::vector<unsigned char> out;
      std::vector<float> lse;
      for (const int chunk : {32, 64, 96, 1 << 30}) {
        for (const int tile : {1, 3, 1 << 30}) {
          for (const int heads : {1, 2}) {
            for (const int shared : {0, 2, 4, 6}) {
              if (decorated && shared > 0) continue;  // a window: its rows do not all start in the shared span
              const Plan plan = hand_plan(shape, options, call.tables(), {chunk, tile, heads, shared, 3});
              const Ran ran = call.run(plan, tile == 3 ? static_cast<Executor&>(pool) : serial, GetParam());
              ASSERT_EQ(ran.complaint, "");
              if (out.empty()) {
                out = ran.out;
                lse = ran.lse;
              }
              ASSERT_EQ(ran.out, out) << "chunk " << chunk << " tile " << tile << " heads " << heads << " shared "
                                      << shared;
              ASSERT_EQ(ran.lse, lse);
            }
          }
        }
      }
    }
  }
}

TEST_P(Attend, RandomRequests) {
  Rng rng(20);
  for (int i = 0; i < 150; ++i) {
    const DType kinds[] = {DType::f32, DType::f16, DType::bf16};
    const int kv_heads = rng.integer(1, 4);
    const DType q = kinds[rng.integer(0, 2)];
    const DType kv = rng.chance(0.2) ? DType::f8e4m3 : kinds[rng.integer(0, 2)];
    const AttentionShape shape = shape_of(kv_heads * rng.integer(1, 9), kv_heads, 16 * rng.integer(2, 10),
                                          16 * rng.integer(2, 10), q, kv, kinds[rng.integer(0, 2)]);
    const int page_size = rng.integer(1, 20);
    const int shared = rng.integer(0, 5);
    std::vector<int> lengths;
    for (int n = rng.integer(1, 6); n > 0; --n)
      lengths.push_back(shared * page_size + rng.integer(shared > 0 ? 8 : 0, 70));
    PlanOptions options;
    options.causal = rng.chance(0.8);
    if (rng.chance(0.3)) options.window_left = rng.integer(0, 60);
    if (rng.chance(0.2)) options.local_chunk = rng.integer(1, 60);
    if (rng.chance(0.2) && (options.causal || options.local_chunk == 0)) options.num_sink_tokens = rng.integer(1, 30);
    if (rng.chance(0.3)) options.logits_soft_cap = 5.0F;
    options.alibi = rng.chance(0.3);
    options.sinks = rng.chance(0.3);
    CallOptions call;
    call.layout = reference::kLayouts[static_cast<std::size_t>(rng.integer(0, 5))];
    call.page_padding = rng.chance(0.3) ? 16 : 0;
    call.k_scales = rng.integer(0, 2);
    call.v_scales = rng.integer(0, 2);
    const HandCut cut{rng.integer(3, 90), rng.integer(1, 6), rng.integer(1, 4), shared, 2};
    const PageTables tables = requests(lengths, page_size, shared, rng.integer(1, 6));
    check(shape, options, tables, call, cut, "seed 20, case " + std::to_string(i) + ", " + to_string(tables));
    if (HasFailure()) break;
  }
}

TEST(AttendLse, MinusInfinityIsTrue) {
  Call call(f32_shape(), {}, requests({0, 4}, 16), {}, 2);
  const Plan plan = hand_plan(f32_shape(), {}, call.tables(), {});
  SerialExecutor serial;
  const Ran ran = call.run(plan, serial);
  ASSERT_EQ(ran.complaint, "");
  for (int h = 0; h < 8; ++h) EXPECT_EQ(ran.lse[static_cast<std::size_t>(h)], -kInf);
}

}  // namespace
}  // namespace headwater
