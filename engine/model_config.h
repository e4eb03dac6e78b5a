// Sizes of a Llama-family model, read from a GGUF file's metadata.
#pragma once

#include <string>
#include <vector>

namespace headwater::engine {

class Gguf;

struct ModelConfig {
  std::string name;
  int num_layers = 0;
  int hidden = 0;  ///< width of the residual stream
  int ffn = 0;     ///< width of the gated layer
  int num_qo_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int vocab = 0;
  int context = 0;   ///< positions that the model was trained for
  int rope_dim = 0;  ///< leading values of a head that are rotated, in interleaved pairs
  double rope_base = 0;
  float rms_eps = 0;

  [[nodiscard]] int q_width() const noexcept { return num_qo_heads * head_dim; }
  [[nodiscard]] int kv_width() const noexcept { return num_kv_heads * head_dim; }
  [[nodiscard]] int qkv_width() const noexcept { return q_width() + 2 * kv_width(); }
};

/// Throws Error: unsupported for another architecture or a rope scaling that is not known, io for sizes that are
/// missing or cannot be.
[[nodiscard]] ModelConfig read_model_config(const Gguf& gguf);

}  // namespace headwater::engine
