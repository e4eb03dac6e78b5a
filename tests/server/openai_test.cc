// OpenAI's requests: what is read, what is refused and under which name.
#include "server/openai.h"

#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "server/json_text.h"

namespace headwater::server {
namespace {

using nlohmann::json;

GenerationRequest chat(const std::string& fields) {
  return parse_generation(Endpoint::chat, R"({"model":"m","messages":[{"role":"user","content":"Hi"}])" + fields + "}",
                          {});
}
GenerationRequest completion(const std::string& fields) {
  return parse_generation(Endpoint::completions, R"({"model":"m","prompt":"Hi")" + fields + "}", {});
}

/// "param: message" of the refusal, "" where nothing is refused.
template <class Parse>
std::string refusal(const Parse& parse) {
  try {
    (void)parse();
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status, 400);
    EXPECT_EQ(error.type, "invalid_request_error");
    EXPECT_FALSE(error.message.empty());
    const json shape = json::parse(error_json(error)).at("error");
    EXPECT_EQ(shape.at("message"), error.message);
    EXPECT_EQ(shape.at("param").is_null(), error.param.empty());
    return error.param + "|" + error.message;
  }
  return "";
}
std::string chat_refusal(const std::string& fields) {
  return refusal([&] { return chat(fields); });
}
std::string completion_refusal(const std::string& fields) {
  return refusal([&] { return completion(fields); });
}
std::string body_refusal(const std::string& body, Endpoint endpoint = Endpoint::completions) {
  return refusal([&] { return parse_generation(endpoint, body, {}); });
}

TEST(OpenaiRequest, DefaultsAreOpenais) {
  const GenerationRequest request = chat("");
  EXPECT_EQ(request.model, "m");
  ASSERT_EQ(request.messages.size(), 1U);
  EXPECT_EQ(request.messages[0].role, "user");
  EXPECT_EQ(request.messages[0].content, "Hi");
  EXPECT_EQ(request.engine.sampling.temperature, 1.0F);
  EXPECT_EQ(request.engine.sampling.top_p, 1.0F);
  EXPECT_EQ(request.engine.num_samples, 1);
  EXPECT_EQ(request.engine.num_logprobs, -1);
  EXPECT_FALSE(request.max_tokens.has_value());
  EXPECT_FALSE(request.seed.has_value());
  EXPECT_FALSE(request.stream);
}

TEST(OpenaiRequest, ReadsEveryServedField) {
  const GenerationRequest request = chat(
      R"(,"max_completion_tokens":7,"temperature":0.5,"top_p":0.25,"top_k":3,"seed":-5,"stop":["a","b"],"n":2,"stream":true,
         "stream_options":{"include_usage":true},"logprobs":true,"top_logprobs":4,"presence_penalty":1.5,
         "frequency_penalty":-0.5,"logit_bias":{"7":-100,"9":2.5},"user":"me","metadata":{"x":"y"},"no_such_field":[1])");
  EXPECT_EQ(request.max_tokens, 7);
  EXPECT_EQ(request.engine.sampling.temperature, 0.5F);
  EXPECT_EQ(request.engine.sampling.top_p, 0.25F);
  EXPECT_EQ(request.engine.sampling.top_k, 3);
  EXPECT_EQ(request.seed, -5);
  EXPECT_EQ(request.engine.stop, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(request.engine.num_samples, 2);
  EXPECT_TRUE(request.stream);
  EXPECT_TRUE(request.include_usage);
  EXPECT_EQ(request.engine.num_logprobs, 4);
  EXPECT_EQ(request.engine.sampling.presence_penalty, 1.5F);
  EXPECT_EQ(request.engine.sampling.frequency_penalty, -0.5F);
  ASSERT_EQ(request.engine.sampling.logit_bias.size(), 2U);
  EXPECT_EQ(request.engine.sampling.logit_bias[0].token, 7);
  EXPECT_EQ(request.engine.sampling.logit_bias[0].bias, -100.0F);
}

TEST(OpenaiRequest, ReadsEveryFormOfPrompt) {
  const auto prompts = [](const std::string& prompt) {
    return parse_generation(Endpoint::completions, R"({"model":"m","prompt":)" + prompt + "}", {}).prompts;
  };
  EXPECT_EQ(prompts(R"("a")"), (std::vector<Prompt>{"a"}));
  EXPECT_EQ(prompts(R"(["a","b"])"), (std::vector<Prompt>{"a", "b"}));
  EXPECT_EQ(prompts("[1,2]"), (std::vector<Prompt>{std::vector<std::int32_t>{1, 2}}));
  EXPECT_EQ(prompts("[[1],[2,3]]"),
            (std::vector<Prompt>{std::vector<std::int32_t>{1}, std::vector<std::int32_t>{2, 3}}));
}

TEST(OpenaiRequest, ReadsMessagesInPartsAndDevelopers) {
  const GenerationRequest request = parse_generation(
      Endpoint::chat,
      R"({"model":"m","messages":[{"role":"developer","content":"D"},{"role":"user","content":[{"type":"text","text":"A"},
         {"type":"text","text":"B"}]},{"role":"assistant","content":"C","tool_calls":[]}]})",
      {});
  ASSERT_EQ(request.messages.size(), 3U);
  EXPECT_EQ(request.messages[0].role, "system");
  EXPECT_EQ(request.messages[1].content, "AB");
}

