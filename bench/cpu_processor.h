// The CPU as the harness sees it: an executor's workers at one instruction-set level.
#pragma once

#include <memory>

#include "bench/processor.h"

namespace headwater::bench {

/// Measures the peaks: about a tenth of a second. `isa` must be one that the processor has; the executor must live as
/// long.
[[nodiscard]] std::unique_ptr<Processor> make_cpu_processor(Executor& executor, Isa isa);

}  // namespace headwater::bench
