#include "plan/report.h"

#include <algorithm>

#include "plan/cut.h"

namespace headwater::detail {
namespace {

/// n / unit with one decimal.
std::string decimal(std::int64_t n, std::int64_t unit) {
  const std::int64_t tenths = n / unit * 10 + n % unit * 10 / unit;
  return join(std::to_string(tenths / 10), ".", std::to_string(tenths % 10));
}

std::string reason_for(const PlanData& plan, const Node& node, const NodeReport& r) {
  const PlanData::Memory& memory = *plan.memory;
  if (r.split) {
    if (memory.chosen != Policy::automatic) return join("split off by policy ", name_of(memory.chosen));
    return join("split off: ", format_time(r.together_ps), " of worker time against ", format_time(r.apart_ps),
                " read apart");
  }
  const PlanOptions& o = plan.options;
  if (o.cascade != CascadeSwitch::on && o.policy == Policy::flat) return "not split: policy flat";
  const Policy policy = o.cascade == CascadeSwitch::on ? Policy::forest : o.policy;
  const Thresholds t = thresholds_of(o, policy);
  if (r.pages < t.min_pages) return join("not split: fewer than ", std::to_string(t.min_pages), " pages");
  if (node.num_members < t.min_members) {
    return join("not split: fewer than ", std::to_string(t.min_members), " members");
  }
  if (node.cut <= node.tok_begin) return "not split: shorter than a batch-invariant chunk";
  if (policy == Policy::two_level) return "not split: not the group that saves the most";
  if (policy == Policy::vllm) return "not split: vLLM's heuristic says no";
  if (policy == Policy::forest) return "not split";
  return join("not split: no gain over reading it apart (", format_time(r.together_ps), " of worker time against ",
              format_time(r.apart_ps), ")");
}

}  // namespace

NodeReport report_node(const PlanData& plan, const CostModel& cost, std::int32_t index) {
  const PlanData::Memory& memory = *plan.memory;
  const Forest& f = memory.forest;
  const Node& node = f.nodes[static_cast<std::size_t>(index)];
  NodeReport r;
  const bool inner = !f.levels && node.parent >= 0;
  r.tok_begin = inner ? f.nodes[static_cast<std::size_t>(node.parent)].tok_end : node.tok_begin;
  r.tok_end = std::max(r.tok_begin, node.tok_end);
  const std::int32_t page_size = plan.page_size[static_cast<std::size_t>(node.view)];
  if (r.tok_end > r.tok_begin) {
    r.pages = (r.tok_end - node.origin + page_size - 1) / page_size - (r.tok_begin - node.origin) / page_size;
  }
  r.shared = node.num_members > 1;
  if (!r.shared) return r;
  r.split = memory.closed[static_cast<std::size_t>(index)] != 0;
  const std::int64_t tokens = r.tok_end - r.tok_begin;
  const std::int64_t reread = cost.reread_ps(tokens, f.levels ? tokens : std::int64_t{node.tok_end});
  const std::int32_t rows_each = std::max(1, node.num_rows / node.num_members);
  r.apart_ps = node.num_members * (cost.piece_ps(tokens, rows_each) + reread);
  r.together_ps =
      cost.piece_ps(tokens, node.num_rows) + cost.num_tiles(node.num_rows) * reread + cost.partial_ps(node.num_rows);
  r.reason = reason_for(plan, node, r);
  return r;
}

std::string format_time(std::int64_t ps) {
  if (ps < 1'000'000'000) return join(decimal(ps, 1'000'000), " us");
  return join(decimal(ps, 1'000'000'000), " ms");
}

std::string format_bytes(std::int64_t bytes) {
  if (bytes < 1024) return join(std::to_string(bytes), " B");
  if (bytes < (1 << 20)) return join(decimal(bytes, 1024), " KiB");
  if (bytes < (1LL << 30)) return join(decimal(bytes, 1 << 20), " MiB");
  return join(decimal(bytes, 1LL << 30), " GiB");
}

std::string format_count(std::int64_t n) {
  const std::string digits = std::to_string(n);
  std::string out;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0 && digits[i - 1] != '-') out.push_back(',');
    out.push_back(digits[i]);
  }
  return out;
}

std::string format_ratio(std::int64_t a, std::int64_t b) {
  return b > 0 ? join(decimal(a, b), "x") : std::string("-");
}

}  // namespace headwater::detail
