// SmolLM2-135M against logits that an independent implementation has recorded (tools/record_reference_logits.py). Runs
// where the model file is (engine_io/model_file.h); elsewhere it is skipped, visibly.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "engine/engine.h"
#include "engine/matmul.h"
#include "engine/model.h"
#include "engine/runner.h"
#include "engine/step_planner.h"
#include "engine_io/model_file.h"

namespace headwater::test {
namespace {

using namespace headwater::engine;

class ReferenceLogits : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::optional<std::string> path = example_model();
    if (!path) GTEST_SKIP() << kNoExampleModel;
    std::ifstream file(std::string(HEADWATER_TEST_DATA) + "/smollm2_logits.json");
    recorded = nlohmann::json::parse(file);
    prompt = recorded["prompt"].get<std::vector<std::int32_t>>();
    generated = recorded["generated"].get<std::vector<std::int32_t>>();
    ModelOptions options;
    options.num_threads = 2;
    model = load_model(*path, options);
  }

  nlohmann::json recorded;
  std::vector<std::int32_t> prompt, generated;
  std::shared_ptr<const Model> model;
};

TEST_F(ReferenceLogits, EveryPositionAgrees) {
  const ModelConfig& c = model->config();
  for (const DType kv : {DType::f32, DType::bf16}) {
    const KvLayout layout{c.num_layers, c.num_kv_heads, c.head_dim, 16, kv};
    Runner runner(*model, layout, 16, false, std::nullopt);
    StepPlanner planner(runner.attention_shape(), {}, DeviceModel::default_cpu(), 16, 16);
    Scheduler scheduler({16, 16, 512, 4, false});
    auto sample = std::make_unique<Sample>();
    sample->tokens = prompt;
    sample->tokens.insert(sample->tokens.end(), generated.begin(), generated.end());
    sample->prompt_len = static_cast<std::int64_t>(sample->tokens.size());
    scheduler.add(std::move(sample));
    StepBatch batch;
    scheduler.schedule(batch);
    std::vector<std::int32_t> all(batch.tokens.size());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int32_t>(i);
    runner.forward(planner.plan(batch), {batch.tokens, batch.positions, batch.token_slots, batch.copies, all});
    double error = 0;
    double scale = 0;
    int positions = 0;
    runner.logits([&](int first, int count, const float* logits) {
      for (int i = 0; i < count; ++i, ++positions) {
        const auto position = static_cast<std::size_t>(first + i);
        const float* row = logits + static_cast<std::size_t>(i) * static_cast<std::size_t>(c.vocab);
        for (std::size_t w = 0; w < recorded["watched"].size(); ++w) {
          const double expected = recorded["logits"][position][w];
          error = std::max(error, std::abs(row[recorded["watched"][w].get<std::size_t>()] - expected));
          scale = std::max(scale, std::abs(expected));
        }
        EXPECT_NEAR(row[recorded["argmax"][position].get<std::size_t>()], recorded["max"][position].get<double>(),
                    (model->weight_type() == DType::f32 ? (kv == DType::f32 ? 1e-3 : 0.3) : 1.0));
      }
    });
    EXPECT_EQ(positions, static_cast<int>(prompt.size() + generated.size()));
    // fp32 throughout leaves rounding alone; 16-bit KV or weights leave their own.
    const double limit = model->weight_type() == DType::f32 ? (kv == DType::f32 ? 5e-5 : 2e-2) : 4e-2;
    EXPECT_LT(error / scale, limit) << "kv " << name_of(kv) << ", weights " << name_of(model->weight_type());
    RecordProperty(kv == DType::f32 ? "error_kv_f32" : "error_kv_bf16", std::to_string(error / scale));
  }
}

TEST_F(ReferenceLogits, GreedyTextAgrees) {
  Engine engine(model, {});
  Request request;
  request.prompt = prompt;
  request.max_tokens = static_cast<int>(generated.size());
  request.ignore_eos = true;
  EXPECT_EQ(run_to_completion(engine, {&request, 1})[0].tokens, generated);
}

}  // namespace
}  // namespace headwater::test
