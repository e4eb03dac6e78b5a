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

/// Closes nodes and makes pieces. Holds scratch memory; serves one plan after another.
class Cutter {
 public:
  /// To be called first; all three must outlive what follows. `page_size`: of each view.
  void begin(const CostModel& cost, const PlanOptions& options, std::span<const std::int32_t> page_size) noexcept;

  /// What `policy` closes; false: nothing.
  ///   automatic  least predicted time by dynamic programming over the forest
  ///   two_level  the one span from a root that removes the most page reads: pages x (members - 1)
  ///   vllm       its heuristic on the prefix that all requests share from page 0
  ///   forest     every span that passes the thresholds
  bool close(const Forest& forest, const PlanData& plan, Policy policy, Closed& closed);

  /// The pieces of a decision, in the order of the forest.
  void make_pieces(const Forest& forest, std::span<const Entry> entries, const Closed& closed,
                   std::vector<Piece>& pieces);
  /// Every entry (with levels: every node of each request) in a piece of its own.
  static void make_flat_pieces(const Forest& forest, std::span<const Entry> entries, std::vector<Piece>& pieces);

  /// Worker time that a decision saves against its items' costs, which take every read to come from memory: re-reads
  /// of stretches that fit the cache.
  [[nodiscard]] std::int64_t cached_rereads_ps(const Forest& forest, const Closed& closed);

 private:
  void close_all(const Forest& forest, Closed& closed);
  void close_best(const Forest& forest, Closed& closed);
  void close_vllm(const Forest& forest, const PlanData& plan, Closed& closed) const;
  void close_cheapest(const Forest& forest, Closed& closed);
  void close_cheapest_levels(const Forest& forest, Closed& closed) const;
  void cost_leaf(const Forest& forest, std::int32_t node);
  void cost_inner(const Forest& forest, std::int32_t node, const Thresholds& t);
  [[nodiscard]] bool may_close(const Node& node, std::int32_t run_begin, const Thresholds& t) const noexcept;
  [[nodiscard]] std::int64_t close_ps(const Node& node, std::int32_t begin, std::int64_t read_ps,
                                      bool whole) const noexcept;

  const CostModel* cost_ = nullptr;
  const PlanOptions* options_ = nullptr;
  std::span<const std::int32_t> page_size_;
  // Of nodes with several members:
  std::vector<std::int64_t> offset_;       ///< in sums_ and choice_
  std::vector<std::int64_t> read_prefix_;  ///< re-read cost of a node and its ancestors
  std::vector<std::int32_t> run_;          ///< where a node's run starts
  std::vector<std::uint8_t> goes_on_;      ///< some member reads on behind it
  std::vector<std::int64_t> sums_;         ///< of the children's costs, for each start of their run
  std::vector<std::uint8_t> choice_;       ///< 1: close
  std::vector<std::uint8_t> at_root_;
  std::vector<std::int32_t> readers_;
};

}  // namespace headwater::detail
