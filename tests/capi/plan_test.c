/* Planner and plan from C: statistics, text, update, explicit levels, struct sizes, codes and messages. */
#include <stdlib.h>

#include "check.h"

enum { kRequests = 4, kSharedPages = 64, kPageSize = 16 };

/* Four requests that share 64 pages and have one page each of their own. */
static int32_t indices[kRequests * (kSharedPages + 1)];
static int32_t kv_indptr[kRequests + 1];
static int32_t qo_indptr[kRequests + 1];
static int32_t last_page_len[kRequests];

static hw_batch make_batch(void) {
  hw_batch batch;
  int r, p, n = 0;
  for (r = 0; r < kRequests; ++r) {
    kv_indptr[r] = n;
    qo_indptr[r] = r;
    last_page_len[r] = 3;
    for (p = 0; p < kSharedPages; ++p) indices[n++] = p;
    indices[n++] = kSharedPages + r;
  }
  kv_indptr[kRequests] = n;
  qo_indptr[kRequests] = kRequests;
  hw_batch_init(&batch, sizeof batch);
  batch.qo_indptr = qo_indptr;
  batch.kv.indptr = kv_indptr;
  batch.kv.indices = indices;
  batch.kv.num_indices = (size_t)n;
  batch.kv.last_page_len = last_page_len;
  batch.kv.num_requests = kRequests;
  batch.kv.page_size = kPageSize;
  batch.kv.num_pages = kSharedPages + kRequests;
  return batch;
}

static void plan_and_read(void) {
  hw_error error;
  hw_planner* planner = NULL;
  hw_plan *plan = NULL, *cold = NULL;
  hw_plan_stats stats;
  hw_plan_options options;
  hw_attention_shape shape;
  hw_batch batch = make_batch();
  hw_changes changes = {NULL, 0, NULL, 0, NULL, 0};
  const int32_t grown[kRequests] = {0, 1, 2, 3};
  char text[64];
  char *whole, *other;
  size_t length = 0, other_length = 0;
  int r;

  hw_attention_shape_init(&shape, sizeof shape);
  CHECK(shape.num_qo_heads == 32 && shape.num_kv_heads == 8 && shape.q_dtype == HW_DTYPE_BF16);
  hw_plan_options_init(&options, sizeof options);
  CHECK(options.causal == 1 && options.window_left == -1 && options.invariant_chunk == 128);
  options.policy = HW_POLICY_FOREST;
  CHECK_OK(hw_planner_create(NULL, &planner, &error));
  CHECK_OK(hw_planner_plan(planner, &shape, &batch, &options, &plan, &error));

  hw_plan_stats_init(&stats, sizeof stats);
  CHECK_OK(hw_plan_get_stats(plan, &stats, &error));
  CHECK(stats.path == HW_PATH_CASCADE && stats.num_requests == kRequests && stats.num_rows == kRequests);
  CHECK(stats.num_spans == 1 && stats.member_sequences == kRequests && stats.shared_tokens == kSharedPages * kPageSize);
  /* bytes of a token: 8 heads x (128 + 128) x 2 bytes */
  CHECK(stats.kv_bytes_flat == (int64_t)kRequests * (kSharedPages * kPageSize + 3) * 4096);
  CHECK(stats.kv_bytes_unique == (int64_t)(kSharedPages * kPageSize + kRequests * 3) * 4096);
  CHECK(stats.kv_bytes_read >= stats.kv_bytes_unique && stats.kv_bytes_read < stats.kv_bytes_flat);
  CHECK(hw_plan_workspace_size(plan) > 0);

  /* Text: length first, then all of it; a short buffer gets the beginning. */
  CHECK_OK(hw_plan_describe(plan, NULL, 0, &length, &error));
  CHECK(length > sizeof text);
  whole = malloc(length + 1);
  CHECK_OK(hw_plan_describe(plan, whole, length + 1, NULL, &error));
  CHECK(strlen(whole) == length);
  CHECK_OK(hw_plan_describe(plan, text, sizeof text, &length, &error));
  CHECK(strlen(text) == sizeof text - 1 && strncmp(text, whole, sizeof text - 1) == 0);
  CHECK_ERROR(hw_plan_describe(plan, NULL, 5, &length, &error), HW_ERROR_INVALID_ARGUMENT,
              "buffer = null, expected 5 entries");
  free(whole);
  CHECK_OK(hw_plan_to_json(plan, text, sizeof text, &length, &error));
  CHECK(text[0] == '{' && length > 0);

  /* A decode step: update equals a new plan, byte for byte. */
  for (r = 0; r < kRequests; ++r) last_page_len[r] = 4;
  changes.grown = grown;
  changes.num_grown = kRequests;
  CHECK_OK(hw_planner_update(planner, plan, &batch, &changes, &error));
  CHECK_OK(hw_planner_update(planner, plan, &batch, NULL, &error));
  CHECK_OK(hw_planner_plan(planner, &shape, &batch, &options, &cold, &error));
  CHECK_OK(hw_plan_serialize(plan, NULL, 0, &length, &error));
  CHECK_OK(hw_plan_serialize(cold, NULL, 0, &other_length, &error));
  CHECK(length == other_length && length > 0);
  whole = malloc(length);
  other = malloc(length);
  CHECK_OK(hw_plan_serialize(plan, whole, length, NULL, &error));
  CHECK_OK(hw_plan_serialize(cold, other, length, NULL, &error));
  CHECK(memcmp(whole, other, length) == 0);
  free(whole);
  free(other);

  /* A bad table leaves the plan as it was. */
  indices[3] = 1000;
  CHECK(hw_planner_update(planner, plan, &batch, NULL, &error) == HW_ERROR_INVALID_PAGE_TABLE);
  CHECK(strstr(error.message, "1000") != NULL);
  CHECK_OK(hw_plan_serialize(plan, NULL, 0, &other_length, &error));
  CHECK(length == other_length);
  hw_plan_destroy(plan);
  hw_plan_destroy(cold);
  hw_planner_destroy(planner);
}

