#include "plan/validate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

#include "headwater/error.h"

namespace headwater::detail {
namespace {

constexpr std::int64_t kMaxPosition = std::numeric_limits<std::int32_t>::max() / 2;
constexpr std::int32_t kMaxRows = 1 << 24;
constexpr std::int32_t kMaxWorkers = 65'536;
// Beyond these q.k / cap or cap * log2(e) may leave the range of fp32.
constexpr float kMinSoftCap = 1e-30F;
constexpr float kMaxSoftCap = 1e30F;

std::string str(std::int64_t v) {
  return std::to_string(v);
}

[[noreturn]] void bad_argument(const std::string& message) {
  throw Error(ErrorCode::invalid_argument, message);
}

[[noreturn]] void bad_table(const std::string& message) {
  throw Error(ErrorCode::invalid_page_table, message);
}

std::string at(const std::string& name, std::size_t i) {
  return name + "[" + std::to_string(i) + "]";
}

void check_positive(const char* name, std::int64_t value, std::int64_t most) {
  if (value < 1 || value > most) {
    bad_argument(std::string(name) + " = " + str(value) + ", expected 1.." + str(most));
  }
}

void check_not_negative(const char* name, std::int64_t value) {
  if (value < 0) bad_argument(std::string(name) + " = " + str(value) + " is negative");
}

void check_head_dim(const char* name, int value) {
  if (value < 16 || value > kMaxHeadDim || value % 16 != 0) {
    bad_argument(std::string(name) + " = " + str(value) + ", expected a multiple of 16 in 16.." + str(kMaxHeadDim));
  }
}

/// indptr[0] = 0, never decreasing.
void check_indptr(std::span<const std::int32_t> indptr, const std::string& name) {
  if (indptr.empty()) bad_table(name + " is empty, expected at least the entry 0");
  if (indptr[0] != 0) bad_table(name + "[0] = " + str(indptr[0]) + ", expected 0");
  for (std::size_t i = 1; i < indptr.size(); ++i) {
    if (indptr[i] < indptr[i - 1]) {
      bad_table(at(name, i) + " = " + str(indptr[i]) + " is less than " + at(name, i - 1) + " = " + str(indptr[i - 1]));
    }
  }
}

/// A page table of `num_tables` tables but for its ids. `prefix` comes before the argument names.
void check_table(const PageTable& kv, std::size_t num_tables, const std::string& owner, const std::string& prefix) {
  if (kv.page_size < 1) bad_argument(prefix + "page_size = " + str(kv.page_size) + ", expected at least 1");
  if (kv.num_pages < 0 || kv.num_pages > std::numeric_limits<std::int32_t>::max()) {
    bad_argument(prefix + "num_pages = " + str(kv.num_pages) + ", expected 0..2147483647");
  }
  const std::string indptr = prefix + "kv_indptr";
  if (kv.indptr.size() != num_tables + 1) {
    bad_table(indptr + " has " + str(static_cast<std::int64_t>(kv.indptr.size())) + " entries, expected " +
              str(static_cast<std::int64_t>(num_tables + 1)) + " as " + owner);
  }
  check_indptr(kv.indptr, indptr);
  if (static_cast<std::int64_t>(kv.indices.size()) < kv.indptr.back()) {
    bad_table(prefix + "kv_indices has " + str(static_cast<std::int64_t>(kv.indices.size())) +
              " entries, expected at least " + at(indptr, num_tables) + " = " + str(kv.indptr.back()));
  }
  if (kv.last_page_len.size() != num_tables) {
    bad_table(prefix + "kv_last_page_len has " + str(static_cast<std::int64_t>(kv.last_page_len.size())) +
              " entries, expected " + str(static_cast<std::int64_t>(num_tables)));
  }
  for (std::size_t i = 0; i < num_tables; ++i) {
    if (kv.indptr[i + 1] == kv.indptr[i]) continue;
    if (kv.last_page_len[i] < 1 || kv.last_page_len[i] > kv.page_size) {
      bad_table(at(prefix + "kv_last_page_len", i) + " = " + str(kv.last_page_len[i]) + ", expected 1.." +
                str(kv.page_size) + " (page_size)");
    }
  }
}

/// `where` and its index are only put together for the message.
void check_position(std::int64_t tokens, const char* where, std::size_t index, const char* behind) {
  if (tokens > kMaxPosition) {
    bad_table(where + std::to_string(index) + behind + " reaches token position " + str(tokens) +
              ", expected at most " + str(kMaxPosition));
  }
}

/// Query row offsets. The limit on their number keeps a plan's memory in bounds whatever the input.
void check_row_indptr(std::span<const std::int32_t> indptr, const std::string& name) {
  check_indptr(indptr, name);
  if (indptr.back() > kMaxRows) {
    throw Error(ErrorCode::unsupported,
                at(name, indptr.size() - 1) + " = " + str(indptr.back()) + " rows, expected at most " + str(kMaxRows));
  }
}

void check_requests(const Batch& batch) {
  check_row_indptr(batch.qo_indptr, "qo_indptr");
  const std::size_t n = batch.qo_indptr.size() - 1;
  check_table(batch.kv, n, "qo_indptr has", "");
  if (!batch.kv_start_page.empty() && batch.kv_start_page.size() != n) {
    bad_table("kv_start_page has " + str(static_cast<std::int64_t>(batch.kv_start_page.size())) +
              " entries, expected " + str(static_cast<std::int64_t>(n)) + " or none");
  }
  if (!batch.first_page_offset.empty() && batch.first_page_offset.size() != n) {
    bad_table("first_page_offset has " + str(static_cast<std::int64_t>(batch.first_page_offset.size())) +
              " entries, expected " + str(static_cast<std::int64_t>(n)) + " or none");
  }
  for (std::size_t b = 0; b < n; ++b) {
    const std::int32_t start = batch.kv_start_page.empty() ? 0 : batch.kv_start_page[b];
    if (start < 0) bad_table(at("kv_start_page", b) + " = " + str(start) + " is negative");
    const std::int32_t offset = batch.first_page_offset.empty() ? 0 : batch.first_page_offset[b];
    if (offset < 0 || offset >= batch.kv.page_size) {
      bad_table(at("first_page_offset", b) + " = " + str(offset) + ", expected 0.." + str(batch.kv.page_size - 1));
    }
    check_position((std::int64_t{start} + batch.kv.indptr[b + 1] - batch.kv.indptr[b]) * batch.kv.page_size, "request ",
                   b, "");
  }
}

/// The row ranges of a level must lie inside those of the level above.
void check_nesting(std::span<const std::int32_t> upper, std::span<const std::int32_t> lower, const std::string& name) {
  std::size_t j = 0;
  for (std::size_t i = 0; i + 1 < lower.size(); ++i) {
    if (lower[i] == lower[i + 1]) continue;
    while (upper[j + 1] <= lower[i]) ++j;
    if (lower[i + 1] > upper[j + 1]) {
      bad_table(name + "qo_indptr: rows [" + str(lower[i]) + ", " + str(lower[i + 1]) + ") of node " +
                str(static_cast<std::int64_t>(i)) + " do not lie inside rows [" + str(upper[j]) + ", " +
                str(upper[j + 1]) + ") of node " + str(static_cast<std::int64_t>(j)) + " of the level above");
    }
  }
}

void check_levels(const Batch& batch) {
  if (!batch.kv.indptr.empty() || !batch.kv.indices.empty() || !batch.kv.last_page_len.empty() ||
      !batch.kv_start_page.empty() || !batch.first_page_offset.empty()) {
    bad_argument("levels and a page table (kv, kv_start_page, first_page_offset) are both given, expected one of them");
  }
  const auto& requests = batch.levels.back().qo_indptr;
  check_row_indptr(requests, at("levels", batch.levels.size() - 1) + ".qo_indptr");
  std::int64_t tokens = 0;
  for (std::size_t l = 0; l < batch.levels.size(); ++l) {
    const Level& level = batch.levels[l];
    const std::string prefix = at("levels", l) + ".";
    check_row_indptr(level.qo_indptr, prefix + "qo_indptr");
    check_table(level.kv, level.qo_indptr.size() - 1, prefix + "qo_indptr has", prefix);
    if (level.qo_indptr.back() != requests.back()) {
      bad_table(prefix + "qo_indptr ends at " + str(level.qo_indptr.back()) + ", expected " + str(requests.back()) +
                " rows as in the last level");
    }
    if (l > 0) check_nesting(batch.levels[l - 1].qo_indptr, level.qo_indptr, prefix);
    std::int64_t longest = 0;
    for (std::size_t j = 0; j + 1 < level.kv.indptr.size(); ++j) {
      longest = std::max<std::int64_t>(longest,
                                       std::int64_t{level.kv.indptr[j + 1] - level.kv.indptr[j]} * level.kv.page_size);
    }
    tokens += longest;
    check_position(tokens, "levels[", l, "]");
  }
  if (!batch.qo_indptr.empty() &&
      !std::equal(batch.qo_indptr.begin(), batch.qo_indptr.end(), requests.begin(), requests.end())) {
    bad_table("qo_indptr differs from levels[" + str(static_cast<std::int64_t>(batch.levels.size()) - 1) +
              "].qo_indptr, expected the same or none");
  }
}

}  // namespace

void check_model(const DeviceModel& m) {
  check_positive("model.num_workers", m.num_workers, kMaxWorkers);
  check_positive("model.max_tile_rows", m.max_tile_rows, 1 << 20);
  check_positive("model.chunk_tokens", m.chunk_tokens, 1 << 30);
  check_positive("model.part_tokens", m.part_tokens, 1 << 20);
  check_not_negative("model.memory_ps_per_kib", m.memory_ps_per_kib);
  check_not_negative("model.worker_ps_per_kib", m.worker_ps_per_kib);
  check_not_negative("model.cache_ps_per_kib", m.cache_ps_per_kib);
  check_not_negative("model.cache_bytes", m.cache_bytes);
  check_not_negative("model.item_ps", m.item_ps);
  check_not_negative("model.item_row_ps", m.item_row_ps);
  check_not_negative("model.partial_ps_per_kib", m.partial_ps_per_kib);
  check_not_negative("model.many_start_ps", m.many_start_ps);
  check_not_negative("model.launch_ps", m.launch_ps);
  const auto check_products = [](const std::string& name, const ComputeModel& c) {
    check_not_negative((name + "few_row_ps").c_str(), c.few_row_ps);
    check_not_negative((name + "many_base_ps").c_str(), c.many_base_ps);
    check_not_negative((name + "many_row_ps").c_str(), c.many_row_ps);
    check_positive((name + "many_row_pad").c_str(), c.many_row_pad, 1 << 16);
    check_not_negative((name + "few_row_max").c_str(), c.few_row_max);
  };
  check_products("model.dot16.", m.dot16);
  check_products("model.fma32.", m.fma32);
}

void check_shape(const AttentionShape& s) {
  check_positive("num_kv_heads", s.num_kv_heads, 32'767);
  check_positive("num_qo_heads", s.num_qo_heads, 32'767);
  if (s.num_qo_heads % s.num_kv_heads != 0) {
    bad_argument("num_qo_heads = " + str(s.num_qo_heads) +
                 " is not a multiple of num_kv_heads = " + str(s.num_kv_heads));
  }
  check_head_dim("head_dim_qk", s.head_dim_qk);
  check_head_dim("head_dim_vo", s.head_dim_vo);
  for (const auto& [name, type] : {std::pair{"q_dtype", s.q_dtype}, std::pair{"out_dtype", s.out_dtype}}) {
    if (type == DType::f8e4m3 || name_of(type) == "?") {
      bad_argument(std::string(name) + " = " + std::string(name_of(type)) + ", expected f32, f16 or bf16");
    }
  }
  if (name_of(s.kv_dtype) == "?") bad_argument("kv_dtype = ?, expected f32, f16, bf16 or f8e4m3");
}

void check_options(const PlanOptions& o) {
  if (name_of(o.policy) == "?") bad_argument("policy = " + str(static_cast<int>(o.policy)) + ", expected 0..4");
  if (o.cascade > CascadeSwitch::off) bad_argument("cascade = " + str(static_cast<int>(o.cascade)) + ", expected 0..2");
  check_not_negative("min_shared_pages", o.min_shared_pages);
  check_not_negative("min_members", o.min_members);
  if (o.window_left < -1) bad_argument("window_left = " + str(o.window_left) + ", expected at least -1");
  check_not_negative("local_chunk", o.local_chunk);
  check_not_negative("num_sink_tokens", o.num_sink_tokens);
  if (o.num_workers < 0 || o.num_workers > kMaxWorkers) {
    bad_argument("num_workers = " + str(o.num_workers) + ", expected 0.." + str(kMaxWorkers));
  }
  if (!std::isfinite(o.sm_scale) || o.sm_scale < 0.0F) {
    bad_argument("sm_scale = " + std::to_string(o.sm_scale) + ", expected a finite number, at least 0");
  }
  if (o.logits_soft_cap != 0.0F && !(o.logits_soft_cap >= kMinSoftCap && o.logits_soft_cap <= kMaxSoftCap)) {
    std::ostringstream got;
    got << o.logits_soft_cap;
    bad_argument("logits_soft_cap = " + got.str() + ", expected 0 (off) or 1e-30..1e30");
  }
  if (!o.causal && o.local_chunk > 0 && o.num_sink_tokens > o.local_chunk) {
    throw Error(ErrorCode::unsupported, "num_sink_tokens = " + str(o.num_sink_tokens) + " is more than local_chunk = " +
                                            str(o.local_chunk) + " without causal, expected at most local_chunk");
  }
  if (o.invariant_chunk < 16 || o.invariant_chunk % 16 != 0 || o.invariant_chunk > (1 << 20)) {
    bad_argument("invariant_chunk = " + str(o.invariant_chunk) + ", expected a multiple of 16 in 16..1048576");
  }
}

void check_batch(const Batch& batch, const PlanOptions&) {
  if (batch.levels.empty()) {
    check_requests(batch);
  } else {
    check_levels(batch);
  }
}

void check_page_ids(const PageTable& table, std::int64_t begin, std::int64_t end, const std::string& name) {
  // The largest id as unsigned finds negative ones too; this loop vectorises, the search for the culprit need not.
  std::uint32_t largest = 0;
  const std::int32_t* ids = table.indices.data();
  for (std::int64_t i = begin; i < end; ++i) largest = std::max(largest, static_cast<std::uint32_t>(ids[i]));
  if (begin >= end || largest < static_cast<std::uint64_t>(table.num_pages)) return;
  for (std::int64_t i = begin; i < end; ++i) {
    if (ids[i] >= 0 && ids[i] < table.num_pages) continue;
    bad_table(at(name, static_cast<std::size_t>(i)) + " = " + str(ids[i]) + ", expected 0.." +
              str(table.num_pages - 1) + " (num_pages = " + str(table.num_pages) + ")");
  }
}

}  // namespace headwater::detail
