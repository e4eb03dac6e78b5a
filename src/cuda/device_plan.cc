#include "cuda/device_plan.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "cpu/validate.h"
#include "cuda/capture.h"
#include "cuda/error.h"
#include "cuda/launch.h"
#include "cuda/merge.h"
#include "cuda/page_patches.h"

namespace headwater::cuda {
namespace {

constexpr std::size_t kQueueBytes = sizeof(std::int32_t);
constexpr std::size_t kAlignment = 64;  ///< of the arrays in a blob

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// Takes arrays one behind the other out of a block of memory.
class Arrays {
 public:
  explicit Arrays(std::byte* data) : data_(data) {}

  template <class Element>
  Element* take(std::int64_t count) {
    const std::size_t at = bytes_;
    bytes_ += aligned(static_cast<std::size_t>(count) * sizeof(Element));
    return reinterpret_cast<Element*>(data_ + at);
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_;
  std::size_t bytes_ = 0;
};

/// A plan's arrays in a block of memory, as PlanView has them, to be written. Page ids come last: of them, only those
/// in use are copied.
struct Blob {
  Header* header;
  DeviceItem* items;
  ItemRow* item_rows;
  std::int32_t* merge_rows;
  std::int32_t* merge_indptr;
  std::int32_t* merge_slots;
  std::int32_t* empty_rows;
  std::int32_t* page_ids;
  std::size_t page_ids_at;
  std::size_t bytes;

  Blob(std::byte* data, const Capacity& c) {
    Arrays arrays(data);
    header = arrays.take<Header>(1);
    items = arrays.take<DeviceItem>(std::max<std::int64_t>(c.max_items, 1));
    item_rows = arrays.take<ItemRow>(c.max_rows + c.max_partials);
    merge_rows = arrays.take<std::int32_t>(c.max_rows);
    merge_indptr = arrays.take<std::int32_t>(c.max_rows + 1);
    merge_slots = arrays.take<std::int32_t>(c.max_partials);
    empty_rows = arrays.take<std::int32_t>(c.max_rows);
    page_ids_at = arrays.bytes();
    page_ids = arrays.take<std::int32_t>(c.max_page_ids);
    bytes = arrays.bytes();
  }
};

std::size_t blob_bytes_of(const Capacity& c) {
  return Blob(nullptr, c).bytes;
}

/// A stream that does not wait for the default stream.
class OwnStream {
 public:
  OwnStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  [[nodiscard]] Stream get() const { return stream_; }

 private:
  Stream stream_ = nullptr;
};

std::int64_t pages_of(const detail::WorkItem& item, int page_size) {
  return (std::int64_t{item.first_token} + item.num_tokens + page_size - 1) / page_size;
}

/// The items and merge lists that go to the device: the plan's own, or in batch-invariant mode those of its chunks.
struct PlanArrays {
  std::span<const detail::WorkItem> items;
  std::span<const std::int32_t> leads;         ///< empty: none has one
  std::span<const std::int32_t> hidden_pages;  ///< as leads
  std::span<const std::int32_t> merge_rows;
  std::span<const std::int32_t> merge_indptr;
  std::span<const std::int32_t> merge_slots;
  std::int64_t num_partials;

  PlanArrays(const detail::PlanData& plan, ChunkedPlan& chunks)
      : items(plan.items),
        merge_rows(plan.merge_rows),
        merge_indptr(plan.merge_indptr),
        merge_slots(plan.merge_slots),
        num_partials(plan.num_partials) {
    if (!plan.options.batch_invariant) return;
    chunks.cut(plan);
    items = chunks.items;
    leads = chunks.leads;
    hidden_pages = chunks.hidden_pages;
    merge_rows = chunks.merge_rows;
    merge_indptr = chunks.merge_indptr;
    merge_slots = chunks.merge_slots;
    num_partials = chunks.num_partials;
  }

