/* One step from C, start to end: pool, append, plan, run; the results were worked out by hand.
 *
 * Two requests share page 0 (tokens A, B) and have a page each with a third token (C, D). With q = (1, 0, ...) and
 * sm_scale = 1 a score is the key's first element: ln 1, ln 2, ln 3 and ln 5. So request 0 weighs A, B, C as 1 : 2 : 3
 * and request 1 A, B, D as 1 : 2 : 5. The values are A = (10, 0), B = (0, 10), C = (0, 0, 10), D = (0, 0, 0, 10). */
#include <stdlib.h>

#include "check.h"

enum { kPages = 4, kPageSize = 2, kDim = 32, kRequests = 2, kTokens = 4 };

typedef struct counted_workers {
  int calls;
} counted_workers;

/* A caller's own workers: three of them, run in reverse order on this thread. */
static void run_in_reverse(void* user, hw_task task, void* context) {
  int w;
  ((counted_workers*)user)->calls++;
  for (w = 2; w >= 0; --w) task(context, w);
}

static void count_task(void* context, int worker) {
  (void)worker;
  ++*(int*)context;
}

static float memory_k[kPages * kPageSize * kDim];
static float memory_v[kPages * kPageSize * kDim];

static hw_kv_cache cache_of(void) {
  hw_kv_cache cache;
  const hw_paged_tensor k = {memory_k, kPageSize * kDim, kDim, kDim};
  const hw_paged_tensor v = {memory_v, kPageSize * kDim, kDim, kDim};
  cache.k = k;
  cache.v = v;
  cache.dtype = HW_DTYPE_F32;
  cache.page_size = kPageSize;
  cache.num_pages = kPages;
  return cache;
}

static void expect_row(const float* out, float a, float b, float c, float d) {
  const float expected[4] = {a, b, c, d};
  int i;
  for (i = 0; i < kDim; ++i) CHECK(fabsf(out[i] - (i < 4 ? expected[i] : 0.0F)) < 1e-4F);
}

/* Runs the plan and checks both rows, with the LSE in either base. */
static void run_and_check(const hw_plan* plan, hw_executor* executor, int expected_path, int lse_base) {
  hw_error error;
  const hw_kv_cache cache = cache_of();
  float q[kRequests * kDim] = {0};
  float out[kRequests * kDim];
  float lse[kRequests];
  hw_run_args args;
  hw_run_outcome outcome;
  const size_t bytes = hw_plan_workspace_size(plan);
  void* workspace = aligned_alloc(HW_WORKSPACE_ALIGNMENT, (bytes + 64) / 64 * 64);
  const double unit = lse_base == HW_LSE_BASE_TWO ? log(2.0) : 1.0;
  q[0] = q[kDim] = 1.0F;
  memset(out, 0xff, sizeof out);
  memset(lse, 0xff, sizeof lse);

  hw_run_args_init(&args, sizeof args);
  args.q.data = q;
  args.q.dtype = HW_DTYPE_F32;
  args.q.row_stride = args.q.head_stride = kDim;
  args.kv = &cache;
  args.out.data = out;
  args.out.dtype = HW_DTYPE_F32;
  args.out.row_stride = args.out.head_stride = kDim;
  args.lse.data = lse;
  args.lse.row_stride = 1;
  args.lse.base = lse_base;
  args.workspace = workspace;
  args.workspace_bytes = bytes;
  hw_run_outcome_init(&outcome, sizeof outcome);
  CHECK_OK(hw_cpu_run(plan, &args, executor, &outcome, &error));
  CHECK(outcome.path == expected_path);
  CHECK(outcome.isa == hw_cpu_default_isa());
  expect_row(out, 10.0F / 6, 20.0F / 6, 30.0F / 6, 0.0F);
  expect_row(out + kDim, 10.0F / 8, 20.0F / 8, 0.0F, 50.0F / 8);
  CHECK(fabs(lse[0] - log(6.0) / unit) < 1e-5);
  CHECK(fabs(lse[1] - log(8.0) / unit) < 1e-5);

  /* Forcing the portable level gives the same, and says so. */
  args.isa = HW_ISA_SCALAR;
  CHECK_OK(hw_cpu_run(plan, &args, executor, &outcome, &error));
  CHECK(outcome.isa == HW_ISA_SCALAR);
  expect_row(out, 10.0F / 6, 20.0F / 6, 30.0F / 6, 0.0F);

  /* Refused before anything is written. */
  memset(out, 0x7f, sizeof out);
  if (bytes > 0) {
    args.workspace_bytes = bytes - 1;
    CHECK(hw_cpu_run(plan, &args, executor, NULL, &error) == HW_ERROR_WORKSPACE_TOO_SMALL);
    args.workspace_bytes = bytes;
  }
  args.isa = 9;
  CHECK_ERROR(hw_cpu_run(plan, &args, executor, NULL, &error), HW_ERROR_INVALID_ARGUMENT,
              "args->isa = 9, expected 0 to 3");
  args.isa = HW_ISA_DEFAULT;
  args.q.dtype = HW_DTYPE_BF16; /* not the shape's */
  CHECK(hw_cpu_run(plan, &args, executor, NULL, &error) == HW_ERROR_INVALID_ARGUMENT);
  CHECK(((const unsigned char*)out)[0] == 0x7f);
  free(workspace);
}

