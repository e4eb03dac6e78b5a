// Files of cells: forests with shapes, one a line; see formats.h.
#include <fmt/format.h>

#include <charconv>
#include <vector>

#include "bench/workloads.h"
#include "cli/formats.h"
#include "headwater/error.h"

namespace headwater::cli {
namespace {

constexpr std::int64_t kMaxNodes = std::int64_t{1} << 20;
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;  ///< positions are 32-bit

/// The words of one line, read one by one.
class Words {
 public:
  Words(std::string_view line, std::string place) : rest_(line), place_(std::move(place)) {}

  [[nodiscard]] std::string_view next() {
    rest_.remove_prefix(std::min(rest_.find_first_not_of(" \t\r"), rest_.size()));
    const std::string_view word = rest_.substr(0, rest_.find_first_of(" \t\r"));
    rest_.remove_prefix(word.size());
    return word;
  }
  [[nodiscard]] std::int64_t number(const std::string& field, std::int64_t min, std::int64_t max) {
    const std::string_view word = next();
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc() || end != word.data() + word.size() || value < min || value > max) {
      fail(fmt::format("{}: expected an integer in [{}, {}], got \"{}\"", field, min, max, word));
    }
    return value;
  }
  [[noreturn]] void fail(const std::string& message) const {
    throw Error(ErrorCode::io, fmt::format("{}: {}", place_, message));
  }

 private:
  std::string_view rest_;
  std::string place_;
};

bench::Workload parse_cell(std::string_view line, const std::string& place) {
  Words words(line, place);
  bench::Workload out;
  out.name = words.next();
  out.num_qo_heads = static_cast<int>(words.number("query heads", 1, 1024));
  out.num_kv_heads = static_cast<int>(words.number("KV heads", 1, out.num_qo_heads));
  out.head_dim = static_cast<int>(words.number("head size", 1, 1024));
  const std::int64_t count = words.number("nodes", 1, kMaxNodes);
  std::vector<bool> inner(static_cast<std::size_t>(count));
  std::vector<std::int64_t> path(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::string node = fmt::format("node {}", i);
    bench::ForestNode made;
    made.parent = static_cast<std::int32_t>(words.number(node + ", parent", -1, i - 1));
    const std::int64_t above = made.parent < 0 ? 0 : path[static_cast<std::size_t>(made.parent)];
    made.num_tokens = words.number(node + ", tokens", 0, kMaxTokens - above);
    path[static_cast<std::size_t>(i)] = above + made.num_tokens;
    if (made.parent >= 0) inner[static_cast<std::size_t>(made.parent)] = true;
    out.forest.nodes.push_back(made);
  }
  if (const std::string_view word = words.next(); !word.empty()) {
    words.fail(fmt::format("expected the end of the line after {} nodes, got \"{}\"", count, word));
  }
  for (std::int64_t i = 0; i < count; ++i) {
    if (inner[static_cast<std::size_t>(i)]) continue;
    if (path[static_cast<std::size_t>(i)] == 0) words.fail(fmt::format("node {}: a request without tokens", i));
    out.forest.requests.push_back({static_cast<std::int32_t>(i), 1});
  }
  return out;
}

}  // namespace

std::vector<bench::Workload> parse_cells(std::string_view text, std::string_view name) {
  std::vector<bench::Workload> out;
  for (int number = 1; !text.empty(); ++number) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    const std::size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string_view::npos || line[first] == '#') continue;
    out.push_back(parse_cell(line, fmt::format("{}:{}", name, number)));
  }
  if (out.empty()) throw Error(ErrorCode::io, fmt::format("{}: expected at least one cell, got none", name));
  return out;
}

}  // namespace headwater::cli
