// Measures the constants of the cost model on a CUDA device; see cuda_processor.h.
//
// All but the read rates are slopes, so that what a launch costs drops out: a call against the same call with more
// keys, items, rows or groups for every block. One KV head: then a worker of the model is one thread block, and all of
// them have equal work. Not measured, since they are properties of the kernels: max_tile_rows, chunk_tokens, the
// padding of rows, and few_row_max, up to which products hide behind reading; nor many_start_ps.
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "bench/cuda_arm.h"
#include "bench/cuda_processor.h"
#include "bench/stats.h"
#include "bench/workloads.h"
#include "headwater/error.h"

namespace headwater::bench {
namespace {

constexpr int kPage = 16;
constexpr int kHeadDim = 128;

AttentionShape shape_of(int q_heads, int kv_heads, DType type) {
  return {q_heads, kv_heads, kHeadDim, kHeadDim, type, type, type};
}

/// `groups` roots of `shared` tokens, each with `members` requests of `own` tokens; own = 0: requests with one table.
Forest groups_of(int groups, std::int64_t shared, int members, std::int64_t own) {
  Forest out;
  for (int g = 0; g < groups; ++g) {
    const auto root = static_cast<std::int32_t>(out.nodes.size());
    out.nodes.push_back({-1, shared});
    for (int m = 0; m < members; ++m) {
      if (own > 0) out.nodes.push_back({root, own});
      out.requests.push_back({own > 0 ? static_cast<std::int32_t>(out.nodes.size()) - 1 : root, 1});
    }
  }
  return out;
}

class Calibration {
 public:
  Calibration(DType type, const std::function<void(double, const std::string&)>& progress)
      : type_(type), progress_(progress), processor_(make_cuda_processor()) {
    // One KV head of 128 is what the constants are of.
    model_ = processor_->model_for(shape_of(4, 1, type), {});
    workers_ = model_.num_workers;
  }

  DeviceModel measure() {
    rates();
    products();
    items();
    partials();
    report(1, "done");
    return model_;
  }

 private:
  void report(double fraction, const char* what) const {
    if (progress_) progress_(fraction, what);
  }

  /// Median seconds of a call, on cold KV or on KV that the second-level cache still holds.
  double seconds(const AttentionShape& shape, const PagedForest& paged, Policy policy, KvMemory& kv, bool warm,
                 int plan_workers = 0) {
    Planner planner(processor_->model_for(shape, {}));
    PlanOptions options;
    options.policy = policy;
    options.min_shared_pages = 1;
    options.num_workers = plan_workers;
    const std::unique_ptr<Arm> arm = processor_->make_arm(planner, shape, paged, options, kv);
    std::vector<double> samples;
    for (int i = 0; i < 3 + kSamples; ++i) {
      const double one = warm ? arm->run_warm() : arm->run();
      if (i >= 3) samples.push_back(one);
    }
    return median(std::move(samples));
  }
  /// The same with KV of its own, which stays in the cache where it fits.
  double warm_seconds(const AttentionShape& shape, const Forest& forest, Policy policy) {
    const PagedForest paged = make_paged(forest, kPage, 1);
    const auto kv = processor_->make_kv(shape, paged.pool->num_pages(), kPage, Layout::hnd, false, 0);
    return seconds(shape, paged, policy, *kv, true);
  }

  /// Memory by plain reading; the second-level cache by attention, since blocks, not the cache, bound it; one block by
  /// one long request.
  void rates() {
    report(0.02, "memory and second-level cache");
    std::vector<double> gbs;
    for (int i = 0; i < 41; ++i) gbs.push_back(processor_->sample().read_gbs);
    model_.memory_ps_per_kib = picoseconds(1024 / (median(gbs) * 1e9));
    const AttentionShape shape = shape_of(32, 8, type_);
    const double small = warm_seconds(shape, unshared(16, 128), Policy::flat);
    const double large = warm_seconds(shape, unshared(16, 512), Policy::flat);
    const double kib = 16.0 * (512 - 128) * kib_of_token(shape);
    model_.cache_ps_per_kib = picoseconds((large - small) / kib);

    report(0.15, "one block alone");
    const AttentionShape one_head = shape_of(4, 1, type_);
    model_.worker_ps_per_kib = picoseconds(key_alone(one_head) / kib_of_token(one_head));
  }

  /// Seconds that a block which is on its own takes for a key: a long request less a short one, each a single item.
  double key_alone(const AttentionShape& shape) {
    const auto alone = [&](std::int64_t tokens) {
      const PagedForest paged = make_paged(unshared(1, tokens), kPage, 1);
      const auto kv = processor_->make_kv(shape, paged.pool->num_pages(), kPage, Layout::hnd, false, kColdBytes);
      return seconds(shape, paged, Policy::flat, *kv, false, 1);
    };
    return (alone(16'384) - alone(4'096)) / (16'384 - 4'096);
  }

