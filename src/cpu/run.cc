// Execution of a plan: check, attend, merge.
//
// Phase 1 takes work items from a queue (an atomic index; items are sorted longest first) until none is left. Phase 2 merges
// the rows that have several states and writes the rows that have no key. Which worker takes an item changes no bits.
// Workspace: partial_o fp32 [num_partials, Hq, Dvo] | partial_lse fp32 [num_partials, Hq] | pad to 64 bytes |
// scratch memory of each worker.
#include "cpu/run.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <span>

#include "cpu/validate.h"

namespace headwater::cpu {
namespace {

/// Work below this stays on the calling thread: waking a worker can cost as much.
constexpr std::int64_t kSerialPs = 50'000'000;
/// Elements of partial states below which the caller merges alone (about 10 us).
constexpr std::int64_t kSerialMergeElements = 32 * 1024;
constexpr std::size_t kCacheLine = 64;

constexpr std::size_t align_up(std::size_t n, std::size_t to) noexcept { return (n + to - 1) / to * to; }

std::int64_t num_rows(const detail::PlanData& plan) noexcept { return static_cast<std::int64_t>(plan.rows.size()); }

std::string described(std::string_view what, std::string_view of) {
  std::string s(what);
  s += " (";
  s += of;
  s += ")";
  return s;
}

void check_dtype(const char* name, DType got, DType expected, const char* of) {
  if (got != expected) refuse(ErrorCode::invalid_argument, name, name_of(got), described(name_of(expected), of));
}

void check_caches(const detail::PlanData& plan, std::span<const KvCache> caches) {
  const AttentionShape& shape = plan.shape;
  const auto views = static_cast<std::int64_t>(plan.page_size.size());
  if (static_cast<std::int64_t>(caches.size()) != views) {
    refuse(ErrorCode::invalid_argument, "kv.size()", static_cast<std::int64_t>(caches.size()),
           described(std::to_string(views), "one cache for each level of the batch"));
  }
  for (std::size_t i = 0; i < caches.size(); ++i) {
    const KvCache& cache = caches[i];
    const ArgName name("kv", static_cast<std::int64_t>(i));
    if (cache.dtype != shape.kv_dtype) {
      refuse(ErrorCode::invalid_argument, name.field(".dtype"), name_of(cache.dtype),
             described(name_of(shape.kv_dtype), "the plan's kv_dtype"));
    }
    if (cache.page_size != plan.page_size[i]) {
      refuse(ErrorCode::invalid_argument, name.field(".page_size"), cache.page_size,
             described(std::to_string(plan.page_size[i]), "the plan's page_size"));
    }
    if (cache.num_pages < plan.num_pages[i]) {
      refuse(ErrorCode::invalid_argument, name.field(".num_pages"), cache.num_pages,
             "at least " + described(std::to_string(plan.num_pages[i]), "the plan's num_pages"));
    }
    check_cache("kv", static_cast<std::int64_t>(i), cache, shape.num_kv_heads, shape.head_dim_qk, shape.head_dim_vo);
  }
}

/// A pointer that must be given exactly when the plan was told so.
void check_promised(const char* name, const float* data, bool promised, bool may_be_absent, const char* option) {
  if (data != nullptr && !promised) {
    refuse(ErrorCode::invalid_argument, name, "a pointer", described("nullptr", std::string(option) + " is off"));
  }
  if (data == nullptr && promised && !may_be_absent) {
    refuse(ErrorCode::invalid_argument, name, "nullptr",
           described("num_qo_heads values", std::string(option) + " is on"));
  }
}

void check_workspace(const detail::PlanData& plan, const Workspace& workspace) {
  if (plan.workspace_bytes == 0) return;
  if (workspace.data == nullptr || workspace.bytes < plan.workspace_bytes) {
    const std::size_t got = workspace.data == nullptr ? 0 : workspace.bytes;
    refuse(ErrorCode::workspace_too_small, "workspace.bytes", static_cast<std::int64_t>(got),
           "at least " + described(std::to_string(plan.workspace_bytes), "plan.workspace_size()"));
  }
  const auto off = reinterpret_cast<std::uintptr_t>(workspace.data) % kWorkspaceAlignment;
  if (off != 0) {
    refuse(ErrorCode::workspace_too_small, "workspace.data", "an address " + std::to_string(off) + " bytes off",
           "alignment to " + std::to_string(kWorkspaceAlignment) + " bytes");
  }
}

/// What the items need together.
struct Demand {
  std::int64_t work_ps = 0;
  int max_rows = 0;
};

Demand demand_of(const detail::PlanData& plan) noexcept {
  Demand demand;
  for (const detail::WorkItem& item : plan.items) {
    demand.work_ps += item.cost_ps;
    demand.max_rows = std::max(demand.max_rows, static_cast<int>(item.num_rows));
  }
  return demand;
}

/// State of one run, shared by its workers.
struct Run {
  const detail::PlanData& plan;
  const Kernels& kernels;
  const AttendParams& params;
  std::byte* scratch;
  std::size_t scratch_bytes;  ///< of one worker
  int num_workers;
  alignas(kCacheLine) std::atomic<std::int64_t> next_item{0};
  alignas(kCacheLine) std::atomic<std::int64_t> next_row{0};
  alignas(kCacheLine) std::atomic<std::int64_t> items{0};
  std::atomic<std::int64_t> kv_bytes{0};

