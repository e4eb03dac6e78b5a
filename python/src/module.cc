// The extension module headwater._core: errors, executors, version. What users see is re-exported by
// headwater/__init__.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <memory>

#include "bindings.h"
#ifdef HEADWATER_PYTHON_CUDA
#include "cuda.h"
#endif

namespace headwater::python {
namespace {

// Indexed by ErrorCode. The exception types live as long as the module, which is never unloaded.
std::array<PyObject*, 10> error_types{};

PyObject* new_error(nb::module_& m, const char* name, const char* doc, nb::tuple bases) {
  const std::string full = std::string("headwater._core.") + name;
  PyObject* type = PyErr_NewExceptionWithDoc(full.c_str(), doc, bases.ptr(), nullptr);
  if (type == nullptr) throw nb::python_error();
  m.attr(name) = nb::borrow(type);
  return type;
}

PyObject* type_of(ErrorCode code) {
  const auto i = static_cast<std::size_t>(code);
  PyObject* type = i < error_types.size() ? error_types[i] : nullptr;
  return type != nullptr ? type : error_types[static_cast<std::size_t>(ErrorCode::internal)];
}

/// Leaked on purpose: its threads may outlive the interpreter's shutdown, and after a fork the child must not join
/// them.
Executor* default_pool = nullptr;

}  // namespace

void bind_errors(nb::module_& m) {
  const auto slot = [](ErrorCode code) -> PyObject*& { return error_types[static_cast<std::size_t>(code)]; };
  const nb::handle value_error(PyExc_ValueError);
  const nb::handle runtime_error(PyExc_RuntimeError);
  const nb::handle base(
      new_error(m, "Error", "Base of every error of the library.", nb::make_tuple(nb::handle(PyExc_Exception))));
  const nb::handle argument(new_error(m, "InvalidArgument", "A shape, stride, dtype, option or array is wrong.",
                                      nb::make_tuple(base, value_error)));
  slot(ErrorCode::invalid_argument) = argument.ptr();
  slot(ErrorCode::invalid_page_table) =
      new_error(m, "InvalidPageTable", "qo_indptr, kv_indptr, kv_indices or kv_last_page_len is inconsistent.",
                nb::make_tuple(argument));
  slot(ErrorCode::unsupported) =
      new_error(m, "Unsupported", "Well formed, but no back end can do it; the message says why.",
                nb::make_tuple(base, nb::handle(PyExc_NotImplementedError)));
  slot(ErrorCode::workspace_too_small) =
      new_error(m, "WorkspaceTooSmall", "A workspace is smaller than plan.workspace_size(), or misaligned.",
                nb::make_tuple(argument));
  slot(ErrorCode::capacity_exceeded) =
      new_error(m, "CapacityExceeded", "A plan is beyond a fixed capacity.", nb::make_tuple(base, runtime_error));
  slot(ErrorCode::out_of_pages) = new_error(m, "OutOfPages", "The page pool has too few free pages; nothing was taken.",
                                            nb::make_tuple(base, runtime_error));
  slot(ErrorCode::io) =
      new_error(m, "IoError", "A file could not be read or is malformed.", nb::make_tuple(base, runtime_error));
  slot(ErrorCode::device) =
      new_error(m, "DeviceError", "A device reported an error.", nb::make_tuple(base, runtime_error));
  slot(ErrorCode::internal) =
      new_error(m, "InternalError", "A defect of the library.", nb::make_tuple(base, runtime_error));
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Error& e) {
      PyErr_SetString(type_of(e.code()), e.what());
    }
  });
}

Executor& executor_of(nb::handle object) {
  if (object.is_none()) {
    if (default_pool == nullptr) default_pool = new ThreadPool();  // under the GIL
    return *default_pool;
  }
  Executor* executor = nullptr;
  if (!nb::try_cast(object, executor, false) || executor == nullptr) {
    refuse("executor is of type " + nb::cast<std::string>(object.type().attr("__name__")) +
           ", expected a ThreadPool, a SerialExecutor or None");
  }
  return *executor;
}

}  // namespace headwater::python

NB_MODULE(_core, m) {
  using namespace headwater;
  using namespace headwater::python;
  m.doc() = "Bindings of the C++ library; import them from `headwater`.";
  bind_errors(m);

  nb::class_<Executor>(m, "Executor", "Workers that run attention. Make a ThreadPool or a SerialExecutor.")
      .def_prop_ro("num_workers", &Executor::num_workers, "Number of workers, at least 1.");
  nb::class_<ThreadPool, Executor>(
      m, "ThreadPool",
      "A pool of num_workers - 1 threads and the caller; idle threads spin for about half a millisecond, then "
      "sleep.\n\n"
      "One process should have one set of workers: functions whose `executor` is None share one pool. A call while\n"
      "another thread uses the pool runs on its caller alone.")
      .def(
          "__init__",
          [](ThreadPool* self, int num_workers) {
            if (num_workers < 0 || num_workers > 1024) {
              refuse("num_workers = " + std::to_string(num_workers) + ", expected 0..1024");
            }
            new (self) ThreadPool(num_workers);
          },
          nb::arg("num_workers") = 0, "num_workers = 0: one for each processor that the process may use.");
  nb::class_<SerialExecutor, Executor>(m, "SerialExecutor", "Runs everything on the calling thread.").def(nb::init<>());
  m.def(
      "_forget_default_pool", [] { default_pool = nullptr; }, "After a fork: the pool's threads are the parent's.");

  bind_options(m);
  bind_plan(m);
  bind_attention(m);
  bind_states(m);
  bind_cache(m);
#ifdef HEADWATER_PYTHON_CUDA
  nb::module_ device = m.def_submodule("cuda", "The CUDA back end; import it from `headwater.cuda`.");
  bind_cuda_plans(device);
  bind_cuda_calls(device);
#endif

  m.def(
      "detect_isa", [] { return std::string(name_of(cpu::detect_isa())); },
      "Highest instruction-set level of this processor: \"scalar\", \"avx2\", \"avx512\" or \"avx512_bf16\".");
  m.def(
      "default_isa", [] { return std::string(name_of(cpu::default_isa())); },
      "The level that `run` uses when none is forced.");
  m.attr("__version__") = version();
}
