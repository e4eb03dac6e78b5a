#include "simd/kernel_case.h"

#include <algorithm>

#include "headwater/plan.h"

namespace headwater::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kGap = 8;  // NaN elements after every head of Q and out, and after every page
constexpr std::size_t kFence = 256;

/// Strides of both tensors and the elements that one allocation needs; V may live in K's.
struct Strides {
  PagedTensor k, v;
  std::int64_t v_offset = -1;  ///< elements into K's allocation; -1: its own
  std::int64_t elements_per_page = 0;
};

Strides strides_of(const CaseSpec& s) {
  const std::int64_t h = s.num_kv_heads, n = s.page_size, dk = s.head_dim_qk, dv = s.head_dim_vo;
  const std::int64_t d = std::max(dk, dv);
  Strides r;
  switch (s.layout) {
    case Layout::nhd:
      r.k = {nullptr, n * h * dk + kGap, h * dk, dk};
      r.v = {nullptr, n * h * dv + kGap, h * dv, dv};
      r.elements_per_page = n * h * d + kGap;
      break;
    case Layout::hnd:
      r.k = {nullptr, n * h * dk + kGap, dk, n * dk};
      r.v = {nullptr, n * h * dv + kGap, dv, n * dv};
      r.elements_per_page = n * h * d + kGap;
      break;
    case Layout::pair_nhd:  // [pages, 2, page, Hkv, D]
      r.k = r.v = {nullptr, 2 * n * h * d + kGap, h * d, d};
      r.v_offset = n * h * d;
      r.elements_per_page = 2 * n * h * d + kGap;
      break;
    case Layout::pair_hnd:  // [pages, 2, Hkv, page, D]
      r.k = r.v = {nullptr, 2 * n * h * d + kGap, d, n * d};
      r.v_offset = n * h * d;
      r.elements_per_page = 2 * n * h * d + kGap;
      break;
    case Layout::side_by_side:  // [pages, Hkv, page, Dk + Dv]
      r.k = r.v = {nullptr, n * h * (dk + dv) + kGap, dk + dv, n * (dk + dv)};
      r.v_offset = dk;
      r.elements_per_page = n * h * (dk + dv) + kGap;
      break;
    case Layout::v_in_k:  // MLA
      r.k = r.v = {nullptr, n * h * dk + kGap, h * dk, dk};
      r.v_offset = 0;
      r.elements_per_page = n * h * dk + kGap;
      break;
  }
  return r;
}

int num_entries(const CaseSpec& s) {
  return (s.first_token + s.num_keys + s.page_size - 1) / s.page_size;
}
int pool_pages(const CaseSpec& s) {
  return num_entries(s) + 3;
}
std::int64_t q_heads(const CaseSpec& s) {
  return std::int64_t{s.num_kv_heads} * s.group_size;
}

}  // namespace

