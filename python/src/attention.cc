// run: attention by a plan, on arrays imported for the call or prepared once (RunArgs).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "run_args.h"

namespace headwater::python {
namespace {

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
  a.check_shapes(plan.shape, plan.plan.stats().num_rows, "rows of the plan");
  const std::vector<KvCache> caches = a.views(plan.num_levels);
  cpu::RunArgs args;
  a.fill(args);
  args.kv = caches;
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
  a.check_shapes(plan.shape, plan.plan.stats().num_rows, "rows of the plan");
  const std::vector<KvCache> caches = a.views(plan.num_levels);
  const Loan loan(plan);
  cpu::RunArgs args;
  a.fill(args);
  args.kv = caches;
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
  a.import_rest(kv, kv_layout, {lse, alibi_slopes, sinks, k_scale, v_scale}, lse_base, include_sink, kHost);
  if (isa) a.isa = parse_isa(*isa, "isa");
  run_prepared(plan, a, workspace, executor);
  if (!return_lse) return out;
  return nb::make_tuple(out, lse);
}

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
      kRunArgsDoc;
  nb::class_<PyRunArgs>(m, "RunArgs", args_doc.c_str())
      .def(
          "__init__",
          [](PyRunArgs* self, nb::object q, nb::object kv, nb::object out, nb::object lse, const std::string& kv_layout,
             const std::string& lse_base, nb::object alibi_slopes, nb::object sinks, bool include_sink,
             nb::object k_scale, nb::object v_scale, const std::optional<std::string>& isa) {
            PyRunArgs a;
            a.q = Rows(q, "q", Array::Access::read);
            a.out = Rows(out, "out", Array::Access::write);
            a.import_rest(kv, kv_layout, {lse, alibi_slopes, sinks, k_scale, v_scale}, lse_base, include_sink, kHost);
            if (isa) a.isa = parse_isa(*isa, "isa");
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
      kRunArgsDoc +
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