/* Prefill by two sequences: the second adopts the first page. Returns their page tables in `indices`. */
static void fill(hw_executor* executor, int32_t* indices) {
  hw_error error;
  hw_page_pool* pool = NULL;
  hw_sequence first, second;
  hw_page_copy copy;
  int32_t num_copies = -1;
  int64_t slots[4];
  const int32_t* pages = NULL;
  size_t num_pages = 0;
  float k[kTokens * kDim] = {0};
  float v[kTokens * kDim] = {0};
  hw_const_rows k_rows = {NULL, HW_DTYPE_F32, kDim, kDim};
  hw_const_rows v_rows = {NULL, HW_DTYPE_F32, kDim, kDim};
  const hw_kv_cache cache = cache_of();
  const float weights[kTokens] = {1.0F, 2.0F, 3.0F, 5.0F};
  int t;
  k_rows.data = k;
  v_rows.data = v;
  for (t = 0; t < kTokens; ++t) {
    k[t * kDim] = logf(weights[t]);
    v[t * kDim + t] = 10.0F;
  }

  CHECK_OK(hw_page_pool_create(kPages, kPageSize, 0, &pool, &error));
  CHECK_OK(hw_page_pool_create_sequence(pool, &first, &error));
  CHECK_OK(hw_page_pool_prepare_append(pool, first, 3, &copy, &num_copies, slots, &error));
  CHECK(num_copies == 0);
  CHECK_OK(hw_page_pool_clone_detached_prefix(pool, first, 2, &second, &error));
  CHECK_OK(hw_page_pool_prepare_append(pool, second, 1, &copy, &num_copies, slots + 3, &error));
  CHECK_OK(hw_cpu_append_kv(&cache, &k_rows, &v_rows, slots, kTokens, 1, kDim, kDim, NULL, NULL, executor, &error));

  CHECK_OK(hw_page_pool_pages(pool, first, &pages, &num_pages, &error));
  CHECK(num_pages == 2);
  indices[0] = pages[0];
  indices[1] = pages[1];
  CHECK_OK(hw_page_pool_pages(pool, second, &pages, &num_pages, &error));
  CHECK(num_pages == 2);
  indices[2] = pages[0];
  indices[3] = pages[1];
  CHECK(indices[0] == indices[2]);
  CHECK(indices[1] != indices[3]);
  hw_page_pool_destroy(pool);
}

static void copy_pages(hw_executor* executor, int32_t page) {
  hw_error error;
  const hw_kv_cache cache = cache_of();
  hw_page_copy copy = {0, kPages - 1, 1};
  float* const src = memory_k + page * kPageSize * kDim;
  float* const dst = memory_k + (kPages - 1) * kPageSize * kDim;
  copy.src = page;
  dst[kDim] = 77.0F;
  CHECK_OK(hw_cpu_copy_pages(&cache, &copy, 1, 1, kDim, kDim, executor, &error));
  CHECK(memcmp(src, dst, kDim * sizeof(float)) == 0);
  CHECK(dst[kDim] == 77.0F); /* only the valid token */
}

