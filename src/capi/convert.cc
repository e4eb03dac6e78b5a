// The C interface: errors, names, init functions and conversion of structs, field by field.
#include <cstdio>

#include "capi/capi.h"

namespace headwater::capi {

static_assert(HW_ERROR_INTERNAL == static_cast<int>(ErrorCode::internal));
static_assert(HW_DTYPE_F8E4M3 == static_cast<int>(DType::f8e4m3));
static_assert(HW_ISA_AVX512_BF16 == static_cast<int>(Isa::avx512_bf16));
static_assert(HW_LSE_BASE_NATURAL == static_cast<int>(LseBase::natural));
static_assert(HW_PATH_CASCADE == static_cast<int>(Path::cascade));
static_assert(HW_POLICY_FOREST == static_cast<int>(Policy::forest));
static_assert(HW_CASCADE_OFF == static_cast<int>(CascadeSwitch::off));
static_assert(HW_WORKSPACE_ALIGNMENT == kWorkspaceAlignment);

namespace {

constexpr int kNumDTypes = HW_DTYPE_F8E4M3 + 1;
constexpr int kNumIsas = HW_ISA_AVX512_BF16 + 1;
constexpr int kNumPolicies = HW_POLICY_FOREST + 1;

PageTable page_table(const hw_page_table& t, const std::string& name) {
  PageTable out;
  if (t.num_requests < 0) refuse(name + ".num_requests = " + std::to_string(t.num_requests) + ", expected at least 0");
  out.indptr = array(t.indptr, std::int64_t{t.num_requests} + 1, (name + ".indptr").c_str());
  out.indices = array(t.indices, t.num_indices, (name + ".indices").c_str());
  out.last_page_len = array(t.last_page_len, t.num_requests, (name + ".last_page_len").c_str());
  out.page_size = t.page_size;
  out.num_pages = t.num_pages;
  out.null_page = t.null_page;
  return out;
}

PagedTensor to_cpp(const hw_paged_tensor& t) {
  return {t.data, t.page_stride, t.token_stride, t.head_stride};
}

ComputeModel to_cpp(const hw_compute_model& m) {
  return {m.few_row_ps, m.many_base_ps, m.many_row_ps, m.many_row_pad, m.few_row_max};
}

hw_compute_model to_c(const ComputeModel& m) {
  return {m.few_row_ps, m.many_base_ps, m.many_row_ps, m.many_row_pad, m.few_row_max};
}

/// A name whose string literal is NUL-terminated, or "?".
template <typename E>
const char* name_or_unknown(int value, int count) {
  return value >= 0 && value < count ? name_of(static_cast<E>(value)).data() : "?";
}

}  // namespace

int report(hw_error* error, int code, std::string_view message) noexcept {
  if (error == nullptr) return code;
  error->code = code;
  const std::size_t room = sizeof(error->message) - 1;
  const std::size_t length = std::min(message.size(), room);
  std::memcpy(error->message, message.data(), length);
  if (message.size() > room) std::memcpy(error->message + room - 3, "...", 3);
  error->message[length] = '\0';
  return code;
}

void refuse(const std::string& message) {
  throw Error(ErrorCode::invalid_argument, message);
}

DType dtype(int value, const char* name) {
  return enumerator<DType>(value, kNumDTypes, name);
}
LseBase lse_base(int value, const char* name) {
  return enumerator<LseBase>(value, 2, name);
}

AttentionShape to_cpp(const hw_attention_shape& s) {
  AttentionShape out;
  out.num_qo_heads = s.num_qo_heads;
  out.num_kv_heads = s.num_kv_heads;
  out.head_dim_qk = s.head_dim_qk;
  out.head_dim_vo = s.head_dim_vo;
  out.q_dtype = dtype(s.q_dtype, "shape->q_dtype");
  out.kv_dtype = dtype(s.kv_dtype, "shape->kv_dtype");
  out.out_dtype = dtype(s.out_dtype, "shape->out_dtype");
  return out;
}

PlanOptions to_cpp(const hw_plan_options& o) {
  PlanOptions out;
  out.policy = enumerator<Policy>(o.policy, kNumPolicies, "options->policy");
  out.cascade = enumerator<CascadeSwitch>(o.cascade, HW_CASCADE_OFF + 1, "options->cascade");
  out.min_shared_pages = o.min_shared_pages;
  out.min_members = o.min_members;
  out.causal = o.causal != 0;
  out.window_left = o.window_left;
  out.local_chunk = o.local_chunk;
  out.num_sink_tokens = o.num_sink_tokens;
  out.sm_scale = o.sm_scale;
  out.logits_soft_cap = o.logits_soft_cap;
  out.alibi = o.alibi != 0;
  out.sinks = o.sinks != 0;
  out.batch_invariant = o.batch_invariant != 0;
  out.invariant_chunk = o.invariant_chunk;
  out.num_workers = o.num_workers;
  return out;
}

hw_plan_options to_c(const PlanOptions& o) {
  hw_plan_options out{};
  out.policy = static_cast<int>(o.policy);
  out.cascade = static_cast<int>(o.cascade);
  out.min_shared_pages = o.min_shared_pages;
  out.min_members = o.min_members;
  out.causal = o.causal ? 1 : 0;
  out.window_left = o.window_left;
  out.local_chunk = o.local_chunk;
  out.num_sink_tokens = o.num_sink_tokens;
  out.sm_scale = o.sm_scale;
  out.logits_soft_cap = o.logits_soft_cap;
  out.alibi = o.alibi ? 1 : 0;
  out.sinks = o.sinks ? 1 : 0;
  out.batch_invariant = o.batch_invariant ? 1 : 0;
  out.invariant_chunk = o.invariant_chunk;
  out.num_workers = o.num_workers;
  return out;
}

DeviceModel to_cpp(const hw_device_model& m) {
  DeviceModel out;
  out.num_workers = m.num_workers;
  out.has_dot16 = m.has_dot16 != 0;
  out.memory_ps_per_kib = m.memory_ps_per_kib;
  out.worker_ps_per_kib = m.worker_ps_per_kib;
  out.cache_ps_per_kib = m.cache_ps_per_kib;
  out.cache_bytes = m.cache_bytes;
  out.item_ps = m.item_ps;
  out.item_row_ps = m.item_row_ps;
  out.partial_ps_per_kib = m.partial_ps_per_kib;
  out.many_start_ps = m.many_start_ps;
  out.launch_ps = m.launch_ps;
  out.max_tile_rows = m.max_tile_rows;
  out.chunk_tokens = m.chunk_tokens;
  out.part_tokens = m.part_tokens;
  out.teams = m.teams != 0;
  out.dot16 = to_cpp(m.dot16);
  out.fma32 = to_cpp(m.fma32);
  return out;
}

hw_device_model to_c(const DeviceModel& m) {
  hw_device_model out{};
  out.num_workers = m.num_workers;
  out.has_dot16 = m.has_dot16 ? 1 : 0;
  out.memory_ps_per_kib = m.memory_ps_per_kib;
  out.worker_ps_per_kib = m.worker_ps_per_kib;
  out.cache_ps_per_kib = m.cache_ps_per_kib;
  out.cache_bytes = m.cache_bytes;
  out.item_ps = m.item_ps;
  out.item_row_ps = m.item_row_ps;
  out.partial_ps_per_kib = m.partial_ps_per_kib;
  out.many_start_ps = m.many_start_ps;
  out.launch_ps = m.launch_ps;
  out.max_tile_rows = m.max_tile_rows;
  out.chunk_tokens = m.chunk_tokens;
  out.part_tokens = m.part_tokens;
  out.teams = m.teams ? 1 : 0;
  out.dot16 = to_c(m.dot16);
  out.fma32 = to_c(m.fma32);
  return out;
}

Batch to_cpp(const hw_batch& b) {
  Batch out;
  const auto levels = array(b.levels, b.num_levels, "batch->levels");
  if (levels.empty()) {
    out.kv = page_table(b.kv, "batch->kv");
    out.qo_indptr = array(b.qo_indptr, std::int64_t{b.kv.num_requests} + 1, "batch->qo_indptr");
    out.kv_start_page = optional_array(b.kv_start_page, b.kv.num_requests, "batch->kv_start_page");
    out.first_page_offset = optional_array(b.first_page_offset, b.kv.num_requests, "batch->first_page_offset");
    return out;
  }
  for (std::size_t i = 0; i < levels.size(); ++i) {
    const std::string name = "batch->levels[" + std::to_string(i) + "]";
    const PageTable kv = page_table(levels[i].kv, name + ".kv");
    out.levels.push_back({array(levels[i].qo_indptr, kv.indptr.size(), (name + ".qo_indptr").c_str()), kv});
  }
  if (b.qo_indptr != nullptr) out.qo_indptr = {b.qo_indptr, out.levels.back().qo_indptr.size()};
  return out;
}

Changes to_cpp(const hw_changes& c) {
  return {array(c.grown, c.num_grown, "changes->grown"), array(c.joined, c.num_joined, "changes->joined"),
          array(c.left, c.num_left, "changes->left")};
}

KvCache to_cpp(const hw_kv_cache& c, const char* name) {
  return {to_cpp(c.k), to_cpp(c.v), dtype(c.dtype, name), c.num_pages, c.page_size};
}

RowsView to_cpp(const hw_rows& r, const char* name) {
  return {r.data, dtype(r.dtype, name), r.row_stride, r.head_stride};
}

ConstRowsView to_cpp(const hw_const_rows& r, const char* name) {
  return {r.data, dtype(r.dtype, name), r.row_stride, r.head_stride};
}

LseView to_cpp(const hw_lse& l, const char* name) {
  return {l.data, l.row_stride, l.head_stride, lse_base(l.base, name)};
}

ConstLseView to_cpp(const hw_const_lse& l, const char* name) {
  return {l.data, l.row_stride, l.head_stride, lse_base(l.base, name)};
}

Scale to_cpp(const hw_scale& s) {
  return {s.data, s.count};
}

}  // namespace headwater::capi

