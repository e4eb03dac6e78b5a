/* Page pool and prefix cache from C: results, codes, messages, null pointers. */
#include "check.h"

static void pool_operations(void) {
  hw_error error;
  hw_page_pool* pool = NULL;
  hw_sequence a = -1, b = -1, c = -1;
  hw_page_copy copy = {-1, -1, -1};
  int32_t num_copies = -1, count = -1;
  int64_t slots[16], tokens = -1;
  const int32_t* pages = NULL;
  size_t num_pages = 0;

  CHECK_OK(hw_page_pool_create(4, 4, 0, &pool, &error));
  CHECK(error.code == HW_OK && error.message[0] == '\0');
  CHECK(hw_page_pool_page_size(pool) == 4 && hw_page_pool_num_pages(pool) == 4 && hw_page_pool_num_free(pool) == 4);
  CHECK_OK(hw_page_pool_create_sequence(pool, &a, &error));
  CHECK_OK(hw_page_pool_prepare_append(pool, a, 6, &copy, &num_copies, slots, &error));
  CHECK(num_copies == 0 && slots[0] == 0 && slots[5] == 5);
  CHECK_OK(hw_page_pool_fork(pool, a, &b, &error));
  CHECK_OK(hw_page_pool_prepare_append(pool, b, 1, &copy, &num_copies, slots, &error));
  CHECK(num_copies == 1 && copy.src == 1 && copy.dst == 2 && copy.num_tokens == 2 && slots[0] == 2 * 4 + 2);
  CHECK_OK(hw_page_pool_ref_count(pool, 0, &count, &error));
  CHECK(count == 2);
  CHECK_OK(hw_page_pool_num_tokens(pool, b, &tokens, &error));
  CHECK(tokens == 7);
  CHECK_OK(hw_page_pool_pages(pool, b, &pages, &num_pages, &error));
  CHECK(num_pages == 2 && pages[0] == 0 && pages[1] == 2);

  /* Out of pages: nothing changes, not even the out-parameters. */
  num_copies = 77;
  CHECK_ERROR(hw_page_pool_prepare_append(pool, b, 6, &copy, &num_copies, slots, &error), HW_ERROR_OUT_OF_PAGES,
              "sequence 1 needs 2 pages for 6 more tokens, 1 are free");
  CHECK(num_copies == 77);
  CHECK(hw_page_pool_num_free(pool) == 1);

  CHECK_ERROR(hw_page_pool_clone_detached_prefix(pool, a, 5, &c, &error), HW_ERROR_INVALID_ARGUMENT,
              "target_tokens = 5, expected a positive multiple of page_size = 4");
  CHECK_OK(hw_page_pool_clone_detached_prefix(pool, a, 4, &c, &error));
  CHECK_OK(hw_page_pool_truncate(pool, c, 0, &error));
  CHECK_OK(hw_page_pool_release(pool, c, &error));
  CHECK_ERROR(hw_page_pool_release(pool, c, &error), HW_ERROR_INVALID_ARGUMENT,
              "sequence = 2, expected one that has not been released");
  CHECK_OK(hw_page_pool_adopt(pool, pages, 1, &c, &error));
  CHECK_OK(hw_page_pool_audit(pool, NULL, &error));
  CHECK_OK(hw_page_pool_retain(pool, 0, &error));
  CHECK_ERROR(hw_page_pool_audit(pool, NULL, &error), HW_ERROR_INTERNAL,
              "page pool audit: page 0 has count 4, expected 3");
  {
    const int32_t external[4] = {1, 0, 0, 0};
    CHECK_OK(hw_page_pool_audit(pool, external, &error));
  }
  CHECK_OK(hw_page_pool_release_page(pool, 0, &error));
  CHECK_OK(hw_page_pool_audit(pool, NULL, &error));
  CHECK(hw_page_pool_release(pool, 99, NULL) == HW_ERROR_INVALID_ARGUMENT); /* no message wanted */
  hw_page_pool_destroy(pool);
  CHECK_ERROR(hw_page_pool_create(0, 4, 0, &pool, &error), HW_ERROR_INVALID_ARGUMENT,
              "num_pages = 0, expected at least 1");
}

