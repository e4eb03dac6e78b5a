// A loaded model: configuration, tokenizer, packed weights, and the workers that compute with them. Immutable for its
// users; the products keep primitives for the row counts they have seen, so only one engine may compute at a time.
#pragma once

#include <memory>
#include <string>

#include "engine/engine.h"
#include "engine/gguf.h"
#include "engine/model_config.h"
#include "engine/tokenizer.h"
#include "engine/weights.h"
#include "headwater/executor.h"

namespace headwater::engine {

class Model {
 public:
  /// Unpacks all matrices. Throws Error (io, unsupported).
  Model(Gguf gguf, const ModelOptions& options);

  [[nodiscard]] const ModelConfig& config() const noexcept { return config_; }
  [[nodiscard]] const Gguf& gguf() const noexcept { return gguf_; }
  [[nodiscard]] const Tokenizer& tokenizer() const noexcept { return tokenizer_; }
  [[nodiscard]] const Weights& weights() const noexcept { return *weights_; }
  [[nodiscard]] const Products& products() const noexcept { return *products_; }
  /// f32 or bf16: type of the matrices and of what is multiplied with them.
  [[nodiscard]] DType weight_type() const noexcept { return type_; }
  [[nodiscard]] Executor& executor() const noexcept { return *executor_; }
  [[nodiscard]] int num_threads() const noexcept { return executor_->num_workers(); }

 private:
  Gguf gguf_;
  ModelConfig config_;
  Tokenizer tokenizer_;
  std::unique_ptr<Executor> executor_;
  DType type_;
  std::unique_ptr<const Products> products_;
  std::unique_ptr<const Weights> weights_;
};

}  // namespace headwater::engine