using namespace headwater;
using namespace headwater::capi;

const char* hw_version(void) {
  return version();
}

const char* hw_error_name(int code) {
  if (code == HW_ERROR_OUT_OF_MEMORY) return "out_of_memory";
  return name_or_unknown<ErrorCode>(code, HW_ERROR_INTERNAL + 1);
}
const char* hw_dtype_name(int value) {
  return name_or_unknown<DType>(value, kNumDTypes);
}
const char* hw_isa_name(int isa) {
  return name_or_unknown<Isa>(isa, kNumIsas);
}
const char* hw_path_name(int path) {
  return name_or_unknown<Path>(path, HW_PATH_CASCADE + 1);
}
const char* hw_policy_name(int policy) {
  return name_or_unknown<Policy>(policy, kNumPolicies);
}
size_t hw_dtype_size(int value) {
  return value >= 0 && value < kNumDTypes ? size_of(static_cast<DType>(value)) : 0;
}
int hw_cpu_default_isa(void) {
  return static_cast<int>(cpu::default_isa());
}
int hw_cpu_detect_isa(void) {
  return static_cast<int>(cpu::detect_isa());
}

void hw_attention_shape_init(hw_attention_shape* shape, size_t size) {
  if (shape == nullptr) return;
  const AttentionShape s;
  write_struct(shape,
               {0, s.num_qo_heads, s.num_kv_heads, s.head_dim_qk, s.head_dim_vo, static_cast<int>(s.q_dtype),
                static_cast<int>(s.kv_dtype), static_cast<int>(s.out_dtype)},
               size);
}

