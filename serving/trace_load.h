// A recorded trace as requests: arrival times, lengths and shared prefixes are the trace's, the words are made up.
// Equal leading hash ids become equal leading tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "cli/formats.h"
#include "serving/load.h"
#include "serving/prompts.h"

namespace headwater::serving {

struct TraceOptions {
  double time_scale = 1;          ///< arrivals this many times as fast as recorded
  std::int64_t block_tokens = 0;  ///< tokens sent for a whole block of the trace; 0: as many as it stands for
  std::int64_t max_requests = 0;  ///< the first ones; 0: all
  std::int64_t max_tokens = 0;    ///< bound on the output of a request; 0: as recorded
};

/// Number of tokens sent for `tokens` of the trace: at least one, and whole blocks stay whole.
[[nodiscard]] std::int64_t scaled_tokens(std::int64_t tokens, std::int64_t trace_block, std::int64_t sent_block);
/// Requests in order of time; prompts are made when they are sent. `maker` and `trace` must outlive them.
[[nodiscard]] std::vector<PlannedRequest> plan_trace(const cli::Trace& trace, const TraceOptions& options,
                                                     PromptMaker& maker);

}  // namespace headwater::serving
