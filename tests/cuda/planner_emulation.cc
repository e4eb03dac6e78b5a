#include "cuda/planner_emulation.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <memory>
#include <sstream>
#include <thread>

#include "cpu/scratch.h"
#include "cuda/device_planner_emit.h"
#include "plan/plan_data.h"

namespace headwater::cuda_test {
namespace {

using cuda::Capacity;
using cuda::FourIds;
using cuda::PlannerInput;
using cuda::PlannerOutput;
using Scratch = cuda::LargeScratch;

constexpr std::int32_t kPoison = -12'345;

std::size_t sz(std::int64_t n) {
  return static_cast<std::size_t>(n);
}

/// Everything that a planner needs, in vectors of exactly the sizes that the capacity asks for.
class Workplace {
 public:
  Workplace(const AttentionShape& shape, const PlanOptions& options, const DeviceModel& model,
            const BlockTables& tables, const Capacity* capacity)
      : cost(shape, options, model) {
    const cuda::DeviceTableLimits limits = tables.limits();
    cuda::check_planner(shape, options, limits);
    const Capacity room = capacity != nullptr ? *capacity : cuda::planner_capacity(cost, limits);
    input = cuda::planner_input(shape, options, limits, room, cost);
    cuda::set_tables(input, tables.view(), limits);
    planned_.items.resize(sz(room.max_items));
    planned_.item_rows.resize(sz(room.max_rows));
    planned_.merge_rows.resize(sz(room.max_rows));
    planned_.merge_indptr.resize(sz(room.max_rows) + 1);
    planned_.merge_slots.resize(sz(room.max_partials));
    planned_.empty_rows.resize(sz(room.max_rows));
    planned_.spans.resize(sz(limits.max_requests));
    planned_.members.resize(sz(limits.max_requests));
    exchange_.resize(2 * sz(limits.max_requests));
    output.header = &planned_.header;
    output.items = planned_.items.data();
    output.item_rows = planned_.item_rows.data();
    output.merge_rows = planned_.merge_rows.data();
    output.merge_indptr = planned_.merge_indptr.data();
    output.merge_slots = planned_.merge_slots.data();
    output.empty_rows = planned_.empty_rows.data();
    output.status = &planned_.status;
    output.spans = planned_.spans.data();
    output.span_members = planned_.members.data();
    output.exchange = exchange_.data();
  }

  /// Scratch memory of a block, full of nonsense.
  static std::unique_ptr<Scratch> scratch() {
    auto memory = std::make_unique_for_overwrite<Scratch>();
    std::memset(static_cast<void*>(memory.get()), 0x9d, sizeof(Scratch));
    return memory;
  }

  Planned take() {
    Planned& p = planned_;
    p.items.resize(sz(p.header.num_items));
    p.merge_rows.resize(sz(p.header.num_merge_rows));
    p.merge_indptr.resize(sz(p.header.num_merge_rows) + 1);
    p.merge_slots.resize(sz(p.merge_indptr.back()));
    p.empty_rows.resize(sz(p.header.num_empty_rows));
    p.spans.resize(sz(p.status.num_spans));
    if (p.spans.empty()) p.members.clear();
    return std::move(p);
  }

  detail::CostModel cost;
  PlannerInput input;
  PlannerOutput output;

 private:
  Planned planned_;
  std::vector<cuda::CommonRun> exchange_;
};

/// What the threads of a block share.
struct Block {
  explicit Block(int threads) : barrier(threads), values(sz(threads)) {}
  std::barrier<> barrier;
  std::vector<std::int64_t> values;
};

/// A block of threads, each a strip of its own.
class ThreadTeam {
 public:
  static constexpr int kLanes = 1;
  ThreadTeam(Block& block, int rank, int size) : block_(&block), rank_(rank), size_(size) {}
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int strip() const { return rank_; }
  [[nodiscard]] int num_strips() const { return size_; }
  [[nodiscard]] static int lane() { return 0; }
  void barrier() const { block_->barrier.arrive_and_wait(); }

