// Page tables, options and levels made of bytes: whatever they are, planning either refuses them with an Error or makes
// a plan whose run agrees with the float64 reference; and updating a plan gives the bytes of a new one.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "fuzz/bytes.h"
#include "headwater/headwater.h"
#include "reference/call.h"

namespace headwater::fuzz {
namespace {

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::abort();
}

PlanOptions read_options(Bytes& in) {
  PlanOptions options;
  options.policy = static_cast<Policy>(in.between(0, 4));
  options.cascade = static_cast<CascadeSwitch>(in.byte() % 8 == 7 ? in.between(1, 2) : 0);
  options.min_shared_pages = in.wild(0, 3);
  options.min_members = in.wild(0, 3);
  const std::uint8_t features = in.byte();
  options.causal = (features & 1U) == 0U;
  if ((features & 2U) != 0U) options.window_left = in.wild(-1, 40);
  if ((features & 4U) != 0U) options.local_chunk = in.wild(0, 20);
  if ((features & 8U) != 0U) options.num_sink_tokens = in.wild(0, 20);
  if ((features & 16U) != 0U) options.logits_soft_cap = static_cast<float>(in.wild(0, 30));
  options.alibi = (features & 32U) != 0U;
  options.sinks = (features & 64U) != 0U;
  options.batch_invariant = (features & 128U) != 0U;
  if (options.batch_invariant) options.invariant_chunk = in.wild(1, 64);
  options.num_workers = in.byte() % 16 == 15 ? in.wild(0, 4) : 0;
  return options;
}

struct Types {
  DType q, kv, out;
};
constexpr std::array kTypes{
    Types{DType::f32, DType::f32, DType::f32},    Types{DType::f32, DType::bf16, DType::f32},
    Types{DType::bf16, DType::bf16, DType::bf16}, Types{DType::f16, DType::f16, DType::f16},
    Types{DType::f16, DType::f8e4m3, DType::f16}, Types{DType::bf16, DType::f8e4m3, DType::f32}};

AttentionShape read_shape(Bytes& in, const Types& types) {
  AttentionShape shape;
  shape.q_dtype = types.q;
  shape.kv_dtype = types.kv;
  shape.out_dtype = types.out;
  shape.num_kv_heads = in.wild(1, 3);
  shape.num_qo_heads = in.byte() % 16 == 15 ? in.wild(0, 9) : shape.num_kv_heads % (1 << 28) * in.between(1, 4);
  shape.head_dim_qk = in.byte() % 16 == 15 ? in.wild(0, 255) : 16 * in.between(1, 3);
  shape.head_dim_vo = in.byte() % 16 == 15 ? in.wild(0, 255) : shape.head_dim_qk;
  return shape;
}

DeviceModel read_model(Bytes& in) {
  DeviceModel model = DeviceModel::default_cpu();
  const std::uint8_t kind = in.byte();
  if (kind % 2 == 0) {
    model.item_ps = model.item_row_ps = model.partial_ps_per_kib = model.launch_ps = 0;
    model.memory_ps_per_kib = model.cache_ps_per_kib = 1'000'000;
  }
  constexpr std::array kTiles{8, 16, 64, 128};
  constexpr std::array kChunks{16, 48, 256, 1024};
  model.max_tile_rows = kTiles[kind / 2 % 4];
  model.chunk_tokens = kChunks[kind / 8 % 4];
  model.num_workers = 1 + kind / 32 % 4;
  return model;
}

/// A number in the ordinary range or one that is refused, but not one that is merely expensive.
std::int32_t cheap(std::int32_t value, std::int32_t most) {
  return value > most ? value | 1 << 30 : value;
}

/// A table of small numbers, a few of them wild. Requests copy the start of the one before.
reference::PageTables read_tables(Bytes& in) {
  reference::PageTables t;
  t.page_size = cheap(in.wild(1, 8), 4096);
  t.num_pages = in.wild(8, 40);
  t.null_page = in.byte() % 4 == 3 ? 0 : -1;
  std::vector<std::int32_t> previous;
  const bool windows = in.flag();
  for (int b = in.between(1, 6); b > 0; --b) {
    std::vector<std::int32_t> pages(previous.begin(),
                                    previous.begin() + in.byte() % (static_cast<int>(previous.size()) + 1));
    for (int i = in.between(0, 4); i > 0; --i) pages.push_back(in.wild(0, 30));
    t.qo_indptr.push_back(static_cast<std::int32_t>(static_cast<std::uint32_t>(t.qo_indptr.back()) +
                                                    static_cast<std::uint32_t>(cheap(in.wild(0, 4), 4096))));
    t.kv_indices.insert(t.kv_indices.end(), pages.begin(), pages.end());
    const auto end = static_cast<std::int32_t>(t.kv_indices.size());
    t.kv_indptr.push_back(in.byte() % 32 == 31 ? in.wild(0, 20) : end);
    t.last_page_len.push_back(in.wild(1, std::clamp(t.page_size, 1, 200)));
    if (windows) {
      t.kv_start_page.push_back(in.wild(0, 3));
      t.first_page_offset.push_back(in.wild(0, 1));
    }
    previous = pages;
  }
  if (in.byte() % 32 == 31) t.last_page_len.pop_back();
  return t;
}

reference::LevelTables read_levels(Bytes& in) {
  reference::LevelTables tables;
  for (int l = in.between(1, 3); l > 0; --l) {
    reference::LevelTable level;
    level.page_size = in.wild(1, 4);
    level.num_pages = in.wild(8, 20);
    for (int j = in.between(1, 4); j > 0; --j) {
      level.qo_indptr.push_back(level.qo_indptr.back() + in.between(0, 3));
      for (int i = in.between(0, 3); i > 0; --i) level.kv_indices.push_back(in.wild(0, 7));
      level.kv_indptr.push_back(static_cast<std::int32_t>(level.kv_indices.size()));
      level.last_page_len.push_back(in.wild(1, 2));
    }
    tables.levels.push_back(std::move(level));
  }
  // Rows of all levels end together, mostly.
  const std::int32_t rows = tables.levels.back().qo_indptr.back();
  for (auto& level : tables.levels) {
    for (std::int32_t& bound : level.qo_indptr) bound = std::min(bound, rows);
    if (in.byte() % 16 != 15) level.qo_indptr.back() = rows;
  }
  return tables;
}

/// The next step of a batch, and what changed.
struct Step {
  reference::PageTables tables;
  std::vector<std::int32_t> grown;
  std::vector<std::int32_t> left;
  [[nodiscard]] Changes changes() const { return {.grown = grown, .joined = {}, .left = left}; }
};

/// Some requests grow, one may leave.
Step next_step(Bytes& in, const reference::PageTables& t) {
  Step step;
  reference::PageTables& next = step.tables;
  next.page_size = t.page_size;
  next.num_pages = t.num_pages;
  next.null_page = t.null_page;
  const int leaves = in.byte() % 3 == 2 ? in.between(0, t.num_requests() - 1) : -1;
  for (int b = 0; b < t.num_requests(); ++b) {
    if (b == leaves) {
      step.left.push_back(b);
      continue;
    }
    const auto i = static_cast<std::size_t>(b);
    std::vector<std::int32_t> pages(t.kv_indices.begin() + t.kv_indptr[i], t.kv_indices.begin() + t.kv_indptr[i + 1]);
    int last = t.last_page_len[i];
    if (in.flag() && !pages.empty()) {
      step.grown.push_back(next.num_requests());
      if (++last > t.page_size) {
        last = 1;
        pages.push_back(in.between(0, static_cast<int>(t.num_pages) - 1));
      }
    }
    next.add(pages, last, t.qo_indptr[i + 1] - t.qo_indptr[i], t.kv_start_page.empty() ? 0 : t.kv_start_page[i],
             t.first_page_offset.empty() ? 0 : t.first_page_offset[i]);
  }
  return step;
}

std::optional<Plan> plan_or_error(Planner& planner, const AttentionShape& shape, const Batch& batch,
                                  const PlanOptions& options) {
  try {
    return planner.plan(shape, batch, options);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::internal) fail(std::string("internal error: ") + error.what());
    return std::nullopt;
  }
}

