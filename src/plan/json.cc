// Plan::to_json(); schema: docs/plan_json.md.
#include "plan/json.h"

#include "headwater/plan.h"
#include "headwater/version.h"
#include "plan/report.h"

namespace headwater {
namespace {

using namespace detail;  // NOLINT: a file of one function and its parts

void write_shape(const PlanData& p, JsonWriter& w) {
  const AttentionShape& s = p.shape;
  w.key("shape");
  w.begin_object();
  w.field("num_qo_heads", s.num_qo_heads);
  w.field("num_kv_heads", s.num_kv_heads);
  w.field("head_dim_qk", s.head_dim_qk);
  w.field("head_dim_vo", s.head_dim_vo);
  w.field("q_dtype", name_of(s.q_dtype));
  w.field("kv_dtype", name_of(s.kv_dtype));
  w.field("out_dtype", name_of(s.out_dtype));
  w.end_object();
  w.key("page_size");
  w.begin_array();
  for (const std::int32_t size : p.page_size) w.value(size);
  w.end_array();
}

void write_options(const PlanData& p, JsonWriter& w) {
  const PlanOptions& o = p.options;
  w.key("options");
  w.begin_object();
  w.field("policy", name_of(o.policy));
  w.field("cascade", o.cascade == CascadeSwitch::automatic ? "auto" : o.cascade == CascadeSwitch::on ? "on" : "off");
  w.field("min_shared_pages", o.min_shared_pages);
  w.field("min_members", o.min_members);
  w.field("causal", o.causal);
  w.field("window_left", o.window_left);
  w.field("local_chunk", o.local_chunk);
  w.field("num_sink_tokens", o.num_sink_tokens);
  w.field("batch_invariant", o.batch_invariant);
  w.field("invariant_chunk", o.invariant_chunk);
  w.field("num_workers", p.num_workers);
  w.end_object();
}

void write_stats(const PlanData& p, JsonWriter& w) {
  const PlanStats& s = p.stats;
  w.key("stats");
  w.begin_object();
  w.field("num_requests", s.num_requests);
  w.field("num_rows", s.num_rows);
  w.field("num_items", s.num_items);
  w.field("num_partials", s.num_partials);
  w.field("num_merged_rows", p.merge_rows.size());
  w.field("num_empty_rows", p.empty_rows.size());
  w.field("num_spans", s.num_spans);
  w.field("shared_tokens", s.shared_tokens);
  w.field("member_sequences", s.member_sequences);
  w.field("kv_bytes_unique", s.kv_bytes_unique);
  w.field("kv_bytes_flat", s.kv_bytes_flat);
  w.field("kv_bytes_read", s.kv_bytes_read);
  w.field("flops", s.flops);
  w.field("predicted_ps", s.predicted_ps);
  w.field("predicted_flat_ps", s.predicted_flat_ps);
  w.field("workspace_bytes", p.workspace_bytes);
  w.end_object();
}

void write_forest(const PlanData& p, const CostModel& cost, JsonWriter& w) {
  const Forest& f = p.memory->forest;
  w.key("forest");
  w.begin_array();
  for (std::size_t i = 0; i < f.nodes.size(); ++i) {
    const Node& node = f.nodes[i];
    const NodeReport r = report_node(p, cost, static_cast<std::int32_t>(i));
    w.begin_object();
    w.field("id", i);
    w.field("parent", node.parent);
    w.field("begin", r.tok_begin);
    w.field("end", r.tok_end);
    w.field("pages", r.pages);
    w.field("view", node.view);
    w.key("requests");
    w.begin_array();
    for (std::int32_t k = 0; k < node.num_members; ++k) {
      const std::int32_t e = f.order[static_cast<std::size_t>(node.member_begin + k)];
      w.value(p.memory->entries[static_cast<std::size_t>(e)].request);
    }
    w.end_array();
    w.field("rows", node.num_rows);
    w.field("split", r.split);
    if (r.shared) {
      w.field("apart_ps", r.apart_ps);
      w.field("together_ps", r.together_ps);
      w.field("reason", r.reason);
    }
    w.end_object();
  }
  w.end_array();
}

void write_work(const PlanData& p, JsonWriter& w) {
  w.key("spans");
  w.begin_array();
  for (const SharedSpan& s : p.spans) {
    w.begin_object();
    w.field("begin", s.pos_begin);
    w.field("tokens", s.num_tokens);
    w.field("pages", s.num_pages);
    w.field("members", s.num_members);
    w.field("depth", s.depth);
    w.end_object();
  }
  w.end_array();
  w.key("items");
  w.begin_array();
  for (const WorkItem& i : p.items) {
    w.begin_object();
    w.field("begin", i.pos_begin);
    w.field("tokens", i.num_tokens);
    w.field("view", i.view);
    w.field("rows", i.num_rows);
    w.field("kv_head_begin", i.kv_head_begin);
    w.field("kv_head_end", i.kv_head_end);
    w.field("direct", i.partial_begin < 0);
    w.field("states", i.num_states);
    w.field("cost_ps", i.cost_ps);
    w.end_object();
  }
  w.end_array();
}

}  // namespace

std::string Plan::to_json() const {
  const PlanData& p = *data_;
  JsonWriter w;
  w.begin_object();
  w.field("headwater", version());
  w.field("path", name_of(p.stats.path));
  w.field("chosen_policy", name_of(p.memory->chosen));
  write_shape(p, w);
  write_options(p, w);
  write_stats(p, w);
  write_forest(p, CostModel(p.shape, p.options, p.memory->model), w);
  write_work(p, w);
  w.end_object();
  return w.take();
}

}  // namespace headwater
