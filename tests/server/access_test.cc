// Who may ask, and how: other sites' pages, keys, methods, and headers that two readers could understand differently.
#include <gtest/gtest.h>

#include "headwater/error.h"
#include "server/fixture.h"
#include "server/json_text.h"

namespace headwater::test {
namespace {

using nlohmann::json;

int status_with(TestServer& server, const std::string& headers) {
  Client client = server.client();
  client.send("GET /v1/models HTTP/1.1\r\n" + headers + "\r\n");
  return client.read_reply().status;
}

TEST(ServerAccess, PagesOfOtherSitesAreRefused) {
  TestServer server;
  for (const std::string host :
       {"localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:65535", "127.8.9.10:80", "[::1]", "[::1]:8000"}) {
    EXPECT_EQ(status_with(server, "Host: " + host + "\r\n"), 200) << host;
  }
  for (const std::string host : {"evil.example", "evil.example:8000", "localhost.evil.example",
                                 "127.0.0.1.evil.example", "10.0.0.1", "0.0.0.0:8000", "[::2]:8000", "[::1", "[::1]x",
                                 "localhost:", "localhost:8x", "localhost:8000:1", "128.0.0.1"}) {
    EXPECT_EQ(status_with(server, "Host: " + host + "\r\n"), 403) << host;
  }
  const std::string host = "Host: 127.0.0.1:8000\r\n";
  EXPECT_EQ(status_with(server, host + "Origin: http://127.0.0.1:8000\r\n"), 200);
  for (const std::string origin :
       {"http://127.0.0.1:8001", "http://localhost:8000", "https://evil.example", "null", "file://"}) {
    EXPECT_EQ(status_with(server, host + "Origin: " + origin + "\r\n"), 403) << origin;
  }
  Client client = server.client();
  client.send("POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 2\r\n\r\n{}");
  const Reply refused = client.read_reply();
  EXPECT_EQ(refused.status, 403);
  EXPECT_EQ(refused.json().at("error").at("code"), "foreign_origin");
  EXPECT_EQ(refused.json().at("error").at("type"), "invalid_request_error");
}

TEST(ServerAccess, AKeyIsEnoughForEverySite) {
  server::ServerOptions options;
  options.api_key = "secret";
  TestServer server(options);
  const std::string key = "Authorization: Bearer secret\r\n";
  EXPECT_EQ(status_with(server, "Host: models.example\r\nOrigin: https://shop.example\r\n" + key), 200);
}

TEST(ServerAccess, SchemesAreReadWhateverTheirCase) {
  server::ServerOptions options;
  options.api_key = "se cret";
  TestServer server(options);
  for (const std::string scheme : {"Bearer", "bearer", "BEARER"}) {
    EXPECT_EQ(status_with(server, "Authorization: " + scheme + " se cret\r\n"), 200) << scheme;
  }
  EXPECT_EQ(status_with(server, "Authorization: bearer Se cret\r\n"), 401);
  EXPECT_EQ(status_with(server, "Authorization: bearer\r\n"), 401);
}

TEST(ServerAccess, HeadIsGetWithoutItsBody) {
  TestServer server;
  Client client = server.client();
  for (const std::string path : {"/health", "/", "/metrics", "/v1/models", "/nowhere"}) {
    client.send("HEAD " + path + " HTTP/1.1\r\nHost: localhost\r\n\r\n");
    const Reply head = client.read_head();
    EXPECT_EQ(head.status, path == "/nowhere" ? 404 : 200);
    EXPECT_NE(head.headers.at("content-length"), "0");
    // What comes next on the connection is the next answer.
    const Reply next = client.get("/health");
    EXPECT_EQ(next.status, 200) << path;
    EXPECT_EQ(next.json(), (json{{"status", "ok"}})) << path;
  }
}

TEST(ServerAccess, AnotherMethodIsToldWhichAreAllowed) {
  TestServer server;
  Client client = server.client();
  EXPECT_EQ(client.get("/v1/completions").headers.at("allow"), "POST");
  const Reply posted = client.post_text("/health", "{}");
  EXPECT_EQ(posted.status, 405);
  EXPECT_EQ(posted.headers.at("allow"), "GET, HEAD");
}

TEST(ServerAccess, AmbiguousHeadersAreRefused) {
  TestServer server;
  const std::string post = "POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\n";
  const auto status = [&](const std::string& text) {
    Client client = server.client();
    client.send(text);
    return client.read_reply().status;
  };
  EXPECT_EQ(status(post + "Transfer-Encoding: gzip\r\n\r\n"), 400);
  EXPECT_EQ(status(post + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"), 400) << "no JSON";
  EXPECT_EQ(status(post + "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n"), 400);
  EXPECT_EQ(status(post + "Content-Length: 3\r\nContent-Length: 4\r\n\r\n{}  "), 400);
  EXPECT_EQ(status("GET /health HTTP/1.1\r\nHost: localhost\r\nHost: 127.0.0.1\r\n\r\n"), 400);
}

TEST(ServerAccess, MessagesShowLittleOfWhatTheyRefuse) {
  TestServer server;
  Client client = server.client();
  const std::string huge = [] {
    std::string text;
    while (text.size() < 9'000) text += "x\xC3\xA9\xE2\x82\xAC";
    return text;
  }();
  const auto message = [&](const Reply& reply) {
    EXPECT_GE(reply.status, 400);
    const std::string text = reply.json().at("error").at("message");  // throws when it is not valid UTF-8
    EXPECT_LT(text.size(), 400U) << text;
    return text;
  };
  EXPECT_NE(message(client.get("/" + std::string(9'000, 'p'))).find("ppp..."), std::string::npos);
  message(client.post("/v1/completions", with(completion_of("x"), {{"model", huge}})));
  message(client.post("/v1/completions", with(completion_of("x"), {{"logit_bias", {{huge, 1}}}})));
  message(
      client.post("/v1/chat/completions", json{{"model", "tiny"}, {"messages", {{{"role", huge}, {"content", ""}}}}}));
  message(client.post("/v1/chat/completions",
                      json{{"model", "tiny"}, {"messages", {{{"role", "user"}, {"content", {{{"type", huge}}}}}}}}));
  message(client.post_text("/v1/completions", "{\"n\":" + std::string(9'000, '1') + "e9999}"));
  Client foreign = server.client();
  foreign.send("GET / HTTP/1.1\r\nHost: " + std::string(9'000, 'h') + "\r\n\r\n");
  message(foreign.read_reply());
}

TEST(ServerAccess, ClippingKeepsCharactersWhole) {
  EXPECT_EQ(server::clipped("short"), "short");
  EXPECT_EQ(server::clipped("abcdef", 5), "abcde...");
  EXPECT_EQ(server::clipped("abcd\xC3\xA9", 5), "abcd...");
  EXPECT_EQ(server::clipped("abc\xE2\x82\xAC", 5), "abc...");
  EXPECT_EQ(server::clipped("ab\xF0\x9F\x8C\x8A", 5), "ab...");
  EXPECT_EQ(server::clipped("a\xF0\x9F\x8C\x8Az", 5), "a\xF0\x9F\x8C\x8A...");
}

TEST(ServerAccess, UnusableOptionsAreRefusedAtTheStart) {
  const auto refusal = [](const server::ServerOptions& options) -> std::string {
    try {
      const server::Server server(
          options, [] { return server::Loaded{}; }, std::make_shared<server::Log>("/dev/null"));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    return "";
  };
  server::ServerOptions options;
  options.http.port = 0;
  for (const std::string key : {"secret\n", "\nsecret", " secret", "secret ", "s\tecret",
                                "s\xC3\xA9"
                                "cret"}) {
    options.api_key = key;
    EXPECT_TRUE(refusal(options).starts_with("the API key has byte 0x")) << key;
  }
  options.api_key = "se cret";
  EXPECT_EQ(refusal(options), "");
  options.http.host = "";
  EXPECT_EQ(refusal(options), "host is empty, expected an address or a name to listen on");
}

}  // namespace
}  // namespace headwater::test
