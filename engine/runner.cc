// See runner.h.
#include "engine/runner.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "engine/omp_executor.h"
#include "headwater/error.h"

namespace headwater::engine {
namespace {

constexpr int kSerialRows = 4;      // below: not worth waking workers for a row-wise operation
constexpr int kInvariantRows = 16;  // block of rows where products depend on their number

class Stopwatch {
 public:
  explicit Stopwatch(double& total) : total_(total), begin_(std::chrono::steady_clock::now()) {}
  ~Stopwatch() { total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& total_;
  std::chrono::steady_clock::time_point begin_;
};

/// Copies pages in order; a page that was the source of an earlier copy may be the target of a later one (it was freed
/// in between), so such copies run in a later call.
void copy_in_order(const KvCache& cache, std::span<const cpu::PageCopy> copies, const KvLayout& layout,
                   Executor& executor) {
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= copies.size(); ++i) {
    const auto batch = copies.subspan(begin, i - begin);
    const bool conflict =
        i < copies.size() && std::any_of(batch.begin(), batch.end(), [&](const cpu::PageCopy& earlier) {
          return earlier.src == copies[i].dst || earlier.dst == copies[i].src;
        });
    if (!conflict && i < copies.size()) continue;
    if (!batch.empty()) {
      cpu::copy_pages(cache, batch, layout.num_kv_heads, layout.head_dim, layout.head_dim, executor);
    }
    begin = i;
  }
}

}  // namespace

Runner::Runner(const Model& model, const KvLayout& layout, std::int32_t num_pages, bool batch_invariant,
               std::optional<Isa> isa)
    : model_(model),
      config_(model.config()),
      ops_(best_ops()),
      executor_(model.executor()),
      isa_(isa),
      storage_(layout, num_pages),
      rope_(config_.rope_dim, config_.rope_base, model.weights().rope_factors()) {
  if (!batch_invariant) return;
  const ProductThreads threads(model.num_threads());
  const Products& p = model.products();
  const Weights& w = model.weights();
  const bool agree = p.qkv.rows_agree(w.layer(0).qkv) && p.attention_out.rows_agree(w.layer(0).attention_out) &&
                     p.gate_up.rows_agree(w.layer(0).gate_up) && p.down.rows_agree(w.layer(0).down) &&
                     p.output.rows_agree(w.output(), kLogitBlock);
  if (!agree) fixed_rows_ = kInvariantRows;
}

AttentionShape Runner::attention_shape() const noexcept {
  AttentionShape shape;
  shape.num_qo_heads = config_.num_qo_heads;
  shape.num_kv_heads = config_.num_kv_heads;
  shape.head_dim_qk = config_.head_dim;
  shape.head_dim_vo = config_.head_dim;
  shape.q_dtype = model_.weight_type();
  shape.kv_dtype = storage_.layout().dtype;
  shape.out_dtype = model_.weight_type();
  return shape;
}

void Runner::reserve(int num_rows) {
  if (num_rows <= capacity_) return;
  // Products may compute up to padded_rows(n) or the next multiple of the fixed block.
  capacity_ = (padded_rows(num_rows) + kInvariantRows - 1) / kInvariantRows * kInvariantRows;
  const auto rows = static_cast<std::size_t>(capacity_);
  const auto width = [](int n) { return static_cast<std::size_t>(n); };
  const std::size_t input = size_of(model_.weight_type());
  hidden_.reserve(rows * width(config_.hidden) * sizeof(float));
  normed_.reserve(rows * width(config_.hidden) * input);
  qkv_.reserve(rows * width(config_.qkv_width()) * sizeof(float));
  query_.reserve(rows * width(config_.q_width()) * input);
  attended_.reserve(rows * width(config_.q_width()) * input);
  gate_up_.reserve(rows * width(2 * config_.ffn) * sizeof(float));
  gated_.reserve(rows * width(config_.ffn) * input);
}

void Runner::product(const Product& product, const void* weights, const void* x, float* y, int rows) {
  const Stopwatch watch(stats_.product_seconds);
  product.run(weights, x, y, rows, fixed_rows_);
}

void Runner::forward(const Plan& plan, const ForwardRows& rows, const Fallback& fallback) {
  const ProductThreads threads(model_.num_threads());
  stats_ = {};
  stats_.path = plan.stats().path;
  const int num_rows = static_cast<int>(rows.tokens.size());
  reserve(num_rows);
  rope_.extend(*std::max_element(rows.positions.begin(), rows.positions.end()) + 1);
  workspace_.reserve(plan.workspace_size());
  embed(rows);
  int live_rows = num_rows;
  const Plan* working = &plan;
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    working = &attention_layer(*working, rows, layer, fallback);
    if (layer + 1 == config_.num_layers) {
      // Nothing after the last attention is needed for rows without logits.
      keep_logit_rows(rows.logit_rows);
      live_rows = num_logit_rows_;
    }
    product(model_.products().attention_out, model_.weights().layer(layer).attention_out, attended_.data(),
            hidden_.as<float>(), live_rows);
    ffn_layer(layer, live_rows);
  }
  norm(model_.weights().output_norm(), live_rows);
}

