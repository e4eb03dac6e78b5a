// Load on a scripted server: what is sent, what is timed, what is counted as failed.
#include "serving/load.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "bench/probe.h"
#include "fake_server.h"
#include "headwater/error.h"
#include "serving/measure.h"
#include "serving/trace_load.h"

namespace headwater::serving {
namespace {

using test::FakeOptions;
using test::FakeServer;

LoadOptions load_options() {
  LoadOptions options;
  options.request.model = "fake-model";
  options.patience_s = 20;
  return options;
}

std::vector<PlannedRequest> requests(std::size_t count, std::int64_t tokens) {
  return std::vector<PlannedRequest>(count, {[] { return Prompt{{1, 2, 3}, "", ""}; }, tokens, 0});
}

std::vector<Record> round(const FakeServer& server, std::size_t count, std::int64_t tokens, double patience = 20) {
  HttpClient client(parse_url(server.url()), "");
  LoadOptions options = load_options();
  options.patience_s = patience;
  return run_round(client, requests(count, tokens), options, nullptr);
}

TEST(Round, TimesFollowTheScript) {
  FakeOptions script;
  script.first_s = 0.10;
  script.gap_s = 0.03;
  script.empty_first = true;  // is not a token
  const FakeServer server(script);
  const std::vector<Record> records = round(server, 6, 5);
  ASSERT_EQ(records.size(), 6U);
  for (const Record& r : records) {
    ASSERT_TRUE(r.ok()) << r.error;
    EXPECT_EQ(r.completion_tokens, 5);
    EXPECT_EQ(r.prompt_tokens, 3);
    EXPECT_EQ(r.arrivals.size(), 5U);
    EXPECT_GE(r.ttft(), 0.10);
    EXPECT_LT(r.ttft(), 0.10 + 0.5);
    EXPECT_GE(r.arrivals.back() - r.arrivals.front(), 0.5 * 4 * 0.03);  // not all at the end
    EXPECT_GE(r.end - r.start, 0.10 + 4 * 0.03);
  }
  EXPECT_EQ(server.most_at_once(), 6);
}

TEST(Round, BytesCutAnywhere) {
  FakeOptions script;
  script.byte_by_byte = true;
  const FakeServer server(script);
  for (const Record& r : round(server, 3, 4)) {
    EXPECT_TRUE(r.ok()) << r.error;
    EXPECT_EQ(r.completion_tokens, 4);
  }
}

TEST(Round, FailuresAreCountedOneByOne) {
  FakeOptions script;
  script.fail_every = 3;
  const FakeServer server(script);
  int failed = 0;
  for (const Record& r : round(server, 9, 2)) {
    if (r.ok()) continue;
    ++failed;
    EXPECT_EQ(r.error, "status 503: the queue is full");
  }
  EXPECT_EQ(failed, 3);
}

TEST(Round, BrokenStreams) {
  const auto error_of = [](FakeOptions script, double patience = 20) {
    const FakeServer server(script);
    return round(server, 1, 4, patience).front().error;
  };
  FakeOptions script;
  script.drop_after = 2;
  EXPECT_EQ(error_of(script).substr(0, 8), "receive:");
  script = {};
  script.done = false;
  EXPECT_EQ(error_of(script), "the stream ended without [DONE]");
  script = {};
  script.error_after = 1;
  EXPECT_EQ(error_of(script), "error in the stream: out of pages");
  script = {};
  script.gap_s = 0.6;
  EXPECT_EQ(error_of(script, 0.2), "receive: no progress in time");
  EXPECT_EQ(error_of({}), "");
}

TEST(Round, NobodyThere) {
  const int port = free_port();
  HttpClient client(parse_url("127.0.0.1:" + std::to_string(port)), "");
  const std::vector<Record> records = run_round(client, requests(2, 1), load_options(), nullptr);
  for (const Record& r : records) EXPECT_EQ(r.error.substr(0, 8), "connect:") << r.error;
  EXPECT_THROW((void)client.get_now("/metrics"), Error);
}

TEST(Round, WhatProgressThrowsEndsIt) {
  FakeOptions script;
  script.gap_s = 0.05;
  const FakeServer server(script);
  HttpClient client(parse_url(server.url()), "");
  struct Stop {};
  EXPECT_THROW((void)run_round(client, requests(2, 20), load_options(), [](const Progress&) { throw Stop{}; }), Stop);
}

TEST(Replay, StartsAtItsTimesAndNoMoreThanAllowed) {
  FakeOptions script;
  script.first_s = 0.15;
  const FakeServer server(script);
  HttpClient client(parse_url(server.url()), "");
  std::vector<PlannedRequest> planned = requests(6, 1);
  for (std::size_t i = 0; i < planned.size(); ++i) planned[i].at_s = 0.02 * static_cast<double>(i);
  LoadOptions options = load_options();
  const std::vector<Record> free = run_replay(client, planned, options, nullptr);
  for (std::size_t i = 0; i < free.size(); ++i) {
    ASSERT_TRUE(free[i].ok()) << free[i].error;
    EXPECT_NEAR(free[i].due - free[0].due, 0.02 * static_cast<double>(i), 1e-9);
    EXPECT_GE(free[i].start, free[i].due - 1e-6);
  }
  EXPECT_GT(most_at_once(free), 2);
  options.most_running = 2;
  const std::vector<Record> bounded = run_replay(client, planned, options, nullptr);
  EXPECT_EQ(most_at_once(bounded), 2);
  EXPECT_GT(bounded.back().start - bounded.back().due, 0.1);
}

TEST(Trace, EqualIdsAreEqualTokensAndTimesAreScaled) {
  const FakeServer server({});
  HttpClient client(parse_url(server.url()), "");
  PromptMaker maker(client, "fake-model", false, 1);
  ASSERT_EQ(maker.form(), PromptMaker::Form::token_list);
  const cli::Trace trace = cli::parse_trace(
      "{\"timestamp\":1000,\"input_length\":1100,\"output_length\":7,\"hash_ids\":[5,6,7]}\n"
      "{\"timestamp\":3000,\"input_length\":1030,\"output_length\":0,\"hash_ids\":[5,6,8]}\n"
      "{\"timestamp\":9000,\"input_length\":10,\"output_length\":900,\"hash_ids\":[5]}\n",
      "t.jsonl");
  const auto planned = plan_trace(trace, {2, 32, 2, 5}, maker);
  ASSERT_EQ(planned.size(), 2U);
  EXPECT_EQ(planned[0].at_s, 0);
  EXPECT_EQ(planned[1].at_s, 1);
  EXPECT_EQ(planned[0].max_tokens, 5);
  EXPECT_EQ(planned[1].max_tokens, 1);
  const std::vector<std::int32_t> a = planned[0].prompt().tokens;
  const std::vector<std::int32_t> b = planned[1].prompt().tokens;
  EXPECT_EQ(a.size(), 32U + 32 + 5);  // 76 of 512 tokens are 4.75 of 32
  EXPECT_EQ(b.size(), 32U + 32 + 1);
  EXPECT_TRUE(std::equal(a.begin(), a.begin() + 64, b.begin()));
  EXPECT_NE(a[64], b[64]);
  EXPECT_GT(std::set<std::int32_t>(a.begin(), a.end()).size(), 20U);
  const auto whole = plan_trace(trace, {}, maker);
  ASSERT_EQ(whole.size(), 3U);
  EXPECT_EQ(whole[0].prompt().tokens.size(), 1100U);
  EXPECT_EQ(whole[2].prompt().tokens.size(), 10U);
  EXPECT_EQ(whole[2].max_tokens, 900);
}

TEST(Prompts, CountedTextIsExact) {
  const FakeServer server({});
  HttpClient client(parse_url(server.url()), "");
  PromptMaker maker(client, "fake-model", true, 3);
  ASSERT_EQ(maker.form(), PromptMaker::Form::counted_text);
  for (const std::int64_t n : {1, 2, 33, 200}) {
    const PromptMaker::Part part = maker.take(n);
    EXPECT_TRUE(part.tokens.empty());
    EXPECT_EQ(std::ssize(test::fake_tokens(part.text)), n) << part.text;
  }
  EXPECT_NE(maker.take(20).text, maker.take(20).text);
}

TEST(Prompts, WithoutTokenizerAWordIsAToken) {
  FakeOptions script;
  script.tokenizer = false;
  const FakeServer server(script);
  HttpClient client(parse_url(server.url()), "");
  PromptMaker maker(client, "fake-model", false, 3);
  EXPECT_EQ(maker.form(), PromptMaker::Form::estimated_text);
  EXPECT_EQ(std::ranges::count(maker.take(12).text, ' '), 12);
}

TEST(Level, SharesTheDocumentAndNothingElse) {
  const FakeServer fake({});
  Server server(parse_url(fake.url()), "", load_options(), true);
  PromptMaker maker(server.client(), "fake-model", false, 1);
  LevelRunner runner({&server}, maker, {40, 8, 2, false, 2});
  const LevelMeasurement level = runner.run(3, nullptr);
  ASSERT_EQ(level.arms.size(), 1U);
  EXPECT_EQ(level.arms[0].ok, 6);
  EXPECT_EQ(level.arms[0].concurrency, 3);
  EXPECT_EQ(level.arms[0].completion_tokens, 12);
  EXPECT_EQ(level.arms[0].prompt_tokens, 6 * 48);
  EXPECT_EQ(level.arms[0].counters->total_launches(), 12);  // without the request that warmed the cache
  EXPECT_EQ(level.rounds.size(), 2U);
  const auto bodies = fake.completions();
  ASSERT_EQ(bodies.size(), 7U);
  std::set<nlohmann::json> documents;
  std::set<nlohmann::json> questions;
  for (const auto& body : bodies) {
    const auto prompt = body.at("prompt").get<std::vector<std::int32_t>>();
    documents.insert(std::vector<std::int32_t>(prompt.begin(), prompt.begin() + 40));
    questions.insert(std::vector<std::int32_t>(prompt.begin() + 40, prompt.end()));
  }
  EXPECT_EQ(documents.size(), 1U);
  EXPECT_EQ(questions.size(), 7U);
}

TEST(Level, ColdRoundsHaveDocumentsOfTheirOwn) {
  const FakeServer fake({});
  Server server(parse_url(fake.url()), "", load_options(), false);
  PromptMaker maker(server.client(), "fake-model", false, 1);
  LevelRunner runner({&server}, maker, {40, 8, 2, true, 2});
  EXPECT_EQ(runner.run(3, nullptr).arms[0].ok, 6);
  std::set<nlohmann::json> documents;
  for (const auto& body : fake.completions()) {
    const auto prompt = body.at("prompt").get<std::vector<std::int32_t>>();
    documents.insert(std::vector<std::int32_t>(prompt.begin(), prompt.begin() + 40));
  }
  EXPECT_EQ(documents.size(), 2U);
}

TEST(Level, PairsGetTheSamePromptsInTurns) {
  const FakeServer first({});
  FakeOptions script;
  script.gap_s = 0.02;
  const FakeServer second(script);
  Server a(parse_url(first.url()), "", load_options(), true, "on");
  Server b(parse_url(second.url()), "", load_options(), true, "off");
  PromptMaker maker(a.client(), "fake-model", false, 1);
  LevelRunner runner({&a, &b}, maker, {16, 8, 4, false, 3});
  const LevelMeasurement level = runner.run(2, nullptr);
  EXPECT_EQ(level.arms[0].arm, "on");
  EXPECT_EQ(level.arms[1].ok, 6);
  const PairRatio ratio = ratio_of(level);
  EXPECT_EQ(ratio.rounds, 3U);
  EXPECT_GT(ratio.aggregate.middle, 1.5);  // the second one waits between tokens
  std::multiset<nlohmann::json> sent_first;
  std::multiset<nlohmann::json> sent_second;
  for (const auto& body : first.completions()) sent_first.insert(body);
  for (const auto& body : second.completions()) sent_second.insert(body);
  EXPECT_EQ(sent_first, sent_second);
}

TEST(Level, AFirstRequestThatFailsEndsIt) {
  FakeOptions script;
  script.token_lists = false;
  const FakeServer fake(script);
  Server server(parse_url(fake.url()), "", load_options(), false);
  PromptMaker maker(server.client(), "fake-model", false, 1);
  LevelRunner runner({&server}, maker, {40, 8, 2, false, 1});
  try {
    (void)runner.run(1, nullptr);
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("prompt must be a string"), std::string::npos) << e.what();
  }
}

TEST(Ready, WaitsAndGivesUp) {
  FakeOptions script;
  script.not_ready = 3;
  const FakeServer fake(script);
  Server server(parse_url(fake.url()), "", {}, false);
  server.wait_until_ready(20, nullptr, nullptr);
  server.find_model();
  EXPECT_EQ(server.model(), "fake-model");
  script.not_ready = 1000;
  const FakeServer never(script);
  Server waiting(parse_url(never.url()), "", {}, false);
  EXPECT_THROW(waiting.wait_until_ready(0.3, nullptr, nullptr), Error);
}

TEST(Process, OutputAndEnd) {
  Child child("sh -c 'echo first; echo last >&2; exit 3'");
  while (child.running()) usleep(1000);
  EXPECT_EQ(child.last_output(), "first\nlast");
  pid_t pid = 0;
  {
    Child sleeper("sleep 100");
    EXPECT_TRUE(sleeper.running());
    pid = sleeper.pid();
  }
  EXPECT_NE(kill(pid, 0), 0);
}

}  // namespace
}  // namespace headwater::serving
