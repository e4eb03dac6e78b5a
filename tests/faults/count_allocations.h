// Counts the allocations of the whole program: proves that run makes none.
#pragma once

#include <cstdint>

namespace headwater::faults {

/// Calls of operator new so far, by all threads.
std::int64_t num_allocations();

}  // namespace headwater::faults