  template <class Visit>
  void each(int n, Visit&& visit) const {
    for (int i = rank_; i < n; i += size_) visit(i);
  }
  [[nodiscard]] bool any(bool value) const {
    return combine(value ? 1 : 0, [](std::int64_t a, std::int64_t b) { return a | b; }) != 0;
  }
  [[nodiscard]] std::int64_t sum(std::int64_t value) const { return combine(value, std::plus<>()); }
  [[nodiscard]] std::int32_t greatest(std::int32_t value) const {
    return static_cast<std::int32_t>(combine(value, [](std::int64_t a, std::int64_t b) { return std::max(a, b); }));
  }
  /// Each thread takes a stretch.
  template <class Value, class Put>
  std::int32_t scan(int n, Value&& value, Put&& put) const {
    return static_cast<std::int32_t>(
        scan_wide(n, value, [&](int i, std::int64_t before) { put(i, static_cast<std::int32_t>(before)); }));
  }
  template <class Value, class Put>
  std::int64_t scan_wide(int n, Value&& value, Put&& put) const {
    barrier();
    const int begin = static_cast<int>(std::int64_t{n} * rank_ / size_);
    const int end = static_cast<int>(std::int64_t{n} * (rank_ + 1) / size_);
    std::vector<std::int64_t> mine;
    std::int64_t total = 0;
    for (int i = begin; i < end; ++i) {
      mine.push_back(value(i));
      total += mine.back();
    }
    block_->values[sz(rank_)] = total;
    barrier();
    std::int64_t before = 0;
    std::int64_t all = 0;
    for (int t = 0; t < size_; ++t) {
      const auto part = block_->values[sz(t)];
      if (t < rank_) before += part;
      all += part;
    }
    for (int i = begin; i < end; ++i) {
      put(i, before);
      before += mine[sz(i - begin)];
    }
    barrier();
    return all;
  }
  void order(const std::uint32_t* keys, std::uint64_t* spare, int n, std::int32_t* to) const {
    barrier();
    if (rank_ == 0) cuda::LoneTeam::order(keys, spare, n, to);
    barrier();
  }
  template <class T>
  static void add(T* to, T value) {
    std::atomic_ref<T>(*to) += value;
  }
  static void add_two(std::int32_t* a, std::int32_t value_a, std::int32_t* b, std::int32_t value_b, int at) {
    add(a + at, value_a);
    add(b + at, value_b);
  }
  static std::int32_t next(std::int32_t* counter) { return std::atomic_ref<std::int32_t>(*counter)++; }
  static void raise(std::int32_t* to, std::int32_t value) {
    const std::atomic_ref<std::int32_t> place(*to);
    for (std::int32_t old = place; old < value && !place.compare_exchange_weak(old, value);) {
    }
  }
  static void lower(std::int32_t* to, std::int32_t value) {
    const std::atomic_ref<std::int32_t> place(*to);
    for (std::int32_t old = place; old > value && !place.compare_exchange_weak(old, value);) {
    }
  }
  static std::int32_t claim(std::int32_t* place, std::int32_t free, std::int32_t value) {
    std::atomic_ref<std::int32_t>(*place).compare_exchange_strong(free, value);
    return free;
  }
  [[nodiscard]] static std::int32_t least_of_lanes(std::int32_t value) { return value; }
  [[nodiscard]] static std::int32_t greatest_of_lanes(std::int32_t value) { return value; }
  [[nodiscard]] static std::int64_t sum_of_lanes(std::int64_t value) { return value; }
  [[nodiscard]] static std::int32_t before_of_lanes(std::int32_t /*value*/) { return 0; }
  template <class Value>
  [[nodiscard]] static int least_index(int n, Value&& value) {
    return cuda::LoneTeam::least_index(n, value);
  }
  [[nodiscard]] static bool any_of_lanes(bool value) { return value; }
  static void lanes_barrier() {}
  [[nodiscard]] static std::int32_t peek_of_lanes(std::int32_t* from) { return std::atomic_ref<std::int32_t>(*from); }
  static void mark(std::int32_t* to, std::int32_t value) { std::atomic_ref<std::int32_t>{*to}.store(value); }
  [[nodiscard]] static FourIds four(const std::int32_t* from) { return cuda::LoneTeam::four(from); }

 private:
  template <class Combine>
  std::int64_t combine(std::int64_t value, Combine&& both) const {
    block_->values[sz(rank_)] = value;
    barrier();
    std::int64_t result = block_->values[0];
    for (int t = 1; t < size_; ++t) result = both(result, block_->values[sz(t)]);
    barrier();
    return result;
  }

