// Device models, capacities, plans on a device and the planner there. Objects are tied to the device that was current,
// or named, when they were made; calls make it current for their duration.
#include <cuda_runtime_api.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>

#include "cuda.h"

namespace headwater::python {
namespace {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw Error(ErrorCode::device, std::string(call) + ": " + cudaGetErrorString(status));
}

/// A planner on a device. Its scratch memory belongs to one stream, so to one thread at a time.
struct PyDevicePlanner {
  int device;
  cuda::DeviceTableLimits limits;
  cuda::DevicePlanner planner;
  std::mutex mutex;

  PyDevicePlanner(const AttentionShape& shape, const PlanOptions& options, const cuda::DeviceTableLimits& its_limits,
                  const std::optional<DeviceModel>& model, int its_device)
      : device(its_device),
        limits(its_limits),
        planner(model ? cuda::DevicePlanner(shape, options, its_limits, *model)
                      : cuda::DevicePlanner(shape, options, its_limits)) {}
  ~PyDevicePlanner();
};

/// Frees device memory on its own device.
template <class T>
void destroy_on(int device, T& object) {
  int before = 0;
  const bool known = cudaGetDevice(&before) == cudaSuccess;
  if (known && before != device) cudaSetDevice(device);
  { const T gone = std::move(object); }
  if (known && before != device) cudaSetDevice(before);
}

PyDevicePlanner::~PyDevicePlanner() {
  destroy_on(device, planner);
}

void upload(PyDevicePlan& self, PyPlan& plan, nb::handle stream) {
  const cuda::Stream on = stream_of(stream, nb::handle(), self.device);
  const nb::gil_scoped_release release;
  const std::unique_lock alone(self.in_use, std::try_to_lock);
  if (!alone.owns_lock()) refuse("this DevicePlan is in use by another thread, expected nobody to use it");
  const std::shared_lock shared(plan.in_use, std::try_to_lock);
  if (!shared.owns_lock()) refuse("plan is being updated by another thread, expected nobody to change it");
  const DeviceGuard guard(self.device);
  self.plan.upload(plan.plan, on);
  self.num_levels = plan.num_levels;
  self.least_rows = 0;
}

/// A device vector of int32, of `size` elements.
Array device_vector(nb::handle object, const char* name, int device, std::int64_t size, const char* what) {
  Array a(object, name, Array::Access::read, device);
  (void)a.int32s();
  a.expect_shape(0, size, what);
  return a;
}

/// Rows that the step may have: all of the limit, unless the caller states fewer.
std::int64_t rows_of_step(const cuda::DeviceTableLimits& limits, std::int64_t requests, bool one_each,
                          std::optional<std::int64_t> max_rows) {
  if (one_each) {
    if (max_rows) refuse("max_rows is given, expected None without qo_indptr: every request has one row");
    return requests;
  }
  const std::int64_t most = limits.max_rows > 0 ? limits.max_rows : limits.max_requests;
  if (!max_rows) return most;
  if (*max_rows < 0 || *max_rows > most) {
    refuse("max_rows = " + std::to_string(*max_rows) + ", expected 0.." + std::to_string(most) +
           " (max_rows of the planner)");
  }
  return *max_rows;
}

bool is_capturing(cuda::Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void plan_tables(PyDevicePlanner& self, PyDevicePlan& plan, nb::object block_table, nb::handle lengths,
                 nb::handle qo_indptr, std::optional<std::int64_t> max_rows, nb::handle stream) {
  const Array table(block_table, "block_table", Array::Access::read, self.device);
  table.expect_rank(2, "[requests, blocks]");
  table.expect_int32_rows();
  const std::int64_t requests = table.shape(0);
  if (table.shape(1) != self.limits.max_blocks) table.expect_shape(1, self.limits.max_blocks, "max_blocks");
  if (requests > self.limits.max_requests) {
    refuse("block_table.shape[0] = " + std::to_string(requests) + ", expected at most " +
           std::to_string(self.limits.max_requests) + " (max_requests)");
  }
  if (requests > 1 && table.stride(0) < table.shape(1)) {
    refuse("block_table has " + std::to_string(table.stride(0)) + " elements from row to row, expected at least " +
           std::to_string(table.shape(1)) + " (max_blocks): pass block_table.contiguous()");
  }
  const Array sizes = device_vector(lengths, "lengths", self.device, requests, "requests of block_table");
  Array rows;
  if (!qo_indptr.is_none()) {
    rows = device_vector(qo_indptr, "qo_indptr", self.device, requests + 1, "requests of block_table + 1");
  }
  if (plan.device != self.device) {
    refuse("plan is on CUDA device " + std::to_string(plan.device) + ", expected " + std::to_string(self.device));
  }
  cuda::DeviceTables tables;
  tables.block_table = static_cast<const std::int32_t*>(table.data());
  tables.row_stride = requests > 1 ? table.stride(0) : 0;
  tables.lengths = static_cast<const std::int32_t*>(sizes.data());
  tables.qo_indptr = rows.given() ? static_cast<const std::int32_t*>(rows.data()) : nullptr;
  tables.num_requests = static_cast<int>(requests);
  const std::int64_t least_rows = rows_of_step(self.limits, requests, !rows.given(), max_rows);
  const cuda::Stream on = stream_of(stream, block_table, self.device);
  const std::unique_lock alone(plan.in_use, std::try_to_lock);
  if (!alone.owns_lock()) refuse("plan is in use by another thread, expected nobody to use it");
  bool captured = false;
  {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(self.mutex);
    const DeviceGuard guard(self.device);
    captured = is_capturing(on);
    self.planner.plan(plan.plan, tables, on);
    plan.num_levels = 1;
    plan.least_rows = least_rows;
  }
  // A graph's own table is the graph's: what outlives a capture confuses the pools of torch.compile.
  if (!captured) plan.block_table = std::move(block_table);
}

/// Copies at most as much of `from` as `out` has room for; neither waits nor allocates.
void copy_out(const PyDevicePlanner& self, const void* from, std::size_t bytes, nb::handle out, nb::handle stream) {
  const Array to(out, "out", Array::Access::write, kAnyDevice);
  if (to.device() >= 0 && to.device() != self.device) {
    refuse("out is on CUDA device " + std::to_string(to.device()) + ", expected " + std::to_string(self.device) +
           " or pinned memory of the host");
  }
  const auto room = to.bytes();
  if (room.size() > bytes) {
    refuse("out has " + std::to_string(room.size()) + " bytes, expected at most " + std::to_string(bytes));
  }
  const cuda::Stream on = stream_of(stream, out, self.device);
  const nb::gil_scoped_release release;
  const DeviceGuard guard(self.device);
  check(cudaMemcpyAsync(room.data(), from, room.size(), cudaMemcpyDefault, on), "cudaMemcpyAsync");
}

void bind_capacity(nb::module_& m) {
  nb::class_<cuda::Capacity>(
      m, "Capacity",
      "Greatest sizes of the plans that a DevicePlan can hold: query rows, page ids of all work\n"
      "items, work items, partial states.")
      .def(
          "__init__",
          [](cuda::Capacity* self, std::int64_t max_rows, std::int64_t max_page_ids, std::int64_t max_items,
             std::int64_t max_partials) {
            new (self) cuda::Capacity{max_rows, max_page_ids, max_items, max_partials};
          },
          nb::arg("max_rows"), nb::arg("max_page_ids"), nb::arg("max_items"), nb::arg("max_partials"))
      .def_rw("max_rows", &cuda::Capacity::max_rows)
      .def_rw("max_page_ids", &cuda::Capacity::max_page_ids)
      .def_rw("max_items", &cuda::Capacity::max_items)
      .def_rw("max_partials", &cuda::Capacity::max_partials)
      .def_static(
          "of",
          [](PyPlan& plan) {
            const std::shared_lock shared(plan.in_use, std::try_to_lock);
            if (!shared.owns_lock()) refuse("plan is being updated by another thread");
            return cuda::Capacity::of(plan.plan);
          },
          nb::arg("plan"), "Of one Plan, exactly.")
      .def_static(
          "within",
          [](const AttentionShape& shape, const std::optional<PlanOptions>& options, std::int64_t max_requests,
             std::int64_t max_rows, std::int64_t max_pages, int page_size, int max_shared_spans, bool same_start,
             const std::optional<DeviceModel>& model) {
            const cuda::PlanBounds bounds{max_requests, max_rows, max_pages, page_size, max_shared_spans, same_start};
            return cuda::Capacity::within(bounds, shape, options.value_or(PlanOptions{}),
                                          model ? *model : cuda::device_model(shape));
          },
          nb::arg("shape"), nb::arg("options") = nb::none(), nb::kw_only(), nb::arg("max_requests"),
          nb::arg("max_rows"), nb::arg("max_pages"), nb::arg("page_size") = 16, nb::arg("max_shared_spans") = 0,
          nb::arg("same_start") = true, nb::arg("model") = nb::none(),
          "Of every plan within bounds that a planner with this model makes, whatever the policy: safe, not exact.\n\n"
          "Args:\n  max_requests, max_rows: requests and query rows of a step.  max_pages: of one request.\n"
          "  max_shared_spans: spans that rows of one request share with others one after the other; 0: any number.\n"
          "  same_start: no kv_start_page or first_page_offset, or the same for all.\n"
          "  model: the planner's; None: device_model(shape).")
      .def(
          "workspace_size",
          [](const cuda::Capacity& c, const AttentionShape& shape) { return cuda::workspace_size(shape, c); },
          nb::arg("shape"), "Bytes of workspace for any plan within the capacity: exact.")
      .def("__repr__", [](const cuda::Capacity& c) {
        return "Capacity(max_rows=" + std::to_string(c.max_rows) + ", max_page_ids=" + std::to_string(c.max_page_ids) +
               ", max_items=" + std::to_string(c.max_items) + ", max_partials=" + std::to_string(c.max_partials) + ")";
      });
}

void bind_device_plan(nb::module_& m) {
  nb::class_<PyDevicePlan>(
      m, "DevicePlan",
      "A place on a device for plans of one shape, one plan at a time in force. Allocates when it is made and never\n"
      "later. It belongs to one stream, and to the host's plans (upload) or a DevicePlanner's, never both in turn.\n"
      "Keep it as long as a graph that captured it; freeing it while another graph is captured breaks that capture.\n\n"
      "Args:\n  shape: AttentionShape.  capacity: Capacity.\n  device: number of the device; None: the current one.")
      .def(
          "__init__",
          [](PyDevicePlan* self, const AttentionShape& shape, const cuda::Capacity& capacity, nb::handle device) {
            const int on = device_of(device);
            const DeviceGuard guard(on);
            new (self) PyDevicePlan(shape, capacity, on);
          },
          nb::arg("shape"), nb::arg("capacity"), nb::kw_only(), nb::arg("device") = nb::none())
      .def(
          "upload", &upload, nb::arg("plan"), nb::kw_only(), nb::arg("stream") = nb::none(),
          "Puts a host Plan in force for what follows on `stream`: an asynchronous copy from pinned memory, not to be\n"
          "captured. `plan` may change when this returns. sm_scale, logits_soft_cap, num_sink_tokens, alibi, sinks "
          "and\n"
          "page sizes must be those of the first plan. stream None: torch's current one where torch is imported.\n\n"
          "Raises:\n  CapacityExceeded naming the field; InvalidArgument, Unsupported, DeviceError. The plan in force\n"
          "  stays as it was.")
      .def(
          "workspace_size", [](const PyDevicePlan& p) { return p.plan.workspace_size(); },
          "Bytes of workspace that `run` needs, for every plan within the capacity: exact.")
      .def_prop_ro(
          "capacity", [](const PyDevicePlan& p) { return p.plan.capacity(); }, "A copy of its Capacity.")
      .def_prop_ro(
          "stats", [](const PyDevicePlan& p) { return p.plan.stats(); },
          "PlanStats of the plan that was uploaded last; zeros for plans made on the device.")
      .def_ro("shape", &PyDevicePlan::shape)
      .def_ro("device", &PyDevicePlan::device, "Number of the device.");
}

void bind_device_planner(nb::module_& m) {
  nb::class_<PyDevicePlanner>(
      m, "DevicePlanner",
      "Makes plans on the device, from tables that the host does not see: one launch, which a graph may hold together\n"
      "with the runs that follow. Policies auto, flat, forest; no windows, local chunks, sink tokens or\n"
      "batch-invariance. Allocates when it is made and never later. It and its plans belong to one stream.\n\n"
      "Args:\n  shape, options: as Planner.plan's.\n  max_requests: rows of the block table.  max_blocks: its "
      "columns.\n"
      "  num_pages: pages of the pool.  page_size: tokens.\n  max_rows: query rows of a step; 0: max_requests.\n"
      "  null_page: an id that never counts as shared; -1: none.\n  model: None: device_model(shape).\n\n"
      "Raises:\n  Unsupported with the reason, InvalidArgument, DeviceError.")
      .def(
          "__init__",
          [](PyDevicePlanner* self, const AttentionShape& shape, const std::optional<PlanOptions>& options,
             int max_requests, int max_blocks, std::int64_t num_pages, int page_size, int max_rows, int null_page,
             const std::optional<DeviceModel>& model, nb::handle device) {
            const int on = device_of(device);
            const DeviceGuard guard(on);
            const cuda::DeviceTableLimits limits{max_requests, max_blocks, max_rows, page_size, num_pages, null_page};
            new (self) PyDevicePlanner(shape, options.value_or(PlanOptions{}), limits, model, on);
          },
          nb::arg("shape"), nb::arg("options") = nb::none(), nb::kw_only(), nb::arg("max_requests"),
          nb::arg("max_blocks"), nb::arg("num_pages"), nb::arg("page_size") = 16, nb::arg("max_rows") = 0,
          nb::arg("null_page") = -1, nb::arg("model") = nb::none(), nb::arg("device") = nb::none())
      .def_prop_ro(
          "capacity", [](const PyDevicePlanner& p) { return p.planner.capacity(); }, "For its DevicePlans.")
      .def_ro("device", &PyDevicePlanner::device)
      .def("plan", &plan_tables, nb::arg("plan"), nb::arg("block_table").none(), nb::arg("lengths").none(),
           nb::arg("qo_indptr") = nb::none(), nb::kw_only(), nb::arg("max_rows") = nb::none(),
           nb::arg("stream") = nb::none(),
           "Launches: what the tables hold when the launch runs becomes the plan in force of `plan` for what follows "
           "on\n"
           "`stream`. What is wrong in the tables themselves gives a flat plan and is told by the status.\n\n"
           "Args:\n  plan: DevicePlan.\n"
           "  block_table: int32 [requests, max_blocks] page ids, rows that do not overlap. Columns past\n"
           "    ceil(length / page_size) are never read. Runs read ids from it: it must stay as it is until they are "
           "done.\n"
           "    `plan` keeps it alive until the next plan; while a graph is captured the caller does.\n"
           "  lengths: int32 [requests] tokens of K and V; 0: a padded request.\n"
           "  qo_indptr: int32 [requests + 1], query rows; None: one each.\n"
           "  max_rows: with qo_indptr, a bound that its last entry keeps, now and in replays, which nobody checks;\n"
           "    None: the planner's. Runs refuse a q of fewer rows (without qo_indptr: of fewer than requests).")
      .def(
          "copy_status",
          [](const PyDevicePlanner& p, nb::handle out, nb::handle stream) {
            copy_out(p, p.planner.status(), sizeof(cuda::DevicePlanStatus), out, stream);
          },
          nb::arg("out").none(), nb::kw_only(), nb::arg("stream") = nb::none(),
          "Copies, asynchronously, what became of the last plan (32 bytes; headwater.cuda.PlanStatus reads them) to "
          "`out`:\n"
          "contiguous memory of the device, or of the host, then pinned.")
      .def(
          "copy_spans",
          [](const PyDevicePlanner& p, nb::handle out, nb::handle stream) {
            copy_out(p, p.planner.spans(), sizeof(cuda::DeviceSpan) * static_cast<std::size_t>(p.limits.max_requests),
                     out, stream);
          },
          nb::arg("out").none(), nb::kw_only(), nb::arg("stream") = nb::none(),
          "The same for the spans that were split off: int32 [<= max_requests, 5], pos_begin, num_tokens, "
          "member_begin,\n"
          "num_members, depth. The first num_spans of them are valid.")
      .def(
          "copy_span_members",
          [](const PyDevicePlanner& p, nb::handle out, nb::handle stream) {
            copy_out(p, p.planner.span_members(),
                     sizeof(std::int32_t) * static_cast<std::size_t>(p.limits.max_requests), out, stream);
          },
          nb::arg("out").none(), nb::kw_only(), nb::arg("stream") = nb::none(),
          "The same for the requests that are members of spans: int32 [<= max_requests].");
}

}  // namespace

PyDevicePlan::PyDevicePlan(const AttentionShape& its_shape, const cuda::Capacity& capacity, int its_device)
    : shape(its_shape), device(its_device), plan(its_shape, capacity) {}

PyDevicePlan::~PyDevicePlan() {
  destroy_on(device, plan);
}

DeviceGuard::DeviceGuard(int device) {
  check(cudaGetDevice(&before_), "cudaGetDevice");
  check(cudaSetDevice(device), "cudaSetDevice");
}

DeviceGuard::~DeviceGuard() {
  cudaSetDevice(before_);
}

int device_of(nb::handle device) {
  int number = 0;
  if (device.is_none()) {
    check(cudaGetDevice(&number), "cudaGetDevice");
    return number;
  }
  nb::object named = nb::borrow(device);
  if (nb::hasattr(device, "index")) named = device.attr("index");  // torch.device("cuda", 1)
  if (named.is_none()) return device_of(named);
  const int count = cuda::num_devices();
  if (!nb::try_cast(named, number, false) || number < 0 || number >= count) {
    refuse("device = " + nb::cast<std::string>(nb::repr(device)) + ", expected None or 0.." +
           std::to_string(count - 1));
  }
  return number;
}

cuda::Stream stream_of(nb::handle stream, nb::handle like, int device) {
  nb::object named = nb::borrow(stream);
  if (stream.is_none()) {
    named = nb::module_::import_("headwater._streams")
                .attr("current")(like.is_valid() ? nb::borrow(like) : nb::none(), device);
  } else {
    for (const char* attribute : {"cuda_stream", "ptr"}) {
      if (nb::hasattr(stream, attribute)) named = stream.attr(attribute);
    }
  }
  std::uintptr_t handle = 0;
  if (!nb::try_cast(named, handle, false)) {
    refuse("stream is of type " + nb::cast<std::string>(stream.type().attr("__name__")) +
           ", expected an int, a torch or cupy stream, or None");
  }
  return reinterpret_cast<cuda::Stream>(handle);
}

void bind_cuda_plans(nb::module_& m) {
  m.def("num_devices", &cuda::num_devices, "CUDA devices that this process can use; 0 also where there is no driver.");
  m.def(
      "device_model",
      [](const AttentionShape& shape, nb::handle device) {
        const DeviceGuard guard(device_of(device));
        return cuda::device_model(shape);
      },
      nb::arg("shape"), nb::kw_only(), nb::arg("device") = nb::none(),
      "Cost-model constants for Planner(model), for plans that the device is to run.");
  m.def(
      "check_supported",
      [](const AttentionShape& shape, const std::optional<PlanOptions>& options, int page_size) {
        Batch batch;
        batch.kv.page_size = page_size;
        cuda::check_supported(shape, options.value_or(PlanOptions{}), batch);
      },
      nb::arg("shape"), nb::arg("options") = nb::none(), nb::arg("page_size") = 16,
      "Raises Unsupported with the reason if no kernel of this build serves the combination. Needs no device.");
  m.def("h200_model", &cuda::h200_model, nb::arg("shape"), "The same for an NVIDIA H200, whatever this machine has.");
  m.def("model_for_shape", &cuda::model_for_shape, nb::arg("one_head"), nb::arg("shape"),
        "A model that was measured (`headwater calibrate --device cuda`) for plans of this shape.");
  bind_capacity(m);
  bind_device_plan(m);
  bind_device_planner(m);
}

}  // namespace headwater::python
