// PagePool and PrefixCache. Neither is thread safe: their calls hold the GIL, which serialises them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <utility>
#include <vector>

#include "bindings.h"

namespace headwater::python {
namespace {

nb::tuple prepare_append(PagePool& pool, SequenceId sequence, std::int64_t num_tokens) {
  std::vector<cpu::PageCopy> copies;
  std::vector<std::int64_t> slots;
  pool.prepare_append(sequence, num_tokens, copies, slots);
  nb::list list;
  for (const auto& c : copies) list.append(nb::make_tuple(c.src, c.dst, c.num_tokens));
  return nb::make_tuple(list, to_memoryview(std::move(slots)));
}

nb::object pages_of(const PagePool& pool, SequenceId sequence) {
  const auto pages = pool.pages(sequence);
  return to_memoryview(std::vector<std::int32_t>(pages.begin(), pages.end()));
}

/// kv_indptr, kv_indices, kv_last_page_len of some sequences, for a Batch.
nb::tuple page_table(const PagePool& pool, nb::sequence sequences) {
  std::vector<std::int32_t> indptr{0};
  std::vector<std::int32_t> indices;
  std::vector<std::int32_t> last;
  for (nb::handle object : sequences) {
    SequenceId id = 0;
    if (!nb::try_cast(object, id, false)) {
      refuse("sequences[" + std::to_string(last.size()) + "] = " + nb::cast<std::string>(nb::repr(object)) +
             ", expected a sequence id");
    }
    const auto pages = pool.pages(id);
    indices.insert(indices.end(), pages.begin(), pages.end());
    indptr.push_back(static_cast<std::int32_t>(indices.size()));
    const auto tokens = static_cast<std::int32_t>(pool.num_tokens(id) % pool.page_size());
    last.push_back(tokens == 0 ? pool.page_size() : tokens);
  }
  return nb::make_tuple(to_memoryview(std::move(indptr)), to_memoryview(std::move(indices)),
                        to_memoryview(std::move(last)));
}

std::span<const std::int32_t> ints(Array& keep, nb::handle object, const char* name) {
  keep = Array(object, name);
  return keep.int32s();
}

void bind_pool(nb::module_& m) {
  nb::class_<PagePool>(
      m, "PagePool",
      "A pool of reference-counted KV pages: ids and counts, no tensor memory. A sequence is the page\n"
      "table of one request; sequences share pages by clone, fork or adoption of a cached prefix. On an\n"
      "error nothing has changed.\n\n"
      "Args:\n  num_pages, page_size: at least 1.\n"
      "  reserve_null_page: keep page 0 out of circulation.")
      .def(nb::init<std::int32_t, int, bool>(), nb::arg("num_pages"), nb::arg("page_size"),
           nb::arg("reserve_null_page") = false)
      .def_prop_ro("page_size", &PagePool::page_size)
      .def_prop_ro("num_pages", &PagePool::num_pages)
      .def_prop_ro("num_free", &PagePool::num_free)
      .def("ref_count", &PagePool::ref_count, nb::arg("page"))
      .def("create", &PagePool::create, "A new, empty sequence; returns its id.")
      .def(
          "adopt",
          [](PagePool& p, nb::object pages) {
            Array keep;
            return p.adopt(ints(keep, pages, "pages"));
          },
          nb::arg("pages").none(), "A sequence that starts with written full pages (int32 [n]); each is retained.")
      .def("clone_detached_prefix", &PagePool::clone_detached_prefix, nb::arg("source"), nb::arg("target_tokens"),
           "A new sequence sharing the first target_tokens (a positive multiple of page_size) of `source`.")
      .def("fork", &PagePool::fork, nb::arg("source"), "A new sequence sharing all pages of `source`, copy-on-write.")
      .def("release", &PagePool::release, nb::arg("sequence"), "Lets go of a sequence; its id may be handed out again.")
      .def("num_tokens", &PagePool::num_tokens, nb::arg("sequence"))
      .def("pages", &pages_of, nb::arg("sequence"), "int32 [pages], a copy.")
      .def("page_table", &page_table, nb::arg("sequences"),
           "(kv_indptr, kv_indices, kv_last_page_len) of the sequences, int32, for a Batch.")
      .def(
          "prepare_append", &prepare_append, nb::arg("sequence"), nb::arg("num_tokens"),
          "Reserves room for num_tokens more.\n\n"
          "Returns:\n  (copies, token_slots): what copy_pages must run first, and int64 [num_tokens] for append_kv.\n\n"
          "Raises:\n  OutOfPages: nothing has changed.")
      .def("truncate", &PagePool::truncate, nb::arg("sequence"), nb::arg("num_tokens"),
           "Keeps the first num_tokens tokens; pages left empty are released.")
      .def(
          "replace_prefix",
          [](PagePool& p, SequenceId sequence, nb::object pages) {
            Array keep;
            p.replace_prefix(sequence, ints(keep, pages, "pages"));
          },
          nb::arg("sequence"), nb::arg("pages").none(), "Takes over the pages that PrefixCache.insert returned.")
      .def("retain", &PagePool::retain, nb::arg("page"))
      .def("release_page", &PagePool::release_page, nb::arg("page"))
      .def(
          "audit",
          [](const PagePool& p, nb::object external) {
            Array keep;
            p.audit(external.is_none() ? std::span<const std::int32_t>{} : ints(keep, external, "external_refs"));
          },
          nb::arg("external_refs") = nb::none(), "Recounts every reference; raises InternalError if one is wrong.");
}

void bind_prefix_cache(nb::module_& m) {
  nb::class_<PrefixCacheStats>(m, "PrefixCacheStats",
                               "Counters of a PrefixCache since it was made; pages_cached is now.")
      .def_ro("lookups", &PrefixCacheStats::lookups)
      .def_ro("hits", &PrefixCacheStats::hits)
      .def_ro("tokens_requested", &PrefixCacheStats::tokens_requested)
      .def_ro("tokens_hit", &PrefixCacheStats::tokens_hit)
      .def_ro("pages_inserted", &PrefixCacheStats::pages_inserted)
      .def_ro("pages_evicted", &PrefixCacheStats::pages_evicted)
      .def_ro("pages_cached", &PrefixCacheStats::pages_cached);
  nb::class_<PrefixCache>(m, "PrefixCache",
                          "A radix tree over full pages of tokens: requests that start alike adopt the same pages.\n"
                          "Leaves are evicted first, least recently used first, never while a sequence holds them.")
      .def(nb::init<PagePool&>(), nb::arg("pool"), nb::keep_alive<1, 2>())
      .def(
          "lookup",
          [](PrefixCache& c, nb::object tokens, std::uint64_t salt) {
            Array keep;
            return to_memoryview(c.lookup(ints(keep, tokens, "tokens"), salt));
          },
          nb::arg("tokens").none(), nb::arg("salt") = 0,
          "Pages (int32) of the longest cached prefix of tokens (int32 [n]), leaving at least the last token to "
          "compute.\n"
          "Adopt them at once: PagePool.adopt.")
      .def(
          "insert",
          [](PrefixCache& c, nb::object tokens, nb::object pages, std::uint64_t salt) {
            Array keep_tokens;
            Array keep_pages;
            return to_memoryview(c.insert(ints(keep_tokens, tokens, "tokens"), ints(keep_pages, pages, "pages"), salt));
          },
          nb::arg("tokens").none(), nb::arg("pages").none(), nb::arg("salt") = 0,
          "Inserts a sequence's full pages; returns the pages (int32) that now stand for the prefix.")
      .def("evict", &PrefixCache::evict, nb::arg("num_pages"), "Frees up to num_pages pages; returns how many.")
      .def("clear", &PrefixCache::clear, "Evicts everything that nobody uses.")
      .def_prop_ro("stats", [](const PrefixCache& c) { return c.stats(); })
      .def(
          "held_pages", [](const PrefixCache& c) { return to_memoryview(c.held_pages()); },
          "References that the cache holds, int32 [num_pages], for PagePool.audit.");
}

}  // namespace

void bind_cache(nb::module_& m) {
  bind_pool(m);
  bind_prefix_cache(m);
}

}  // namespace headwater::python
