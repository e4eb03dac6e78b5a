// A program in C++ that uses an installed Headwater: plans a batch of two requests that share pages and prints the
// account.
#include <headwater/headwater.h>

#include <cstdint>
#include <iostream>
#include <vector>

int main() {
  const std::vector<std::int32_t> qo_indptr{0, 1, 2};
  const std::vector<std::int32_t> kv_indptr{0, 3, 6};
  const std::vector<std::int32_t> kv_indices{0, 1, 2, 0, 1, 3};
  const std::vector<std::int32_t> last_page_len{5, 7};
  headwater::Batch batch;
  batch.qo_indptr = qo_indptr;
  batch.kv = {kv_indptr, kv_indices, last_page_len, 16, 4, -1};
  headwater::PlanOptions options;
  options.policy = headwater::Policy::forest;
  headwater::Planner planner;
  const headwater::Plan plan = planner.plan(headwater::AttentionShape{}, batch, options);
  if (plan.stats().num_rows != 2 || plan.stats().path != headwater::Path::cascade) return 1;
  std::cout << "headwater " << headwater::version() << " from C++\n" << plan.describe();
  return 0;
}