  [[nodiscard]] Capacity size(const detail::PlanData& plan) const {
    Capacity size;
    size.max_rows = static_cast<std::int64_t>(plan.rows.size());
    size.max_partials = num_partials;
    for (const detail::WorkItem& item : items) {
      if (item.kv_head_begin != 0) continue;
      ++size.max_items;
      size.max_page_ids += pages_of(item, plan.page_size[static_cast<std::size_t>(item.view)]);
    }
    return size;
  }
};

void check_field(const char* name, std::int64_t got, std::int64_t capacity) {
  if (got <= capacity) return;
  throw Error(ErrorCode::capacity_exceeded, std::string("capacity.") + name + " = " + std::to_string(capacity) +
                                                ", expected at least " + std::to_string(got) + " for this plan");
}

template <class Element>
void copy(std::span<const Element> from, Element* to) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size() * sizeof(Element));
}

ItemRow item_row(const detail::PlanData& plan, std::int32_t i) {
  const std::int32_t row = plan.item_rows[static_cast<std::size_t>(i)];
  const detail::RowRange& range = plan.rows[static_cast<std::size_t>(row)];
  return {row, range.lo, range.hi, range.pos};
}

/// Whether to keep all of a plan's page ids on the device, of which its items need `needed`: not where these are few.
bool is_worth_mirroring(std::int64_t needed, std::int64_t all) {
  return needed > kFewPageIds && all <= 2 * needed;
}

/// How a plan's page ids come to the device: those that items need, one item after the other; all of the plan's, where
/// that is hardly more; or, where all are there from an earlier upload, what has changed since.
enum class Ids { gathered, mirrored, patched };

constexpr std::int32_t kNoPage = -1;  ///< kernels take its tokens for zeros

/// Lets an item that begins within 16 tokens that bulk copies bring at once (a window) begin with them, hidden.
void start_at_chunk(DeviceItem& item, int page_size) {
  const std::int32_t lead = page_size < 8 ? 0 : item.first_token % std::min(16, page_size);
  if (lead == 0) return;
  item.lead = lead;
  item.pos_begin -= lead;
  item.num_tokens += lead;
  item.first_token -= lead;
  if (item.unmasked_end == 0) return;
  item.unmasked_begin += lead;
  item.unmasked_end += lead;
}

/// The plan's arrays into a blob; returns the bytes to be copied.
std::size_t pack(const detail::PlanData& plan, const PlanArrays& work, Ids ids, const Blob& to) {
  // Heads are dealt to thread blocks here: the parts of an item that the plan split by heads, which follow one another,
  // become one.
  std::int32_t num_items = 0;
  std::int32_t at = 0;
  for (std::size_t i = 0; i < work.items.size(); ++i) {
    const detail::WorkItem& item = work.items[i];
    if (item.kv_head_begin != 0) continue;
    const std::int64_t pages = pages_of(item, plan.page_size[static_cast<std::size_t>(item.view)]);
    const std::int32_t* from = plan.page_ids.data() + item.page_begin;
    DeviceItem& mine = to.items[num_items++];
    mine = {item, item_row(plan, item.row_begin), 0, {}};
    mine.kv_head_end = static_cast<std::int16_t>(plan.shape.num_kv_heads);
    if (work.leads.empty()) {
      start_at_chunk(mine, plan.page_size[static_cast<std::size_t>(item.view)]);
    } else {
      mine.lead = work.leads[i];
    }
    if (ids != Ids::gathered) {
      std::copy_n(from, std::min<std::int64_t>(pages, kFirstPages), mine.first_pages);
      continue;
    }
    const std::int32_t hidden = work.hidden_pages.empty() ? 0 : work.hidden_pages[i];
    std::int32_t* const mine_ids = to.page_ids + at;
    std::copy_n(from, pages - hidden, std::fill_n(mine_ids, hidden, kNoPage));
    std::copy_n(mine_ids, std::min<std::int64_t>(pages, kFirstPages), mine.first_pages);
    mine.page_begin = at;
    at += static_cast<std::int32_t>(pages);
  }
  if (ids == Ids::mirrored) {
    copy(std::span(plan.page_ids), to.page_ids);
    at = static_cast<std::int32_t>(plan.page_ids.size());
  }
  const auto num_rows = static_cast<std::int32_t>(plan.item_rows.size());
  for (std::int32_t i = 0; i < num_rows; ++i) to.item_rows[i] = item_row(plan, i);
  copy(work.merge_rows, to.merge_rows);
  copy(work.merge_indptr, to.merge_indptr);
  copy(work.merge_slots, to.merge_slots);
  copy(std::span(plan.empty_rows), to.empty_rows);
  *to.header = {num_items, static_cast<std::int32_t>(work.merge_rows.size()),
                static_cast<std::int32_t>(plan.empty_rows.size())};
  return to.page_ids_at + static_cast<std::size_t>(at) * sizeof(std::int32_t);
}

/// What brings ids that were `there` up to date; none: they are not this plan's, too old, or too much has changed.
std::optional<PagePatches> patches_of(const detail::PlanData& plan, const detail::PageHistory& there) {
  const detail::PageHistory& now = plan.page_history;
  if (there.origin == nullptr || there.origin != now.origin) return std::nullopt;
  PagePatches patches;
  if (there.version == now.version) return patches;
  if (there.version + 1 != now.version) return std::nullopt;
  for (const detail::PageRange& range : now.changed) {
    if (range.end - range.begin > PagePatches::kMost - patches.count) return std::nullopt;
    for (std::int32_t i = range.begin; i < range.end; ++i) {
      patches.at[patches.count] = i;
      patches.id[patches.count++] = plan.page_ids[static_cast<std::size_t>(i)];
    }
  }
  return patches;
}

void check_plan(const detail::PlanData& plan, const AttentionShape& shape) {
  const AttentionShape& s = plan.shape;
  if (s.num_qo_heads != shape.num_qo_heads || s.num_kv_heads != shape.num_kv_heads ||
      s.head_dim_qk != shape.head_dim_qk || s.head_dim_vo != shape.head_dim_vo || s.q_dtype != shape.q_dtype ||
      s.kv_dtype != shape.kv_dtype || s.out_dtype != shape.out_dtype) {
    throw Error(ErrorCode::invalid_argument, "plan.shape is not the shape that this DevicePlan was made for");
  }
  check_supported_plan(plan.shape, plan.options, plan.page_size);
}

/// What a captured graph knows of the first plan.
void check_same_calls(const detail::PlanData& plan, const detail::PlanData& first) {
  const PlanOptions& a = plan.options;
  const PlanOptions& b = first.options;
  if (a.sm_scale != b.sm_scale || a.logits_soft_cap != b.logits_soft_cap || a.num_sink_tokens != b.num_sink_tokens ||
      a.alibi != b.alibi || a.sinks != b.sinks || a.batch_invariant != b.batch_invariant) {
    throw Error(ErrorCode::invalid_argument,
                "plan.options: sm_scale, logits_soft_cap, num_sink_tokens, alibi, sinks or batch_invariant differ from "
                "the first plan's");
  }
  if (plan.page_size != first.page_size) {
    throw Error(ErrorCode::invalid_argument, "plan: page sizes or their number differ from the first plan's");
  }
}

}  // namespace