void Runner::embed(const ForwardRows& rows) {
  const auto width = static_cast<std::size_t>(config_.hidden);
  for_ranges(executor_, static_cast<int>(rows.tokens.size()), kSerialRows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      const auto r = static_cast<std::size_t>(row);
      model_.weights().embed(rows.tokens[r], std::span(hidden_.as<float>() + r * width, width));
    }
  });
}

void Runner::norm(std::span<const float> weight, int num_rows) {
  const auto width = static_cast<std::size_t>(config_.hidden);
  const DType type = model_.weight_type();
  for_ranges(executor_, num_rows, kSerialRows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      const std::size_t offset = static_cast<std::size_t>(row) * width;
      ops_.rms_norm(hidden_.as<float>() + offset, weight.data(), config_.rms_eps, config_.hidden,
                    {normed_.data() + offset * size_of(type), type});
    }
  });
}

const Plan& Runner::attention_layer(const Plan& plan, const ForwardRows& rows, int layer, const Fallback& fallback) {
  const LayerWeights& weights = model_.weights().layer(layer);
  const int num_rows = static_cast<int>(rows.tokens.size());
  const auto q_width = static_cast<std::size_t>(config_.q_width());
  const auto row_width = static_cast<std::size_t>(config_.qkv_width());
  const DType type = model_.weight_type();
  norm(weights.attention_norm, num_rows);
  product(model_.products().qkv, weights.qkv, normed_.data(), qkv_.as<float>(), num_rows);
  for_ranges(executor_, num_rows, kSerialRows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      const auto r = static_cast<std::size_t>(row);
      float* x = qkv_.as<float>() + r * row_width;
      const float* angles = rope_.at(rows.positions[r]);
      // q and k lie side by side: one sweep over the heads of both.
      ops_.rope(x, config_.num_qo_heads + config_.num_kv_heads, config_.head_dim, angles, config_.rope_dim);
      ops_.convert(x, config_.q_width(), {query_.data() + r * q_width * size_of(type), type});
    }
  });

  const KvCache& cache = storage_.layer(layer);
  const auto row_stride = static_cast<std::int64_t>(row_width);
  const float* k = qkv_.as<float>() + q_width;
  const float* v = k + config_.kv_width();
  {
    const Stopwatch watch(stats_.append_seconds);
    if (!rows.copies.empty()) copy_in_order(cache, rows.copies, storage_.layout(), executor_);
    cpu::append_kv(cache, {k, DType::f32, row_stride, config_.head_dim}, {v, DType::f32, row_stride, config_.head_dim},
                   rows.token_slots, config_.num_kv_heads, config_.head_dim, config_.head_dim, {}, {}, executor_);
  }
  const Stopwatch watch(stats_.attention_seconds);
  try {
    if (fallback.inject && plan.stats().path == Path::cascade && fallback.inject(layer)) {
      throw Error(ErrorCode::device, "injected failure of layer " + std::to_string(layer));
    }
    attend(plan, layer);
    return plan;
  } catch (const std::exception& error) {
    if (plan.stats().path != Path::cascade || !fallback.flat_plan) throw;
    stats_.cascade_error = error.what();
  }
  const Plan& flat = fallback.flat_plan();
  workspace_.reserve(flat.workspace_size());
  attend(flat, layer);
  return flat;
}

