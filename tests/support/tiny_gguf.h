// A complete model of the Llama family of about a megabyte: random weights from a seed, a byte-level tokenizer
// with every byte and a few merges, a ChatML template. With it the engine is tested without any download. What it
// writes is nonsense, but always the same nonsense.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/byte_alphabet.h"
#include "engine/dequant.h"
#include "support/gguf_writer.h"

namespace headwater::test {

struct TinyModel {
  std::uint64_t seed = 1;
  std::uint32_t num_layers = 2;
  std::uint32_t num_qo_heads = 4;
  std::uint32_t num_kv_heads = 2;
  std::uint32_t head_dim = 32;
  std::uint32_t hidden = 128;  ///< embedding length; num_qo_heads * head_dim in most models, but need not be
  std::uint32_t ffn = 192;
  std::uint32_t context = 1024;
  float rope_base = 10000.0F;
  bool tied_embeddings = true;
  engine::GgmlType matrices = engine::GgmlType::f32;  ///< F32, F16, BF16, Q8_0 or Q4_1
  std::string pre_tokenizer = "smollm";
  std::string chat_template =
      "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
      "'\n'}}{% endfor %}"
      "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
};

/// Uniform numbers that are the same on every machine (splitmix64).
class TinyRandom {
 public:
  explicit TinyRandom(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15U;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9U;
    z = (z ^ z >> 27) * 0x94D049BB133111EBU;
    return z ^ z >> 31;
  }
  /// In [-1, 1), in steps of 2^-23: the same in float everywhere.
  float uniform() {
    return static_cast<float>(static_cast<std::int64_t>(bits() >> 40) - (1 << 23)) / static_cast<float>(1 << 23);
  }

 private:
  std::uint64_t state_;
};

/// Nearest bfloat16, ties to even; for finite values.
inline std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
}

/// A binary16 near the value (truncated; zero below its normal range): enough to make test data.
inline std::uint16_t to_half(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000U;
  const int exponent = static_cast<int>(bits >> 23 & 0xFF) - 127 + 15;
  if (exponent <= 0) return static_cast<std::uint16_t>(sign);
  if (exponent >= 31) return static_cast<std::uint16_t>(sign | 0x7BFFU);
  return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(exponent) << 10 | (bits >> 13 & 0x3FFU));
}

/// Values as a tensor of the given type holds them; blocks of 32 for Q8_0 and Q4_1.
inline std::vector<std::byte> encode_tensor(engine::GgmlType type, const std::vector<float>& values) {
  ByteWriter out;
  const std::size_t block = engine::block_values(type);
  for (std::size_t at = 0; at < values.size(); at += block) {
    const float* x = values.data() + at;
    if (type == engine::GgmlType::f32) out.number(x[0]);
    if (type == engine::GgmlType::f16) out.number(to_half(x[0]));
    if (type == engine::GgmlType::bf16) out.number(to_bf16(x[0]));
    if (type == engine::GgmlType::q8_0) {
      float largest = 0;
      for (std::size_t i = 0; i < block; ++i) largest = std::max(largest, std::fabs(x[i]));
      const float scale = largest / 126.0F;
      out.number(to_half(scale));
      for (std::size_t i = 0; i < block; ++i) {
        out.number(static_cast<std::int8_t>(scale == 0 ? 0 : std::lround(x[i] / scale)));
      }
    }
    if (type == engine::GgmlType::q4_1) {
      float low = x[0];
      float high = x[0];
      for (std::size_t i = 1; i < block; ++i) {
        low = std::min(low, x[i]);
        high = std::max(high, x[i]);
      }
      const float scale = (high - low) / 15.0F;
      out.number(to_half(scale)).number(to_half(low));
      const auto quant = [&](std::size_t i) {
        return static_cast<unsigned>(scale == 0 ? 0 : std::lround((x[i] - low) / scale)) & 15U;
      };
      for (std::size_t i = 0; i < block / 2; ++i)
        out.number(static_cast<std::uint8_t>(quant(i) | quant(i + block / 2) << 4));
    }
  }
  return std::move(out.bytes);
}

