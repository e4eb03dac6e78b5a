// The CUDA back end: plans on the device, attention by them, merging of states, appending to and copying pages of the
// cache. In a library of its own (headwater::cuda); nothing of CUDA's headers is needed to include this one.
//
//   cuda::DevicePlan device(shape, capacity);            // once; its addresses never change
//   planner.update(plan, batch, &changes);               // host, once per step
//   device.upload(plan, stream);                         // asynchronous copies, once per step
//   cuda::run(device, args, stream);                     // per layer; may be captured in a graph, which then serves
//                                                        // every later plan that fits the capacity
//
// All pointers in arguments are device pointers. Nothing here waits for the device but what says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "headwater/cpu.h"
#include "headwater/device_model.h"
#include "headwater/plan.h"
#include "headwater/view.h"

struct CUstream_st;

namespace headwater::cuda {

/// cudaStream_t; nullptr: the default stream.
using Stream = CUstream_st*;

/// CUDA devices that this process can use; 0 also where there is no driver.
[[nodiscard]] int num_devices() noexcept;

/// Cost-model constants for plans that the current device is to run: a *worker* of the schedule is a team of thread
/// blocks, one per KV head. Throws Error (device) where there is none.
[[nodiscard]] DeviceModel device_model(const AttentionShape& shape);
/// The same for an NVIDIA H200, whatever this machine has.
[[nodiscard]] DeviceModel h200_model(const AttentionShape& shape);
/// A model that was measured (`headwater calibrate --device cuda`) for plans of this shape. `one_head` holds the
/// constants of one KV head of 128: its workers are thread blocks, and what a block does for one head, a team does for
/// all.
[[nodiscard]] DeviceModel model_for_shape(const DeviceModel& one_head, const AttentionShape& shape);

/// Throws Error (unsupported) with the reason if no kernel of this build can serve the combination.
void check_supported(const AttentionShape& shape, const PlanOptions& options, const Batch& batch);

/// What holds of every step of a decode, of batches in the form of page tables.
struct PlanBounds {
  std::int64_t max_requests = 0;
  std::int64_t max_rows = 0;   ///< query rows of a step, all requests together
  std::int64_t max_pages = 0;  ///< of one request
  int page_size = 16;
  /// Spans that the rows of one request may share with other requests one after the other (a system prompt and a
  /// conversation's beginning: 2); 0: any number. A plan with more is refused when it is uploaded.
  int max_shared_spans = 0;
  bool same_start = true;  ///< no kv_start_page, no first_page_offset, or the same for all requests
};

/// Greatest sizes of the plans that a DevicePlan can hold.
struct Capacity {
  std::int64_t max_rows = 0;      ///< query rows
  std::int64_t max_page_ids = 0;  ///< page ids of all work items; where these are many, of whole tables with slack
  std::int64_t max_items = 0;
  std::int64_t max_partials = 0;  ///< partial states

  /// Of one plan, exactly; where many page ids are kept, max_page_ids has the plan's own room for tables to grow.
  [[nodiscard]] static Capacity of(const Plan& plan);
  /// Of every plan of batches within `bounds` that a planner with this model makes for the shape and options, whatever
  /// the policy. Safe rather than exact: max_rows is exact, page ids and items are those of the worst case, and partial
  /// states, which the workspace is for, can be many times what a plan takes. Give max_shared_spans where it is known,
  /// or choose a smaller max_partials and run a flat plan where a plan is beyond it. Throws Error (invalid_argument).
  [[nodiscard]] static Capacity within(const PlanBounds& bounds, const AttentionShape& shape,
                                       const PlanOptions& options, const DeviceModel& model);
};

/// Bytes of workspace for any plan within the capacity: exact. Needs no device.
[[nodiscard]] std::size_t workspace_size(const AttentionShape& shape, const Capacity& capacity) noexcept;

/// A place on the current device for plans of one shape and one set of options. Move-only. Uploads and runs that belong
/// together go to one stream. Runs on two streams at once take two DevicePlans and two workspaces, or results are
/// wrong; debug builds refuse what they notice (Error, invalid_argument).
class DevicePlan {
 public:
  /// Allocates; nothing later allocates device memory. Throws Error (unsupported, device, invalid_argument).
  DevicePlan(const AttentionShape& shape, const Capacity& capacity);
  ~DevicePlan();
  DevicePlan(DevicePlan&&) noexcept;
  DevicePlan& operator=(DevicePlan&&) noexcept;

  /// Puts `plan` in force for what follows on `stream`: an asynchronous copy from pinned memory that this object owns,
  /// before it perhaps a small launch with page ids that changed. Refused on a stream that is being captured.
  /// The plan may change or go away when this returns. Options that kernels are told when they are launched (sm_scale,
  /// logits_soft_cap, num_sink_tokens, batch_invariant, alibi, sinks) and page sizes must be those of the first plan:
  /// captured graphs know no others. Waits only if the copies of the last two uploads are both still under way. Throws
  /// Error (capacity_exceeded, naming the field; invalid_argument; unsupported; device) and leaves the plan in force as
  /// it was.
  void upload(const Plan& plan, Stream stream);

