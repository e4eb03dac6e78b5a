// Appending to and copying pages of the cache on the device: checks in the CPU back end's words, then a launch.
#include "cuda/storage.h"

#include <algorithm>
#include <string>

#include "cpu/validate.h"
#include "cuda/enqueue.h"
#include "headwater/cuda.h"

namespace headwater::cuda {
namespace {

constexpr std::int64_t kMaxBlocks = (std::int64_t{1} << 31) - 1;

CacheSide in_bytes(const PagedTensor& t, std::int64_t element) {
  return {static_cast<unsigned char*>(t.data), t.page_stride * element, t.token_stride * element,
          t.head_stride * element};
}

/// Dimensions that are strided over.
struct Extents {
  std::int64_t num_pages;
  int page_size;
  int num_kv_heads;
};

bool same_strides(const KvCache& cache, const Extents& e) {
  return (e.num_pages <= 1 || cache.k.page_stride == cache.v.page_stride) &&
         (e.page_size <= 1 || cache.k.token_stride == cache.v.token_stride) &&
         (e.num_kv_heads <= 1 || cache.k.head_stride == cache.v.head_stride);
}

/// Bytes from K's element (page, token, head, 0) to V's, where one of the two rows is a view of the other or they
/// overlap (MLA): then the distance is the same everywhere and less than a row.
bool rows_overlap(const KvCache& cache, int num_kv_heads, int head_dim_qk, int head_dim_vo) {
  if (!same_strides(cache, {cache.num_pages, cache.page_size, num_kv_heads})) return false;
  const auto element = static_cast<std::int64_t>(size_of(cache.dtype));
  const std::int64_t distance =
      static_cast<const std::byte*>(cache.v.data) - static_cast<const std::byte*>(cache.k.data);
  return distance >= 0 ? distance < head_dim_qk * element : -distance < head_dim_vo * element;
}

AppendSide append_side(const PagedTensor& to, DType to_type, const ConstRowsView& rows, int head_dim,
                       const Scale& scale) {
  const auto from_bytes = static_cast<std::int64_t>(size_of(rows.dtype));
  const auto to_bytes = static_cast<std::int64_t>(size_of(to_type));
  AppendSide side;
  side.rows = static_cast<const unsigned char*>(rows.data);
  side.row_stride = rows.row_stride * from_bytes;
  side.head_stride = rows.head_stride * from_bytes;
  side.cache = in_bytes(to, to_bytes);
  side.scale = scale.data;
  side.scale_stride = scale.count > 1 ? 1 : 0;
  side.head_dim = head_dim;
  const std::int64_t width = 16 / std::max(from_bytes, to_bytes);  // elements: kVectorWidth of storage.cu
  side.aligned = head_dim % width == 0 && is_aligned(side.rows, width * from_bytes) && rows.row_stride % width == 0 &&
                 rows.head_stride % width == 0 && is_aligned(to.data, width * to_bytes) &&
                 to.page_stride % width == 0 && to.token_stride % width == 0 && to.head_stride % width == 0;
  return side;
}

/// Copies of one cache; which ones, the caller adds.
class Copier {
 public:
  Copier(const KvCache& cache, int num_kv_heads, int head_dim_qk, int head_dim_vo, Stream stream) : stream_(stream) {
    const auto element = static_cast<std::int64_t>(size_of(cache.dtype));
    params_.sides[0] = in_bytes(cache.k, element);
    params_.sides[1] = in_bytes(cache.v, element);
    params_.num_pages = cache.num_pages;
    params_.page_size = cache.page_size;
    params_.num_kv_heads = num_kv_heads;
    std::int64_t row_bytes[2] = {head_dim_qk * element, head_dim_vo * element};
    if (rows_overlap(cache, num_kv_heads, head_dim_qk, head_dim_vo)) {  // one side that covers both
      unsigned char* const k = params_.sides[0].data;
      unsigned char* const v = params_.sides[1].data;
      params_.sides[0].data = std::min(k, v);
      row_bytes[0] = std::max(k + row_bytes[0], v + row_bytes[1]) - std::min(k, v);
      row_bytes[1] = 0;
    }
    std::int64_t unit = 16;
    for (int s = 0; s < 2; ++s) {
      const CacheSide& side = params_.sides[s];
      if (!is_aligned(side.data, 16) || side.page_stride % 16 != 0 || side.token_stride % 16 != 0 ||
          side.head_stride % 16 != 0 || row_bytes[s] % 16 != 0) {
        unit = element;
      }
    }
    std::int64_t most = 0;  // vectors of one page
    for (int s = 0; s < 2; ++s) {
      params_.units[s] = static_cast<std::int32_t>(row_bytes[s] / unit);
      most = std::max(most, std::int64_t{params_.units[s]} * num_kv_heads * cache.page_size);
    }
    // A vector a thread: what one copies after another waits for memory each time.
    blocks_per_copy_ =
        static_cast<unsigned>(std::clamp<std::int64_t>((most + kCopyThreads - 1) / kCopyThreads, 1, 65'535));
    kernel_ = copy_kernel(static_cast<int>(unit));
  }

  /// The list at `copies`, in device memory.
  void launch(const cpu::PageCopy* copies, std::int64_t count, std::int32_t* num_bad) {
    params_.list = copies;
    params_.num_bad = num_bad;
    launch(static_cast<unsigned>(count));
  }

  /// Copies of one launch run side by side, launches one after the other: one that needs an earlier copy of the launch
  /// starts the next.
  void add(const cpu::PageCopy& copy) {
    if (copy.num_tokens == 0) return;
    const auto* const end = params_.copies + count_;
    const bool depends = std::any_of(static_cast<const cpu::PageCopy*>(params_.copies), end, [&](const auto& other) {
      return copy.src == other.dst || copy.dst == other.dst || copy.dst == other.src;
    });
    if (depends || count_ == kCopiesPerLaunch) flush();
    params_.copies[count_++] = copy;
  }
  void flush() {
    if (count_ > 0) launch(static_cast<unsigned>(count_));
    count_ = 0;
  }

 private:
  void launch(unsigned count) {
    enqueue(kernel_, dim3(count, blocks_per_copy_), kCopyThreads, params_, stream_, "copy_pages");
  }

  CopyParams params_;
  Stream stream_;
  const void* kernel_ = nullptr;
  unsigned blocks_per_copy_ = 1;
  int count_ = 0;
};

void check_count(const char* name, std::int64_t count) {
  if (count < 0 || count > kMaxBlocks) {
    cpu::refuse(ErrorCode::invalid_argument, name, count, "0.." + std::to_string(kMaxBlocks));
  }
}

}  // namespace

void append_kv(const KvCache& cache, ConstRowsView k, ConstRowsView v, const std::int64_t* token_slots,
               std::int64_t num_rows, int num_kv_heads, int head_dim_qk, int head_dim_vo, Scale k_scale, Scale v_scale,
               Stream stream, std::int32_t* num_bad) {
  cpu::check_heads(num_kv_heads, head_dim_qk, head_dim_vo);
  check_count("num_rows", num_rows);
  cpu::check_cache("cache", -1, cache, num_kv_heads, head_dim_qk, head_dim_vo);
  cpu::check_rows("k", k, num_rows, num_kv_heads, head_dim_qk);
  cpu::check_rows("v", v, num_rows, num_kv_heads, head_dim_vo);
  cpu::check_scale("k_scale", k_scale, num_kv_heads);
  cpu::check_scale("v_scale", v_scale, num_kv_heads);
  if (num_rows == 0) return;
  check_device_array("token_slots", token_slots, alignof(std::int64_t));
  if (num_bad != nullptr) check_device_array("num_bad", num_bad, alignof(std::int32_t));

  AppendParams params;
  params.sides[0] = append_side(cache.k, cache.dtype, k, head_dim_qk, k_scale);
  params.sides[1] = append_side(cache.v, cache.dtype, v, head_dim_vo, v_scale);
  params.token_slots = token_slots;
  params.num_pages = cache.num_pages;
  params.page_size = cache.page_size;
  params.num_kv_heads = num_kv_heads;
  params.num_bad = num_bad;
  const auto launch = [&](DType from, int first_side, int sides_per_block, unsigned blocks_per_row) {
    params.first_side = first_side;
    params.sides_per_block = sides_per_block;
    enqueue(append_kernel(from, cache.dtype), dim3(static_cast<unsigned>(num_rows), blocks_per_row), kAppendThreads,
            params, stream, "append_kv");
  };
  if (k.dtype != v.dtype) {
    launch(k.dtype, 0, 1, 1);
    launch(v.dtype, 1, 1, 1);
  } else if (cache.num_pages > 0 && rows_overlap(cache, num_kv_heads, head_dim_qk, head_dim_vo)) {
    launch(k.dtype, 0, 2, 1);
  } else {
    launch(k.dtype, 0, 1, 2);
  }
}

void copy_pages(const KvCache& cache, std::span<const cpu::PageCopy> copies, int num_kv_heads, int head_dim_qk,
                int head_dim_vo, Stream stream) {
  cpu::check_heads(num_kv_heads, head_dim_qk, head_dim_vo);
  cpu::check_cache("cache", -1, cache, num_kv_heads, head_dim_qk, head_dim_vo);
  cpu::check_copies(cache, copies);
  Copier copier(cache, num_kv_heads, head_dim_qk, head_dim_vo, stream);
  for (const cpu::PageCopy& copy : copies) copier.add(copy);
  copier.flush();
}

void copy_pages(const KvCache& cache, const cpu::PageCopy* copies, std::int64_t num_copies, int num_kv_heads,
                int head_dim_qk, int head_dim_vo, Stream stream, std::int32_t* num_bad) {
  cpu::check_heads(num_kv_heads, head_dim_qk, head_dim_vo);
  check_count("num_copies", num_copies);
  cpu::check_cache("cache", -1, cache, num_kv_heads, head_dim_qk, head_dim_vo);
  if (num_copies == 0) return;
  check_device_array("copies", copies, alignof(cpu::PageCopy));
  if (num_bad != nullptr) check_device_array("num_bad", num_bad, alignof(std::int32_t));
  Copier(cache, num_kv_heads, head_dim_qk, head_dim_vo, stream).launch(copies, num_copies, num_bad);
}

}  // namespace headwater::cuda
