// The radix tree under PrefixCache: a node is one full page of tokens below its parent's.
//
// All edges live in one hash table keyed by (parent, salt, tokens of the block), so a step down costs O(page_size)
// however many children a node has. The hash only finds candidates; parent, salt and every token are compared. Nodes
// are structs in one array, their tokens [node][page_size] in another; erased nodes are reused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

namespace headwater::detail {

class BlockTree {
 public:
  using Node = std::int32_t;
  static constexpr Node kRoot = -1;  ///< above the first block of every salt
  static constexpr Node kNone = -2;

  /// hash_mask is ANDed to every hash; tests pass 0 to make all blocks collide.
  explicit BlockTree(int page_size, std::uint64_t hash_mask = ~std::uint64_t{0});
  BlockTree(const BlockTree&) = delete;
  BlockTree& operator=(const BlockTree&) = delete;

  /// The child of `parent` for this block (page_size tokens), or kNone.
  [[nodiscard]] Node find(Node parent, std::uint64_t salt, std::span<const std::int32_t> block) const;
  /// A new child; must not exist yet. On std::bad_alloc nothing has changed.
  Node insert(Node parent, std::uint64_t salt, std::span<const std::int32_t> block, std::int32_t page);
  /// `node` must be a leaf.
  void erase(Node node);

  [[nodiscard]] Node parent(Node node) const { return at(node).parent; }
  [[nodiscard]] std::int32_t page(Node node) const { return at(node).page; }
  [[nodiscard]] std::int32_t num_children(Node node) const { return at(node).num_children; }
  [[nodiscard]] std::uint64_t last_use(Node node) const { return at(node).last_use; }
  void set_last_use(Node node, std::uint64_t tick) { nodes_[static_cast<std::size_t>(node)].last_use = tick; }
  [[nodiscard]] std::size_t size() const { return edges_.size(); }

 private:
  struct Record {
    Node parent = kNone;
    std::int32_t page = -1;
    std::int32_t num_children = 0;
    std::uint64_t salt = 0;
    std::uint64_t hash = 0;
    std::uint64_t last_use = 0;
  };
  /// A block that is looked up.
  struct Key {
    Node parent;
    std::uint64_t salt;
    std::uint64_t hash;
    const std::int32_t* tokens;
  };
  struct Hash {
    using is_transparent = void;
    const BlockTree* tree;
    std::size_t operator()(Node node) const { return tree->at(node).hash; }
    std::size_t operator()(const Key& key) const { return key.hash; }
  };
  struct Equal {
    using is_transparent = void;
    const BlockTree* tree;
    bool operator()(Node a, Node b) const { return a == b; }
    bool operator()(const Key& key, Node node) const { return tree->matches(key, node); }
    bool operator()(Node node, const Key& key) const { return tree->matches(key, node); }
  };

  [[nodiscard]] const Record& at(Node node) const { return nodes_[static_cast<std::size_t>(node)]; }
  [[nodiscard]] Key key_of(Node parent, std::uint64_t salt, std::span<const std::int32_t> block) const;
  [[nodiscard]] bool matches(const Key& key, Node node) const;

  std::size_t page_size_;
  std::uint64_t hash_mask_;
  std::vector<Record> nodes_;
  std::vector<std::int32_t> tokens_;  // [nodes][page_size]
  std::vector<Node> free_;
  std::unordered_set<Node, Hash, Equal> edges_;
};

}  // namespace headwater::detail
