// The one exception type of the library. A message names the argument, the place, what was expected and what was found:
// "kv_indptr[3] = 7 is less than kv_indptr[2] = 9".
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace headwater {

enum class ErrorCode : int {
  ok = 0,
  invalid_argument = 1,     ///< a shape, stride, option or pointer is wrong
  invalid_page_table = 2,   ///< qo_indptr, kv_indptr, kv_indices or kv_last_page_len is inconsistent
  unsupported = 3,          ///< well formed, but no back end can do it; the message says why
  workspace_too_small = 4,  ///< workspace smaller than plan.workspace_size(), or misaligned
  capacity_exceeded = 5,    ///< a plan is beyond what a cuda::DevicePlan was made for; the message names the field
  out_of_pages = 6,         ///< the page pool has too few free pages; nothing was taken
  io = 7,                   ///< a file could not be read or is malformed
  device = 8,               ///< a device reported an error
  internal = 9,             ///< a defect of this library
};

/// Stable lower-case name of a code, "invalid_page_table" for instance.
[[nodiscard]] std::string_view name_of(ErrorCode code) noexcept;

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace headwater
