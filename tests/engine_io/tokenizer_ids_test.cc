// Token ids against those that an independent implementation gave (tools/record_tokenizer_ids.py).
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/gguf.h"
#include "engine/tokenizer.h"
#include "engine_io/model_file.h"
#include "support/gguf_writer.h"

namespace headwater::engine {
namespace {

using Ids = std::vector<TokenId>;

const nlohmann::json& recorded() {
  static const nlohmann::json data = nlohmann::json::parse(std::ifstream(HEADWATER_TEST_DATA "/tokenizer_ids.json"));
  return data;
}

/// A file that holds the small vocabulary: special tokens, the alphabet, results of the merges, words that no merge
/// leads to.
std::vector<std::byte> small_file(const std::string& pre_tokenizer) {
  auto tokens = recorded()["specials"].get<std::vector<std::string>>();
  std::vector<std::int32_t> kinds(tokens.size(), 3);
  for (const auto& c : recorded()["alphabet"]) tokens.push_back(c);
  const auto merges = recorded()["merges"].get<std::vector<std::string>>();
  for (std::string merge : merges) tokens.push_back(merge.erase(merge.find(' '), 1));
  for (const auto& word : recorded()["words"]) tokens.push_back(word);
  kinds.resize(tokens.size(), 1);
  test::GgufWriter file;
  file.string("tokenizer.ggml.model", "gpt2").string("tokenizer.ggml.pre", pre_tokenizer);
  file.strings("tokenizer.ggml.tokens", tokens).numbers("tokenizer.ggml.token_type", GgufType::i32, kinds);
  file.strings("tokenizer.ggml.merges", merges);
  return file.bytes();
}

void expect_recorded(const Tokenizer& tokenizer, const std::string& setting) {
  const auto texts = recorded()["texts"].get<std::vector<std::string>>();
  ASSERT_GE(texts.size(), 200U);
  for (const auto& [mode, specials] :
       {std::pair{"as_text", Specials::as_text}, std::pair{"recognise", Specials::recognise}}) {
    const auto& ids = recorded()["ids"][setting][mode];
    ASSERT_EQ(ids.size(), texts.size());
    for (std::size_t i = 0; i < texts.size(); ++i) {
      EXPECT_EQ(tokenizer.encode(texts[i], specials), ids[i].get<Ids>())
          << setting << ", " << mode << ", texts[" << i << "]";
    }
  }
}

class SmallVocabulary : public testing::TestWithParam<const char*> {};

TEST_P(SmallVocabulary, IdsAreThoseRecorded) {
  const auto bytes = small_file(GetParam());
  const Tokenizer tokenizer(Gguf::from_bytes(bytes));
  EXPECT_EQ(tokenizer.pre_tokenizer(), GetParam());
  expect_recorded(tokenizer, std::string("small/") + GetParam());
}

TEST_P(SmallVocabulary, DecodeGivesBackTheText) {
  const auto bytes = small_file(GetParam());
  const Tokenizer tokenizer(Gguf::from_bytes(bytes));
  EXPECT_EQ(tokenizer.missing_bytes(), "");
  for (const std::string text : recorded()["texts"]) {
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text, Specials::recognise)), text);
  }
}

INSTANTIATE_TEST_SUITE_P(PreTokenizers, SmallVocabulary, testing::Values("smollm", "gpt-2", "llama-bpe", "qwen2"),
                         [](const auto& parameter) {
                           std::string name = parameter.param;
                           std::erase(name, '-');
                           return name;
                         });

// Negative control: the settings differ on these texts, so passing under one of them says something.
TEST(SmallVocabularyControl, SettingsDiffer) {
  const auto& ids = recorded()["ids"];
  EXPECT_NE(ids["small/smollm"]["as_text"], ids["small/gpt-2"]["as_text"]);
  EXPECT_NE(ids["small/gpt-2"]["as_text"], ids["small/qwen2"]["as_text"]);
  EXPECT_NE(ids["small/qwen2"]["as_text"], ids["small/llama-bpe"]["as_text"]);
  EXPECT_NE(ids["small/smollm"]["as_text"], ids["small/smollm"]["recognise"]);
}

TEST(ModelVocabulary, IdsAreThoseRecorded) {
  const std::optional<std::string> path = test::example_model();
  if (!path) GTEST_SKIP() << test::kNoExampleModel;
  const Tokenizer tokenizer(Gguf::open(*path));
  EXPECT_EQ(tokenizer.vocab_size(), 49152U);
  EXPECT_EQ(tokenizer.bos(), 1);
  EXPECT_EQ(tokenizer.eos(), 2);
  EXPECT_FALSE(tokenizer.add_bos());
  EXPECT_TRUE(tokenizer.ends_generation(0));
  EXPECT_TRUE(tokenizer.ends_generation(2));
  EXPECT_FALSE(tokenizer.ends_generation(1));
  expect_recorded(tokenizer, "model/smollm");
}

}  // namespace
}  // namespace headwater::engine
