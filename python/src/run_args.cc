#include "run_args.h"

#include <nanobind/stl/string.h>

namespace headwater::python {
namespace {

void check_rows_of(const Rows& rows, std::int64_t num_rows, const char* what_rows, int heads, int head_dim) {
  rows.array.expect_shape(0, num_rows, what_rows);
  rows.array.expect_shape(1, heads, "num_qo_heads");
  rows.array.expect_shape(2, head_dim, "head_dim");
}

void check_heads_vector(const Array& a, int heads) {
  if (a.given()) a.expect_shape(0, heads, "num_qo_heads");
}

}  // namespace

void PyRunArgs::import_rest(nb::handle kv, const std::string& kv_layout, const Optional& given,
                            const std::string& lse_base, bool with_sink, int device) {
  const bool nhd = parse_nhd(kv_layout);
  if (nb::isinstance<nb::list>(kv)) {
    std::size_t i = 0;
    for (nb::handle level : nb::borrow<nb::list>(kv)) {
      caches.emplace_back(level, "kv[" + std::to_string(i++) + "]", nhd, Array::Access::read, device);
    }
    if (caches.empty()) refuse("kv is an empty list, expected a cache for each level");
  } else {
    caches.emplace_back(kv, "kv", nhd, Array::Access::read, device);
  }
  const LseBase base = parse_base(lse_base, "lse_base");
  if (!given.lse.is_none()) lse.emplace(given.lse, "lse", base, Array::Access::write, device);
  const auto vector = [device](nb::handle object, const char* name) {
    if (object.is_none()) return Array();
    Array a(object, name, Array::Access::read, device);
    (void)a.floats();
    return a;
  };
  alibi_slopes = vector(given.alibi_slopes, "alibi_slopes");
  sinks = vector(given.sinks, "sinks");
  k_scale = ScaleArg(given.k_scale, "k_scale", device);
  v_scale = ScaleArg(given.v_scale, "v_scale", device);
  include_sink = with_sink;
}

void PyRunArgs::check_shapes(const AttentionShape& shape, std::int64_t num_rows, const char* what_rows) const {
  check_rows_of(q, num_rows, what_rows, shape.num_qo_heads, shape.head_dim_qk);
  check_rows_of(out, num_rows, what_rows, shape.num_qo_heads, shape.head_dim_vo);
  if (lse) {
    lse->array.expect_shape(0, num_rows, what_rows);
    lse->array.expect_shape(1, shape.num_qo_heads, "num_qo_heads");
  }
  check_heads_vector(alibi_slopes, shape.num_qo_heads);
  check_heads_vector(sinks, shape.num_qo_heads);
  for (const Cache& cache : caches) {
    const bool same = cache.num_kv_heads == shape.num_kv_heads && cache.head_dim_qk == shape.head_dim_qk &&
                      cache.head_dim_vo == shape.head_dim_vo;
    if (same) continue;
    refuse(cache.k.name() + " has " + std::to_string(cache.num_kv_heads) + " KV heads of sizes " +
           std::to_string(cache.head_dim_qk) + " and " + std::to_string(cache.head_dim_vo) + " (k and v), expected " +
           std::to_string(shape.num_kv_heads) + " of " + std::to_string(shape.head_dim_qk) + " and " +
           std::to_string(shape.head_dim_vo) + " as the plan");
  }
}

std::vector<KvCache> PyRunArgs::views(std::size_t num_levels) const {
  std::vector<KvCache> all;
  all.reserve(num_levels);
  for (const Cache& cache : caches) all.push_back(cache.view);
  if (all.size() == 1) all.resize(num_levels, all.front());  // every level in one pool
  return all;
}

const char* const kRunArgsDoc =
    "  q: [rows, num_qo_heads, head_dim], q_dtype.\n"
    "  kv: one layer's cache, kv_dtype: [pages, 2, page_size, num_kv_heads, head_dim] (NHD), or a tuple (k, v) of\n"
    "    [pages, page_size, num_kv_heads, head_dim]; HND has page_size and num_kv_heads the other way round. Any "
    "strides\n"
    "    with a contiguous head_dim: side by side per token, or v a view of k. With levels: a list, one cache a level, "
    "or\n"
    "    one for all.\n"
    "  out: [rows, num_qo_heads, head_dim_vo], out_dtype, written.\n"
    "  lse: float32 [rows, num_qo_heads] or None, written: log-sum-exp of the scores, base \"two\" or \"natural\".\n"
    "  alibi_slopes, sinks: float32 [num_qo_heads], with the options of these names. Sinks are natural-log logits,\n"
    "    added to the denominator; include_sink=False leaves them out (a range that is merged elsewhere).\n"
    "  k_scale, v_scale: None, a number, or float32 [1] or [num_kv_heads]: multiply k and v.\n"
    "  isa: force an instruction-set level.\n";

}  // namespace headwater::python
