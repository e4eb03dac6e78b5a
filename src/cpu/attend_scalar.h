// Attention of one work item in plain C++: the readable statement of what every kernel computes, and the level that
// runs everywhere.
//
// Keys are the outer loop, so that each key and value of the item is read once per KV head; all query rows of the item
// times the group size ("stacked rows", index row * group_size + g) take it in turn with an online softmax in base 2. A
// row's arithmetic does not depend on the other rows. In batch-invariant mode a state is closed at every absolute
// multiple of the chunk and folded (state.h) or left as a partial of its own, as the item says.
//
// Scratch, fp32: q [n, Dqk] | acc [n, Dvo] | max, sum, folded_lse [n] | k [Dqk] | v [Dvo] | folded [n, Dvo] in
// batch-invariant mode; n stacked rows. Never more than the formula of scratch.h.
//
// Reader observes every read of K and V: a test counts them page by page. The library's own does nothing.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cpu/convert.h"
#include "cpu/kernels.h"
#include "cpu/state.h"

namespace headwater::cpu::scalar {

/// A Reader that observes nothing.
struct UnobservedReads {
  void key(std::int32_t /*page*/, int /*token*/, int /*kv_head*/) noexcept {}
  void value(std::int32_t /*page*/, int /*token*/, int /*kv_head*/) noexcept {}
};

inline std::size_t scratch_floats(const AttendParams& p, int num_rows) noexcept {
  const auto n = static_cast<std::size_t>(num_rows) * static_cast<std::size_t>(p.group_size);
  const auto qk = static_cast<std::size_t>(p.head_dim_qk);
  const auto vo = static_cast<std::size_t>(p.head_dim_vo);
  return n * (qk + vo + 3) + qk + vo + (p.batch_invariant ? n * vo : 0);
}

/// Copies one vector of n elements to fp32.
inline void load_row(const void* data, DType dtype, std::int64_t offset, int n, float* to) noexcept {
  with_type(dtype, [&](auto tag) { convert_row(static_cast<const decltype(tag)*>(data) + offset, to, n); });
}

inline float scale_of(const Scale& scale, int kv_head) noexcept {
  if (scale.data == nullptr) return 1.0F;
  return scale.data[scale.count == 1 ? 0 : kv_head];
}

/// Partial sums in eight lanes: short dependency chains, and more exact than one long sum.
inline float dot(const float* a, const float* b, int n) noexcept {
  float lanes[8] = {};
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) lanes[j] += a[i + j] * b[i + j];
  }
  for (int j = 0; i < n; ++i, ++j) lanes[j] += a[i] * b[i];
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

/// Writes a finished state: adds the learned sink, converts O to the output's type and the LSE to its base.
inline void write_output(const AttendParams& p, std::int64_t row, int head, float* o, float lse) noexcept {
  if (p.sinks != nullptr) fold_sink(o, lse, p.sinks[head], p.head_dim_vo);
  with_type(p.out.dtype, [&](auto tag) {
    auto* to = static_cast<decltype(tag)*>(p.out.data) + row * p.out.row_stride + head * p.out.head_stride;
    convert_row(o, to, p.head_dim_vo);
  });
  if (p.lse.data != nullptr) {
    p.lse.data[row * p.lse.row_stride + head * p.lse.head_stride] = p.lse.base == LseBase::two ? lse : lse * kLn2;
  }
}

template <class Reader>
class ItemKernel {
 public:
  ItemKernel(const AttendParams& p, const detail::WorkItem& item, Scratch scratch, Reader& reader) noexcept
      : p_(p), item_(item), reader_(reader), n_(item.num_rows * p.group_size) {
    const auto n = static_cast<std::size_t>(n_);
    q_ = reinterpret_cast<float*>(scratch.data);
    acc_ = q_ + n * static_cast<std::size_t>(p.head_dim_qk);
    max_ = acc_ + n * static_cast<std::size_t>(p.head_dim_vo);
    sum_ = max_ + n;
    folded_lse_ = sum_ + n;
    k_ = folded_lse_ + n;
    v_ = k_ + p.head_dim_qk;
    folded_ = v_ + p.head_dim_vo;
  }

  void run() noexcept {
    for (int head = item_.kv_head_begin; head < item_.kv_head_end; ++head) run_head(head);
  }

 private:
  std::int32_t row_of(int j) const noexcept { return p_.item_rows[item_.row_begin + j]; }

  bool visible(const detail::RowRange& range, std::int32_t pos) const noexcept {
    return pos < range.hi && (pos >= range.lo || pos < p_.num_sink_tokens);
  }

  void run_head(int head) noexcept {
    const float score_scale = p_.sm_scale * scale_of(p_.k_scale, head);
    load_queries(head);
    reset();
    for (int i = 0; i < n_; ++i) folded_lse_[i] = kMinusInfinity;
    int state = 0;
    for (std::int32_t t = 0; t < item_.num_tokens; ++t) {
      const std::int32_t pos = item_.pos_begin + t;
      if (p_.batch_invariant && t > 0 && pos % p_.invariant_chunk == 0) close_state(head, state++, false);
      attend_key(head, t, pos, score_scale);
    }
    close_state(head, state, true);
  }

