// The CPU back end: attention by a plan, merging of states, appending to and copying pages of the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "headwater/executor.h"
#include "headwater/plan.h"
#include "headwater/view.h"

namespace headwater::cpu {

/// Highest level that this processor has.
[[nodiscard]] Isa detect_isa() noexcept;
/// The level that run uses when none is forced: detect_isa(), but avx512 in place of avx512_bf16 on processors other
/// than AMD's, whose bf16 dot product is measured at half the rate of their fp32 multiply-add.
[[nodiscard]] Isa default_isa() noexcept;

/// Memory that run may use, aligned to kWorkspaceAlignment. Two runs at the same time need two workspaces.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// Tensors of one attention call. R = rows of the plan, Hq and Hkv heads, Dqk and Dvo head sizes.
struct RunArgs {
  ConstRowsView q;                      ///< [R, Hq, Dqk], the shape's q_dtype
  std::span<const KvCache> kv;          ///< one cache; with explicit levels one per level
  RowsView out;                         ///< [R, Hq, Dvo], the shape's out_dtype
  LseView lse;                          ///< [R, Hq] fp32; data = nullptr: not wanted
  const float* alibi_slopes = nullptr;  ///< [Hq], with options.alibi
  const float* sinks = nullptr;         ///< [Hq] natural-log logits, with options.sinks
  bool include_sink = true;             ///< false: leave the learned sinks out (this range is merged elsewhere)
  Scale k_scale;                        ///< multiplies k
  Scale v_scale;                        ///< multiplies v
  Workspace workspace;
  std::optional<Isa> isa;  ///< force a level; default: default_isa()
};

/// What a run did.
struct RunOutcome {
  Path path = Path::flat;
  Isa isa = Isa::scalar;
  std::int64_t items = 0;          ///< work items executed
  std::int64_t kv_bytes_read = 0;  ///< K and V bytes, summed over executed items
  std::int64_t merged_rows = 0;    ///< rows that were merged from partial states
};

/// out = softmax(scores(q, k) + mask) v for every row of the plan; formulas in options.h. Views are borrowed for the
/// call; out and lse must not overlap anything that is read. At most plan's num_workers of the executor's workers work.
/// A row without a visible key gives O = 0 and LSE = -inf (with a sink: LSE = the sink). Never allocates beyond the
/// executor's own means, never waits for anything but its workers. Throws Error before anything is written.
RunOutcome run(const Plan& plan, const RunArgs& args, Executor& executor);

/// Merges groups of partial states: group j's states are the rows [o_indptr[j], o_indptr[j+1]) of v_in / lse_in.
///   m = max LSE_i, w_i = b^(LSE_i - m), V = sum(w_i V_i) / sum(w_i), LSE = m + log_b(sum w_i).
/// v_in [N, H, D] normalised, lse_in [N, H] fp32; v_out [M, H, D], lse_out [M, H]. Both LSE views carry their base, and
/// may differ. A state with LSE = -inf (or +inf, an old convention for "no keys", with any V) contributes nothing; an
/// empty group gives (0, -inf); a group of one is copied bit for bit (its dtype permitting).
void merge_states(ConstRowsView v_in, ConstLseView lse_in, std::span<const std::int32_t> o_indptr, int num_heads,
                  int head_dim, RowsView v_out, LseView lse_out, Executor& executor);

/// Merges state a of each row with its state b, as merge_states does: [num_rows, H, D] each, dtypes may differ. The
/// output may be a or b (the same memory and strides): in place.
void merge_state(ConstRowsView v_a, ConstLseView lse_a, ConstRowsView v_b, ConstLseView lse_b, std::int64_t num_rows,
                 int num_heads, int head_dim, RowsView v_out, LseView lse_out, Executor& executor);

/// Writes new keys and values. Row r (of R) goes to slot `token_slots[r] = page * page_size + offset`; a negative slot
/// is skipped, and slots must differ (rows are written by several workers). Where V is a view of K (MLA) V is written
/// last, so K's leading elements become V's: pass one latent row as both, and equal scales. k [R, Hkv, Dqk], v [R, Hkv,
/// Dvo], f32, f16 or bf16, converted to the cache's type (f8e4m3: divided by the scale first, saturated to +-448).
void append_kv(const KvCache& cache, ConstRowsView k, ConstRowsView v, std::span<const std::int64_t> token_slots,
               int num_kv_heads, int head_dim_qk, int head_dim_vo, Scale k_scale, Scale v_scale, Executor& executor);

/// A page to copy before an append (copy-on-write): PagePool::prepare_append returns them.
struct PageCopy {
  std::int32_t src = 0;
  std::int32_t dst = 0;
  std::int32_t num_tokens = 0;  ///< leading tokens of the page that are valid
};

/// Copies the valid tokens of pages inside one cache. Call before append_kv.
void copy_pages(const KvCache& cache, std::span<const PageCopy> copies, int num_kv_heads, int head_dim_qk,
                int head_dim_vo, Executor& executor);

}  // namespace headwater::cpu
