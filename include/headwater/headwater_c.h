/* The C interface: every function of the C++ interface, with plain structs and opaque handles.
 *
 * Errors. A function that can fail returns HW_OK (0) or another hw_error_code, and fills the hw_error that the caller
 * passed (NULL: the message is not wanted). The hw_error belongs to the caller; nothing is kept in the library, so
 * calls from several threads do not disturb each other. No C++ exception crosses this boundary. On an error
 * out-parameters other than the hw_error are untouched.
 *
 * Handles. hw_*_create gives a handle to the caller, who destroys it once; hw_*_destroy(NULL) does nothing. One handle
 * must not be used by two threads at once, except hw_plan, which several threads may run and read.
 *
 * Structs. Those that may grow in later versions begin with `struct_size`; hw_*_init(&s, sizeof s) sets it and the
 * defaults. A program built against an older version may pass its shorter struct. What the fields mean is said in the
 * C++ header that is named beside each struct. Arrays are read only during the call unless said otherwise. */
/* NOLINTBEGIN(modernize-*,readability-identifier-naming): this is C */
#ifndef HEADWATER_HEADWATER_C_H_
#define HEADWATER_HEADWATER_C_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- errors, names, version ------------------------------------------------------------------------------------ */

typedef enum hw_error_code {
  HW_OK = 0,
  HW_ERROR_INVALID_ARGUMENT = 1,
  HW_ERROR_INVALID_PAGE_TABLE = 2,
  HW_ERROR_UNSUPPORTED = 3,
  HW_ERROR_WORKSPACE_TOO_SMALL = 4,
  HW_ERROR_CAPACITY_EXCEEDED = 5, /* reserved for plans of fixed capacity */
  HW_ERROR_OUT_OF_PAGES = 6,
  HW_ERROR_IO = 7,
  HW_ERROR_DEVICE = 8,
  HW_ERROR_INTERNAL = 9,
  HW_ERROR_OUT_OF_MEMORY = 100 /* host memory; std::bad_alloc in C++ */
} hw_error_code;

typedef struct hw_error {
  int code;          /* hw_error_code */
  char message[500]; /* NUL-terminated; longer messages are cut and end in "..."; "" after success */
} hw_error;

/* Element types (types.h). */
enum { HW_DTYPE_F32 = 0, HW_DTYPE_F16 = 1, HW_DTYPE_BF16 = 2, HW_DTYPE_F8E4M3 = 3 };
/* Instruction-set levels (types.h). HW_ISA_DEFAULT: what hw_cpu_default_isa() returns. */
enum { HW_ISA_DEFAULT = -1, HW_ISA_SCALAR = 0, HW_ISA_AVX2 = 1, HW_ISA_AVX512 = 2, HW_ISA_AVX512_BF16 = 3 };
enum { HW_LSE_BASE_TWO = 0, HW_LSE_BASE_NATURAL = 1 };
enum { HW_PATH_FLAT = 0, HW_PATH_CASCADE = 1 };
/* Policies and the master switch (options.h). */
enum { HW_POLICY_AUTO = 0, HW_POLICY_FLAT = 1, HW_POLICY_TWO_LEVEL = 2, HW_POLICY_VLLM = 3, HW_POLICY_FOREST = 4 };
enum { HW_CASCADE_AUTO = 0, HW_CASCADE_ON = 1, HW_CASCADE_OFF = 2 };

const char* hw_version(void); /* "0.1.0" */
/* Stable names; "?" for an unknown value. The strings live for ever. */
const char* hw_error_name(int code);
const char* hw_dtype_name(int dtype);
const char* hw_isa_name(int isa);
const char* hw_path_name(int path);
const char* hw_policy_name(int policy);
size_t hw_dtype_size(int dtype); /* bytes of an element; 0 for an unknown value */
int hw_cpu_detect_isa(void);     /* highest level of this processor */
int hw_cpu_default_isa(void);    /* the level that run uses when none is forced (cpu.h) */

