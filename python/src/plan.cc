// Batch, Level, Planner and Plan. Page tables are read in place, with the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <utility>

#include "bindings.h"

namespace headwater::python {

WorkspaceMemory::WorkspaceMemory(std::size_t bytes)
    : data_(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kWorkspaceAlignment}))), bytes_(bytes) {}

void WorkspaceMemory::Free::operator()(std::byte* p) const noexcept {
  ::operator delete(p, std::align_val_t{kWorkspaceAlignment});
}

WorkspaceMemory PyPlan::take_workspace() {
  const std::size_t bytes = plan.workspace_size();
  const std::lock_guard lock(workspaces_mutex);
  while (!workspaces.empty()) {
    WorkspaceMemory last = std::move(workspaces.back());
    workspaces.pop_back();
    if (last.view().bytes >= bytes) return last;
  }
  // Room to grow into: the next steps' plans are a little larger.
  return WorkspaceMemory(bytes + bytes / 4 + kWorkspaceAlignment);
}

void PyPlan::give_workspace(WorkspaceMemory workspace) noexcept {
  try {
    const std::lock_guard lock(workspaces_mutex);
    workspaces.push_back(std::move(workspace));
  } catch (const std::exception&) {  // no room to remember it: it is freed
  }
}

namespace {

std::span<const std::int32_t> int32s_or_none(const Array& a) {
  return a.given() ? a.int32s() : std::span<const std::int32_t>{};
}

Array optional_array(nb::handle object, const char* name) {
  if (object.is_none()) return {};
  Array a(object, name);
  (void)a.int32s();
  return a;
}

Array int32_array(nb::handle object, const char* name) {
  Array a(object, name);
  (void)a.int32s();
  return a;
}

struct PyLevel {
  Array qo_indptr, indptr, indices, last_page_len;
  int page_size = 0;
  std::int64_t num_pages = 0;

  [[nodiscard]] Level view() const {
    return {qo_indptr.int32s(), {indptr.int32s(), indices.int32s(), last_page_len.int32s(), page_size, num_pages, -1}};
  }
};

struct PyBatch {
  Array qo_indptr, indptr, indices, last_page_len, start_page, first_offset;
  Batch view;
  std::vector<PyLevel> levels;  ///< keeps the arrays of view.levels alive
};

constexpr const char* kTableArgs =
    "  kv_indptr: int32 [B+1], in pages.\n"
    "  kv_indices: int32 [>= kv_indptr[B]], page ids in [0, num_pages).\n"
    "  kv_last_page_len: int32 [B], 1..page_size; ignored where a request has no pages.\n"
    "  page_size: tokens in a page.  num_pages: pages of the pool.\n";

/// How long plans hold what they need: until the call returns. `run` needs none of it.
struct PyPlanner {
  explicit PyPlanner(const DeviceModel& model) : planner(model) {}
  Planner planner;
  std::mutex mutex;  ///< a planner has scratch memory: one thread at a time
};

std::unique_ptr<PyPlan> make_plan(PyPlanner& self, const AttentionShape& shape, const PyBatch& batch,
                                  const std::optional<PlanOptions>& options) {
  auto made = std::make_unique<PyPlan>();
  made->shape = shape;
  made->num_levels = std::max<std::size_t>(batch.levels.size(), 1);
  const PlanOptions chosen = options.value_or(PlanOptions{});
  {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(self.mutex);
    made->plan = self.planner.plan(shape, batch.view, chosen);
  }
  made->planned = true;
  return made;
}

/// What `count` plans take without Python, nanoseconds: for bench/python_overhead.py.
double time_plans(PyPlanner& self, const AttentionShape& shape, const PyBatch& batch, const PlanOptions& options,
                  int count) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) (void)self.planner.plan(shape, batch.view, options);
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
}

void update_plan(PyPlanner& self, PyPlan& plan, const PyBatch& batch, nb::handle grown, nb::handle joined,
                 nb::handle left) {
  const bool listed = !grown.is_none() || !joined.is_none() || !left.is_none();
  const Array arrays[3] = {optional_array(grown, "grown"), optional_array(joined, "joined"),
                           optional_array(left, "left")};
  const Changes changes{int32s_or_none(arrays[0]), int32s_or_none(arrays[1]), int32s_or_none(arrays[2])};
  const nb::gil_scoped_release release;
  const std::unique_lock alone(plan.in_use, std::try_to_lock);
  if (!alone.owns_lock()) refuse("plan is being run or updated by another thread, expected nobody to use it");
  const std::lock_guard lock(self.mutex);
  self.planner.update(plan.plan, batch.view, listed ? &changes : nullptr);
  plan.num_levels = std::max<std::size_t>(batch.levels.size(), 1);
}

/// The plan for reading, while no thread updates it.
template <typename F>
auto read(PyPlan& p, F&& f) {
  const std::shared_lock shared(p.in_use, std::try_to_lock);
  if (!shared.owns_lock()) refuse("plan is being updated by another thread");
  return f(std::as_const(p.plan));
}