Case::Case(const CaseSpec& s)
    : spec_(s),
      rng_(s.seed * 7919 + 13),
      q_(s.q, static_cast<std::size_t>(s.num_rows * q_heads(s) * (s.head_dim_qk + kGap))),
      k_(s.kv, static_cast<std::size_t>(pool_pages(s) * strides_of(s).elements_per_page)),
      v_(s.kv,
         strides_of(s).v_offset >= 0 ? 1 : static_cast<std::size_t>(pool_pages(s) * strides_of(s).elements_per_page)),
      out_(s.out, static_cast<std::size_t>(s.num_rows * q_heads(s) * (s.head_dim_vo + kGap))),
      lse_(static_cast<std::size_t>(s.num_rows * q_heads(s)), kNan) {
  std::normal_distribution<float> normal;
  const std::int64_t hq = q_heads(s);
  for (std::int64_t i = 0; i < s.num_rows * hq; ++i) {
    for (int d = 0; d < s.head_dim_qk; ++d) q_.set(i * (s.head_dim_qk + kGap) + d, s.q_size * normal(rng_));
  }
  const Strides strides = strides_of(s);
  kv_.k = strides.k;
  kv_.v = strides.v;
  kv_.k.data = k_.data();
  kv_.v.data = strides.v_offset >= 0 ? static_cast<unsigned char*>(k_.data()) +
                                           strides.v_offset * static_cast<std::int64_t>(size_of(s.kv))
                                     : v_.data();
  kv_.dtype = s.kv;
  kv_.num_pages = pool_pages(s);
  kv_.page_size = s.page_size;
  std::vector<std::int32_t> pool(static_cast<std::size_t>(pool_pages(s)));
  for (std::size_t i = 0; i < pool.size(); ++i) pool[i] = static_cast<std::int32_t>(i);
  std::shuffle(pool.begin(), pool.end(), rng_);
  page_ids_ = {1 << 30};  // never to be looked at: items start one entry later
  page_ids_.insert(page_ids_.end(), pool.begin(), pool.begin() + num_entries(s));
  for (int key = 0; key < s.num_keys; ++key) {
    for (int h = 0; h < s.num_kv_heads; ++h) {
      for (int d = 0; d < s.head_dim_qk; ++d) k_.set(kv_index(kv_.k, key, h) + d, normal(rng_));
      if (s.layout == Layout::v_in_k) continue;
      Tensor& v = strides.v_offset >= 0 ? k_ : v_;
      const std::int64_t at = kv_index(kv_.v, key, h) + std::max<std::int64_t>(strides.v_offset, 0);
      for (int d = 0; d < s.head_dim_vo; ++d) v.set(at + d, normal(rng_));
    }
  }
  for (int r = 0; r < s.num_rows; ++r) {
    detail::RowRange range{s.pos_begin, s.pos_begin + s.num_keys, s.pos_begin + s.num_keys - 1};
    if (s.ragged) {
      const auto pick = [&](int n) { return static_cast<std::int32_t>(rng_() % static_cast<std::uint64_t>(n)); };
      range.hi = s.pos_begin + s.num_keys - pick(std::max(1, s.num_keys / 2));
      range.lo = pick(3) == 0 ? s.pos_begin + pick(s.num_keys) : s.pos_begin;
      if (pick(16) == 0) range.lo = range.hi;  // sees nothing
      range.lo = std::min(range.lo, range.hi);
      range.pos = range.hi - 1;
    }
    ranges.push_back(range);
  }
  std::uniform_real_distribution<float> unit(0.5F, 1.5F);
  for (int h = 0; h < hq; ++h) slopes_.push_back(0.05F * unit(rng_));
  for (int h = 0; h < hq; ++h) sinks_.push_back(2.0F * normal(rng_));
  if (hq > 2) sinks_[1] = -std::numeric_limits<float>::infinity();
  for (int h = 0; h < s.num_kv_heads; ++h) k_scale_.push_back(unit(rng_));
  for (int h = 0; h < s.num_kv_heads; ++h) v_scale_.push_back(unit(rng_));

  params_.num_qo_heads = static_cast<int>(hq);
  params_.num_kv_heads = s.num_kv_heads;
  params_.group_size = s.group_size;
  params_.head_dim_qk = s.head_dim_qk;
  params_.head_dim_vo = s.head_dim_vo;
  params_.q = {q_.data(), s.q, hq * (s.head_dim_qk + kGap), s.head_dim_qk + kGap};
  params_.kv = &kv_;
  params_.out = {out_.data(), s.out, hq * (s.head_dim_vo + kGap), s.head_dim_vo + kGap};
  params_.lse = {lse_.data(), 1, s.num_rows, s.base};  // [heads, rows]
  params_.page_ids = page_ids_.data();
  params_.rows = ranges.data();
  params_.sm_scale = 1.0F / std::sqrt(static_cast<float>(s.head_dim_qk));
  params_.logits_soft_cap = s.soft_cap;
  params_.alibi_slopes = s.alibi ? slopes_.data() : nullptr;
  params_.sinks = s.sinks ? sinks_.data() : nullptr;
  if (s.scales) {
    params_.k_scale = {k_scale_.data(), s.num_kv_heads};
    params_.v_scale = {v_scale_.data(), s.num_kv_heads};
  }
  params_.num_sink_tokens = s.num_sink_tokens;
  params_.batch_invariant = s.batch_invariant;
  params_.invariant_chunk = s.invariant_chunk;
}

std::int64_t Case::kv_index(const PagedTensor& t, int key, int head) const {
  const int at = spec_.first_token + key;
  const std::int64_t page = page_ids_[static_cast<std::size_t>(1 + at / spec_.page_size)];
  return page * t.page_stride + at % spec_.page_size * t.token_stride + head * t.head_stride;
}

bool Case::visible(int row, int key) const {
  const detail::RowRange& range = ranges[static_cast<std::size_t>(row)];
  const std::int32_t pos = spec_.pos_begin + key;
  return pos < range.hi && (pos >= range.lo || pos < spec_.num_sink_tokens);
}

std::vector<std::int32_t> Case::all_rows() const {
  std::vector<std::int32_t> rows;
  for (int r = 0; r < spec_.num_rows; ++r) rows.push_back(r);
  return rows;
}