TEST(OpenaiRequest, NullAndEmptyAskForNothing) {
  EXPECT_EQ(chat_refusal(R"(,"temperature":null,"stop":null,"tools":[],"response_format":{"type":"text"},
                             "tool_choice":"none","logit_bias":null,"functions":null,"stream_options":null)"),
            "");
  EXPECT_EQ(completion_refusal(R"(,"suffix":null,"best_of":1,"suffix":"")"), "");
}

TEST(OpenaiRequest, RefusesWhatItKnowsAndDoesNotServe) {
  for (const std::string field : {"tools", "functions", "audio", "prediction", "web_search_options"}) {
    EXPECT_TRUE(chat_refusal(",\"" + field + "\":[{\"x\":1}]").starts_with(field + "|")) << field;
  }
  EXPECT_TRUE(chat_refusal(R"(,"response_format":{"type":"json_object"})").starts_with("response_format|"));
  EXPECT_TRUE(chat_refusal(R"(,"tool_choice":"required")").starts_with("tool_choice|"));
  EXPECT_TRUE(chat_refusal(R"(,"modalities":["text","audio"])").starts_with("modalities|"));
  EXPECT_TRUE(completion_refusal(R"(,"suffix":"end")").starts_with("suffix|"));
  EXPECT_TRUE(completion_refusal(R"(,"n":2,"best_of":3)").starts_with("best_of|"));
}

TEST(OpenaiRequest, RefusesWrongTypesAndRangesByName) {
  const std::vector<std::pair<std::string, std::string>> wrong{
      {"temperature", "\"hot\""},
      {"temperature", "2.5"},
      {"temperature", "-1"},
      {"temperature", "true"},
      {"top_p", "1.5"},
      {"top_p", "[]"},
      {"top_k", "1.5"},
      {"n", "0"},
      {"n", "129"},
      {"n", "2.0"},
      {"seed", "1.5"},
      {"seed", "99999999999999999999"},
      {"stop", "5"},
      {"stop", "\"\""},
      {"stop", R"(["a","b","c","d","e"])"},
      {"stream", "1"},
      {"max_tokens", "0"},
      {"max_tokens", "-3"},
      {"max_tokens", "\"9\""},
      {"presence_penalty", "3"},
      {"frequency_penalty", "-2.1"},
      {"logit_bias", "[]"},
      {"logit_bias", R"({"x":1})"},
      {"logit_bias", R"({"-1":1})"},
      {"logprobs", "\"yes\""},
  };
  for (const auto& [field, value] : wrong) {
    EXPECT_TRUE(chat_refusal(",\"" + field + "\":" + value).starts_with(field + "|" + field)) << field << " " << value;
  }
  EXPECT_EQ(chat_refusal(R"(,"logit_bias":{"3":101})"), "logit_bias.3|logit_bias.3: expected -100..100, got 101");
  EXPECT_EQ(chat_refusal(R"(,"stop":["a",5])"), "stop[1]|stop[1]: expected a string, got an integer");
  EXPECT_TRUE(chat_refusal(R"(,"top_logprobs":3)").starts_with("top_logprobs|"));
  EXPECT_TRUE(chat_refusal(R"(,"logprobs":true,"top_logprobs":21)").starts_with("top_logprobs|"));
  EXPECT_TRUE(completion_refusal(R"(,"logprobs":6)").starts_with("logprobs|"));
  EXPECT_TRUE(completion_refusal(R"(,"logprobs":true)").starts_with("logprobs|"));
  EXPECT_TRUE(chat_refusal(R"(,"stream_options":{"include_usage":true})").starts_with("stream_options|"));
  EXPECT_TRUE(chat_refusal(R"(,"max_tokens":3,"max_completion_tokens":4)").starts_with("max_tokens|"));
}

TEST(OpenaiRequest, RefusesBadMessages) {
  const auto messages = [](const std::string& value) {
    return body_refusal(R"({"model":"m","messages":)" + value + "}", Endpoint::chat);
  };
  EXPECT_EQ(messages("null"), "messages|messages: is missing");
  EXPECT_EQ(messages("[]"), "messages|messages: is empty, expected at least one");
  EXPECT_EQ(messages("[3]"), "messages[0]|messages[0]: expected an object, got an integer");
  EXPECT_TRUE(messages(R"([{"content":"x"}])").starts_with("messages[0].role|"));
  EXPECT_TRUE(messages(R"([{"role":"user"}])").starts_with("messages[0].content|"));
  EXPECT_TRUE(messages(R"([{"role":"wizard","content":"x"}])").starts_with("messages[0].role|"));
  EXPECT_TRUE(messages(R"([{"role":"tool","content":"x"}])").starts_with("messages[0].role|"));
  EXPECT_TRUE(messages(R"([{"role":"user","content":7}])").starts_with("messages[0].content|"));
  EXPECT_TRUE(
      messages(R"([{"role":"user","content":[{"type":"image_url"}]}])").starts_with("messages[0].content[0].type|"));
}

