// The planner: validate -> tables -> rows -> forest -> cut -> schedule -> workspace.
#include <algorithm>
#include <array>
#include <limits>
#include <span>
#include <utility>

#include "cpu/scratch.h"
#include "headwater/plan.h"
#include "plan/cut.h"
#include "plan/forest.h"
#include "plan/layout.h"
#include "plan/memory.h"
#include "plan/rows.h"
#include "plan/schedule.h"
#include "plan/units.h"
#include "plan/validate.h"

namespace headwater {
namespace detail {

PlanData::PlanData() : memory(std::make_unique<Memory>()) {}
PlanData::~PlanData() = default;

namespace {

constexpr std::int64_t kNoBar = std::numeric_limits<std::int64_t>::max();

std::size_t align(std::size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

/// Bytes that a worker needs whatever kernel runs: the SIMD kernels' formula, and the scalar kernel's (q, two states
/// and four numbers a stacked row; one key and one value).
std::size_t scratch_bytes(const AttentionShape& s, int max_rows) {
  const cpu::ScratchShape shape{s.num_kv_heads, s.group_size(), s.head_dim_qk, s.head_dim_vo, true};
  const std::size_t stacked = static_cast<std::size_t>(max_rows) * static_cast<std::size_t>(s.group_size());
  const auto dqk = static_cast<std::size_t>(s.head_dim_qk);
  const auto dvo = static_cast<std::size_t>(s.head_dim_vo);
  const std::size_t scalar = (stacked * (dqk + 2 * dvo + 4) + dqk + dvo) * sizeof(float);
  return align(std::max(cpu::scratch_bytes(shape, max_rows), scalar));
}

void set_workspace(PlanData& plan) {
  const auto heads = static_cast<std::size_t>(plan.shape.num_qo_heads);
  const auto states = static_cast<std::size_t>(plan.num_partials) * heads;
  plan.partial_o_bytes = align(states * static_cast<std::size_t>(plan.shape.head_dim_vo) * sizeof(float));
  plan.scratch_offset = plan.partial_o_bytes + align(states * sizeof(float));
  plan.scratch_bytes_per_worker = plan.items.empty() ? 0 : scratch_bytes(plan.shape, plan.max_item_rows);
  plan.workspace_bytes =
      plan.scratch_offset + static_cast<std::size_t>(plan.num_workers) * plan.scratch_bytes_per_worker;
}

/// From where on at least two members read a piece.
std::int32_t shared_begin(const PlanData::Memory& memory, const Piece& piece) {
  std::int32_t first = std::numeric_limits<std::int32_t>::max();
  std::int32_t second = first;
  for (std::int32_t k = 0; k < piece.num_members; ++k) {
    const std::int32_t e = memory.forest.order[static_cast<std::size_t>(piece.member_begin + k)];
    const std::int32_t begin = memory.entries[static_cast<std::size_t>(e)].tok_begin;
    second = std::min(second, std::max(first, begin));
    first = std::min(first, begin);
  }
  return std::clamp(second, piece.tok_begin, piece.tok_end);
}

/// Keys that a row sees.
std::int64_t visible_keys(const RowRange& row, std::int32_t first, std::int32_t sinks) {
  const std::int64_t window = std::max(0, row.hi - row.lo);
  return window + std::max(0, std::min({row.lo, sinks, row.hi}) - first);
}

void set_stats(const CostModel& cost, PlanData& plan) {
  const PlanData::Memory& memory = *plan.memory;
  PlanStats& s = plan.stats;
  s.num_requests = memory.num_requests;
  s.num_rows = static_cast<std::int64_t>(plan.rows.size());
  s.num_items = static_cast<std::int64_t>(plan.items.size());
  s.num_partials = plan.num_partials;
  s.num_spans = static_cast<std::int64_t>(plan.spans.size());
  s.path = plan.spans.empty() ? Path::flat : Path::cascade;
  s.shared_tokens = 0;
  s.member_sequences = 0;
  for (const SharedSpan& span : plan.spans) {
    s.shared_tokens += span.num_tokens;
    s.member_sequences += span.num_members;
  }
  const std::int64_t head_bytes = cost.token_bytes() / plan.shape.num_kv_heads;
  s.kv_bytes_read = 0;
  for (const WorkItem& item : plan.items) {
    s.kv_bytes_read += item.num_tokens * head_bytes * (item.kv_head_end - item.kv_head_begin);
  }
  if (plan.spans.empty()) s.kv_bytes_flat = s.kv_bytes_read;
  s.kv_bytes_unique = s.kv_bytes_flat;
  if (memory.scanned) {
    std::int64_t tokens = 0;
    for (const Node& node : memory.forest.nodes) {
      const bool inner = !memory.forest.levels && node.parent >= 0;
      const std::int32_t begin =
          inner ? memory.forest.nodes[static_cast<std::size_t>(node.parent)].tok_end : node.tok_begin;
      tokens += std::max(0, node.tok_end - begin);
    }
    s.kv_bytes_unique = std::min(s.kv_bytes_flat, tokens * cost.token_bytes());
  }
  const std::int32_t sinks = sink_limit(plan.options);
  std::int64_t keys = 0;
  for (std::int32_t b = 0; b < memory.num_requests; ++b) {
    std::int32_t first = 0;
    if (memory.level_size.empty()) {
      const Table& t = memory.tables[static_cast<std::size_t>(b)];
      first = t.start_page * plan.page_size[0] + t.first_offset;
    }
    for (std::int32_t r = memory.qo_indptr[static_cast<std::size_t>(b)];
         r < memory.qo_indptr[static_cast<std::size_t>(b) + 1]; ++r) {
      keys += visible_keys(plan.rows[static_cast<std::size_t>(r)], first, sinks);
    }
  }
  s.flops = 2 * keys * plan.shape.num_qo_heads * (plan.shape.head_dim_qk + plan.shape.head_dim_vo);
}

}  // namespace
}  // namespace detail

using namespace detail;  // NOLINT: the rest of this file is the implementation of the public class on those parts

struct Planner::Scratch {
  /// A cut that is weighed against others.
  struct Candidate {
    Policy policy = Policy::flat;
    Closed closed;
    std::vector<Piece> pieces;
    Units units;
    Estimate estimate;
  };

