// See trace_load.h.
#include "serving/trace_load.h"

#include <algorithm>

namespace headwater::serving {
namespace {

Prompt prompt_of(const cli::TraceRequest& request, std::int64_t trace_block, std::int64_t sent_block,
                 PromptMaker& maker) {
  PromptMaker::Part whole;
  std::int64_t left = request.input_length;
  for (const std::int64_t id : request.hash_ids) {
    const std::int64_t here = std::min(left, trace_block);
    const PromptMaker::Part part = maker.block(id, scaled_tokens(here, trace_block, sent_block));
    whole.tokens.insert(whole.tokens.end(), part.tokens.begin(), part.tokens.end());
    whole.text += part.text;
    left -= here;
  }
  return PromptMaker::join({}, whole);
}

}  // namespace

std::int64_t scaled_tokens(std::int64_t tokens, std::int64_t trace_block, std::int64_t sent_block) {
  return std::max<std::int64_t>(1, (tokens * sent_block + trace_block / 2) / trace_block);
}

std::vector<PlannedRequest> plan_trace(const cli::Trace& trace, const TraceOptions& options, PromptMaker& maker) {
  const std::int64_t block = trace.block_tokens;
  const std::int64_t sent = options.block_tokens > 0 ? options.block_tokens : block;
  std::vector<PlannedRequest> out;
  for (const cli::TraceRequest& request : trace.requests) {
    if (options.max_requests > 0 && std::ssize(out) == options.max_requests) break;
    std::int64_t output = std::max<std::int64_t>(request.output_length, 1);
    if (options.max_tokens > 0) output = std::min(output, options.max_tokens);
    const double at = static_cast<double>(request.timestamp_ms - trace.requests.front().timestamp_ms) / 1e3;
    out.push_back({[&request, block, sent, &maker] { return prompt_of(request, block, sent, maker); }, output,
                   at / options.time_scale});
  }
  return out;
}

}  // namespace headwater::serving
