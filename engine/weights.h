// The matrices of a model, dequantised and packed once for oneDNN, side by side in one huge-page arena. q, k and v are
// one matrix, gate and up another: fewer, larger products. q and k rows stay in the file's order (pairs interleaved),
// which is what rope() rotates; attention does not care about the order within a head.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "engine/huge_buffer.h"
#include "engine/matmul.h"
#include "engine/model_config.h"
#include "headwater/executor.h"

namespace headwater::engine {

class Gguf;
struct GgufTensor;

struct LayerWeights {
  std::vector<float> attention_norm;    ///< [hidden]
  std::vector<float> ffn_norm;          ///< [hidden]
  const void* qkv = nullptr;            ///< packed [q_width + 2 kv_width, hidden]
  const void* attention_out = nullptr;  ///< packed [hidden, q_width]
  const void* gate_up = nullptr;        ///< packed [2 ffn, hidden]
  const void* down = nullptr;           ///< packed [hidden, ffn]
};

/// The five products of a model, one per shape; all layers use the same ones.
struct Products {
  Products(const ModelConfig& config, DType type);
  Product qkv;
  Product attention_out;  ///< adds to the residual stream
  Product gate_up;
  Product down;  ///< adds to the residual stream
  Product output;
};

class Weights {
 public:
  /// `config` is that of `gguf`, so every tensor is there in its shape.
  Weights(const Gguf& gguf, const ModelConfig& config, const Products& products, Executor& executor,
          const std::function<void(double)>& progress);

  [[nodiscard]] const LayerWeights& layer(int index) const { return layers_[static_cast<std::size_t>(index)]; }
  [[nodiscard]] std::span<const float> output_norm() const noexcept { return output_norm_; }
  [[nodiscard]] const void* output() const noexcept { return output_; }
  [[nodiscard]] std::span<const float> rope_factors() const noexcept { return rope_factors_; }
  /// The embedding of one token, fp32 [hidden], straight from the file.
  void embed(std::int32_t token, std::span<float> out) const;
  [[nodiscard]] std::size_t packed_bytes() const noexcept { return used_; }

 private:
  struct Part {
    std::string name;
    int rows;
  };
  const void* pack(const Gguf& gguf, const Product& product, std::span<const Part> parts, Executor& executor);

  const GgufTensor* embedding_ = nullptr;
  std::vector<LayerWeights> layers_;
  std::vector<float> output_norm_;
  std::vector<float> rope_factors_;
  const void* output_ = nullptr;
  HugeBuffer arena_;
  std::size_t used_ = 0;
  std::vector<float> plain_;  ///< one matrix on its way from file to arena; freed after loading
};

}  // namespace headwater::engine
