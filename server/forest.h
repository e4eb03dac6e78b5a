// What the last step shared, as one small JSON object for a drawing (docs/server.md has the shape). Taken on the
// engine's thread, shaped elsewhere.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace headwater::server {

struct ForestSnapshot {
  std::string plan_json;  ///< Plan::to_json(); empty: there was no step
  std::vector<engine::StepRequest> requests;
  engine::StepStats step;
  engine::Progress progress;
  CascadeSwitch cascade = CascadeSwitch::automatic;
  std::int64_t pages_total = 0;
  std::int64_t pages_cached = 0;
  std::int64_t pages_free = 0;
  int page_size = 0;
};

[[nodiscard]] ForestSnapshot take_forest(const engine::Engine& engine);

/// `id_of` names a request by its tag.
[[nodiscard]] std::string forest_json(const ForestSnapshot& snapshot,
                                      const std::function<std::string(std::uint64_t tag)>& id_of);

}  // namespace headwater::server