DeviceBuffer::DeviceBuffer(std::size_t bytes) {
  const OwnStream stream;
  check(cudaMalloc(reinterpret_cast<void**>(&data), bytes), "cudaMalloc");
  cudaError_t status = cudaMemsetAsync(data, 0, bytes, stream.get());
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream.get());
  if (status != cudaSuccess) cudaFree(data);
  check(status, "cudaMemsetAsync");
}

DeviceBuffer::~DeviceBuffer() {
  if (data != nullptr) cudaFree(data);
}

Staging::Staging(std::size_t bytes) {
  check(cudaMallocHost(reinterpret_cast<void**>(&data), bytes), "cudaMallocHost");
  std::memset(data, 0, bytes);  // gaps between arrays are copied, too
  const cudaError_t status = cudaEventCreateWithFlags(&copied, cudaEventDisableTiming);
  if (status == cudaSuccess) return;
  cudaFreeHost(data);
  check(status, "cudaEventCreate");
}

Staging::~Staging() {
  if (copied != nullptr) {
    cudaEventSynchronize(copied);
    cudaEventDestroy(copied);
  }
  if (data != nullptr) cudaFreeHost(data);
}

Capacity Capacity::of(const Plan& plan) {
  const detail::PlanData& data = plan.data();
  ChunkedPlan chunks;
  Capacity size = PlanArrays(data, chunks).size(data);
  const auto all_ids = static_cast<std::int64_t>(data.page_ids.size());
  if (!data.options.batch_invariant && is_worth_mirroring(size.max_page_ids, all_ids))
    size.max_page_ids = std::max(size.max_page_ids, all_ids);
  return size;
}

