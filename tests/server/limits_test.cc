// Limits and misbehaviour: whoever does harm is stopped, the others are answered, and nothing is left behind.
#include <gtest/gtest.h>

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

double metric(TestServer& server, const std::string& name) {
  const std::string text = server.client().get("/metrics").body;
  const std::size_t at = text.find("\n" + name + " ");
  return at == std::string::npos ? -1 : std::stod(text.substr(at + name.size() + 2));
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
      "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nTransfer-Encoding: "
      "chunked\r\n\r\n");
  for (int i = 0; i < 4; ++i) chunked.send("1000\r\n" + std::string(0x1000, ' ') + "\r\n");
  EXPECT_EQ(chunked.read_reply().status, 413);
  EXPECT_EQ(server.client().get("/health", "X-Long: " + std::string(3'000, 'x') + "\r\n").status, 431);
  expect_others_are_answered(server);
}

TEST(ServerLimits, MalformedHttp) {
  TestServer server;
  for (const std::string text : {"\r\n\r\n\r\n", "GET\r\n\r\n", "\x16\x03\x01\x02", "GET / HTTP/9.9\r\n\r\n",
                                 "POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
                                 "POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: "
                                 "chunked\r\n\r\nzz\r\n"}) {
    Client client = server.client();
    client.send(text);
    client.close_sending();
    const int status = client.read_reply().status;
    EXPECT_TRUE(status == 400 || status == 0) << text << ": " << status;
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
  EXPECT_EQ(metric(server, "headwater_http_timeouts_total"), 2);
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
  busy.close();
  server.expect_nothing_leaked();
  expect_others_are_answered(server);
}

TEST(ServerLimits, AClientThatGoesAwayIsCancelled) {
  TestServer server;
  for (const bool stream : {true, false}) {
    const auto before = server.ask([](const engine::Engine& e) { return e.stats().generated_tokens; });
    Client client = server.client();
    client.send(Client::request_text("POST", "/v1/completions", with(long_stream(), {{"stream", stream}}).dump()));
    if (stream) {
      ASSERT_EQ(client.read_head().status, 200);
      ASSERT_FALSE(client.read_chunk().empty());
    } else {
      while (server.ask([](const engine::Engine& e) { return e.stats().generated_tokens; }) == before) continue;
    }
    client.close();
    server.expect_nothing_leaked();
    const auto after = server.ask([](const engine::Engine& e) { return e.stats().generated_tokens; });
    EXPECT_LT(after - before, 890) << "it ran to its end";
  }
  EXPECT_EQ(metric(server, "headwater_requests_total{endpoint=\"completions\",outcome=\"cancelled\"}"), 2);
}

TEST(ServerLimits, AHalfClosedClientCountsAsGone) {
  TestServer server;
  Client client = server.client();
  client.send(Client::request_text("POST", "/v1/completions", long_stream().dump()));
  ASSERT_EQ(client.read_head().status, 200);
  client.close_sending();
  server.expect_nothing_leaked();
  EXPECT_EQ(metric(server, "headwater_requests_total{endpoint=\"completions\",outcome=\"cancelled\"}"), 1);
}

TEST(ServerLimits, AReaderThatDoesNotReadIsDroppedAndOthersGoOn) {
  server::ServerOptions options;
  options.http.max_output_bytes = 32 << 10;
  TestServer server(options);
  Client lazy(server.port(), 4096);
  // Megabytes of events; nobody reads them.
  lazy.send(Client::request_text("POST", "/v1/completions",
                                 with(long_stream(), {{"n", 24}, {"logprobs", 5}, {"temperature", 1}}).dump()));
  for (int i = 0; i < 3000 && metric(server, "headwater_http_dropped_slow_total") < 1; ++i) {
    expect_others_are_answered(server);
  }
  EXPECT_EQ(metric(server, "headwater_http_dropped_slow_total"), 1);
  server.expect_nothing_leaked();
}

TEST(ServerLimits, AReaderThatStandsStillIsTimedOut) {
  server::ServerOptions options;
  options.http.write_timeout = 200ms;
  options.http.max_output_bytes = 64 << 20;
  TestServer server(options);
  Client lazy(server.port(), 4096);
  lazy.send(Client::request_text("POST", "/v1/completions",
                                 with(long_stream(), {{"n", 24}, {"logprobs", 5}, {"temperature", 1}}).dump()));
  for (int i = 0; i < 3000 && metric(server, "headwater_http_timeouts_total") < 1; ++i)
    std::this_thread::sleep_for(10ms);
  EXPECT_EQ(metric(server, "headwater_http_timeouts_total"), 1);
  server.expect_nothing_leaked();
}

TEST(ServerLimits, ThousandsOfConnectionsOpenedAndDropped) {
  TestServer server;
  Client stream = server.client();
  stream.send(Client::request_text("POST", "/v1/completions", long_stream(600).dump()));
  for (int i = 0; i < 3000; ++i) {
    Client client = server.client();
    if (i % 3 == 1) client.send("POST /v1/completions HTTP/1.1\r\nContent-Le");
    if (i % 3 == 2) client.send(Client::request_text("POST", "/v1/completions", long_stream().dump()));
  }
  const Reply reply = stream.read_reply();
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(events_of(reply.body).back().at("choices").at(0).at("finish_reason"), "length");
  server.expect_nothing_leaked();
  stream.close();
  for (int i = 0; i < 1000 && metric(server, "headwater_http_connections") > 1; ++i) std::this_thread::sleep_for(5ms);
  EXPECT_EQ(metric(server, "headwater_http_connections"), 1);
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
  EXPECT_EQ(metric(server, "headwater_requests_total{endpoint=\"completions\",outcome=\"length\"}"), 256);
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
  EXPECT_NE(large.json().at("error").at("message").get<std::string>().find("pages"), std::string::npos);
  const Reply grown = server.client().post("/v1/completions", with(completion_of("q"), {{"max_tokens", 500}}));
  EXPECT_EQ(grown.status, 503);
  EXPECT_TRUE(grown.headers.contains("retry-after"));
  Client client = server.client();
  client.send(Client::request_text("POST", "/v1/completions", long_stream(500).dump()));
  const Reply streamed = client.read_reply();
  EXPECT_EQ(streamed.status, 200);
  EXPECT_TRUE(events_of(streamed.body).back().contains("error")) << "a stream says it at its end";
  expect_others_are_answered(server);
  server.expect_nothing_leaked();
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
