// See model_config.h.
#include "engine/model_config.h"

#include <cstdint>

#include "engine/gguf.h"
#include "headwater/error.h"

namespace headwater::engine {
namespace {

int size_of_key(const Gguf& gguf, const std::string& key, std::optional<std::uint64_t> fallback = {}) {
  constexpr std::uint64_t kMost = 1U << 24;
  const std::uint64_t value = gguf.unsigned_integer(key, fallback);
  if (value == 0 || value > kMost) {
    throw Error(ErrorCode::io,
                gguf.name() + ": " + key + " = " + std::to_string(value) + ", expected 1.." + std::to_string(kMost));
  }
  return static_cast<int>(value);
}

}  // namespace

ModelConfig read_model_config(const Gguf& gguf) {
  const std::string_view architecture = gguf.string("general.architecture");
  if (architecture != "llama") {
    throw Error(ErrorCode::unsupported,
                gguf.name() + ": general.architecture = \"" + std::string(architecture) + "\", expected \"llama\"");
  }
  if (gguf.find("llama.rope.scaling.type") != nullptr) {
    const std::string_view scaling = gguf.string("llama.rope.scaling.type");
    if (scaling != "none") {
      throw Error(ErrorCode::unsupported, gguf.name() + ": llama.rope.scaling.type = \"" + std::string(scaling) +
                                              "\", expected \"none\" or no such key");
    }
  }
  if (gguf.unsigned_integer("llama.expert_count", 0) != 0) {
    throw Error(ErrorCode::unsupported, gguf.name() + ": llama.expert_count is not 0; mixtures of experts are unknown");
  }

  ModelConfig config;
  config.name = gguf.string("general.name", "");
  config.num_layers = size_of_key(gguf, "llama.block_count");
  config.hidden = size_of_key(gguf, "llama.embedding_length");
  config.ffn = size_of_key(gguf, "llama.feed_forward_length");
  config.num_qo_heads = size_of_key(gguf, "llama.attention.head_count");
  config.num_kv_heads = size_of_key(gguf, "llama.attention.head_count_kv", config.num_qo_heads);
  config.context = size_of_key(gguf, "llama.context_length");
  config.head_dim =
      size_of_key(gguf, "llama.attention.key_length", static_cast<std::uint64_t>(config.hidden / config.num_qo_heads));
  if (config.num_qo_heads % config.num_kv_heads != 0) {
    throw Error(ErrorCode::io, gguf.name() + ": llama.attention.head_count = " + std::to_string(config.num_qo_heads) +
                                   " is not a multiple of head_count_kv = " + std::to_string(config.num_kv_heads));
  }
  const int value_dim = size_of_key(gguf, "llama.attention.value_length", config.head_dim);
  if (value_dim != config.head_dim) {
    throw Error(ErrorCode::unsupported, gguf.name() + ": llama.attention.value_length = " + std::to_string(value_dim) +
                                            ", expected key_length = " + std::to_string(config.head_dim));
  }
  config.rope_dim = size_of_key(gguf, "llama.rope.dimension_count", config.head_dim);
  if (config.rope_dim > config.head_dim || config.rope_dim % 2 != 0) {
    throw Error(ErrorCode::io, gguf.name() + ": llama.rope.dimension_count = " + std::to_string(config.rope_dim) +
                                   ", expected an even number up to the head size " + std::to_string(config.head_dim));
  }
  config.rope_base = gguf.real("llama.rope.freq_base", 10000.0);
  config.rms_eps = static_cast<float>(gguf.real("llama.attention.layer_norm_rms_epsilon"));
  if (!(config.rope_base > 0.0) || !(config.rms_eps >= 0.0F)) {
    throw Error(ErrorCode::io, gguf.name() + ": llama.rope.freq_base = " + std::to_string(config.rope_base) +
                                   " and layer_norm_rms_epsilon = " + std::to_string(config.rms_eps) +
                                   ", expected a positive base and an epsilon of at least 0");
  }
  const GgufTensor* embedding = gguf.find_tensor("token_embd.weight");
  if (embedding == nullptr || embedding->num_dims != 2 || embedding->shape[1] == 0 ||
      embedding->shape[1] > (1U << 24)) {
    throw Error(ErrorCode::io, gguf.name() + ": token_embd.weight is missing or not a matrix [hidden, vocabulary]");
  }
  config.vocab = static_cast<int>(embedding->shape[1]);
  return config;
}

}  // namespace headwater::engine
