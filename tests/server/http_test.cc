// The whole server over real sockets, with the tiny model: what clients are told. Limits and misbehaviour are in
// limits_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "engine/detokenizer.h"
#include "server/fixture.h"

namespace headwater::test {
namespace {

using nlohmann::json;

std::vector<std::int32_t> greedy(const std::vector<std::int32_t>& prompt, int max_tokens) {
  engine::Engine engine(shared_tiny_model(), tiny_options());
  const std::vector<engine::Request> requests{request_of(prompt, max_tokens)};
  return engine::run_to_completion(engine, requests).front().tokens;
}

std::string text_of(const std::vector<std::int32_t>& tokens) {
  engine::Detokenizer detokenizer(shared_tiny_model()->tokenizer());
  std::string text;
  for (const std::int32_t token : tokens) text += detokenizer.push(token);
  return text + detokenizer.finish();
}

std::string streamed_text(const std::vector<json>& events, bool chat, int index = 0) {
  std::string text;
  for (const json& event : events) {
    for (const json& choice : event.at("choices")) {
      if (choice.at("index") != index) continue;
      text += chat ? choice.at("delta").value("content", "") : choice.at("text").get<std::string>();
    }
  }
  return text;
}

TEST(Server, AnswersTheSmallRoutes) {
  TestServer server;
  Client client = server.client();
  EXPECT_EQ(client.get("/health").json(), (json{{"status", "ok"}}));
  EXPECT_EQ(client.get("/ready").json(), (json{{"status", "ready"}}));
  const json models = client.get("/v1/models").json();
  EXPECT_EQ(models.at("object"), "list");
  EXPECT_EQ(models.at("data").at(0).at("id"), "tiny");
  EXPECT_EQ(client.get("/v1/models?x=1").status, 200);
  EXPECT_EQ(client.get("/nowhere").status, 404);
  EXPECT_EQ(client.get("/nowhere").json().at("error").at("code"), "not_found");
  EXPECT_EQ(client.get("/v1/completions").status, 405);
  EXPECT_EQ(client.post_text("/health", "{}").status, 405);
}

TEST(Server, ThePageMayRunNothingForeign) {
  TestServer server;
  const Reply page = server.client().get("/");
  EXPECT_EQ(page.status, 200);
  EXPECT_TRUE(page.headers.at("content-type").starts_with("text/html"));
  const std::string& policy = page.headers.at("content-security-policy");
  EXPECT_TRUE(policy.starts_with("default-src 'none'; script-src 'nonce-")) << policy;
  EXPECT_EQ(policy.find("unsafe"), std::string::npos);
  const std::string nonce = policy.substr(policy.find("nonce-") + 6, 32);
  EXPECT_NE(page.body.find("<style nonce=\"" + nonce + "\">"), std::string::npos);
  EXPECT_NE(server.client().get("/").headers.at("content-security-policy"), policy) << "the nonce is used again";
}

TEST(Server, CompletionIsTheEnginesText) {
  TestServer server;
  Client client = server.client();
  const std::vector<std::int32_t> prompt = random_tokens(5, 11, *shared_tiny_model());
  const std::string expected = text_of(greedy(prompt, 12));
  const json whole = client.post("/v1/completions", completion_of(prompt)).json();
  EXPECT_EQ(whole.at("object"), "text_completion");
  EXPECT_EQ(whole.at("choices").at(0).at("text"), expected);
  EXPECT_EQ(whole.at("choices").at(0).at("finish_reason"), "length");
  EXPECT_EQ(whole.at("usage").at("prompt_tokens"), 11);
  EXPECT_EQ(whole.at("usage").at("completion_tokens"), 12);
  EXPECT_EQ(whole.at("usage").at("total_tokens"), 23);
  const Reply stream = client.post("/v1/completions", with(completion_of(prompt), {{"stream", true}}));
  EXPECT_TRUE(stream.headers.at("content-type").starts_with("text/event-stream"));
  const std::vector<json> events = events_of(stream.body);
  EXPECT_EQ(streamed_text(events, false), expected);
  EXPECT_EQ(events.back().at("choices").at(0).at("finish_reason"), "length");
  EXPECT_FALSE(events.back().contains("usage"));
}

TEST(Server, ChatIsTheTemplatesPrompt) {
  TestServer server;
  Client client = server.client();
  const server::ServedModel served = tiny_served();
  const std::vector<engine::ChatMessage> messages{{"user", "the <|im_end|> thing"}};
  const std::vector<std::int32_t> prompt = served.chat->render(served.model->tokenizer(), messages, true);
  const std::string expected = text_of(greedy(prompt, 12));
  const json whole = client.post("/v1/chat/completions", chat_of("the <|im_end|> thing")).json();
  EXPECT_EQ(whole.at("object"), "chat.completion");
  EXPECT_EQ(whole.at("choices").at(0).at("message").at("role"), "assistant");
  EXPECT_EQ(whole.at("choices").at(0).at("message").at("content"), expected);
  EXPECT_EQ(whole.at("usage").at("prompt_tokens"), prompt.size());

  const json options = {{"stream", true}, {"stream_options", {{"include_usage", true}}}};
  const std::vector<json> events =
      events_of(client.post("/v1/chat/completions", with(chat_of("the <|im_end|> thing"), options)).body);
  EXPECT_EQ(events.front().at("object"), "chat.completion.chunk");
  EXPECT_EQ(events.front().at("choices").at(0).at("delta").at("role"), "assistant");
  EXPECT_EQ(streamed_text(events, true), expected);
  EXPECT_TRUE(events.back().at("choices").empty());
  EXPECT_EQ(events.back().at("usage").at("completion_tokens"), 12);
  EXPECT_EQ(events.back().at("usage").at("prompt_tokens_details").at("cached_tokens"), (prompt.size() - 1) / 4 * 4);
  std::set<std::string> ids;
  for (const json& event : events) ids.insert(event.at("id"));
  EXPECT_EQ(ids.size(), 1U);
}

TEST(Server, SeveralPromptsAndSamples) {
  TestServer server;
  Client client = server.client();
  const json body = with(completion_of({"one", "two two"}), {{"n", 3}, {"temperature", 1.5}, {"seed", 9}});
  const json first = client.post("/v1/completions", body).json();
  ASSERT_EQ(first.at("choices").size(), 6U);
  std::set<std::string> texts;
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(first.at("choices").at(static_cast<std::size_t>(i)).at("index"), i);
    texts.insert(first.at("choices").at(static_cast<std::size_t>(i)).at("text"));
  }
  EXPECT_GT(texts.size(), 3U);
  // A seed gives the same again, in a stream too; no seed does not.
  EXPECT_EQ(client.post("/v1/completions", body).json().at("choices"), first.at("choices"));
  const std::vector<json> events = events_of(client.post("/v1/completions", with(body, {{"stream", true}})).body);
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(streamed_text(events, false, i), first.at("choices").at(static_cast<std::size_t>(i)).at("text"));
  }
  const json unseeded = with(body, {{"seed", nullptr}});
  EXPECT_NE(client.post("/v1/completions", unseeded).json().at("choices"),
            client.post("/v1/completions", unseeded).json().at("choices"));
}

