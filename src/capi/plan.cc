// The C interface: planner and plan.
#include "capi/capi.h"

using namespace headwater;
using namespace headwater::capi;

namespace {

/// Writes text as snprintf does.
void write_text(const std::string& text, char* buffer, size_t capacity, size_t* length) {
  const auto out = array(buffer, capacity, "buffer");
  if (!out.empty()) {
    const std::size_t n = std::min(text.size(), out.size() - 1);
    std::memcpy(buffer, text.data(), n);
    buffer[n] = '\0';
  }
  if (length != nullptr) *length = text.size();
}

}  // namespace

int hw_planner_create(const hw_device_model* model, hw_planner** planner, hw_error* error) {
  return guard(error, [&] {
    need(planner, "planner");
    const DeviceModel m =
        model == nullptr ? DeviceModel::default_cpu() : to_cpp(read_struct(model, "model", hw_device_model_init));
    *planner = new hw_planner{Planner(m)};
  });
}

void hw_planner_destroy(hw_planner* planner) {
  delete planner;
}

int hw_planner_model(const hw_planner* planner, hw_device_model* model, hw_error* error) {
  return guard(error, [&] {
    const DeviceModel& m = need(planner, "planner").planner.model();
    write_struct(model, to_c(m), output_size(model, "model"));
  });
}

int hw_planner_plan(hw_planner* planner, const hw_attention_shape* shape, const hw_batch* batch,
                    const hw_plan_options* options, hw_plan** plan, hw_error* error) {
  return guard(error, [&] {
    Planner& p = need(planner, "planner").planner;
    need(plan, "plan");
    const AttentionShape s = to_cpp(read_struct(shape, "shape", hw_attention_shape_init));
    const Batch b = to_cpp(read_struct(batch, "batch", hw_batch_init));
    const PlanOptions o =
        options == nullptr ? PlanOptions{} : to_cpp(read_struct(options, "options", hw_plan_options_init));
    *plan = new hw_plan{p.plan(s, b, o)};
  });
}

int hw_planner_update(hw_planner* planner, hw_plan* plan, const hw_batch* batch, const hw_changes* changes,
                      hw_error* error) {
  return guard(error, [&] {
    Planner& p = need(planner, "planner").planner;
    Plan& target = need(plan, "plan").plan;
    const Batch b = to_cpp(read_struct(batch, "batch", hw_batch_init));
    if (changes == nullptr) {
      p.update(target, b);
    } else {
      const Changes c = to_cpp(*changes);
      p.update(target, b, &c);
    }
  });
}

void hw_plan_destroy(hw_plan* plan) {
  delete plan;
}

size_t hw_plan_workspace_size(const hw_plan* plan) {
  return plan == nullptr ? 0 : plan->plan.workspace_size();
}

int hw_plan_get_stats(const hw_plan* plan, hw_plan_stats* stats, hw_error* error) {
  return guard(error, [&] {
    const PlanStats& s = need(plan, "plan").plan.stats();
    const std::size_t size = output_size(stats, "stats");
    write_struct(stats,
                 {0, static_cast<int>(s.path), s.num_requests, s.num_rows, s.num_items, s.num_partials, s.num_spans,
                  s.shared_tokens, s.member_sequences, s.kv_bytes_unique, s.kv_bytes_flat, s.kv_bytes_read, s.flops,
                  s.predicted_ps, s.predicted_flat_ps},
                 size);
  });
}

int hw_plan_describe(const hw_plan* plan, char* buffer, size_t capacity, size_t* length, hw_error* error) {
  return guard(error, [&] { write_text(need(plan, "plan").plan.describe(), buffer, capacity, length); });
}

int hw_plan_to_json(const hw_plan* plan, char* buffer, size_t capacity, size_t* length, hw_error* error) {
  return guard(error, [&] { write_text(need(plan, "plan").plan.to_json(), buffer, capacity, length); });
}

int hw_plan_serialize(const hw_plan* plan, void* buffer, size_t capacity, size_t* length, hw_error* error) {
  return guard(error, [&] {
    const std::string bytes = need(plan, "plan").plan.serialize();
    const auto out = array(static_cast<char*>(buffer), capacity, "buffer");
    if (!out.empty()) std::memcpy(buffer, bytes.data(), std::min(bytes.size(), out.size()));
    if (length != nullptr) *length = bytes.size();
  });
}
