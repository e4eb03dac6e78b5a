// A complete attention call for tests: tables, pools, tensors, options, the reference's answer; and a runner that
// checks everything that must hold of every run, whatever is being tested.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "headwater/cpu.h"
#include "headwater/plan.h"
#include "reference/attention.h"
#include "reference/pool.h"
#include "reference/tables.h"
#include "reference/tolerance.h"

namespace headwater::reference {

/// How tensors lie in memory and what is in them.
struct CallOptions {
  Layout layout = Layout::nhd;
  std::int64_t page_padding = 0;  ///< elements between pages
  std::int64_t row_padding = 0;   ///< elements between heads and rows of q and out
  bool lse_head_major = false;    ///< [heads, rows] instead of [rows, heads]
  LseBase lse_base = LseBase::two;
  int k_scales = 0;  ///< 0: none, 1: one, 2: one per KV head
  int v_scales = 0;
  bool include_sink = true;
  double key_spread = 1.0;  ///< standard deviation of K
  bool check_naive = true;  ///< also compare with the naive implementation
};

/// What one run left.
struct Ran {
  cpu::RunOutcome outcome;
  Difference difference;
  std::string complaint;           ///< everything that was wrong; empty: all is well
  std::vector<unsigned char> out;  ///< [rows, heads, head_dim], dense
  std::vector<float> lse;          ///< [rows, heads]
};

/// Owns everything of a call. Tokens that no row sees are NaN; pools and q are read-only.
class Call {
 public:
  Call(const AttentionShape& shape, const PlanOptions& options, PageTables tables, const CallOptions& call,
       std::uint64_t seed);
  Call(const AttentionShape& shape, const PlanOptions& options, LevelTables tables, const CallOptions& call,
       std::uint64_t seed);

  [[nodiscard]] const Problem& problem() const noexcept { return problem_; }
  [[nodiscard]] const Batch& batch() const noexcept { return problem_.batch; }
  [[nodiscard]] const PageTables& tables() const noexcept { return tables_; }
  [[nodiscard]] const Result& expected();

  /// Arguments for cpu::run without outputs and workspace.
  [[nodiscard]] cpu::RunArgs args() const;

  /// Runs a plan of this call with poisoned, fenced outputs and an exact, fenced workspace, and checks: fences, bytes
  /// between rows, path and bytes read as planned, the reference.
  Ran run(const Plan& plan, Executor& executor, std::optional<Isa> isa = std::nullopt);

  /// A back end: runs a plan with arguments in host memory.
  using Runner = std::function<cpu::RunOutcome(const Plan& plan, const cpu::RunArgs& args)>;
  /// The same checks of any back end. `workspace_bytes` of workspace are handed to it.
  Ran run_by(const Runner& runner, const Plan& plan, std::size_t workspace_bytes);

 private:
  void prepare(const std::vector<std::int64_t>& num_pages, const std::vector<int>& page_sizes, std::uint64_t seed);

  PageTables tables_;
  LevelTables levels_;
  CallOptions call_;
  Problem problem_;
  std::vector<Pool> pools_;
  std::vector<KvCache> caches_;
  FencedBuffer q_;
  std::vector<float> slopes_;
  std::vector<float> sinks_;
  std::vector<float> k_scales_;
  std::vector<float> v_scales_;
  std::int64_t num_rows_ = 0;
  std::optional<Result> expected_;
  std::optional<Result> naive_;
};

/// Levels that this processor can run, lowest first.
std::vector<Isa> available_isas();

}  // namespace headwater::reference
