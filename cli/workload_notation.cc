// The workload notation "N per level | tokens per node per level"; see formats.h.
#include <fmt/format.h>

#include <array>
#include <charconv>

#include "cli/formats.h"
#include "headwater/error.h"

namespace headwater::cli {
namespace {

constexpr std::int64_t kMaxNodes = std::int64_t{1} << 20;
constexpr std::int64_t kMaxPathTokens = std::int64_t{1} << 30;  ///< positions are 32-bit

std::vector<std::int64_t> parse_list(std::string_view text, std::string_view list, std::string_view kind,
                                     std::int64_t max) {
  std::vector<std::int64_t> out;
  while (true) {
    const std::size_t end = std::min(list.find(','), list.size());
    const std::string_view cell = list.substr(0, end);
    std::int64_t value = 0;
    const auto [stop, error] = std::from_chars(cell.data(), cell.data() + cell.size(), value);
    if (error != std::errc() || stop != cell.data() + cell.size() || value < 1 || value > max) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("workload \"{}\": {}[{}]: expected an integer in [1, {}], got \"{}\"", text, kind,
                              out.size(), max, cell));
    }
    out.push_back(value);
    if (end == list.size()) return out;
    list.remove_prefix(end + 1);
  }
}

}  // namespace

bench::Forest parse_workload(std::string_view text) {
  const auto fail = [&](const std::string& message) {
    throw Error(ErrorCode::invalid_argument, fmt::format("workload \"{}\": {}", text, message));
  };
  const std::size_t bar = text.find('|');
  if (bar == std::string_view::npos || text.find('|', bar + 1) != std::string_view::npos) {
    fail("expected \"nodes per level|tokens per node per level\", such as 1,64|8192,256");
  }
  const auto counts = parse_list(text, text.substr(0, bar), "nodes", kMaxNodes);
  const auto tokens = parse_list(text, text.substr(bar + 1), "tokens", kMaxPathTokens);
  if (counts.size() != tokens.size()) {
    fail(fmt::format("expected as many token counts as node counts ({}), got {}", counts.size(), tokens.size()));
  }
  std::int64_t num_nodes = 0;
  std::int64_t path = 0;
  for (std::size_t level = 0; level < counts.size(); ++level) {
    num_nodes += counts[level];
    path += tokens[level];
    if (level > 0 && counts[level] < counts[level - 1]) {
      fail(fmt::format("nodes[{}]: expected at least nodes[{}] = {}, got {}", level, level - 1, counts[level - 1],
                       counts[level]));
    }
  }
  if (num_nodes > kMaxNodes) fail(fmt::format("expected at most {} nodes, got {}", kMaxNodes, num_nodes));
  if (path > kMaxPathTokens) fail(fmt::format("expected at most {} tokens on a path, got {}", kMaxPathTokens, path));

  bench::Forest forest;
  std::int64_t above = 0;  // index of the first node of the level above
  for (std::size_t level = 0; level < counts.size(); ++level) {
    const auto first = static_cast<std::int64_t>(forest.nodes.size());
    for (std::int64_t j = 0; j < counts[level]; ++j) {
      const std::int64_t parent = level == 0 ? -1 : above + j * counts[level - 1] / counts[level];
      forest.nodes.push_back({static_cast<std::int32_t>(parent), tokens[level]});
      if (level + 1 == counts.size()) forest.requests.push_back({static_cast<std::int32_t>(first + j), 1});
    }
    above = first;
  }
  return forest;
}

}  // namespace headwater::cli