/* ---- shape, options, device model (options.h, device_model.h) --------------------------------------------------- */

typedef struct hw_attention_shape {
  size_t struct_size;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim_qk;
  int32_t head_dim_vo;
  int32_t q_dtype;
  int32_t kv_dtype;
  int32_t out_dtype;
} hw_attention_shape;
void hw_attention_shape_init(hw_attention_shape* shape, size_t size);

typedef struct hw_plan_options {
  size_t struct_size;
  int32_t policy;
  int32_t cascade;
  int32_t min_shared_pages;
  int32_t min_members;
  int32_t causal; /* 0 or 1, as the other switches */
  int64_t window_left;
  int64_t local_chunk;
  int64_t num_sink_tokens;
  float sm_scale;
  float logits_soft_cap;
  int32_t alibi;
  int32_t sinks;
  int32_t batch_invariant;
  int32_t invariant_chunk;
  int32_t num_workers;
} hw_plan_options;
void hw_plan_options_init(hw_plan_options* options, size_t size);

/* Applies the documented variables. `lookup` gives a variable's value or NULL; it is called during this function only.
 */
typedef const char* (*hw_env_lookup)(void* user, const char* name);
int hw_plan_options_from_env(hw_plan_options* options, hw_env_lookup lookup, void* user, hw_error* error);

typedef struct hw_compute_model {
  int64_t few_row_ps;
  int64_t many_base_ps;
  int64_t many_row_ps;
  int32_t many_row_pad;
  int32_t few_row_max;
} hw_compute_model;

typedef struct hw_device_model {
  size_t struct_size;
  int32_t num_workers;
  int32_t has_dot16;
  int64_t memory_ps_per_kib;
  int64_t worker_ps_per_kib;
  int64_t cache_ps_per_kib;
  int64_t cache_bytes;
  int64_t item_ps;
  int64_t item_row_ps;
  int64_t partial_ps_per_kib;
  int64_t many_start_ps;
  int64_t launch_ps;
  int32_t max_tile_rows;
  int32_t chunk_tokens;
  int32_t part_tokens;
  int32_t teams;
  hw_compute_model dot16;
  hw_compute_model fma32;
} hw_device_model;
/* The shipped constants for this processor, or for an instruction-set level. */
void hw_device_model_init(hw_device_model* model, size_t size);
int hw_device_model_for_isa(hw_device_model* model, int isa, hw_error* error);

/* ---- batch (batch.h) -------------------------------------------------------------------------------------------- */

typedef struct hw_page_table {
  const int32_t* indptr; /* [num_requests + 1] */
  const int32_t* indices;
  size_t num_indices;
  const int32_t* last_page_len; /* [num_requests] */
  int32_t num_requests;
  int32_t page_size;
  int64_t num_pages;
  int32_t null_page; /* -1: none */
} hw_page_table;
void hw_page_table_init(hw_page_table* table);

typedef struct hw_level {
  const int32_t* qo_indptr; /* [kv.num_requests + 1] */
  hw_page_table kv;
} hw_level;

/* Either qo_indptr + kv, or levels. */
typedef struct hw_batch {
  size_t struct_size;
  const int32_t* qo_indptr; /* [kv.num_requests + 1]; NULL with levels: that of the last level */
  hw_page_table kv;
  const int32_t* kv_start_page;     /* [kv.num_requests] or NULL */
  const int32_t* first_page_offset; /* [kv.num_requests] or NULL */
  const hw_level* levels;           /* [num_levels] */
  int32_t num_levels;               /* 0: find the sharing in kv */
} hw_batch;
void hw_batch_init(hw_batch* batch, size_t size);

typedef struct hw_changes {
  const int32_t* grown;
  size_t num_grown;
  const int32_t* joined;
  size_t num_joined;
  const int32_t* left;
  size_t num_left;
} hw_changes;

/* ---- plan (plan.h) ---------------------------------------------------------------------------------------------- */

typedef struct hw_planner hw_planner;
typedef struct hw_plan hw_plan;

