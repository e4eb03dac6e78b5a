// The one-line account of a plan: requests and chunks are counted, not rows.
#include "cli/outcome.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "headwater/headwater.h"

namespace headwater {
namespace {

constexpr int kPage = 16;

/// `num_sharing` requests share `shared_pages` pages, `num_apart` share nothing; each has one page of its own and
/// `rows` query rows.
struct Tables {
  std::vector<std::int32_t> qo_indptr{0}, kv_indptr{0}, indices, last;

  Tables(int num_sharing, int num_apart, int shared_pages, int own_pages, int rows) {
    std::int32_t next = shared_pages;
    for (int b = 0; b < num_sharing + num_apart; ++b) {
      for (int p = 0; p < shared_pages; ++p) indices.push_back(b < num_sharing ? p : next++);
      for (int p = 0; p < own_pages; ++p) indices.push_back(next++);
      qo_indptr.push_back(qo_indptr.back() + rows);
      kv_indptr.push_back(static_cast<std::int32_t>(indices.size()));
      last.push_back(kPage);
    }
  }

  [[nodiscard]] std::string outcome(Policy policy) const {
    Batch batch;
    batch.qo_indptr = qo_indptr;
    batch.kv = {kv_indptr, indices, last, kPage, static_cast<std::int64_t>(indices.size()) + 1, -1};
    PlanOptions options;
    options.policy = policy;
    options.num_workers = 1;  // one chunk a tile
    return cli::describe_outcome(Planner(DeviceModel{}).plan(AttentionShape{}, batch, options));
  }
};

TEST(Outcome, OneRowARequest) {
  EXPECT_EQ(Tables(4, 2, 8, 1, 1).outcome(Policy::forest),
            "cascade launch (batch 6, 4 of them sharing 8 pages / 128 KV tokens read once; 1 shared-span chunks, 6 "
            "suffix chunks)");
  EXPECT_EQ(Tables(4, 2, 8, 1, 1).outcome(Policy::flat), "flat launch (batch 6; 6 chunks)");
}

TEST(Outcome, SeveralRowsARequestAreOneRequest) {
  EXPECT_EQ(Tables(2, 8, 8, 1, 4).outcome(Policy::forest),
            "cascade launch (batch 10, 2 of them sharing 8 pages / 128 KV tokens read once; 1 shared-span chunks, 10 "
            "suffix chunks)");
}

TEST(Outcome, TilesOfOneRequestsRowsBelongToTheSharedSpan) {
  // 2 x 48 rows with a group of 4 and tiles of 128 stacked rows: three shared tiles of 32 rows, of which the first and
  // the last hold rows of one request only; two suffix tiles for each request.
  EXPECT_EQ(Tables(2, 0, 8, 3, 48).outcome(Policy::forest),
            "cascade launch (batch 2, 2 of them sharing 8 pages / 128 KV tokens read once; 3 shared-span chunks, 4 "
            "suffix chunks)");
}

}  // namespace
}  // namespace headwater
