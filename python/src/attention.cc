// run: attention by a plan, on arrays imported for the call or prepared once (RunArgs).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "bindings.h"

namespace headwater::python {
namespace {

/// Imported arrays of one attention call. What depends on a plan is checked at each run; the rest is done once.
struct PyRunArgs {
  Rows q;
  std::vector<Cache> caches;
  Rows out;
  std::optional<Lse> lse;
  Array alibi_slopes;
  Array sinks;
  ScaleArg k_scale;
  ScaleArg v_scale;
  bool include_sink = true;
  std::optional<Isa> isa;
};

struct Optional {
  nb::handle lse;
  nb::handle alibi_slopes;
  nb::handle sinks;
  nb::handle k_scale;
  nb::handle v_scale;
};

void import_caches(PyRunArgs& a, nb::handle kv, bool nhd) {
  if (!nb::isinstance<nb::list>(kv)) {
    a.caches.emplace_back(kv, "kv", nhd, Array::Access::read);
    return;
  }
  std::size_t i = 0;
  for (nb::handle level : nb::borrow<nb::list>(kv)) {
    a.caches.emplace_back(level, "kv[" + std::to_string(i++) + "]", nhd, Array::Access::read);
  }
  if (a.caches.empty()) refuse("kv is an empty list, expected a cache for each level");
}

/// Everything but q and out.
void import_rest(PyRunArgs& a, nb::handle kv, const std::string& kv_layout, const Optional& given,
                 const std::string& lse_base, bool include_sink, const std::optional<std::string>& isa) {
  import_caches(a, kv, parse_nhd(kv_layout));
  const LseBase base = parse_base(lse_base, "lse_base");
  if (!given.lse.is_none()) a.lse.emplace(given.lse, "lse", base, Array::Access::write);
  if (!given.alibi_slopes.is_none()) a.alibi_slopes = Array(given.alibi_slopes, "alibi_slopes");
  if (!given.sinks.is_none()) a.sinks = Array(given.sinks, "sinks");
  if (a.alibi_slopes.given()) (void)a.alibi_slopes.floats();
  if (a.sinks.given()) (void)a.sinks.floats();
  a.k_scale = ScaleArg(given.k_scale, "k_scale");
  a.v_scale = ScaleArg(given.v_scale, "v_scale");
  a.include_sink = include_sink;
  if (isa) a.isa = parse_isa(*isa, "isa");
}

void check_rows_of(const Rows& rows, std::int64_t num_rows, int heads, int head_dim) {
  rows.array.expect_shape(0, num_rows, "rows of the plan");
  rows.array.expect_shape(1, heads, "num_qo_heads");
  rows.array.expect_shape(2, head_dim, "head_dim");
}

void check_heads_vector(const Array& a, int heads) {
  if (a.given()) a.expect_shape(0, heads, "num_qo_heads");
}

void check_shapes(const PyPlan& plan, const PyRunArgs& a) {
  const AttentionShape& shape = plan.shape;
  const std::int64_t rows = plan.plan.stats().num_rows;
  check_rows_of(a.q, rows, shape.num_qo_heads, shape.head_dim_qk);
  check_rows_of(a.out, rows, shape.num_qo_heads, shape.head_dim_vo);
  if (a.lse) {
    a.lse->array.expect_shape(0, rows, "rows of the plan");
    a.lse->array.expect_shape(1, shape.num_qo_heads, "num_qo_heads");
  }
  check_heads_vector(a.alibi_slopes, shape.num_qo_heads);
  check_heads_vector(a.sinks, shape.num_qo_heads);
  for (const Cache& cache : a.caches) {
    const bool same = cache.num_kv_heads == shape.num_kv_heads && cache.head_dim_qk == shape.head_dim_qk &&
                      cache.head_dim_vo == shape.head_dim_vo;
    if (same) continue;
    refuse(cache.k.name() + " has " + std::to_string(cache.num_kv_heads) + " KV heads of sizes " +
           std::to_string(cache.head_dim_qk) + " and " + std::to_string(cache.head_dim_vo) + " (k and v), expected " +
           std::to_string(shape.num_kv_heads) + " of " + std::to_string(shape.head_dim_qk) + " and " +
           std::to_string(shape.head_dim_vo) + " as the plan");
  }
}

const float* pointer_of(const Array& a) noexcept {
  return a.given() ? static_cast<const float*>(a.data()) : nullptr;
}

/// Gives the workspace back whatever happens.
class Loan {
 public:
  explicit Loan(PyPlan& plan) : plan_(plan), memory_(plan.take_workspace()) {}
  ~Loan() { plan_.give_workspace(std::move(memory_)); }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  [[nodiscard]] cpu::Workspace view() const noexcept { return memory_.view(); }