static void explicit_levels(void) {
  hw_error error;
  hw_planner* planner = NULL;
  hw_plan* plan = NULL;
  hw_plan_stats stats;
  hw_attention_shape shape;
  hw_batch batch;
  hw_level levels[2];
  const int32_t root_qo[2] = {0, 2}, leaf_qo[3] = {0, 1, 2};
  const int32_t root_indptr[2] = {0, 2}, leaf_indptr[3] = {0, 1, 2};
  const int32_t root_pages[2] = {0, 1}, leaf_pages[2] = {0, 1};
  const int32_t root_last[1] = {kPageSize}, leaf_last[2] = {1, 2};

  memset(levels, 0, sizeof levels);
  hw_page_table_init(&levels[0].kv);
  hw_page_table_init(&levels[1].kv);
  levels[0].qo_indptr = root_qo;
  levels[0].kv.indptr = root_indptr;
  levels[0].kv.indices = root_pages;
  levels[0].kv.num_indices = 2;
  levels[0].kv.last_page_len = root_last;
  levels[0].kv.num_requests = 1;
  levels[1].qo_indptr = leaf_qo;
  levels[1].kv.indptr = leaf_indptr;
  levels[1].kv.indices = leaf_pages;
  levels[1].kv.num_indices = 2;
  levels[1].kv.last_page_len = leaf_last;
  levels[1].kv.num_requests = 2;
  levels[0].kv.num_pages = levels[1].kv.num_pages = 2;

  hw_attention_shape_init(&shape, sizeof shape);
  hw_batch_init(&batch, sizeof batch);
  batch.levels = levels;
  batch.num_levels = 2;
  CHECK_OK(hw_planner_create(NULL, &planner, &error));
  CHECK_OK(hw_planner_plan(planner, &shape, &batch, NULL, &plan, &error));
  hw_plan_stats_init(&stats, sizeof stats);
  CHECK_OK(hw_plan_get_stats(plan, &stats, &error));
  CHECK(stats.num_rows == 2);
  CHECK(stats.kv_bytes_flat == (2 * 2 * kPageSize + 1 + 2) * 4096);
  hw_plan_destroy(plan);

  plan = NULL;
  levels[1].kv.indices = NULL;
  CHECK_ERROR(hw_planner_plan(planner, &shape, &batch, NULL, &plan, &error), HW_ERROR_INVALID_ARGUMENT,
              "batch->levels[1].kv.indices = null, expected 2 entries");
  CHECK(plan == NULL);
  batch.levels = NULL;
  CHECK_ERROR(hw_planner_plan(planner, &shape, &batch, NULL, &plan, &error), HW_ERROR_INVALID_ARGUMENT,
              "batch->levels = null, expected 2 entries");
  hw_planner_destroy(planner);
}

