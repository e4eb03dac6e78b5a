#include "plan/forest.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <numeric>

#include "plan/rows.h"

namespace headwater::detail {
namespace {

/// Pages to look at before the next member: doubled while all agree, so that little is compared behind the end of a
/// run.
constexpr std::int32_t kFirstBlock = 64;
/// A tree may reach back this far whatever that masks.
constexpr std::int32_t kShortReach = 4;

/// Index of the first difference of a and b, or n.
std::int32_t mismatch(const std::int32_t* a, const std::int32_t* b, std::int32_t n) {
  constexpr std::int32_t kStep = 16;
  std::int32_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    if (std::memcmp(a + i, b + i, kStep * sizeof(*a)) != 0) break;
  }
  while (i < n && a[i] == b[i]) ++i;
  return i;
}

std::int32_t find_root(std::vector<std::int32_t>& set, std::int32_t i) {
  while (set[static_cast<std::size_t>(i)] != i) {
    auto& up = set[static_cast<std::size_t>(i)];
    up = set[static_cast<std::size_t>(up)];
    i = up;
  }
  return i;
}

}  // namespace

void IdMap::begin(std::size_t num_keys) {
  const std::size_t wanted = std::bit_ceil(std::max<std::size_t>(16, num_keys * 2));
  if (slots_.size() < wanted || ++stamp_ == 0) {
    slots_.assign(std::max(wanted, slots_.size()), Slot{0, 0, 0});
    stamp_ = 1;
    shift_ = 64 - std::countr_zero(slots_.size());
  }
}

std::size_t IdMap::place(std::int32_t key) const {
  const std::uint64_t hash = static_cast<std::uint32_t>(key) * 0x9E3779B97F4A7C15ULL;
  std::size_t i = static_cast<std::size_t>(hash >> shift_);
  while (slots_[i].stamp == stamp_ && slots_[i].key != key) i = (i + 1) & (slots_.size() - 1);
  return i;
}

std::int32_t IdMap::find_or_insert(std::int32_t key, std::int32_t value) {
  Slot& slot = slots_[place(key)];
  if (slot.stamp == stamp_) return slot.value;
  slot = {key, value, stamp_};
  return value;
}

std::int32_t IdMap::find(std::int32_t key) const {
  const Slot& slot = slots_[place(key)];
  return slot.stamp == stamp_ ? slot.value : -1;
}

void ForestBuilder::build(std::span<const Entry> entries, std::span<const std::int32_t> page_ids,
                          std::int32_t null_page, int page_size, const PlanOptions& options, Forest& forest) {
  entries_ = entries;
  page_ids_ = page_ids;
  null_page_ = null_page;
  page_size_ = page_size;
  sinks_ = sink_limit(options);
  border_ = options.batch_invariant ? options.invariant_chunk / std::gcd(options.invariant_chunk, page_size) : 1;
  forest_ = &forest;
  forest.nodes.clear();
  forest.order.clear();
  forest.split_entries = false;
  forest.levels = false;
  forest.mixed_starts = false;
  end_.resize(entries.size());
  for (std::size_t e = 0; e < entries.size(); ++e) end_[e] = entries[e].page_end;
  for (const std::int32_t lane : {0, 1}) {
    std::vector<std::int32_t> members;
    members.reserve(entries.size());
    for (std::size_t e = 0; e < entries.size(); ++e) {
      if (entries[e].lane != lane) continue;
      const auto index = static_cast<std::int32_t>(e);
      if (entries[e].solo) {
        grow({&index, 1}, entries[e].page_begin, entries[e].page_begin);
      } else {
        members.push_back(index);
      }
    }
    while (!members.empty()) group(members);
  }
  forest.leaf_of.resize(entries.size());
  for (std::size_t i = 0; i < forest.nodes.size(); ++i) {
    const Node& node = forest.nodes[i];
    if (node.num_members > 1) continue;
    forest.leaf_of[static_cast<std::size_t>(forest.order[static_cast<std::size_t>(node.member_begin)])] =
        static_cast<std::int32_t>(i);
  }
}

