// Canonical bytes of what run reads: numbers little-endian, arrays with their length before them.
#include <cstring>
#include <string>
#include <type_traits>

#include "headwater/plan.h"
#include "plan/plan_data.h"

namespace headwater {
namespace {

class Writer {
 public:
  template <class T>
  void number(T value) {
    using U = std::make_unsigned_t<T>;
    auto bits = static_cast<U>(value);
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      out.push_back(static_cast<char>(bits & 0xFFU));
      if constexpr (sizeof(T) > 1) bits = static_cast<U>(bits >> 8);
    }
  }
  void number(float value) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    number(bits);
  }
  template <class T>
  void array(const std::vector<T>& values) {
    number(static_cast<std::uint64_t>(values.size()));
    for (const T v : values) number(v);
  }
  std::string out;
};

}  // namespace

std::string Plan::serialize() const {
  const detail::PlanData& p = *data_;
  Writer w;
  w.out.reserve(4 * p.page_ids.size() + 64 * p.items.size() + 32 * p.rows.size() + 256);
  for (const int v :
       {p.shape.num_qo_heads, p.shape.num_kv_heads, p.shape.head_dim_qk, p.shape.head_dim_vo,
        static_cast<int>(p.shape.q_dtype), static_cast<int>(p.shape.kv_dtype), static_cast<int>(p.shape.out_dtype),
        static_cast<int>(p.options.causal), static_cast<int>(p.options.alibi), static_cast<int>(p.options.sinks),
        static_cast<int>(p.options.batch_invariant), p.options.invariant_chunk}) {
    w.number(v);
  }
  for (const std::int64_t v : {p.options.window_left, p.options.local_chunk, p.options.num_sink_tokens}) w.number(v);
  w.number(p.options.sm_scale);
  w.number(p.options.logits_soft_cap);
  w.array(p.page_size);
  w.array(p.num_pages);
  w.array(p.page_ids);
  w.number(static_cast<std::uint64_t>(p.rows.size()));
  for (const detail::RowRange& r : p.rows) {
    for (const std::int32_t v : {r.lo, r.hi, r.pos}) w.number(v);
  }
  w.array(p.item_rows);
  w.number(static_cast<std::uint64_t>(p.items.size()));
  for (const detail::WorkItem& i : p.items) {
    for (const std::int32_t v : {i.pos_begin, i.num_tokens, i.page_begin, i.first_token, i.row_begin, i.num_rows,
                                 i.partial_begin, i.num_states, i.view, i.unmasked_begin, i.unmasked_end}) {
      w.number(v);
    }
    w.number(i.kv_head_begin);
    w.number(i.kv_head_end);
  }
  w.array(p.merge_rows);
  w.array(p.merge_indptr);
  w.array(p.merge_slots);
  w.array(p.empty_rows);
  w.number(p.num_partials);
  w.number(p.num_workers);
  w.number(p.max_item_rows);
  for (const std::size_t v : {p.partial_o_bytes, p.scratch_offset, p.scratch_bytes_per_worker, p.workspace_bytes}) {
    w.number(static_cast<std::uint64_t>(v));
  }
  return std::move(w.out);
}

}  // namespace headwater
