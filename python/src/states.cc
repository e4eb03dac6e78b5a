// Merging of partial states, and writing to the cache.
#include "states.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <utility>
#include <vector>

namespace headwater::python {
namespace {

nb::tuple merge_state(nb::object v_a, nb::object s_a, nb::object v_b, nb::object s_b, nb::object out_v,
                      nb::object out_s, const std::string& lse_base, nb::object executor) {
  const LseBase base = parse_base(lse_base, "lse_base");
  Executor& workers = executor_of(executor);
  const State a(v_a, "v_a", s_a, "s_a", base);
  const State b(v_b, "v_b", s_b, "s_b", base);
  for (std::size_t i = 0; i < 3; ++i) b.v.array.expect_shape(i, a.v.array.shape(i), "as v_a");
  const Result to(out_v, out_s, v_a, s_a, a.v.rows(), a.v, base);
  if (a.v.rows() > 0) {
    const nb::gil_scoped_release release;
    cpu::merge_state(a.v.read(), a.s.read(), b.v.read(), b.s.read(), a.v.rows(), a.v.heads(), a.v.head_dim(), to.v.view,
                     to.s.view, workers);
  }
  return to.pair();
}

nb::tuple merge_states(nb::object v, nb::object s, nb::object indptr, nb::object out_v, nb::object out_s,
                       const std::string& lse_base, nb::object executor) {
  const LseBase base = parse_base(lse_base, "lse_base");
  Executor& workers = executor_of(executor);
  const State in(v, "v", s, "s", base);
  const Array groups(indptr, "indptr");
  const auto offsets = groups.int32s();
  if (offsets.empty()) refuse("indptr is empty, expected at least the entry 0");
  if (offsets.back() > in.v.rows()) {
    refuse("indptr[" + std::to_string(offsets.size() - 1) + "] = " + std::to_string(offsets.back()) +
           ", expected at most " + std::to_string(in.v.rows()) + " (rows of v)");
  }
  const Result to(out_v, out_s, v, s, static_cast<std::int64_t>(offsets.size()) - 1, in.v, base);
  {
    const nb::gil_scoped_release release;
    cpu::merge_states(in.v.read(), in.s.read(), offsets, in.v.heads(), in.v.head_dim(), to.v.view, to.s.view, workers);
  }
  return to.pair();
}

void append_kv(nb::object kv, nb::object k, nb::object v, nb::object token_slots, const std::string& kv_layout,
               nb::object k_scale, nb::object v_scale, nb::object executor) {
  Executor& workers = executor_of(executor);
  const Cache cache(kv, "kv", parse_nhd(kv_layout), Array::Access::write);
  const Rows k_rows(k, "k", Array::Access::read);
  const Rows v_rows(v, "v", Array::Access::read);
  const Array slots(token_slots, "token_slots");
  const auto at = slots.int64s();
  const auto rows = static_cast<std::int64_t>(at.size());
  k_rows.array.expect_shape(0, rows, "token_slots");
  v_rows.array.expect_shape(0, rows, "token_slots");
  for (const Rows* r : {&k_rows, &v_rows}) r->array.expect_shape(1, cache.num_kv_heads, "KV heads of kv");
  k_rows.array.expect_shape(2, cache.head_dim_qk, "head_dim of kv");
  v_rows.array.expect_shape(2, cache.head_dim_vo, "head_dim of kv");
  const ScaleArg k_factor(k_scale, "k_scale");
  const ScaleArg v_factor(v_scale, "v_scale");
  const nb::gil_scoped_release release;
  cpu::append_kv(cache.view, k_rows.read(), v_rows.read(), at, cache.num_kv_heads, cache.head_dim_qk, cache.head_dim_vo,
                 k_factor.view(), v_factor.view(), workers);
}

void copy_pages(nb::object kv, nb::sequence copies, const std::string& kv_layout, nb::object executor) {
  Executor& workers = executor_of(executor);
  const Cache cache(kv, "kv", parse_nhd(kv_layout), Array::Access::write);
  const std::vector<cpu::PageCopy> list = page_copies(copies);
  const nb::gil_scoped_release release;
  cpu::copy_pages(cache.view, list, cache.num_kv_heads, cache.head_dim_qk, cache.head_dim_vo, workers);
}

}  // namespace

State::State(nb::handle v_object, const char* v_name, nb::handle s_object, const char* s_name, LseBase base, int device)
    : v(v_object, v_name, Array::Access::read, device), s(s_object, s_name, base, Array::Access::read, device) {
  s.array.expect_shape(0, v.rows(), "rows of v");
  s.array.expect_shape(1, v.heads(), "heads of v");
}

Result::Result(nb::object out_v, nb::object out_s, nb::handle like_v, nb::handle like_s, std::int64_t rows,
               const Rows& in, LseBase base, int device)
    : v_object(out_v.is_none() ? empty_like(like_v, {rows, in.heads(), in.head_dim()}, in.view.dtype) : out_v),
      s_object(out_s.is_none() ? empty_like(like_s, {rows, in.heads()}, DType::f32) : out_s),
      v(v_object, "out_v", Array::Access::write, device),
      s(s_object, "out_s", base, Array::Access::write, device) {
  v.array.expect_shape(0, rows, "rows");
  v.array.expect_shape(1, in.heads(), "heads of v");
  v.array.expect_shape(2, in.head_dim(), "head_dim of v");
  s.array.expect_shape(0, rows, "rows");
  s.array.expect_shape(1, in.heads(), "heads of v");
}

std::vector<cpu::PageCopy> page_copies(nb::handle copies) {
  std::vector<cpu::PageCopy> list;
  for (nb::handle item : copies) {
    std::int64_t n[3] = {};
    bool good = nb::isinstance<nb::tuple>(item) && nb::len(item) == 3;
    for (std::size_t i = 0; good && i < 3; ++i) {
      good = nb::try_cast(nb::object(item[i]), n[i], false) && n[i] >= INT32_MIN && n[i] <= INT32_MAX;
    }
    if (!good) {
      refuse("copies[" + std::to_string(list.size()) + "] = " + nb::cast<std::string>(nb::repr(item)) +
             ", expected a tuple (src, dst, num_tokens) of 32-bit integers");
    }
    list.push_back({static_cast<std::int32_t>(n[0]), static_cast<std::int32_t>(n[1]), static_cast<std::int32_t>(n[2])});
  }
  return list;
}

void bind_states(nb::module_& m) {
  m.def("merge_state", &merge_state, nb::arg("v_a").none(), nb::arg("s_a").none(), nb::arg("v_b").none(),
        nb::arg("s_b").none(), nb::kw_only(), nb::arg("out_v") = nb::none(), nb::arg("out_s") = nb::none(),
        nb::arg("lse_base") = "two", nb::arg("executor") = nb::none(),
        "Merges state a of each row with its state b:\n"
        "  m = max(s_a, s_b), w = b^(s - m), v = (w_a v_a + w_b v_b) / (w_a + w_b), s = m + log_b(w_a + w_b).\n\n"
        "Args:\n  v_a, v_b: [rows, heads, head_dim], float32, float16 or bfloat16.\n"
        "  s_a, s_b: float32 [rows, heads], base \"two\" or \"natural\"; -inf (or +inf): no keys.\n"
        "  out_v, out_s: where to write (None: made like v_a, s_a); may be v_a and s_a: in place.\n\n"
        "Returns:\n  (out_v, out_s).");
  m.def("merge_states", &merge_states, nb::arg("v").none(), nb::arg("s").none(), nb::arg("indptr").none(),
        nb::kw_only(), nb::arg("out_v") = nb::none(), nb::arg("out_s") = nb::none(), nb::arg("lse_base") = "two",
        nb::arg("executor") = nb::none(),
        "Merges groups of states: group j's are the rows [indptr[j], indptr[j+1]) of v and s.\n\n"
        "Args:\n  v: [N, heads, head_dim].  s: float32 [N, heads].  indptr: int32 [M+1].\n"
        "  out_v: [M, heads, head_dim], out_s: float32 [M, heads], or None; they must not overlap v and s.\n\n"
        "Returns:\n  (out_v, out_s); an empty group gives (0, -inf), a group of one its own bits.");
  m.def("append_kv", &append_kv, nb::arg("kv").none(), nb::arg("k").none(), nb::arg("v").none(),
        nb::arg("token_slots").none(), nb::kw_only(), nb::arg("kv_layout") = "NHD", nb::arg("k_scale") = nb::none(),
        nb::arg("v_scale") = nb::none(), nb::arg("executor") = nb::none(),
        "Writes new keys and values into one layer's cache.\n\n"
        "Args:\n  kv: as in `run`, written.\n  k: [rows, num_kv_heads, head_dim].  v: [rows, num_kv_heads, "
        "head_dim_vo].\n"
        "  token_slots: int64 [rows], page * page_size + offset; negative: skipped; slots must differ.\n"
        "  k_scale, v_scale: as in `run`; rows are divided by them where the cache is f8e4m3.");
  m.def("copy_pages", &copy_pages, nb::arg("kv").none(), nb::arg("copies"), nb::kw_only(), nb::arg("kv_layout") = "NHD",
        nb::arg("executor") = nb::none(),
        "Copies pages inside one layer's cache, before append_kv: copy-on-write.\n\n"
        "Args:\n  copies: (src, dst, num_tokens) tuples, as PagePool.prepare_append returns them.");
}

}  // namespace headwater::python
