#include "plan/cost_model.h"

#include <algorithm>

namespace headwater::detail {

CostModel::CostModel(const AttentionShape& s, const PlanOptions& o, const DeviceModel& m) {
  num_workers_ = o.num_workers > 0 ? o.num_workers : m.num_workers;
  group_size_ = s.group_size();
  num_kv_heads_ = s.num_kv_heads;
  tile_rows_ = std::max(1, m.max_tile_rows / group_size_);
  head_dims_ = s.head_dim_qk + s.head_dim_vo;
  compute_ = m.has_dot16 && s.q_dtype == DType::bf16 && s.kv_dtype == DType::bf16 ? m.dot16 : m.fma32;
  one_row_key_ps_ = key_ps(1);
  token_bytes_ = head_dims_ * s.num_kv_heads * static_cast<std::int64_t>(size_of(s.kv_dtype));
  const std::int64_t read = std::max(m.worker_ps_per_kib, times(m.memory_ps_per_kib, num_workers_));
  read_token_ps_ = times(read, token_bytes_) / 1024;
  reread_token_ps_ = std::min(read_token_ps_, times(times(m.cache_ps_per_kib, num_workers_), token_bytes_) / 1024);
  cache_bytes_ = m.cache_bytes;
  item_ps_ = m.item_ps;
  item_row_ps_ = m.item_row_ps;
  partial_row_ps_ = times(m.partial_ps_per_kib, std::int64_t{s.num_qo_heads} * (s.head_dim_vo + 1) * 4) / 1024;
  many_start_ps_ = m.many_start_ps;
  launch_ps_ = m.launch_ps;
  chunk_tokens_ = m.chunk_tokens;
  part_tokens_ = m.part_tokens;
  teams_ = m.teams;
}

}  // namespace headwater::detail