 private:
  PyPlan& plan_;
  WorkspaceMemory memory_;
};

cpu::RunOutcome run_prepared(PyPlan& plan, const PyRunArgs& a, nb::handle workspace, nb::handle executor) {
  Executor& workers = executor_of(executor);
  Array memory;
  if (!workspace.is_none()) memory = Array(workspace, "workspace", Array::Access::write);
  const std::span<std::byte> bytes = memory.given() ? memory.bytes() : std::span<std::byte>{};
  const std::shared_lock shared(plan.in_use, std::try_to_lock);
  if (!shared.owns_lock()) refuse("plan is being updated by another thread, expected nobody to change it");
  check_shapes(plan, a);

  std::vector<KvCache> caches;
  caches.reserve(plan.num_levels);
  for (const Cache& cache : a.caches) caches.push_back(cache.view);
  if (caches.size() == 1) caches.resize(plan.num_levels, caches.front());  // every level in one pool
  cpu::RunArgs args;
  args.q = a.q.read();
  args.kv = caches;
  args.out = a.out.view;
  if (a.lse) args.lse = a.lse->view;
  args.alibi_slopes = pointer_of(a.alibi_slopes);
  args.sinks = pointer_of(a.sinks);
  args.include_sink = a.include_sink;
  args.k_scale = a.k_scale.view();
  args.v_scale = a.v_scale.view();
  args.isa = a.isa;
  if (memory.given()) {
    args.workspace = {bytes.data(), bytes.size()};
    const nb::gil_scoped_release release;
    return cpu::run(plan.plan, args, workers);
  }
  const Loan loan(plan);
  args.workspace = loan.view();
  const nb::gil_scoped_release release;
  return cpu::run(plan.plan, args, workers);
}

/// What `count` runs take without Python, nanoseconds: for bench/python_overhead.py.
double time_runs(PyPlan& plan, const PyRunArgs& a, nb::handle executor, int count) {
  Executor& workers = executor_of(executor);
  check_shapes(plan, a);
  const std::vector<KvCache> caches(plan.num_levels, a.caches.front().view);
  const Loan loan(plan);
  cpu::RunArgs args;
  args.q = a.q.read();
  args.kv = caches;
  args.out = a.out.view;
  args.workspace = loan.view();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) cpu::run(plan.plan, args, workers);
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
}

nb::object run(PyPlan& plan, nb::object q, nb::object kv, nb::object out, nb::object lse, bool return_lse,
               const std::string& kv_layout, const std::string& lse_base, nb::object alibi_slopes, nb::object sinks,
               bool include_sink, nb::object k_scale, nb::object v_scale, nb::object workspace, nb::object executor,
               const std::optional<std::string>& isa) {
  PyRunArgs a;
  a.q = Rows(q, "q", Array::Access::read);
  const std::int64_t rows = a.q.rows();
  if (out.is_none()) out = empty_like(q, {rows, a.q.heads(), plan.shape.head_dim_vo}, plan.shape.out_dtype);
  a.out = Rows(out, "out", Array::Access::write);
  if (return_lse && lse.is_none()) lse = empty_like(q, {rows, a.q.heads()}, DType::f32);
  import_rest(a, kv, kv_layout, {lse, alibi_slopes, sinks, k_scale, v_scale}, lse_base, include_sink, isa);
  run_prepared(plan, a, workspace, executor);
  if (!return_lse) return out;
  return nb::make_tuple(out, lse);
}

const char* const kArgsDoc =
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

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<cpu::RunOutcome>(m, "RunOutcome", "What a run did.")
      .def_prop_ro("path", [](const cpu::RunOutcome& o) { return std::string(name_of(o.path)); })
      .def_prop_ro("isa", [](const cpu::RunOutcome& o) { return std::string(name_of(o.isa)); })
      .def_ro("items", &cpu::RunOutcome::items, "Work items executed.")
      .def_ro("kv_bytes_read", &cpu::RunOutcome::kv_bytes_read, "K and V bytes, summed over executed items.")
      .def_ro("merged_rows", &cpu::RunOutcome::merged_rows);

