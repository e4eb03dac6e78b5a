// Random attention calls: everything about a scenario follows from one seed, and can be printed.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "headwater/device_model.h"
#include "headwater/executor.h"
#include "headwater/options.h"
#include "reference/call.h"
#include "reference/rng.h"
#include "reference/tables.h"

namespace headwater::property {

struct Scenario {
  std::uint64_t seed = 0;
  AttentionShape shape;
  PlanOptions options;  ///< without policy
  reference::PageTables tables;
  reference::CallOptions call;
  DeviceModel model;
};

/// What a random scenario may contain.
struct Range {
  bool fp32_only = false;   ///< fp32 everywhere: the sharpest tolerance
  bool features = true;     ///< soft-cap, windows, ALiBi, sinks, scales, ...
  bool odd_strides = true;  ///< paddings and layouts other than NHD
  int max_rows = 8;         ///< query rows of a request
  int max_pages = 12;       ///< of a request
  std::vector<int> head_dims{32, 64, 80, 96, 128};
  std::vector<int> page_sizes{1, 2, 3, 4, 5, 8, 16, 16, 32};
  bool gpu_types = false;  ///< q f16 or bf16, KV of q's type or fp8
};

Scenario random_scenario(std::uint64_t seed, const Range& range);

/// In words, with the page tables: what a failing test prints.
std::string describe(const Scenario& scenario);

/// Six requests: a trunk of about 40 tokens for all, a branch for three of them, tails; one duplicate, one without
/// keys.
reference::PageTables small_forest(int page_size);

/// A cost model under which sharing always pays, with small tiles and chunks: short test inputs get cut into many
/// pieces.
DeviceModel eager_model(int max_tile_rows = 32, int chunk_tokens = 48);

/// Whether two requests certainly share a full page that rows of both see in full: then policy `forest` must cascade.
bool must_share(const PlanOptions& options, const reference::PageTables& tables);

/// 1, 2 or 3 workers.
class Executors {
 public:
  Executor& of(int workers);

 private:
  SerialExecutor serial_;
  ThreadPool two_{2};
  ThreadPool three_{3};
};

/// Levels this processor has; the missing ones are announced once a program, with a count.
const std::vector<Isa>& isas();

/// One request of a batch in page-table form, alone: its tables, and query rows counted from 0.
class SingleRequest {
 public:
  SingleRequest(const Batch& all, std::size_t b);
  SingleRequest(const SingleRequest&) = delete;
  SingleRequest& operator=(const SingleRequest&) = delete;
  [[nodiscard]] const Batch& batch() const noexcept { return batch_; }

 private:
  std::array<std::int32_t, 2> qo_indptr_;
  std::array<std::int32_t, 2> kv_indptr_;
  Batch batch_;
};

}  // namespace headwater::property