template <class Tables>
void run(const AttentionShape& shape, const PlanOptions& options, const Tables& tables, const Plan& plan, int workers,
         std::int64_t rows) {
  // Accepted, but too much for one fuzz step.
  if (rows * shape.num_qo_heads > 4096 || shape.head_dim_qk > 256 || shape.head_dim_vo > 256) return;
  reference::CallOptions call_options;
  call_options.check_naive = false;
  reference::Call call(shape, options, tables, call_options, 1);
  SerialExecutor serial;
  static ThreadPool pool(2);
  for (const Isa isa : reference::available_isas()) {
    const reference::Ran ran = call.run(plan, workers == 1 ? static_cast<Executor&>(serial) : pool, isa);
    if (!ran.complaint.empty()) fail(std::string(name_of(isa)) + ": " + ran.complaint + "\n" + plan.describe());
  }
}

void fuzz_tables(Bytes& in, const AttentionShape& shape, const PlanOptions& options, Planner& planner) {
  const reference::PageTables tables = read_tables(in);
  std::optional<Plan> plan = plan_or_error(planner, shape, tables.batch(), options);
  if (!plan || tables.num_pages > 1000 || tables.page_size > 64) return;
  run(shape, options, tables, *plan, in.between(1, 2), tables.qo_indptr.back());
  const Step step = next_step(in, tables);
  const reference::PageTables& next = step.tables;
  const std::optional<Plan> cold = plan_or_error(planner, shape, next.batch(), options);
  const Changes changes = step.changes();
  const std::string before = plan->serialize();
  try {
    planner.update(*plan, next.batch(), in.flag() ? &changes : nullptr);
  } catch (const Error& error) {
    if (cold) fail(std::string("update refuses what plan accepts: ") + error.what());
    if (plan->serialize() != before) fail("a refused update changed the plan");
    return;
  }
  if (!cold) fail("update accepts what plan refuses");
  if (plan->serialize() != cold->serialize()) fail("updated plan differs from a new one");
}

void fuzz_levels(Bytes& in, const AttentionShape& shape, const PlanOptions& options, Planner& planner) {
  const reference::LevelTables tables = read_levels(in);
  const std::optional<Plan> plan = plan_or_error(planner, shape, tables.batch(), options);
  if (!plan) return;
  for (const auto& level : tables.levels) {
    if (level.num_pages > 1000 || level.page_size > 64) return;
  }
  run(shape, options, tables, *plan, in.between(1, 2), tables.levels.back().qo_indptr.back());
}

}  // namespace
}  // namespace headwater::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headwater;
  fuzz::Bytes in(data, size);
  const std::uint8_t kind = in.byte();
  const bool levels = kind % 4 == 3;
  const AttentionShape shape = fuzz::read_shape(in, fuzz::kTypes[kind / 4 % fuzz::kTypes.size()]);
  const PlanOptions options = fuzz::read_options(in);
  Planner planner(fuzz::read_model(in));
  if (levels) {
    fuzz::fuzz_levels(in, shape, options, planner);
  } else {
    fuzz::fuzz_tables(in, shape, options, planner);
  }
  return 0;
}