typedef struct hw_plan_stats {
  size_t struct_size;
  int32_t path;
  int64_t num_requests;
  int64_t num_rows;
  int64_t num_items;
  int64_t num_partials;
  int64_t num_spans;
  int64_t shared_tokens;
  int64_t member_sequences;
  int64_t kv_bytes_unique;
  int64_t kv_bytes_flat;
  int64_t kv_bytes_read;
  int64_t flops;
  int64_t predicted_ps;
  int64_t predicted_flat_ps;
} hw_plan_stats;
void hw_plan_stats_init(hw_plan_stats* stats, size_t size);

#define HW_WORKSPACE_ALIGNMENT 64

/* model NULL: that of hw_device_model_init. */
int hw_planner_create(const hw_device_model* model, hw_planner** planner, hw_error* error);
void hw_planner_destroy(hw_planner* planner);
int hw_planner_model(const hw_planner* planner, hw_device_model* model, hw_error* error); /* model: initialised */
/* A new plan; options NULL: the defaults. */
int hw_planner_plan(hw_planner* planner, const hw_attention_shape* shape, const hw_batch* batch,
                    const hw_plan_options* options, hw_plan** plan, hw_error* error);
/* changes NULL: the tables are compared. On an error the plan is as it was. */
int hw_planner_update(hw_planner* planner, hw_plan* plan, const hw_batch* batch, const hw_changes* changes,
                      hw_error* error);

void hw_plan_destroy(hw_plan* plan);
size_t hw_plan_workspace_size(const hw_plan* plan);                                /* 0 for NULL */
int hw_plan_get_stats(const hw_plan* plan, hw_plan_stats* stats, hw_error* error); /* stats: initialised */
/* Text, as snprintf: at most capacity bytes with the final NUL are written to buffer (NULL with capacity 0: none), and
 * *length (may be NULL) is the length of the whole text without NUL. */
int hw_plan_describe(const hw_plan* plan, char* buffer, size_t capacity, size_t* length, hw_error* error);
int hw_plan_to_json(const hw_plan* plan, char* buffer, size_t capacity, size_t* length, hw_error* error);
/* Canonical bytes, without a final NUL: the first capacity bytes are written, *length is the number of all. */
int hw_plan_serialize(const hw_plan* plan, void* buffer, size_t capacity, size_t* length, hw_error* error);

/* ---- executors (executor.h) ------------------------------------------------------------------------------------- */

typedef struct hw_executor hw_executor;
typedef void (*hw_task)(void* context, int worker);
/* Must call task(context, w) once for every w in [0, num_workers) and return when all have returned. */
typedef void (*hw_parallel)(void* user, hw_task task, void* context);

int hw_executor_create_serial(hw_executor** executor, hw_error* error);
/* num_workers 0: as many as the calling thread's affinity mask has processors. */
int hw_executor_create_thread_pool(int num_workers, hw_executor** executor, hw_error* error);
/* The caller's own workers. */
int hw_executor_create_custom(int num_workers, hw_parallel parallel, void* user, hw_executor** executor,
                              hw_error* error);
void hw_executor_destroy(hw_executor* executor);
int hw_executor_num_workers(const hw_executor* executor); /* 0 for NULL */
/* `task` must not throw. */
int hw_executor_parallel(hw_executor* executor, hw_task task, void* context, hw_error* error);

/* ---- tensors (view.h) and the CPU back end (cpu.h) --------------------------------------------------------------- */

typedef struct hw_paged_tensor {
  void* data;
  int64_t page_stride; /* strides in elements */
  int64_t token_stride;
  int64_t head_stride;
} hw_paged_tensor;

typedef struct hw_kv_cache {
  hw_paged_tensor k;
  hw_paged_tensor v;
  int32_t dtype;
  int32_t page_size;
  int64_t num_pages;
} hw_kv_cache;

typedef struct hw_rows {
  void* data;
  int32_t dtype;
  int64_t row_stride;
  int64_t head_stride;
} hw_rows;

