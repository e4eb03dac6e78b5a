// The C interface: page pool and prefix cache.
#include "capi/capi.h"

using namespace headwater;
using namespace headwater::capi;

namespace {

PagePool& need_pool(hw_page_pool* pool) {
  return need(pool, "pool").pool;
}
const PagePool& need_pool(const hw_page_pool* pool) {
  return need(pool, "pool").pool;
}

}  // namespace

int hw_page_pool_create(int32_t num_pages, int32_t page_size, int reserve_null_page, hw_page_pool** pool,
                        hw_error* error) {
  return guard(error, [&] {
    need(pool, "pool");
    *pool = new hw_page_pool{PagePool(num_pages, page_size, reserve_null_page != 0)};
  });
}

void hw_page_pool_destroy(hw_page_pool* pool) {
  delete pool;
}

int32_t hw_page_pool_page_size(const hw_page_pool* pool) {
  return pool == nullptr ? 0 : pool->pool.page_size();
}
int32_t hw_page_pool_num_pages(const hw_page_pool* pool) {
  return pool == nullptr ? 0 : pool->pool.num_pages();
}
int32_t hw_page_pool_num_free(const hw_page_pool* pool) {
  return pool == nullptr ? 0 : pool->pool.num_free();
}

int hw_page_pool_ref_count(const hw_page_pool* pool, int32_t page, int32_t* count, hw_error* error) {
  return guard(error, [&] { need(count, "count") = need_pool(pool).ref_count(page); });
}

int hw_page_pool_create_sequence(hw_page_pool* pool, hw_sequence* sequence, hw_error* error) {
  return guard(error, [&] {
    need(sequence, "sequence");
    *sequence = need_pool(pool).create();
  });
}

int hw_page_pool_adopt(hw_page_pool* pool, const int32_t* pages, size_t num_pages, hw_sequence* sequence,
                       hw_error* error) {
  return guard(error, [&] {
    need(sequence, "sequence");
    *sequence = need_pool(pool).adopt(array(pages, num_pages, "pages"));
  });
}

int hw_page_pool_clone_detached_prefix(hw_page_pool* pool, hw_sequence source, int64_t target_tokens,
                                       hw_sequence* sequence, hw_error* error) {
  return guard(error, [&] {
    need(sequence, "sequence");
    *sequence = need_pool(pool).clone_detached_prefix(source, target_tokens);
  });
}

int hw_page_pool_fork(hw_page_pool* pool, hw_sequence source, hw_sequence* sequence, hw_error* error) {
  return guard(error, [&] {
    need(sequence, "sequence");
    *sequence = need_pool(pool).fork(source);
  });
}

int hw_page_pool_release(hw_page_pool* pool, hw_sequence sequence, hw_error* error) {
  return guard(error, [&] { need_pool(pool).release(sequence); });
}

int hw_page_pool_num_tokens(const hw_page_pool* pool, hw_sequence sequence, int64_t* num_tokens, hw_error* error) {
  return guard(error, [&] { need(num_tokens, "num_tokens") = need_pool(pool).num_tokens(sequence); });
}

int hw_page_pool_pages(const hw_page_pool* pool, hw_sequence sequence, const int32_t** pages, size_t* num_pages,
                       hw_error* error) {
  return guard(error, [&] {
    need(pages, "pages");
    need(num_pages, "num_pages");
    const auto list = need_pool(pool).pages(sequence);
    *pages = list.data();
    *num_pages = list.size();
  });
}

int hw_page_pool_prepare_append(hw_page_pool* pool, hw_sequence sequence, int64_t num_tokens, hw_page_copy* copy,
                                int32_t* num_copies, int64_t* token_slots, hw_error* error) {
  return guard(error, [&] {
    need(copy, "copy");
    need(num_copies, "num_copies");
    (void)array(token_slots, num_tokens, "token_slots");
    std::vector<cpu::PageCopy> copies;
    std::vector<std::int64_t> slots;
    need_pool(pool).prepare_append(sequence, num_tokens, copies, slots);
    *num_copies = static_cast<int32_t>(copies.size());
    if (!copies.empty()) *copy = {copies[0].src, copies[0].dst, copies[0].num_tokens};
    std::ranges::copy(slots, token_slots);
  });
}

