// Execution of a plan: check, attend, merge.
//
// Phase 1 takes work items from a queue (an atomic index; items are sorted longest first) until none is left. Phase 2
// merges the rows that have several states and writes the rows that have no key. Which worker takes an item changes no
// bits. Partial states and the workers' scratch memory lie in the caller's workspace (layout: plan_data.h).
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
constexpr std::int64_t kSerialMergeElements = std::int64_t{32} * 1024;
constexpr std::size_t kCacheLine = 64;

std::int64_t num_rows(const detail::PlanData& plan) noexcept {
  return static_cast<std::int64_t>(plan.rows.size());
}

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
  if (data != nullptr) check_pointer(name, data, DType::f32);
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

/// Whether the items' predicted time is too short to be worth waking workers for.
bool is_short(const detail::PlanData& plan) noexcept {
  std::int64_t work_ps = 0;
  for (const detail::WorkItem& item : plan.items) {
    work_ps += item.cost_ps;
    if (work_ps >= kSerialPs) return false;
  }
  return true;
}

/// State of one run, shared by its workers.
struct Run {
  const detail::PlanData& plan;
  const Kernels& kernels;
  const AttendParams& params;
  int num_workers;
  std::byte* scratch;
  alignas(kCacheLine) std::atomic<std::int64_t> next_item{0};
  alignas(kCacheLine) std::atomic<std::int64_t> next_row{0};
  alignas(kCacheLine) std::atomic<std::int64_t> items{0};
  std::atomic<std::int64_t> kv_bytes{0};

  void attend(int worker) noexcept {
    if (worker >= num_workers) return;
    const std::size_t bytes_each = plan.scratch_bytes_per_worker;
    const Scratch mine{scratch + static_cast<std::size_t>(worker) * bytes_each, bytes_each};
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
          // Nothing to compute: the same for every level.
          kScalarKernels.merge_row(params, plan.empty_rows[static_cast<std::size_t>(i - merged)], nullptr, 0);
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
  p.sm_scale =
      plan.options.sm_scale != 0.0F ? plan.options.sm_scale : 1.0F / std::sqrt(static_cast<float>(shape.head_dim_qk));
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

std::int64_t kv_bytes_of(const AttentionShape& shape, const detail::WorkItem& item) noexcept {
  return std::int64_t{item.num_tokens} * (item.kv_head_end - item.kv_head_begin) *
         (shape.head_dim_qk + shape.head_dim_vo) * static_cast<std::int64_t>(size_of(shape.kv_dtype));
}

RunOutcome run(const Plan& plan_handle, const RunArgs& args, Executor& executor) {
  const detail::PlanData& plan = plan_handle.data();
  check_run_args(plan, args);
  const Kernels& kernels = kernels_for(args.isa.value_or(default_isa()));
  const AttendParams params = make_params(plan, args);
  if (!plan.items.empty() && kernels.scratch_bytes(params, plan.max_item_rows) > plan.scratch_bytes_per_worker) {
    refuse(ErrorCode::internal, "plan.scratch_bytes_per_worker",
           static_cast<std::int64_t>(plan.scratch_bytes_per_worker),
           "at least " + std::to_string(kernels.scratch_bytes(params, plan.max_item_rows)));
  }

  const int workers = std::min(executor.num_workers(), static_cast<int>(plan.num_workers));
  Run run{plan, kernels, params, workers, static_cast<std::byte*>(args.workspace.data) + plan.scratch_offset};
  const auto parallel = [&](void (*task)(void*, int) noexcept, bool alone) {
    if (alone) {
      task(&run, 0);
    } else {
      executor.parallel(task, &run);
    }
  };
  const bool alone = workers <= 1 || plan.items.size() <= 1 || is_short(plan);
  parallel([](void* context, int worker) noexcept { static_cast<Run*>(context)->attend(worker); }, alone);

  const auto merge_elements =
      static_cast<std::int64_t>(plan.merge_slots.size()) * plan.shape.num_qo_heads * plan.shape.head_dim_vo;
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
