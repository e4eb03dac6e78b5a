// The forward pass against the same computation written plainly in double precision, and its building blocks.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "engine/matmul.h"
#include "engine/omp_executor.h"
#include "engine/runner.h"
#include "engine/step_planner.h"
#include "fixture.h"
#include "plain_model.h"

namespace headwater::test {
namespace {

using namespace headwater::engine;

/// Logits of every position of `tokens`, computed in chunks through scheduler tables, planner and runner.
std::vector<std::vector<float>> engine_logits(const Model& model, const std::vector<std::int32_t>& tokens, int chunk,
                                              DType kv, bool batch_invariant) {
  const ModelConfig& c = model.config();
  constexpr std::int32_t kPages = 64;
  const KvLayout layout{c.num_layers, c.num_kv_heads, c.head_dim, 8, kv};
  Runner runner(model, layout, kPages, batch_invariant, std::nullopt);
  PlanOptions options;
  options.batch_invariant = batch_invariant;
  options.num_workers = model.num_threads();
  StepPlanner planner(runner.attention_shape(), options, DeviceModel::default_cpu(), 8, kPages);
  Scheduler scheduler({kPages, 8, chunk, 4, true});
  auto sample = std::make_unique<Sample>();
  sample->tokens = tokens;
  sample->prompt_len = static_cast<std::int64_t>(tokens.size());
  scheduler.add(std::move(sample));
  std::vector<std::vector<float>> result;
  StepBatch batch;
  while (result.size() < tokens.size()) {
    scheduler.schedule(batch);
    std::vector<std::int32_t> all(batch.tokens.size());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int32_t>(i);
    runner.forward(planner.plan(batch), {batch.tokens, batch.positions, batch.token_slots, batch.copies, all});
    runner.logits([&](int, int count, const float* logits) {
      for (int i = 0; i < count; ++i)
        result.emplace_back(logits + std::ptrdiff_t{i} * c.vocab, logits + std::ptrdiff_t{i + 1} * c.vocab);
    });
    scheduler.mark_computed(batch);
  }
  return result;
}

double largest_error(const std::vector<std::vector<float>>& got, const std::vector<std::vector<double>>& expected) {
  EXPECT_EQ(got.size(), expected.size());
  double error = 0;
  double scale = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    for (std::size_t j = 0; j < got[i].size(); ++j) {
      error = std::max(error, std::abs(static_cast<double>(got[i][j]) - expected[i][j]));
      scale = std::max(scale, std::abs(expected[i][j]));
    }
  }
  return std::isfinite(error) ? error / scale : INFINITY;
}

TEST(Forward, AgreesWithPlainDoubleImplementation) {
  for (const bool tied : {true, false}) {
    TinyModel shape;
    shape.tied_embeddings = tied;
    shape.hidden = tied ? 128 : 96;
    const auto model = tiny_model(shape);
    const std::vector<std::int32_t> tokens = random_tokens(3, 45, *model);
    const auto expected = PlainModel(model->gguf()).logits(tokens);
    EXPECT_LT(largest_error(engine_logits(*model, tokens, 512, DType::f32, false), expected), 2e-5);
    EXPECT_LT(largest_error(engine_logits(*model, tokens, 7, DType::f32, false), expected), 2e-5);
    EXPECT_LT(largest_error(engine_logits(*model, tokens, 16, DType::bf16, false), expected), 2e-2);
  }
}

TEST(Forward, ComparisonSeesAWrongRotation) {
  // Negative control: another rope base must be visible.
  TinyModel other;
  other.rope_base = 500.0F;
  const auto model = shared_tiny_model();
  const std::vector<std::int32_t> tokens = random_tokens(3, 45, *model);
  const auto wrong = PlainModel(tiny_model(other)->gguf()).logits(tokens);
  EXPECT_GT(largest_error(engine_logits(*model, tokens, 512, DType::f32, false), wrong), 1e-3);
}

TEST(Forward, QuantisedFileAgreesToo) {
  TinyModel shape;
  shape.matrices = GgmlType::q8_0;
  const auto model = tiny_model(shape);
  const std::vector<std::int32_t> tokens = random_tokens(5, 20, *model);
  EXPECT_LT(
      largest_error(engine_logits(*model, tokens, 512, DType::f32, false), PlainModel(model->gguf()).logits(tokens)),
      2e-5);
}

TEST(Forward, PrefillBitsDoNotDependOnChunkingInInvariantMode) {
  const auto model = shared_tiny_model();
  const std::vector<std::int32_t> tokens = random_tokens(4, 200, *model);
  const auto whole = engine_logits(*model, tokens, 512, DType::bf16, true);
  for (const int chunk : {1, 5, 16, 77}) {
    const auto parts = engine_logits(*model, tokens, chunk, DType::bf16, true);
    ASSERT_EQ(parts.size(), whole.size());
    for (std::size_t i = 0; i < whole.size(); ++i) {
      ASSERT_EQ(std::memcmp(parts[i].data(), whole[i].data(), whole[i].size() * sizeof(float)), 0)
          << "chunk " << chunk << ", position " << i;
    }
  }
}

TEST(Forward, Bf16WeightsAgreeWithinTheirPrecision) {
  if (!has_bf16_products()) GTEST_SKIP() << "this processor has no bf16 products (needs AVX-512)";
  const auto model = tiny_model({}, WeightType::bf16);
  EXPECT_EQ(model->weight_type(), DType::bf16);
  const std::vector<std::int32_t> tokens = random_tokens(3, 45, *model);
  const auto expected = PlainModel(model->gguf()).logits(tokens);
  EXPECT_LT(largest_error(engine_logits(*model, tokens, 512, DType::bf16, false), expected), 4e-2);
}

std::vector<float> random_values(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

TEST(Product, ComputesAndAccumulates) {
  const ProductThreads threads(2);
  for (const auto& [in, out] : {std::pair{64, 96}, {40, 50}, {576, 64}}) {
    for (const bool accumulate : {false, true}) {
      const Product product({in, out, accumulate}, DType::f32);
      const auto width = static_cast<std::size_t>(in);
      const auto height = static_cast<std::size_t>(out);
      const std::vector<float> weights = random_values(width * height, 1);
      HugeBuffer packed(product.packed_bytes());
      product.pack(weights.data(), packed.data());
      for (const int rows : {1, 3, 8, 9, 40}) {
        const std::vector<float> x = random_values(width * static_cast<std::size_t>(padded_rows(rows)), 2);
        std::vector<float> y(height * static_cast<std::size_t>(padded_rows(rows)), 1.0F);
        product.run(packed.data(), x.data(), y.data(), rows);
        for (int r = 0; r < rows; ++r) {
          for (std::size_t o = 0; o < height; ++o) {
            double expected = accumulate ? 1.0 : 0.0;
            for (std::size_t i = 0; i < width; ++i) {
              expected += static_cast<double>(weights[o * width + i]) *
                          static_cast<double>(x[static_cast<std::size_t>(r) * width + i]);
            }
            ASSERT_NEAR(static_cast<double>(y[static_cast<std::size_t>(r) * height + o]), expected, 1e-3)
                << in << " -> " << out << ", rows " << rows << ", row " << r << ", output " << o;
          }
        }
      }
    }
  }
}

class ProductOfType : public ::testing::TestWithParam<DType> {};

TEST_P(ProductOfType, RowsHaveTheSameBitsForEveryNumberOfRows) {
  if (GetParam() == DType::bf16 && !has_bf16_products()) {
    GTEST_SKIP() << "this processor has no bf16 products (needs AVX-512)";
  }
  // The shapes of the model that `make run` uses; what batch-invariant mode builds on.
  const ProductThreads threads(2);
  for (const auto& [in, out, accumulate] :
       {std::tuple{576, 960, false}, {576, 576, true}, {576, 3072, false}, {1536, 576, true}}) {
    const Product product({in, out, accumulate}, GetParam());
    HugeBuffer packed(product.packed_bytes());
    product.pack(random_values(static_cast<std::size_t>(in) * static_cast<std::size_t>(out), 1).data(), packed.data());
    EXPECT_TRUE(product.rows_agree(packed.data())) << in << " -> " << out;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, ProductOfType, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& parameter) { return std::string(name_of(parameter.param)); });

TEST(Product, FixedBlocksGiveTheSameResult) {
  const ProductThreads threads(2);
  const Product product({64, 96, false}, DType::f32);
  const std::vector<float> weights = random_values(std::size_t{64} * 96, 1);
  HugeBuffer packed(product.packed_bytes());
  product.pack(weights.data(), packed.data());
  const std::vector<float> x = random_values(std::size_t{64} * 64, 2);
  std::vector<float> y(std::size_t{64} * 96);
  std::vector<float> z(std::size_t{64} * 96);
  product.run(packed.data(), x.data(), y.data(), 37);
  product.run(packed.data(), x.data(), z.data(), 37, 16);
  for (std::size_t i = 0; i < std::size_t{37} * 96; ++i) ASSERT_NEAR(y[i], z[i], 1e-4F);
}

TEST(Product, RefusesWhatItCannotDo) {
  const auto message = [](auto&& make) -> std::string {
    try {
      make();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(message([] { Product({0, 4, false}, DType::f32); }), "shape = 0 x 4 features, expected at least 1 of each");
  EXPECT_EQ(message([] { Product({4, 4, false}, DType::f16); }), "type = f16, expected f32 or bf16");
  if (!has_bf16_products()) {
    EXPECT_EQ(message([] {
                Product({4, 4, false}, DType::bf16);
              }),
              "type = bf16, expected f32: this processor lacks AVX-512");
  }
}

TEST(Ops, EveryTableAgreesWithDoublePrecision) {
  const std::vector<float> x = random_values(577, 1);
  const std::vector<float> weight = random_values(577, 2);
  for (const Ops* ops : available_ops()) {
    SCOPED_TRACE(ops->name);
    std::vector<float> y(577);
    ops->rms_norm(x.data(), weight.data(), 1e-5F, 577, {y.data(), DType::f32});
    double squares = 0;
    for (const float value : x) squares += static_cast<double>(value) * static_cast<double>(value);
    const double scale = 1 / std::sqrt(squares / 577 + 1e-5);
    for (std::size_t i = 0; i < y.size(); ++i) {
      ASSERT_NEAR(y[i], static_cast<double>(x[i]) * scale * static_cast<double>(weight[i]), 1e-5);
    }
    std::vector<float> gate = x;
    gate[0] = -200.0F;
    gate[1] = 200.0F;
    gate[2] = 0.0F;
    ops->swiglu(gate.data(), weight.data(), 577, {y.data(), DType::f32});
    for (std::size_t i = 0; i < y.size(); ++i) {
      const double g = static_cast<double>(gate[i]);
      ASSERT_NEAR(y[i], g / (1 + std::exp(-g)) * static_cast<double>(weight[i]), 2e-6 * (1 + std::abs(g))) << g;
    }
    gate.assign(577, std::nanf(""));
    ops->swiglu(gate.data(), weight.data(), 577, {y.data(), DType::f32});
    for (const float value : y) ASSERT_TRUE(std::isnan(value));
    ops->rms_norm(gate.data(), weight.data(), 1e-5F, 577, {y.data(), DType::f32});
    for (const float value : y) ASSERT_TRUE(std::isnan(value));
    std::vector<std::uint16_t> half(577);
    ops->convert(x.data(), 577, {half.data(), DType::bf16});
    for (std::size_t i = 0; i < half.size(); ++i) ASSERT_EQ(half[i], to_bf16(x[i]));
  }
}

TEST(RopeTable, AnglesFactorsAndRefusals) {
  const std::vector<float> factors{1.0F, 4.0F};
  RopeTable table(4, 100.0, factors);
  table.extend(3);
  table.extend(8);
  for (const int position : {0, 2, 7}) {
    const float* row = table.at(position);
    for (int i = 0; i < 2; ++i) {
      const double angle =
          position * std::pow(100.0, -2.0 * i / 4) / static_cast<double>(factors[static_cast<std::size_t>(i)]);
      EXPECT_NEAR(row[2 * i], std::cos(angle), 1e-6) << position;
      EXPECT_NEAR(row[2 * i + 1], std::sin(angle), 1e-6) << position;
    }
  }
  const auto message = [](auto&& make) -> std::string {
    try {
      make();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(message([] { RopeTable(7, 100.0, {}); }), "dim = 7, expected an even number above 0");
  EXPECT_EQ(message([&] { RopeTable(6, 100.0, factors); }), "factors.size() = 2, expected 3");
}

TEST(Executor, RunsEveryWorkerOnce) {
  for (const int workers : {1, 2, 5}) {
    const std::unique_ptr<Executor> executor = make_executor(workers);
    ASSERT_EQ(executor->num_workers(), workers);
    std::vector<int> calls(static_cast<std::size_t>(workers));
    executor->parallel(
        [](void* context, int worker) noexcept {
          ++(*static_cast<std::vector<int>*>(context))[static_cast<std::size_t>(worker)];
        },
        &calls);
    for (const int count : calls) EXPECT_EQ(count, 1);
    std::vector<int> touched(100);
    for_ranges(*executor, 100, 1, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) ++touched[static_cast<std::size_t>(i)];
    });
    for (const int count : touched) EXPECT_EQ(count, 1);
  }
}

}  // namespace
}  // namespace headwater::test