/// Group number of each member by its page at `page`: equal numbers, equal pages. Null pages and members that have
/// ended are alone. Numbers go up in order of first appearance.
void ForestBuilder::by_id(std::span<const std::int32_t> members, std::int32_t page, std::vector<std::int32_t>& keys) {
  ids_.begin(members.size());
  keys.resize(members.size());
  std::int32_t next = 0;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const std::int32_t e = members[i];
    std::int32_t key = next;
    if (page < end_[static_cast<std::size_t>(e)]) {
      const std::int32_t page_id = id(e, page);
      if (page_id != null_page_ || null_page_ < 0) key = ids_.find_or_insert(page_id, next);
    }
    keys[i] = key;
    if (key == next) ++next;
  }
}

/// Makes trees of `members`; leaves in it those stretches that still have to be dealt with.
void ForestBuilder::group(std::vector<std::int32_t>& members) {
  const std::int32_t first = start(members.front());
  const bool same = std::ranges::all_of(members, [&](std::int32_t e) { return start(e) == first; });
  if (!same) return group_by_start(members);
  by_id(members, first, keys_);
  // Stable grouping by key.
  counts_.assign(members.size() + 1, 0);
  for (const std::int32_t key : keys_) ++counts_[static_cast<std::size_t>(key) + 1];
  std::partial_sum(counts_.begin(), counts_.end(), counts_.begin());
  std::vector<std::int32_t> borders(counts_);
  std::vector<std::int32_t> grouped(members.size());
  for (std::size_t i = 0; i < members.size(); ++i) {
    grouped[static_cast<std::size_t>(counts_[static_cast<std::size_t>(keys_[i])]++)] = members[i];
  }
  for (std::size_t g = 0; g + 1 < borders.size() && borders[g] < borders.back(); ++g) {
    const auto count = static_cast<std::size_t>(borders[g + 1] - borders[g]);
    grow({grouped.data() + borders[g], count}, first, first);
  }
  members.clear();
}

/// Different starts: clusters of members that meet at the later of two starts, each grouped from its latest start on.
/// The stretches before that remain in `members`.
void ForestBuilder::group_by_start(std::vector<std::int32_t>& members) {
  const std::size_t n = members.size();
  forest_->mixed_starts = true;
  root_set_.resize(n);
  std::iota(root_set_.begin(), root_set_.end(), 0);
  const auto unite = [&](std::int32_t a, std::int32_t b) {
    a = find_root(root_set_, a);
    b = find_root(root_set_, b);
    if (a != b) root_set_[static_cast<std::size_t>(std::max(a, b))] = std::min(a, b);
  };
  // From one start to the next: those that start there, against each other and against those that go on there.
  std::vector<std::int32_t> by_start(n);
  std::iota(by_start.begin(), by_start.end(), 0);
  const auto entry_at = [&](std::int32_t i) { return members[static_cast<std::size_t>(i)]; };
  std::ranges::stable_sort(by_start, {}, [&](std::int32_t i) { return start(entry_at(i)); });
  std::vector<std::int32_t> going_on;
  for (std::size_t begin = 0, end = 0; begin < n; begin = end) {
    const std::int32_t s = start(entry_at(by_start[begin]));
    ids_.begin(n - begin);
    for (end = begin; end < n && start(entry_at(by_start[end])) == s; ++end) {
      const std::int32_t page_id = id(entry_at(by_start[end]), s);
      if (page_id != null_page_ || null_page_ < 0) unite(by_start[end], ids_.find_or_insert(page_id, by_start[end]));
    }
    std::erase_if(going_on, [&](std::int32_t i) { return end_[static_cast<std::size_t>(entry_at(i))] <= s; });
    for (const std::int32_t i : going_on) {
      const std::int32_t other = ids_.find(id(entry_at(i), s));  // the null page is not there
      if (other >= 0) unite(i, other);
    }
    going_on.insert(going_on.end(), by_start.begin() + static_cast<std::ptrdiff_t>(begin),
                    by_start.begin() + static_cast<std::ptrdiff_t>(end));
  }
  // Clusters in order of their first member.
  std::vector<std::pair<std::int32_t, std::int32_t>> sorted(n);
  for (std::size_t i = 0; i < n; ++i) {
    sorted[i] = {find_root(root_set_, static_cast<std::int32_t>(i)), static_cast<std::int32_t>(i)};
  }
  std::ranges::sort(sorted);
  std::vector<std::int32_t> heads;
  std::vector<std::int32_t> cluster;
  for (std::size_t i = 0; i < n;) {
    cluster.clear();
    std::int32_t base = 0;
    bool same = true;
    const std::int32_t root = sorted[i].first;
    for (; i < n && sorted[i].first == root; ++i) {
      cluster.push_back(members[static_cast<std::size_t>(sorted[i].second)]);
      base = std::max(base, start(cluster.back()));
      same = same && start(cluster.back()) == start(cluster.front());
    }
    if (same) {
      grow(cluster, base, base);
    } else {
      split_cluster(cluster, base, heads);
    }
  }
  std::ranges::sort(heads);
  members = std::move(heads);
}

