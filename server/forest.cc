// See forest.h. The plan's own JSON is public and has all that is needed; its nodes come depth first, so that the
// leaves' order makes the members of every node neighbours.
#include "server/forest.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace headwater::server {
namespace {

using nlohmann::json;
constexpr std::size_t kMostLanes = 64;

std::string_view name_of(CascadeSwitch cascade) {
  switch (cascade) {
    case CascadeSwitch::on:
      return "on";
    case CascadeSwitch::off:
      return "off";
    default:
      return "auto";
  }
}

/// Requests of the plan in the order of the forest's leaves.
std::vector<std::size_t> lanes_of(const json& forest, std::size_t num_requests) {
  std::vector<std::size_t> lanes;
  std::vector<bool> placed(num_requests, false);
  const auto place = [&](std::size_t request) {
    if (request >= num_requests || placed[request]) return;
    placed[request] = true;
    lanes.push_back(request);
  };
  for (const json& node : forest) {
    if (node["requests"].size() == 1) place(node["requests"][0].get<std::size_t>());
  }
  for (std::size_t request = 0; request < num_requests; ++request) place(request);
  return lanes;
}

json spans_of(const json& forest, const std::vector<std::size_t>& lanes) {
  std::vector<std::size_t> lane_of(lanes.size());
  for (std::size_t lane = 0; lane < lanes.size(); ++lane) lane_of[lanes[lane]] = lane;
  std::vector<int> depths;  // of each node: shared ancestors with tokens
  json spans = json::array();
  for (const json& node : forest) {
    const auto parent = node["parent"].get<std::int64_t>();
    const int depth = parent < 0 ? 0 : depths.at(static_cast<std::size_t>(parent));
    const auto begin = node["begin"].get<std::int64_t>();
    const std::int64_t tokens = node["end"].get<std::int64_t>() - begin;
    const json& members = node["requests"];
    const bool shared = members.size() > 1 && tokens > 0;
    depths.push_back(depth + (shared ? 1 : 0));
    if (!shared) continue;
    std::size_t first = lanes.size();
    for (const json& member : members) first = std::min(first, lane_of.at(member.get<std::size_t>()));
    if (first >= kMostLanes) continue;
    spans.push_back({{"begin", begin},
                     {"tokens", tokens},
                     {"first", first},
                     {"members", members.size()},
                     {"depth", depth},
                     {"split", node.value("split", false)}});
  }
  return spans;
}

}  // namespace

ForestSnapshot take_forest(const engine::Engine& engine) {
  ForestSnapshot snapshot;
  snapshot.step = engine.last_step();
  snapshot.progress = engine.progress();
  snapshot.cascade = engine.options().plan.cascade;
  snapshot.pages_total = engine.num_pages();
  snapshot.pages_cached = engine.num_idle_cached_pages();
  snapshot.pages_free = engine.num_free_pages();
  snapshot.page_size = engine.options().page_size;
  const std::span<const engine::StepRequest> requests = engine.last_requests();
  snapshot.requests.assign(requests.begin(), requests.end());
  if (!snapshot.requests.empty()) snapshot.plan_json = engine.last_plan().to_json();
  return snapshot;
}

std::string forest_json(const ForestSnapshot& snapshot, const std::function<std::string(std::uint64_t tag)>& id_of) {
  const json plan = snapshot.plan_json.empty() ? json::object() : json::parse(snapshot.plan_json);
  const json forest = plan.value("forest", json::array());
  const std::vector<std::size_t> lanes = lanes_of(forest, snapshot.requests.size());
  json requests = json::array();
  for (std::size_t lane = 0; lane < std::min(lanes.size(), kMostLanes); ++lane) {
    const engine::StepRequest& request = snapshot.requests[lanes[lane]];
    requests.push_back({{"id", id_of(request.tag)},
                        {"sample", request.sample},
                        {"prompt_tokens", request.prompt_tokens},
                        {"tokens", request.tokens},
                        {"rows", request.rows}});
  }
  const engine::StepStats& step = snapshot.step;
  const nlohmann::ordered_json out = {{"step", step.step},
                                      {"path", headwater::name_of(step.path)},
                                      {"cascade", name_of(snapshot.cascade)},
                                      {"running", snapshot.progress.samples_running},
                                      {"waiting", snapshot.progress.samples_waiting},
                                      {"num_requests", snapshot.requests.size()},
                                      {"requests", requests},
                                      {"spans", spans_of(forest, lanes)},
                                      {"kv_bytes_read", step.kv_bytes_read},
                                      {"kv_bytes_flat", step.kv_bytes_flat},
                                      {"kv_bytes_unique", step.kv_bytes_unique},
                                      {"decode_rows", step.decode_rows},
                                      {"prefill_rows", step.prefill_rows},
                                      {"step_seconds", step.step_seconds},
                                      {"pages",
                                       {{"total", snapshot.pages_total},
                                        {"used", snapshot.pages_total - snapshot.pages_cached - snapshot.pages_free},
                                        {"cached", snapshot.pages_cached},
                                        {"free", snapshot.pages_free}}},
                                      {"page_size", snapshot.page_size}};
  return out.dump();
}

}  // namespace headwater::server