  /// Every block has a request of its own, and all read at once: what is left of a key's time after its share of the
  /// read rate, over the number of stacked rows. A block on its own may be slower than that with many rows: it is bound
  /// by its own pipeline then, in both cases.
  void products() {
    report(0.25, "products");
    const std::int64_t long_tokens = 3'072;
    const std::int64_t short_tokens = 1'024;
    const PagedForest long_requests = make_paged(unshared(workers_, long_tokens), kPage, 1);
    const PagedForest short_requests =
        make_paged(unshared(workers_, short_tokens), kPage, 1, false, long_requests.pool->num_pages());
    const auto kv = processor_->make_kv(shape_of(1, 1, type_), long_requests.pool->num_pages(), kPage, Layout::hnd,
                                        false, kColdBytes);
    const double read = in_seconds(model_.memory_ps_per_kib) * workers_ * kib_of_token(shape_of(1, 1, type_));
    std::vector<std::pair<double, double>> points;
    for (const int rows : {8, 16, 32, 64, 96, 128}) {
      const AttentionShape shape = shape_of(rows, 1, type_);
      const double all = seconds(shape, long_requests, Policy::flat, *kv, false);
      const double fixed = seconds(shape, short_requests, Policy::flat, *kv, false);
      const double key = std::max((all - fixed) / static_cast<double>(long_tokens - short_tokens), key_alone(shape));
      points.emplace_back(rows, std::max(key - read, 0.02 * key));
      report(0.25 + 0.3 * rows / 128, "products");
    }
    const Line line = fit_line(points);
    model_.dot16.many_row_ps = picoseconds(line.slope);
    model_.dot16.many_base_ps = picoseconds(line.base, 0);
    model_.fma32 = model_.dot16;
  }

  /// n requests of one page for every block, and one page that n rows share for every block.
  void items() {
    report(0.6, "work items and rows");
    const AttentionShape shape = shape_of(4, 1, type_);
    std::vector<std::pair<double, double>> items;
    for (const int n : {1, 2, 4, 8}) {
      items.emplace_back(n, warm_seconds(shape, unshared(n * std::int64_t{workers_}, kPage), Policy::flat));
    }
    std::vector<std::pair<double, double>> rows;
    for (const int n : {2, 8, 16, 32}) {
      rows.emplace_back(n, warm_seconds(shape, groups_of(workers_, kPage, n, 0), Policy::forest));
    }
    const Line by_item = fit_line(items);
    const double row_products = kPage * in_seconds(model_.dot16.many_row_ps) * shape.group_size();
    model_.item_row_ps = picoseconds(fit_line(rows).slope - row_products, 1'000);
    model_.item_ps = picoseconds(by_item.slope - in_seconds(model_.item_row_ps), 10'000);
    model_.launch_ps = picoseconds(by_item.base, 500'000);
  }

  /// Groups that share one page and own one each, split off and not: what more a group takes when it is split off, less
  /// its item, rows and products, is its partial states. Measured with a team of 8 heads, whose blocks write side by
  /// side; the constant is of one head.
  void partials() {
    report(0.8, "partial states");
    const AttentionShape shape = shape_of(32, 8, type_);
    const int teams = processor_->model_for(shape, {}).num_workers;
    constexpr int kMembers = 16;
    const auto per_group = [&](Policy policy) {
      std::vector<std::pair<double, double>> points;
      for (const int n : {1, 2, 4}) {
        points.emplace_back(n, warm_seconds(shape, groups_of(n * teams, kPage, kMembers, kPage), policy));
      }
      return fit_line(points).slope;
    };
    const double more = per_group(Policy::forest) - per_group(Policy::flat);
    // The products of the shared page, split off, for all rows; flat's few rows each hide theirs behind reading.
    const int rows = kMembers * shape.group_size();
    const double products = kPage * in_seconds(model_.dot16.many_base_ps + model_.dot16.many_row_ps * rows);
    const double fixed = products + in_seconds(model_.item_ps) + kMembers * in_seconds(model_.item_row_ps);
    const double kib = 2.0 * kMembers * shape.num_qo_heads * (kHeadDim + 1) * 4 / 1024;
    model_.partial_ps_per_kib = picoseconds((more - fixed) / kib * shape.num_kv_heads, 1'000);
  }

  [[nodiscard]] static double kib_of_token(const AttentionShape& shape) {
    return static_cast<double>(shape.num_kv_heads) * 2 * kHeadDim * static_cast<double>(size_of(shape.kv_dtype)) / 1024;
  }

  static constexpr int kSamples = 15;
  static constexpr std::size_t kColdBytes = std::size_t{128} << 20;

  DType type_;
  const std::function<void(double, const std::string&)>& progress_;
  std::unique_ptr<Processor> processor_;
  DeviceModel model_;
  int workers_ = 1;
};

}  // namespace

DeviceModel calibrate_cuda(DType type, const std::function<void(double, const std::string&)>& progress) {
  return Calibration(type, progress).measure();
}

}  // namespace headwater::bench
