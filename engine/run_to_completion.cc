// Requests in, completions out: the loop around Engine::step that most callers want.
#include <map>
#include <utility>

#include "engine/engine.h"
#include "headwater/error.h"

namespace headwater::engine {

std::vector<Completion> run_to_completion(Engine& engine, std::span<const Request> requests, const RunHooks& hooks) {
  std::vector<Completion> completions;
  std::map<RequestId, std::size_t> first_of;  // completion of sample 0
  for (const Request& request : requests) {
    const std::size_t first = completions.size();
    try {
      const RequestId id = engine.submit(request);
      first_of.emplace(id, first);
      for (int index = 0; index < request.num_samples; ++index) {
        completions.push_back({id, index, {}, {}, FinishReason::cancelled, {}});
      }
    } catch (const Error& error) {
      completions.push_back({0, 0, {}, {}, FinishReason::error, error.what()});
    }
  }
  while (engine.has_work()) {
    if (hooks.cancelled && hooks.cancelled()) engine.cancel_all();
    for (const Event& event : engine.step()) {
      const auto known = first_of.find(event.request);
      if (known != first_of.end()) {
        Completion& completion = completions[known->second + static_cast<std::size_t>(event.sample)];
        if (event.token >= 0) completion.tokens.push_back(event.token);
        completion.text += event.text;
        if (event.finish) completion.finish = *event.finish;
        completion.error += event.error;
      }
      if (hooks.on_event) hooks.on_event(event);
    }
    if (hooks.on_step) hooks.on_step(engine);
  }
  return completions;
}

}  // namespace headwater::engine
