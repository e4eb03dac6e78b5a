// What the binding files share: the registration functions, and the objects behind Plan and Executor.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "headwater/headwater.h"
#include "tensor.h"

namespace headwater::python {

void bind_errors(nb::module_& m);
void bind_options(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_states(nb::module_& m);
void bind_cache(nb::module_& m);

/// Aligned memory that a plan lends to its runs.
class WorkspaceMemory {
 public:
  explicit WorkspaceMemory(std::size_t bytes);
  [[nodiscard]] cpu::Workspace view() const noexcept { return {data_.get(), bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* p) const noexcept;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t bytes_;
};

/// A plan, guarded: runs share it, an update needs it alone and is refused while a run (in another thread, without the
/// GIL) reads it. Workspaces that the caller does not give are kept here from run to run, one per simultaneous run.
struct PyPlan {
  Plan plan;
  AttentionShape shape;
  bool planned = false;
  std::size_t num_levels = 1;
  std::shared_mutex in_use;
  std::mutex workspaces_mutex;
  std::vector<WorkspaceMemory> workspaces;

  [[nodiscard]] WorkspaceMemory take_workspace();
  void give_workspace(WorkspaceMemory workspace) noexcept;
};

/// The executor that an argument names; None: the process's pool, made at first use, with a worker for each processor
/// that the process may use.
[[nodiscard]] Executor& executor_of(nb::handle object);

}  // namespace headwater::python
