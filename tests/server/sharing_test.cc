// Requests that share what is being computed, at the server: it is computed once, whoever leaves in the middle; and
// what goes wrong for one request, or what one asks for, keeps nobody else waiting for ever.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "server/fixture.h"

namespace headwater::test {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;

constexpr const char* kComputed = "headwater_prompt_tokens_computed_total";

json text_of(const Reply& reply) {
  return reply.json().at("choices").at(0).at("text");
}

TEST(ServerSharing, SixteenColdClientsHaveTheirDocumentComputedOnce) {
  TinyModel shape;
  shape.context = 4096;
  const auto model = tiny_model(shape);
  engine::EngineOptions engine = tiny_options();
  engine.num_pages = 2048;
  engine.max_step_tokens = 256;
  TestServer server({}, engine, [model] { return served_as_tiny(model); });
  Pause together(server);
  (void)together.held();
  constexpr std::size_t kClients = 16;
  constexpr std::size_t kShared = 2048;
  constexpr std::size_t kOwn = 32;
  const std::vector<std::int32_t> document = random_tokens(1, kShared, *model);
  std::vector<Client> clients;
  for (std::size_t i = 0; i < kClients; ++i) {
    std::vector<std::int32_t> prompt = document;
    std::vector<std::int32_t> own = random_tokens(10 + i, kOwn, *model);
    own.front() = 3 + static_cast<std::int32_t>(i);  // they differ from the first token on
    prompt.insert(prompt.end(), own.begin(), own.end());
    clients.push_back(server.client());
    clients.back().send(
        Client::request_text("POST", "/v1/completions", with(completion_of(prompt), {{"max_tokens", 4}}).dump()));
  }
  ASSERT_TRUE(server.metric_becomes(kPending, kClients));
  together.end();
  for (Client& client : clients) EXPECT_EQ(client.read_reply().status, 200);
  EXPECT_EQ(server.metric(kComputed), kShared + kClients * kOwn);
  EXPECT_EQ(server.metric("headwater_prompt_tokens_cached_total"), (kClients - 1) * kShared);
  EXPECT_EQ(server.metric("headwater_preemptions_total"), 0);
}

TEST(ServerSharing, AWaiterTakesOverWhatACancelledOneHasComputed) {
  const std::vector<std::int32_t> prompt = random_tokens(3, 403, *shared_tiny_model());
  json expected;
  {
    TestServer alone;
    expected = text_of(alone.client().post("/v1/completions", completion_of(prompt)));
  }
  TestServer server;
  Pause first(server);
  (void)first.held();
  Client owner = server.client();
  owner.send(Client::request_text("POST", "/v1/completions", completion_of(prompt).dump()));
  ASSERT_TRUE(server.metric_becomes(kPending, 1));
  Client waiter = server.client();
  waiter.send(Client::request_text("POST", "/v1/completions", completion_of(prompt).dump()));
  ASSERT_TRUE(server.metric_becomes(kPending, 2));
  Pause second(server);
  first.end();
  const engine::Progress held = second.held();
  EXPECT_EQ(held.samples_running, 1);
  EXPECT_EQ(held.samples_waiting, 1);
  EXPECT_EQ(held.prompt_tokens_done, 24) << "one step of the owner's prompt";
  owner.close();
  ASSERT_TRUE(server.metric_becomes(kCancelled, 1));
  second.end();
  EXPECT_EQ(text_of(waiter.read_reply()), expected);
  EXPECT_EQ(server.metric(kComputed), 403) << "nothing twice, nothing lost";
}

TEST(ServerSharing, ALargeRequestIsServedBesideAnEndlessRowOfSmallOnes) {
  engine::EngineOptions engine = tiny_options();
  engine.num_pages = 96;  // of 4 tokens; the large one needs 80 of them
  TestServer server({}, engine);
  std::atomic<bool> done{false};
  std::atomic<int> small{0};
  std::vector<std::thread> row;
  for (int i = 0; i < 4; ++i) {
    row.emplace_back([&, i] {
      Client client = server.client();
      for (int k = 0; !done; ++k) {
        const std::string own = std::to_string(i) + " of " + std::to_string(k) + std::string(30, 's');
        if (client.post("/v1/completions", with(completion_of(own), {{"max_tokens", 40}})).status == 200) ++small;
      }
    });
  }
  while (small < 8) std::this_thread::sleep_for(1ms);
  const int before = small;
  const Reply large = server.client().post("/v1/completions", completion_of(std::string(300, 'L')));
  const int meanwhile = small - before;
  done = true;
  for (std::thread& thread : row) thread.join();
  EXPECT_EQ(large.status, 200);
  EXPECT_LT(meanwhile, 40) << "those that came later went first";
}

std::shared_ptr<const engine::Model> poisoned_model(std::int32_t token) {
  TinyModel shape;
  shape.tied_embeddings = false;  // the token's own logit stays sound
  auto bytes = std::make_shared<std::vector<std::byte>>(tiny_gguf(shape));
  const engine::Gguf gguf = engine::Gguf::from_bytes(*bytes, "tiny");
  const std::size_t row = shape.hidden * sizeof(float);
  const auto begin = gguf.find_tensor("token_embd.weight")->data.data() - bytes->data();
  std::fill_n(bytes->begin() + begin + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(token) * row), row,
              std::byte{0xFF});
  engine::ModelOptions options;
  options.num_threads = 2;
  options.weights = engine::WeightType::f32;
  auto* const model = new engine::Model(engine::Gguf::from_bytes(*bytes, "tiny"), options);
  return {model, [bytes](const engine::Model* last) { delete last; }};
}

