// The Llama forward pass written plainly in double precision: one sequence, no cache, no pages, no shared code with the
// engine but the GGUF reader and dequantisation. What the engine is compared with.
#pragma once

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "engine/dequant.h"
#include "engine/gguf.h"
#include "engine/model_config.h"

namespace headwater::test {

class PlainModel {
 public:
  explicit PlainModel(const engine::Gguf& gguf) : gguf_(gguf), c_(engine::read_model_config(gguf)) {}

  /// Logits [tokens][vocabulary].
  [[nodiscard]] std::vector<std::vector<double>> logits(const std::vector<std::int32_t>& tokens) const {
    const std::size_t n = tokens.size();
    const auto hidden = static_cast<std::size_t>(c_.hidden);
    const std::vector<float> table = values("token_embd.weight");
    std::vector<std::vector<double>> x(n);
    for (std::size_t i = 0; i < n; ++i) {
      const float* row = table.data() + static_cast<std::size_t>(tokens[i]) * hidden;
      x[i].assign(row, row + hidden);
    }
    for (int layer = 0; layer < c_.num_layers; ++layer) {
      const std::string prefix = "blk." + std::to_string(layer) + ".";
      attention(x, prefix);
      ffn(x, prefix);
    }
    const std::vector<float> norm = values("output_norm.weight");
    const std::vector<float> output = gguf_.find_tensor("output.weight") ? values("output.weight") : table;
    std::vector<std::vector<double>> result;
    for (const auto& row : x) result.push_back(times(output, normed(row, norm)));
    return result;
  }

  /// Greedy continuation.
  [[nodiscard]] std::vector<std::int32_t> generate(std::vector<std::int32_t> tokens, int count) const {
    const std::size_t prompt = tokens.size();
    for (int i = 0; i < count; ++i) {
      const std::vector<double> last = logits(tokens).back();
      tokens.push_back(static_cast<std::int32_t>(std::max_element(last.begin(), last.end()) - last.begin()));
    }
    return {tokens.begin() + static_cast<std::ptrdiff_t>(prompt), tokens.end()};
  }

 private:
  using Rows = std::vector<std::vector<double>>;

  [[nodiscard]] std::vector<float> values(const std::string& name) const {
    const engine::GgufTensor& tensor = *gguf_.find_tensor(name);
    std::vector<float> result(tensor.num_elements);
    engine::dequantize(tensor.type, tensor.data, result);
    return result;
  }

  [[nodiscard]] std::vector<double> normed(const std::vector<double>& x, const std::vector<float>& weight) const {
    double squares = 0;
    for (const double value : x) squares += value * value;
    const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) + static_cast<double>(c_.rms_eps));
    std::vector<double> y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale * static_cast<double>(weight[i]);
    return y;
  }

  /// W x with W [out, in] row by row.
  [[nodiscard]] static std::vector<double> times(const std::vector<float>& weights, const std::vector<double>& x) {
    std::vector<double> y(weights.size() / x.size());
    for (std::size_t o = 0; o < y.size(); ++o) {
      for (std::size_t i = 0; i < x.size(); ++i) y[o] += static_cast<double>(weights[o * x.size() + i]) * x[i];
    }
    return y;
  }

  void rotate(std::vector<double>& heads, std::size_t position) const {
    const auto dim = static_cast<std::size_t>(c_.head_dim);
    for (std::size_t head = 0; head < heads.size(); head += dim) {
      for (std::size_t i = 0; i < static_cast<std::size_t>(c_.rope_dim); i += 2) {
        const double angle =
            static_cast<double>(position) * std::pow(c_.rope_base, -static_cast<double>(i) / c_.rope_dim);
        const double a = heads[head + i];
        const double b = heads[head + i + 1];
        heads[head + i] = a * std::cos(angle) - b * std::sin(angle);
        heads[head + i + 1] = a * std::sin(angle) + b * std::cos(angle);
      }
    }
  }

  void attention(Rows& x, const std::string& prefix) const {
    const std::vector<float> norm = values(prefix + "attn_norm.weight");
    const std::vector<float> wq = values(prefix + "attn_q.weight");
    const std::vector<float> wk = values(prefix + "attn_k.weight");
    const std::vector<float> wv = values(prefix + "attn_v.weight");
    const std::vector<float> wo = values(prefix + "attn_output.weight");
    const auto dim = static_cast<std::size_t>(c_.head_dim);
    Rows keys, keyed;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::vector<double> h = normed(x[i], norm);
      std::vector<double> q = times(wq, h);
      keys.push_back(times(wk, h));
      keyed.push_back(times(wv, h));
      rotate(q, i);
      rotate(keys.back(), i);
      std::vector<double> out(q.size());
      for (std::size_t head = 0; head < static_cast<std::size_t>(c_.num_qo_heads); ++head) {
        const std::size_t kv = head / static_cast<std::size_t>(c_.num_qo_heads / c_.num_kv_heads);
        std::vector<double> weights(i + 1);
        double total = 0;
        for (std::size_t j = 0; j <= i; ++j) {
          double score = 0;
          for (std::size_t d = 0; d < dim; ++d) score += q[head * dim + d] * keys[j][kv * dim + d];
          total += weights[j] = std::exp(score / std::sqrt(static_cast<double>(dim)));
        }
        for (std::size_t j = 0; j <= i; ++j) {
          for (std::size_t d = 0; d < dim; ++d) out[head * dim + d] += weights[j] / total * keyed[j][kv * dim + d];
        }
      }
      add(x[i], times(wo, out));
    }
  }

  void ffn(Rows& x, const std::string& prefix) const {
    const std::vector<float> norm = values(prefix + "ffn_norm.weight");
    const std::vector<float> gate = values(prefix + "ffn_gate.weight");
    const std::vector<float> up = values(prefix + "ffn_up.weight");
    const std::vector<float> down = values(prefix + "ffn_down.weight");
    for (auto& row : x) {
      const std::vector<double> h = normed(row, norm);
      std::vector<double> g = times(gate, h);
      const std::vector<double> u = times(up, h);
      for (std::size_t i = 0; i < g.size(); ++i) g[i] = g[i] / (1 + std::exp(-g[i])) * u[i];
      add(row, times(down, g));
    }
  }

  static void add(std::vector<double>& x, const std::vector<double>& y) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  const engine::Gguf& gguf_;
  engine::ModelConfig c_;
};

}  // namespace headwater::test
