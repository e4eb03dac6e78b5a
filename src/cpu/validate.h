// Checks of the caller's tensors, shared by run, merge_states, append_kv and copy_pages. Each throws Error with a
// message that names the argument, what was expected and what was found: "out.row_stride = 64, expected at least 4096
// (...)".
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "headwater/cpu.h"
#include "headwater/error.h"
#include "headwater/view.h"

namespace headwater::cpu {

/// Throws Error(code, "<name> = <got>, expected <expected>").
[[noreturn]] void refuse(ErrorCode code, std::string_view name, std::string_view got, std::string_view expected);
[[noreturn]] void refuse(ErrorCode code, std::string_view name, std::int64_t got, std::string_view expected);

/// Name of an argument, put together only when it is needed: {"kv", 0, ".k"} with field ".data" is "kv[0].k.data".
struct ArgName {
  std::string_view base;
  std::int64_t index = -1;  ///< -1: none
  std::string_view side;

  // NOLINTNEXTLINE(google-explicit-constructor): a plain name is the common case
  constexpr ArgName(const char* base_name) noexcept : base(base_name) {}
  constexpr ArgName(const char* base_name, std::int64_t at, std::string_view side_name = {}) noexcept
      : base(base_name), index(at), side(side_name) {}
  [[nodiscard]] std::string field(std::string_view name) const;
};

/// A dimension of a tensor: how many, and how far apart in elements.
struct Dim {
  const char* name;  ///< of the stride: "row_stride"
  std::int64_t count;
  std::int64_t stride;
};

/// Different indices must address different elements, nested in some order, and every offset must fit in 62 bits of
/// bytes. `inner` is the length of the contiguous innermost dimension.
void check_strides(const ArgName& name, std::initializer_list<Dim> dims, std::int64_t inner, DType dtype);

/// name.data is not null and aligned to its element.
void check_pointer(const ArgName& name, const void* data, DType dtype);

void check_rows(const ArgName& name, const ConstRowsView& view, std::int64_t rows, int heads, int head_dim);
void check_rows(const ArgName& name, const RowsView& view, std::int64_t rows, int heads, int head_dim);
void check_lse(const ArgName& name, const ConstLseView& view, std::int64_t rows, int heads);
void check_lse(const ArgName& name, const LseView& view, std::int64_t rows, int heads);

/// Sizes, pointers and strides of a cache; index -1: not one of several.
void check_cache(const char* name, std::int64_t index, const KvCache& cache, int num_kv_heads, int head_dim_qk,
                 int head_dim_vo);

void check_scale(const ArgName& name, const Scale& scale, int num_kv_heads);

void check_heads(int num_kv_heads, int head_dim_qk, int head_dim_vo);

/// Pages inside the pool, different ones, and no more tokens than a page has.
void check_copies(const KvCache& cache, std::span<const PageCopy> copies);

}  // namespace headwater::cpu
