#include "plan/cut.h"

#include <algorithm>
#include <limits>

namespace headwater::detail {
namespace {

constexpr std::int64_t kImpossible = std::numeric_limits<std::int64_t>::max() / 8;
/// Run starts looked at by the dynamic programme; deeper forests than these allow use close_all.
constexpr std::int64_t kMaxStates = 1 << 21;

std::int32_t ceil_div(std::int32_t a, std::int32_t b) {
  return (a + b - 1) / b;
}

const Node& at(const Forest& f, std::int32_t i) {
  return f.nodes[static_cast<std::size_t>(i)];
}

}  // namespace

Thresholds thresholds_of(const PlanOptions& options, Policy policy) noexcept {
  Thresholds t;
  if (policy == Policy::two_level) t.min_pages = 16;
  if (options.min_shared_pages > 0) t.min_pages = options.min_shared_pages;
  if (options.min_members > 0) t.min_members = options.min_members;
  return t;
}

void Cutter::begin(const CostModel& cost, const PlanOptions& options,
                   std::span<const std::int32_t> page_size) noexcept {
  cost_ = &cost;
  options_ = &options;
  page_size_ = page_size;
}

bool Cutter::close(const Forest& f, const PlanData& plan, Policy policy, Closed& closed) {
  closed.assign(f.nodes.size(), 0);
  switch (policy) {
    case Policy::automatic:
      close_cheapest(f, closed);
      break;
    case Policy::two_level:
      close_best(f, closed);
      break;
    case Policy::vllm:
      close_vllm(f, plan, closed);
      break;
    case Policy::forest:
      close_all(f, closed);
      break;
    case Policy::flat:
      break;
  }
  return std::ranges::find(closed, 1) != closed.end();
}

/// Cost of reading tokens [begin, node.cut) for all members of a node, `read_ps` of it for the reads of a tile.
inline std::int64_t Cutter::close_ps(const Node& node, std::int32_t begin, std::int64_t read_ps,
                                     bool whole) const noexcept {
  const std::int64_t tokens = node.cut - begin;
  if (tokens <= 0) return 0;
  return cost_->piece_ps(tokens, node.num_rows) + cost_->num_tiles(node.num_rows) * read_ps +
         (whole ? 0 : cost_->partial_ps(node.num_rows));
}

bool Cutter::may_close(const Node& node, std::int32_t run_begin, const Thresholds& t) const noexcept {
  if (node.num_members < std::max(2, t.min_members) || node.cut <= run_begin) return false;
  const std::int32_t page_size = page_size_[static_cast<std::size_t>(node.view)];
  return ceil_div(node.cut - node.origin, page_size) - (run_begin - node.origin) / page_size >= t.min_pages;
}

void Cutter::close_all(const Forest& f, Closed& closed) {
  const Thresholds t = thresholds_of(*options_, Policy::forest);
  run_.resize(f.nodes.size());
  for (std::size_t i = 0; i < f.nodes.size(); ++i) {
    const Node& node = f.nodes[i];
    if (node.num_members == 1) continue;
    const bool fresh = f.levels || node.parent < 0 || closed[static_cast<std::size_t>(node.parent)] != 0;
    run_[i] = fresh ? node.tok_begin : run_[static_cast<std::size_t>(node.parent)];
    closed[i] = may_close(node, run_[i], t) ? 1 : 0;
  }
}

void Cutter::close_best(const Forest& f, Closed& closed) {
  const Thresholds t = thresholds_of(*options_, Policy::two_level);
  run_.resize(f.nodes.size());
  std::int64_t most = 0;
  std::size_t best = 0;
  for (std::size_t i = 0; i < f.nodes.size(); ++i) {
    const Node& node = f.nodes[i];
    if (node.num_members == 1) continue;
    run_[i] = f.levels || node.parent < 0 ? node.tok_begin : run_[static_cast<std::size_t>(node.parent)];
    if (!may_close(node, run_[i], t)) continue;
    const std::int32_t page_size = page_size_[static_cast<std::size_t>(node.view)];
    const std::int64_t saved = std::int64_t{ceil_div(node.cut - run_[i], page_size)} * (node.num_members - 1);
    if (saved <= most) continue;
    most = saved;
    best = i;
  }
  if (most > 0) closed[best] = 1;
}

void Cutter::close_vllm(const Forest& f, const PlanData& plan, Closed& closed) const {
  if (f.nodes.empty() || f.nodes[0].tok_begin != 0) return;
  const PlanOptions& o = *options_;
  if (o.alibi || o.window_left >= 0 || o.local_chunk > 0) return;
  const auto& qo = plan.memory->qo_indptr;
  std::int32_t running = 0;
  bool one_row_each = true;
  std::int64_t prefix = at(f, 0).cut;
  for (std::size_t b = 0; b + 1 < qo.size(); ++b) {
    const std::int32_t rows = qo[b + 1] - qo[b];
    if (rows == 0) continue;
    ++running;
    one_row_each = one_row_each && rows == 1;
    prefix =
        std::min<std::int64_t>(prefix, plan.rows[static_cast<std::size_t>(qo[b])].pos);  // computed before the step
  }
  if (at(f, 0).num_members != running || running < 8) return;
  prefix = std::max<std::int64_t>(0, prefix) / page_size_[0] * page_size_[0];
  if (prefix < 256) return;
  const AttentionShape& s = plan.shape;
  bool use = !one_row_each || s.group_size() == 1;
  if (!use) {
    const std::int64_t sms = cost_->num_workers();
    const auto ceil = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
    const std::int64_t tiles = ceil(prefix, 128);
    const std::int64_t cascade = ceil(s.num_qo_heads * ceil(running, 128), sms) * tiles;
    const std::int64_t split_kv = ceil(std::int64_t{running} * s.num_kv_heads * ceil(s.group_size(), 128) * tiles, sms);
    use = cascade < split_kv;
  }
  if (use && may_close(at(f, 0), at(f, 0).tok_begin, thresholds_of(o, Policy::vllm))) closed[0] = 1;
}

void Cutter::close_cheapest_levels(const Forest& f, Closed& closed) const {
  const Thresholds t = thresholds_of(*options_, Policy::automatic);
  for (std::size_t i = 0; i < f.nodes.size(); ++i) {
    const Node& node = f.nodes[i];
    if (!may_close(node, node.tok_begin, t)) continue;
    const std::int64_t tokens = node.cut - node.tok_begin;
    const std::int32_t rows_each = std::max(1, node.num_rows / node.num_members);
    const std::int64_t reread = cost_->reread_ps(tokens, tokens);
    const std::int64_t apart = node.num_members * (cost_->piece_ps(tokens, rows_each) + reread);
    const std::int64_t together = cost_->piece_ps(tokens, node.num_rows) + cost_->num_tiles(node.num_rows) * reread;
    if (together < apart) closed[i] = 1;
  }
}

// Run k starts at the k-th ancestor of a node (k = depth: at the node itself); cost k of a node is the least cost of
// everything that its members read from the start of run k on. Closing a node costs one piece for all members, and then
// each child starts a run of its own; pushing it down costs nothing here but every child reads the run again. First
// reads of a page cost the same in every cut and are left out. Children come before their parents here and add their
// costs to sums_[offset_[parent] + k]: up to the parent's depth what pushing costs, behind it what comes after closing.
void Cutter::close_cheapest(const Forest& f, Closed& closed) {
  if (f.levels) return close_cheapest_levels(f, closed);
  const Thresholds t = thresholds_of(*options_, Policy::automatic);
  const auto n = static_cast<std::int32_t>(f.nodes.size());
  offset_.resize(f.nodes.size());
  read_prefix_.resize(f.nodes.size());
  std::int64_t states = 0;
  std::int64_t num_sums = 0;
  for (std::int32_t i = 0; i < n; ++i) {
    const Node& node = at(f, i);
    states += node.depth + 1;
    if (node.num_members == 1) continue;
    offset_[static_cast<std::size_t>(i)] = num_sums;
    num_sums += node.depth + 2;
    const std::int64_t above = node.parent < 0 ? 0 : read_prefix_[static_cast<std::size_t>(node.parent)];
    const std::int64_t tokens = std::max(0, node.cut - node.tok_begin);
    read_prefix_[static_cast<std::size_t>(i)] = above + cost_->reread_ps(tokens, node.cut);
  }
  if (states > kMaxStates) return close_all(f, closed);
  sums_.assign(static_cast<std::size_t>(num_sums), 0);
  choice_.resize(static_cast<std::size_t>(num_sums));
  goes_on_.assign(f.nodes.size(), 0);
  for (std::int32_t i = n; i-- > 0;) {
    if (at(f, i).num_members == 1) {
      cost_leaf(f, i);
    } else {
      cost_inner(f, i, t);
    }
  }
  // Trace from the roots.
  run_.resize(f.nodes.size());
  for (std::int32_t i = 0; i < n; ++i) {
    const Node& node = at(f, i);
    if (node.num_members == 1) continue;
    const auto self = static_cast<std::size_t>(i);
    const bool fresh = node.parent < 0 || closed[static_cast<std::size_t>(node.parent)] != 0;
    run_[self] = fresh ? node.depth : run_[static_cast<std::size_t>(node.parent)];
    closed[self] = choice_[static_cast<std::size_t>(offset_[self] + run_[self])];
  }
}

/// A leaf is always closed: what is left of its entry is read in one piece.
void Cutter::cost_leaf(const Forest& f, std::int32_t i) {
  const Node& node = at(f, i);
  if (node.parent < 0) return;
  const auto up = static_cast<std::size_t>(node.parent);
  if (node.cut > at(f, node.parent).cut) goes_on_[up] = 1;
  std::int64_t* sums = sums_.data() + offset_[up];
  const std::int64_t reads = read_prefix_[up] + cost_->read_ps(std::max(0, node.cut - node.tok_begin));
  std::int32_t top = i;
  for (std::int32_t k = node.depth; k >= 0; --k, top = at(f, top).parent) {
    const std::int32_t above = at(f, top).parent;
    const std::int64_t read = reads - (above < 0 ? 0 : read_prefix_[static_cast<std::size_t>(above)]);
    sums[k] += std::min(kImpossible, close_ps(node, at(f, top).tok_begin, read, k == 0));
  }
}

void Cutter::cost_inner(const Forest& f, std::int32_t i, const Thresholds& t) {
  const Node& node = at(f, i);
  const auto self = static_cast<std::size_t>(i);
  const std::int64_t* sums = sums_.data() + offset_[self];
  const std::int64_t after = sums[node.depth + 1];
  std::uint8_t* choice = choice_.data() + offset_[self];
  std::int64_t* up = nullptr;
  if (node.parent >= 0) {
    up = sums_.data() + offset_[static_cast<std::size_t>(node.parent)];
    goes_on_[static_cast<std::size_t>(node.parent)] = 1;
  }
  std::int32_t top = i;
  for (std::int32_t k = node.depth; k >= 0; --k, top = at(f, top).parent) {
    const std::int32_t begin = at(f, top).tok_begin;
    const std::int32_t above = at(f, top).parent;
    const std::int64_t read = read_prefix_[self] - (above < 0 ? 0 : read_prefix_[static_cast<std::size_t>(above)]);
    const bool whole = k == 0 && goes_on_[self] == 0;  // a row's only piece: no partial state
    const std::int64_t close = may_close(node, begin, t) ? close_ps(node, begin, read, whole) + after : kImpossible;
    choice[k] = close < sums[k] ? 1 : 0;
    if (up != nullptr) up[k] += std::min(close, sums[k]);
  }
}

void Cutter::make_flat_pieces(const Forest& f, std::span<const Entry> entries, std::vector<Piece>& pieces) {
  pieces.clear();
  Piece piece;
  if (f.levels) {
    for (const Node& node : f.nodes) {
      if (node.tok_begin >= node.cut) continue;
      for (std::int32_t k = 0; k < node.num_members; ++k) {
        piece = {node.tok_begin,
                 node.cut,
                 node.page_base,
                 node.origin,
                 node.view,
                 0,
                 1,
                 f.order[static_cast<std::size_t>(node.member_begin + k)],
                 0};
        pieces.push_back(piece);
      }
    }
    return;
  }
  for (std::size_t e = 0; e < entries.size(); ++e) {
    const Entry& entry = entries[e];
    pieces.emplace_back() = {
        entry.tok_begin, entry.tok_end, entry.page_base, 0, 0, 0, 1, static_cast<std::int32_t>(e), 0};
  }
}

void Cutter::make_pieces(const Forest& f, std::span<const Entry> entries, const Closed& closed,
                         std::vector<Piece>& pieces) {
  pieces.clear();
  run_.resize(f.nodes.size());      // first token of a node's run
  at_root_.resize(f.nodes.size());  // the run begins with its tree
  for (std::size_t i = 0; i < f.nodes.size(); ++i) {
    const Node& node = f.nodes[i];
    const auto parent = static_cast<std::size_t>(std::max(0, node.parent));
    const bool fresh = f.levels || node.parent < 0 || closed[parent] != 0;
    const std::int32_t begin = fresh ? node.tok_begin : run_[parent];
    const std::int32_t first = f.order[static_cast<std::size_t>(node.member_begin)];
    if (node.num_members == 1 && !f.levels) {  // a leaf
      if (begin < node.cut) {
        pieces.emplace_back() = {begin, node.cut, node.page_base, node.origin, node.view, 0, 1, first, node.depth};
      }
      continue;
    }
    run_[i] = begin;
    at_root_[i] = fresh ? static_cast<std::uint8_t>(node.parent < 0) : at_root_[parent];
    if (f.levels && closed[i] == 0 && node.tok_begin < node.cut) {
      for (std::int32_t k = 0; k < node.num_members; ++k) {
        pieces.push_back({node.tok_begin, node.cut, node.page_base, node.origin, node.view, 0, 1,
                          f.order[static_cast<std::size_t>(node.member_begin + k)], node.depth});
      }
      continue;
    }
    if ((node.num_members > 1 && closed[i] == 0) || begin >= node.cut) continue;
    std::int32_t page_base = node.page_base;
    if (f.mixed_starts && at_root_[i] != 0) {
      // Read the table of the member that starts first: it has all the pages that the others lack.
      std::int32_t source = first;
      for (std::int32_t k = 1; k < node.num_members; ++k) {
        const std::int32_t e = f.order[static_cast<std::size_t>(node.member_begin + k)];
        if (entries[static_cast<std::size_t>(e)].page_begin < entries[static_cast<std::size_t>(source)].page_begin)
          source = e;
      }
      page_base = entries[static_cast<std::size_t>(source)].page_base;
    }
    pieces.push_back(
        {begin, node.cut, page_base, node.origin, node.view, node.member_begin, node.num_members, first, node.depth});
  }
  if (!f.split_entries) return;
  // Entries that take part in several trees: neighbouring stretches that only they read are one piece.
  std::ranges::stable_sort(pieces, [](const Piece& a, const Piece& b) {
    const bool single_a = a.num_members == 1;
    const bool single_b = b.num_members == 1;
    if (single_a != single_b) return single_b;
    if (!single_a) return false;
    return a.entry != b.entry ? a.entry < b.entry : a.tok_begin < b.tok_begin;
  });
  std::size_t kept = 0;
  for (const Piece& piece : pieces) {
    Piece* last = kept > 0 ? &pieces[kept - 1] : nullptr;
    if (last != nullptr && last->num_members == 1 && piece.num_members == 1 && last->entry == piece.entry &&
        last->tok_end == piece.tok_begin) {
      last->tok_end = piece.tok_end;
    } else {
      pieces[kept++] = piece;
    }
  }
  pieces.resize(kept);
}

std::int64_t Cutter::cached_rereads_ps(const Forest& f, const Closed& closed) {
  const auto n = static_cast<std::int32_t>(f.nodes.size());
  readers_.assign(f.nodes.size(), 0);
  std::int64_t saved = 0;
  for (std::int32_t i = n; i-- > 0;) {
    const Node& node = at(f, i);
    if (node.num_members == 1) {  // read by its own request only
      if (!f.levels && node.parent >= 0 && closed[static_cast<std::size_t>(node.parent)] == 0)
        ++readers_[static_cast<std::size_t>(node.parent)];
      continue;
    }
    const auto self = static_cast<std::size_t>(i);
    const bool closes = closed[self] != 0;
    // Tiles of a closed node are costed with their re-reads; here count the pieces that read it.
    if (f.levels) {
      readers_[self] = closes ? 1 : node.num_members;
    } else if (closes) {
      readers_[self] = 1;
    }
    const std::int64_t tokens = std::max(0, node.cut - node.tok_begin);
    if (readers_[self] > 1) {
      saved += (readers_[self] - 1) *
               (cost_->read_ps(tokens) - cost_->reread_ps(tokens, f.levels ? tokens : std::int64_t{node.cut}));
    }
    if (f.levels || node.parent < 0) continue;
    // Those that carry this node's ancestors with them.
    if (closed[static_cast<std::size_t>(node.parent)] == 0)
      readers_[static_cast<std::size_t>(node.parent)] += readers_[self];
  }
  return saved;
}

}  // namespace headwater::detail
