/* Names, versions, null handles and pointers, enumerators out of range: codes and messages of everything but the cache.
 */
#include "check.h"

static void names(void) {
  CHECK(strcmp(hw_version(), "0.1.0") == 0);
  CHECK(strcmp(hw_error_name(HW_OK), "ok") == 0);
  CHECK(strcmp(hw_error_name(HW_ERROR_OUT_OF_PAGES), "out_of_pages") == 0);
  CHECK(strcmp(hw_error_name(HW_ERROR_OUT_OF_MEMORY), "out_of_memory") == 0);
  CHECK(strcmp(hw_error_name(50), "?") == 0);
  CHECK(strcmp(hw_error_name(-1), "?") == 0);
  CHECK(strcmp(hw_dtype_name(HW_DTYPE_BF16), "bf16") == 0 && strcmp(hw_dtype_name(4), "?") == 0);
  CHECK(strcmp(hw_isa_name(HW_ISA_AVX2), "avx2") == 0 && strcmp(hw_isa_name(-1), "?") == 0);
  CHECK(strcmp(hw_path_name(HW_PATH_CASCADE), "cascade") == 0 && strcmp(hw_path_name(2), "?") == 0);
  CHECK(strcmp(hw_policy_name(HW_POLICY_AUTO), "auto") == 0 && strcmp(hw_policy_name(5), "?") == 0);
  CHECK(hw_dtype_size(HW_DTYPE_F32) == 4 && hw_dtype_size(HW_DTYPE_F8E4M3) == 1 && hw_dtype_size(9) == 0);
  CHECK(hw_cpu_detect_isa() >= HW_ISA_SCALAR && hw_cpu_detect_isa() <= HW_ISA_AVX512_BF16);
}

static void nothing(void* context, int worker) {
  (void)worker;
  ++*(int*)context;
}