  static const std::string args_doc =
      std::string(
          "Arrays of an attention call, imported and checked once, for callers that run the same buffers step after\n"
          "step: `run(plan, args)`. Keeps the arrays alive; their memory must not be resized.\n\nArgs:\n") +
      kArgsDoc;
  nb::class_<PyRunArgs>(m, "RunArgs", args_doc.c_str())
      .def(
          "__init__",
          [](PyRunArgs* self, nb::object q, nb::object kv, nb::object out, nb::object lse, const std::string& kv_layout,
             const std::string& lse_base, nb::object alibi_slopes, nb::object sinks, bool include_sink,
             nb::object k_scale, nb::object v_scale, const std::optional<std::string>& isa) {
            PyRunArgs a;
            a.q = Rows(q, "q", Array::Access::read);
            a.out = Rows(out, "out", Array::Access::write);
            import_rest(a, kv, kv_layout, {lse, alibi_slopes, sinks, k_scale, v_scale}, lse_base, include_sink, isa);
            new (self) PyRunArgs(std::move(a));
          },
          nb::arg("q").none(), nb::arg("kv").none(), nb::arg("out").none(), nb::kw_only(), nb::arg("lse") = nb::none(),
          nb::arg("kv_layout") = "NHD", nb::arg("lse_base") = "two", nb::arg("alibi_slopes") = nb::none(),
          nb::arg("sinks") = nb::none(), nb::arg("include_sink") = true, nb::arg("k_scale") = nb::none(),
          nb::arg("v_scale") = nb::none(), nb::arg("isa") = nb::none());

  m.def("run", &run_prepared, nb::arg("plan"), nb::arg("args"), nb::kw_only(), nb::arg("workspace") = nb::none(),
        nb::arg("executor") = nb::none(), "Attention on prepared arrays; returns what was done (RunOutcome).");
  m.def("_time_runs", &time_runs, nb::arg("plan"), nb::arg("args"), nb::arg("executor").none(), nb::arg("count"));
  static const std::string run_doc =
      std::string(
          "out = softmax(scores(q, k) + mask) v for every row of the plan (formulas: PlanOptions). Exact: partial\n"
          "results over shared pages are merged by log-sum-exp. A row without a visible key gives 0 and "
          "-inf.\n\nArgs:\n"
          "  plan: for these requests.\n") +
      kArgsDoc +
      "  workspace: bytes, aligned to 64, at least plan.workspace_size(); None: the plan has its own.\n"
      "  executor: ThreadPool, SerialExecutor or None (one pool for the process).\n\n"
      "Returns:\n  out (made in q's framework where None was given), or (out, lse) with return_lse.\n\n"
      "Raises:\n  InvalidArgument, WorkspaceTooSmall: before anything is written. The GIL is released while running.";
  m.def("run", &run, nb::arg("plan"), nb::arg("q").none(), nb::arg("kv").none(), nb::arg("out") = nb::none(),
        nb::kw_only(), nb::arg("lse") = nb::none(), nb::arg("return_lse") = false, nb::arg("kv_layout") = "NHD",
        nb::arg("lse_base") = "two", nb::arg("alibi_slopes") = nb::none(), nb::arg("sinks") = nb::none(),
        nb::arg("include_sink") = true, nb::arg("k_scale") = nb::none(), nb::arg("v_scale") = nb::none(),
        nb::arg("workspace") = nb::none(), nb::arg("executor") = nb::none(), nb::arg("isa") = nb::none(),
        run_doc.c_str());
}

}  // namespace headwater::python
