// A sharing forest before it has pages: nodes of tokens, and requests whose path runs from a root to a node.
//
// This is what every input (workload notation, tree file, trace) becomes; bench/paged.h then puts it into a PagePool.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace headwater::bench {

struct ForestNode {
  std::int32_t parent = -1;     ///< index of an earlier node; -1: a root
  std::int64_t num_tokens = 0;  ///< own tokens, >= 0
};

struct ForestRequest {
  std::int32_t node = 0;      ///< its last node; the path to it is the request's KV
  std::int32_t num_rows = 1;  ///< query rows: 1 in decoding
};

struct Forest {
  std::vector<ForestNode> nodes;  ///< parents before children
  std::vector<ForestRequest> requests;
};

/// Tokens on the path to each node, the node's own included.
[[nodiscard]] std::vector<std::int64_t> path_lengths(const Forest& forest);

/// Tokens in numbers: what the byte model of a forest starts from.
struct ForestTokens {
  std::int64_t unique = 0;  ///< nodes on the path of at least one request, once each
  std::int64_t flat = 0;    ///< path lengths summed over requests
  std::int64_t longest = 0;
};
[[nodiscard]] ForestTokens count_tokens(const Forest& forest);

}  // namespace headwater::bench
