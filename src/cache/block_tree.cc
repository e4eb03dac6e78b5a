// BlockTree: nodes, edges by hash, exact comparison.
#include "cache/block_tree.h"

#include <algorithm>

namespace headwater::detail {
namespace {

/// A bijection of 64-bit words that spreads every input bit (the finaliser of splitmix64).
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

}  // namespace

BlockTree::BlockTree(int page_size, std::uint64_t hash_mask)
    : page_size_(static_cast<std::size_t>(page_size)), hash_mask_(hash_mask), edges_(16, Hash{this}, Equal{this}) {}

BlockTree::Key BlockTree::key_of(Node parent, std::uint64_t salt, std::span<const std::int32_t> block) const {
  // Mixed after every word: parent and token often count up together, and must not cancel.
  std::uint64_t hash = mix(mix(salt + 0x9E3779B97F4A7C15ULL) + static_cast<std::uint32_t>(parent));
  for (const std::int32_t token : block) hash = mix(hash + static_cast<std::uint32_t>(token));
  return {parent, salt, hash & hash_mask_, block.data()};
}

bool BlockTree::matches(const Key& key, Node node) const {
  const Record& r = at(node);
  const std::int32_t* tokens = tokens_.data() + static_cast<std::size_t>(node) * page_size_;
  return r.parent == key.parent && r.salt == key.salt && std::equal(tokens, tokens + page_size_, key.tokens);
}

BlockTree::Node BlockTree::find(Node parent, std::uint64_t salt, std::span<const std::int32_t> block) const {
  const auto edge = edges_.find(key_of(parent, salt, block));
  return edge == edges_.end() ? kNone : *edge;
}

BlockTree::Node BlockTree::insert(Node parent, std::uint64_t salt, std::span<const std::int32_t> block,
                                  std::int32_t page) {
  if (free_.empty()) {
    if (free_.capacity() <= nodes_.size())
      free_.reserve(2 * nodes_.size() + 16);  // room for every node: erase never allocates
    tokens_.resize((nodes_.size() + 1) * page_size_);
    nodes_.emplace_back();
    free_.push_back(static_cast<Node>(nodes_.size() - 1));
  }
  const Node node = free_.back();
  nodes_[static_cast<std::size_t>(node)] = {parent, page, 0, salt, key_of(parent, salt, block).hash, 0};
  std::ranges::copy(block, tokens_.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(node) * page_size_));
  edges_.insert(node);
  free_.pop_back();
  if (parent != kRoot) ++nodes_[static_cast<std::size_t>(parent)].num_children;
  return node;
}

void BlockTree::erase(Node node) {
  const Node parent = at(node).parent;
  edges_.erase(node);
  nodes_[static_cast<std::size_t>(node)] = Record{};
  if (parent != kRoot) --nodes_[static_cast<std::size_t>(parent)].num_children;
  free_.push_back(node);
}

}  // namespace headwater::detail
