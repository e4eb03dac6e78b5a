// `headwater bench-serving` as a program, against scripted servers.
#include "cli/command_fixture.h"
#include "fake_server.h"

namespace headwater::test {
namespace {

using nlohmann::json;

class BenchServing : public Command {
 protected:
  Result bench(const FakeServer& server, const std::string& flags, const std::string& variables = "") const {
    return run("bench-serving --url " + server.url() + " " + flags, "", variables);
  }
};

constexpr const char* kSmall = "--shared-prefix-tokens 32 --prompt-tokens 8 --max-tokens 4 ";

TEST_F(BenchServing, TableJsonAndPicture) {
  FakeOptions script;
  script.gap_s = 0.01;
  const FakeServer server(script);
  const Result result = bench(server, std::string(kSmall) + "--concurrency 1,4 --metrics --json " + path("r.json") +
                                          " --plot " + path("r.svg"));
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_NE(result.out.find("model fake-model; 32 shared + 8 own tokens in, as token lists; 4 out"), std::string::npos)
      << result.out;
  EXPECT_NE(result.out.find("concurrency    ok  fail  TTFT mean"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("concurrency 1: DID NOT RUN CASCADE (launches: cascade 0, flat 4)"), std::string::npos)
      << result.out;
  EXPECT_EQ(result.out.find("concurrency 4: DID NOT"), std::string::npos) << result.out;
  const json document = json::parse(slurp(path("r.json")));
  ASSERT_EQ(document.at("levels").size(), 2U);
  const json& level = document.at("levels")[1];
  EXPECT_EQ(level.at("concurrency"), 4);
  EXPECT_EQ(level.at("ok"), 4);
  EXPECT_EQ(level.at("completion_tokens"), 16);
  EXPECT_EQ(level.at("prompt_tokens"), 160);
  EXPECT_GT(level.at("launches").at("cascade"), 0);
  EXPECT_GT(level.at("decode_tps"), 30);  // a token every 10 ms, on a machine that may be busy
  EXPECT_GT(level.at("aggregate_tps"), level.at("decode_tps"));
  EXPECT_NE(slurp(path("r.svg")).find("<circle"), std::string::npos);
}

TEST_F(BenchServing, JsonOnStandardOutputIsAlone) {
  const FakeServer server({});
  const Result result = bench(server, std::string(kSmall) + "--concurrency 2 --json");
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(json::parse(result.out).at("levels")[0].at("launches"), nullptr);
  EXPECT_NE(result.err.find("aggregate tok/s"), std::string::npos);
}

TEST_F(BenchServing, FailedRequestsEndWithOne) {
  FakeOptions script;
  script.fail_every = 4;
  const FakeServer server(script);
  const Result result = bench(server, std::string(kSmall) + "--concurrency 6");
  EXPECT_EQ(result.code, 1);
  EXPECT_NE(result.out.find("concurrency 6: 1 failed: status 503: the queue is full"), std::string::npos) << result.out;
}

TEST_F(BenchServing, ChatSendsSystemAndUser) {
  const FakeServer server({});
  const Result result = bench(server, std::string(kSmall) + "--concurrency 2 --endpoint chat --stop-at-eos");
  ASSERT_EQ(result.code, 0) << result.err;
  const json body = server.completions().back();
  EXPECT_EQ(fake_tokens(body.at("messages")[0].at("content")).size(), 32U);
  EXPECT_EQ(fake_tokens(body.at("messages")[1].at("content")).size(), 8U);
  EXPECT_FALSE(body.contains("ignore_eos"));
}

TEST_F(BenchServing, ColdIsColdInASecondRunToo) {
  const FakeServer server({});
  for (const char* flags : {"--cold", "--cold", "", "", "--cold --seed 7", "--cold --seed 7"}) {
    ASSERT_EQ(bench(server, std::string(kSmall) + "--concurrency 1 " + flags).code, 0) << flags;
  }
  const std::vector<json> sent = server.completions();  // without --cold one more before each, that warms the cache
  ASSERT_EQ(sent.size(), 8U);
  const auto document = [&](std::size_t i) {
    const json& prompt = sent[i].at("prompt");
    return std::vector<json>(prompt.begin(), prompt.begin() + 32);
  };
  EXPECT_NE(document(0), document(1));
  EXPECT_EQ(document(3), document(5));
  EXPECT_EQ(document(6), document(7));
}

TEST_F(BenchServing, KeyFromFlagOrEnvironment) {
  FakeOptions script;
  script.api_key = "secret";
  const FakeServer server(script);
  EXPECT_EQ(bench(server, std::string(kSmall) + "--concurrency 1 --api-key secret").code, 0);
  EXPECT_EQ(bench(server, std::string(kSmall) + "--concurrency 1", "HEADWATER_API_KEY=secret").code, 0);
  const Result refused = bench(server, std::string(kSmall) + "--concurrency 1");
  EXPECT_EQ(refused.code, 3);
  EXPECT_NE(refused.err.find("status 401"), std::string::npos) << refused.err;
}

TEST_F(BenchServing, NoServerAndNoMetrics) {
  const Result nobody = run("bench-serving --url http://127.0.0.1:1 --concurrency 1");
  EXPECT_EQ(nobody.code, 3);
  EXPECT_NE(nobody.err.find("http://127.0.0.1:1/v1/models: connect: Connection refused"), std::string::npos)
      << nobody.err;
  FakeOptions script;
  script.metrics = false;
  const FakeServer server(script);
  const Result result = bench(server, std::string(kSmall) + "--concurrency 1 --metrics");
  EXPECT_EQ(result.code, 3);
  EXPECT_NE(result.err.find("/metrics: expected status 200, got 404"), std::string::npos) << result.err;
}

TEST_F(BenchServing, ReplayOfATrace) {
  const FakeServer server({});
  const std::string trace =
      write("t.jsonl",
            "{\"timestamp\":0,\"input_length\":1024,\"output_length\":3,\"hash_ids\":[1,2]}\n"
            "{\"timestamp\":1000,\"input_length\":1024,\"output_length\":4,\"hash_ids\":[1,3]}\n");
  const Result result =
      bench(server, "--trace " + trace + " --time-scale 10 --block-tokens 16 --metrics --json " + path("r.json"));
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_NE(result.out.find("2 requests in 0."), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("7 tokens out, 64 in (50.0 % from the prefix cache)"), std::string::npos) << result.out;
  const auto bodies = server.completions();
  ASSERT_EQ(bodies.size(), 2U);
  for (int i = 0; i < 16; ++i) EXPECT_EQ(bodies[0].at("prompt")[i], bodies[1].at("prompt")[i]);
  EXPECT_NE(bodies[0].at("prompt")[16], bodies[1].at("prompt")[16]);
  EXPECT_EQ(json::parse(slurp(path("r.json"))).at("time_scale"), 10);
}

TEST_F(BenchServing, PairStartsBothArms) {
  const std::string command = "'" HEADWATER_FAKE_SERVER " --port {port} --cascade {cascade} --gap 0.003 --not-ready 2'";
  const Result result =
      run("bench-serving " + std::string(kSmall) + "--concurrency 3 --rounds 4 --min-ratio 0.5 --json " +
          path("r.json") + " --pair " + command);
  ASSERT_EQ(result.code, 0) << result.err << result.out;
  EXPECT_NE(result.out.find("concurrency 3, cascade off: as asked, no cascade (launches: cascade 0, flat 48)"),
            std::string::npos)
      << result.out;
  EXPECT_EQ(result.out.find("cascade on: DID NOT"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("concurrency 3: on/off over 4 rounds: aggregate tok/s "), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("NOT JUDGED (fewer than 30 rounds)"), std::string::npos) << result.out;
  const json document = json::parse(slurp(path("r.json")));
  EXPECT_EQ(document.at("levels").size(), 2U);
  EXPECT_EQ(document.at("levels")[1].at("cascade"), "off");
  EXPECT_EQ(document.at("pairs")[0].at("rounds"), 4);
  EXPECT_EQ(document.at("pairs")[0].at("verdict"), "not judged");
}

TEST_F(BenchServing, PairWhoseGateIsMissed) {
  // The arm with cascade off is the faster one here.
  const std::string command =
      "'if [ {cascade} = on ]; then exec " HEADWATER_FAKE_SERVER
      " --port {port} --cascade on --gap 0.004; else exec " HEADWATER_FAKE_SERVER " --port {port} --cascade off; fi'";
  const Result result =
      run("bench-serving " + std::string(kSmall) + "--concurrency 1 --rounds 30 --min-ratio 0.99 --pair sh\\ -c\\ " +
          std::string("\\'") + command + "\\'");
  EXPECT_EQ(result.code, 1) << result.err << result.out;
  EXPECT_NE(result.out.find("MISSED"), std::string::npos) << result.out;
}

TEST_F(BenchServing, AServerThatDoesNotStart) {
  const Result result = run("bench-serving --concurrency 1 --pair '" HEADWATER_FAKE_SERVER " --die'");
  EXPECT_EQ(result.code, 3);
  EXPECT_NE(result.err.find("ended before it was ready:\nno model here"), std::string::npos) << result.err;
}

TEST_F(BenchServing, WrongUsage) {
  for (const char* flags :
       {"--concurrency 0", "--concurrency a", "--max-tokens 0", "--time-scale 2", "--trace t --cold",
        "--trace t --concurrency 1,2", "--min-ratio 1", "--pair x --serve-flags y", "--endpoint embeddings"}) {
    EXPECT_EQ(run(std::string("bench-serving ") + flags).code, 2) << flags;
  }
  const Result url = run("bench-serving --url https://127.0.0.1");
  EXPECT_EQ(url.code, 3);
  EXPECT_NE(url.err.find("--url: expected http://"), std::string::npos) << url.err;
}

}  // namespace
}  // namespace headwater::test
