// Every kernel level that this processor has, over types, head sizes, group sizes, page sizes, layouts and features, on
// hand-made work items against a float64 loop: O and LSE, with NaN in everything that must not matter. A level that the
// processor lacks is skipped visibly.
#include <gtest/gtest.h>

#include <algorithm>

#include "headwater/cpu.h"
#include "simd/kernel_case.h"

namespace headwater::test {
namespace {

double tolerance(const CaseSpec& s) {
  const auto has = [&](DType t) { return s.q == t || s.kv == t || s.out == t; };
  if (has(DType::bf16)) {
    return s.q == DType::f32 && s.out == DType::f32 ? 5e-3 : 2e-2;
  }
  return has(DType::f16) ? 5e-3 : 2e-5;
}

/// fp32 arithmetic gives an LSE to about 1e-5; bf16 q and k are exact products too, so that only P is rounded.
double lse_tolerance(const CaseSpec& s) {
  return 1e-4 * static_cast<double>(std::max(1.0F, s.q_size));
}

void check(const Case& c, const CaseSpec& s, const char* how) {
  const Errors e = c.errors();
  EXPECT_LT(e.o, tolerance(s)) << how << ": " << s.name();
  EXPECT_LT(e.lse, lse_tolerance(s)) << how << ": " << s.name();
  EXPECT_TRUE(e.exact_empty) << how << ": " << s.name();
  EXPECT_TRUE(e.fences) << how << ": " << s.name();
}

/// Cuts the keys at `cuts` and the rows in two tiles of unequal size.
std::vector<Piece> cut(const Case& c, const CaseSpec& s, std::vector<int> cuts) {
  cuts.push_back(s.num_keys);
  std::vector<Piece> pieces;
  int begin = 0;
  const auto rows = c.all_rows();
  for (const int end : cuts) {
    if (end <= begin || end > s.num_keys) continue;
    const auto middle = rows.begin() + static_cast<std::ptrdiff_t>(rows.size() / 3);
    if (middle != rows.begin()) pieces.push_back({begin, end - begin, {rows.begin(), middle}});
    pieces.push_back({begin, end - begin, {middle, rows.end()}});
    begin = end;
  }
  return pieces;
}

void run_case(const CaseSpec& s) {
  Case direct(s);
  direct.run_direct();
  check(direct, s, "direct");
  Case distrusting(s);
  distrusting.distrust_unmasked = true;
  distrusting.run_direct();
  check(distrusting, s, "direct, every tile masked");
  Case pieces(s);
  pieces.run_pieces(cut(pieces, s, {s.num_keys / 5, s.num_keys / 2, s.num_keys - 1}));
  check(pieces, s, "pieces");
}

class Kernels : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (GetParam() > cpu::detect_isa()) GTEST_SKIP() << "this processor lacks " << name_of(GetParam());
    ASSERT_EQ(cpu::kernels_for(GetParam()).isa, GetParam());
    spec.isa = GetParam();
  }
  CaseSpec spec;
};

TEST_P(Kernels, TypesAndRows) {
  for (const DType q : {DType::f32, DType::bf16, DType::f16}) {
    for (const DType kv : {DType::f32, DType::bf16, DType::f16, DType::f8e4m3}) {
      for (const int rows : {1, 2, 3, 5, 9, 17, 40}) {
        spec.q = q;
        spec.kv = kv;
        spec.out = q;
        spec.num_rows = rows;
        spec.num_keys = 150;
        spec.pos_begin = 32;
        spec.seed = static_cast<std::uint64_t>(rows);
        run_case(spec);
      }
    }
  }
}

TEST_P(Kernels, HeadDims) {
  struct Dims {
    int qk, vo;
  };
  for (const Dims d : {Dims{32, 32},
                       {48, 48},
                       {64, 64},
                       {80, 80},
                       {96, 96},
                       {112, 112},
                       {128, 128},
                       {192, 128},
                       {192, 192},
                       {256, 256},
                       {64, 160},
                       {240, 48},
                       {656, 656},
                       {1024, 1024}}) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      for (const int rows : {1, 3, 7}) {
        spec.q = spec.kv = spec.out = type;
        spec.head_dim_qk = d.qk;
        spec.head_dim_vo = d.vo;
        spec.num_rows = rows;
        spec.num_keys = 77;
        spec.seed = static_cast<std::uint64_t>(d.qk + rows);
        run_case(spec);
      }
    }
  }
}

TEST_P(Kernels, GroupAndPageSizes) {
  for (const int group : {1, 2, 3, 4, 7, 8, 16}) {
    for (const int page : {1, 2, 3, 16, 32}) {
      for (const DType type : {DType::f32, DType::bf16}) {
        spec.q = spec.kv = spec.out = type;
        spec.group_size = group;
        spec.num_kv_heads = group == 3 ? 3 : 2;
        spec.page_size = page;
        spec.num_rows = 1 + page % 5;
        spec.num_keys = 71;
        spec.first_token = page / 2;
        spec.seed = static_cast<std::uint64_t>(group * 100 + page);
        run_case(spec);
      }
    }
  }
}

TEST_P(Kernels, Layouts) {
  for (const Layout layout :
       {Layout::nhd, Layout::hnd, Layout::pair_nhd, Layout::pair_hnd, Layout::side_by_side, Layout::v_in_k}) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      for (const int rows : {1, 6}) {
        spec.q = spec.kv = spec.out = type;
        spec.layout = layout;
        spec.num_rows = rows;
        spec.head_dim_vo = 32;
        spec.num_keys = 90;
        spec.first_token = 5;
        run_case(spec);
      }
    }
  }
}