TEST(OpenaiRequest, RefusesBadPrompts) {
  const auto prompt = [](const std::string& value) { return body_refusal(R"({"model":"m","prompt":)" + value + "}"); };
  EXPECT_EQ(prompt("null"), "prompt|prompt: is missing");
  EXPECT_EQ(prompt("[]"), "prompt|prompt: is empty, expected at least one");
  EXPECT_EQ(prompt("[[]]"), "prompt[0]|prompt[0]: is empty, expected at least one token");
  EXPECT_EQ(prompt("[1,-2]"), "prompt[1]|prompt[1]: expected a token id, got -2");
  EXPECT_EQ(prompt("[1,\"a\"]"), "prompt[1]|prompt[1]: expected a token id, got a string");
  EXPECT_TRUE(prompt(R"(["a",[1]])").starts_with("prompt[1]|"));
  EXPECT_TRUE(prompt("{}").starts_with("prompt|"));
  EXPECT_TRUE(prompt("[1.5]").starts_with("prompt[0]|"));
}

TEST(OpenaiRequest, RefusesWhatIsNoJsonObject) {
  for (const std::string body : {"", "{", "[]", "3", "nul", "{\"model\":\"\xFF\"}", "{\"model\":\"m\"} x"}) {
    EXPECT_TRUE(body_refusal(body).starts_with("|the body is ")) << body;
  }
  EXPECT_EQ(body_refusal(R"({"prompt":"x"})"), "model|model: is missing");
  // Nested so deeply that a recursive reader would run out of stack.
  EXPECT_TRUE(body_refusal("{\"a\":" + std::string(1'000'000, '[')).starts_with("|the body is nested deeper"));
  // Brackets in strings, and after escapes in them, are text.
  EXPECT_EQ(
      body_refusal("{\"a\":\"" + std::string(1'000, '[') + "\\\"" + std::string(1'000, '{') + "\"}").find("nested"),
      std::string::npos);
  // Many small members take time in proportion.
  std::string many = "{\"prompt\":\"a\",\"x\":[{}";
  for (int i = 0; i < 300'000; ++i) many += ",{}";
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(body_refusal(many + "]}").find("nested"), std::string::npos);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20)) << "minutes, were it quadratic";
  const std::string nested = std::string(30, '[') + std::string(30, ']');
  EXPECT_EQ(body_refusal(R"({"model":"m","prompt":"x","unknown":)" + nested + "}"), "");
}

TEST(OpenaiRequest, LimitsTheNumberOfChoices) {
  std::string prompts = "[\"a\"";
  for (int i = 0; i < 64; ++i) prompts += ",\"a\"";
  EXPECT_TRUE(body_refusal(R"({"model":"m","n":2,"prompt":)" + prompts + "]}").starts_with("prompt|"));
  EXPECT_EQ(body_refusal(R"({"model":"m","n":1,"prompt":)" + prompts + "]}"), "");
}

TEST(OpenaiRequest, ReadsTokenize) {
  EXPECT_EQ(parse_tokenize(R"({"prompt":"x","model":"m"})", {}).prompt, "x");
  EXPECT_TRUE(parse_tokenize(R"({"messages":[{"role":"user","content":"x"}]})", {}).is_chat);
  EXPECT_EQ(parse_detokenize(R"({"tokens":[1,2]})"), (std::vector<std::int32_t>{1, 2}));
  EXPECT_EQ(refusal([] { return parse_tokenize("{}", {}); }), "prompt|prompt: is missing");
  EXPECT_EQ(refusal([] { return parse_detokenize(R"({"tokens":["a"]})"); }),
            "tokens[0]|tokens[0]: expected a token id, got a string");
}

TEST(JsonText, EscapesAndRepairs) {
  EXPECT_EQ(json_string("a\"b\\c\n\t\r\x01\x7F</script>"), R"("a\"b\\c\n\t\r\u0001\u007f\u003c/script>")");
  EXPECT_EQ(json_string("\xC3\xA9\xF0\x9F\x8C\x8A"), "\"\xC3\xA9\xF0\x9F\x8C\x8A\"");
  EXPECT_EQ(json_string("a\xFF\xC3"), "\"a\xEF\xBF\xBD\xEF\xBF\xBD\"");
  EXPECT_EQ(json_string("\xE2\x80\xA8"), "\"\\u2028\"");
  // Every byte comes back through a strict reader.
  std::string all;
  for (int byte = 0; byte < 128; ++byte) all += static_cast<char>(byte);
  EXPECT_EQ(json::parse(json_string(all)).get<std::string>(), all);
}

}  // namespace
}  // namespace headwater::server
