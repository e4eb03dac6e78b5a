// The one-line account of a step's outcome that is logged the first time each kind occurs.
#pragma once

#include <string>

#include "headwater/plan.h"

namespace headwater::cli {

/// "cascade launch (batch 4, 4 of them sharing 256 pages / 8192 KV tokens read once; 8 shared-span chunks, 4 suffix
/// chunks)", or "flat launch (batch 4; 4 chunks)". With several spans, pages and tokens are summed over
/// them, and a request counts as sharing once.
[[nodiscard]] std::string describe_outcome(const Plan& plan);

}  // namespace headwater::cli
