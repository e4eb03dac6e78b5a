// See model.h.
#include "engine/model.h"

#include "engine/omp_executor.h"
#include "headwater/error.h"

namespace headwater::engine {
namespace {

DType chosen_type(WeightType type) {
  switch (type) {
    case WeightType::f32:
      return DType::f32;
    case WeightType::bf16:
      return DType::bf16;
    case WeightType::automatic:
      break;
  }
  return has_bf16_products() ? DType::bf16 : DType::f32;
}

}  // namespace

Model::Model(Gguf gguf, const ModelOptions& options)
    : gguf_(std::move(gguf)),
      config_(read_model_config(gguf_)),
      tokenizer_(gguf_),
      executor_(make_executor(options.num_threads)),
      type_(chosen_type(options.weights)) {
  if (static_cast<std::size_t>(config_.vocab) != tokenizer_.vocab_size()) {
    throw Error(ErrorCode::io, gguf_.name() + ": token_embd.weight has " + std::to_string(config_.vocab) +
                                   " rows, expected the tokenizer's " + std::to_string(tokenizer_.vocab_size()) +
                                   " tokens");
  }
  const ProductThreads threads(executor_->num_workers());
  products_ = std::make_unique<Products>(config_, type_);
  weights_ = std::make_unique<Weights>(gguf_, config_, *products_, *executor_, options.progress);
}

std::shared_ptr<const Model> load_model(const std::string& path, const ModelOptions& options) {
  if (options.num_threads < 0) {
    throw Error(ErrorCode::invalid_argument,
                "num_threads = " + std::to_string(options.num_threads) + ", expected at least 0");
  }
  return std::make_shared<const Model>(Gguf::open(path), options);
}

}  // namespace headwater::engine