void bind_batch(nb::module_& m) {
  nb::class_<PyLevel>(m, "Level",
                      "One level of an explicitly given cascade (FlashInfer's form). Node j serves the query rows\n"
                      "[qo_indptr[j], qo_indptr[j+1]), which lie inside a node's rows of the level above; its tokens\n"
                      "follow its parent's.\n\n"
                      "Args:\n  qo_indptr: int32 [n+1]; the last element is the number of rows, at every level.\n"
                      "  kv_indptr, kv_indices, kv_last_page_len: as Batch's, of n nodes.")
      .def(
          "__init__",
          [](PyLevel* self, nb::object qo_indptr, nb::object kv_indptr, nb::object kv_indices,
             nb::object kv_last_page_len, int page_size, std::int64_t num_pages) {
            new (self) PyLevel{int32_array(qo_indptr, "qo_indptr"),
                               int32_array(kv_indptr, "kv_indptr"),
                               int32_array(kv_indices, "kv_indices"),
                               int32_array(kv_last_page_len, "kv_last_page_len"),
                               page_size,
                               num_pages};
          },
          nb::arg("qo_indptr").none(), nb::arg("kv_indptr").none(), nb::arg("kv_indices").none(),
          nb::arg("kv_last_page_len").none(), nb::kw_only(), nb::arg("page_size"), nb::arg("num_pages"));

  static const std::string doc =
      std::string(
          "One step's requests: query rows and page tables in CSR form. Pages that several requests name at the same\n"
          "position are shared; sharing is found by comparing ids. Arrays are read in place, by `plan` and `update`\n"
          "alone: a Batch may be kept and its arrays rewritten from step to step, but not while a call reads\n"
          "them, nor their memory be taken away (resize_).\n\n"
          "Args:\n  qo_indptr: int32 [B+1], query row offsets, qo_indptr[0] = 0.\n") +
      kTableArgs +
      "  null_page: an id that never counts as shared; -1: none.\n"
      "  kv_start_page: int32 [B] or None (0): absolute page index of a table's first entry.\n"
      "  first_page_offset: int32 [B] or None (0): first visible token within the first page.\n\n"
      "Raises:\n  InvalidArgument: an argument is no int32 vector on the CPU. Values are checked by `plan`.";
  nb::class_<PyBatch>(m, "Batch", doc.c_str())
      .def(
          "__init__",
          [](PyBatch* self, nb::object qo_indptr, nb::object kv_indptr, nb::object kv_indices,
             nb::object kv_last_page_len, int page_size, std::int64_t num_pages, int null_page,
             nb::object kv_start_page, nb::object first_page_offset) {
            PyBatch b;
            b.qo_indptr = int32_array(qo_indptr, "qo_indptr");
            b.indptr = int32_array(kv_indptr, "kv_indptr");
            b.indices = int32_array(kv_indices, "kv_indices");
            b.last_page_len = int32_array(kv_last_page_len, "kv_last_page_len");
            b.start_page = optional_array(kv_start_page, "kv_start_page");
            b.first_offset = optional_array(first_page_offset, "first_page_offset");
            b.view.qo_indptr = b.qo_indptr.int32s();
            b.view.kv = {b.indptr.int32s(), b.indices.int32s(), b.last_page_len.int32s(),
                         page_size,         num_pages,          null_page};
            b.view.kv_start_page = int32s_or_none(b.start_page);
            b.view.first_page_offset = int32s_or_none(b.first_offset);
            new (self) PyBatch(std::move(b));
          },
          nb::arg("qo_indptr").none(), nb::arg("kv_indptr").none(), nb::arg("kv_indices").none(),
          nb::arg("kv_last_page_len").none(), nb::kw_only(), nb::arg("page_size"), nb::arg("num_pages"),
          nb::arg("null_page") = -1, nb::arg("kv_start_page") = nb::none(), nb::arg("first_page_offset") = nb::none())
      .def_static(
          "from_levels",
          [](nb::sequence levels) {
            PyBatch b;
            for (nb::handle object : levels) {
              const PyLevel* level = nullptr;
              if (!nb::try_cast(object, level, false) || level == nullptr) {
                refuse("levels[" + std::to_string(b.levels.size()) + "] is of type " +
                       nb::cast<std::string>(object.type().attr("__name__")) + ", expected a Level");
              }
              b.levels.push_back(*level);
            }
            if (b.levels.empty()) refuse("levels is empty, expected at least one Level");
            for (const PyLevel& level : b.levels) b.view.levels.push_back(level.view());
            return b;
          },
          nb::arg("levels"), "A batch whose sharing is given: a sequence of Level, outermost first.")
      .def_prop_ro("num_requests", [](const PyBatch& b) {
        const auto& indptr = b.levels.empty() ? b.qo_indptr : b.levels.back().qo_indptr;
        return std::max<std::int64_t>(indptr.shape(0) - 1, 0);
      });
}