static const char* fake_environment(void* user, const char* name) {
  ++*(int*)user;
  if (strcmp(name, "HEADWATER_CASCADE_ATTENTION") == 0) return " OFF ";
  if (strcmp(name, "HEADWATER_CASCADE_MIN_MEMBERS") == 0) return "5";
  return NULL;
}

static void options_and_models(void) {
  hw_error error;
  hw_plan_options options;
  hw_device_model model, copy;
  hw_planner* planner = NULL;
  int lookups = 0;

  hw_plan_options_init(&options, sizeof options);
  options.min_shared_pages = 9;
  CHECK_OK(hw_plan_options_from_env(&options, fake_environment, &lookups, &error));
  CHECK(lookups == 3 && options.cascade == HW_CASCADE_OFF && options.min_members == 5 && options.min_shared_pages == 9);
  CHECK(options.struct_size == sizeof options);
  CHECK_ERROR(hw_plan_options_from_env(&options, NULL, NULL, &error), HW_ERROR_INVALID_ARGUMENT,
              "lookup = null, expected a function");
  CHECK_NULL(hw_plan_options_from_env(NULL, fake_environment, &lookups, &error), "options");

  hw_device_model_init(&model, sizeof model);
  CHECK(model.memory_ps_per_kib > 0 && model.dot16.few_row_ps > 0 && model.fma32.few_row_ps > 0);
  model.item_ps = 123456;
  CHECK_OK(hw_planner_create(&model, &planner, &error));
  hw_device_model_init(&copy, sizeof copy);
  CHECK_OK(hw_planner_model(planner, &copy, &error));
  CHECK(copy.item_ps == 123456 && copy.chunk_tokens == model.chunk_tokens);
  hw_planner_destroy(planner);
  CHECK_OK(hw_device_model_for_isa(&model, HW_ISA_SCALAR, &error));
  CHECK(model.has_dot16 == 0);
  CHECK_ERROR(hw_device_model_for_isa(&model, 7, &error), HW_ERROR_INVALID_ARGUMENT, "isa = 7, expected 0 to 3");
  CHECK_NULL(hw_device_model_for_isa(NULL, 0, &error), "model");
}

/* A program built against an older version passes a shorter struct: what it lacks takes the default, and nothing behind
 * its end is read or written. */
static void struct_sizes(void) {
  hw_error error;
  hw_planner* planner = NULL;
  hw_plan* plan = NULL;
  hw_plan_options options;
  hw_attention_shape shape;
  hw_plan_stats stats;
  const hw_batch batch = make_batch();
  CHECK_OK(hw_planner_create(NULL, &planner, &error));
  hw_attention_shape_init(&shape, sizeof shape);

  hw_plan_options_init(&options, sizeof options);
  options.invariant_chunk = -1; /* would be refused, if it was read */
  options.num_workers = -1;
  options.struct_size = offsetof(hw_plan_options, invariant_chunk);
  CHECK_OK(hw_planner_plan(planner, &shape, &batch, &options, &plan, &error));

  memset(&stats, 0x55, sizeof stats);
  hw_plan_stats_init(&stats, offsetof(hw_plan_stats, flops));
  CHECK(stats.flops == 0x5555555555555555);
  CHECK_OK(hw_plan_get_stats(plan, &stats, &error));
  CHECK(stats.num_rows == kRequests && stats.flops == 0x5555555555555555);
  hw_plan_destroy(plan);

  options.struct_size = 0;
  CHECK(hw_planner_plan(planner, &shape, &batch, &options, &plan, &error) == HW_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(error.message, "options->struct_size = 0, expected what the init function set") != NULL);
  options.struct_size = sizeof options + 8;
  CHECK(hw_planner_plan(planner, &shape, &batch, &options, &plan, &error) == HW_ERROR_INVALID_ARGUMENT);
  stats.struct_size = 4;
  CHECK(hw_plan_get_stats(NULL, &stats, &error) == HW_ERROR_INVALID_ARGUMENT);
  hw_planner_destroy(planner);
}

int main(void) {
  plan_and_read();
  explicit_levels();
  options_and_models();
  struct_sizes();
  return finish();
}