TEST(ServerSharing, LogitsThatAreNotFiniteEndTheirRequestAlone) {
  const std::int32_t poison = 100;
  const std::string log = testing::TempDir() + "headwater_nan_test.log";
  std::filesystem::remove(log);
  const auto model = poisoned_model(poison);
  const json sound = with(completion_of({5, 6, 7, 8, 9}), {{"logit_bias", {{std::to_string(poison), -100}}}});
  const json bad = completion_of({5, 6, 7, poison, 9});
  {
    TestServer server(
        {}, tiny_options(), [model] { return served_as_tiny(model); }, log);
    const json expected = text_of(server.client().post("/v1/completions", sound));
    Pause together(server);
    (void)together.held();
    Client first = server.client();
    first.send(Client::request_text("POST", "/v1/completions", bad.dump()));
    Client second = server.client();
    second.send(Client::request_text("POST", "/v1/completions", sound.dump()));
    Client third = server.client();
    third.send(Client::request_text("POST", "/v1/completions", with(bad, {{"n", 2}, {"stream", true}}).dump()));
    ASSERT_TRUE(server.metric_becomes(kPending, 3));
    together.end();
    for (Client* client : {&first, &third}) {
      const Reply reply = client->read_reply();
      EXPECT_EQ(reply.status, 500) << reply.body;
      EXPECT_EQ(reply.json().at("error").at("type"), "server_error");
      EXPECT_FALSE(reply.headers.contains("retry-after")) << "the same request would fail again";
    }
    EXPECT_EQ(text_of(second.read_reply()), expected);
    EXPECT_EQ(server.metric("headwater_requests_total{endpoint=\"completions\",outcome=\"error\"}"), 2);
    EXPECT_EQ(text_of(server.client().post("/v1/completions", sound)), expected);
  }
  std::ifstream file(log);
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_NE(text.str().find("error request_failed id=cmpl-"), std::string::npos);
  EXPECT_NE(text.str().find("status=500 error=\"logits at position 5 are not finite\""), std::string::npos)
      << text.str();
  std::filesystem::remove(log);
}

}  // namespace
}  // namespace headwater::test
