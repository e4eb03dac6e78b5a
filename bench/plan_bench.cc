// Times of planning on the host: from nothing, updated with the changes given, updated by comparing the whole table.
//   plan_bench [repetitions]
// Batches: B requests of `pages` pages of 16 tokens, the first half of the pages shared by all, decode steps (each
// request grows by a token a step, and every 16th step by a page). Prints median and minimum in microseconds.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "headwater/plan.h"

namespace {

using namespace headwater;

struct Tables {
  std::vector<std::int32_t> qo, indptr, indices, last;
  int pages, capacity;
  std::int64_t pool;

  Tables(int requests, int num_pages, int shared, bool many_groups) : pages(num_pages), capacity(num_pages + 64) {
    pool = static_cast<std::int64_t>(requests) * capacity + num_pages;
    tables.resize(static_cast<std::size_t>(requests));
    for (int b = 0; b < requests; ++b) {
      for (int i = 0; i < capacity; ++i) {
        const int group = many_groups ? b / 16 : 0;
        const int id =
            i < shared ? i + group * shared : static_cast<int>((static_cast<std::int64_t>(b) * capacity + i) % pool);
        tables[static_cast<std::size_t>(b)].push_back(id);
      }
    }
    tokens.assign(static_cast<std::size_t>(requests), 0);
    for (int b = 0; b < requests; ++b) tokens[static_cast<std::size_t>(b)] = num_pages * 16 - 16 + b % 16;
    pool += static_cast<std::int64_t>(shared) * (requests / 16 + 1);
    step();
  }

  void step() {
    qo.assign(1, 0);
    indptr.assign(1, 0);
    indices.clear();
    last.clear();
    for (std::size_t b = 0; b < tables.size(); ++b) {
      const int n = (++tokens[b] + 15) / 16;
      indices.insert(indices.end(), tables[b].begin(), tables[b].begin() + n);
      indptr.push_back(static_cast<std::int32_t>(indices.size()));
      last.push_back(tokens[b] - (n - 1) * 16);
      qo.push_back(static_cast<std::int32_t>(b) + 1);
    }
  }

  [[nodiscard]] Batch batch() const {
    Batch b;
    b.qo_indptr = qo;
    b.kv.indptr = indptr;
    b.kv.indices = indices;
    b.kv.last_page_len = last;
    b.kv.page_size = 16;
    b.kv.num_pages = pool;
    return b;
  }

  std::vector<std::vector<std::int32_t>> tables;
  std::vector<int> tokens;
};

template <class Work>
void time(const char* name, int repetitions, const Work& work) {
  std::vector<double> us;
  for (int i = 0; i < repetitions; ++i) us.push_back(work());
  std::sort(us.begin(), us.end());
  std::printf("  %-28s median %9.1f us   min %9.1f us\n", name, us[us.size() / 2], us[0]);
}

template <class Work>
double microseconds(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

void bench(int requests, int pages, int shared, bool groups, int repetitions) {
  std::printf("%d requests x %d pages, %d of them shared by %s\n", requests, pages, shared, groups ? "16 each" : "all");
  Tables tables(requests, pages, shared, groups);
  Planner planner;
  const AttentionShape shape;
  const PlanOptions options;
  Plan plan = planner.plan(shape, tables.batch(), options);
  time("cold", std::max(5, repetitions / 8),
       [&] { return microseconds([&] { plan = planner.plan(shape, tables.batch(), options); }); });
  std::vector<std::int32_t> all(static_cast<std::size_t>(requests));
  std::iota(all.begin(), all.end(), 0);
  Changes changes;
  changes.grown = all;
  time("update, changes given", repetitions, [&] {
    tables.step();
    return microseconds([&] { planner.update(plan, tables.batch(), &changes); });
  });
  time("update, table compared", repetitions, [&] {
    tables.step();
    return microseconds([&] { planner.update(plan, tables.batch()); });
  });
  if (planner.plan(shape, tables.batch(), options).serialize() != plan.serialize()) {
    std::printf("  ERROR: an updated plan differs from one made from nothing\n");
    std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int repetitions = argc > 1 ? std::max(1, std::atoi(argv[1])) : 200;
  bench(256, 512, 256, false, repetitions);
  bench(256, 512, 256, true, repetitions);
  bench(256, 512, 0, false, repetitions);
  bench(256, 2048, 1024, false, repetitions);
  bench(256, 2048, 1024, true, repetitions);
  bench(1024, 2048, 1024, false, std::min(repetitions, 40));
  return 0;
}
