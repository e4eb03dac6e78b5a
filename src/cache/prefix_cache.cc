// PrefixCache: a BlockTree whose nodes hold one reference each to a page of the pool, and an order of its leaves by
// use.
//
// A lookup or insert stamps every node of its path with one tick, so a parent is never older than its children and the
// oldest leaf is the least recently used node. Only leaves are ordered: leaves in use are at most as many as the
// sequences that use them, so eviction never wades through the pages of long running requests.
#include "headwater/prefix_cache.h"

#include <set>
#include <string>
#include <utility>

#include "cache/block_tree.h"
#include "headwater/error.h"

namespace headwater {
namespace {

using detail::BlockTree;
using Node = BlockTree::Node;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::invalid_argument, message);
}

}  // namespace

struct PrefixCache::Impl {
  explicit Impl(PagePool& p)
      : pool(p),
        tree(p.page_size()),
        page_size(static_cast<std::size_t>(p.page_size())),
        held(static_cast<std::size_t>(p.num_pages()), 0) {}

  [[nodiscard]] std::span<const std::int32_t> block(std::span<const std::int32_t> tokens, std::size_t i) const {
    return tokens.subspan(i * page_size, page_size);
  }

  /// Nodes of the longest cached path of at most max_blocks blocks.
  [[nodiscard]] std::vector<Node> walk(std::span<const std::int32_t> tokens, std::size_t max_blocks,
                                       std::uint64_t salt) const {
    std::vector<Node> path;
    Node node = BlockTree::kRoot;
    for (std::size_t i = 0; i < max_blocks; ++i) {
      node = tree.find(node, salt, block(tokens, i));
      if (node == BlockTree::kNone) break;
      path.push_back(node);
    }
    return path;
  }

  /// Marks a path as used now. Only its last node can be a leaf.
  void touch(const std::vector<Node>& path) {
    if (path.empty()) return;
    const Node last = path.back();
    auto entry = leaves.extract({tree.last_use(last), last});
    ++tick;
    for (const Node node : path) tree.set_last_use(node, tick);
    if (entry) {
      entry.value().first = tick;
      leaves.insert(std::move(entry));
    }
  }

  /// What a page that is to be cached should be and is not; nullptr: nothing.
  [[nodiscard]] const char* wanting(std::int32_t page) const {
    if (page < 0 || page >= pool.num_pages()) return "a page of the pool";
    if (pool.ref_count(page) == 0) return "a page in use";
    if (held[static_cast<std::size_t>(page)] != 0) return "a page that is not cached for other tokens";
    return nullptr;
  }

  /// Refuses pages from `first` on that are unknown, free, repeated or already cached. Nothing has changed afterwards.
  void check_new(std::span<const std::int32_t> pages, std::size_t first) {
    std::size_t marked = first;  // marks find repetitions; they are taken back
    const char* expected = nullptr;
    for (; marked < pages.size(); ++marked) {
      expected = wanting(pages[marked]);
      if (expected != nullptr) break;
      held[static_cast<std::size_t>(pages[marked])] = 1;
    }
    for (std::size_t i = first; i < marked; ++i) held[static_cast<std::size_t>(pages[i])] = 0;
    if (expected == nullptr) return;
    refuse("pages[" + std::to_string(marked) + "] = " + std::to_string(pages[marked]) + ", expected " + expected);
  }

  Node add(Node parent, std::uint64_t salt, std::span<const std::int32_t> tokens, std::int32_t page) {
    const Node node = tree.insert(parent, salt, tokens, page);
    tree.set_last_use(node, tick);
    leaves.insert({tick, node});
    if (parent != BlockTree::kRoot) leaves.erase({tree.last_use(parent), parent});
    pool.retain(page);
    held[static_cast<std::size_t>(page)] = 1;
    ++stats.pages_inserted;
    ++stats.pages_cached;
    return node;
  }

  /// Erases a leaf and frees its page; a parent that becomes a leaf joins the order.
  void drop(Node node) {
    const Node parent = tree.parent(node);
    const std::int32_t page = tree.page(node);
    pool.release_page(page);  // throws, before anything changes, where somebody released the cache's page
    tree.erase(node);
    if (parent != BlockTree::kRoot && tree.num_children(parent) == 0) leaves.insert({tree.last_use(parent), parent});
    held[static_cast<std::size_t>(page)] = 0;
    ++stats.pages_evicted;
    --stats.pages_cached;
  }