  void load_queries(int head) noexcept {
    for (int i = 0; i < n_; ++i) {
      const std::int64_t offset =
          row_of(i / p_.group_size) * p_.q.row_stride + (head * p_.group_size + i % p_.group_size) * p_.q.head_stride;
      load_row(p_.q.data, p_.q.dtype, offset, p_.head_dim_qk, q_ + static_cast<std::int64_t>(i) * p_.head_dim_qk);
    }
  }

  void reset() noexcept {
    for (int i = 0; i < n_; ++i) {
      max_[i] = kMinusInfinity;
      sum_[i] = 0.0F;
    }
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(n_) * p_.head_dim_vo; ++i) acc_[i] = 0.0F;
  }

  void attend_key(int head, std::int32_t t, std::int32_t pos, float score_scale) noexcept {
    const int g = p_.group_size;
    bool loaded = false;
    for (int j = 0; j < item_.num_rows; ++j) {
      const detail::RowRange& range = p_.rows[row_of(j)];
      if (!visible(range, pos)) continue;
      if (!loaded) load_key(head, t);
      loaded = true;
      for (int i = j * g; i < (j + 1) * g; ++i) {
        const int qo_head = head * g + (i - j * g);
        float s = score_scale * dot(q_ + static_cast<std::int64_t>(i) * p_.head_dim_qk, k_, p_.head_dim_qk);
        if (p_.logits_soft_cap > 0.0F) s = p_.logits_soft_cap * std::tanh(s / p_.logits_soft_cap);
        if (p_.alibi_slopes != nullptr) s += p_.alibi_slopes[qo_head] * static_cast<float>(pos - range.pos);
        add_value(i, s * kLog2E);
      }
    }
  }

  void load_key(int head, std::int32_t t) noexcept {
    const KvCache& kv = p_.kv[item_.view];
    const std::int32_t in_pages = item_.first_token + t;
    const std::int32_t page = p_.page_ids[item_.page_begin + in_pages / kv.page_size];
    const int token = in_pages % kv.page_size;
    const auto offset = [&](const PagedTensor& x) {
      return page * x.page_stride + token * x.token_stride + head * x.head_stride;
    };
    load_row(kv.k.data, kv.dtype, offset(kv.k), p_.head_dim_qk, k_);
    reader_.key(page, token, head);
    load_row(kv.v.data, kv.dtype, offset(kv.v), p_.head_dim_vo, v_);
    reader_.value(page, token, head);
  }

  /// One step of the online softmax of stacked row i; x is the score in base 2.
  void add_value(int i, float x) noexcept {
    if (x == kMinusInfinity) return;
    float* acc = acc_ + static_cast<std::int64_t>(i) * p_.head_dim_vo;
    if (x > max_[i]) {
      const float correction = std::exp2(max_[i] - x);
      for (int d = 0; d < p_.head_dim_vo; ++d) acc[d] *= correction;
      sum_[i] *= correction;
      max_[i] = x;
    }
    const float weight = std::exp2(x - max_[i]);
    sum_[i] += weight;
    for (int d = 0; d < p_.head_dim_vo; ++d) acc[d] += weight * v_[d];
  }

  /// Normalises the open states and folds them, or stores them where the item says; then starts new ones.
  void close_state(int head, int state, bool last) noexcept {
    const float v_scale = scale_of(p_.v_scale, head);
    for (int i = 0; i < n_; ++i) {
      float* o = acc_ + static_cast<std::int64_t>(i) * p_.head_dim_vo;
      float lse = kMinusInfinity;
      if (sum_[i] != 0.0F) {
        const float factor = v_scale / sum_[i];
        for (int d = 0; d < p_.head_dim_vo; ++d) o[d] *= factor;
        lse = max_[i] + std::log2(sum_[i]);
      }
      if (p_.batch_invariant && item_.num_states == 1) {
        float* folded = folded_ + static_cast<std::int64_t>(i) * p_.head_dim_vo;
        if (state == 0) {
          for (int d = 0; d < p_.head_dim_vo; ++d) folded[d] = 0.0F;
        }
        fold_state(folded, folded_lse_[i], o, lse, p_.head_dim_vo);
        if (last) store(head, i, 0, folded, folded_lse_[i]);
      } else {
        store(head, i, state, o, lse);
      }
    }
    if (!last) reset();
  }

  void store(int head, int i, int state, float* o, float lse) noexcept {
    const int j = i / p_.group_size;
    const int qo_head = head * p_.group_size + i % p_.group_size;
    if (item_.partial_begin < 0) {
      write_output(p_, row_of(j), qo_head, o, lse);
      return;
    }
    const std::int64_t slot =
        static_cast<std::int64_t>(item_.partial_begin) + static_cast<std::int64_t>(state) * item_.num_rows + j;
    const std::int64_t at = slot * p_.num_qo_heads + qo_head;
    for (int d = 0; d < p_.head_dim_vo; ++d) p_.partial_o[at * p_.head_dim_vo + d] = o[d];
    p_.partial_lse[at] = lse;
  }

  const AttendParams& p_;
  const detail::WorkItem& item_;
  Reader& reader_;
  int n_;
  float* q_;
  float* acc_;
  float* max_;
  float* sum_;
  float* folded_lse_;
  float* k_;
  float* v_;
  float* folded_;
};

template <class Reader>
void attend(const AttendParams& p, const detail::WorkItem& item, Scratch scratch, Reader& reader) noexcept {
  ItemKernel<Reader>(p, item, scratch, reader).run();
}

}  // namespace headwater::cpu::scalar