DevicePlan::Impl::Impl(const AttentionShape& s, const Capacity& c)
    : shape(s),
      capacity(c),
      kernel(&supported_kernel(s)),
      blob_bytes(blob_bytes_of(c)),
      blob(blob_bytes),
      queue(kQueueBytes),
      staging{Staging(blob_bytes), Staging(blob_bytes)} {
  const LaunchShape launch = launch_shape(*kernel);
  stages = launch.stages;
  shared_bytes = launch.shared_bytes;
  num_blocks = launch.num_blocks;
  hopper = launch.hopper;
  if (hopper) maps.emplace();
  const std::int64_t merge_warps = c.max_rows * s.num_qo_heads;
  num_merge_blocks = static_cast<int>(
      std::clamp<std::int64_t>((merge_warps + kMergeWarps - 1) / kMergeWarps, 1, launch.most_merge_blocks));
  const Blob there(blob.data, c);
  view = {there.header,      there.items,      static_cast<std::int32_t>(std::max<std::int64_t>(c.max_items, 1)),
          there.item_rows,   there.merge_rows, there.merge_indptr,
          there.merge_slots, there.empty_rows, there.page_ids};
  facts.shape = s;
  facts.rows.reserve(static_cast<std::size_t>(c.max_rows));  // so that upload need not allocate in the middle
  facts.page_size.reserve(kMaxViews);
  facts.num_pages.reserve(kMaxViews);
}

DevicePlan::DevicePlan(const AttentionShape& shape, const Capacity& capacity) {
  for (const auto& [name, value] : {std::pair{"max_rows", capacity.max_rows},
                                    {"max_page_ids", capacity.max_page_ids},
                                    {"max_items", capacity.max_items},
                                    {"max_partials", capacity.max_partials}}) {
    if (value >= 0 && value < (std::int64_t{1} << 28)) continue;
    throw Error(ErrorCode::invalid_argument,
                std::string("capacity.") + name + " = " + std::to_string(value) + ", expected 0..268435455");
  }
  const std::size_t bytes = blob_bytes_of(capacity);
  if (bytes >= std::size_t{1} << 31) {
    throw Error(ErrorCode::unsupported,
                "capacity needs " + std::to_string(bytes) + " bytes on the device, expected less than 2147483648");
  }
  impl_ = std::make_unique<Impl>(shape, capacity);
}

DevicePlan::~DevicePlan() = default;
DevicePlan::DevicePlan(DevicePlan&&) noexcept = default;
DevicePlan& DevicePlan::operator=(DevicePlan&&) noexcept = default;

PlannerOutput DevicePlan::Impl::planner_output(const AttentionShape& its_shape, const PlanOptions& options,
                                               const DeviceTableLimits& limits) {
  if (uploaded && !on_device) {
    throw Error(ErrorCode::invalid_argument,
                "plan: the host's plans were uploaded to it, expected one for plans made on the device");
  }
  detail::PlanData next;
  next.shape = its_shape;
  next.options = options;
  next.page_size = {limits.page_size};
  check_plan(next, shape);
  if (uploaded) check_same_calls(next, facts);
  const Blob there(blob.data, capacity);
  PlannerOutput out;
  out.header = there.header;
  out.items = there.items;
  out.item_rows = there.item_rows;
  out.merge_rows = there.merge_rows;
  out.merge_indptr = there.merge_indptr;
  out.merge_slots = there.merge_slots;
  out.empty_rows = there.empty_rows;
  return out;
}