typedef struct hw_const_rows {
  const void* data;
  int32_t dtype;
  int64_t row_stride;
  int64_t head_stride;
} hw_const_rows;

typedef struct hw_lse {
  float* data; /* NULL: not wanted */
  int64_t row_stride;
  int64_t head_stride;
  int32_t base;
} hw_lse;

typedef struct hw_const_lse {
  const float* data;
  int64_t row_stride;
  int64_t head_stride;
  int32_t base;
} hw_const_lse;

typedef struct hw_scale {
  const float* data; /* NULL: 1.0 */
  int32_t count;     /* 0, 1 or num_kv_heads */
} hw_scale;

typedef struct hw_run_args {
  size_t struct_size;
  hw_const_rows q;
  const hw_kv_cache* kv; /* [num_kv] */
  int32_t num_kv;        /* 1; with levels one per level */
  hw_rows out;
  hw_lse lse;
  const float* alibi_slopes; /* [num_qo_heads] */
  const float* sinks;        /* [num_qo_heads] */
  int32_t include_sink;
  hw_scale k_scale;
  hw_scale v_scale;
  void* workspace; /* aligned to HW_WORKSPACE_ALIGNMENT */
  size_t workspace_bytes;
  int32_t isa; /* HW_ISA_DEFAULT or a level to force */
} hw_run_args;
void hw_run_args_init(hw_run_args* args, size_t size);

typedef struct hw_run_outcome {
  size_t struct_size;
  int32_t path;
  int32_t isa;
  int64_t items;
  int64_t kv_bytes_read;
  int64_t merged_rows;
} hw_run_outcome;
void hw_run_outcome_init(hw_run_outcome* outcome, size_t size);

/* outcome: initialised, or NULL: not wanted. */
int hw_cpu_run(const hw_plan* plan, const hw_run_args* args, hw_executor* executor, hw_run_outcome* outcome,
               hw_error* error);

/* o_indptr [num_groups + 1]. */
int hw_cpu_merge_states(const hw_const_rows* v_in, const hw_const_lse* lse_in, const int32_t* o_indptr,
                        int32_t num_groups, int32_t num_heads, int32_t head_dim, const hw_rows* v_out,
                        const hw_lse* lse_out, hw_executor* executor, hw_error* error);

/* Scales NULL: 1.0. */
int hw_cpu_append_kv(const hw_kv_cache* cache, const hw_const_rows* k, const hw_const_rows* v,
                     const int64_t* token_slots, size_t num_rows, int32_t num_kv_heads, int32_t head_dim_qk,
                     int32_t head_dim_vo, const hw_scale* k_scale, const hw_scale* v_scale, hw_executor* executor,
                     hw_error* error);

typedef struct hw_page_copy {
  int32_t src;
  int32_t dst;
  int32_t num_tokens;
} hw_page_copy;
int hw_cpu_copy_pages(const hw_kv_cache* cache, const hw_page_copy* copies, size_t num_copies, int32_t num_kv_heads,
                      int32_t head_dim_qk, int32_t head_dim_vo, hw_executor* executor, hw_error* error);

/* ---- page pool (page_pool.h) ------------------------------------------------------------------------------------ */

typedef struct hw_page_pool hw_page_pool;
typedef int32_t hw_sequence;

int hw_page_pool_create(int32_t num_pages, int32_t page_size, int reserve_null_page, hw_page_pool** pool,
                        hw_error* error);
void hw_page_pool_destroy(hw_page_pool* pool);
int32_t hw_page_pool_page_size(const hw_page_pool* pool); /* these three: 0 for NULL */
int32_t hw_page_pool_num_pages(const hw_page_pool* pool);
int32_t hw_page_pool_num_free(const hw_page_pool* pool);
int hw_page_pool_ref_count(const hw_page_pool* pool, int32_t page, int32_t* count, hw_error* error);

int hw_page_pool_create_sequence(hw_page_pool* pool, hw_sequence* sequence, hw_error* error);
int hw_page_pool_adopt(hw_page_pool* pool, const int32_t* pages, size_t num_pages, hw_sequence* sequence,
                       hw_error* error);
