// Planning: page tables in, a schedule of work items out. Pure host code: same input, same plan, byte for byte.
//
//   Planner planner(model);
//   Plan plan = planner.plan(shape, batch, options);   // once per step (and per distinct mask), serves every layer
//   ... cpu::run(plan, args, executor) per layer ...
//   planner.update(plan, next_batch, &changes);         // next step: much cheaper than a new plan
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "headwater/batch.h"
#include "headwater/device_model.h"
#include "headwater/error.h"
#include "headwater/options.h"

namespace headwater {

/// What a plan will do, in numbers. Bytes are of K and V together, for one layer.
struct PlanStats {
  Path path = Path::flat;
  std::int64_t num_requests = 0;
  std::int64_t num_rows = 0;
  std::int64_t num_items = 0;
  std::int64_t num_partials = 0;      ///< partial rows, each [num_qo_heads, head_dim_vo] fp32 + LSE
  std::int64_t num_spans = 0;         ///< spans split off for two or more requests
  std::int64_t shared_tokens = 0;     ///< summed over spans
  std::int64_t member_sequences = 0;  ///< summed over spans
  /// Every distinct visible page slot once. With CascadeSwitch::off nobody has looked for sharing: then as if nothing
  /// were shared, kv_bytes_flat. Policy::flat looks.
  std::int64_t kv_bytes_unique = 0;
  std::int64_t kv_bytes_flat = 0;      ///< what the flat path reads
  std::int64_t kv_bytes_read = 0;      ///< what this plan reads: summed over items, once per item
  std::int64_t flops = 0;              ///< 2 * (head_dim_qk + head_dim_vo) * Hq * visible (row, key) pairs
  std::int64_t predicted_ps = 0;       ///< predicted time of one layer, picoseconds
  std::int64_t predicted_flat_ps = 0;  ///< the same for the flat plan
};

namespace detail {
struct PlanData;  // src/plan/plan_data.h
}

/// A schedule. Move-only; immutable except through Planner::update; may be run by several threads at once, each with
/// its own workspace.
class Plan {
 public:
  Plan();
  ~Plan();
  Plan(Plan&&) noexcept;
  Plan& operator=(Plan&&) noexcept;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  /// Bytes of workspace that run needs: exact. The workspace must be aligned to kWorkspaceAlignment.
  [[nodiscard]] std::size_t workspace_size() const noexcept;
  [[nodiscard]] const PlanStats& stats() const noexcept;
  /// What was decided and why, in words: the sharing forest, the byte model, what was split, predicted times.
  [[nodiscard]] std::string describe() const;
  /// The same as one JSON object (schema: docs/plan_json.md).
  [[nodiscard]] std::string to_json() const;
  /// Canonical bytes of everything that run reads: equal bytes, equal results.
  [[nodiscard]] std::string serialize() const;

  [[nodiscard]] const detail::PlanData& data() const noexcept { return *data_; }
  [[nodiscard]] detail::PlanData& data() noexcept { return *data_; }

 private:
  std::unique_ptr<detail::PlanData> data_;
};

inline constexpr std::size_t kWorkspaceAlignment = 64;

/// Makes plans. A planner or plan that was moved from may only be assigned to or destroyed. Holds scratch memory that
/// is reused from plan to plan; one planner per thread.
class Planner {
 public:
  explicit Planner(DeviceModel model = DeviceModel::default_cpu());
  ~Planner();
  Planner(Planner&&) noexcept;
  Planner& operator=(Planner&&) noexcept;

  /// A plan from nothing. Throws Error (invalid_argument, invalid_page_table, unsupported); nothing is written then.
  [[nodiscard]] Plan plan(const AttentionShape& shape, const Batch& batch, const PlanOptions& options);

  /// Makes `plan` what plan(shape, batch, options) would be, byte for byte, with the shape and options it was made
  /// with. With `changes` only what it lists is looked at (debug builds verify it against the whole table); without,
  /// the tables are compared. Where requests joined, left or changed places it plans anew, at the price of plan(). On
  /// error the plan is as it was, except that memory running out half-way leaves it empty. An empty plan is refused.
  void update(Plan& plan, const Batch& batch, const Changes* changes = nullptr);

  [[nodiscard]] const DeviceModel& model() const noexcept;

 private:
  struct Scratch;
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace headwater
