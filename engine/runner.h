// The forward pass of one step over a flat list of rows: embedding; per layer norm, q/k/v, rotation, append to the KV
// cache, attention by the step's plan, output product, norm, gated layer; then logits of the rows that are wanted.
// Activations are fp32; what feeds a product has the weights' type, so attention takes and gives that type. Buffers
// grow to the largest step and stay.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "engine/huge_buffer.h"
#include "engine/kv_storage.h"
#include "engine/model.h"
#include "engine/ops.h"
#include "headwater/cpu.h"
#include "headwater/plan.h"

namespace headwater::engine {

/// Rows of a step. The spans live until forward() returns.
struct ForwardRows {
  std::span<const std::int32_t> tokens;       ///< [R]
  std::span<const std::int32_t> positions;    ///< [R]
  std::span<const std::int64_t> token_slots;  ///< [R]
  std::span<const cpu::PageCopy> copies;      ///< before the append, in order
  std::span<const std::int32_t> logit_rows;   ///< rows whose logits will be asked for, ascending
};

/// What a forward pass did, all layers together.
struct ForwardStats {
  Path path = Path::flat;
  Isa isa = Isa::scalar;
  std::int64_t kv_bytes_read = 0;
  double attention_seconds = 0;
  double append_seconds = 0;
  double product_seconds = 0;
  std::string cascade_error;  ///< not empty: a cascade launch failed, flat ones took its place from there on
};

/// What takes the place of a cascade launch that fails. Keys and values have been appended by then; only attention is
/// run again.
struct Fallback {
  std::function<const Plan&()> flat_plan;      ///< of the same batch; empty: the failure is the caller's
  std::function<bool(int layer)> inject = {};  ///< for tests: true lets that layer's cascade launch fail
};

class Runner {
 public:
  /// `batch_invariant`: products are checked to give a row the same bits for every number of rows, and are computed in
  /// blocks of a fixed number of rows where they do not.
  Runner(const Model& model, const KvLayout& layout, std::int32_t num_pages, bool batch_invariant,
         std::optional<Isa> isa);

  /// The attention call that plans must be made for.
  [[nodiscard]] AttentionShape attention_shape() const noexcept;
  /// Computes all rows; their keys and values are in the cache afterwards.
  void forward(const Plan& plan, const ForwardRows& rows, const Fallback& fallback = {});
  /// Calls fn(first, logits) for blocks of logit_rows: logits [n, vocabulary] of logit_rows[first .. first + n).
  void logits(const std::function<void(int first, int count, const float* logits)>& fn);

  [[nodiscard]] const ForwardStats& stats() const noexcept { return stats_; }
  [[nodiscard]] const KvStorage& storage() const noexcept { return storage_; }

  static constexpr int kLogitBlock = 64;  ///< rows whose logits are held at a time

 private:
  void reserve(int num_rows);
  void embed(const ForwardRows& rows);
  /// Returns the plan that worked.
  const Plan& attention_layer(const Plan& plan, const ForwardRows& rows, int layer, const Fallback& fallback);
  void attend(const Plan& plan, int layer);
  void ffn_layer(int layer, int num_rows);
  void keep_logit_rows(std::span<const std::int32_t> logit_rows);
  void norm(std::span<const float> weight, int num_rows);
  void product(const Product& product, const void* weights, const void* x, float* y, int rows);

  const Model& model_;
  const ModelConfig& config_;
  const Ops& ops_;
  Executor& executor_;
  std::optional<Isa> isa_;
  KvStorage storage_;
  RopeTable rope_;
  int fixed_rows_ = 0;
  ForwardStats stats_;

  int capacity_ = 0;  ///< rows that the buffers hold
  int num_logit_rows_ = 0;
  HugeBuffer hidden_;     ///< fp32 [rows, hidden]: the residual stream
  HugeBuffer normed_;     ///< weights' type [rows, hidden]
  HugeBuffer qkv_;        ///< fp32 [rows, q_width + 2 kv_width]
  HugeBuffer query_;      ///< weights' type [rows, q_width]
  HugeBuffer attended_;   ///< weights' type [rows, q_width]
  HugeBuffer gate_up_;    ///< fp32 [rows, 2 ffn]
  HugeBuffer gated_;      ///< weights' type [rows, ffn]
  HugeBuffer logits_;     ///< fp32 [kLogitBlock, vocabulary]
  HugeBuffer workspace_;  ///< of attention
};

}  // namespace headwater::engine