void Runner::attend(const Plan& plan, int layer) {
  const KvCache& cache = storage_.layer(layer);
  const DType type = model_.weight_type();
  cpu::RunArgs args;
  args.q = {query_.data(), type, config_.q_width(), config_.head_dim};
  args.kv = std::span(&cache, 1);
  args.out = {attended_.data(), type, config_.q_width(), config_.head_dim};
  args.workspace = {workspace_.data(), plan.workspace_size()};
  args.isa = isa_;
  const cpu::RunOutcome outcome = cpu::run(plan, args, executor_);
  stats_.path = outcome.path;
  stats_.isa = outcome.isa;
  stats_.kv_bytes_read += outcome.kv_bytes_read;
}

/// Moves the rows with logits to the front of the residual stream and of attention's output.
void Runner::keep_logit_rows(std::span<const std::int32_t> logit_rows) {
  num_logit_rows_ = static_cast<int>(logit_rows.size());
  const std::size_t hidden_bytes = static_cast<std::size_t>(config_.hidden) * sizeof(float);
  const std::size_t attended_bytes = static_cast<std::size_t>(config_.q_width()) * size_of(model_.weight_type());
  for (std::size_t to = 0; to < logit_rows.size(); ++to) {
    const auto from = static_cast<std::size_t>(logit_rows[to]);
    if (from == to) continue;
    std::memcpy(hidden_.data() + to * hidden_bytes, hidden_.data() + from * hidden_bytes, hidden_bytes);
    std::memcpy(attended_.data() + to * attended_bytes, attended_.data() + from * attended_bytes, attended_bytes);
  }
}

void Runner::ffn_layer(int layer, int num_rows) {
  const LayerWeights& weights = model_.weights().layer(layer);
  const auto ffn = static_cast<std::size_t>(config_.ffn);
  const DType type = model_.weight_type();
  norm(weights.ffn_norm, num_rows);
  product(model_.products().gate_up, weights.gate_up, normed_.data(), gate_up_.as<float>(), num_rows);
  for_ranges(executor_, num_rows, kSerialRows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      const auto r = static_cast<std::size_t>(row);
      const float* gate = gate_up_.as<float>() + r * 2 * ffn;
      ops_.swiglu(gate, gate + ffn, config_.ffn, {gated_.data() + r * ffn * size_of(type), type});
    }
  });
  product(model_.products().down, weights.down, gated_.data(), hidden_.as<float>(), num_rows);
}

void Runner::logits(const std::function<void(int first, int count, const float* logits)>& fn) {
  const ProductThreads threads(model_.num_threads());
  const auto width = static_cast<std::size_t>(config_.hidden) * size_of(model_.weight_type());
  logits_.reserve(static_cast<std::size_t>(padded_rows(std::min(num_logit_rows_, kLogitBlock)) + kInvariantRows) *
                  static_cast<std::size_t>(config_.vocab) * sizeof(float));
  for (int first = 0; first < num_logit_rows_; first += kLogitBlock) {
    const int count = std::min(kLogitBlock, num_logit_rows_ - first);
    product(model_.products().output, model_.weights().output(),
            normed_.data() + static_cast<std::size_t>(first) * width, logits_.as<float>(), count);
    fn(first, count, logits_.as<float>());
  }
}

}  // namespace headwater::engine
