// The sharing forest: which runs of pages are named by several requests at the same absolute positions.
//
// A radix tree over page ids by position, read off the tables alone. Members are grouped by the page id behind a common
// run, groups ordered by their first request; every page of every table is compared once or twice, so the cost is
// linear in the tables. Entries that start at different pages are grouped from the latest start on; where the earlier
// ones agree, a tree reaches back before that start, and rows that start later are masked there.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/memory.h"

namespace headwater::detail {

/// Maps page ids to small integers; clearing costs nothing.
class IdMap {
 public:
  void begin(std::size_t num_keys);
  /// Value of `key`, which becomes `value` if the key is new.
  std::int32_t find_or_insert(std::int32_t key, std::int32_t value);
  /// Value of `key` or -1.
  [[nodiscard]] std::int32_t find(std::int32_t key) const;

 private:
  struct Slot {
    std::int32_t key;
    std::int32_t value;
    std::uint32_t stamp;
  };
  [[nodiscard]] std::size_t place(std::int32_t key) const;
  std::vector<Slot> slots_;
  std::uint32_t stamp_ = 0;
  int shift_ = 0;
};

class ForestBuilder {
 public:
  /// The forest of `entries`, whose pages are page_ids[entry.page_base + absolute page].
  void build(std::span<const Entry> entries, std::span<const std::int32_t> page_ids, std::int32_t null_page,
             int page_size, const PlanOptions& options, Forest& forest);

 private:
  struct Pending {
    std::int32_t member_begin, num_members, page, parent, depth;
  };
  [[nodiscard]] std::int32_t id(std::int32_t entry, std::int32_t page) const {
    return page_ids_[static_cast<std::size_t>(entries_[static_cast<std::size_t>(entry)].page_base + page)];
  }
  [[nodiscard]] std::int32_t start(std::int32_t entry) const {
    return entries_[static_cast<std::size_t>(entry)].page_begin;
  }

  void group(std::vector<std::int32_t>& members);
  void group_by_start(std::vector<std::int32_t>& members);
  void split_cluster(std::span<const std::int32_t> cluster, std::int32_t base, std::vector<std::int32_t>& heads);
  std::int32_t reach_back(std::span<const std::int32_t> members, std::int32_t base);
  void grow(std::span<const std::int32_t> members, std::int32_t root_page, std::int32_t base);
  std::int32_t common_run(const std::int32_t* members, std::int32_t count, std::int32_t page) const;
  std::int32_t partition(std::int32_t begin, std::int32_t count, std::int32_t page);
  void by_id(std::span<const std::int32_t> members, std::int32_t page, std::vector<std::int32_t>& keys);

  std::span<const Entry> entries_;
  std::span<const std::int32_t> page_ids_;
  std::int32_t null_page_ = -1;
  int page_size_ = 1;
  std::int32_t sinks_ = 0;
  std::int32_t border_ = 1;  ///< trees that leave stretches before them begin at multiples of this many pages
  Forest* forest_ = nullptr;

  IdMap ids_;
  std::vector<std::int32_t> end_;        ///< [entries] page where an entry's current stretch ends
  std::vector<std::int32_t> keys_;       ///< group number of each member
  std::vector<std::int32_t> counts_;     ///< members of each group
  std::vector<std::int32_t> scattered_;  ///< members, grouped
  std::vector<std::int32_t> root_set_;   ///< union-find of clusters
  std::vector<Pending> stack_;
};

/// Whether the forest of the entries `before` is that of `after`, of which no page that both have has changed, but for
/// rows, lengths and the place of their pages. False where those could change what is shared: another set of entries
/// or other starts, or an entry that ends inside a shared node and has grown by a page.
[[nodiscard]] bool still_holds(const Forest& forest, std::span<const Entry> before, std::span<const Entry> after);

/// Sets all of the nodes that follows from rows, lengths and places of pages: to be called when those have changed.
void finish_forest(std::span<const Entry> entries, int page_size, const PlanOptions& options, Forest& forest);

}  // namespace headwater::detail