  Block* block_;
  int rank_;
  int size_;
};

class ThreadGrid {
 public:
  ThreadGrid(std::barrier<>& all, int block, int blocks) : all_(&all), block_(block), blocks_(blocks) {}
  [[nodiscard]] int block() const { return block_; }
  [[nodiscard]] int num_blocks() const { return blocks_; }
  void sync() const { all_->arrive_and_wait(); }
  template <class T>
  [[nodiscard]] static T read(const T* from) {
    return *from;
  }

 private:
  std::barrier<>* all_;
  int block_;
  int blocks_;
};

}  // namespace

BlockTables::BlockTables(const reference::PageTables& tables, int spare_columns)
    : page_size(tables.page_size),
      num_pages(tables.num_pages),
      null_page(tables.null_page),
      num_requests(tables.num_requests()),
      max_blocks(1),
      lengths(sz(num_requests), 0),
      qo_indptr(tables.qo_indptr) {
  for (int b = 0; b < num_requests; ++b) {
    max_blocks = std::max(max_blocks, tables.kv_indptr[sz(b) + 1] - tables.kv_indptr[sz(b)]);
  }
  max_blocks += spare_columns;
  row_stride = max_blocks + spare_columns;
  block_table.assign(sz(num_requests * row_stride), kPoison);
  for (int b = 0; b < num_requests; ++b) {
    const std::int32_t begin = tables.kv_indptr[sz(b)];
    const std::int32_t pages = tables.kv_indptr[sz(b) + 1] - begin;
    std::copy_n(tables.kv_indices.begin() + begin, pages, block_table.begin() + b * row_stride);
    if (pages > 0) lengths[sz(b)] = (pages - 1) * page_size + tables.last_page_len[sz(b)];
  }
}

cuda::DeviceTables BlockTables::view() const {
  return {block_table.data(), row_stride, lengths.data(), qo_indptr.data(), num_requests};
}

cuda::DeviceTableLimits BlockTables::limits() const {
  return {std::max(1, num_requests), max_blocks, std::max(1, qo_indptr.back()), page_size, num_pages, null_page};
}

void BlockTables::pad(int more) {
  for (int i = 0; i < more; ++i) {
    block_table.insert(block_table.end(), sz(row_stride), std::max(0, null_page));
    lengths.push_back(0);
    qo_indptr.push_back(qo_indptr.back() + 1);
    ++num_requests;
  }
}

std::string bytes_of(const Planned& p) {
  std::ostringstream out;
  const auto list = [&](const char* name, const std::vector<std::int32_t>& values) {
    out << name;
    for (const std::int32_t v : values) out << ' ' << v;
    out << '\n';
  };
  for (const cuda::DeviceItem& i : p.items) {
    out << "item " << i.pos_begin << ' ' << i.num_tokens << ' ' << i.page_begin << ' ' << i.first_token << ' '
        << i.row_begin << ' ' << i.num_rows << ' ' << i.partial_begin << ' ' << i.num_states << ' ' << i.kv_head_begin
        << ' ' << i.kv_head_end << ' ' << i.view << ' ' << i.unmasked_begin << ' ' << i.unmasked_end << ' ' << i.cost_ps
        << ' ' << i.lead << ' ' << i.first_row.row << ' ' << i.first_row.lo << ' ' << i.first_row.hi << ' '
        << i.first_row.pos << " pages";
    for (const std::int32_t page : i.first_pages) out << ' ' << page;
    out << '\n';
  }
  for (const cuda::ItemRow& r : p.item_rows)
    out << "row " << r.row << ' ' << r.lo << ' ' << r.hi << ' ' << r.pos << '\n';
  list("merge_rows", p.merge_rows);
  list("merge_indptr", p.merge_indptr);
  list("merge_slots", p.merge_slots);
  list("empty_rows", p.empty_rows);
  list("members", p.members);
  for (const cuda::DeviceSpan& s : p.spans) {
    out << "span " << s.pos_begin << ' ' << s.num_tokens << ' ' << s.member_begin << ' ' << s.num_members << ' '
        << s.depth << '\n';
  }
  const cuda::DevicePlanStatus& s = p.status;
  out << "status " << s.flags << ' ' << s.num_spans << ' ' << s.shared_tokens << ' ' << s.member_sequences << ' '
      << s.num_items << ' ' << s.num_partials << '\n';
  return out.str();
}

Planned plan_alone(const AttentionShape& shape, const PlanOptions& options, const DeviceModel& model,
                   const BlockTables& tables, const Capacity* capacity) {
  Workplace place(shape, options, model, tables, capacity);
  const auto scratch = Workplace::scratch();
  cuda::make_plan(cuda::LoneTeam(), cuda::LoneGrid(), place.cost, place.input, *scratch, place.output);
  return place.take();
}

Planned plan_by_threads(const AttentionShape& shape, const PlanOptions& options, const DeviceModel& model,
                        const BlockTables& tables, int blocks, int threads) {
  Workplace place(shape, options, model, tables, nullptr);
  std::vector<std::unique_ptr<Block>> shared;
  std::vector<std::unique_ptr<Scratch>> scratch;
  for (int b = 0; b < blocks; ++b) {
    shared.push_back(std::make_unique<Block>(threads));
    scratch.push_back(Workplace::scratch());
  }
  std::barrier<> all(blocks * threads);
  std::vector<std::thread> workers;
  for (int b = 0; b < blocks; ++b) {
    for (int t = 0; t < threads; ++t) {
      workers.emplace_back([&, b, t] {
        cuda::make_plan(ThreadTeam(*shared[sz(b)], t, threads), ThreadGrid(all, b, blocks), place.cost, place.input,
                        *scratch[sz(b)], place.output);
      });
    }
  }
  for (std::thread& worker : workers) worker.join();
  return place.take();
}

Plan to_plan(const AttentionShape& shape, const PlanOptions& options, const BlockTables& tables,
             const Planned& planned) {
  Plan plan;
  detail::PlanData& p = plan.data();
  p.shape = shape;
  p.options = options;
  p.page_size = {tables.page_size};
  p.num_pages = {tables.num_pages};
  p.page_ids = tables.block_table;
  p.rows.resize(sz(tables.qo_indptr.back()));
  for (const cuda::ItemRow& row : planned.item_rows) {
    p.item_rows.push_back(row.row);
    p.rows[sz(row.row)] = {row.lo, row.hi, row.pos};
  }
  p.items.assign(planned.items.begin(), planned.items.end());
  p.merge_rows = planned.merge_rows;
  p.merge_indptr = planned.merge_indptr;
  p.merge_slots = planned.merge_slots;
  p.empty_rows = planned.empty_rows;
  p.num_partials = planned.status.num_partials;
  for (const cuda::DeviceSpan& s : planned.spans) {
    const std::int32_t pages = (s.pos_begin + s.num_tokens + tables.page_size - 1) / tables.page_size;
    p.spans.push_back({s.pos_begin, s.num_tokens, pages - s.pos_begin / tables.page_size, s.num_members, s.depth});
  }

  const auto align = [](std::size_t n) {
    return (n + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  };
  const auto states = sz(p.num_partials) * sz(shape.num_qo_heads);
  p.num_workers = 3;
  for (const detail::WorkItem& item : p.items) {
    p.max_item_rows = std::max(p.max_item_rows, item.num_rows);
    p.stats.kv_bytes_read += std::int64_t{item.num_tokens} * (shape.head_dim_qk + shape.head_dim_vo) *
                             shape.num_kv_heads * static_cast<std::int64_t>(size_of(shape.kv_dtype));
  }
  // More than any kernel needs: this is not about the size of scratch memory.
  const cpu::ScratchShape scratch{shape.num_kv_heads, shape.group_size(), shape.head_dim_qk, shape.head_dim_vo, true};
  const auto rows = sz(p.max_item_rows) + 1;
  p.partial_o_bytes = align(states * sz(shape.head_dim_vo) * sizeof(float));
  p.scratch_offset = p.partial_o_bytes + align(states * sizeof(float));
  p.scratch_bytes_per_worker =
      align(cpu::scratch_bytes(scratch, p.max_item_rows) +
            rows * sz(shape.group_size()) * sz(shape.head_dim_qk + 2 * shape.head_dim_vo + 4) * sizeof(float) * 2);
  p.workspace_bytes = p.scratch_offset + sz(p.num_workers) * p.scratch_bytes_per_worker;
  p.stats.path = p.spans.empty() ? Path::flat : Path::cascade;
  p.stats.num_requests = tables.num_requests;
  p.stats.num_rows = static_cast<std::int64_t>(p.rows.size());
  p.stats.num_items = static_cast<std::int64_t>(p.items.size());
  p.stats.num_partials = p.num_partials;
  p.stats.num_spans = static_cast<std::int64_t>(p.spans.size());
  return plan;
}

}  // namespace headwater::cuda_test
