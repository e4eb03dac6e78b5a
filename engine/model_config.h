// Sizes of a Llama-family model, read from a GGUF file's metadata and checked against its tensors before anything of
// such a size is made: afterwards every width fits an int, every tensor that the forward pass reads is there in its
// shape, and none is there that it would leave out.
#pragma once

#include <string>
#include <string_view>

namespace headwater::engine {

class Gguf;

struct ModelConfig {
  std::string name;
  int num_layers = 0;
  int hidden = 0;  ///< width of the residual stream
  int ffn = 0;     ///< width of the gated layer
  int num_qo_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;  ///< a multiple of 16 that attention computes
  int vocab = 0;
  int context = 0;   ///< positions that the model was trained for
  int rope_dim = 0;  ///< leading values of a head that are rotated, in interleaved pairs
  double rope_base = 0;
  float rms_eps = 0;

  [[nodiscard]] int q_width() const noexcept { return num_qo_heads * head_dim; }
  [[nodiscard]] int kv_width() const noexcept { return num_kv_heads * head_dim; }
  [[nodiscard]] int qkv_width() const noexcept { return q_width() + 2 * kv_width(); }
};

/// Throws Error naming the file and the key or tensor: unsupported for another architecture, a rope scaling, head size
/// or tensor that is not known; io for sizes that are missing, cannot be, or do not agree with the tensors. Takes time
/// and memory in proportion to the file's tensors, whatever its metadata claim.
[[nodiscard]] ModelConfig read_model_config(const Gguf& gguf);

/// Name of a layer's tensor: layer_tensor(3, "attn_q") is "blk.3.attn_q.weight".
[[nodiscard]] std::string layer_tensor(int layer, std::string_view what);

}  // namespace headwater::engine
