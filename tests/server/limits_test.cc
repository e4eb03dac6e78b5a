// Limits and misbehaviour: whoever does harm is stopped, the others are answered, and nothing is left behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "server/fixture.h"

namespace headwater::test {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;

json long_stream(int max_tokens = 900) {
  return with(completion_of("long"), {{"stream", true}, {"max_tokens", max_tokens}});
}

void expect_others_are_answered(TestServer& server) {
  EXPECT_EQ(server.client().post("/v1/completions", completion_of("others")).status, 200);
}

TEST(ServerLimits, OversizedBodiesAndHeaders) {
  server::ServerOptions options;
  options.http.max_body_bytes = 10'000;
  options.http.max_header_bytes = 2'000;
  TestServer server(options);
  const Reply body = server.client().post_text("/v1/completions", std::string(10'001, ' '));
  EXPECT_EQ(body.status, 413);
  EXPECT_EQ(body.headers.at("connection"), "close");
  EXPECT_EQ(body.json().at("error").at("type"), "invalid_request_error");
  EXPECT_EQ(server.client().post_text("/v1/completions", std::string(9'999, ' ')).status, 400) << "read, but no JSON";
  // The same in chunks, whose sum nobody announces.
  Client chunked = server.client();
  chunked.send(
      "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: "
      "chunked\r\n\r\n");
  for (int i = 0; i < 4; ++i) chunked.send("1000\r\n" + std::string(0x1000, ' ') + "\r\n");
  EXPECT_EQ(chunked.read_reply().status, 413);
  EXPECT_EQ(server.client().get("/health", "X-Long: " + std::string(3'000, 'x') + "\r\n").status, 431);
  expect_others_are_answered(server);
}

TEST(ServerLimits, MalformedHttp) {
  TestServer server;
  const std::string post = "POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\n";
  // The status; 0: closed without a word, since the request is only cut off.
  const std::pair<std::string, int> cases[] = {
      {"\r\n\r\n\r\n", 400},
      {"GET\r\n\r\n", 400},
      {"\x16\x03\x01\x02", 400},
      {"GET / HTTP/9.9\r\n\r\n", 400},
      {"GET /health HTTP/1.1\r\nHo st: x\r\n\r\n", 400},
      {"GET /health HTTP/1.1\r\nHost: local", 0},
      {post + "Content-Length: x\r\n\r\n", 400},
      {post + "Content-Length: -1\r\n\r\n", 400},
      {post + "Content-Length: 20\r\n\r\n{}", 0},
      {post + "Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400},
      {post + "Transfer-Encoding: chunked\r\n\r\n5\r\n{}", 0},
  };
  for (const auto& [text, status] : cases) {
    Client client = server.client();
    client.send(text);
    client.close_sending();
    const Reply reply = client.read_reply();
    EXPECT_EQ(reply.status, status) << text;
    if (status == 400) {
      EXPECT_EQ(reply.json().at("error").at("type"), "invalid_request_error") << text;
    }
    EXPECT_TRUE(client.closed_by_server());
  }
  expect_others_are_answered(server);
}

TEST(ServerLimits, SlowWritersGet408) {
  server::ServerOptions options;
  options.http.read_timeout = 150ms;
  TestServer server(options);
  Client head = server.client();
  head.send("POST /v1/comple");
  EXPECT_EQ(head.read_reply().status, 408);
  Client body = server.client();
  body.send("POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{");
  EXPECT_EQ(body.read_reply().status, 408);
  EXPECT_TRUE(body.closed_by_server());
  expect_others_are_answered(server);
  EXPECT_EQ(server.metric("headwater_http_timeouts_total"), 2);
}

TEST(ServerLimits, IdleConnectionsAreClosed) {
  server::ServerOptions options;
  options.http.idle_timeout = 100ms;
  TestServer server(options);
  Client client = server.client();
  EXPECT_EQ(client.get("/health").status, 200);
  EXPECT_EQ(client.get("/health").status, 200);
  EXPECT_TRUE(client.closed_by_server());
  EXPECT_TRUE(client.rest().empty()) << "closed without a word";
}

TEST(ServerLimits, TooManyConnectionsGet503) {
  server::ServerOptions options;
  options.http.max_connections = 3;
  TestServer server(options);
  std::vector<Client> clients;
  for (int i = 0; i < 3; ++i) {
    clients.push_back(server.client());
    EXPECT_EQ(clients.back().get("/health").status, 200);
  }
  const Reply refused = server.client().read_reply();
  EXPECT_EQ(refused.status, 503);
  EXPECT_TRUE(refused.headers.contains("retry-after"));
  clients.pop_back();
  for (int i = 0; i < 100; ++i) {  // until the server has noticed
    if (server.client().get("/health").status == 200) return;
    std::this_thread::sleep_for(10ms);
  }
  FAIL() << "a place that became free was not given away";
}

TEST(ServerLimits, TooManyRequestsGet429) {
  server::ServerOptions options;
  options.loop.max_pending = 1;
  TestServer server(options);
  Client busy = server.client();
  busy.send(Client::request_text("POST", "/v1/completions", long_stream().dump()));
  ASSERT_EQ(busy.read_head().status, 200);
  ASSERT_FALSE(busy.read_chunk().empty());
  const Reply refused = server.client().post("/v1/completions", completion_of("x"));
  EXPECT_EQ(refused.status, 429);
  EXPECT_TRUE(refused.headers.contains("retry-after"));
  EXPECT_EQ(refused.json().at("error").at("code"), "queue_full");
  const Reply never = server.client().post("/v1/completions", completion_of({"x", "y"}));
  EXPECT_EQ(never.status, 400) << "more prompts than are ever taken";
  EXPECT_EQ(never.json().at("error").at("param"), "prompt");
  busy.close();
  server.expect_nothing_leaked();
  expect_others_are_answered(server);
}

TEST(ServerLimits, AClientThatGoesAwayIsCancelled) {
  TestServer server;
  const auto steps = [](const engine::Engine& e) { return e.stats().steps; };
  int cancelled = 0;
  for (const bool stream : {true, false}) {
    for (const std::string ahead : {"", "\r\n", "GET /health HTTP/1.1\r\n\r\n"}) {  // sent after its request
      Client client = server.client();
      Pause first(server);
      (void)first.held();
      client.send(Client::request_text("POST", "/v1/completions", with(long_stream(), {{"stream", stream}}).dump()));
      client.send(ahead);
      ASSERT_TRUE(server.metric_becomes(kPending, 1));
      Pause second(server);
      first.end();
      EXPECT_EQ(second.held().samples_running, 1);
      client.close();
      EXPECT_TRUE(server.metric_becomes(kCancelled, ++cancelled)) << "stream " << stream << ", ahead: " << ahead;
      Pause third(server);  // asked when the cancel is in the inbox: after one step more
      second.end();
      EXPECT_EQ(third.held().samples_running, 0);
    }
  }
  EXPECT_LE(server.ask(steps), 2 * cancelled) << "one that computes, one that tells of the end";
}

TEST(ServerLimits, AHalfClosedClientCountsAsGone) {
  TestServer server;
  Client client = server.client();
  client.send(Client::request_text("POST", "/v1/completions", long_stream().dump()));
  ASSERT_EQ(client.read_head().status, 200);
  client.close_sending();
  server.expect_nothing_leaked();
  EXPECT_EQ(server.metric("headwater_requests_total{endpoint=\"completions\",outcome=\"cancelled\"}"), 1);
}

TEST(ServerLimits, AReaderThatDoesNotReadIsDroppedAndOthersGoOn) {
  server::ServerOptions options;
  options.http.max_output_bytes = 32 << 10;
  TestServer server(options);
  Client lazy(server.port(), 4096);
  // Far more than the 4 MB that a socket buffers, however soon single answers end; nobody reads them.
  const json much = with(long_stream(), {{"n", 96}, {"logprobs", 5}, {"temperature", 1}, {"seed", 1}});
  lazy.send(Client::request_text("POST", "/v1/completions", much.dump()));
  for (int i = 0; i < 3000 && server.metric("headwater_http_dropped_slow_total") < 1; ++i) {
    expect_others_are_answered(server);
  }
  EXPECT_EQ(server.metric("headwater_http_dropped_slow_total"), 1);
  server.expect_nothing_leaked();
}

/// An answer of some 8 MB, nearly all of it in one piece: a thousand places for each of 64 choices.
json large_answer(bool stream) {
  return with(completion_of(std::string(1000, 'e')),
              {{"echo", true}, {"logprobs", 5}, {"n", 64}, {"max_tokens", 3}, {"stream", stream}});
}

TEST(ServerLimits, ALargeStepDropsNoReaderThatReads) {
  server::ServerOptions options;
  options.http.max_output_bytes = 32 << 10;
  TestServer server(options);
  const Reply reply = server.client().post("/v1/completions", large_answer(true));
  EXPECT_EQ(reply.status, 200);
  EXPECT_GT(reply.body.size(), 4U << 20);
  EXPECT_GT(events_of(reply.body).size(), 64U);
  EXPECT_EQ(server.metric("headwater_http_dropped_slow_total"), 0);
}

TEST(ServerLimits, ASlowReaderThatGoesOnGetsItAll) {
  server::ServerOptions options;
  options.http.write_timeout = 1'500ms;
  TestServer server(options);
  Client slow(server.port(), 64 << 10);
  slow.send(Client::request_text("POST", "/v1/completions", large_answer(false).dump()));
  Reply reply = slow.read_head();
  ASSERT_EQ(reply.status, 200);
  std::size_t left = std::stoul(reply.headers.at("content-length"));
  EXPECT_GT(left, 4U << 20);
  const auto begin = std::chrono::steady_clock::now();
  while (left > 0) {
    const std::size_t piece = std::min<std::size_t>(left, 128 << 10);
    reply.body += slow.read_exactly(piece);
    left -= piece;
    std::this_thread::sleep_for(100ms);
  }
  EXPECT_GT(std::chrono::steady_clock::now() - begin, 4s) << "more than twice the timeout";
  EXPECT_EQ(reply.json().at("choices").size(), 64U);
}

TEST(ServerLimits, AReaderThatStandsStillIsTimedOut) {
  server::ServerOptions options;
  options.http.write_timeout = 200ms;
  TestServer server(options);
  Client lazy(server.port(), 4096);
  lazy.send(Client::request_text("POST", "/v1/completions", large_answer(false).dump()));
  EXPECT_TRUE(server.metric_becomes("headwater_http_timeouts_total", 1));
  server.expect_nothing_leaked();
}

TEST(ServerLimits, TenThousandConnectionsOpenedAndDropped) {
  TestServer server;
  Client stream = server.client();
  stream.send(Client::request_text("POST", "/v1/completions", long_stream(600).dump()));
  for (int i = 0; i < 10'000; ++i) {
    Client client = server.client();
    if (i % 3 == 1) client.send("POST /v1/completions HTTP/1.1\r\nContent-Le");
    if (i % 3 == 2) client.send(Client::request_text("POST", "/v1/completions", long_stream().dump()));
  }
  const Reply reply = stream.read_reply();
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(events_of(reply.body).back().at("choices").at(0).at("finish_reason"), "length");
  server.expect_nothing_leaked();
  stream.close();
  EXPECT_TRUE(server.metric_becomes("headwater_http_connections", 1));
}

TEST(ServerLimits, TwoHundredFiftySixStreamsAtOnce) {
  engine::EngineOptions engine = tiny_options();
  engine.num_pages = 8192;
  TestServer server({}, engine);
  std::vector<Client> clients;
  for (int i = 0; i < 256; ++i) {
    clients.push_back(server.client());
    clients.back().send(Client::request_text(
        "POST", "/v1/completions", with(long_stream(64), {{"prompt", "number " + std::to_string(i)}}).dump()));
  }
  for (Client& client : clients) {
    ASSERT_EQ(client.read_head().status, 200);
    ASSERT_FALSE(client.read_chunk().empty());
  }
  for (Client& client : clients) {
    std::string last;
    for (std::string chunk; !(chunk = client.read_chunk()).empty();) last = chunk;
    EXPECT_TRUE(last.ends_with("data: [DONE]\n\n"));
  }
  server.expect_nothing_leaked();
  EXPECT_EQ(server.metric("headwater_requests_total{endpoint=\"completions\",outcome=\"length\"}"), 256);
}

TEST(ServerLimits, KeepAlivePipeliningAndOldClients) {
  TestServer server;
  Client client = server.client();
  const std::string tokenize = Client::request_text("POST", "/tokenize", "{\"prompt\":\"x\"}");
  client.send(tokenize + Client::request_text("GET", "/health") + tokenize);  // three at once
  EXPECT_TRUE(client.read_reply().json().contains("tokens"));
  EXPECT_EQ(client.read_reply().json().at("status"), "ok");
  EXPECT_TRUE(client.read_reply().json().contains("tokens"));

  Client patient = server.client();
  patient.send(
      "POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: "
      "14\r\n\r\n");
  EXPECT_EQ(patient.read_head().status, 100);
  patient.send("{\"prompt\":\"x\"}");
  EXPECT_EQ(patient.read_reply().status, 200);

  Client chunked = server.client();
  chunked.send("POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n");
  chunked.send("5\r\n{\"pro\r\n9\r\nmpt\":\"x\"}\r\n0\r\n\r\n");
  EXPECT_EQ(chunked.read_reply().status, 200);

  Client old = server.client();
  const std::string body = long_stream(5).dump();
  old.send("POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: " +
           std::to_string(body.size()) + "\r\n\r\n" + body);
  const Reply reply = old.read_reply();
  EXPECT_FALSE(reply.headers.contains("transfer-encoding"));
  EXPECT_FALSE(events_of(reply.body).empty());
}

TEST(ServerLimits, PagesRunOutForOneAndNotForOthers) {
  engine::EngineOptions engine = tiny_options();
  engine.num_pages = 24;  // of 4 tokens
  TestServer server({}, engine);
  const Reply large = server.client().post("/v1/completions", completion_of(std::string(200, 'q')));
  EXPECT_EQ(large.status, 400);
  EXPECT_EQ(large.json().at("error").at("code"), "context_length_exceeded");
  EXPECT_EQ(large.json().at("error").at("message"), "the whole KV cache holds 96 tokens, the prompt alone has 200");
  // What fits to the last token is served, also where all choices together do not; one token more never will be.
  for (const int n : {1, 3}) {
    const json fits = with(completion_of(std::string(40, 'q')), {{"max_tokens", 57}, {"n", n}});
    const Reply served = server.client().post("/v1/completions", fits);
    EXPECT_EQ(served.status, 200) << served.body;
    EXPECT_EQ(served.json().at("usage").at("completion_tokens"), 57 * n);
    for (const bool stream : {false, true}) {
      const json grown = with(fits, {{"max_tokens", 58}, {"stream", stream}});
      const Reply refused = server.client().post("/v1/completions", grown);
      EXPECT_EQ(refused.status, 400);
      EXPECT_EQ(refused.json().at("error").at("code"), "context_length_exceeded");
      EXPECT_FALSE(refused.headers.contains("retry-after"));
    }
  }
  EXPECT_EQ(server.client().get("/v1/models").json().at("data").at(0).at("max_model_len"), 97);
  const json chat = with(chat_of("to the end"), {{"max_tokens", nullptr}});
  const json usage = server.client().post("/v1/chat/completions", chat).json().at("usage");
  EXPECT_EQ(usage.at("total_tokens"), 97) << "without max_tokens as many as fit";
  expect_others_are_answered(server);
}

TEST(ServerLimits, ShutDownDrains) {
  TestServer server;
  Client idle = server.client();
  EXPECT_EQ(idle.get("/health").status, 200);
  Client busy = server.client();
  busy.send(Client::request_text("POST", "/v1/completions", long_stream().dump()));
  ASSERT_EQ(busy.read_head().status, 200);
  server->shut_down();
  EXPECT_TRUE(idle.closed_by_server());
  Client late = server.client();
  const Reply refused = late.post("/v1/completions", completion_of("late"));
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.json().at("error").at("code"), "shutting_down");
  EXPECT_TRUE(refused.headers.contains("retry-after"));
  std::string body;
  for (std::string chunk; !(chunk = busy.read_chunk()).empty();) body += chunk;
  EXPECT_EQ(events_of(body).back().at("choices").at(0).at("finish_reason"), "length");
  EXPECT_EQ(server.wait(), server::Server::Ended::drained);
}

TEST(ServerLimits, ASecondShutDownStopsAtOnce) {
  TestServer server;
  Client busy = server.client();
  busy.send(Client::request_text("POST", "/v1/completions", long_stream().dump()));
  ASSERT_EQ(busy.read_head().status, 200);
  server->shut_down();
  server->shut_down();
  EXPECT_EQ(server.wait(), server::Server::Ended::stopped);
}

TEST(ServerLimits, AStepThatTakesLongDoesNotHoldTheEnd) {
  server::ServerOptions options;
  options.stop_timeout = 100ms;
  TestServer server(options);
  Pause step(server);
  (void)step.held();
  server->shut_down();
  EXPECT_EQ(server.wait(), server::Server::Ended::stuck);
}

TEST(ServerLimits, TheDrainHasAnEnd) {
  server::ServerOptions options;
  options.drain_timeout = 20ms;
  TestServer server(options);
  Client busy = server.client();
  busy.send(Client::request_text("POST", "/v1/completions", with(long_stream(), {{"n", 32}}).dump()));
  ASSERT_EQ(busy.read_head().status, 200);
  server->shut_down();
  EXPECT_EQ(server.wait(), server::Server::Ended::stopped);
}

TEST(ServerLimits, ListenErrorsNameTheAddress) {
  TestServer server;
  server::ServerOptions options;
  options.http.port = server.port();
  try {
    const server::Server second(
        options, [] { return server::Loaded{}; }, std::make_shared<server::Log>("/dev/null"));
    FAIL() << "two servers on one port";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_NE(std::string(error.what()).find("127.0.0.1:" + std::to_string(server.port())), std::string::npos);
  }
}

TEST(ServerLimits, ALogThatCannotBeWrittenCostsLinesAlone) {
  const auto log = std::make_shared<server::Log>("/dev/full");
  server::ServerOptions options;
  options.http.port = 0;
  server::Server server(
      options,
      [] {
        return server::Loaded{tiny_served(), tiny_options()};
      },
      log);
  auto ended = std::async(std::launch::async, [&] { return server.run(false); });
  while (Client(server.port()).get("/ready").status != 200) std::this_thread::sleep_for(5ms);
  EXPECT_EQ(Client(server.port()).post("/v1/completions", completion_of("x")).status, 200);
  for (int i = 0; i < 1000 && log->num_lost() < 3; ++i) std::this_thread::sleep_for(5ms);
  EXPECT_GE(log->num_lost(), 3U);  // listening, ready, request
  server.shut_down();
  EXPECT_EQ(ended.get(), server::Server::Ended::drained);
}

}  // namespace
}  // namespace headwater::test