  void attend(int worker) noexcept {
    if (worker >= num_workers) return;
    const Scratch mine{scratch + static_cast<std::size_t>(worker) * scratch_bytes, scratch_bytes};
    const auto total = static_cast<std::int64_t>(plan.items.size());
    std::int64_t done = 0;
    std::int64_t bytes = 0;
    for (std::int64_t i = next_item.fetch_add(1, std::memory_order_relaxed); i < total;
         i = next_item.fetch_add(1, std::memory_order_relaxed)) {
      const detail::WorkItem& item = plan.items[static_cast<std::size_t>(i)];
      kernels.attend(params, item, mine);
      ++done;
      bytes += kv_bytes_of(plan.shape, item);
    }
    items.fetch_add(done, std::memory_order_relaxed);
    kv_bytes.fetch_add(bytes, std::memory_order_relaxed);
  }

  /// Rows are taken in small blocks; those without keys follow the merged ones.
  void merge() noexcept {
    constexpr std::int64_t kBlock = 4;
    const auto merged = static_cast<std::int64_t>(plan.merge_rows.size());
    const auto total = merged + static_cast<std::int64_t>(plan.empty_rows.size());
    for (std::int64_t begin = next_row.fetch_add(kBlock, std::memory_order_relaxed); begin < total;
         begin = next_row.fetch_add(kBlock, std::memory_order_relaxed)) {
      for (std::int64_t i = begin; i < std::min(begin + kBlock, total); ++i) {
        if (i < merged) {
          const auto at = static_cast<std::size_t>(i);
          const std::int32_t first = plan.merge_indptr[at];
          kernels.merge_row(params, plan.merge_rows[at], plan.merge_slots.data() + first,
                            plan.merge_indptr[at + 1] - first);
        } else {
          kernels.merge_row(params, plan.empty_rows[static_cast<std::size_t>(i - merged)], nullptr, 0);
        }
      }
    }
  }
};

}  // namespace

void check_run_args(const detail::PlanData& plan, const RunArgs& args) {
  const AttentionShape& shape = plan.shape;
  const std::int64_t rows = num_rows(plan);
  check_dtype("q.dtype", args.q.dtype, shape.q_dtype, "the plan's q_dtype");
  check_rows("q", args.q, rows, shape.num_qo_heads, shape.head_dim_qk);
  check_caches(plan, args.kv);
  check_dtype("out.dtype", args.out.dtype, shape.out_dtype, "the plan's out_dtype");
  check_rows("out", args.out, rows, shape.num_qo_heads, shape.head_dim_vo);
  if (args.lse.data != nullptr) check_lse("lse", args.lse, rows, shape.num_qo_heads);
  check_promised("alibi_slopes", args.alibi_slopes, plan.options.alibi, false, "options.alibi");
  check_promised("sinks", args.sinks, plan.options.sinks, !args.include_sink, "options.sinks");
  check_scale("k_scale", args.k_scale, shape.num_kv_heads);
  check_scale("v_scale", args.v_scale, shape.num_kv_heads);
  check_workspace(plan, args.workspace);
}

AttendParams make_params(const detail::PlanData& plan, const RunArgs& args) noexcept {
  const AttentionShape& shape = plan.shape;
  AttendParams p;
  p.num_qo_heads = shape.num_qo_heads;
  p.num_kv_heads = shape.num_kv_heads;
  p.group_size = shape.group_size();
  p.head_dim_qk = shape.head_dim_qk;
  p.head_dim_vo = shape.head_dim_vo;
  p.q = args.q;
  p.kv = args.kv.data();
  p.out = args.out;
  p.lse = args.lse;
  p.page_ids = plan.page_ids.data();
  p.item_rows = plan.item_rows.data();
  p.rows = plan.rows.data();
  p.sm_scale = plan.options.sm_scale != 0.0F ? plan.options.sm_scale
                                             : 1.0F / std::sqrt(static_cast<float>(shape.head_dim_qk));
  p.logits_soft_cap = plan.options.logits_soft_cap;
  p.alibi_slopes = args.alibi_slopes;
  p.sinks = args.include_sink ? args.sinks : nullptr;
  p.k_scale = args.k_scale;
  p.v_scale = args.v_scale;
  p.num_sink_tokens = plan.options.num_sink_tokens;
  if (plan.num_partials > 0) {
    auto* const base = static_cast<std::byte*>(args.workspace.data);
    p.partial_o = reinterpret_cast<float*>(base);
    p.partial_lse = reinterpret_cast<float*>(base + plan.partial_o_bytes);
  }
  p.batch_invariant = plan.options.batch_invariant;
  p.invariant_chunk = plan.options.invariant_chunk;
  return p;
}

std::size_t scratch_offset(const detail::PlanData& plan) noexcept {
  const std::size_t lse_bytes = static_cast<std::size_t>(plan.num_partials) *
                                static_cast<std::size_t>(plan.shape.num_qo_heads) * sizeof(float);
  return align_up(plan.partial_o_bytes + lse_bytes, kWorkspaceAlignment);
}

std::int64_t kv_bytes_of(const AttentionShape& shape, const detail::WorkItem& item) noexcept {
  return std::int64_t{item.num_tokens} * (item.kv_head_end - item.kv_head_begin) *
         (shape.head_dim_qk + shape.head_dim_vo) * static_cast<std::int64_t>(size_of(shape.kv_dtype));
}

RunOutcome run(const Plan& plan_handle, const RunArgs& args, Executor& executor) {
  const detail::PlanData& plan = plan_handle.data();
  check_run_args(plan, args);
  const Kernels& kernels = kernels_for(args.isa.value_or(detect_isa()));
  const AttendParams params = make_params(plan, args);
  const Demand demand = demand_of(plan);

  const std::size_t scratch_bytes = align_up(kernels.scratch_bytes(params, demand.max_rows), kWorkspaceAlignment);
  const std::size_t offset = scratch_offset(plan);
  int workers = executor.num_workers();
  if (plan.options.num_workers > 0) workers = std::min(workers, plan.options.num_workers);
  if (!plan.items.empty() && scratch_bytes > 0) {
    const std::size_t room = plan.workspace_bytes > offset ? (plan.workspace_bytes - offset) / scratch_bytes : 0;
    if (room == 0) {
      throw Error(ErrorCode::internal, "plan.workspace_size() = " + std::to_string(plan.workspace_bytes) +
                                           " has no room for scratch memory, expected at least " +
                                           std::to_string(offset + scratch_bytes));
    }
    workers = static_cast<int>(std::min<std::size_t>(static_cast<std::size_t>(workers), room));
  }

  Run run{plan, kernels, params, static_cast<std::byte*>(args.workspace.data) + offset, scratch_bytes, workers};
  const auto parallel = [&](void (*task)(void*, int) noexcept, bool alone) {
    if (alone) {
      task(&run, 0);
    } else {
      executor.parallel(task, &run);
    }
  };
  const bool alone = workers <= 1 || plan.items.size() <= 1 || demand.work_ps < kSerialPs;
  parallel([](void* context, int worker) noexcept { static_cast<Run*>(context)->attend(worker); }, alone);

  const auto merge_elements = static_cast<std::int64_t>(plan.merge_slots.size()) * plan.shape.num_qo_heads *
                              plan.shape.head_dim_vo;
  if (!plan.merge_rows.empty() || !plan.empty_rows.empty()) {
    parallel([](void* context, int /*worker*/) noexcept { static_cast<Run*>(context)->merge(); },
             workers <= 1 || merge_elements < kSerialMergeElements);
  }

  RunOutcome outcome;
  outcome.path = plan.stats.path;
  outcome.isa = kernels.isa;
  outcome.items = run.items.load(std::memory_order_relaxed);
  outcome.kv_bytes_read = run.kv_bytes.load(std::memory_order_relaxed);
  outcome.merged_rows = static_cast<std::int64_t>(plan.merge_rows.size());
  return outcome;
}

}  // namespace headwater::cpu