int hw_page_pool_clone_detached_prefix(hw_page_pool* pool, hw_sequence source, int64_t target_tokens,
                                       hw_sequence* sequence, hw_error* error);
int hw_page_pool_fork(hw_page_pool* pool, hw_sequence source, hw_sequence* sequence, hw_error* error);
int hw_page_pool_release(hw_page_pool* pool, hw_sequence sequence, hw_error* error);
int hw_page_pool_num_tokens(const hw_page_pool* pool, hw_sequence sequence, int64_t* num_tokens, hw_error* error);
/* *pages stays valid until the next call that changes the pool. */
int hw_page_pool_pages(const hw_page_pool* pool, hw_sequence sequence, const int32_t** pages, size_t* num_pages,
                       hw_error* error);
/* token_slots [num_tokens]. *num_copies is 0, or 1 and *copy says what to copy first. */
int hw_page_pool_prepare_append(hw_page_pool* pool, hw_sequence sequence, int64_t num_tokens, hw_page_copy* copy,
                                int32_t* num_copies, int64_t* token_slots, hw_error* error);
int hw_page_pool_truncate(hw_page_pool* pool, hw_sequence sequence, int64_t num_tokens, hw_error* error);
int hw_page_pool_replace_prefix(hw_page_pool* pool, hw_sequence sequence, const int32_t* pages, size_t num_pages,
                                hw_error* error);
int hw_page_pool_retain(hw_page_pool* pool, int32_t page, hw_error* error);
int hw_page_pool_release_page(hw_page_pool* pool, int32_t page, hw_error* error);
/* external_refs [num_pages of the pool] or NULL. HW_ERROR_INTERNAL names the first page that is wrong. */
int hw_page_pool_audit(const hw_page_pool* pool, const int32_t* external_refs, hw_error* error);

/* ---- prefix cache (prefix_cache.h) ------------------------------------------------------------------------------ */

typedef struct hw_prefix_cache hw_prefix_cache;

typedef struct hw_prefix_cache_stats {
  size_t struct_size;
  int64_t lookups;
  int64_t hits;
  int64_t tokens_requested;
  int64_t tokens_hit;
  int64_t pages_inserted;
  int64_t pages_evicted;
  int64_t pages_cached;
} hw_prefix_cache_stats;
void hw_prefix_cache_stats_init(hw_prefix_cache_stats* stats, size_t size);

/* The pool must outlive the cache. */
int hw_prefix_cache_create(hw_page_pool* pool, hw_prefix_cache** cache, hw_error* error);
void hw_prefix_cache_destroy(hw_prefix_cache* cache);
/* pages [capacity], capacity >= (num_tokens - 1) / page_size; *num_pages is the number found. */
int hw_prefix_cache_lookup(hw_prefix_cache* cache, const int32_t* tokens, size_t num_tokens, uint64_t salt,
                           int32_t* pages, size_t capacity, size_t* num_pages, hw_error* error);
/* standing_pages [num_tokens / page_size] or NULL: the pages that now stand for the prefix. */
int hw_prefix_cache_insert(hw_prefix_cache* cache, const int32_t* tokens, size_t num_tokens, const int32_t* pages,
                           size_t num_pages, uint64_t salt, int32_t* standing_pages, hw_error* error);
int hw_prefix_cache_evict(hw_prefix_cache* cache, int32_t num_pages, int32_t* num_freed, hw_error* error);
int hw_prefix_cache_clear(hw_prefix_cache* cache, hw_error* error);
int hw_prefix_cache_get_stats(const hw_prefix_cache* cache, hw_prefix_cache_stats* stats, hw_error* error);
/* held [num_pages of the pool]. */
int hw_prefix_cache_held_pages(const hw_prefix_cache* cache, int32_t* held, hw_error* error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* HEADWATER_HEADWATER_C_H_ */
/* NOLINTEND(modernize-*,readability-identifier-naming) */
