// BlockTree: edges are found by hash but decided by comparison; with hash_mask = 0 every block collides with every
// other.
#include "cache/block_tree.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <random>
#include <tuple>
#include <vector>

namespace headwater::detail {
namespace {

using Block = std::array<std::int32_t, 2>;

class BlockTreeTest : public testing::TestWithParam<std::uint64_t> {};

TEST_P(BlockTreeTest, RandomInsertFindEraseAgreeWithAMap) {
  BlockTree tree(2, GetParam());
  std::map<std::tuple<BlockTree::Node, std::uint64_t, Block>, BlockTree::Node> model;
  std::map<BlockTree::Node, std::tuple<BlockTree::Node, std::uint64_t, Block>> nodes;
  std::mt19937 rng(7);
  const auto pick = [&rng](int n) { return std::uniform_int_distribution<int>(0, n - 1)(rng); };
  for (int step = 0; step < 3000; ++step) {
    BlockTree::Node parent = BlockTree::kRoot;
    std::uint64_t salt = static_cast<std::uint64_t>(pick(3));
    if (!nodes.empty() && pick(4) != 0) {
      const auto at = std::next(nodes.begin(), pick(static_cast<int>(nodes.size())));
      parent = at->first;
      salt = std::get<1>(at->second);
    }
    const Block block{pick(3) - 1, pick(3)};
    const auto key = std::make_tuple(parent, salt, block);
    const BlockTree::Node found = tree.find(parent, salt, block);
    const auto expected = model.find(key);
    ASSERT_EQ(found, expected == model.end() ? BlockTree::kNone : expected->second);
    if (found == BlockTree::kNone && nodes.size() < 200) {
      const BlockTree::Node node = tree.insert(parent, salt, block, step);
      ASSERT_EQ(nodes.count(node), 0U);
      model[key] = node;
      nodes[node] = key;
      ASSERT_EQ(tree.page(node), step);
      ASSERT_EQ(tree.parent(node), parent);
      ASSERT_EQ(tree.num_children(node), 0);
    } else if (found != BlockTree::kNone && tree.num_children(found) == 0 && pick(2) == 0) {
      tree.erase(found);
      model.erase(key);
      nodes.erase(found);
    }
    ASSERT_EQ(tree.size(), model.size());
  }
  EXPECT_GT(nodes.size(), 20U);
}

INSTANTIATE_TEST_SUITE_P(Hashes, BlockTreeTest, testing::Values(~std::uint64_t{0}, std::uint64_t{0}, std::uint64_t{7}));

}  // namespace
}  // namespace headwater::detail
