// Measures the constants of the cost model on this machine.
//
// Each constant comes from small attention calls in which it dominates: slopes over row counts for the kernels, many
// tiny requests for the cost of an item, a page shared by many rows for the cost of a row, a forced split for partial
// states. All calls take turns for about ten seconds, and the least time of each counts. Not measured, since they are
// properties of the kernels: few_row_max, many_row_pad, max_tile_rows, chunk_tokens.
#pragma once

#include <functional>
#include <string>

#include "headwater/headwater.h"

namespace headwater::bench {

/// `progress` hears what is being measured and how far along it is.
[[nodiscard]] DeviceModel calibrate(Executor& executor, Isa isa,
                                    const std::function<void(double, const std::string&)>& progress);

}  // namespace headwater::bench
