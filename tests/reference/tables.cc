// See tables.h. One draw a statement: compilers differ in the order of arguments, and a seed must mean the same tables
// under each.
#include "reference/tables.h"

#include <algorithm>
#include <sstream>

namespace headwater::reference {
namespace {

/// No pool has so many pages.
constexpr std::int32_t kNoPage = 1 << 30;

struct Request {
  std::vector<std::int32_t> pages;
  int last_len = 0;
  int num_rows = 1;
  int start_page = 0;
  int offset = 0;
};

/// Pages wholly left of every row's window have been handed back: their ids are stale (poisoned memory).
void make_stale(Rng& rng, const ForestOptions& options, std::int32_t stale_page, Request& request) {
  const std::int64_t length =
      (static_cast<std::int64_t>(request.start_page) + static_cast<std::int64_t>(request.pages.size()) - 1) *
          options.page_size +
      request.last_len;
  const std::int64_t first_needed = length - request.num_rows - options.stale_left;
  for (std::size_t i = 0; i < request.pages.size(); ++i) {
    const std::int64_t end = (request.start_page + static_cast<std::int64_t>(i) + 1) * options.page_size;
    if (end > first_needed || !rng.chance(0.8)) continue;
    request.pages[i] = options.null_page ? 0 : stale_page;
    if (rng.chance(0.3))
      request.pages[i] = rng.chance(0.5) ? -7 : kNoPage;  // an id is looked at only where a row sees it
  }
}

Request random_request(Rng& rng, const ForestOptions& options, const std::vector<Request>& earlier,
                       std::int32_t& next_page) {
  Request request;
  request.num_rows = rng.integer(options.max_rows > 1 && rng.chance(0.1) ? 0 : 1, options.max_rows);
  if (rng.chance(0.06)) return request;  // no keys
  if (!earlier.empty() && rng.chance(0.12)) {
    request = rng.pick(earlier);  // a duplicate
    request.num_rows = rng.integer(1, options.max_rows);
    return request;
  }
  const int count = rng.integer(1, options.max_pages);
  for (int i = 0; i < count; ++i) request.pages.push_back(next_page++);
  request.last_len = rng.integer(1, options.page_size);
  if (options.windows && rng.chance(0.4)) {
    request.start_page = rng.integer(0, 3);
    request.offset = rng.integer(0, (count == 1 ? request.last_len : options.page_size) - 1);
  }
  const auto copy = [&](const Request& from, int first_absolute, int end_absolute) {
    for (int p = first_absolute; p < end_absolute; ++p) {
      const int mine = p - request.start_page;
      const int theirs = p - from.start_page;
      if (mine < 0 || theirs < 0 || mine >= count || theirs >= static_cast<int>(from.pages.size())) continue;
      request.pages[static_cast<std::size_t>(mine)] = from.pages[static_cast<std::size_t>(theirs)];
    }
  };
  if (!earlier.empty() && rng.chance(0.85)) {
    const Request& from = rng.pick(earlier);
    copy(from, 0, rng.integer(1, options.max_pages + 1));  // a shared prefix, perhaps all of it
  }
  if (!earlier.empty() && rng.chance(0.2)) {
    const Request& from = rng.pick(earlier);
    const int first = rng.integer(0, options.max_pages);
    copy(from, first, first + rng.integer(1, 3));  // sharing (again) in the middle
  }
  if (rng.chance(0.1)) {
    const auto a = static_cast<std::size_t>(rng.integer(0, count - 1));
    const auto b = static_cast<std::size_t>(rng.integer(0, count - 1));
    request.pages[a] = request.pages[b];  // one page at two positions
  }
  return request;
}

}  // namespace

Batch PageTables::batch() const {
  Batch batch;
  batch.qo_indptr = qo_indptr;
  batch.kv = {kv_indptr, kv_indices, last_page_len, page_size, num_pages, null_page};
  batch.kv_start_page = kv_start_page;
  batch.first_page_offset = first_page_offset;
  return batch;
}

void PageTables::add(const std::vector<std::int32_t>& pages, int last_len, int num_rows, int start_page, int offset) {
  qo_indptr.push_back(qo_indptr.back() + num_rows);
  kv_indices.insert(kv_indices.end(), pages.begin(), pages.end());
  kv_indptr.push_back(static_cast<std::int32_t>(kv_indices.size()));
  last_page_len.push_back(last_len);
  if (start_page != 0 || !kv_start_page.empty()) {
    kv_start_page.resize(last_page_len.size(), 0);
    kv_start_page.back() = start_page;
  }
  if (offset != 0 || !first_page_offset.empty()) {
    first_page_offset.resize(last_page_len.size(), 0);
    first_page_offset.back() = offset;
  }
  for (const std::int32_t page : pages) num_pages = std::max<std::int64_t>(num_pages, page + 1);
}

PageTables random_forest(Rng& rng, const ForestOptions& options) {
  std::vector<Request> requests;
  std::int32_t next_page = options.null_page ? 1 : 0;
  const int count = rng.integer(1, options.max_requests);
  for (int i = 0; i < count; ++i) {
    requests.push_back(random_request(rng, options, requests, next_page));
  }
  const std::int32_t stale_page = next_page++;
  if (options.stale_left >= 0) {
    for (Request& request : requests) make_stale(rng, options, stale_page, request);
  }
  // Physical pages in random order, with unused ones between them.
  std::vector<std::int32_t> physical;
  const std::int32_t fixed = options.null_page ? 1 : 0;
  const std::int32_t total = next_page + rng.integer(0, 5);
  for (std::int32_t p = fixed; p < total; ++p) physical.push_back(p);
  for (std::size_t i = physical.size(); i > 1; --i) {
    std::swap(physical[i - 1], physical[static_cast<std::size_t>(rng.between(0, static_cast<std::int64_t>(i) - 1))]);
  }
  PageTables tables;
  tables.page_size = options.page_size;
  tables.null_page = options.null_page ? 0 : -1;
  for (Request& request : requests) {
    for (std::int32_t& page : request.pages) {
      if (page >= fixed && page < total) page = physical[static_cast<std::size_t>(page - fixed)];
    }
    const int last_len = request.pages.empty() ? rng.integer(0, 3) - 1 : request.last_len;  // ignored: anything goes
    tables.add(request.pages, last_len, request.num_rows, request.start_page, request.offset);
  }
  tables.num_pages = total;
  for (int i = rng.integer(0, 3); i > 0; --i) tables.kv_indices.push_back(kNoPage);  // past the end: never looked at
  return tables;
}

Batch LevelTables::batch() const {
  Batch batch;
  for (const LevelTable& level : levels) {
    batch.levels.push_back(
        {level.qo_indptr,
         {level.kv_indptr, level.kv_indices, level.last_page_len, level.page_size, level.num_pages, -1}});
  }
  return batch;
}

LevelTables random_levels(Rng& rng, int page_size, int max_rows) {
  // Boundaries of the last level first; each level above keeps a random subset of them, so that rows nest.
  const int num_levels = rng.integer(1, 4);
  std::vector<std::int32_t> bounds{0};
  for (int requests = rng.integer(1, 8); requests > 0; --requests) {
    bounds.push_back(bounds.back() + rng.integer(1, max_rows));
  }
  LevelTables tables;
  for (int l = num_levels - 1; l >= 0; --l) {
    LevelTable level;
    level.page_size = page_size;
    level.qo_indptr = bounds;
    std::int32_t next_page = 0;
    for (std::size_t j = 0; j + 1 < bounds.size(); ++j) {
      const int pages = rng.chance(0.15) ? 0 : rng.integer(1, 6);
      for (int i = 0; i < pages; ++i) level.kv_indices.push_back(next_page++);
      level.kv_indptr.push_back(static_cast<std::int32_t>(level.kv_indices.size()));
      level.last_page_len.push_back(pages == 0 ? 0 : rng.integer(1, page_size));
    }
    level.num_pages = std::max(next_page, 1);
    tables.levels.insert(tables.levels.begin(), std::move(level));
    std::vector<std::int32_t> coarser{0};
    for (std::size_t j = 1; j + 1 < bounds.size(); ++j) {
      if (rng.chance(0.4)) coarser.push_back(bounds[j]);
    }
    coarser.push_back(bounds.back());
    bounds = coarser;
  }
  return tables;
}

PageTables tree(const std::vector<int>& nodes, const std::vector<int>& tokens, int page_size, int rows_per_leaf) {
  std::vector<std::vector<std::int32_t>> above{{}};
  std::int32_t next_page = 0;
  int last_len = page_size;
  for (std::size_t level = 0; level < nodes.size(); ++level) {
    std::vector<std::vector<std::int32_t>> here;
    const int pages = (tokens[level] + page_size - 1) / page_size;
    last_len = tokens[level] - (pages - 1) * page_size;
    const auto parents = static_cast<std::int64_t>(above.size());
    for (int j = 0; j < nodes[level]; ++j) {
      here.push_back(above[static_cast<std::size_t>(j * parents / nodes[level])]);
      for (int i = 0; i < pages; ++i) here.back().push_back(next_page++);
    }
    above = std::move(here);
  }
  PageTables tables;
  tables.page_size = page_size;
  for (const auto& pages : above) tables.add(pages, last_len, rows_per_leaf);
  return tables;
}

std::string to_string(const PageTables& tables) {
  std::ostringstream text;
  text << "page_size " << tables.page_size << ", num_pages " << tables.num_pages << "\n";
  for (int b = 0; b < tables.num_requests(); ++b) {
    const auto i = static_cast<std::size_t>(b);
    text << "  request " << b << ": rows " << tables.qo_indptr[i + 1] - tables.qo_indptr[i];
    if (!tables.kv_start_page.empty()) text << ", start page " << tables.kv_start_page[i];
    if (!tables.first_page_offset.empty()) text << ", offset " << tables.first_page_offset[i];
    text << ", last " << tables.last_page_len[i] << ", pages";
    for (auto p = tables.kv_indptr[i]; p < tables.kv_indptr[i + 1]; ++p) {
      text << ' ' << tables.kv_indices[static_cast<std::size_t>(p)];
    }
    text << "\n";
  }
  return text.str();
}

}  // namespace headwater::reference
