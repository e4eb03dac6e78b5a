// What describe() and to_json() tell about a node of the forest.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "plan/cost_model.h"
#include "plan/memory.h"

namespace headwater::detail {

struct NodeReport {
  std::int32_t tok_begin = 0;
  std::int32_t tok_end = 0;
  std::int32_t pages = 0;
  bool shared = false;
  bool split = false;            ///< read once for all members
  std::int64_t apart_ps = 0;     ///< worker time if every member reads it for itself ...
  std::int64_t together_ps = 0;  ///< ... and if it is split off
  std::string reason;            ///< why, in words
};

[[nodiscard]] NodeReport report_node(const PlanData& plan, const CostModel& cost, std::int32_t node);

/// Appends all parts.
template <class... Parts>
void append(std::string& out, const Parts&... parts) {
  (out.append(std::string_view(parts)), ...);
}
template <class... Parts>
[[nodiscard]] std::string join(const Parts&... parts) {
  std::string out;
  append(out, parts...);
  return out;
}

/// "12.3 us"; "1.5 MiB"; "12,288".
[[nodiscard]] std::string format_time(std::int64_t ps);
[[nodiscard]] std::string format_bytes(std::int64_t bytes);
[[nodiscard]] std::string format_count(std::int64_t n);
/// a / b with one decimal, "22.0x".
[[nodiscard]] std::string format_ratio(std::int64_t a, std::int64_t b);

}  // namespace headwater::detail
