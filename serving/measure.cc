// See measure.h.
#include "serving/measure.h"

#include <fmt/format.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "bench/probe.h"
#include "headwater/error.h"

namespace headwater::serving {
namespace {

constexpr std::int64_t kWarmTokens = 4;

std::string first_model(const Answer& answer, const std::string& where) {
  const nlohmann::json value = nlohmann::json::parse(answer.body, nullptr, false);
  if (answer.status == 200 && value.is_object() && value.contains("data") && value["data"].is_array()) {
    for (const auto& model : value["data"]) {
      if (model.is_object() && model.contains("id") && model["id"].is_string()) return model["id"].get<std::string>();
    }
  }
  throw Error(ErrorCode::io,
              fmt::format("{}/v1/models: expected a list of models, got status {}; name one with --model", where,
                          answer.status));
}

}  // namespace

Server::Server(const Url& url, const std::string& api_key, LoadOptions options, bool metrics, std::string arm)
    : client_(url, api_key), options_(std::move(options)), metrics_(metrics), arm_(std::move(arm)) {}

void Server::wait_until_ready(double seconds, Child* child, const std::function<void()>& tick) {
  const double end = bench::now() + seconds;
  for (std::string last = "no answer"; bench::now() < end;) {
    if (tick) tick();
    if (child != nullptr && !child->running())
      throw Error(ErrorCode::io,
                  fmt::format("the server of arm \"{}\" ended before it was ready:\n{}", arm_, child->last_output()));
    try {
      int status = client_.get_now("/ready", 5).status;
      if (status == 404) status = client_.get_now("/v1/models", 5).status;
      if (status == 200) return;
      last = fmt::format("status {}", status);
    } catch (const Error&) {  // not listening yet
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (bench::now() >= end) {
      throw Error(ErrorCode::io, fmt::format("{}/ready: expected 200 within {:g} s, got {}{}", client_.url().text(),
                                             seconds, last, child == nullptr ? "" : ":\n" + child->last_output()));
    }
  }
}

void Server::find_model() {
  if (!options_.request.model.empty()) return;
  options_.request.model = first_model(client_.get_now("/v1/models"), client_.url().text());
}

Counters Server::counters() {
  const Answer answer = client_.get_now("/metrics");
  if (answer.status != 200)
    throw Error(ErrorCode::io,
                fmt::format("{}/metrics: expected status 200, got {}", client_.url().text(), answer.status));
  return Counters::from(answer.body);
}

LevelRunner::LevelRunner(std::vector<Server*> servers, PromptMaker& maker, LevelPlan plan)
    : servers_(std::move(servers)), maker_(maker), plan_(plan) {
  if (!plan_.cold && plan_.shared_tokens > 0) document_ = maker_.take(plan_.shared_tokens);
}

std::vector<PlannedRequest> LevelRunner::draw(std::int64_t count, std::int64_t max_tokens) {
  if (plan_.cold && plan_.shared_tokens > 0) document_ = maker_.take(plan_.shared_tokens);
  std::vector<PlannedRequest> requests;
  for (std::int64_t i = 0; i < count; ++i) {
    requests.push_back(
        {[prompt = PromptMaker::join(document_, maker_.take(plan_.own_tokens))] { return prompt; }, max_tokens, 0});
  }
  return requests;
}

void LevelRunner::warm(const ProgressFunction& progress) {
  const std::vector<PlannedRequest> request = draw(1, std::min(plan_.max_tokens, kWarmTokens));
  for (Server* server : servers_) {
    const std::vector<Record> records = run_round(server->client(), request, server->options(), progress);
    if (!records.front().ok())
      throw Error(ErrorCode::io, fmt::format("{}: the first request failed: {}", server->client().url().text(),
                                             records.front().error));
  }
}

LevelMeasurement LevelRunner::run(std::int64_t concurrency, const LevelProgress& progress) {
  const std::size_t arms = servers_.size();
  std::vector<std::vector<std::vector<Record>>> records(arms);
  std::vector<Counters> counted(arms);
  LevelMeasurement out;
  const auto told = [&](std::size_t arm, int round) -> ProgressFunction {
    return [&progress, name = servers_[arm]->arm(), round](const Progress& p) {
      if (progress) progress(name, round, p);
    };
  };
  if (!plan_.cold) warm(told(0, 0));
  for (int round = 0; round < plan_.rounds; ++round) {
    const std::vector<PlannedRequest> requests = draw(concurrency, plan_.max_tokens);
    out.rounds.emplace_back(arms);
    for (std::size_t turn = 0; turn < arms; ++turn) {
      const std::size_t arm = round % 2 == 0 ? turn : arms - 1 - turn;
      Server& server = *servers_[arm];
      const Counters before = server.metrics() ? server.counters() : Counters{};
      records[arm].push_back(run_round(server.client(), requests, server.options(), told(arm, round)));
      if (server.metrics()) counted[arm].add(before, server.counters());
      out.rounds.back()[arm] = summarize({records[arm].back()});
    }
  }
  for (std::size_t arm = 0; arm < arms; ++arm) {
    LevelResult result = summarize(records[arm]);
    result.arm = servers_[arm]->arm();
    result.concurrency = concurrency;
    if (servers_[arm]->metrics()) result.counters = counted[arm];
    out.arms.push_back(std::move(result));
  }
  return out;
}

PairRatio ratio_of(const LevelMeasurement& level) {
  std::vector<double> aggregate;
  std::vector<double> decode;
  std::vector<double> ttft;
  for (const std::vector<LevelResult>& round : level.rounds) {
    const LevelResult& a = round.at(0);
    const LevelResult& b = round.at(1);
    if (a.fail > 0 || b.fail > 0) continue;
    aggregate.push_back(a.aggregate_tps / b.aggregate_tps);
    ttft.push_back(a.ttft_mean_s / b.ttft_mean_s);
    if (a.decode_tps > 0 && b.decode_tps > 0) decode.push_back(a.decode_tps / b.decode_tps);
  }
  PairRatio out;
  out.concurrency = level.arms.at(0).concurrency;
  out.rounds = aggregate.size();
  out.aggregate = bench::median_interval(aggregate);
  out.decode = bench::median_interval(decode);
  out.ttft = bench::median_interval(ttft);
  return out;
}

bench::Verdict judge(const PairRatio& ratio, double least) {
  return bench::verdict_of_pairs(ratio.rounds, ratio.aggregate.high >= least);
}

}  // namespace headwater::serving