static void null_pointers(void) {
  hw_error error;
  hw_executor* executor = NULL;
  hw_planner* planner = NULL;
  hw_plan* plan = NULL;
  hw_attention_shape shape;
  hw_batch batch;
  hw_plan_stats stats;
  hw_run_args args;
  hw_run_outcome outcome;
  hw_kv_cache cache;
  hw_device_model model;
  const hw_const_rows in = {NULL, HW_DTYPE_F32, 0, 0};
  const hw_const_lse in_lse = {NULL, 0, 1, HW_LSE_BASE_TWO};
  const hw_rows out = {NULL, HW_DTYPE_F32, 0, 0};
  const hw_lse out_lse = {NULL, 0, 1, HW_LSE_BASE_TWO};
  const int32_t o_indptr[1] = {0};
  const int32_t zero[1] = {0};
  int calls = 0;
  size_t length;
  memset(&cache, 0, sizeof cache);
  hw_attention_shape_init(&shape, sizeof shape);
  hw_batch_init(&batch, sizeof batch);
  hw_plan_stats_init(&stats, sizeof stats);
  hw_run_args_init(&args, sizeof args);
  hw_run_outcome_init(&outcome, sizeof outcome);
  hw_device_model_init(&model, sizeof model);
  /* init functions ignore null */
  hw_attention_shape_init(NULL, 0);
  hw_plan_options_init(NULL, 0);
  hw_device_model_init(NULL, 0);
  hw_page_table_init(NULL);
  hw_batch_init(NULL, 0);
  hw_plan_stats_init(NULL, 0);
  hw_run_args_init(NULL, 0);
  hw_run_outcome_init(NULL, 0);
  hw_executor_destroy(NULL);
  hw_planner_destroy(NULL);
  hw_plan_destroy(NULL);
  CHECK(hw_executor_num_workers(NULL) == 0);
  CHECK(hw_plan_workspace_size(NULL) == 0);

  CHECK_NULL(hw_executor_create_serial(NULL, &error), "executor");
  CHECK_NULL(hw_executor_create_thread_pool(1, NULL, &error), "executor");
  CHECK_ERROR(hw_executor_create_thread_pool(-1, &executor, &error), HW_ERROR_INVALID_ARGUMENT,
              "num_workers = -1, expected at least 0");
  CHECK_ERROR(hw_executor_create_custom(1, NULL, NULL, &executor, &error), HW_ERROR_INVALID_ARGUMENT,
              "parallel = null, expected a function");
  CHECK(executor == NULL);
  CHECK_OK(hw_executor_create_thread_pool(2, &executor, &error));
  CHECK_NULL(hw_executor_parallel(NULL, nothing, &calls, &error), "executor");
  CHECK_ERROR(hw_executor_parallel(executor, NULL, &calls, &error), HW_ERROR_INVALID_ARGUMENT,
              "task = null, expected a function");
  hw_executor_destroy(executor);
  CHECK_OK(hw_executor_create_serial(&executor, &error));
  CHECK_OK(hw_executor_parallel(executor, nothing, &calls, &error));
  CHECK(calls == 1);

  CHECK_NULL(hw_planner_create(NULL, NULL, &error), "planner");
  CHECK_OK(hw_planner_create(NULL, &planner, &error));
  CHECK_NULL(hw_planner_model(NULL, &model, &error), "planner");
  CHECK_NULL(hw_planner_model(planner, NULL, &error), "model");
  CHECK_NULL(hw_planner_plan(NULL, &shape, &batch, NULL, &plan, &error), "planner");
  CHECK_NULL(hw_planner_plan(planner, NULL, &batch, NULL, &plan, &error), "shape");
  CHECK_NULL(hw_planner_plan(planner, &shape, NULL, NULL, &plan, &error), "batch");
  CHECK_NULL(hw_planner_plan(planner, &shape, &batch, NULL, NULL, &error), "plan");
  CHECK_ERROR(hw_planner_plan(planner, &shape, &batch, NULL, &plan, &error), HW_ERROR_INVALID_ARGUMENT,
              "batch->kv.indptr = null, expected 1 entries");
  batch.kv.indptr = zero;
  CHECK_ERROR(hw_planner_plan(planner, &shape, &batch, NULL, &plan, &error), HW_ERROR_INVALID_ARGUMENT,
              "batch->qo_indptr = null, expected 1 entries");
  batch.kv.num_requests = -1;
  CHECK_ERROR(hw_planner_plan(planner, &shape, &batch, NULL, &plan, &error), HW_ERROR_INVALID_ARGUMENT,
              "batch->kv.num_requests = -1, expected at least 0");
  shape.kv_dtype = 17;
  CHECK_ERROR(hw_planner_plan(planner, &shape, &batch, NULL, &plan, &error), HW_ERROR_INVALID_ARGUMENT,
              "shape->kv_dtype = 17, expected 0 to 3");
  CHECK(plan == NULL);
  CHECK_NULL(hw_planner_update(NULL, plan, &batch, NULL, &error), "planner");
  CHECK_NULL(hw_planner_update(planner, NULL, &batch, NULL, &error), "plan");
  CHECK_NULL(hw_plan_get_stats(NULL, &stats, &error), "plan");
  CHECK_NULL(hw_plan_describe(NULL, NULL, 0, &length, &error), "plan");
  CHECK_NULL(hw_plan_to_json(NULL, NULL, 0, &length, &error), "plan");
  CHECK_NULL(hw_plan_serialize(NULL, NULL, 0, &length, &error), "plan");

  CHECK_NULL(hw_cpu_run(NULL, &args, executor, &outcome, &error), "plan");
  CHECK_NULL(hw_cpu_merge_states(NULL, &in_lse, o_indptr, 0, 1, 32, &out, &out_lse, executor, &error), "v_in");
  CHECK_NULL(hw_cpu_merge_states(&in, NULL, o_indptr, 0, 1, 32, &out, &out_lse, executor, &error), "lse_in");
  CHECK_ERROR(hw_cpu_merge_states(&in, &in_lse, NULL, 0, 1, 32, &out, &out_lse, executor, &error),
              HW_ERROR_INVALID_ARGUMENT, "o_indptr = null, expected 1 entries");
  CHECK_NULL(hw_cpu_merge_states(&in, &in_lse, o_indptr, 0, 1, 32, NULL, &out_lse, executor, &error), "v_out");
  CHECK_NULL(hw_cpu_merge_states(&in, &in_lse, o_indptr, 0, 1, 32, &out, NULL, executor, &error), "lse_out");
  CHECK_NULL(hw_cpu_merge_states(&in, &in_lse, o_indptr, 0, 1, 32, &out, &out_lse, NULL, &error), "executor");
  CHECK_NULL(hw_cpu_append_kv(NULL, &in, &in, NULL, 0, 1, 32, 32, NULL, NULL, executor, &error), "cache");
  CHECK_NULL(hw_cpu_append_kv(&cache, NULL, &in, NULL, 0, 1, 32, 32, NULL, NULL, executor, &error), "k");
  CHECK_NULL(hw_cpu_append_kv(&cache, &in, NULL, NULL, 0, 1, 32, 32, NULL, NULL, executor, &error), "v");
  CHECK_NULL(hw_cpu_append_kv(&cache, &in, &in, NULL, 0, 1, 32, 32, NULL, NULL, NULL, &error), "executor");
  CHECK_ERROR(hw_cpu_append_kv(&cache, &in, &in, NULL, 3, 1, 32, 32, NULL, NULL, executor, &error),
              HW_ERROR_INVALID_ARGUMENT, "token_slots = null, expected 3 entries");
  CHECK_NULL(hw_cpu_copy_pages(NULL, NULL, 0, 1, 32, 32, executor, &error), "cache");
  CHECK_ERROR(hw_cpu_copy_pages(&cache, NULL, 2, 1, 32, 32, executor, &error), HW_ERROR_INVALID_ARGUMENT,
              "copies = null, expected 2 entries");
  hw_planner_destroy(planner);
  hw_executor_destroy(executor);
}

int main(void) {
  names();
  null_pointers();
  return finish();
}