TEST(Server, StopStringsAreNeverShown) {
  TestServer server;
  Client client = server.client();
  const std::vector<std::int32_t> prompt = shared_tiny_model()->tokenizer().encode("a stop");
  const json base = with(completion_of(prompt), {{"max_tokens", 60}, {"logprobs", 2}});
  // How much of the text each token has decided. Many of its bytes are no text by themselves: U+FFFD stands for them.
  std::string full;
  std::vector<std::size_t> decided;
  engine::Detokenizer detokenizer(shared_tiny_model()->tokenizer());
  for (const std::int32_t token : greedy(prompt, 60)) {
    full += detokenizer.push(token);
    decided.push_back(full.size() + detokenizer.held());
  }
  ASSERT_NE(full.find("\xEF\xBF\xBD"), std::string::npos);
  const auto next_character = [&](std::size_t at) {
    do ++at;
    while (at < full.size() && (static_cast<unsigned char>(full[at]) & 0xC0) == 0x80);
    return at;
  };
  int tried = 0;
  for (std::size_t at = next_character(0); at + 12 < full.size(); at = next_character(next_character(at))) {
    const std::string stop = full.substr(at, next_character(next_character(next_character(at))) - at);
    if (full.find(stop) != at) continue;
    ++tried;
    const auto num_before = std::ranges::count_if(decided, [&](std::size_t bytes) { return bytes <= at; });
    for (const bool stream : {false, true}) {
      const Reply reply = client.post("/v1/completions", with(base, {{"stop", {"never", stop}}, {"stream", stream}}));
      const std::vector<json> events = stream ? events_of(reply.body) : std::vector<json>{reply.json()};
      std::string text;
      std::int64_t told = 0;
      for (const json& event : events) {
        const json& choice = event.at("choices").at(0);
        text += choice.at("text").get<std::string>();
        if (!choice.at("logprobs").is_null()) {
          told += static_cast<std::int64_t>(choice.at("logprobs").at("tokens").size());
        }
      }
      EXPECT_EQ(text, full.substr(0, at)) << stream;
      EXPECT_EQ(events.back().at("choices").at(0).at("finish_reason"), "stop");
      EXPECT_EQ(told, num_before) << "all tokens that lie before it are told, and no other; at " << at;
    }
  }
  EXPECT_GT(tried, 8);
}

