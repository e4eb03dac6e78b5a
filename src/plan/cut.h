// Which shared spans are split off: a policy closes nodes of the forest. A closed node is read in one piece by all its
// members, together with the ancestors that were not closed ("pushed down"); what is never closed reaches the leaves,
// each of which is read by its own request. So flat is the forest with nothing closed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/cost_model.h"
#include "plan/memory.h"

namespace headwater::detail {

struct Thresholds {
  std::int32_t min_pages = 1;
  std::int32_t min_members = 2;
};
[[nodiscard]] Thresholds thresholds_of(const PlanOptions& options, Policy policy) noexcept;

/// A policy's decision: closed[node].
using Closed = std::vector<std::uint8_t>;

class Cutter {
 public:
  /// `page_size`: of each view.
  Cutter(const CostModel& cost, const PlanOptions& options, std::span<const std::int32_t> page_size) noexcept
      : cost_(&cost), options_(&options), page_size_(page_size) {}

  /// Every span that passes the thresholds.
  void close_all(const Forest& forest, Closed& closed) const;
  /// The one span from a root that removes the most page reads: pages x (members - 1).
  void close_best(const Forest& forest, Closed& closed) const;
  /// vLLM's heuristic on the prefix that all requests share from page 0.
  void close_vllm(const Forest& forest, const PlanData& plan, Closed& closed) const;
  /// Least predicted time by dynamic programming over the forest.
  void close_cheapest(const Forest& forest, Closed& closed);

  /// The pieces of a decision, in the order of the forest.
  static void make_pieces(const Forest& forest, std::span<const Entry> entries, const Closed& closed,
                          std::vector<Piece>& pieces);
  /// Every entry (with levels: every node of each request) in a piece of its own.
  static void make_flat_pieces(const Forest& forest, std::span<const Entry> entries, std::vector<Piece>& pieces);

  /// Worker time that a decision saves against its items' costs, which take every read to come from memory: re-reads
  /// of stretches that fit the cache.
  [[nodiscard]] std::int64_t cached_rereads_ps(const Forest& forest, const Closed& closed);

 private:
  [[nodiscard]] bool may_close(const Node& node, std::int32_t run_begin, const Thresholds& t) const noexcept;
  void close_cheapest_levels(const Forest& forest, Closed& closed) const;

  const CostModel* cost_;
  const PlanOptions* options_;
  std::span<const std::int32_t> page_size_;
  std::vector<std::int64_t> best_;         ///< least cost below a node for each start of its run
  std::vector<std::uint8_t> choice_;       ///< 1: close
  std::vector<std::int64_t> offset_;       ///< of a node in best_
  std::vector<std::int64_t> read_prefix_;  ///< re-read cost of a node and its ancestors
  std::vector<std::int32_t> starts_;       ///< run starts along the current path
  std::vector<std::int32_t> path_;         ///< nodes of the current path
  std::vector<std::int32_t> run_;          ///< index of the run start of a node
  std::vector<std::int32_t> readers_;
};

}  // namespace headwater::detail
