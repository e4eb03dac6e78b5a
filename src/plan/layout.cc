#include "plan/layout.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "headwater/error.h"
#include "plan/rows.h"
#include "plan/validate.h"

namespace headwater::detail {
namespace {

std::int32_t place(std::int64_t& total, std::int32_t num_pages) {
  const std::int64_t region = total;
  total += region_size(num_pages);
  if (total > std::numeric_limits<std::int32_t>::max() / 2) {
    throw Error(ErrorCode::unsupported, "the page tables hold more than 1073741823 page ids, the most a plan can keep");
  }
  return static_cast<std::int32_t>(region);
}

Table table_of(const PageTable& kv, std::size_t i) {
  Table t;
  t.num_pages = kv.indptr[i + 1] - kv.indptr[i];
  t.last_len = t.num_pages > 0 ? kv.last_page_len[i] : 0;
  return t;
}

}  // namespace

std::int32_t region_size(std::int32_t num_pages) noexcept {
  const auto n = static_cast<std::uint32_t>(num_pages);
  const std::uint32_t step = std::max<std::uint32_t>(16, std::bit_floor(n) / 4);
  return static_cast<std::int32_t>((n & ~(step - 1)) + step);  // step is a power of two
}

std::int32_t read_tables(const Batch& batch, std::vector<Table>& tables) {
  const std::size_t n = batch.qo_indptr.size() - 1;
  tables.resize(n);
  std::int64_t total = 0;
  for (std::size_t b = 0; b < n; ++b) {
    Table t = table_of(batch.kv, b);
    if (!batch.kv_start_page.empty()) t.start_page = batch.kv_start_page[b];
    if (!batch.first_page_offset.empty()) t.first_offset = batch.first_page_offset[b];
    t.region = place(total, t.num_pages);
    tables[b] = t;
  }
  return static_cast<std::int32_t>(total);
}

void copy_table(const PageTable& kv, std::size_t i, const Table& t, std::int32_t* page_ids) {
  std::copy_n(kv.indices.data() + kv.indptr[i], t.num_pages, page_ids + t.region);
  std::fill(page_ids + t.region + t.num_pages, page_ids + t.region + region_size(t.num_pages), -1);
}

void copy_page_ids(const Batch& batch, const std::vector<Table>& tables, std::span<const Entry> unchecked,
                   std::int32_t total, std::vector<std::int32_t>& page_ids) {
  // Appended, not resized and filled: each place is written once.
  page_ids.clear();
  page_ids.reserve(static_cast<std::size_t>(total));
  std::size_t e = 0;
  for (std::size_t b = 0; b < tables.size(); ++b) {
    const std::int64_t base = std::int64_t{batch.kv.indptr[b]} - tables[b].start_page;
    for (; e < unchecked.size() && static_cast<std::size_t>(unchecked[e].request) == b; ++e) {
      check_page_ids(batch.kv, base + unchecked[e].page_begin, base + unchecked[e].page_end, "kv_indices");
    }
    const std::int32_t* ids = batch.kv.indices.data() + batch.kv.indptr[b];
    page_ids.insert(page_ids.end(), ids, ids + tables[b].num_pages);
    page_ids.resize(static_cast<std::size_t>(tables[b].region + region_size(tables[b].num_pages)), -1);
  }
}

void read_levels(const Batch& batch, const PlanOptions& options, PlanData& plan) {
  PlanData::Memory& memory = *plan.memory;
  std::int64_t total = 0;
  for (const Level& level : batch.levels) {
    memory.level_size.push_back(static_cast<std::int32_t>(level.qo_indptr.size() - 1));
    memory.level_indptr.emplace_back(level.qo_indptr.begin(), level.qo_indptr.end());
    for (std::size_t j = 0; j + 1 < level.qo_indptr.size(); ++j) {
      Table t = table_of(level.kv, j);
      t.region = place(total, t.num_pages);
      memory.tables.push_back(t);
    }
  }
  plan.page_ids.resize(static_cast<std::size_t>(total));

  // A node's tokens start where its parent's end. Depth-first order: the nodes of all levels sorted by first row.
  Forest& forest = memory.forest;
  forest.levels = true;
  const auto& requests = memory.level_indptr.back();
  memory.qo_indptr = requests;
  memory.num_requests = static_cast<std::int32_t>(requests.size()) - 1;
  std::vector<std::int32_t> entry_of_row(static_cast<std::size_t>(requests.back()) + 1);  // entries before each row
  for (std::int32_t b = 0; b < memory.num_requests; ++b) {
    const std::int32_t begin = requests[static_cast<std::size_t>(b)];
    const std::int32_t end = requests[static_cast<std::size_t>(b) + 1];
    for (std::int32_t r = begin; r < end; ++r) {
      entry_of_row[static_cast<std::size_t>(r)] = static_cast<std::int32_t>(memory.entries.size());
    }
    if (begin == end) continue;
    Entry e;
    e.request = b;
    e.row_begin = begin;
    e.row_end = end;
    memory.entries.push_back(e);
    forest.order.push_back(static_cast<std::int32_t>(memory.entries.size()) - 1);
  }
  const auto num_entries = static_cast<std::int32_t>(memory.entries.size());
  entry_of_row.back() = num_entries;

  std::vector<std::int32_t> end_of_row(static_cast<std::size_t>(requests.back()), 0);  // tokens of the path so far
  std::size_t first_table = 0;
  for (std::size_t l = 0; l < batch.levels.size(); ++l) {
    const Level& level = batch.levels[l];
    for (std::size_t j = 0; j + 1 < level.qo_indptr.size(); ++j) {
      const Table& t = memory.tables[first_table + j];
      copy_table(level.kv, j, t, plan.page_ids.data());
      const std::int32_t row_begin = level.qo_indptr[j];
      const std::int32_t row_end = level.qo_indptr[j + 1];
      if (row_begin == row_end) continue;
      const std::int32_t begin = end_of_row[static_cast<std::size_t>(row_begin)];
      const std::int32_t length = tokens_of(t, level.kv.page_size).end;
      std::fill(end_of_row.begin() + row_begin, end_of_row.begin() + row_end, begin + length);
      if (length == 0) continue;
      Node node;
      node.tok_begin = begin;
      node.cut = node.tok_end = begin + length;
      node.origin = begin;
      node.page_base = t.region;
      node.view = static_cast<std::int32_t>(l);
      node.depth = static_cast<std::int32_t>(l);
      node.member_begin = entry_of_row[static_cast<std::size_t>(row_begin)];
      node.num_members = entry_of_row[static_cast<std::size_t>(row_end)] - node.member_begin;
      node.num_rows = row_end - row_begin;
      forest.nodes.push_back(node);
    }
    first_table += level.qo_indptr.size() - 1;
  }
  std::ranges::stable_sort(forest.nodes, [](const Node& a, const Node& b) {
    return a.member_begin != b.member_begin ? a.member_begin < b.member_begin : a.depth < b.depth;
  });
  for (std::size_t i = 0; i < forest.nodes.size(); ++i) {
    Node& node = forest.nodes[i];
    node.subtree_end = static_cast<std::int32_t>(i) + 1;
    for (std::int32_t up = static_cast<std::int32_t>(i) - 1; up >= 0;
         up = forest.nodes[static_cast<std::size_t>(up)].parent) {
      const Node& above = forest.nodes[static_cast<std::size_t>(up)];
      if (above.depth < node.depth && node.member_begin < above.member_begin + above.num_members) {
        node.parent = up;
        break;
      }
    }
    for (std::int32_t up = node.parent; up >= 0; up = forest.nodes[static_cast<std::size_t>(up)].parent) {
      forest.nodes[static_cast<std::size_t>(up)].subtree_end = static_cast<std::int32_t>(i) + 1;
    }
  }
  for (Entry& e : memory.entries) {
    const std::int32_t kv_end = end_of_row[static_cast<std::size_t>(e.row_begin)];
    e.tok_end = kv_end;
    append_rows(options, e.row_end - e.row_begin, 0, kv_end, plan.rows);
  }
  if (options.batch_invariant) {
    const std::int32_t sinks = sink_limit(options);
    for (const RowRange& row : plan.rows) memory.row_first.push_back(sinks > 0 && row.hi > 0 ? 0 : row.lo);
  }
}

}  // namespace headwater::detail