TEST(Server, LogprobsAreConsistentInAllForms) {
  engine::EngineOptions engine = tiny_options();
  engine.prefix_cache = false;  // a prompt that was computed in other pieces differs in its last bits
  TestServer server({}, engine);
  Client client = server.client();
  const json chat = with(chat_of("odds"), {{"logprobs", true}, {"top_logprobs", 3}});
  const json whole = client.post("/v1/chat/completions", chat).json().at("choices").at(0).at("logprobs").at("content");
  ASSERT_EQ(whole.size(), 12U);
  for (const json& place : whole) {
    ASSERT_EQ(place.at("top_logprobs").size(), 3U);
    EXPECT_LE(place.at("logprob"), 0.0);
    EXPECT_EQ(place.at("logprob"), place.at("top_logprobs").at(0).at("logprob")) << "greedy takes the likeliest";
    EXPECT_GE(place.at("top_logprobs").at(0).at("logprob"), place.at("top_logprobs").at(1).at("logprob"));
  }
  json streamed = json::array();
  for (const json& event : events_of(client.post("/v1/chat/completions", with(chat, {{"stream", true}})).body)) {
    const json& logprobs = event.at("choices").at(0).at("logprobs");
    if (logprobs.is_null()) continue;
    for (const json& place : logprobs.at("content")) streamed.push_back(place);
  }
  EXPECT_EQ(streamed, whole);
  EXPECT_TRUE(client.post("/v1/chat/completions", chat_of("odds")).json().at("choices").at(0).at("logprobs").is_null());
}

TEST(Server, EchoTellsThePromptToo) {
  TestServer server;
  Client client = server.client();
  const json plain = client.post("/v1/completions", with(completion_of("the echo"), {{"logprobs", 1}})).json();
  const Reply reply =
      client.post("/v1/completions", with(completion_of("the echo"), {{"echo", true}, {"logprobs", 1}}));
  const json echo = reply.json();
  EXPECT_EQ(echo.at("choices").at(0).at("text").get<std::string>(),
            "the echo" + plain.at("choices").at(0).at("text").get<std::string>());
  const json& logprobs = echo.at("choices").at(0).at("logprobs");
  const std::size_t prompt_tokens = echo.at("usage").at("prompt_tokens");
  ASSERT_EQ(logprobs.at("tokens").size(), prompt_tokens + 12);
  EXPECT_TRUE(logprobs.at("token_logprobs").at(0).is_null());
  EXPECT_LT(logprobs.at("token_logprobs").at(1), 0.0);
  EXPECT_EQ(echo.at("usage").at("prompt_tokens_details").at("cached_tokens"), 0) << "the prefix cache is bypassed";
  std::string spelled;
  for (std::size_t i = 0; i < prompt_tokens; ++i) {
    EXPECT_EQ(logprobs.at("text_offset").at(i), spelled.size());
    spelled += logprobs.at("tokens").at(i).get<std::string>();
  }
  EXPECT_EQ(spelled, "the echo");
  // Scoring alone: nothing is generated.
  const json score = client
                         .post("/v1/completions",
                               with(completion_of("the echo"), {{"echo", true}, {"logprobs", 1}, {"max_tokens", 0}}))
                         .json();
  EXPECT_EQ(score.at("choices").at(0).at("text"), "the echo");
  EXPECT_EQ(score.at("choices").at(0).at("logprobs").at("tokens").size(), prompt_tokens);
  EXPECT_EQ(score.at("usage").at("completion_tokens"), 0);
  EXPECT_EQ(score.at("usage").at("total_tokens"), prompt_tokens);
}