static void prefix_cache_operations(void) {
  hw_error error;
  hw_page_pool* pool = NULL;
  hw_prefix_cache* cache = NULL;
  hw_prefix_cache_stats stats;
  hw_sequence a = -1, b = -1;
  hw_page_copy copy;
  int32_t num_copies, freed = -1;
  int64_t slots[8];
  const int32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  int32_t found[4] = {-1, -1, -1, -1}, standing[4] = {-1, -1, -1, -1}, held[8];
  const int32_t* pages = NULL;
  size_t num_pages = 0, num_found = 99;

  CHECK_OK(hw_page_pool_create(8, 2, 0, &pool, &error));
  CHECK_OK(hw_prefix_cache_create(pool, &cache, &error));
  CHECK_OK(hw_page_pool_create_sequence(pool, &a, &error));
  CHECK_OK(hw_page_pool_prepare_append(pool, a, 8, &copy, &num_copies, slots, &error));
  CHECK_OK(hw_page_pool_pages(pool, a, &pages, &num_pages, &error));
  CHECK_OK(hw_prefix_cache_insert(cache, tokens, 8, pages, num_pages, 5, standing, &error));
  CHECK(standing[0] == pages[0] && standing[3] == pages[3]);

  CHECK_ERROR(hw_prefix_cache_lookup(cache, tokens, 8, 5, found, 2, &num_found, &error), HW_ERROR_INVALID_ARGUMENT,
              "capacity = 2, expected at least the 3 full pages before the last of 8 tokens");
  CHECK_OK(hw_prefix_cache_lookup(cache, tokens, 8, 5, found, 4, &num_found, &error));
  CHECK(num_found == 3 && found[0] == pages[0] && found[2] == pages[2] && found[3] == -1);
  CHECK_OK(hw_prefix_cache_lookup(cache, tokens, 8, 6, found, 4, &num_found, &error));
  CHECK(num_found == 0);

  /* A second sequence with the same tokens takes over the cached pages. */
  CHECK_OK(hw_page_pool_create_sequence(pool, &b, &error));
  CHECK_OK(hw_page_pool_prepare_append(pool, b, 4, &copy, &num_copies, slots, &error));
  CHECK_OK(hw_page_pool_pages(pool, b, &pages, &num_pages, &error));
  CHECK_OK(hw_prefix_cache_insert(cache, tokens, 4, pages, num_pages, 5, standing, &error));
  CHECK_OK(hw_page_pool_replace_prefix(pool, b, standing, 2, &error));
  CHECK(hw_page_pool_num_free(pool) == 4);

  hw_prefix_cache_stats_init(&stats, sizeof stats);
  CHECK_OK(hw_prefix_cache_get_stats(cache, &stats, &error));
  CHECK(stats.lookups == 2 && stats.hits == 1 && stats.tokens_requested == 16 && stats.tokens_hit == 6);
  CHECK(stats.pages_inserted == 4 && stats.pages_cached == 4 && stats.pages_evicted == 0);
  CHECK_OK(hw_prefix_cache_held_pages(cache, held, &error));
  CHECK_OK(hw_page_pool_audit(pool, held, &error));

  CHECK_OK(hw_page_pool_release(pool, a, &error));
  CHECK_OK(hw_prefix_cache_evict(cache, 1, &freed, &error));
  CHECK(freed == 1);
  CHECK_OK(hw_prefix_cache_clear(cache, &error));
  CHECK(hw_page_pool_num_free(pool) == 6); /* b still holds two */
  hw_prefix_cache_destroy(cache);
  CHECK_OK(hw_page_pool_release(pool, b, &error));
  CHECK(hw_page_pool_num_free(pool) == 8);
  hw_page_pool_destroy(pool);
}