void ForestBuilder::split_cluster(std::span<const std::int32_t> cluster, std::int32_t base,
                                  std::vector<std::int32_t>& heads) {
  base = (base + border_ - 1) / border_ * border_;
  std::vector<std::int32_t> present;
  std::vector<std::int32_t> alone;
  for (const std::int32_t e : cluster) (end_[static_cast<std::size_t>(e)] > base ? present : alone).push_back(e);
  std::vector<std::int32_t> keys;
  by_id(present, base, keys);
  const std::int32_t num_groups = keys.empty() ? 0 : *std::ranges::max_element(keys) + 1;
  std::vector<std::vector<std::int32_t>> groups(static_cast<std::size_t>(num_groups));
  for (std::size_t i = 0; i < present.size(); ++i) groups[static_cast<std::size_t>(keys[i])].push_back(present[i]);
  bool grown = false;
  for (const auto& members : groups) {
    if (members.size() == 1) {
      alone.push_back(members.front());
      continue;
    }
    const std::int32_t root_page = reach_back(members, base);
    grow(members, root_page, base);
    grown = true;
    for (const std::int32_t e : members) {
      if (start(e) >= root_page) continue;
      end_[static_cast<std::size_t>(e)] = root_page;
      heads.push_back(e);
      forest_->split_entries = true;
    }
  }
  if (grown) {
    heads.insert(heads.end(), alone.begin(), alone.end());
  } else {
    // Nobody meets anybody at a border that may be cut at.
    std::ranges::sort(alone);
    for (const std::int32_t& e : alone) grow({&e, 1}, start(e), start(e));
  }
}

/// How far before `base` a tree of `members` may begin: while all that have started agree, and mask not too much.
std::int32_t ForestBuilder::reach_back(std::span<const std::int32_t> members, std::int32_t base) {
  std::vector<std::int32_t> by_start(members.begin(), members.end());
  std::ranges::sort(by_start,
                    [&](std::int32_t a, std::int32_t b) { return start(a) != start(b) ? start(a) < start(b) : a < b; });
  std::size_t visible = by_start.size();
  std::int32_t page = base;
  while (page > 0 && (page - 1) * page_size_ >= sinks_) {
    const std::int32_t p = page - 1;
    while (visible > 0 && start(by_start[visible - 1]) > p) --visible;
    if (visible == 0 || (visible * 2 <= by_start.size() && base - p > kShortReach)) break;
    const std::int32_t first = id(by_start[0], p);
    if (null_page_ >= 0 && first == null_page_) break;
    bool agree = true;
    for (std::size_t i = 1; i < visible && agree; ++i) agree = id(by_start[i], p) == first;
    if (!agree) break;
    page = p;
  }
  // Nothing before it, or a place where pieces may be cut.
  return page <= start(by_start[0]) ? page : (page + border_ - 1) / border_ * border_;
}

