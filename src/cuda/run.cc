// One attention call on the device: check, attend, merge. Checks are those of the CPU back end, in its words.
#include "cpu/run.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "cuda/device_plan.h"
#include "cuda/enqueue.h"
#include "cuda/error.h"
#include "cuda/launch.h"
#include "cuda/merge.h"
#include "cuda/stream_watch.h"
#include "cuda/tensor_map.h"

namespace headwater::cuda {
namespace {

constexpr std::int64_t kVector = 16;  ///< bytes that kernels copy at once

bool divides(std::int64_t bytes) {
  return bytes % kVector == 0;
}

void check_args(const detail::PlanData& facts, const RunArgs& args) {
  cpu::RunArgs same;
  same.q = args.q;
  same.kv = args.kv;
  same.out = args.out;
  same.lse = args.lse;
  same.alibi_slopes = args.alibi_slopes;
  same.sinks = args.sinks;
  same.include_sink = args.include_sink;
  same.k_scale = args.k_scale;
  same.v_scale = args.v_scale;
  same.workspace = args.workspace;
  cpu::check_run_args(facts, same);
}

PagedBytes in_bytes(const PagedTensor& t, std::int64_t element) {
  return {static_cast<const unsigned char*>(t.data), t.page_stride * element, t.token_stride * element,
          t.head_stride * element};
}

CacheView view_of(const KvCache& cache) {
  const auto element = static_cast<std::int64_t>(size_of(cache.dtype));
  CacheView view;
  view.k = in_bytes(cache.k, element);
  view.v = in_bytes(cache.v, element);
  view.page_shift = std::countr_zero(static_cast<std::uint32_t>(cache.page_size));
  view.num_pages = static_cast<std::int32_t>(std::min<std::int64_t>(cache.num_pages, INT32_MAX));
  view.aligned = true;
  for (const PagedBytes& side : {view.k, view.v}) {
    view.aligned = view.aligned && is_aligned(side.data, kVector) && divides(side.page_stride) &&
                   divides(side.token_stride) && divides(side.head_stride);
  }
  return view;
}

Output output_of(const RunArgs& args) {
  Output out;
  out.data = args.out.data;
  out.row_stride = args.out.row_stride;
  out.head_stride = args.out.head_stride;
  out.dtype = args.out.dtype;
  const auto quad = static_cast<std::int64_t>(4 * size_of(out.dtype));
  out.aligned = is_aligned(out.data, quad) && out.row_stride % 4 == 0 && out.head_stride % 4 == 0;
  out.lse = args.lse.data;
  out.lse_row_stride = args.lse.row_stride;
  out.lse_head_stride = args.lse.head_stride;
  out.natural = args.lse.base == LseBase::natural;
  out.sinks = args.include_sink ? args.sinks : nullptr;
  return out;
}

AttendParams params_of(const DevicePlan::Impl& plan, const RunArgs& args) {
  const AttentionShape& shape = plan.shape;
  const PlanOptions& options = plan.facts.options;
  AttendParams p;
  p.plan = plan.view;
  p.queue = reinterpret_cast<std::int32_t*>(plan.queue.data);
  for (std::size_t i = 0; i < args.kv.size(); ++i) {
    const KvCache& cache = args.kv[i];
    CacheView& view = p.kv[i];
    view = view_of(cache);
    view.mapped = plan.maps.has_value() && can_map(cache, view);
    if (!view.mapped) continue;
    p.k_maps[i] = plan.maps->map(view.k, shape.head_dim_qk, shape.num_kv_heads, cache);
    p.v_maps[i] = plan.maps->map(view.v, shape.head_dim_vo, shape.num_kv_heads, cache);
  }
  p.q = static_cast<const unsigned char*>(args.q.data);
  p.q_row_stride = args.q.row_stride * 2;
  p.q_head_stride = args.q.head_stride * 2;
  p.q_aligned = is_aligned(p.q, kVector) && divides(p.q_row_stride) && divides(p.q_head_stride);
  p.out = output_of(args);
  p.num_qo_heads = shape.num_qo_heads;
  p.num_kv_heads = shape.num_kv_heads;
  p.group_size = shape.group_size();
  p.score_scale = options.sm_scale != 0.0F ? options.sm_scale : 1.0F / std::sqrt(static_cast<float>(shape.head_dim_qk));
  p.soft_cap = options.logits_soft_cap;
  p.alibi_slopes = args.alibi_slopes;
  p.k_scale = {args.k_scale.data, args.k_scale.count > 1 ? 1 : 0};
  p.v_scale = {args.v_scale.data, args.v_scale.count > 1 ? 1 : 0};
  p.num_sink_tokens = static_cast<std::int32_t>(std::min<std::int64_t>(options.num_sink_tokens, 1 << 30));
  p.invariant = options.batch_invariant;
  p.stages = plan.stages;
  p.partial_o = static_cast<float*>(args.workspace.data);
  p.partial_lse = p.partial_o + plan.capacity.max_partials * shape.num_qo_heads * shape.head_dim_vo;
  return p;
}

/// `early`: the kernel may start while the one before it ends, and waits for that one's memory itself.
void launch(const void* kernel, int blocks, int threads, int shared_bytes, void* params, Stream stream, bool early,
            const char* name) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = early ? 1 : 0;
  check(cudaLaunchKernelExC(&config, kernel, &params), name);
}

/// Debug builds: calls visit(name, memory, bytes) for what a run needs for itself.
template <class Visit>
void for_own_memory([[maybe_unused]] const DevicePlan::Impl& plan, [[maybe_unused]] const RunArgs& args,
                    [[maybe_unused]] Visit visit) {
#if !defined(NDEBUG) || defined(HEADWATER_CUDA_WATCH)
  visit("workspace", args.workspace.data, plan.facts.workspace_bytes);
  visit("plan", plan.queue.data, sizeof(std::int32_t));
#endif
}

}  // namespace

void run(const DevicePlan& plan, const RunArgs& args, Stream stream) {
  const DevicePlan::Impl& self = plan.impl();
  if (!self.uploaded) throw Error(ErrorCode::invalid_argument, "plan: nothing was uploaded, expected a plan in force");
  check_args(self.facts, args);
  for_own_memory(self, args, [&](const char* name, const void* memory, std::size_t bytes) {
    StreamWatch::instance().check(name, memory, bytes, stream);
  });
  AttendParams attend = params_of(self, args);
  launch(self.kernel->function, self.num_blocks, self.kernel->threads, self.shared_bytes, &attend, stream, false,
         "attend");
  MergeParams merge;
  merge.plan = attend.plan;
  merge.queue = attend.queue;
  merge.out = attend.out;
  merge.num_qo_heads = attend.num_qo_heads;
  merge.head_dim = self.shape.head_dim_vo;
  merge.invariant = attend.invariant;
  merge.partial_o = attend.partial_o;
  merge.partial_lse = attend.partial_lse;
  try {
    launch(merge_kernel(), self.num_merge_blocks, 32 * kMergeWarps, 0, &merge, stream, self.hopper, "merge_rows");
  } catch (const Error&) {
    cudaMemsetAsync(self.queue.data, 0, sizeof(std::int32_t), stream);  // what the merge would have done
    throw;
  }
  for_own_memory(self, args, [&](const char*, const void* memory, std::size_t bytes) {
    StreamWatch::instance().note(memory, bytes, stream);
  });
}

}  // namespace headwater::cuda
