// Indices in order of descending cost, equal costs in their order. From one step to the next costs change but seldom
// their order: the last one is tried first.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace headwater::detail {

class CostOrder {
 public:
  /// Sorts 0..count-1 by cost_of(index), at least 0 each.
  template <class CostOf>
  const std::vector<std::int32_t>& sort(std::size_t count, CostOf&& cost_of) {
    // Cost and index in one number each; costs so great that this does not fit are told apart by their higher bits
    // only.
    std::int64_t most = 0;
    for (std::size_t i = 0; i < count; ++i) most = std::max<std::int64_t>(most, cost_of(i));
    const auto index_bits = static_cast<int>(std::bit_width(count));
    const int dropped = std::max(0, index_bits - std::countl_zero(static_cast<std::uint64_t>(most)));
    if (order_.size() != count) {
      order_.resize(count);
      for (std::size_t i = 0; i < count; ++i) order_[i] = static_cast<std::int32_t>(i);
    }
    keys_.resize(count);
    bool sorted = true;
    std::uint64_t last = 0;
    for (std::size_t k = 0; k < count; ++k) {
      const auto i = static_cast<std::size_t>(order_[k]);
      const std::uint64_t key = static_cast<std::uint64_t>(most - cost_of(i)) >> dropped << index_bits | i;
      sorted = sorted && last <= key;
      last = keys_[k] = key;
    }
    if (sorted) return order_;
    std::ranges::sort(keys_);
    const std::uint64_t mask = (std::uint64_t{1} << index_bits) - 1;
    for (std::size_t k = 0; k < count; ++k) order_[k] = static_cast<std::int32_t>(keys_[k] & mask);
    return order_;
  }

 private:
  std::vector<std::uint64_t> keys_;
  std::vector<std::int32_t> order_;  ///< of the last call
};

}  // namespace headwater::detail
