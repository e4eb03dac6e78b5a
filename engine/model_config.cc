// See model_config.h.
#include "engine/model_config.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <unordered_set>

#include "engine/gguf.h"
#include "headwater/error.h"
#include "headwater/options.h"

namespace headwater::engine {
namespace {

// With these bounds the widths of ModelConfig, and sums of a few of them, fit an int.
constexpr std::uint64_t kMostWidth = 1U << 24;
constexpr std::uint64_t kMostHeads = 32767;  // of attention
static_assert(3 * kMostHeads * kMaxHeadDim < std::numeric_limits<int>::max());
constexpr int kTensorsPerLayer = 9;

template <class... Args>
[[noreturn]] void refuse(const Gguf& gguf, ErrorCode code, fmt::format_string<Args...> what, Args&&... args) {
  throw Error(code, gguf.name() + ": " + fmt::format(what, std::forward<Args>(args)...));
}

int size_of_key(const Gguf& gguf, const char* key, std::uint64_t most, std::optional<std::uint64_t> fallback = {}) {
  const std::uint64_t value = gguf.unsigned_integer(key, fallback);
  if (value == 0 || value > most) refuse(gguf, ErrorCode::io, "{} = {}, expected 1..{}", key, value, most);
  return static_cast<int>(value);
}

void check_family(const Gguf& gguf) {
  const std::string_view architecture = gguf.string("general.architecture");
  if (architecture != "llama") {
    refuse(gguf, ErrorCode::unsupported, "general.architecture = {}, expected 'llama'", quoted(architecture));
  }
  if (const std::string_view scaling = gguf.string("llama.rope.scaling.type", "none"); scaling != "none") {
    refuse(gguf, ErrorCode::unsupported, "llama.rope.scaling.type = {}, expected 'none' or no such key",
           quoted(scaling));
  }
  if (const std::uint64_t experts = gguf.unsigned_integer("llama.expert_count", 0); experts != 0) {
    refuse(gguf, ErrorCode::unsupported, "llama.expert_count = {}, expected 0: mixtures of experts are not known",
           experts);
  }
}

int read_num_layers(const Gguf& gguf) {
  const std::uint64_t layers = gguf.unsigned_integer("llama.block_count");
  const std::uint64_t most = gguf.tensors().size() / kTensorsPerLayer;
  if (layers == 0 || layers > most) {
    refuse(gguf, ErrorCode::io, "llama.block_count = {}, expected 1..{}: the file has {} tensors, a layer takes {}",
           layers, most, gguf.tensors().size(), kTensorsPerLayer);
  }
  return static_cast<int>(layers);
}

void read_heads(const Gguf& gguf, ModelConfig& config) {
  config.num_qo_heads = size_of_key(gguf, "llama.attention.head_count", kMostHeads);
  config.num_kv_heads =
      size_of_key(gguf, "llama.attention.head_count_kv", kMostHeads, static_cast<std::uint64_t>(config.num_qo_heads));
  if (config.num_qo_heads % config.num_kv_heads != 0) {
    refuse(gguf, ErrorCode::io, "llama.attention.head_count = {}, expected a multiple of head_count_kv = {}",
           config.num_qo_heads, config.num_kv_heads);
  }
  config.head_dim = size_of_key(gguf, "llama.attention.key_length", kMostWidth,
                                static_cast<std::uint64_t>(config.hidden / config.num_qo_heads));
  if (config.head_dim % 16 != 0 || config.head_dim > kMaxHeadDim) {
    refuse(gguf, ErrorCode::unsupported,
           "llama.attention.key_length (head size) = {}, expected a multiple of 16 up to {}", config.head_dim,
           kMaxHeadDim);
  }
  const int value_dim =
      size_of_key(gguf, "llama.attention.value_length", kMostWidth, static_cast<std::uint64_t>(config.head_dim));
  if (value_dim != config.head_dim) {
    refuse(gguf, ErrorCode::unsupported, "llama.attention.value_length = {}, expected key_length = {}", value_dim,
           config.head_dim);
  }
}

void read_numbers(const Gguf& gguf, ModelConfig& config) {
  config.rope_dim =
      size_of_key(gguf, "llama.rope.dimension_count", kMostWidth, static_cast<std::uint64_t>(config.head_dim));
  if (config.rope_dim > config.head_dim || config.rope_dim % 2 != 0) {
    refuse(gguf, ErrorCode::io, "llama.rope.dimension_count = {}, expected an even number up to the head size {}",
           config.rope_dim, config.head_dim);
  }
  config.rope_base = gguf.real("llama.rope.freq_base", 10000.0);
  if (!(config.rope_base > 0.0) || !std::isfinite(config.rope_base)) {
    refuse(gguf, ErrorCode::io, "llama.rope.freq_base = {}, expected a finite number above 0", config.rope_base);
  }
  const double eps = gguf.real("llama.attention.layer_norm_rms_epsilon");
  if (!(eps >= 0.0) || !(eps <= 1.0)) {
    refuse(gguf, ErrorCode::io, "llama.attention.layer_norm_rms_epsilon = {}, expected 0..1", eps);
  }
  config.rms_eps = static_cast<float>(eps);
}

/// Every tensor that the forward pass reads must be there in its shape; one that it does not know (a bias, a norm of
/// another architecture) would be left out silently.
void check_tensors(const Gguf& gguf, const ModelConfig& config) {
  std::unordered_set<std::string_view> known;
  const auto size = [](int value) { return static_cast<std::uint64_t>(value); };
  const auto expect = [&](const std::string& name, std::span<const std::uint64_t> shape) {
    known.insert(gguf.tensor(name, shape).name);
  };
  const auto vector = [&](const std::string& name, int length) { expect(name, std::array{size(length)}); };
  const auto matrix = [&](const std::string& name, int in, int out) { expect(name, std::array{size(in), size(out)}); };
  matrix("token_embd.weight", config.hidden, config.vocab);
  vector("output_norm.weight", config.hidden);
  if (gguf.find_tensor("output.weight") != nullptr) matrix("output.weight", config.hidden, config.vocab);
  if (gguf.find_tensor("rope_freqs.weight") != nullptr) vector("rope_freqs.weight", config.rope_dim / 2);
  for (int i = 0; i < config.num_layers; ++i) {
    vector(layer_tensor(i, "attn_norm"), config.hidden);
    matrix(layer_tensor(i, "attn_q"), config.hidden, config.q_width());
    matrix(layer_tensor(i, "attn_k"), config.hidden, config.kv_width());
    matrix(layer_tensor(i, "attn_v"), config.hidden, config.kv_width());
    matrix(layer_tensor(i, "attn_output"), config.q_width(), config.hidden);
    vector(layer_tensor(i, "ffn_norm"), config.hidden);
    matrix(layer_tensor(i, "ffn_gate"), config.hidden, config.ffn);
    matrix(layer_tensor(i, "ffn_up"), config.hidden, config.ffn);
    matrix(layer_tensor(i, "ffn_down"), config.ffn, config.hidden);
  }
  for (const GgufTensor& tensor : gguf.tensors()) {
    if (known.contains(tensor.name)) continue;
    refuse(gguf, ErrorCode::unsupported, "tensor {} has no place in the llama forward pass of {} layers",
           quoted(tensor.name), config.num_layers);
  }
}

}  // namespace

std::string layer_tensor(int layer, std::string_view what) {
  return fmt::format("blk.{}.{}.weight", layer, what);
}

ModelConfig read_model_config(const Gguf& gguf) {
  check_family(gguf);
  ModelConfig config;
  config.name = gguf.string("general.name", "");
  config.num_layers = read_num_layers(gguf);
  config.hidden = size_of_key(gguf, "llama.embedding_length", kMostWidth);
  config.ffn = size_of_key(gguf, "llama.feed_forward_length", kMostWidth);
  config.context = size_of_key(gguf, "llama.context_length", kMostWidth);
  read_heads(gguf, config);
  read_numbers(gguf, config);
  const GgufTensor* embedding = gguf.find_tensor("token_embd.weight");
  if (embedding == nullptr) {
    refuse(gguf, ErrorCode::io, "tensor 'token_embd.weight' is missing, expected shape [{}, vocabulary]",
           config.hidden);
  }
  const std::uint64_t vocab = embedding->shape[1];
  if (vocab > kMostWidth) {
    refuse(gguf, ErrorCode::io, "tensor 'token_embd.weight' has {} rows, expected 1..{}", vocab, kMostWidth);
  }
  config.vocab = static_cast<int>(vocab);
  check_tensors(gguf, config);
  return config;
}

}  // namespace headwater::engine