  PagePool& pool;
  BlockTree tree;
  std::size_t page_size;
  std::uint64_t tick = 0;
  std::set<std::pair<std::uint64_t, Node>> leaves;  // (last use, node), oldest first
  std::vector<std::int32_t> held;                   // [num_pages]: 1 where the cache holds the page
  PrefixCacheStats stats;
};

PrefixCache::PrefixCache(PagePool& pool) : impl_(std::make_unique<Impl>(pool)) {}

PrefixCache::~PrefixCache() {
  for (std::size_t page = 0; page < impl_->held.size(); ++page) {
    const auto id = static_cast<std::int32_t>(page);
    if (impl_->held[page] != 0 && impl_->pool.ref_count(id) > 0) impl_->pool.release_page(id);
  }
}

std::vector<std::int32_t> PrefixCache::lookup(std::span<const std::int32_t> tokens, std::uint64_t salt) {
  Impl& m = *impl_;
  const std::size_t max_blocks = tokens.empty() ? 0 : (tokens.size() - 1) / m.page_size;
  const std::vector<Node> path = m.walk(tokens, max_blocks, salt);
  std::vector<std::int32_t> pages;
  pages.reserve(path.size());
  for (const Node node : path) pages.push_back(m.tree.page(node));
  m.touch(path);
  ++m.stats.lookups;
  m.stats.hits += pages.empty() ? 0 : 1;
  m.stats.tokens_requested += static_cast<std::int64_t>(tokens.size());
  m.stats.tokens_hit += static_cast<std::int64_t>(pages.size() * m.page_size);
  return pages;
}

std::vector<std::int32_t> PrefixCache::insert(std::span<const std::int32_t> tokens, std::span<const std::int32_t> pages,
                                              std::uint64_t salt) {
  Impl& m = *impl_;
  const std::size_t num_blocks = tokens.size() / m.page_size;
  if (pages.size() < num_blocks) {
    refuse("pages has " + std::to_string(pages.size()) + " entries, expected at least the " +
           std::to_string(num_blocks) + " full pages of " + std::to_string(tokens.size()) + " tokens");
  }
  std::vector<Node> path = m.walk(tokens, num_blocks, salt);
  m.check_new(pages.first(num_blocks), path.size());

  std::vector<std::int32_t> standing;
  standing.reserve(num_blocks);
  for (const Node node : path) standing.push_back(m.tree.page(node));
  m.touch(path);
  if (path.empty()) ++m.tick;
  Node parent = path.empty() ? BlockTree::kRoot : path.back();
  for (std::size_t i = path.size(); i < num_blocks; ++i) {
    parent = m.add(parent, salt, m.block(tokens, i), pages[i]);
    standing.push_back(pages[i]);
  }
  return standing;
}

std::int32_t PrefixCache::evict(std::int32_t num_pages) {
  Impl& m = *impl_;
  std::int32_t freed = 0;
  for (auto leaf = m.leaves.begin(); leaf != m.leaves.end() && freed < num_pages;) {
    const Node node = leaf->second;
    if (m.pool.ref_count(m.tree.page(node)) > 1) {  // somebody uses it, and so all above it
      ++leaf;
      continue;
    }
    const Node parent = m.tree.parent(node);
    leaf = m.leaves.erase(leaf);
    m.drop(node);
    ++freed;
    // A parent is never older than its child: it comes at or after this place. Equal ticks may put it just before.
    if (parent != BlockTree::kRoot && leaf != m.leaves.begin()) {
      const auto before = std::prev(leaf);
      if (before->second == parent) leaf = before;
    }
  }
  return freed;
}

void PrefixCache::clear() {
  (void)evict(impl_->pool.num_pages());
}

const PrefixCacheStats& PrefixCache::stats() const noexcept {
  return impl_->stats;
}

std::vector<std::int32_t> PrefixCache::held_pages() const {
  return impl_->held;
}

}  // namespace headwater