  /// Bytes of workspace for any plan within the capacity (cuda::workspace_size): exact. Device memory, aligned to
  /// kWorkspaceAlignment.
  [[nodiscard]] std::size_t workspace_size() const noexcept;
  [[nodiscard]] const Capacity& capacity() const noexcept;
  /// What the plan in force is to do; zeros if a DevicePlanner made it.
  [[nodiscard]] const PlanStats& stats() const noexcept;

  struct Impl;
  [[nodiscard]] const Impl& impl() const noexcept { return *impl_; }

 private:
  friend class DevicePlanner;
  std::unique_ptr<Impl> impl_;
};

/// Page tables on the device, of a step whose plan is made there: device pointers, read when the planner runs.
struct DeviceTables {
  const std::int32_t* block_table = nullptr;  ///< [num_requests, max_blocks] page ids; entry j of a row covers tokens
                                              ///< [j * page_size, (j + 1) * page_size). Columns past ceil(length /
                                              ///< page_size) are never read
  std::int64_t row_stride = 0;                ///< elements between rows; 0: max_blocks
  const std::int32_t* lengths = nullptr;      ///< [num_requests] tokens of K and V; 0: a padded request
  const std::int32_t* qo_indptr = nullptr;    ///< [num_requests + 1] as Batch::qo_indptr; nullptr: one row each
  int num_requests = 0;                       ///< padded ones included
};

/// What the host knows of all steps.
struct DeviceTableLimits {
  int max_requests = 0;
  int max_blocks = 0;  ///< columns of the block table
  int max_rows = 0;    ///< query rows; 0: max_requests
  int page_size = 16;
  std::int64_t num_pages = 0;   ///< pages of the pool
  std::int32_t null_page = -1;  ///< an id that never counts as shared (vLLM: block 0); -1: none
};

/// What became of the last plan made on the device.
struct DevicePlanStatus {
  /// Bits of `flags`. With any of them the plan is flat: nothing is shared, the results are right for all requests that
  /// are described rightly.
  static constexpr std::uint32_t kBadPageId = 1;     ///< an id outside the pool; its keys count as zeros
  static constexpr std::uint32_t kBadLength = 2;     ///< a length below 0 or beyond max_blocks; taken as the nearest
  static constexpr std::uint32_t kBadRows = 4;       ///< qo_indptr falls or passes max_rows: nothing is computed
  static constexpr std::uint32_t kOverCapacity = 8;  ///< the shared spans need more items or partial states
  std::uint32_t flags = 0;
  std::int32_t num_spans = 0;         ///< spans split off for several requests; 0: the plan is flat
  std::int64_t shared_tokens = 0;     ///< summed over spans
  std::int64_t member_sequences = 0;  ///< summed over spans
  std::int32_t num_items = 0;
  std::int32_t num_partials = 0;
};

/// A span that was split off on the device.
struct DeviceSpan {
  std::int32_t pos_begin = 0;
  std::int32_t num_tokens = 0;
  std::int32_t member_begin = 0;  ///< in the list of members
  std::int32_t num_members = 0;
  std::int32_t depth = 0;
};

/// Makes plans on the device, from tables that the host does not see: one launch, which may be captured in a graph
/// together with the runs that follow. Policies auto, flat and forest; causal or not; no windows, local chunks or sink
/// tokens. What is equal to the host's plans: docs/cuda.md. Move-only. Its plans belong to one stream, as uploads do.
///
///   cuda::DevicePlanner planner(shape, options, limits);
///   cuda::DevicePlan plan(shape, planner.capacity());
///   planner.plan(plan, tables, stream);                // once per step
///   cuda::run(plan, args, stream);                     // per layer
class DevicePlanner {
 public:
  /// Allocates; nothing later allocates device memory. Throws Error (unsupported with the reason, invalid_argument,
  /// device).
  DevicePlanner(const AttentionShape& shape, const PlanOptions& options, const DeviceTableLimits& limits,
                const DeviceModel& model);
  /// With device_model(shape).
  DevicePlanner(const AttentionShape& shape, const PlanOptions& options, const DeviceTableLimits& limits);
  ~DevicePlanner();
  DevicePlanner(DevicePlanner&&) noexcept;
  DevicePlanner& operator=(DevicePlanner&&) noexcept;

  /// For its DevicePlans: every flat plan fits, and shared spans that leave up to 15 states a row (more for few rows).
  /// A plan of less room is served as long as flat plans of undivided requests fit.
  [[nodiscard]] const Capacity& capacity() const noexcept;
  [[nodiscard]] static Capacity capacity_for(const AttentionShape& shape, const PlanOptions& options,
                                             const DeviceTableLimits& limits, const DeviceModel& model);