/// Pages from `page` on that all members have in common, ended by the shortest member, a difference or a null page.
std::int32_t ForestBuilder::common_run(const std::int32_t* members, std::int32_t count, std::int32_t page) const {
  std::int32_t limit = std::numeric_limits<std::int32_t>::max();
  for (std::int32_t i = 0; i < count; ++i) {
    limit = std::min(limit, end_[static_cast<std::size_t>(members[i])] - page);
  }
  const auto pages_of = [&](std::int32_t e) {
    return page_ids_.data() + entries_[static_cast<std::size_t>(e)].page_base + page;
  };
  const std::int32_t* first = pages_of(members[0]);
  std::int32_t done = 0;
  std::int32_t block = kFirstBlock;
  while (done < limit) {
    std::int32_t n = std::min(block, limit - done);
    for (std::int32_t i = 1; i < count && n > 0; ++i) n = mismatch(first + done, pages_of(members[i]) + done, n);
    const bool differs = n < std::min(block, limit - done);
    if (null_page_ >= 0) {
      const std::int32_t* null = std::find(first + done, first + done + n, null_page_);
      if (null != first + done + n) return static_cast<std::int32_t>(null - first);
    }
    done += n;
    if (differs) break;
    block = std::min(block * 2, 4'096);
  }
  return done;
}

/// Groups order[begin, begin + count) by page id at `page`, stable; counts_ holds the sizes. Returns the number of
/// groups.
std::int32_t ForestBuilder::partition(std::int32_t begin, std::int32_t count, std::int32_t page) {
  const std::span<std::int32_t> members(forest_->order.data() + begin, static_cast<std::size_t>(count));
  by_id(members, page, keys_);
  const std::int32_t num_groups = *std::ranges::max_element(keys_) + 1;
  counts_.assign(static_cast<std::size_t>(num_groups), 0);
  for (const std::int32_t key : keys_) ++counts_[static_cast<std::size_t>(key)];
  if (num_groups == count) return num_groups;  // in order already
  scattered_.resize(static_cast<std::size_t>(count) + static_cast<std::size_t>(num_groups));
  std::int32_t* next = scattered_.data() + count;
  std::exclusive_scan(counts_.begin(), counts_.end(), next, 0);
  for (std::size_t i = 0; i < members.size(); ++i) {
    scattered_[static_cast<std::size_t>(next[keys_[i]]++)] = members[i];
  }
  std::copy_n(scattered_.begin(), count, members.begin());
  return num_groups;
}

void ForestBuilder::grow(std::span<const std::int32_t> members, std::int32_t root_page, std::int32_t base) {
  Forest& f = *forest_;
  const auto begin = static_cast<std::int32_t>(f.order.size());
  f.order.insert(f.order.end(), members.begin(), members.end());
  stack_.clear();
  stack_.push_back({begin, static_cast<std::int32_t>(members.size()), base, -1, 0});
  while (!stack_.empty()) {
    const Pending todo = stack_.back();
    stack_.pop_back();
    const auto index = static_cast<std::int32_t>(f.nodes.size());
    const std::int32_t* m = f.order.data() + todo.member_begin;
    Node node;
    node.page_begin = todo.parent < 0 ? root_page : todo.page;
    node.member_begin = todo.member_begin;
    node.num_members = todo.num_members;
    node.parent = todo.parent;
    node.depth = todo.depth;
    node.page_base = entries_[static_cast<std::size_t>(m[0])].page_base;
    if (todo.num_members == 1) {
      node.page_end = end_[static_cast<std::size_t>(m[0])];
      f.nodes.push_back(node);
      continue;
    }
    node.page_end = todo.page + common_run(m, todo.num_members, todo.page);
    f.nodes.push_back(node);
    const std::int32_t num_groups = partition(todo.member_begin, todo.num_members, node.page_end);
    std::int32_t at = todo.member_begin + todo.num_members;
    for (std::int32_t g = num_groups; g-- > 0;) {
      const std::int32_t count = counts_[static_cast<std::size_t>(g)];
      at -= count;
      stack_.push_back({at, count, node.page_end, index, todo.depth + 1});
    }
  }
}

bool still_holds(const Forest& forest, std::span<const Entry> before, std::span<const Entry> after) {
  if (before.size() != after.size() || forest.split_entries) return false;
  for (std::size_t e = 0; e < before.size(); ++e) {
    const Entry& a = before[e];
    const Entry& b = after[e];
    if (a.request != b.request || a.lane != b.lane || a.solo != b.solo || a.page_begin != b.page_begin) return false;
    if (b.page_end == a.page_end) continue;
    if (forest.mixed_starts) return false;  // it may have grown to where another one starts
    const Node& leaf = forest.nodes[static_cast<std::size_t>(forest.leaf_of[e])];
    if (b.page_end < a.page_end || leaf.page_begin >= leaf.page_end) return false;
  }
  return true;
}

void finish_forest(std::span<const Entry> entries, int page_size, const PlanOptions& options, Forest& forest) {
  auto& nodes = forest.nodes;
  const auto n = static_cast<std::int32_t>(nodes.size());
  for (std::int32_t i = n; i-- > 0;) {
    Node& node = nodes[static_cast<std::size_t>(i)];
    if (node.num_members == 1) {
      const Entry& e = entries[static_cast<std::size_t>(forest.order[static_cast<std::size_t>(node.member_begin)])];
      node.subtree_end = i + 1;
      node.num_rows = e.row_end - e.row_begin;
      node.page_base = e.page_base;
      if (!forest.split_entries && node.page_begin < node.page_end) node.page_end = e.page_end;
      node.cut = node.tok_end = std::min(e.tok_end, node.page_end * page_size);
      node.tok_begin = std::max(e.tok_begin, node.page_begin * page_size);
      continue;
    }
    node.num_rows = 0;
    node.page_base = nodes[static_cast<std::size_t>(i) + 1].page_base;  // of the first member
    std::int32_t last = 0;
    node.tok_begin = std::numeric_limits<std::int32_t>::max();
    for (std::int32_t c = i + 1; c < n && nodes[static_cast<std::size_t>(c)].parent == i;
         c = nodes[static_cast<std::size_t>(c)].subtree_end) {
      const Node& child = nodes[static_cast<std::size_t>(c)];
      node.num_rows += child.num_rows;
      node.subtree_end = child.subtree_end;
      last = std::max(last, child.cut);
      // Where the entries below begin if they begin inside this node.
      node.tok_begin = std::min(node.tok_begin, child.tok_begin);
    }
    node.cut = node.tok_end = std::min(last, node.page_end * page_size);
  }
  // Entries that begin inside a root: its first token is the earliest of theirs, not its children's.
  for (std::int32_t i = 0; i < n; ++i) {
    Node& node = nodes[static_cast<std::size_t>(i)];
    if (node.parent >= 0) {
      node.tok_begin = nodes[static_cast<std::size_t>(node.parent)].cut;
    } else if (node.num_members > 1) {
      std::int32_t first = std::numeric_limits<std::int32_t>::max();
      for (std::int32_t k = 0; k < node.num_members; ++k) {
        const auto e = forest.order[static_cast<std::size_t>(node.member_begin + k)];
        first = std::min(first, entries[static_cast<std::size_t>(e)].tok_begin);
      }
      node.tok_begin = std::max(first, node.page_begin * page_size);
    }
    if (options.batch_invariant && node.num_members > 1) {
      const std::int32_t border = node.cut / options.invariant_chunk * options.invariant_chunk;
      node.cut = std::max(node.tok_begin, border);
    }
  }
}

}  // namespace headwater::detail