static void null_pointers(void) {
  hw_error error;
  hw_page_pool* pool = NULL;
  hw_prefix_cache* cache = NULL;
  hw_prefix_cache_stats stats;
  hw_sequence s = 0;
  int32_t i32 = 0;
  int64_t i64 = 0;
  size_t size = 0;
  hw_page_copy copy;
  const int32_t* pages = NULL;
  const int32_t token = 1;
  CHECK_OK(hw_page_pool_create(4, 4, 0, &pool, &error));
  CHECK_OK(hw_prefix_cache_create(pool, &cache, &error));
  hw_prefix_cache_stats_init(&stats, sizeof stats);
  hw_prefix_cache_stats_init(NULL, 0);

  hw_page_pool_destroy(NULL);
  hw_prefix_cache_destroy(NULL);
  CHECK(hw_page_pool_page_size(NULL) == 0 && hw_page_pool_num_pages(NULL) == 0 && hw_page_pool_num_free(NULL) == 0);
  CHECK_NULL(hw_page_pool_create(4, 4, 0, NULL, &error), "pool");
  CHECK_NULL(hw_page_pool_ref_count(NULL, 0, &i32, &error), "pool");
  CHECK_NULL(hw_page_pool_ref_count(pool, 0, NULL, &error), "count");
  CHECK_NULL(hw_page_pool_create_sequence(NULL, &s, &error), "pool");
  CHECK_NULL(hw_page_pool_create_sequence(pool, NULL, &error), "sequence");
  CHECK_NULL(hw_page_pool_adopt(NULL, &i32, 1, &s, &error), "pool");
  CHECK_NULL(hw_page_pool_adopt(pool, &i32, 1, NULL, &error), "sequence");
  CHECK_ERROR(hw_page_pool_adopt(pool, NULL, 2, &s, &error), HW_ERROR_INVALID_ARGUMENT,
              "pages = null, expected 2 entries");
  CHECK_OK(hw_page_pool_adopt(pool, NULL, 0, &s, &error));
  CHECK_NULL(hw_page_pool_clone_detached_prefix(NULL, s, 4, &s, &error), "pool");
  CHECK_NULL(hw_page_pool_clone_detached_prefix(pool, s, 4, NULL, &error), "sequence");
  CHECK_NULL(hw_page_pool_fork(NULL, s, &s, &error), "pool");
  CHECK_NULL(hw_page_pool_fork(pool, s, NULL, &error), "sequence");
  CHECK_NULL(hw_page_pool_release(NULL, s, &error), "pool");
  CHECK_NULL(hw_page_pool_num_tokens(NULL, s, &i64, &error), "pool");
  CHECK_NULL(hw_page_pool_num_tokens(pool, s, NULL, &error), "num_tokens");
  CHECK_NULL(hw_page_pool_pages(NULL, s, &pages, &size, &error), "pool");
  CHECK_NULL(hw_page_pool_pages(pool, s, NULL, &size, &error), "pages");
  CHECK_NULL(hw_page_pool_pages(pool, s, &pages, NULL, &error), "num_pages");
  CHECK_NULL(hw_page_pool_prepare_append(NULL, s, 1, &copy, &i32, &i64, &error), "pool");
  CHECK_NULL(hw_page_pool_prepare_append(pool, s, 1, NULL, &i32, &i64, &error), "copy");
  CHECK_NULL(hw_page_pool_prepare_append(pool, s, 1, &copy, NULL, &i64, &error), "num_copies");
  CHECK_ERROR(hw_page_pool_prepare_append(pool, s, 1, &copy, &i32, NULL, &error), HW_ERROR_INVALID_ARGUMENT,
              "token_slots = null, expected 1 entries");
  CHECK_NULL(hw_page_pool_truncate(NULL, s, 0, &error), "pool");
  CHECK_NULL(hw_page_pool_replace_prefix(NULL, s, &i32, 1, &error), "pool");
  CHECK_NULL(hw_page_pool_retain(NULL, 0, &error), "pool");
  CHECK_NULL(hw_page_pool_release_page(NULL, 0, &error), "pool");
  CHECK_NULL(hw_page_pool_audit(NULL, NULL, &error), "pool");
  CHECK(hw_page_pool_num_free(pool) == 4); /* none of these took a page */

  CHECK_NULL(hw_prefix_cache_create(NULL, &cache, &error), "pool");
  CHECK_NULL(hw_prefix_cache_create(pool, NULL, &error), "cache");
  CHECK_NULL(hw_prefix_cache_lookup(NULL, &token, 1, 0, NULL, 0, &size, &error), "cache");
  CHECK_NULL(hw_prefix_cache_lookup(cache, &token, 1, 0, NULL, 0, NULL, &error), "num_pages");
  CHECK_ERROR(hw_prefix_cache_lookup(cache, NULL, 1, 0, NULL, 0, &size, &error), HW_ERROR_INVALID_ARGUMENT,
              "tokens = null, expected 1 entries");
  CHECK_NULL(hw_prefix_cache_insert(NULL, &token, 1, NULL, 0, 0, NULL, &error), "cache");
  CHECK_OK(hw_prefix_cache_insert(cache, &token, 1, NULL, 0, 0, NULL, &error)); /* no full page */
  CHECK_NULL(hw_prefix_cache_evict(NULL, 1, &i32, &error), "cache");
  CHECK_OK(hw_prefix_cache_evict(cache, 1, NULL, &error));
  CHECK_NULL(hw_prefix_cache_clear(NULL, &error), "cache");
  CHECK_NULL(hw_prefix_cache_get_stats(NULL, &stats, &error), "cache");
  CHECK_NULL(hw_prefix_cache_get_stats(cache, NULL, &error), "stats");
  CHECK_NULL(hw_prefix_cache_held_pages(NULL, &i32, &error), "cache");
  CHECK_ERROR(hw_prefix_cache_held_pages(cache, NULL, &error), HW_ERROR_INVALID_ARGUMENT,
              "held = null, expected 4 entries");
  hw_prefix_cache_destroy(cache);
  hw_page_pool_destroy(pool);
}

int main(void) {
  pool_operations();
  prefix_cache_operations();
  null_pointers();
  return finish();
}
