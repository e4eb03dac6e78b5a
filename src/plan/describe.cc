// Plan::describe(): the decision in words.
#include <algorithm>
#include <string>

#include "headwater/plan.h"
#include "plan/report.h"

namespace headwater {
namespace {

using namespace detail;  // NOLINT: a file of one function and its parts

constexpr int kMostNodes = 64;    ///< of the forest that are listed
constexpr int kMostLeaves = 3;    ///< unshared children of a node that are listed one by one
constexpr int kMostMembers = 12;  ///< requests that are named

std::string plural(std::int64_t n, const std::string& word) {
  return join(format_count(n), " ", word, n == 1 ? "" : "s");
}

/// "requests 0-3, 7".
std::string members_of(const PlanData& plan, const Node& node) {
  const PlanData::Memory& memory = *plan.memory;
  std::vector<std::int32_t> requests;
  for (std::int32_t k = 0; k < node.num_members; ++k) {
    const std::int32_t e = memory.forest.order[static_cast<std::size_t>(node.member_begin + k)];
    requests.push_back(memory.entries[static_cast<std::size_t>(e)].request);
  }
  std::ranges::sort(requests);
  std::string s = requests.size() == 1 ? std::string("request ") : join(plural(node.num_members, "request"), ": ");
  int named = 0;
  for (std::size_t i = 0; i < requests.size();) {
    std::size_t j = i;
    while (j + 1 < requests.size() && requests[j + 1] == requests[j] + 1) ++j;
    if (named++ == kMostMembers) return join(s, ", ...");
    if (i > 0) s += ", ";
    s += std::to_string(requests[i]);
    if (j > i) append(s, j == i + 1 ? ", " : "-", std::to_string(requests[j]));
    i = j + 1;
  }
  return s;
}

void describe_head(const PlanData& p, std::string& out) {
  const PlanStats& s = p.stats;
  const AttentionShape& h = p.shape;
  const Policy asked = p.options.cascade == CascadeSwitch::on ? Policy::forest : p.options.policy;
  append(out, "path ", name_of(s.path), ", policy ", name_of(asked));
  if (p.options.cascade == CascadeSwitch::off) append(out, ", cascade off: not looked for sharing");
  if (asked == Policy::automatic && s.path == Path::cascade) {
    if (p.memory->chosen == Policy::automatic) {
      append(out, " (least cost)");
    } else {
      append(out, " (took ", name_of(p.memory->chosen), ")");
    }
  }
  if (p.options.batch_invariant) {
    append(out, ", batch-invariant in chunks of ", std::to_string(p.options.invariant_chunk));
  }
  append(out, "\n", plural(s.num_requests, "request"), ", ", plural(s.num_rows, "query row"), ", heads ",
         std::to_string(h.num_qo_heads), "/", std::to_string(h.num_kv_heads), " x ", std::to_string(h.head_dim_qk));
  if (h.head_dim_vo != h.head_dim_qk) append(out, "/", std::to_string(h.head_dim_vo));
  append(out, ", q ", name_of(h.q_dtype), ", KV ", name_of(h.kv_dtype), ", pages of ", std::to_string(p.page_size[0]),
         " tokens, ", plural(p.num_workers, "worker"), "\n");
}

void describe_bytes(const PlanData& p, const CostModel& cost, std::string& out) {
  const PlanStats& s = p.stats;
  const auto line = [&](std::string_view name, std::int64_t bytes) {
    append(out, "  ", name, format_count(bytes / cost.token_bytes()), " tokens, ", format_bytes(bytes), "\n");
  };
  append(out, "KV read per layer\n");
  line("flat      ", s.kv_bytes_flat);
  line("this plan ", s.kv_bytes_read);
  line("distinct  ", s.kv_bytes_unique);
  if (s.kv_bytes_read > 0) append(out, "  ", format_ratio(s.kv_bytes_flat, s.kv_bytes_read), " less than flat\n");
  append(out, "predicted per layer: ", format_time(s.predicted_ps), ", flat ", format_time(s.predicted_flat_ps));
  if (s.predicted_ps > 0) append(out, " (", format_ratio(s.predicted_flat_ps, s.predicted_ps), ")");
  append(out, "\n");
}

void describe_forest(const PlanData& p, const CostModel& cost, std::string& out) {
  const Forest& f = p.memory->forest;
  if (!p.memory->scanned) return;
  append(out, "forest\n");
  int listed = 0;
  std::vector<int> leaves(f.nodes.size() + 1, 0);  // listed leaves of each parent; the last: of none
  std::vector<int> hidden(f.nodes.size() + 1, 0);
  const auto parent_of = [&](const Node& n) {
    return n.parent < 0 ? f.nodes.size() : static_cast<std::size_t>(n.parent);
  };
  for (std::size_t i = 0; i < f.nodes.size(); ++i) {
    const Node& node = f.nodes[i];
    const NodeReport r = report_node(p, cost, static_cast<std::int32_t>(i));
    if (r.tok_begin < r.tok_end) {
      if (listed >= kMostNodes || (!r.shared && leaves[parent_of(node)] >= kMostLeaves)) {
        ++hidden[parent_of(node)];
      } else {
        ++listed;
        if (!r.shared) ++leaves[parent_of(node)];
        out.append(2 + 2 * static_cast<std::size_t>(node.depth), ' ');
        append(out, "[", std::to_string(r.tok_begin), ", ", std::to_string(r.tok_end), ") ", plural(r.pages, "page"),
               ", ", members_of(p, node));
        if (r.shared) append(out, "; ", r.reason);
        append(out, "\n");
      }
    }
    // The end of a node's children, and of those of its ancestors that end with it.
    for (std::size_t up = i; up != f.nodes.size() && static_cast<std::size_t>(f.nodes[up].subtree_end) == i + 1;
         up = parent_of(f.nodes[up])) {
      if (hidden[up] == 0) continue;
      out.append(4 + 2 * static_cast<std::size_t>(f.nodes[up].depth), ' ');
      append(out, "... and ", std::to_string(hidden[up]), " more\n");
      hidden[up] = 0;
    }
  }
  if (hidden.back() > 0) append(out, "  ... and ", std::to_string(hidden.back()), " more\n");
}

}  // namespace

std::string Plan::describe() const {
  const PlanData& p = *data_;
  if (p.page_size.empty()) return "empty plan\n";
  const CostModel cost(p.shape, p.options, p.memory->model);
  std::string out;
  describe_head(p, out);
  describe_bytes(p, cost, out);
  describe_forest(p, cost, out);
  append(out, "work: ", plural(p.stats.num_items, "item"), ", ", plural(p.num_partials, "partial row"), ", ",
         plural(static_cast<std::int64_t>(p.merge_rows.size()), "merged row"));
  if (!p.empty_rows.empty()) {
    append(out, ", ", plural(static_cast<std::int64_t>(p.empty_rows.size()), "row"), " without keys");
  }
  if (p.stats.num_spans > 0) {
    append(out, "; ", plural(p.stats.num_spans, "shared span"), " (", plural(p.stats.shared_tokens, "token"), ", ",
           plural(p.stats.member_sequences, "member"), ")");
  }
  append(out, "; workspace ", format_bytes(static_cast<std::int64_t>(p.workspace_bytes)), "\n");
  return out;
}

}  // namespace headwater