void DevicePlan::Impl::take_over(const PlanOptions& options, const DeviceTableLimits& limits,
                                 const std::int32_t* block_table) {
  view.page_ids = block_table;
  uploaded = on_device = true;
  facts.options = options;
  facts.page_size = {limits.page_size};
  facts.num_pages = {limits.num_pages};
  facts.rows.resize(static_cast<std::size_t>(limits.max_rows > 0 ? limits.max_rows : limits.max_requests));
  facts.num_partials = static_cast<std::int32_t>(capacity.max_partials);
  facts.workspace_bytes = cuda::workspace_size(shape, capacity);
}

void DevicePlan::upload(const Plan& plan, Stream stream) {
  const detail::PlanData& data = plan.data();
  Impl& self = *impl_;
  const RelaxedCapture relaxed;  // another thread may be capturing
  if (is_captured(stream)) {
    throw Error(ErrorCode::invalid_argument,
                "stream: it is being captured, expected one that is not: a graph would copy from memory that later "
                "uploads write to");
  }
  if (self.on_device) {
    throw Error(ErrorCode::invalid_argument,
                "plan: it holds plans made on the device, expected one for the host's plans");
  }
  check_plan(data, self.shape);
  if (self.uploaded) check_same_calls(data, self.facts);
  const PlanArrays work(data, self.chunks);
  const Capacity size = work.size(data);
  check_field("max_rows", size.max_rows, self.capacity.max_rows);
  const auto all_ids = static_cast<std::int64_t>(data.page_ids.size());
  std::optional<PagePatches> patches = patches_of(data, self.mirrored);
  Ids ids = Ids::gathered;
  if (data.options.batch_invariant) {
    ids = Ids::gathered;  // hidden pages are in no table
  } else if (patches.has_value() && all_ids <= self.capacity.max_page_ids) {
    ids = Ids::patched;
  } else if (is_worth_mirroring(size.max_page_ids, all_ids) && all_ids <= self.capacity.max_page_ids) {
    ids = Ids::mirrored;
  }
  if (ids == Ids::gathered) check_field("max_page_ids", size.max_page_ids, self.capacity.max_page_ids);
  check_field("max_items", size.max_items, self.capacity.max_items);
  check_field("max_partials", size.max_partials, self.capacity.max_partials);

  Staging& staging = self.staging[static_cast<std::size_t>(self.turn)];
  check(cudaEventSynchronize(staging.copied), "cudaEventSynchronize");
  const std::size_t bytes = pack(data, work, ids, Blob(staging.data, self.capacity));
  self.mirrored = {};
  if (ids == Ids::patched && patches->count > 0) {
    PatchParams params{const_cast<std::int32_t*>(self.view.page_ids), *patches};
    void* arguments = &params;
    check(cudaLaunchKernel(patch_kernel(), dim3(1), dim3(PagePatches::kMost), &arguments, 0, stream), "patch_page_ids");
  }
  check(cudaMemcpyAsync(self.blob.data, staging.data, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  check(cudaEventRecord(staging.copied, stream), "cudaEventRecord");
  if (ids != Ids::gathered) self.mirrored = {data.page_history.origin, data.page_history.version, {}};
  self.uploaded_ids = ids == Ids::patched ? patches->count : ids == Ids::mirrored ? all_ids : size.max_page_ids;
  self.turn = 1 - self.turn;
  self.uploaded = true;
  detail::PlanData& facts = self.facts;
  facts.options = data.options;
  facts.stats = data.stats;
  facts.page_size = data.page_size;
  facts.num_pages = data.num_pages;
  facts.rows.resize(data.rows.size());
  facts.num_partials = static_cast<std::int32_t>(size.max_partials);
  facts.workspace_bytes = workspace_size();
}

std::size_t workspace_size(const AttentionShape& shape, const Capacity& capacity) noexcept {
  const auto states = static_cast<std::size_t>(capacity.max_partials) * static_cast<std::size_t>(shape.num_qo_heads);
  return states * (static_cast<std::size_t>(shape.head_dim_vo) + 1) * sizeof(float);
}

std::size_t DevicePlan::workspace_size() const noexcept {
  return cuda::workspace_size(impl_->shape, impl_->capacity);
}

const Capacity& DevicePlan::capacity() const noexcept {
  return impl_->capacity;
}

const PlanStats& DevicePlan::stats() const noexcept {
  return impl_->facts.stats;
}

}  // namespace headwater::cuda