/* Merging (weights 1 + 2, mean (10/3, 20/3)) with (weight 3, value 30) by hand: (10 + 20 + 90, ...) / 6. */
static void merge(hw_executor* executor) {
  hw_error error;
  float v_in[2 * kDim] = {0};
  float lse_in[2];
  float v_out[kDim];
  float lse_out[1];
  const int32_t o_indptr[2] = {0, 2};
  hw_const_rows in = {NULL, HW_DTYPE_F32, kDim, kDim};
  hw_const_lse in_lse = {NULL, 1, 1, HW_LSE_BASE_NATURAL};
  hw_rows out = {NULL, HW_DTYPE_F32, kDim, kDim};
  hw_lse out_lse = {NULL, 1, 1, HW_LSE_BASE_TWO};
  in.data = v_in;
  in_lse.data = lse_in;
  out.data = v_out;
  out_lse.data = lse_out;
  v_in[0] = 10.0F;
  v_in[kDim] = 30.0F;
  lse_in[0] = logf(3.0F);
  lse_in[1] = logf(3.0F);
  CHECK_OK(hw_cpu_merge_states(&in, &in_lse, o_indptr, 1, 1, kDim, &out, &out_lse, executor, &error));
  CHECK(fabsf(v_out[0] - 20.0F) < 1e-4F);
  CHECK(fabs(lse_out[0] - log2(6.0)) < 1e-5);
  CHECK_ERROR(hw_cpu_merge_states(&in, &in_lse, o_indptr, -1, 1, kDim, &out, &out_lse, executor, &error),
              HW_ERROR_INVALID_ARGUMENT, "num_groups = -1, expected at least 0");
}

int main(void) {
  hw_error error;
  hw_executor* serial = NULL;
  hw_executor* pool = NULL;
  hw_executor* custom = NULL;
  counted_workers workers = {0};
  int tasks = 0;
  hw_planner* planner = NULL;
  hw_plan* plan = NULL;
  hw_attention_shape shape;
  hw_plan_options options;
  hw_batch batch;
  int32_t indices[4];
  const int32_t qo_indptr[kRequests + 1] = {0, 1, 2};
  const int32_t kv_indptr[kRequests + 1] = {0, 2, 4};
  const int32_t last_page_len[kRequests] = {1, 1};
  int i;
  for (i = 0; i < kPages * kPageSize * kDim; ++i) memory_k[i] = memory_v[i] = NAN;

  CHECK_OK(hw_executor_create_serial(&serial, &error));
  CHECK_OK(hw_executor_create_thread_pool(2, &pool, &error));
  CHECK_OK(hw_executor_create_custom(3, run_in_reverse, &workers, &custom, &error));
  CHECK(hw_executor_num_workers(serial) == 1);
  CHECK(hw_executor_num_workers(pool) == 2);
  CHECK(hw_executor_num_workers(custom) == 3);
  fill(serial, indices);

  hw_attention_shape_init(&shape, sizeof shape);
  shape.num_qo_heads = shape.num_kv_heads = 1;
  shape.head_dim_qk = shape.head_dim_vo = kDim;
  shape.q_dtype = shape.kv_dtype = shape.out_dtype = HW_DTYPE_F32;
  hw_batch_init(&batch, sizeof batch);
  batch.qo_indptr = qo_indptr;
  batch.kv.indptr = kv_indptr;
  batch.kv.indices = indices;
  batch.kv.num_indices = 4;
  batch.kv.last_page_len = last_page_len;
  batch.kv.num_requests = kRequests;
  batch.kv.page_size = kPageSize;
  batch.kv.num_pages = kPages;
  hw_plan_options_init(&options, sizeof options);
  options.sm_scale = 1.0F;
  CHECK_OK(hw_planner_create(NULL, &planner, &error));

  options.policy = HW_POLICY_FOREST; /* page 0 is read once for both */
  CHECK_OK(hw_planner_plan(planner, &shape, &batch, &options, &plan, &error));
  run_and_check(plan, serial, HW_PATH_CASCADE, HW_LSE_BASE_TWO);
  run_and_check(plan, pool, HW_PATH_CASCADE, HW_LSE_BASE_NATURAL);
  run_and_check(plan, custom, HW_PATH_CASCADE, HW_LSE_BASE_TWO);
  hw_plan_destroy(plan);
  /* The step above is too small to wake workers for; called directly, all three take part. */
  CHECK_OK(hw_executor_parallel(custom, count_task, &tasks, &error));
  CHECK(workers.calls > 0 && tasks == 3);

  options.policy = HW_POLICY_FLAT;
  CHECK_OK(hw_planner_plan(planner, &shape, &batch, &options, &plan, &error));
  run_and_check(plan, serial, HW_PATH_FLAT, HW_LSE_BASE_TWO);
  hw_plan_destroy(plan);

  copy_pages(serial, indices[0]);
  merge(serial);
  hw_planner_destroy(planner);
  hw_executor_destroy(serial);
  hw_executor_destroy(pool);
  hw_executor_destroy(custom);
  return finish();
}