TEST(Server, EveryChoiceTellsThePrompt) {
  TestServer server;
  const json body =
      with(completion_of({"one", "the other"}), {{"n", 3}, {"echo", true}, {"logprobs", 2}, {"temperature", 1}});
  for (const bool stream : {false, true}) {
    const Reply reply = server.client().post("/v1/completions", with(body, {{"stream", stream}}));
    const std::vector<json> events = stream ? events_of(reply.body) : std::vector<json>{reply.json()};
    std::map<int, json> first;  // logprobs of each choice
    for (const json& event : events) {
      for (const json& choice : event.at("choices")) {
        if (!choice.at("logprobs").is_null()) first.try_emplace(choice.at("index"), choice.at("logprobs"));
      }
    }
    ASSERT_EQ(first.size(), 6U);
    for (int i = 0; i < 6; ++i) {
      const json& expected = first.at(i / 3 * 3);
      const std::size_t prompt_tokens = shared_tiny_model()->tokenizer().encode(i < 3 ? "one" : "the other").size();
      ASSERT_GT(prompt_tokens, 1U);
      for (const std::string list : {"tokens", "token_logprobs", "top_logprobs", "text_offset"}) {
        ASSERT_GE(first.at(i).at(list).size(), prompt_tokens) << list << " of choice " << i;
        for (std::size_t place = 0; place < prompt_tokens; ++place) {
          EXPECT_EQ(first.at(i).at(list).at(place), expected.at(list).at(place)) << list << " of choice " << i;
        }
      }
    }
  }
}

TEST(Server, BiasDecides) {
  TestServer server;
  const auto token = shared_tiny_model()->tokenizer().encode("z").front();
  const json body = with(completion_of("bias"), {{"logit_bias", {{std::to_string(token), 100}}}, {"max_tokens", 5}});
  EXPECT_EQ(server.client().post("/v1/completions", body).json().at("choices").at(0).at("text"), "zzzzz");
  const json wrong = with(completion_of("bias"), {{"logit_bias", {{"99999999", 1}}}});
  const Reply refused = server.client().post("/v1/completions", wrong);
  EXPECT_EQ(refused.status, 400);
  EXPECT_EQ(refused.json().at("error").at("param"), "logit_bias");
  const json twice = with(completion_of("bias"), {{"logit_bias", {{"5", 1}, {"05", 2}}}});
  EXPECT_EQ(server.client().post("/v1/completions", twice).json().at("error").at("message"),
            "logit_bias: the key \"05\" is not a token id");
}

TEST(Server, TokenizesThereAndBack) {
  TestServer server;
  Client client = server.client();
  const json tokens = client.post("/tokenize", json{{"prompt", "the and \xC3\xA9"}}).json();
  EXPECT_EQ(tokens.at("count"), tokens.at("tokens").size());
  EXPECT_EQ(client.post("/detokenize", json{{"tokens", tokens.at("tokens")}}).json().at("prompt"), "the and \xC3\xA9");
  const json chat = client.post("/tokenize", json{{"messages", {{{"role", "user"}, {"content", "x"}}}}}).json();
  EXPECT_EQ(chat.at("tokens").at(0), *shared_tiny_model()->tokenizer().special("<|im_start|>"));
  EXPECT_EQ(client.post("/detokenize", json{{"tokens", {1 << 30}}}).status, 400);
}