void bind_plan_class(nb::module_& m) {
  nb::class_<PlanStats>(m, "PlanStats",
                        "What a plan will do, in numbers. Bytes are of K and V together, for one layer.")
      .def_prop_ro(
          "path", [](const PlanStats& s) { return std::string(name_of(s.path)); }, "\"flat\" or \"cascade\".")
      .def_ro("num_requests", &PlanStats::num_requests)
      .def_ro("num_rows", &PlanStats::num_rows)
      .def_ro("num_items", &PlanStats::num_items)
      .def_ro("num_partials", &PlanStats::num_partials, "Partial rows, each [num_qo_heads, head_dim_vo] fp32 and LSE.")
      .def_ro("num_spans", &PlanStats::num_spans, "Spans split off for two or more requests.")
      .def_ro("shared_tokens", &PlanStats::shared_tokens, "Summed over spans.")
      .def_ro("member_sequences", &PlanStats::member_sequences, "Summed over spans.")
      .def_ro("kv_bytes_unique", &PlanStats::kv_bytes_unique, "Every distinct visible page slot once.")
      .def_ro("kv_bytes_flat", &PlanStats::kv_bytes_flat, "What the flat path reads.")
      .def_ro("kv_bytes_read", &PlanStats::kv_bytes_read, "What this plan reads.")
      .def_ro("flops", &PlanStats::flops)
      .def_ro("predicted_ps", &PlanStats::predicted_ps, "Predicted time of one layer, picoseconds.")
      .def_ro("predicted_flat_ps", &PlanStats::predicted_flat_ps);

  nb::class_<PyPlan>(
      m, "Plan",
      "A schedule; serves every layer of a step. Made by Planner.plan. Several threads may run it at the\n"
      "same time; updating it meanwhile is refused.")
      .def_prop_ro(
          "stats", [](PyPlan& p) { return read(p, [](const Plan& plan) { return plan.stats(); }); }, "PlanStats.")
      .def_ro("shape", &PyPlan::shape, "The AttentionShape it was made for.")
      .def(
          "workspace_size", [](PyPlan& p) { return read(p, [](const Plan& plan) { return plan.workspace_size(); }); },
          "Bytes of workspace that `run` needs: exact. Without a `workspace` argument the plan provides it.")
      .def(
          "describe", [](PyPlan& p) { return read(p, [](const Plan& plan) { return plan.describe(); }); },
          "What was decided and why, in words: the sharing forest, the byte model, predicted times.")
      .def(
          "to_json", [](PyPlan& p) { return read(p, [](const Plan& plan) { return plan.to_json(); }); },
          "The same as JSON (docs/plan_json.md).")
      .def(
          "serialize",
          [](PyPlan& p) {
            const std::string bytes = read(p, [](const Plan& plan) { return plan.serialize(); });
            return nb::bytes(bytes.data(), bytes.size());
          },
          "Canonical bytes of everything that `run` reads: equal bytes, equal results.")
      .def("__repr__", [](PyPlan& p) {
        const PlanStats s = read(p, [](const Plan& plan) { return plan.stats(); });
        return "<headwater.Plan " + std::string(name_of(s.path)) + ", " + std::to_string(s.num_requests) +
               " requests, " + std::to_string(s.num_items) + " items, reads " + std::to_string(s.kv_bytes_read) +
               " of " + std::to_string(s.kv_bytes_flat) + " bytes>";
      });
}

}  // namespace

void bind_plan(nb::module_& m) {
  bind_batch(m);
  bind_plan_class(m);
  m.def("_time_plans", &time_plans);
  nb::class_<PyPlanner>(
      m, "Planner",
      "Makes plans: the same input gives the same plan, byte for byte. Keeps scratch memory from plan\n"
      "to plan; threads that share one wait for each other.")
      .def(
          "__init__",
          [](PyPlanner* self, const std::optional<DeviceModel>& model) {
            new (self) PyPlanner(model ? *model : DeviceModel::default_cpu());
          },
          nb::arg("model") = nb::none(), "model: a DeviceModel; None: DeviceModel.default_cpu().")
      .def_prop_ro(
          "model", [](const PyPlanner& p) { return p.planner.model(); }, "A copy of its DeviceModel.")
      .def("plan", &make_plan, nb::arg("shape"), nb::arg("batch"), nb::arg("options") = nb::none(),
           "A plan from nothing, once per step and distinct mask.\n\n"
           "Raises:\n  InvalidArgument, InvalidPageTable, Unsupported: the message names argument and place.")
      .def("update", &update_plan, nb::arg("plan"), nb::arg("batch"), nb::kw_only(), nb::arg("grown") = nb::none(),
           nb::arg("joined") = nb::none(), nb::arg("left") = nb::none(),
           "Makes `plan` what plan(shape, batch, options) would be, byte for byte, much cheaper.\n\n"
           "Args:\n  grown: int32 [n], requests whose length grew (their earlier ids are unchanged).\n"
           "  joined: int32 [n], indices in the new batch that hold a new request.\n"
           "  left: int32 [n], indices in the old batch whose request is gone; later ones move up.\n"
           "  All None: the tables are compared.\n\n"
           "Raises:\n  as plan; the plan is then as it was.");
}

}  // namespace headwater::python
