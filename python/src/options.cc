// Value types: AttentionShape, PlanOptions, DeviceModel. Enumerations are strings in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdlib>
#include <optional>
#include <sstream>

#include "bindings.h"

namespace headwater::python {
namespace {

void bind_shape(nb::module_& m) {
  nb::class_<AttentionShape>(m, "AttentionShape",
                             "Heads, head sizes and dtypes; the same for every layer that a plan serves.\n\n"
                             "Args:\n"
                             "  num_qo_heads, num_kv_heads: query and KV heads; the latter divides the former.\n"
                             "  head_dim: size of q, k and v rows, a multiple of 16 up to 1024.\n"
                             "  head_dim_vo: size of v and output rows where it differs (None: head_dim).\n"
                             "  q_dtype: \"f32\", \"f16\" or \"bf16\".\n"
                             "  kv_dtype: also \"f8e4m3\" (None: q_dtype).\n"
                             "  out_dtype: \"f32\", \"f16\" or \"bf16\" (None: q_dtype).\n\n"
                             "Sizes are checked when a plan is made.")
      .def(
          "__init__",
          [](AttentionShape* self, int num_qo_heads, int num_kv_heads, int head_dim, std::optional<int> head_dim_vo,
             const std::string& q_dtype, const std::optional<std::string>& kv_dtype,
             const std::optional<std::string>& out_dtype) {
            const DType q = parse_dtype(q_dtype, "q_dtype");
            new (self) AttentionShape{num_qo_heads,
                                      num_kv_heads,
                                      head_dim,
                                      head_dim_vo.value_or(head_dim),
                                      q,
                                      kv_dtype ? parse_dtype(*kv_dtype, "kv_dtype") : q,
                                      out_dtype ? parse_dtype(*out_dtype, "out_dtype") : q};
          },
          nb::arg("num_qo_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::kw_only(),
          nb::arg("head_dim_vo") = nb::none(), nb::arg("q_dtype") = "bf16", nb::arg("kv_dtype") = nb::none(),
          nb::arg("out_dtype") = nb::none())
      .def_ro("num_qo_heads", &AttentionShape::num_qo_heads)
      .def_ro("num_kv_heads", &AttentionShape::num_kv_heads)
      .def_ro("head_dim", &AttentionShape::head_dim_qk)
      .def_ro("head_dim_vo", &AttentionShape::head_dim_vo)
      .def_prop_ro("q_dtype", [](const AttentionShape& s) { return std::string(name_of(s.q_dtype)); })
      .def_prop_ro("kv_dtype", [](const AttentionShape& s) { return std::string(name_of(s.kv_dtype)); })
      .def_prop_ro("out_dtype", [](const AttentionShape& s) { return std::string(name_of(s.out_dtype)); })
      .def("__repr__", [](const AttentionShape& s) {
        std::ostringstream o;
        o << "AttentionShape(num_qo_heads=" << s.num_qo_heads << ", num_kv_heads=" << s.num_kv_heads
          << ", head_dim=" << s.head_dim_qk << ", head_dim_vo=" << s.head_dim_vo << ", q_dtype='" << name_of(s.q_dtype)
          << "', kv_dtype='" << name_of(s.kv_dtype) << "', out_dtype='" << name_of(s.out_dtype) << "')";
        return o.str();
      });
}

const char* const kOptionsDoc =
    "How to share, and what rows see. Formulas (contract of include/headwater/options.h):\n\n"
    "  s = sm_scale * k_scale * q.k;  s = cap * tanh(s / cap);  s += slope * (k_pos - q_pos)  with ALiBi;  then the "
    "mask:\n"
    "  q_pos = kv_len - qo_len + i sees [0, num_sink_tokens) and [lo, hi), where hi = q_pos + 1 if causal, else "
    "kv_len,\n"
    "  and lo follows window_left (inclusive; -1: everything) and local_chunk (0: off).\n\n"
    "Args:\n"
    "  policy: \"auto\" (the cost model), \"flat\", \"two_level\", \"vllm\" or \"forest\".\n"
    "  cascade: \"auto\", \"on\" (as policy \"forest\") or \"off\" (nobody looks for sharing).\n"
    "  min_shared_pages, min_members: thresholds of a shared span; 0: the policy's default.\n"
    "  causal, window_left, local_chunk, num_sink_tokens: the mask, in tokens.\n"
    "  sm_scale: None or 0 is 1 / sqrt(head_dim).\n"
    "  logits_soft_cap: None or 0 is off.\n"
    "  alibi, sinks: alibi_slopes or sinks will be given to `run`.\n"
    "  batch_invariant: bits that depend on nothing but the row; states close every invariant_chunk tokens.\n"
    "  num_workers: workers to schedule for; 0: the device model's.";

PlanOptions make_options(const std::string& policy, const std::string& cascade, int min_shared_pages, int min_members,
                         bool causal, std::int64_t window_left, std::int64_t local_chunk, std::int64_t num_sink_tokens,
                         std::optional<float> sm_scale, std::optional<float> logits_soft_cap, bool alibi, bool sinks,
                         bool batch_invariant, int invariant_chunk, int num_workers) {
  PlanOptions o;
  o.policy = parse_policy(policy, "policy");
  o.cascade = parse_cascade(cascade, "cascade");
  o.min_shared_pages = min_shared_pages;
  o.min_members = min_members;
  o.causal = causal;
  o.window_left = window_left;
  o.local_chunk = local_chunk;
  o.num_sink_tokens = num_sink_tokens;
  o.sm_scale = sm_scale.value_or(0.0F);
  o.logits_soft_cap = logits_soft_cap.value_or(0.0F);
  o.alibi = alibi;
  o.sinks = sinks;
  o.batch_invariant = batch_invariant;
  o.invariant_chunk = invariant_chunk;
  o.num_workers = num_workers;
  return o;
}

void bind_plan_options(nb::module_& m) {
  nb::class_<PlanOptions>(m, "PlanOptions", kOptionsDoc)
      .def(
          "__init__",
          [](PlanOptions* self, const std::string& policy, const std::string& cascade, int min_shared_pages,
             int min_members, bool causal, std::int64_t window_left, std::int64_t local_chunk,
             std::int64_t num_sink_tokens, std::optional<float> sm_scale, std::optional<float> logits_soft_cap,
             bool alibi, bool sinks, bool batch_invariant, int invariant_chunk, int num_workers) {
            new (self) PlanOptions(make_options(policy, cascade, min_shared_pages, min_members, causal, window_left,
                                                local_chunk, num_sink_tokens, sm_scale, logits_soft_cap, alibi, sinks,
                                                batch_invariant, invariant_chunk, num_workers));
          },
          nb::kw_only(), nb::arg("policy") = "auto", nb::arg("cascade") = "auto", nb::arg("min_shared_pages") = 0,
          nb::arg("min_members") = 0, nb::arg("causal") = true, nb::arg("window_left") = -1, nb::arg("local_chunk") = 0,
          nb::arg("num_sink_tokens") = 0, nb::arg("sm_scale") = nb::none(), nb::arg("logits_soft_cap") = nb::none(),
          nb::arg("alibi") = false, nb::arg("sinks") = false, nb::arg("batch_invariant") = false,
          nb::arg("invariant_chunk") = 128, nb::arg("num_workers") = 0)
      .def_static(
          "from_env", [](const PlanOptions& base) { return PlanOptions::from_env(&std::getenv, base); },
          nb::arg("base"),
          "`base` with HEADWATER_CASCADE_ATTENTION, HEADWATER_CASCADE_MIN_SHARED_PAGES and\n"
          "HEADWATER_CASCADE_MIN_MEMBERS applied; nothing else reads the environment.")
      .def_prop_ro("policy", [](const PlanOptions& o) { return std::string(name_of(o.policy)); })
      .def_prop_ro("cascade", [](const PlanOptions& o) { return std::string(name_of_cascade(o.cascade)); })
      .def_ro("min_shared_pages", &PlanOptions::min_shared_pages)
      .def_ro("min_members", &PlanOptions::min_members)
      .def_ro("causal", &PlanOptions::causal)
      .def_ro("window_left", &PlanOptions::window_left)
      .def_ro("local_chunk", &PlanOptions::local_chunk)
      .def_ro("num_sink_tokens", &PlanOptions::num_sink_tokens)
      .def_ro("sm_scale", &PlanOptions::sm_scale)
      .def_ro("logits_soft_cap", &PlanOptions::logits_soft_cap)
      .def_ro("alibi", &PlanOptions::alibi)
      .def_ro("sinks", &PlanOptions::sinks)
      .def_ro("batch_invariant", &PlanOptions::batch_invariant)
      .def_ro("invariant_chunk", &PlanOptions::invariant_chunk)
      .def_ro("num_workers", &PlanOptions::num_workers);
}

void bind_model(nb::module_& m) {
  nb::class_<ComputeModel>(m, "ComputeModel", "Cost of products, picoseconds (include/headwater/device_model.h).")
      .def_rw("few_row_ps", &ComputeModel::few_row_ps)
      .def_rw("many_base_ps", &ComputeModel::many_base_ps)
      .def_rw("many_row_ps", &ComputeModel::many_row_ps)
      .def_rw("many_row_pad", &ComputeModel::many_row_pad)
      .def_rw("few_row_max", &ComputeModel::few_row_max);
  nb::class_<DeviceModel>(
      m, "DeviceModel",
      "Constants of the cost model, integers, times in picoseconds. `headwater calibrate` measures\n"
      "them; default_cpu() has the shipped ones for this processor.")
      .def_static("default_cpu", &DeviceModel::default_cpu)
      .def_static(
          "for_isa", [](const std::string& isa) { return DeviceModel::for_isa(parse_isa(isa, "isa")); }, nb::arg("isa"))
      .def_rw("num_workers", &DeviceModel::num_workers)
      .def_rw("has_dot16", &DeviceModel::has_dot16)
      .def_rw("memory_ps_per_kib", &DeviceModel::memory_ps_per_kib)
      .def_rw("worker_ps_per_kib", &DeviceModel::worker_ps_per_kib)
      .def_rw("cache_ps_per_kib", &DeviceModel::cache_ps_per_kib)
      .def_rw("cache_bytes", &DeviceModel::cache_bytes)
      .def_rw("item_ps", &DeviceModel::item_ps)
      .def_rw("item_row_ps", &DeviceModel::item_row_ps)
      .def_rw("partial_ps_per_kib", &DeviceModel::partial_ps_per_kib)
      .def_rw("many_start_ps", &DeviceModel::many_start_ps)
      .def_rw("launch_ps", &DeviceModel::launch_ps)
      .def_rw("max_tile_rows", &DeviceModel::max_tile_rows)
      .def_rw("chunk_tokens", &DeviceModel::chunk_tokens)
      .def_rw("part_tokens", &DeviceModel::part_tokens)
      .def_rw("teams", &DeviceModel::teams)
      .def_rw("dot16", &DeviceModel::dot16)
      .def_rw("fma32", &DeviceModel::fma32);
}

}  // namespace

void bind_options(nb::module_& m) {
  bind_shape(m);
  bind_plan_options(m);
  bind_model(m);
}

}  // namespace headwater::python