/// Special tokens of the tiny model; their index is their id.
inline const std::vector<std::string>& tiny_specials() {
  static const std::vector<std::string> specials{"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
  return specials;
}

/// Adds a byte-level tokenizer: the special tokens, then the 256 bytes, then the results of the merges (pairs of plain
/// text).
/// Returns the size of the vocabulary.
inline std::size_t add_tokenizer(GgufWriter& file, const TinyModel& model,
                                 const std::vector<std::pair<std::string, std::string>>& merges = {{"t", "h"},
                                                                                                   {"th", "e"},
                                                                                                   {" ", "the"},
                                                                                                   {"i", "n"},
                                                                                                   {"a", "n"},
                                                                                                   {"an", "d"},
                                                                                                   {" ", "a"},
                                                                                                   {"e", "r"},
                                                                                                   {" ", " "},
                                                                                                   {"in", "g"},
                                                                                                   {"r", "e"},
                                                                                                   {"o", "n"},
                                                                                                   {"\n", "\n"}}) {
  std::vector<std::string> tokens = tiny_specials();
  std::vector<std::int32_t> kinds(tokens.size(), 3);
  for (int byte = 0; byte < 256; ++byte)
    tokens.push_back(engine::alphabet_text(std::string(1, static_cast<char>(byte))));
  std::vector<std::string> pairs;
  for (const auto& [left, right] : merges) {
    tokens.push_back(engine::alphabet_text(left + right));
    pairs.push_back(engine::alphabet_text(left) + " " + engine::alphabet_text(right));
  }
  kinds.resize(tokens.size(), 1);
  file.string("tokenizer.ggml.model", "gpt2").string("tokenizer.ggml.pre", model.pre_tokenizer);
  file.strings("tokenizer.ggml.tokens", tokens).numbers("tokenizer.ggml.token_type", engine::GgufType::i32, kinds);
  file.strings("tokenizer.ggml.merges", pairs);
  file.u32("tokenizer.ggml.bos_token_id", 1)
      .u32("tokenizer.ggml.eos_token_id", 2)
      .boolean("tokenizer.ggml.add_bos_token", false);
  if (!model.chat_template.empty()) file.string("tokenizer.chat_template", model.chat_template);
  return tokens.size();
}

/// The whole model as a file in memory. Sizes that a quantised type stores in blocks must be multiples of 32.
inline GgufWriter tiny_gguf_writer(const TinyModel& model = {}) {
  GgufWriter file;
  file.string("general.architecture", "llama").string("general.name", "tiny");
  file.u32("llama.block_count", model.num_layers).u32("llama.context_length", model.context);
  file.u32("llama.embedding_length", model.hidden).u32("llama.feed_forward_length", model.ffn);
  file.u32("llama.attention.head_count", model.num_qo_heads).u32("llama.attention.head_count_kv", model.num_kv_heads);
  file.u32("llama.attention.key_length", model.head_dim).u32("llama.attention.value_length", model.head_dim);
  file.u32("llama.rope.dimension_count", model.head_dim).f32("llama.rope.freq_base", model.rope_base);
  file.f32("llama.attention.layer_norm_rms_epsilon", 1e-5F);
  const std::uint64_t vocab = add_tokenizer(file, model);
  file.u32("llama.vocab_size", static_cast<std::uint32_t>(vocab));

  TinyRandom random(model.seed);
  // A matrix of a linear layer, in -> out; uniform values whose variance keeps the size of activations.
  const auto matrix = [&](const std::string& name, std::uint64_t in, std::uint64_t out, float gain) {
    std::vector<float> values(in * out);
    const float scale = gain * std::sqrt(3.0F / static_cast<float>(in));
    for (float& value : values) value = scale * random.uniform();
    file.tensor(name, model.matrices, {in, out}, encode_tensor(model.matrices, values));
  };
  const auto norm = [&](const std::string& name) {
    std::vector<float> values(model.hidden);
    for (float& value : values) value = 1.0F + 0.1F * random.uniform();
    file.tensor(name, engine::GgmlType::f32, {model.hidden}, encode_tensor(engine::GgmlType::f32, values));
  };
  const std::uint64_t q_size = std::uint64_t{model.num_qo_heads} * model.head_dim;
  const std::uint64_t kv_size = std::uint64_t{model.num_kv_heads} * model.head_dim;
  matrix("token_embd.weight", model.hidden, vocab, 1.0F);
  for (std::uint32_t layer = 0; layer < model.num_layers; ++layer) {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    norm(prefix + "attn_norm.weight");
    matrix(prefix + "attn_q.weight", model.hidden, q_size, 2.0F);
    matrix(prefix + "attn_k.weight", model.hidden, kv_size, 2.0F);
    matrix(prefix + "attn_v.weight", model.hidden, kv_size, 1.0F);
    matrix(prefix + "attn_output.weight", q_size, model.hidden, 1.0F);
    norm(prefix + "ffn_norm.weight");
    matrix(prefix + "ffn_gate.weight", model.hidden, model.ffn, 1.0F);
    matrix(prefix + "ffn_up.weight", model.hidden, model.ffn, 1.0F);
    matrix(prefix + "ffn_down.weight", model.ffn, model.hidden, 1.0F);
  }
  norm("output_norm.weight");
  if (!model.tied_embeddings) matrix("output.weight", model.hidden, vocab, 1.0F);
  return file;
}

inline std::vector<std::byte> tiny_gguf(const TinyModel& model = {}) {
  return tiny_gguf_writer(model).bytes();
}

}  // namespace headwater::test
