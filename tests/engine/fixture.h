// The tiny model, loaded once per test program, and short ways to say what a test needs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/model.h"
#include "support/tiny_gguf.h"

namespace headwater::test {

/// A tiny model with fp32 matrices and products: differences from double precision are rounding alone.
inline std::shared_ptr<const engine::Model> tiny_model(const TinyModel& shape = {},
                                                       engine::WeightType type = engine::WeightType::f32) {
  // The file's bytes live as long as the model.
  struct Holder {
    std::vector<std::byte> bytes;
    std::unique_ptr<const engine::Model> model;
  };
  auto holder = std::make_shared<Holder>();
  holder->bytes = tiny_gguf(shape);
  engine::ModelOptions options;
  options.num_threads = 2;
  options.weights = type;
  holder->model = std::make_unique<const engine::Model>(engine::Gguf::from_bytes(holder->bytes, "tiny"), options);
  return {holder, holder->model.get()};
}

inline const std::shared_ptr<const engine::Model>& shared_tiny_model() {
  static const std::shared_ptr<const engine::Model> model = tiny_model();
  return model;
}

/// fp32 cache, exact enough to compare greedy text; small pages and chunks so that borders are crossed.
inline engine::EngineOptions tiny_options() {
  engine::EngineOptions options;
  options.kv_dtype = DType::f32;
  options.page_size = 4;
  options.num_pages = 512;
  options.max_step_tokens = 24;
  return options;
}

inline std::vector<std::int32_t> random_tokens(std::uint64_t seed, std::size_t count, const engine::Model& model) {
  TinyRandom random(seed);
  std::vector<std::int32_t> tokens(count);
  // Not the special ones: they would end the generation.
  for (auto& token : tokens) {
    token = 3 + static_cast<std::int32_t>(random.bits() % static_cast<std::uint64_t>(model.config().vocab - 3));
  }
  return tokens;
}

inline engine::Request request_of(std::vector<std::int32_t> prompt, int max_tokens) {
  engine::Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.ignore_eos = true;
  return request;
}

/// Requests that share a prefix of `shared` tokens, each with its own tail.
inline std::vector<engine::Request> questions(int count, std::size_t shared, std::size_t tail, int max_tokens,
                                              const engine::Model& model) {
  std::vector<engine::Request> requests;
  for (int i = 0; i < count; ++i) {
    std::vector<std::int32_t> prompt = random_tokens(1, shared, model);
    const std::vector<std::int32_t> own = random_tokens(static_cast<std::uint64_t>(10 + i), tail, model);
    prompt.insert(prompt.end(), own.begin(), own.end());
    requests.push_back(request_of(std::move(prompt), max_tokens));
  }
  return requests;
}

inline std::vector<std::vector<std::int32_t>> tokens_of(const std::vector<engine::Completion>& completions) {
  std::vector<std::vector<std::int32_t>> tokens;
  for (const auto& completion : completions) tokens.push_back(completion.tokens);
  return tokens;
}

}  // namespace headwater::test
