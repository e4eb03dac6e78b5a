// What comes from outside: URLs, server-sent events, metrics, streamed answers.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "headwater/error.h"
#include "serving/completion.h"
#include "serving/prometheus_text.h"
#include "serving/sse.h"
#include "serving/url.h"

namespace headwater::serving {
namespace {

TEST(Url, PartsAndText) {
  const auto parts = [](const char* text) {
    const Url url = parse_url(text);
    return url.host + "|" + url.port + "|" + url.base;
  };
  EXPECT_EQ(parts("http://127.0.0.1:8000"), "127.0.0.1|8000|");
  EXPECT_EQ(parts("http://host"), "host|80|");
  EXPECT_EQ(parts("host:1"), "host|1|");
  EXPECT_EQ(parts("http://host:8000/v1"), "host|8000|");
  EXPECT_EQ(parts("http://host:8000/v1/"), "host|8000|");
  EXPECT_EQ(parts("http://host/api/v1"), "host|80|/api");
  EXPECT_EQ(parts("http://[::1]:65535/x/"), "::1|65535|/x");
  EXPECT_EQ(parse_url("http://[::1]:9/x").text(), "http://[::1]:9/x");
}

TEST(Url, Refused) {
  for (const char* text :
       {"https://host", "http://", "http://:80", "http://host:", "http://host:0", "http://host:65536", "http://host:8x",
        "http://[::1", "http://[::1]8", "http://a b", "http://u@host", "http://h?q", "http://h\r\nX: y"}) {
    try {
      (void)parse_url(text);
      ADD_FAILURE() << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(e.what()).find(std::string("got \"") + text + "\""), std::string::npos) << e.what();
    }
  }
}

std::vector<std::string> events(const std::vector<std::string>& pieces) {
  std::vector<std::string> out;
  SseParser parser;
  for (const std::string& piece : pieces) parser.feed(piece, [&](std::string_view data) { out.emplace_back(data); });
  return out;
}

TEST(Sse, EveryWayToCutAStream) {
  const std::string stream =
      ": comment\r\n\r\ndata: one\n\ndata:two\r\ndata:  three\r\n\r\nevent: x\rid: 7\rdata: four\r\rdata\n\ndatax: "
      "no\n\ndata: cut off";
  const std::vector<std::string> expected = {"one", "two\n three", "four", ""};
  EXPECT_EQ(events({stream}), expected);
  for (std::size_t first = 0; first <= stream.size(); ++first) {
    for (std::size_t second = first; second <= stream.size(); second += 7)
      ASSERT_EQ(events({stream.substr(0, first), stream.substr(first, second - first), stream.substr(second)}),
                expected)
          << first << " " << second;
  }
}

constexpr const char* kMetrics =
    "# HELP headwater_decode_launches_total Launches, by path.\n"
    "# TYPE headwater_decode_launches_total counter\n"
    "headwater_decode_launches_total{path=\"flat\",layer=\"a, b\"} 10\n"
    "headwater_decode_launches_total{layer=\"\\\"}\\\\\", path=\"flat\"} 2 1700000000\n"
    "headwater_decode_launches_total{path=\"cascade\"} 3e1\r\n"
    "headwater_decode_launches_total_created{path=\"cascade\"} 1e9\n"
    "headwater_decode_launches_total{path=\"gather\n"
    "headwater_decode_launches_total{path=\"odd\"} NaN\n"
    "headwater_kv_bytes_read_total 1.5e9\n"
    "headwater_kv_bytes_saved_total 500000000\n"
    "headwater_cascade_spans_total 4\n";

TEST(Prometheus, SumsByLabel) {
  const auto sums = sum_by_label(kMetrics, "headwater_decode_launches_total", "path");
  EXPECT_EQ(sums, (std::map<std::string, double>{{"flat", 12}, {"cascade", 30}}));
  EXPECT_EQ(sum_of(kMetrics, "headwater_kv_bytes_read_total"), 1.5e9);
  EXPECT_EQ(sum_of(kMetrics, "headwater_kv_bytes"), std::nullopt);
  EXPECT_TRUE(sum_by_label("", "x", "path").empty());
}

TEST(Prometheus, DifferencesOfCounters) {
  Counters before;
  before.launches = {{"flat", 2}};
  before.totals = {{"kv_bytes_read", 1e9}};
  Counters sum;
  sum.add(before, Counters::from(kMetrics));
  sum.add(before, Counters::from(kMetrics));
  EXPECT_EQ(sum.launches, (std::map<std::string, double>{{"flat", 20}, {"cascade", 60}}));
  EXPECT_EQ(sum.totals,
            (std::map<std::string, double>{{"kv_bytes_read", 1e9}, {"kv_bytes_saved", 1e9}, {"cascade_spans", 8}}));
  EXPECT_EQ(sum.total("cascade_spans"), 8);
  EXPECT_EQ(sum.total("cascade_shared_tokens"), 0);
  EXPECT_EQ(sum.total_launches(), 80);
  EXPECT_EQ(sum.cascade_launches(), 60);
}

TEST(Body, CompletionsAndChat) {
  RequestOptions options;
  options.model = "m";
  const auto body = nlohmann::json::parse(completion_body(options, {{1, 2, 3}, "", ""}, 5));
  EXPECT_EQ(body.at("prompt"), (nlohmann::json{1, 2, 3}));
  EXPECT_EQ(body.at("max_tokens"), 5);
  EXPECT_EQ(body.at("ignore_eos"), true);
  EXPECT_EQ(body.at("stream_options").at("include_usage"), true);
  EXPECT_EQ(completion_path(options), "/v1/completions");
  options.ignore_eos = false;
  const auto text = nlohmann::json::parse(completion_body(options, {{}, "a", " b"}, 5));
  EXPECT_EQ(text.at("prompt"), "a b");
  EXPECT_FALSE(text.contains("ignore_eos"));
  options.chat = true;
  const auto chat = nlohmann::json::parse(completion_body(options, {{}, "a", " b"}, 5));
  EXPECT_EQ(chat.at("messages").size(), 2U);
  EXPECT_EQ(chat.at("messages")[0].at("role"), "system");
  EXPECT_EQ(chat.at("messages")[1].at("content"), " b");
  EXPECT_EQ(completion_path(options), "/v1/chat/completions");
}

/// One answer, in pieces that come at 1, 2, 3, ... seconds.
Record read(const std::vector<std::string>& pieces, int status = 200, const std::string& transport_error = "") {
  CompletionReader reader;
  reader.on_status(status);
  double now = 0;
  for (const std::string& piece : pieces) reader.on_body(piece, ++now);
  reader.on_end(transport_error, now + 1);
  return reader.record;
}

TEST(Reader, TimesAndCounts) {
  const Record record = read({"data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
                              "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: {\"choi",
                              "ces\":[{\"text\":\"b\",\"finish_reason\":null}]}\n\n",
                              "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"length\"}]}\n\n",
                              "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3,"
                              "\"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\ndata: [DONE]\n\n"});
  EXPECT_TRUE(record.ok()) << record.error;
  EXPECT_EQ(record.arrivals, (std::vector<double>{2, 3}));
  EXPECT_EQ(record.end, 6);
  EXPECT_EQ(record.prompt_tokens, 9);
  EXPECT_EQ(record.completion_tokens, 3);
  EXPECT_EQ(record.cached_tokens, 8);
  EXPECT_FALSE(record.counted_events);
}

TEST(Reader, WithoutUsageEventsAreCounted) {
  const Record record =
      read({"data: {\"choices\":[{\"text\":\"a\"}],\"usage\":null}\n\ndata: {\"choices\":[{\"text\":\"b\"}]}\n\n"
            "data: [DONE]\n\n"});
  EXPECT_TRUE(record.ok()) << record.error;
  EXPECT_EQ(record.completion_tokens, 2);
  EXPECT_TRUE(record.counted_events);
}

TEST(Reader, WhatIsNotOk) {
  const std::string token = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
  const std::string done = "data: [DONE]\n\n";
  EXPECT_EQ(read({token}).error, "the stream ended without [DONE]");
  EXPECT_EQ(read({done}).error, "an answer without text");
  EXPECT_EQ(read({token, done}, 200, "receive: end of stream").error, "receive: end of stream");
  EXPECT_EQ(read({token, "data: {\"error\":{\"message\":\"no pages\"}}\n\n", done}).error,
            "error in the stream: no pages");
  EXPECT_EQ(read({token, "data: [1]\n\n", done}).error, "an event that is not a JSON object: [1]");
  EXPECT_EQ(read({R"({"error":{"message":"too)", R"( long","code":400}})"}, 400).error, "status 400: too long");
  EXPECT_EQ(read({R"({"object":"error","message":"too long"})"}, 400).error, "status 400: too long");
  EXPECT_EQ(read({"<h1>\nno</h1>"}, 502).error, "status 502: <h1> no</h1>");
  EXPECT_EQ(read({token, done}, 404).error.substr(0, 12), "status 404: ");
}

}  // namespace
}  // namespace headwater::serving
