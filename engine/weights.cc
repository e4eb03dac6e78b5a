// See weights.h. Loading goes matrix by matrix: rows are dequantised by all workers into a plain fp32 buffer, which
// oneDNN then reorders into the arena, so that the peak above the final size is one matrix.
#include "engine/weights.h"

#include <array>

#include "engine/dequant.h"
#include "engine/gguf.h"
#include "engine/omp_executor.h"

namespace headwater::engine {
namespace {

constexpr std::size_t kAlignment = 4096;

constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::vector<float> vector_of(const Gguf& gguf, const std::string& name, int size) {
  const std::array<std::uint64_t, 1> shape{static_cast<std::uint64_t>(size)};
  const GgufTensor& tensor = gguf.tensor(name, shape);
  std::vector<float> values(static_cast<std::size_t>(size));
  dequantize(tensor.type, tensor.data, values);
  return values;
}

}  // namespace

Products::Products(const ModelConfig& c, DType type)
    : qkv({c.hidden, c.qkv_width(), false}, type),
      attention_out({c.q_width(), c.hidden, true}, type),
      gate_up({c.hidden, 2 * c.ffn, false}, type),
      down({c.ffn, c.hidden, true}, type),
      output({c.hidden, c.vocab, false}, type) {}

Weights::Weights(const Gguf& gguf, const ModelConfig& config, const Products& products, Executor& executor,
                 const std::function<void(double)>& progress) {
  const std::size_t layer_bytes = aligned(products.qkv.packed_bytes()) +
                                  aligned(products.attention_out.packed_bytes()) +
                                  aligned(products.gate_up.packed_bytes()) + aligned(products.down.packed_bytes());
  const std::size_t total =
      layer_bytes * static_cast<std::size_t>(config.num_layers) + aligned(products.output.packed_bytes());
  arena_ = HugeBuffer(total);
  const auto report = [&] {
    if (progress) progress(static_cast<double>(used_) / static_cast<double>(total));
  };

  const std::array<std::uint64_t, 2> shape{static_cast<std::uint64_t>(config.hidden),
                                           static_cast<std::uint64_t>(config.vocab)};
  embedding_ = &gguf.tensor("token_embd.weight", shape);
  const bool tied = gguf.find_tensor("output.weight") == nullptr;
  output_ = pack(gguf, products.output, std::array{Part{tied ? "token_embd.weight" : "output.weight", config.vocab}},
                 executor);
  report();
  output_norm_ = vector_of(gguf, "output_norm.weight", config.hidden);
  if (gguf.find_tensor("rope_freqs.weight") != nullptr) {
    rope_factors_ = vector_of(gguf, "rope_freqs.weight", config.rope_dim / 2);
  }

  layers_.resize(static_cast<std::size_t>(config.num_layers));
  for (int i = 0; i < config.num_layers; ++i) {
    LayerWeights& layer = layers_[static_cast<std::size_t>(i)];
    layer.attention_norm = vector_of(gguf, layer_tensor(i, "attn_norm"), config.hidden);
    layer.ffn_norm = vector_of(gguf, layer_tensor(i, "ffn_norm"), config.hidden);
    layer.qkv = pack(gguf, products.qkv,
                     std::array{Part{layer_tensor(i, "attn_q"), config.q_width()},
                                Part{layer_tensor(i, "attn_k"), config.kv_width()},
                                Part{layer_tensor(i, "attn_v"), config.kv_width()}},
                     executor);
    layer.attention_out =
        pack(gguf, products.attention_out, std::array{Part{layer_tensor(i, "attn_output"), config.hidden}}, executor);
    layer.gate_up =
        pack(gguf, products.gate_up,
             std::array{Part{layer_tensor(i, "ffn_gate"), config.ffn}, Part{layer_tensor(i, "ffn_up"), config.ffn}},
             executor);
    layer.down = pack(gguf, products.down, std::array{Part{layer_tensor(i, "ffn_down"), config.hidden}}, executor);
    report();
  }
  plain_ = {};
  gguf.drop_resident();
}

const void* Weights::pack(const Gguf& gguf, const Product& product, std::span<const Part> parts, Executor& executor) {
  const auto in = static_cast<std::size_t>(product.shape().in_features);
  plain_.resize(in * static_cast<std::size_t>(product.shape().out_features));
  std::size_t row = 0;
  for (const Part& part : parts) {
    const std::array<std::uint64_t, 2> shape{in, static_cast<std::uint64_t>(part.rows)};
    const GgufTensor& tensor = gguf.tensor(part.name, shape);
    float* out = plain_.data() + row * in;
    for_ranges(executor, part.rows, 64, [&](int begin, int end) {
      const auto first = static_cast<std::size_t>(begin);
      const auto count = static_cast<std::size_t>(end - begin);
      dequantize_rows(tensor, first, count, std::span(out + first * in, count * in));
    });
    row += static_cast<std::size_t>(part.rows);
  }
  std::byte* place = arena_.data() + used_;
  product.pack(plain_.data(), place);
  used_ += aligned(product.packed_bytes());
  return place;
}

void Weights::embed(std::int32_t token, std::span<float> out) const {
  dequantize_rows(*embedding_, static_cast<std::uint64_t>(token), 1, out);
}

}  // namespace headwater::engine