TEST(Server, RefusesInOpenaisShape) {
  TestServer server;
  Client client = server.client();
  const auto error = [&](const json& body, int status) {
    const Reply reply = client.post("/v1/completions", body);
    EXPECT_EQ(reply.status, status) << body;
    return reply.json().at("error");
  };
  EXPECT_EQ(error(with(completion_of("x"), {{"model", "other"}}), 404).at("code"), "model_not_found");
  EXPECT_EQ(error(with(completion_of("x"), {{"temperature", "hot"}}), 400).at("param"), "temperature");
  EXPECT_EQ(error(completion_of(std::string(5000, 'x')), 400).at("code"), "context_length_exceeded");
  EXPECT_EQ(error(with(completion_of("x"), {{"max_tokens", 1024}}), 400).at("code"), "context_length_exceeded");
  EXPECT_EQ(error(completion_of(json::array({1 << 30})), 400).at("param"), "prompt");
  EXPECT_EQ(client.post_text("/v1/completions", "{\"model\":").json().at("error").at("type"), "invalid_request_error");
  EXPECT_EQ(client.post_text("/v1/completions", "\xFF\xFE").status, 400);
  EXPECT_EQ(client.post_text("/v1/completions", std::string(100'000, '[')).status, 400);
  client.send(
      "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}");
  EXPECT_EQ(client.read_reply().status, 415);
}

TEST(Server, AsksForTheKey) {
  server::ServerOptions options;
  options.api_key = "se cret";
  TestServer server(options);
  EXPECT_EQ(server.client().get("/health").status, 200);
  for (const std::string headers : {"", "Authorization: Bearer wrong\r\n", "Authorization: Bearer se cre\r\n",
                                    "Authorization: Bearer se crets\r\n", "Authorization: Basic se cret\r\n"}) {
    for (const std::string path : {"/v1/models", "/metrics", "/v1/headwater/forest"}) {
      const Reply refused = server.client().get(path, headers);
      EXPECT_EQ(refused.status, 401) << path << headers;
      EXPECT_EQ(refused.json().at("error").at("code"), "invalid_api_key");
    }
    EXPECT_EQ(server.client().post_text("/tokenize", "{\"prompt\":\"x\"}", headers).status, 401);
  }
  EXPECT_EQ(server.client().get("/v1/models", "Authorization: Bearer se cret\r\n").status, 200);
}

TEST(Server, MetricsTellWhatRan) {
  engine::EngineOptions engine = tiny_options();
  engine.plan.cascade = CascadeSwitch::on;
  TestServer server({}, engine);
  Client client = server.client();
  const std::string document(200, 'd');
  client.post("/v1/completions", with(completion_of(document), {{"n", 4}}));
  const std::string text = client.get("/metrics").body;
  const auto value = [&](const std::string& name) {
    const std::size_t at = text.find("\n" + name + " ");
    return at == std::string::npos ? -1.0 : std::stod(text.substr(at + name.size() + 2));
  };
  EXPECT_GT(value("headwater_decode_launches_total{path=\"cascade\"}"), 0);
  EXPECT_GT(value("headwater_cascade_shared_tokens_total"), 0);
  EXPECT_GE(value("headwater_cascade_member_sequences_total"), 2 * value("headwater_cascade_spans_total"));
  EXPECT_GT(value("headwater_kv_bytes_saved_total"), 0);
  EXPECT_EQ(value("headwater_cascade_failures_total"), 0);
  EXPECT_EQ(value("headwater_generated_tokens_total"), 48);
  EXPECT_EQ(value("headwater_time_to_first_token_seconds_count"), 4);
  EXPECT_EQ(value("headwater_inter_token_seconds_count"), 44);
  EXPECT_EQ(value("headwater_requests_total{endpoint=\"completions\",outcome=\"length\"}"), 1);
  EXPECT_EQ(value("headwater_kv_pages{state=\"used\"}"), 0);
  // Every sample line belongs to a metric with HELP and TYPE.
  std::set<std::string> described;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("# HELP ")) described.insert(line.substr(7, line.find(' ', 7) - 7));
    if (line.empty() || line[0] == '#') continue;
    std::string name = line.substr(0, line.find_first_of(" {"));
    for (const std::string suffix : {"_bucket", "_sum", "_count"}) {
      if (name.ends_with(suffix) && described.contains(name.substr(0, name.size() - suffix.size()))) {
        name.resize(name.size() - suffix.size());
      }
    }
    EXPECT_TRUE(described.contains(name)) << line;
    EXPECT_NE(text.find("# TYPE " + name + " "), std::string::npos) << line;
  }
}

TEST(Server, OffMeansNoCascadeAndSaysWhy) {
  engine::EngineOptions engine = tiny_options();
  engine.plan.cascade = CascadeSwitch::off;
  server::ServerOptions options;
  options.cascade_off = "--cascade off";
  TestServer server(options, engine);
  Client client = server.client();
  client.post("/v1/completions", with(completion_of(std::string(200, 'd')), {{"n", 4}}));
  const std::string text = client.get("/metrics").body;
  EXPECT_NE(text.find("headwater_decode_launches_total{path=\"cascade\"} 0\n"), std::string::npos);
  EXPECT_NE(text.find("headwater_cascade_off{reason=\"--cascade off\"} 1\n"), std::string::npos);
  EXPECT_TRUE(client.get("/v1/headwater/forest").json().at("spans").empty());
}

TEST(Server, ForestShowsTheLastStep) {
  engine::EngineOptions engine = tiny_options();
  engine.plan.cascade = CascadeSwitch::on;
  TestServer server({}, engine);
  Client client = server.client();
  const json before = client.get("/v1/headwater/forest").json();
  EXPECT_EQ(before.at("step"), 0);
  EXPECT_TRUE(before.at("requests").empty());
  const std::string document(100, 'd');
  const json answer = client.post("/v1/completions", with(completion_of(document + "a"), {{"n", 4}})).json();
  const json forest = client.get("/v1/headwater/forest").json();
  EXPECT_EQ(forest.at("path"), "cascade");
  EXPECT_EQ(forest.at("num_requests"), 4);
  ASSERT_EQ(forest.at("requests").size(), 4U);
  for (const json& lane : forest.at("requests")) {
    EXPECT_EQ(lane.at("id"), answer.at("id"));
    EXPECT_EQ(lane.at("prompt_tokens"), 101);
    EXPECT_EQ(lane.at("tokens"), 112);
  }
  ASSERT_FALSE(forest.at("spans").empty());
  const json& all = forest.at("spans").at(0);
  EXPECT_EQ(all.at("begin"), 0);
  EXPECT_EQ(all.at("tokens"), 100);
  EXPECT_EQ(all.at("first"), 0);
  EXPECT_EQ(all.at("members"), 4);
  EXPECT_EQ(all.at("depth"), 0);
  EXPECT_EQ(all.at("split"), true);
  EXPECT_LT(forest.at("kv_bytes_read"), forest.at("kv_bytes_flat"));
}

TEST(Server, AFailedCascadeIsCountedAndChangesNoToken) {
  engine::EngineOptions engine = tiny_options();
  engine.plan.cascade = CascadeSwitch::on;
  const json body = with(completion_of(std::string(100, 'd')), {{"n", 4}});
  TestServer sound({}, engine);
  const json expected = sound.client().post("/v1/completions", body).json().at("choices");
  engine.inject_cascade_failure = [](std::int64_t, int layer) { return layer == 1; };
  TestServer failing({}, engine);
  EXPECT_EQ(failing.client().post("/v1/completions", body).json().at("choices"), expected);
  const std::string text = failing.client().get("/metrics").body;
  EXPECT_NE(text.find("headwater_cascade_failures_total 11\n"), std::string::npos) << "one a decode step";
  EXPECT_NE(text.find("headwater_decode_launches_total{path=\"cascade\"} 0\n"), std::string::npos);
}

}  // namespace
}  // namespace headwater::test