int hw_page_pool_truncate(hw_page_pool* pool, hw_sequence sequence, int64_t num_tokens, hw_error* error) {
  return guard(error, [&] { need_pool(pool).truncate(sequence, num_tokens); });
}

int hw_page_pool_replace_prefix(hw_page_pool* pool, hw_sequence sequence, const int32_t* pages, size_t num_pages,
                                hw_error* error) {
  return guard(error, [&] { need_pool(pool).replace_prefix(sequence, array(pages, num_pages, "pages")); });
}

int hw_page_pool_retain(hw_page_pool* pool, int32_t page, hw_error* error) {
  return guard(error, [&] { need_pool(pool).retain(page); });
}

int hw_page_pool_release_page(hw_page_pool* pool, int32_t page, hw_error* error) {
  return guard(error, [&] { need_pool(pool).release_page(page); });
}

int hw_page_pool_audit(const hw_page_pool* pool, const int32_t* external_refs, hw_error* error) {
  return guard(error, [&] {
    const PagePool& p = need_pool(pool);
    p.audit(optional_array(external_refs, p.num_pages(), "external_refs"));
  });
}

int hw_prefix_cache_create(hw_page_pool* pool, hw_prefix_cache** cache, hw_error* error) {
  return guard(error, [&] {
    need(cache, "cache");
    *cache = new hw_prefix_cache(need_pool(pool));
  });
}

void hw_prefix_cache_destroy(hw_prefix_cache* cache) {
  delete cache;
}

int hw_prefix_cache_lookup(hw_prefix_cache* cache, const int32_t* tokens, size_t num_tokens, uint64_t salt,
                           int32_t* pages, size_t capacity, size_t* num_pages, hw_error* error) {
  return guard(error, [&] {
    hw_prefix_cache& c = need(cache, "cache");
    const auto prompt = array(tokens, num_tokens, "tokens");
    const auto out = array(pages, capacity, "pages");
    need(num_pages, "num_pages");
    const std::size_t most = prompt.empty() ? 0 : (prompt.size() - 1) / static_cast<std::size_t>(c.pool.page_size());
    if (out.size() < most) {
      refuse("capacity = " + std::to_string(capacity) + ", expected at least the " + std::to_string(most) +
             " full pages before the last of " + std::to_string(num_tokens) + " tokens");
    }
    const auto found = c.cache.lookup(prompt, salt);
    std::ranges::copy(found, out.begin());
    *num_pages = found.size();
  });
}

int hw_prefix_cache_insert(hw_prefix_cache* cache, const int32_t* tokens, size_t num_tokens, const int32_t* pages,
                           size_t num_pages, uint64_t salt, int32_t* standing_pages, hw_error* error) {
  return guard(error, [&] {
    const auto standing =
        need(cache, "cache").cache.insert(array(tokens, num_tokens, "tokens"), array(pages, num_pages, "pages"), salt);
    if (standing_pages != nullptr) std::ranges::copy(standing, standing_pages);
  });
}

int hw_prefix_cache_evict(hw_prefix_cache* cache, int32_t num_pages, int32_t* num_freed, hw_error* error) {
  return guard(error, [&] {
    const int32_t freed = need(cache, "cache").cache.evict(num_pages);
    if (num_freed != nullptr) *num_freed = freed;
  });
}

int hw_prefix_cache_clear(hw_prefix_cache* cache, hw_error* error) {
  return guard(error, [&] { need(cache, "cache").cache.clear(); });
}

int hw_prefix_cache_get_stats(const hw_prefix_cache* cache, hw_prefix_cache_stats* stats, hw_error* error) {
  return guard(error, [&] {
    const PrefixCacheStats& s = need(cache, "cache").cache.stats();
    const std::size_t size = output_size(stats, "stats");
    write_struct(
        stats,
        {0, s.lookups, s.hits, s.tokens_requested, s.tokens_hit, s.pages_inserted, s.pages_evicted, s.pages_cached},
        size);
  });
}

int hw_prefix_cache_held_pages(const hw_prefix_cache* cache, int32_t* held, hw_error* error) {
  return guard(error, [&] {
    const auto pages = need(cache, "cache").cache.held_pages();
    std::ranges::copy(pages, array(held, pages.size(), "held").begin());
  });
}