TEST_P(Kernels, Mla) {
  spec.layout = Layout::v_in_k;
  spec.num_kv_heads = 1;
  spec.head_dim_qk = 576;
  spec.head_dim_vo = 512;
  for (const int group : {4, 16, 128}) {
    for (const DType type : {DType::f32, DType::bf16}) {
      spec.q = spec.kv = spec.out = type;
      spec.group_size = group;
      spec.num_rows = 2;
      spec.num_keys = 70;
      run_case(spec);
    }
  }
}

TEST_P(Kernels, ScoreFeatures) {
  for (int bits = 0; bits < 64; ++bits) {
    for (const DType type : {DType::f32, DType::bf16}) {
      for (const int rows : {1, 7}) {
        spec.q = spec.kv = spec.out = type;
        spec.num_rows = rows;
        spec.num_keys = 140;
        spec.soft_cap = (bits & 1) != 0 ? 5.0F : 0.0F;
        spec.alibi = (bits & 2) != 0;
        spec.sinks = (bits & 4) != 0;
        spec.num_sink_tokens = (bits & 8) != 0 ? 4 : 0;
        spec.scales = (bits & 16) != 0;
        spec.base = (bits & 32) != 0 ? LseBase::natural : LseBase::two;
        spec.seed = static_cast<std::uint64_t>(bits);
        run_case(spec);
      }
    }
  }
}

TEST_P(Kernels, PeakedAndFlatScores) {
  for (const float size : {0.01F, 8.0F, 60.0F}) {
    for (const int rows : {1, 6}) {
      spec.q_size = size;
      spec.num_rows = rows;
      spec.num_keys = 200;
      run_case(spec);
    }
  }
}

std::vector<CaseSpec> invariant_specs(Isa isa) {
  std::vector<CaseSpec> specs;
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (const int chunk : {128, 64, 100}) {
      CaseSpec s;
      s.isa = isa;
      s.q = s.kv = s.out = type;
      s.batch_invariant = true;
      s.invariant_chunk = chunk;
      s.num_rows = 11;
      s.num_keys = 421;
      s.pos_begin = 48;
      s.first_token = 3;
      s.sinks = chunk == 64;
      s.alibi = chunk == 100;
      s.num_sink_tokens = 60;
      s.seed = static_cast<std::uint64_t>(chunk);
      specs.push_back(s);
    }
  }
  return specs;
}

TEST_P(Kernels, BatchInvariantIsExact) {
  for (const CaseSpec& s : invariant_specs(GetParam())) run_case(s);
}

TEST_P(Kernels, BatchInvariantBits) {
  for (const CaseSpec& s : invariant_specs(GetParam())) {
    Case whole(s);
    whole.run_direct();
    // Every row alone.
    Case alone(s);
    std::vector<Piece> pieces;
    for (const std::int32_t r : alone.all_rows()) pieces.push_back({0, s.num_keys, {r}});
    alone.run_pieces(pieces);
    EXPECT_EQ(whole.bits(), alone.bits()) << "rows alone: " << s.name();
    // Cut at multiples of the chunk, in other tiles of rows, folded or not, in tiles that are masked throughout.
    for (const bool fold_first : {true, false}) {
      for (const bool distrust : {true, false}) {
        Case other(s);
        other.distrust_unmasked = distrust;
        const int first = s.invariant_chunk - s.pos_begin % s.invariant_chunk;
        other.run_pieces(cut(other, s, {first, first + 2 * s.invariant_chunk}), fold_first);
        EXPECT_EQ(whole.bits(), other.bits()) << "cut: " << s.name();
      }
    }
  }
}

/// A piece may start inside a chunk, where its rows' windows start, while other rows see more of the chunk.
TEST_P(Kernels, BatchInvariantWindowStartsMidTile) {
  for (CaseSpec s : invariant_specs(GetParam())) {
    s.num_sink_tokens = 0;
    Case together(s);
    Case apart(s);
    const std::int32_t end = s.pos_begin + s.num_keys;
    for (Case* c : {&together, &apart}) {
      for (auto& range : c->ranges) range = {s.pos_begin + 37, end, end - 1};
      c->ranges[0].lo = s.pos_begin;
    }
    together.run_direct();
    std::vector<std::int32_t> others = together.all_rows();
    others.erase(others.begin());
    apart.run_pieces({{0, s.num_keys, {0}}, {37, s.num_keys - 37, others}}, false);
    EXPECT_EQ(together.bits(), apart.bits()) << s.name();
  }
}

/// The bit tests can fail: in normal mode a cut changes bits.
TEST_P(Kernels, NormalModeIsNotInvariant) {
  CaseSpec s = spec;
  s.num_rows = 11;
  s.num_keys = 421;
  Case whole(s);
  whole.run_direct();
  Case other(s);
  other.run_pieces(cut(other, s, {100, 300}));
  EXPECT_NE(whole.bits(), other.bits());
}

INSTANTIATE_TEST_SUITE_P(Levels, Kernels, testing::Values(Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_bf16),
                         [](const auto& level) { return std::string(name_of(level.param)); });

}  // namespace
}  // namespace headwater::test
