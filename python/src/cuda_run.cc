// Calls on the device: attention by the plan in force, the cache, merging. Each only launches.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <shared_mutex>
#include <string>
#include <utility>

#include "cuda.h"
#include "run_args.h"
#include "states.h"

namespace headwater::python {
namespace {

/// Imported arrays of a call on a device, and its workspace.
struct PyCudaRunArgs {
  PyRunArgs arrays;
  Array workspace;
  nb::object q;  ///< whose framework's current stream is taken
  int device = 0;
};

/// The CUDA device that an array is on.
int device_of_array(const Array& a) {
  if (a.device() == kHost) refuse(a.name() + " is on the CPU, expected a CUDA device (headwater.run serves the CPU)");
  return a.device() == kAnyDevice ? device_of(nb::none()) : a.device();
}

int device_of_array(nb::handle object, const char* name) {
  return device_of_array(Array(object, name, Array::Access::read, kAnyDevice));
}

PyCudaRunArgs import_args(nb::handle q, nb::handle kv, nb::handle out, nb::handle workspace, nb::handle lse,
                          const std::string& kv_layout, const std::string& lse_base, nb::handle alibi_slopes,
                          nb::handle sinks, bool include_sink, nb::handle k_scale, nb::handle v_scale) {
  PyCudaRunArgs a;
  a.arrays.q = Rows(q, "q", Array::Access::read, kAnyDevice);
  a.device = device_of_array(a.arrays.q.array);
  a.arrays.out = Rows(out, "out", Array::Access::write, a.device);
  a.arrays.import_rest(kv, kv_layout, {lse, alibi_slopes, sinks, k_scale, v_scale}, lse_base, include_sink, a.device);
  a.workspace = Array(workspace, "workspace", Array::Access::write, a.device);
  (void)a.workspace.bytes();
  a.q = nb::borrow(q);
  return a;
}

void run_prepared(PyDevicePlan& plan, const PyCudaRunArgs& a, nb::handle stream) {
  if (a.device != plan.device) {
    refuse("q is on CUDA device " + std::to_string(a.device) + ", expected CUDA device " + std::to_string(plan.device) +
           ", as the plan");
  }
  const cuda::Stream on = stream_of(stream, a.q, plan.device);
  const std::shared_lock shared(plan.in_use, std::try_to_lock);
  if (!shared.owns_lock()) refuse("plan is being changed by another thread, expected nobody to change it");
  // A graph replays later plans: q may have more rows than the plan at hand.
  const std::int64_t rows = a.arrays.q.rows();
  const std::int64_t needed = std::max(plan.plan.stats().num_rows, plan.least_rows);  // the first is the host's plans'
  if (rows < needed) a.arrays.q.array.expect_shape(0, needed, "at least the rows of the plan");
  a.arrays.check_shapes(plan.shape, rows, "rows of q");
  const std::vector<KvCache> caches = a.arrays.views(plan.num_levels);
  const auto bytes = a.workspace.bytes();
  cuda::RunArgs args;
  a.arrays.fill(args);
  args.kv = caches;
  args.workspace = {bytes.data(), bytes.size()};
  const nb::gil_scoped_release release;
  const DeviceGuard guard(plan.device);
  cuda::run(plan.plan, args, on);
}

void run(PyDevicePlan& plan, nb::object q, nb::object kv, nb::object out, nb::object workspace, nb::object lse,
         const std::string& kv_layout, const std::string& lse_base, nb::object alibi_slopes, nb::object sinks,
         bool include_sink, nb::object k_scale, nb::object v_scale, nb::object stream) {
  run_prepared(
      plan,
      import_args(q, kv, out, workspace, lse, kv_layout, lse_base, alibi_slopes, sinks, include_sink, k_scale, v_scale),
      stream);
}

/// A device int32 [1], or nullptr.
std::int32_t* counter_of(nb::handle num_bad, int device) {
  if (num_bad.is_none()) return nullptr;
  const Array a(num_bad, "num_bad", Array::Access::write, device);
  (void)a.int32s();
  a.expect_shape(0, 1, "a counter");
  return static_cast<std::int32_t*>(a.data());
}

/// The device that a cache is on.
int device_of_cache(nb::handle kv) {
  const bool pair = nb::isinstance<nb::tuple>(kv) && nb::len(kv) > 0;
  return pair ? device_of_array(nb::object(kv[0]), "kv[0]") : device_of_array(kv, "kv");
}

void append_kv(nb::object kv, nb::object k, nb::object v, nb::object token_slots, const std::string& kv_layout,
               nb::object k_scale, nb::object v_scale, nb::object num_bad, nb::object stream) {
  const int device = device_of_cache(kv);
  const Cache cache(kv, "kv", parse_nhd(kv_layout), Array::Access::write, device);
  const Rows k_rows(k, "k", Array::Access::read, device);
  const Rows v_rows(v, "v", Array::Access::read, device);
  const Array slots(token_slots, "token_slots", Array::Access::read, device);
  const auto at = slots.int64s();
  const auto rows = static_cast<std::int64_t>(at.size());
  // Padded batches have more rows than slots.
  for (const Rows* r : {&k_rows, &v_rows}) {
    if (r->rows() < rows) r->array.expect_shape(0, rows, "at least token_slots");
    r->array.expect_shape(1, cache.num_kv_heads, "KV heads of kv");
  }
  k_rows.array.expect_shape(2, cache.head_dim_qk, "head_dim of kv");
  v_rows.array.expect_shape(2, cache.head_dim_vo, "head_dim of kv");
  const ScaleArg k_factor(k_scale, "k_scale", device);
  const ScaleArg v_factor(v_scale, "v_scale", device);
  std::int32_t* const bad = counter_of(num_bad, device);
  const cuda::Stream on = stream_of(stream, k, device);
  if (rows == 0) return;
  const nb::gil_scoped_release release;
  const DeviceGuard guard(device);
  cuda::append_kv(cache.view, k_rows.read(), v_rows.read(), at.data(), rows, cache.num_kv_heads, cache.head_dim_qk,
                  cache.head_dim_vo, k_factor.view(), v_factor.view(), on, bad);
}

void copy_pages(nb::object kv, nb::object copies, const std::string& kv_layout, nb::object num_bad, nb::object stream) {
  const int device = device_of_cache(kv);
  const Cache cache(kv, "kv", parse_nhd(kv_layout), Array::Access::write, device);
  const cuda::Stream on = stream_of(stream, nb::isinstance<nb::tuple>(kv) ? nb::object(kv[0]) : kv, device);
  if (nb::isinstance<nb::list>(copies)) {
    const std::vector<cpu::PageCopy> list = page_copies(copies);
    const nb::gil_scoped_release release;
    const DeviceGuard guard(device);
    cuda::copy_pages(cache.view, list, cache.num_kv_heads, cache.head_dim_qk, cache.head_dim_vo, on);
    return;
  }
  const Array list(copies, "copies", Array::Access::read, device);
  list.expect_rank(2, "[copies, 3]");
  list.expect_int32_rows();
  list.expect_shape(1, 3, "src, dst, num_tokens");
  if (list.shape(0) > 1 && list.stride(0) != 3) refuse("copies is not contiguous");
  std::int32_t* const bad = counter_of(num_bad, device);
  if (list.shape(0) == 0) return;
  const nb::gil_scoped_release release;
  const DeviceGuard guard(device);
  cuda::copy_pages(cache.view, static_cast<const cpu::PageCopy*>(list.data()), list.shape(0), cache.num_kv_heads,
                   cache.head_dim_qk, cache.head_dim_vo, on, bad);
}

void merge_state(nb::object v_a, nb::object s_a, nb::object v_b, nb::object s_b, nb::object out_v, nb::object out_s,
                 const std::string& lse_base, nb::object stream) {
  const LseBase base = parse_base(lse_base, "lse_base");
  const int device = device_of_array(v_a, "v_a");
  const State a(v_a, "v_a", s_a, "s_a", base, device);
  const State b(v_b, "v_b", s_b, "s_b", base, device);
  for (std::size_t i = 0; i < 3; ++i) b.v.array.expect_shape(i, a.v.array.shape(i), "as v_a");
  const Result to(out_v, out_s, v_a, s_a, a.v.rows(), a.v, base, device);
  const cuda::Stream on = stream_of(stream, v_a, device);
  if (a.v.rows() == 0) return;
  const nb::gil_scoped_release release;
  const DeviceGuard guard(device);
  cuda::merge_state(a.v.read(), a.s.read(), b.v.read(), b.s.read(), a.v.rows(), a.v.heads(), a.v.head_dim(), to.v.view,
                    to.s.view, on);
}

void merge_states(nb::object v, nb::object s, nb::object indptr, nb::object out_v, nb::object out_s,
                  const std::string& lse_base, nb::object stream) {
  const LseBase base = parse_base(lse_base, "lse_base");
  const int device = device_of_array(v, "v");
  const State in(v, "v", s, "s", base, device);
  const Array groups(indptr, "indptr", Array::Access::read, device);
  const auto offsets = groups.int32s();
  if (offsets.empty()) refuse("indptr is empty, expected at least the entry 0");
  const auto count = static_cast<std::int64_t>(offsets.size()) - 1;
  const Result to(out_v, out_s, v, s, count, in.v, base, device);
  const cuda::Stream on = stream_of(stream, v, device);
  if (count == 0) return;
  const nb::gil_scoped_release release;
  const DeviceGuard guard(device);
  cuda::merge_states(in.v.read(), in.s.read(), in.v.rows(), offsets.data(), count, in.v.heads(), in.v.head_dim(),
                     to.v.view, to.s.view, on);
}

const char* const kNoWait = " Only launches: no wait, no allocation; may be captured in a graph.";

const std::string& run_args_doc() {
  static const std::string text = std::string(kRunArgsDoc) +
                                  "  All on the plan's device; scales are float32 arrays there, never numbers. q, out "
                                  "and lse may have more rows than\n"
                                  "    the plan at hand: a graph replays later ones.\n"
                                  "  workspace: device memory of at least plan.workspace_size() bytes, aligned to 64; "
                                  "runs at the same time need two.\n";
  return text;
}

void bind_run(nb::module_& m) {
  static const std::string args_doc =
      "Arrays of an attention call on a device, imported and checked once: `run(plan, args)`. Keeps the arrays alive; "
      "their\nmemory must stay where it is.\n\nArgs:\n" +
      run_args_doc();
  nb::class_<PyCudaRunArgs>(m, "RunArgs", args_doc.c_str())
      .def(
          "__init__",
          [](PyCudaRunArgs* self, nb::object q, nb::object kv, nb::object out, nb::object workspace, nb::object lse,
             const std::string& kv_layout, const std::string& lse_base, nb::object alibi_slopes, nb::object sinks,
             bool include_sink, nb::object k_scale, nb::object v_scale) {
            new (self) PyCudaRunArgs(import_args(q, kv, out, workspace, lse, kv_layout, lse_base, alibi_slopes, sinks,
                                                 include_sink, k_scale, v_scale));
          },
          nb::arg("q").none(), nb::arg("kv").none(), nb::arg("out").none(), nb::kw_only(), nb::arg("workspace").none(),
          nb::arg("lse") = nb::none(), nb::arg("kv_layout") = "NHD", nb::arg("lse_base") = "two",
          nb::arg("alibi_slopes") = nb::none(), nb::arg("sinks") = nb::none(), nb::arg("include_sink") = true,
          nb::arg("k_scale") = nb::none(), nb::arg("v_scale") = nb::none());
  m.def("run", &run_prepared, nb::arg("plan"), nb::arg("args"), nb::kw_only(), nb::arg("stream") = nb::none(),
        "Attention on prepared arrays. Two launches.");
  static const std::string run_doc =
      std::string(
          "out = softmax(scores(q, k) + mask) v for every row of the plan in force (formulas: PlanOptions). Two "
          "launches.") +
      kNoWait + "\n\nArgs:\n  plan: DevicePlan.\n" + run_args_doc() +
      "  stream: int, a torch or cupy stream; None: the current one of q's framework.\n\n"
      "Raises:\n  InvalidArgument, WorkspaceTooSmall before anything is launched; DeviceError with CUDA's words.";
  m.def("run", &run, nb::arg("plan"), nb::arg("q").none(), nb::arg("kv").none(), nb::arg("out").none(), nb::kw_only(),
        nb::arg("workspace").none(), nb::arg("lse") = nb::none(), nb::arg("kv_layout") = "NHD",
        nb::arg("lse_base") = "two", nb::arg("alibi_slopes") = nb::none(), nb::arg("sinks") = nb::none(),
        nb::arg("include_sink") = true, nb::arg("k_scale") = nb::none(), nb::arg("v_scale") = nb::none(),
        nb::arg("stream") = nb::none(), run_doc.c_str());
}

}  // namespace

void bind_cuda_calls(nb::module_& m) {
  bind_run(m);
  static const std::string append_doc = std::string("headwater.append_kv on the device.") + kNoWait +
                                        "\n\nArgs:\n"
                                        "  kv, k, v: as there. k and v may have more rows than token_slots.\n"
                                        "  token_slots: int64 [rows], read when the launch runs; negative: skipped.\n"
                                        "  k_scale, v_scale: float32 [1] or [num_kv_heads] on the device, or None.\n"
                                        "  num_bad: int32 [1] on the device, to which slots beyond the pool are added; "
                                        "they are skipped.";
  m.def("append_kv", &append_kv, nb::arg("kv").none(), nb::arg("k").none(), nb::arg("v").none(),
        nb::arg("token_slots").none(), nb::kw_only(), nb::arg("kv_layout") = "NHD", nb::arg("k_scale") = nb::none(),
        nb::arg("v_scale") = nb::none(), nb::arg("num_bad") = nb::none(), nb::arg("stream") = nb::none(),
        append_doc.c_str());
  static const std::string copy_doc =
      std::string("headwater.copy_pages on the device.") + kNoWait +
      "\n\nArgs:\n"
      "  copies: a list of (src, dst, num_tokens), which a graph repeats as it is; or int32 [n, 3] on the device, "
      "read\n"
      "    when the launch runs: then no page may be the dst of one and the src or dst of another; bad entries are\n"
      "    skipped and added to num_bad.";
  m.def("copy_pages", &copy_pages, nb::arg("kv").none(), nb::arg("copies").none(), nb::kw_only(),
        nb::arg("kv_layout") = "NHD", nb::arg("num_bad") = nb::none(), nb::arg("stream") = nb::none(),
        copy_doc.c_str());
  static const std::string merge_doc =
      std::string("headwater.merge_state on the device; out_v and out_s must be given.") + kNoWait;
  m.def("merge_state", &merge_state, nb::arg("v_a").none(), nb::arg("s_a").none(), nb::arg("v_b").none(),
        nb::arg("s_b").none(), nb::arg("out_v"), nb::arg("out_s"), nb::kw_only(), nb::arg("lse_base") = "two",
        nb::arg("stream") = nb::none(), merge_doc.c_str());
  static const std::string merges_doc =
      std::string("headwater.merge_states on the device; out_v and out_s must be given, and not overlap v and s.") +
      kNoWait;
  m.def("merge_states", &merge_states, nb::arg("v").none(), nb::arg("s").none(), nb::arg("indptr").none(),
        nb::arg("out_v"), nb::arg("out_s"), nb::kw_only(), nb::arg("lse_base") = "two", nb::arg("stream") = nb::none(),
        merges_doc.c_str());
}

}  // namespace headwater::python
