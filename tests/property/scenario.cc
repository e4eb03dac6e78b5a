// See scenario.h.
#include "property/scenario.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>
#include <sstream>

#include "reference/attention.h"

namespace headwater::property {
namespace {

using reference::Rng;

constexpr std::array kFloats{DType::f32, DType::f16, DType::bf16};
constexpr std::array kKvTypes{DType::f32, DType::f16, DType::bf16, DType::bf16, DType::f8e4m3};

AttentionShape random_shape(Rng& rng, const Range& range) {
  AttentionShape shape;
  shape.num_kv_heads = rng.integer(1, 3);
  constexpr std::array kGroups{1, 2, 3, 4, 4, 5, 7, 8};
  shape.num_qo_heads = shape.num_kv_heads * rng.pick(kGroups);
  shape.head_dim_qk = shape.head_dim_vo = rng.pick(range.head_dims);
  if (rng.chance(0.15) && !range.gpu_types) shape.head_dim_vo = rng.pick(range.head_dims);
  if (range.fp32_only) {
    shape.q_dtype = shape.kv_dtype = shape.out_dtype = DType::f32;
  } else if (range.gpu_types) {
    shape.q_dtype = rng.chance(0.5) ? DType::f16 : DType::bf16;
    shape.kv_dtype = rng.chance(0.3) ? DType::f8e4m3 : shape.q_dtype;
    shape.out_dtype = rng.chance(0.7) ? shape.q_dtype : rng.pick(kFloats);
  } else {
    shape.q_dtype = rng.pick(kFloats);
    shape.kv_dtype = rng.pick(kKvTypes);
    shape.out_dtype = rng.chance(0.7) ? shape.q_dtype : rng.pick(kFloats);
  }
  return shape;
}

void random_features(Rng& rng, Scenario& s, int page_size) {
  PlanOptions& options = s.options;
  options.causal = !rng.chance(0.15);
  if (rng.chance(0.2)) options.logits_soft_cap = rng.chance(0.5) ? 30.0F : 1.5F;
  if (rng.chance(0.3)) options.window_left = rng.between(0, 6L * page_size);
  if (rng.chance(0.2)) options.local_chunk = rng.between(1, 5L * page_size);
  if (rng.chance(0.2)) options.num_sink_tokens = rng.between(1, 2L * page_size);
  if (!options.causal && options.local_chunk > 0) {  // more is refused
    options.num_sink_tokens = std::min(options.num_sink_tokens, options.local_chunk);
  }
  if (rng.chance(0.2)) options.alibi = true;
  if (rng.chance(0.2)) options.sinks = true;
  if (rng.chance(0.2)) options.sm_scale = static_cast<float>(0.02 + 0.3 * rng.uniform());
  s.call.include_sink = !rng.chance(0.2);
  s.call.k_scales = rng.chance(0.3) ? rng.integer(1, 2) : 0;
  s.call.v_scales = rng.chance(0.3) ? rng.integer(1, 2) : 0;
}

}  // namespace

reference::PageTables small_forest(int page_size) {
  const int trunk = (40 + page_size - 1) / page_size;
  const int branch = (20 + page_size - 1) / page_size;
  std::int32_t next = 0;
  const auto fresh = [&](std::vector<std::int32_t> pages, int count) {
    for (int i = 0; i < count; ++i) pages.push_back(next++);
    return pages;
  };
  const auto root = fresh({}, trunk);
  const auto left = fresh(root, branch);
  reference::PageTables tables;
  tables.page_size = page_size;
  const int part = (page_size + 1) / 2;
  tables.add(fresh(left, 1), part);
  tables.add(fresh(left, 3), page_size, 3);
  tables.add(left, part, 2);  // ends inside the shared branch
  const auto tail = fresh(root, 2);
  tables.add(tail, part);
  tables.add(tail, part);  // a duplicate
  tables.add({}, 0);
  tables.num_pages += 2;  // unused pages
  return tables;
}

DeviceModel eager_model(int max_tile_rows, int chunk_tokens) {
  DeviceModel model = DeviceModel::default_cpu();
  model.memory_ps_per_kib = 1'000'000;
  model.cache_ps_per_kib = 1'000'000;
  model.item_ps = 0;
  model.item_row_ps = 0;
  model.partial_ps_per_kib = 0;
  model.launch_ps = 0;
  model.max_tile_rows = max_tile_rows;
  model.chunk_tokens = chunk_tokens;
  return model;
}

Scenario random_scenario(std::uint64_t seed, const Range& range) {
  Rng rng(seed);
  Scenario s;
  s.seed = seed;
  s.shape = random_shape(rng, range);
  const int page_size = rng.pick(range.page_sizes);
  if (range.features) random_features(rng, s, page_size);
  reference::ForestOptions forest;
  forest.page_size = page_size;
  forest.max_pages = page_size <= 3 ? 3 * range.max_pages : range.max_pages;
  forest.max_rows = rng.chance(0.5) ? 1 : range.max_rows;
  forest.windows = rng.chance(0.4);
  forest.null_page = rng.chance(0.3);
  if (s.options.window_left >= 0 && s.options.num_sink_tokens == 0 && rng.chance(0.5)) {
    forest.stale_left = s.options.window_left;
  }
  s.tables = reference::random_forest(rng, forest);
  if (range.odd_strides) {
    s.call.layout = rng.pick(reference::kLayouts);
    if (rng.chance(0.4)) s.call.page_padding = rng.integer(1, 70);
    if (rng.chance(0.4)) s.call.row_padding = rng.integer(1, 20);
    s.call.lse_head_major = rng.chance(0.5);
    s.call.lse_base = rng.chance(0.5) ? LseBase::two : LseBase::natural;
  }
  s.call.key_spread = rng.chance(0.3) ? 4.0 : 1.0;
  if (rng.chance(0.3)) s.options.min_shared_pages = rng.integer(1, 4);
  if (rng.chance(0.3)) s.options.min_members = rng.integer(2, 4);
  constexpr std::array kTiles{8, 16, 32, 128};
  constexpr std::array kChunks{16, 48, 128, 1024};
  s.model = rng.chance(0.25) ? DeviceModel::default_cpu() : eager_model(rng.pick(kTiles), rng.pick(kChunks));
  return s;
}

std::string describe(const Scenario& s) {
  std::ostringstream text;
  const PlanOptions& o = s.options;
  text << "seed " << s.seed << ": heads " << s.shape.num_qo_heads << "/" << s.shape.num_kv_heads << ", head_dim "
       << s.shape.head_dim_qk << "/" << s.shape.head_dim_vo << ", q " << name_of(s.shape.q_dtype) << ", kv "
       << name_of(s.shape.kv_dtype) << ", out " << name_of(s.shape.out_dtype) << ", layout "
       << reference::name_of(s.call.layout) << "+" << s.call.page_padding << ", causal " << o.causal << ", window "
       << o.window_left << ", local " << o.local_chunk << ", sink tokens " << o.num_sink_tokens << ", cap "
       << o.logits_soft_cap << ", alibi " << o.alibi << ", sinks " << o.sinks << "/" << s.call.include_sink
       << ", scales " << s.call.k_scales << "/" << s.call.v_scales << ", thresholds " << o.min_shared_pages << "/"
       << o.min_members << ", tile " << s.model.max_tile_rows << ", chunk " << s.model.chunk_tokens << "\n"
       << reference::to_string(s.tables);
  return text.str();
}

bool must_share(const PlanOptions& options, const reference::PageTables& tables) {
  const int members = options.min_members > 0 ? options.min_members : 2;
  const auto pages_needed = static_cast<std::size_t>(options.min_shared_pages > 0 ? options.min_shared_pages : 1);
  const reference::Rows rows = reference::rows_of(tables.batch());
  // The leading full pages of each request, from its first position, if every row sees all of them.
  std::multiset<std::vector<std::int64_t>> starts;
  for (int b = 0; b < tables.num_requests(); ++b) {
    const auto i = static_cast<std::size_t>(b);
    const auto count = static_cast<std::size_t>(tables.kv_indptr[i + 1] - tables.kv_indptr[i]);
    if (count <= pages_needed) continue;
    if (!tables.first_page_offset.empty() && tables.first_page_offset[i] != 0) continue;
    const std::int64_t start = tables.kv_start_page.empty() ? 0 : tables.kv_start_page[i];
    bool all_visible = tables.qo_indptr[i + 1] > tables.qo_indptr[i];
    for (auto r = tables.qo_indptr[i]; r < tables.qo_indptr[i + 1]; ++r) {
      for (std::int64_t p = start * tables.page_size;
           p < (start + static_cast<std::int64_t>(pages_needed)) * tables.page_size; ++p) {
        if (!reference::sees(options, rows.rows[static_cast<std::size_t>(r)].position, p)) all_visible = false;
      }
    }
    std::vector<std::int64_t> key{start};
    for (std::size_t p = 0; p < pages_needed; ++p) {
      const std::int32_t id = tables.kv_indices[static_cast<std::size_t>(tables.kv_indptr[i]) + p];
      if (id == tables.null_page) all_visible = false;
      key.push_back(id);
    }
    if (all_visible) starts.insert(key);
  }
  for (const auto& key : starts) {
    if (starts.count(key) >= static_cast<std::size_t>(members)) return true;
  }
  return false;
}

Executor& Executors::of(int workers) {
  if (workers == 1) return serial_;
  return workers == 2 ? static_cast<Executor&>(two_) : three_;
}

const std::vector<Isa>& isas() {
  static const std::vector<Isa> levels = [] {
    const std::vector<Isa> found = reference::available_isas();
    const int missing = static_cast<int>(Isa::avx512_bf16) + 1 - static_cast<int>(found.size());
    if (missing > 0) {
      std::string names;
      for (int i = static_cast<int>(found.size()); i <= static_cast<int>(Isa::avx512_bf16); ++i) {
        names += ' ' + std::string(name_of(static_cast<Isa>(i)));
      }
      std::printf("[ SKIPPED  ] %d instruction-set level(s) that this processor lacks:%s\n", missing, names.c_str());
    }
    return found;
  }();
  return levels;
}

SingleRequest::SingleRequest(const Batch& all, std::size_t b)
    : qo_indptr_{0, all.qo_indptr[b + 1] - all.qo_indptr[b]},
      kv_indptr_{0, all.kv.indptr[b + 1] - all.kv.indptr[b]},
      batch_(all) {
  batch_.qo_indptr = qo_indptr_;
  batch_.kv.indptr = kv_indptr_;
  batch_.kv.indices = all.kv.indices.subspan(static_cast<std::size_t>(all.kv.indptr[b]));
  batch_.kv.last_page_len = all.kv.last_page_len.subspan(b, 1);
  if (!all.kv_start_page.empty()) batch_.kv_start_page = all.kv_start_page.subspan(b, 1);
  if (!all.first_page_offset.empty()) batch_.first_page_offset = all.first_page_offset.subspan(b, 1);
}

}  // namespace headwater::property