  DeviceModel model;
  ForestBuilder forest;
  Cutter cutter;
  Estimator estimator;
  Scheduler scheduler;
  Candidate best;
  Candidate trial;

  std::vector<Table> tables;  // of update()
  std::vector<Entry> old_entries;
  std::vector<RowRange> old_rows;
  std::vector<std::uint8_t> fate;  // of each request
  PlanData::Memory next;

  void make_tables(PlanData& plan, const Batch& batch);
  bool carry_over(PlanData& plan, const Batch& batch, const Changes* changes);
  void find_fates(const PlanData& plan, const Batch& batch, const Changes* changes);
  void find_forest(PlanData& plan);
  void decide(PlanData& plan);
};

namespace {

Policy effective_policy(const PlanOptions& o) {
  if (o.cascade == CascadeSwitch::off) return Policy::flat;
  if (o.cascade == CascadeSwitch::on) return Policy::forest;
  return o.policy;
}

void check_level_ids(const Batch& batch) {
  for (std::size_t l = 0; l < batch.levels.size(); ++l) {
    const PageTable& kv = batch.levels[l].kv;
    check_page_ids(kv, 0, kv.indptr.back(), "levels[" + std::to_string(l) + "].kv_indices");
  }
}

}  // namespace

void Planner::Scratch::make_tables(PlanData& plan, const Batch& batch) {
  PlanData::Memory& memory = *plan.memory;
  plan.page_history = {std::make_shared<const char>(), 0, {}};
  if (batch.levels.empty()) {
    plan.page_size = {batch.kv.page_size};
    plan.num_pages = {batch.kv.num_pages};
    memory.num_requests = static_cast<std::int32_t>(batch.qo_indptr.size()) - 1;
    memory.qo_indptr.assign(batch.qo_indptr.begin(), batch.qo_indptr.end());
    memory.null_page = batch.kv.null_page;
    const std::int32_t total = read_tables(batch, memory.tables);
    make_rows_and_entries(plan.options, batch.kv.page_size, memory, plan.rows);
    copy_page_ids(batch, memory.tables, memory.entries, total, plan.page_ids);
  } else {
    for (const Level& level : batch.levels) {
      plan.page_size.push_back(level.kv.page_size);
      plan.num_pages.push_back(level.kv.num_pages);
    }
    check_level_ids(batch);
    read_levels(batch, plan.options, plan);
  }
}

void Planner::Scratch::find_forest(PlanData& plan) {
  PlanData::Memory& memory = *plan.memory;
  // Policy `flat` looks too, for its statistics and the predicted time of re-reads; the switch `off` does not.
  memory.scanned = plan.options.cascade != CascadeSwitch::off || memory.forest.levels;
  if (memory.forest.levels) return;
  if (!memory.scanned) {
    memory.forest = {};
    return;
  }
  forest.build(memory.entries, plan.page_ids, memory.null_page, plan.page_size[0], plan.options, memory.forest);
  finish_forest(memory.entries, plan.page_size[0], plan.options, memory.forest);
}

void Planner::Scratch::decide(PlanData& plan) {
  PlanData::Memory& memory = *plan.memory;
  const Forest& f = memory.forest;
  const CostModel cost(plan.shape, plan.options, model);
  plan.num_workers = cost.num_workers();
  cutter.begin(cost, plan.options, plan.page_size);
  const auto estimate = [&](Candidate& c, std::int64_t bar_ps) {
    const std::int64_t saved = memory.scanned || c.policy != Policy::flat ? cutter.cached_rereads_ps(f, c.closed) : 0;
    c.estimate = estimator.estimate(cost, plan, c.pieces, saved, bar_ps, c.units);
  };
  best.policy = Policy::flat;
  best.closed.assign(f.nodes.size(), 0);
  Cutter::make_flat_pieces(f, memory.entries, best.pieces);
  estimate(best, kNoBar);
  plan.stats.predicted_flat_ps = best.estimate.predicted_ps;
  plan.stats.kv_bytes_flat = best.estimate.kv_bytes;

  // Candidates other than flat, in order; a later one must be better than all before.
  constexpr std::array kAutomatic{Policy::automatic, Policy::two_level, Policy::forest};
  const bool shared = std::ranges::any_of(f.nodes, [](const Node& node) { return node.num_members > 1; });
  const Policy policy = shared ? effective_policy(plan.options) : Policy::flat;
  const std::span<const Policy> candidates =
      policy == Policy::automatic ? std::span<const Policy>(kAutomatic) : std::span<const Policy>(&policy, 1);
  for (const Policy candidate : candidates) {
    trial.policy = candidate;
    if (!cutter.close(f, plan, candidate, trial.closed) || trial.closed == best.closed) continue;
    cutter.make_pieces(f, memory.entries, trial.closed, trial.pieces);
    // A forced policy is taken as it is; the cost model must see a gain, and over flat one of 2 %.
    const std::int64_t time = best.estimate.predicted_ps;
    std::int64_t bar = best.policy == Policy::flat ? time - time / 50 : time;
    if (policy != Policy::automatic) bar = kNoBar;
    estimate(trial, bar);
    if (trial.estimate.predicted_ps < bar) std::swap(best, trial);
  }
  plan.stats.predicted_ps = best.estimate.predicted_ps;
  memory.chosen = best.policy;
  memory.closed.swap(best.closed);
  memory.pieces.swap(best.pieces);
  memory.model = model;
  scheduler.emit(cost, memory.pieces, best.units, plan);

  plan.spans.clear();
  for (const Piece& piece : memory.pieces) {
    if (piece.num_members < 2) continue;
    const std::int32_t page_size = plan.page_size[static_cast<std::size_t>(piece.view)];
    const std::int32_t begin = f.mixed_starts ? shared_begin(memory, piece) : piece.tok_begin;
    plan.spans.push_back(
        {begin, piece.tok_end - begin,
         (piece.tok_end - piece.origin + page_size - 1) / page_size - (begin - piece.origin) / page_size,
         piece.num_members, piece.depth});
  }
  set_workspace(plan);
  set_stats(cost, plan);
}

Planner::Planner(DeviceModel model) : scratch_(std::make_unique<Scratch>()) {
  check_model(model);
  scratch_->model = model;
}
Planner::~Planner() = default;
Planner::Planner(Planner&&) noexcept = default;
Planner& Planner::operator=(Planner&&) noexcept = default;

const DeviceModel& Planner::model() const noexcept {
  return scratch_->model;
}

Plan Planner::plan(const AttentionShape& shape, const Batch& batch, const PlanOptions& options) {
  check_shape(shape);
  check_options(options);
  check_batch(batch, options);
  Plan plan;
  PlanData& data = plan.data();
  data.shape = shape;
  data.options = options;
  scratch_->make_tables(data, batch);
  scratch_->find_forest(data);
  scratch_->decide(data);
  return plan;
}

namespace {

/// What became of a request since the last plan.
enum Fate : std::uint8_t { kSame, kGrown, kOther };

/// Refuses lists of Changes that name a request that does not exist.
void check_list(std::span<const std::int32_t> list, const char* name, std::int32_t count) {
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (list[i] >= 0 && list[i] < count) continue;
    throw Error(ErrorCode::invalid_argument, "changes." + std::string(name) + "[" + std::to_string(i) +
                                                 "] = " + std::to_string(list[i]) + ", expected 0.." +
                                                 std::to_string(count - 1));
  }
}

bool same_ids(const PlanData& plan, const Batch& batch, const Table& old, std::size_t b) {
  const std::int32_t* now = batch.kv.indices.data() + batch.kv.indptr[b];
  return std::equal(now, now + old.num_pages, plan.page_ids.data() + old.region);  // no pages: null pointers are fine
}

}  // namespace

/// Fills `fate` for a batch of as many requests as before, whose `tables` have been read.
void Planner::Scratch::find_fates(const PlanData& plan, const Batch& batch, const Changes* changes) {
  const PlanData::Memory& memory = *plan.memory;
  fate.assign(tables.size(), kSame);
  if (changes != nullptr) {
    for (const std::int32_t b : changes->grown) fate[static_cast<std::size_t>(b)] = kGrown;
    for (const std::int32_t b : changes->joined) fate[static_cast<std::size_t>(b)] = kOther;
  }
  for (std::size_t b = 0; b < tables.size(); ++b) {
    const Table& old = memory.tables[b];
    const Table& now = tables[b];
    const bool may_have_grown =
        now.num_pages >= old.num_pages && now.start_page == old.start_page && now.first_offset == old.first_offset;
    const bool same_length = now.num_pages == old.num_pages && now.last_len == old.last_len;
    if (changes == nullptr) {
      fate[b] = !may_have_grown || !same_ids(plan, batch, old, b) ? kOther : same_length ? kSame : kGrown;
      continue;
    }
    if (fate[b] == kOther) continue;
    bool true_to_list = may_have_grown && (fate[b] == kGrown || same_length);
#ifndef NDEBUG
    true_to_list = true_to_list && same_ids(plan, batch, old, b);
#endif
    if (!true_to_list) {
      throw Error(ErrorCode::invalid_argument, "changes: request " + std::to_string(b) +
                                                   (fate[b] == kGrown ? " is listed as grown" : " is not listed") +
                                                   ", but its page table changed in another way");
    }
  }
}

/// Brings tables, rows and forest of a plan up to date by what changed. False: nothing was touched, plan from nothing.
bool Planner::Scratch::carry_over(PlanData& plan, const Batch& batch, const Changes* changes) {
  PlanData::Memory& memory = *plan.memory;
  if (!batch.levels.empty() || !memory.level_size.empty() || plan.page_size.empty()) return false;
  if (plan.page_size[0] != batch.kv.page_size || plan.num_pages[0] != batch.kv.num_pages ||
      memory.null_page != batch.kv.null_page) {
    return false;
  }
  const auto count = static_cast<std::int32_t>(batch.qo_indptr.size()) - 1;
  if (changes != nullptr) {
    check_list(changes->grown, "grown", count);
    check_list(changes->joined, "joined", count);
    check_list(changes->left, "left", memory.num_requests);
  }
  if (count != memory.num_requests || (changes != nullptr && !changes->left.empty())) return false;
  const std::int32_t total = read_tables(batch, tables);
  find_fates(plan, batch, changes);

  next.num_requests = count;
  next.qo_indptr.assign(batch.qo_indptr.begin(), batch.qo_indptr.end());
  next.tables.swap(tables);
  make_rows_and_entries(plan.options, batch.kv.page_size, next, old_rows);
  const bool windowed = plan.options.window_left >= 0 || plan.options.local_chunk > 0;
  for (const Entry& e : next.entries) {
    const auto b = static_cast<std::size_t>(e.request);
    const Table& old = memory.tables[b];
    const std::int64_t base = std::int64_t{batch.kv.indptr[b]} - next.tables[b].start_page;
    std::int32_t begin = e.page_begin;
    // What was there before has been checked, unless no row saw it.
    const TokenSpan tokens = tokens_of(old, batch.kv.page_size);
    const bool was_seen = memory.qo_indptr[b] < memory.qo_indptr[b + 1] && tokens.begin + old.first_offset < tokens.end;
    if (fate[b] != kOther && !windowed && was_seen) begin = std::max(begin, old.start_page + old.num_pages);
    if (begin < e.page_end) check_page_ids(batch.kv, base + begin, base + e.page_end, "kv_indices");
  }

  // Nothing is refused from here on.
  bool moved = false;
  bool other = false;
  for (std::size_t b = 0; b < fate.size(); ++b) {
    moved = moved || memory.tables[b].region != next.tables[b].region;
    other = other || fate[b] == kOther;
  }
  moved = moved || plan.page_ids.size() != static_cast<std::size_t>(total);
  PageHistory& history = plan.page_history;
  ++history.version;
  history.changed.clear();
  if (moved) {
    copy_page_ids(batch, next.tables, {}, total, plan.page_ids);
    history.changed.push_back({0, total});
  } else {
    for (std::size_t b = 0; b < fate.size(); ++b) {
      const Table& now = next.tables[b];
      if (fate[b] == kOther) {
        copy_table(batch.kv, b, now, plan.page_ids.data());
        history.changed.push_back({now.region, now.region + region_size(now.num_pages)});
      }
      const std::int32_t from = memory.tables[b].num_pages;
      if (fate[b] != kGrown || now.num_pages == from) continue;
      std::copy_n(batch.kv.indices.data() + batch.kv.indptr[b] + from, now.num_pages - from,
                  plan.page_ids.data() + now.region + from);
      history.changed.push_back({now.region + from, now.region + now.num_pages});
    }
  }
  plan.rows.swap(old_rows);
  memory.qo_indptr.swap(next.qo_indptr);
  memory.tables.swap(next.tables);
  memory.entries.swap(next.entries);
  memory.row_first.swap(next.row_first);
  if (memory.scanned && !other && still_holds(memory.forest, next.entries, memory.entries)) {
    finish_forest(memory.entries, plan.page_size[0], plan.options, memory.forest);
  } else {
    find_forest(plan);
  }
  return true;
}

void Planner::update(Plan& old, const Batch& batch, const Changes* changes) {
  PlanData& data = old.data();
  if (data.page_size.empty()) throw Error(ErrorCode::invalid_argument, "plan is empty, expected one made by plan()");
  check_batch(batch, data.options);
  if (scratch_->carry_over(data, batch, changes)) {
    try {
      scratch_->decide(data);
    } catch (...) {
      old = Plan();  // half of it is the new batch's
      throw;
    }
  } else {
    old = plan(data.shape, batch, data.options);
  }
}

Plan::Plan() : data_(std::make_unique<PlanData>()) {}
Plan::~Plan() = default;
Plan::Plan(Plan&&) noexcept = default;
Plan& Plan::operator=(Plan&&) noexcept = default;

std::size_t Plan::workspace_size() const noexcept {
  return data_->workspace_bytes;
}

const PlanStats& Plan::stats() const noexcept {
  return data_->stats;
}

}  // namespace headwater
