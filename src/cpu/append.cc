// Writing to the cache: new keys and values, and copies of pages before they are appended to.
//
// Rows are dealt to workers in contiguous runs, copies by KV head (so that copies which depend on each other keep their
// order). Little work stays on the calling thread.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "cpu/convert.h"
#include "cpu/kernels.h"
#include "cpu/validate.h"
#include "headwater/cpu.h"

namespace headwater::cpu {
namespace {

/// Bytes below which the calling thread does everything (a few microseconds).
constexpr std::int64_t kSerialBytes = std::int64_t{64} * 1024;

struct Append {
  const Kernels& kernels;
  const KvCache& cache;
  ConstRowsView k;
  ConstRowsView v;
  std::span<const std::int64_t> token_slots;
  int num_kv_heads;
  int head_dim_qk;
  int head_dim_vo;
  Scale k_scale;
  Scale v_scale;
  int num_workers;
};

float scale_of(const Scale& scale, int kv_head) noexcept {
  if (scale.data == nullptr) return 1.0F;
  return scale.data[scale.count == 1 ? 0 : kv_head];
}

/// Only the 8-bit type is scaled: others store the value itself, and the scale multiplies it when it is read.
void store_f8(const void* from, DType from_type, void* to, int n, float scale) noexcept {
  with_type(from_type, [&](auto tag) {
    const auto* x = static_cast<const decltype(tag)*>(from);
    auto* y = static_cast<F8e4m3*>(to);
    for (int i = 0; i < n; ++i) y[i] = from_f32<F8e4m3>(to_f32(x[i]) / scale);
  });
}

void append_side(const Append& a, const PagedTensor& side, const ConstRowsView& rows, int head_dim, const Scale& scale,
                 std::int64_t begin, std::int64_t end) noexcept {
  const auto from_bytes = static_cast<std::int64_t>(size_of(rows.dtype));
  const auto to_bytes = static_cast<std::int64_t>(size_of(a.cache.dtype));
  for (std::int64_t r = begin; r < end; ++r) {
    const std::int64_t slot = a.token_slots[static_cast<std::size_t>(r)];
    if (slot < 0) continue;
    const std::int64_t at = slot / a.cache.page_size * side.page_stride + slot % a.cache.page_size * side.token_stride;
    const std::byte* from = static_cast<const std::byte*>(rows.data) + r * rows.row_stride * from_bytes;
    std::byte* to = static_cast<std::byte*>(side.data) + at * to_bytes;
    for (int h = 0; h < a.num_kv_heads; ++h) {
      const std::byte* x = from + h * rows.head_stride * from_bytes;
      std::byte* y = to + h * side.head_stride * to_bytes;
      if (rows.dtype == a.cache.dtype) {
        std::memcpy(y, x, static_cast<std::size_t>(head_dim * to_bytes));
      } else if (a.cache.dtype == DType::f8e4m3) {
        store_f8(x, rows.dtype, y, head_dim, scale_of(scale, h));
      } else {
        a.kernels.convert_row(x, rows.dtype, y, a.cache.dtype, head_dim);
      }
    }
  }
}

void append_rows(const Append& a, int worker) noexcept {
  const auto rows = static_cast<std::int64_t>(a.token_slots.size());
  const std::int64_t begin = rows * worker / a.num_workers;
  const std::int64_t end = rows * (worker + 1) / a.num_workers;
  append_side(a, a.cache.k, a.k, a.head_dim_qk, a.k_scale, begin, end);
  append_side(a, a.cache.v, a.v, a.head_dim_vo, a.v_scale, begin, end);
}

struct Copy {
  const KvCache& cache;
  std::span<const PageCopy> copies;
  int num_kv_heads;
  int head_dim_qk;
  int head_dim_vo;
  int num_workers;
};

void copy_side(const Copy& c, const PagedTensor& side, int head_dim, const PageCopy& copy, int head) noexcept {
  const auto element = static_cast<std::int64_t>(size_of(c.cache.dtype));
  auto* const base = static_cast<std::byte*>(side.data) + head * side.head_stride * element;
  const std::byte* from = base + copy.src * side.page_stride * element;
  std::byte* to = base + copy.dst * side.page_stride * element;
  const auto row_bytes = static_cast<std::size_t>(head_dim * element);
  if (side.token_stride == head_dim) {
    std::memcpy(to, from, row_bytes * static_cast<std::size_t>(copy.num_tokens));
    return;
  }
  for (int t = 0; t < copy.num_tokens; ++t) {
    std::memcpy(to + t * side.token_stride * element, from + t * side.token_stride * element, row_bytes);
  }
}

void copy_heads(const Copy& c, int worker) noexcept {
  const int begin = c.num_kv_heads * worker / c.num_workers;
  const int end = c.num_kv_heads * (worker + 1) / c.num_workers;
  for (const PageCopy& copy : c.copies) {
    for (int head = begin; head < end; ++head) {
      copy_side(c, c.cache.k, c.head_dim_qk, copy, head);
      copy_side(c, c.cache.v, c.head_dim_vo, copy, head);
    }
  }
}

void check_slots(const KvCache& cache, std::span<const std::int64_t> token_slots) {
  // Divided, not multiplied: num_pages may be anything.
  for (std::size_t i = 0; i < token_slots.size(); ++i) {
    if (token_slots[i] >= 0 && token_slots[i] / cache.page_size >= cache.num_pages) {
      refuse(ErrorCode::invalid_argument, "token_slots[" + std::to_string(i) + "]", token_slots[i],
             "less than num_pages * page_size = " + std::to_string(cache.num_pages) + " * " +
                 std::to_string(cache.page_size));
    }
  }
}

void check_positive(const char* name, const Scale& scale) {
  for (int i = 0; i < scale.count; ++i) {
    if (!(scale.data[i] > 0.0F) || !std::isfinite(scale.data[i])) {
      refuse(ErrorCode::invalid_argument, std::string(name) + "[" + std::to_string(i) + "]",
             std::to_string(scale.data[i]), "a positive number (values are divided by it)");
    }
  }
}

}  // namespace

void append_kv(const KvCache& cache, ConstRowsView k, ConstRowsView v, std::span<const std::int64_t> token_slots,
               int num_kv_heads, int head_dim_qk, int head_dim_vo, Scale k_scale, Scale v_scale, Executor& executor) {
  check_heads(num_kv_heads, head_dim_qk, head_dim_vo);
  check_cache("cache", -1, cache, num_kv_heads, head_dim_qk, head_dim_vo);
  const auto rows = static_cast<std::int64_t>(token_slots.size());
  check_rows("k", k, rows, num_kv_heads, head_dim_qk);
  check_rows("v", v, rows, num_kv_heads, head_dim_vo);
  check_scale("k_scale", k_scale, num_kv_heads);
  check_scale("v_scale", v_scale, num_kv_heads);
  if (cache.dtype == DType::f8e4m3) {
    check_positive("k_scale", k_scale);
    check_positive("v_scale", v_scale);
  }
  check_slots(cache, token_slots);

  Append append{
      kernels_for(default_isa()), cache, k, v, token_slots, num_kv_heads, head_dim_qk, head_dim_vo, k_scale, v_scale,
      executor.num_workers()};
  const std::int64_t bytes =
      rows * num_kv_heads * (head_dim_qk + head_dim_vo) * static_cast<std::int64_t>(size_of(cache.dtype));
  if (append.num_workers == 1 || bytes < kSerialBytes) {
    append.num_workers = 1;
    append_rows(append, 0);
    return;
  }
  executor.parallel([](void* context, int worker) noexcept { append_rows(*static_cast<Append*>(context), worker); },
                    &append);
}

void copy_pages(const KvCache& cache, std::span<const PageCopy> copies, int num_kv_heads, int head_dim_qk,
                int head_dim_vo, Executor& executor) {
  check_heads(num_kv_heads, head_dim_qk, head_dim_vo);
  check_cache("cache", -1, cache, num_kv_heads, head_dim_qk, head_dim_vo);
  check_copies(cache, copies);

  Copy copy{cache, copies, num_kv_heads, head_dim_qk, head_dim_vo, std::min(executor.num_workers(), num_kv_heads)};
  const std::int64_t bytes = static_cast<std::int64_t>(copies.size()) * cache.page_size * num_kv_heads *
                             (head_dim_qk + head_dim_vo) * static_cast<std::int64_t>(size_of(cache.dtype));
  if (copy.num_workers == 1 || bytes < kSerialBytes) {
    copy.num_workers = 1;
    copy_heads(copy, 0);
    return;
  }
  executor.parallel(
      [](void* context, int worker) noexcept {
        auto& c = *static_cast<Copy*>(context);
        if (worker < c.num_workers) copy_heads(c, worker);
      },
      &copy);
}

}  // namespace headwater::cpu