void hw_plan_options_init(hw_plan_options* options, size_t size) {
  if (options != nullptr) write_struct(options, to_c(PlanOptions{}), size);
}

int hw_plan_options_from_env(hw_plan_options* options, hw_env_lookup lookup, void* user, hw_error* error) {
  return guard(error, [&] {
    const hw_plan_options base = read_struct(options, "options", hw_plan_options_init);
    if (lookup == nullptr) refuse("lookup = null, expected a function");
    const auto find = [&](const char* name) { return lookup(user, name); };
    write_struct(options, to_c(PlanOptions::from_env(find, to_cpp(base))), base.struct_size);
  });
}

void hw_device_model_init(hw_device_model* model, size_t size) {
  if (model != nullptr) write_struct(model, to_c(DeviceModel::default_cpu()), size);
}

int hw_device_model_for_isa(hw_device_model* model, int isa, hw_error* error) {
  return guard(error, [&] {
    const std::size_t size = output_size(model, "model");
    write_struct(model, to_c(DeviceModel::for_isa(enumerator<Isa>(isa, kNumIsas, "isa"))), size);
  });
}

void hw_page_table_init(hw_page_table* table) {
  if (table == nullptr) return;
  *table = hw_page_table{};
  table->page_size = PageTable{}.page_size;
  table->null_page = -1;
}

void hw_batch_init(hw_batch* batch, size_t size) {
  if (batch == nullptr) return;
  hw_batch value{};
  hw_page_table_init(&value.kv);
  write_struct(batch, value, size);
}

void hw_plan_stats_init(hw_plan_stats* stats, size_t size) {
  if (stats != nullptr) write_struct(stats, hw_plan_stats{}, size);
}

void hw_run_args_init(hw_run_args* args, size_t size) {
  if (args == nullptr) return;
  hw_run_args value{};
  value.q.dtype = value.out.dtype = HW_DTYPE_BF16;
  value.lse.head_stride = 1;
  value.num_kv = 1;
  value.include_sink = 1;
  value.isa = HW_ISA_DEFAULT;
  write_struct(args, value, size);
}

void hw_run_outcome_init(hw_run_outcome* outcome, size_t size) {
  if (outcome != nullptr) write_struct(outcome, hw_run_outcome{}, size);
}

void hw_prefix_cache_stats_init(hw_prefix_cache_stats* stats, size_t size) {
  if (stats != nullptr) write_struct(stats, hw_prefix_cache_stats{}, size);
}