  /// Launches: what `tables` holds when the launch runs becomes the plan in force of `plan` for what follows on
  /// `stream`. The table must stay as it is until those runs are done: they read page ids from it. A DevicePlan holds
  /// plans of the host or of the device, never both in turn. Throws Error (invalid_argument, capacity_exceeded,
  /// unsupported, device) before anything is launched. What is wrong in the tables themselves is told by status().
  void plan(DevicePlan& plan, const DeviceTables& tables, Stream stream);

  /// Device memory, written by every plan(): what became of it, [num_spans] spans, and the requests that their members
  /// are [max_requests].
  [[nodiscard]] const DevicePlanStatus* status() const noexcept;
  [[nodiscard]] const DeviceSpan* spans() const noexcept;
  [[nodiscard]] const std::int32_t* span_members() const noexcept;

  struct Impl;
  [[nodiscard]] const Impl& impl() const noexcept { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

/// As cpu::RunArgs, on the device.
struct RunArgs {
  ConstRowsView q;                      ///< [R, Hq, Dqk], the shape's q_dtype
  std::span<const KvCache> kv;          ///< one cache; with explicit levels one per level (the structs: host memory)
  RowsView out;                         ///< [R, Hq, Dvo], the shape's out_dtype
  LseView lse;                          ///< [R, Hq] fp32; data = nullptr: not wanted
  const float* alibi_slopes = nullptr;  ///< [Hq], with options.alibi
  const float* sinks = nullptr;         ///< [Hq] natural-log logits, with options.sinks
  bool include_sink = true;             ///< false: leave the learned sinks out (this range is merged elsewhere)
  Scale k_scale;                        ///< multiplies k
  Scale v_scale;                        ///< multiplies v
  cpu::Workspace workspace;             ///< device memory; two runs at the same time need two
};

/// out = softmax(scores(q, k) + mask) v for every row of the plan in force; formulas in options.h. Two launches. Throws
/// Error before anything is launched, or (device) with CUDA's words if a launch fails.
void run(const DevicePlan& plan, const RunArgs& args, Stream stream);

/// As cpu::append_kv, on the device: row r of k and v goes to slot `token_slots[r] = page * page_size + offset`, a
/// negative slot is skipped, slots must differ. token_slots [num_rows]: device memory, which only the kernel reads, so
/// that a captured graph appends wherever the array points when it is replayed. A slot beyond the pool is skipped too
/// and counted in `num_bad` (device memory, added to; nullptr: not wanted). Scales are device memory, and must be
/// positive.
void append_kv(const KvCache& cache, ConstRowsView k, ConstRowsView v, const std::int64_t* token_slots,
               std::int64_t num_rows, int num_kv_heads, int head_dim_qk, int head_dim_vo, Scale k_scale, Scale v_scale,
               Stream stream, std::int32_t* num_bad = nullptr);

/// As cpu::copy_pages, on the device: copies the valid tokens of pages inside one cache, in an order that keeps what
/// copies take from each other. `copies`: host memory, no longer needed when this returns; a captured graph repeats
/// these very copies. One launch for 256 copies, and one more for each copy that needs an earlier one of its launch.
void copy_pages(const KvCache& cache, std::span<const cpu::PageCopy> copies, int num_kv_heads, int head_dim_qk,
                int head_dim_vo, Stream stream);
/// The same with a list in device memory, which a captured graph reads anew each time (an entry with num_tokens = 0
/// does nothing). One launch: no page may be the dst of one copy and the src or dst of another. An entry that the other
/// form would refuse is skipped and counted in `num_bad` (device memory, added to; nullptr: not wanted).
void copy_pages(const KvCache& cache, const cpu::PageCopy* copies, std::int64_t num_copies, int num_kv_heads,
                int head_dim_qk, int head_dim_vo, Stream stream, std::int32_t* num_bad = nullptr);

/// As cpu::merge_states, on the device: group j's states are the rows [o_indptr[j], o_indptr[j+1]) of v_in / lse_in.
/// o_indptr [num_groups + 1]: device memory, which only the kernel reads; rows outside [0, num_states) count as none.
/// The output must not overlap the input.
void merge_states(ConstRowsView v_in, ConstLseView lse_in, std::int64_t num_states, const std::int32_t* o_indptr,
                  std::int64_t num_groups, int num_heads, int head_dim, RowsView v_out, LseView lse_out, Stream stream);
/// Merges state a of each row with its state b: [num_rows, H, D] each, of one type. The output may be a or b (the same
/// memory and strides): in place.
void merge_state(ConstRowsView v_a, ConstLseView lse_a, ConstRowsView v_b, ConstLseView lse_b, std::int64_t num_rows,
                 int num_heads, int head_dim, RowsView v_out, LseView lse_out, Stream stream);

}  // namespace headwater::cuda