detail::WorkItem Case::item_of(const Piece& piece) {
  detail::WorkItem item;
  item.pos_begin = spec_.pos_begin + piece.key_begin;
  item.num_tokens = piece.num_keys;
  item.page_begin = 1 + (spec_.first_token + piece.key_begin) / spec_.page_size;
  item.first_token = (spec_.first_token + piece.key_begin) % spec_.page_size;
  item.row_begin = static_cast<std::int32_t>(item_rows_.size());
  item.num_rows = static_cast<std::int32_t>(piece.rows.size());
  item_rows_.insert(item_rows_.end(), piece.rows.begin(), piece.rows.end());
  item.kv_head_begin = 0;
  item.kv_head_end = static_cast<std::int16_t>(spec_.num_kv_heads);
  int begin = 0;
  int end = piece.num_keys;
  for (const std::int32_t r : piece.rows) {
    begin = std::max(begin, ranges[static_cast<std::size_t>(r)].lo - item.pos_begin);
    end = std::min(end, ranges[static_cast<std::size_t>(r)].hi - item.pos_begin);
  }
  if (begin < end && !distrust_unmasked) {
    item.unmasked_begin = begin;
    item.unmasked_end = end;
  }
  return item;
}

void Case::attend(const detail::WorkItem& item) {
  params_.item_rows = item_rows_.data();
  params_.partial_o = partial_o_.data();
  params_.partial_lse = partial_lse_.data();
  const cpu::Kernels& kernels = cpu::kernels_for(spec_.isa);
  const std::size_t bytes = kernels.scratch_bytes(params_, item.num_rows);
  std::vector<unsigned char> memory(bytes + 2 * kFence + kWorkspaceAlignment, 0xFF);
  auto address = reinterpret_cast<std::uintptr_t>(memory.data()) + kFence;
  address = (address + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  auto* scratch = reinterpret_cast<std::byte*>(address);
  kernels.attend(params_, item, {scratch, bytes});
  for (std::size_t i = 1; i <= kFence; ++i) {
    fences_ = fences_ && *(scratch - i) == std::byte{0xFF};
  }
  for (std::size_t i = 0; i < kFence; ++i) fences_ = fences_ && scratch[bytes + i] == std::byte{0xFF};
}

void Case::run_direct() {
  item_rows_.clear();
  partial_o_.clear();
  partial_lse_.clear();
  attend(item_of({0, spec_.num_keys, all_rows()}));
}

void Case::run_pieces(const std::vector<Piece>& pieces, bool fold_first) {
  item_rows_.clear();
  std::vector<detail::WorkItem> items;
  std::vector<std::vector<std::int32_t>> slots(static_cast<std::size_t>(spec_.num_rows));
  std::int32_t num_slots = 1;  // slot 0 stays unused
  for (const Piece& piece : pieces) {
    detail::WorkItem item = item_of(piece);
    item.partial_begin = num_slots;
    if (spec_.batch_invariant && !(fold_first && piece.key_begin == 0)) {
      const int c = spec_.invariant_chunk;
      item.num_states = (item.pos_begin + item.num_tokens - 1) / c - item.pos_begin / c + 1;
    }
    for (int s = 0; s < item.num_states; ++s) {
      for (std::size_t j = 0; j < piece.rows.size(); ++j)
        slots[static_cast<std::size_t>(piece.rows[j])].push_back(num_slots++);
    }
    items.push_back(item);
  }
  const auto hq = static_cast<std::size_t>(q_heads(spec_));
  partial_o_.assign(static_cast<std::size_t>(num_slots + 1) * hq * static_cast<std::size_t>(spec_.head_dim_vo), kNan);
  partial_lse_.assign(static_cast<std::size_t>(num_slots + 1) * hq, kNan);
  for (const detail::WorkItem& item : items) attend(item);
  const cpu::Kernels& kernels = cpu::kernels_for(spec_.isa);
  for (std::int32_t r = 0; r < spec_.num_rows; ++r) {
    const auto& mine = slots[static_cast<std::size_t>(r)];
    kernels.merge_row(params_, r, mine.data(), static_cast<int>(mine.size()));
  }
  for (std::size_t i = 0; i < hq; ++i) {
    fences_ = fences_ && std::isnan(partial_lse_[i]) && std::isnan(partial_lse_[partial_lse_.size() - 1 - i]);
  }
}

std::vector<unsigned char> Case::bits() const {
  std::vector<unsigned char> all = out_.bytes();
  const auto* lse = reinterpret_cast<const unsigned char*>(lse_.data());
  all.insert(all.end(), lse, lse + lse_.size() * sizeof(float));
  return all;
}

Errors Case::errors() const {
  Errors e;
  e.fences = fences_;
  const std::int64_t hq = q_heads(spec_);
  const double cap = static_cast<double>(spec_.soft_cap);
  const Strides strides = strides_of(spec_);
  double max_ref = 0;
  double max_error = 0;
  std::vector<double> p(static_cast<std::size_t>(spec_.num_keys));
  std::vector<double> o(static_cast<std::size_t>(spec_.head_dim_vo));
  for (int r = 0; r < spec_.num_rows; ++r) {
    for (int h = 0; h < hq; ++h) {
      const int kvh = h / spec_.group_size;
      const double k_scale = spec_.scales ? static_cast<double>(k_scale_[static_cast<std::size_t>(kvh)]) : 1.0;
      const double v_scale = spec_.scales ? static_cast<double>(v_scale_[static_cast<std::size_t>(kvh)]) : 1.0;
      double max = -std::numeric_limits<double>::infinity();
      for (int key = 0; key < spec_.num_keys; ++key) {
        double s = -std::numeric_limits<double>::infinity();
        if (visible(r, key)) {
          s = 0;
          for (int d = 0; d < spec_.head_dim_qk; ++d) {
            s += q_.get((r * hq + h) * (spec_.head_dim_qk + kGap) + d) * k_.get(kv_index(kv_.k, key, kvh) + d);
          }
          s *= static_cast<double>(params_.sm_scale) * k_scale;
          if (cap > 0) s = cap * std::tanh(s / cap);
          if (spec_.alibi) {
            s += static_cast<double>(slopes_[static_cast<std::size_t>(h)]) *
                 (spec_.pos_begin + key - ranges[static_cast<std::size_t>(r)].pos);
          }
        }
        p[static_cast<std::size_t>(key)] = s;
        max = std::max(max, s);
      }
      const double sink = spec_.sinks ? static_cast<double>(sinks_[static_cast<std::size_t>(h)])
                                      : -std::numeric_limits<double>::infinity();
      const double shift = std::max(max, sink);
      double sum = std::isinf(sink) ? 0.0 : std::exp(sink - shift);
      std::fill(o.begin(), o.end(), 0.0);
      for (int key = 0; key < spec_.num_keys && !std::isinf(max); ++key) {
        const double w = std::exp(p[static_cast<std::size_t>(key)] - shift);
        if (w == 0) continue;
        sum += w;
        const std::int64_t at = kv_index(kv_.v, key, kvh) + std::max<std::int64_t>(strides.v_offset, 0);
        for (int d = 0; d < spec_.head_dim_vo; ++d) {
          o[static_cast<std::size_t>(d)] += w * (strides.v_offset >= 0 ? k_ : v_).get(at + d);
        }
      }
      double lse = sum == 0 ? -std::numeric_limits<double>::infinity() : shift + std::log(sum);
      if (spec_.base == LseBase::two) lse /= std::log(2.0);
      const double got = static_cast<double>(lse_[static_cast<std::size_t>(h * spec_.num_rows + r)]);
      if (std::isinf(lse)) {
        e.exact_empty = e.exact_empty && got == lse;
      } else {
        const double error = std::abs(got - lse);
        e.lse = std::isnan(error) ? error : std::isnan(e.lse) ? e.lse : std::max(e.lse, error);
      }
      for (int d = 0; d < spec_.head_dim_vo; ++d) {
        const double ref = sum == 0 ? 0.0 : v_scale * o[static_cast<std::size_t>(d)] / sum;
        const double x = out_.get((r * hq + h) * (spec_.head_dim_vo + kGap) + d);
        if (std::isinf(max)) e.exact_empty = e.exact_empty && x == 0.0;
        const double error = std::abs(x - ref);
        if (!(error <= max_error)) max_error = std::isnan(max_error) ? max_error : error;
        max_ref = std::max(max_ref, std::abs(ref));
      }
      // The gap after a head belongs to the caller.
      for (int d = 0; d < kGap; ++d) {
        e.fences = e.fences && std::isnan(out_.get((r * hq + h) * (spec_.head_dim_vo + kGap) + spec_.head_dim_vo + d));
      }
    }
  }
  e.o = max_ref == 0 ? max_error : max_error / max_ref;
  return e;
}

}  // namespace headwater::test
