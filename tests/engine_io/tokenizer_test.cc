// The tokenizer beyond recorded ids: any bytes round-trip, long words stay fast, special tokens, and refusals by name.
#include "engine/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "engine/byte_alphabet.h"
#include "engine/gguf.h"
#include "engine/pretokenizer.h"
#include "engine_io/expect.h"
#include "support/tiny_gguf.h"

namespace headwater::engine {
namespace {

constexpr const char* kPreTokenizers[] = {"smollm", "gpt-2", "llama-bpe", "qwen2"};

Tokenizer tiny_tokenizer(const std::string& pre_tokenizer = "smollm") {
  test::TinyModel model;
  model.pre_tokenizer = pre_tokenizer;
  test::GgufWriter file;
  test::add_tokenizer(file, model);
  const auto bytes = file.bytes();
  return Tokenizer(Gguf::from_bytes(bytes));
}

std::string random_bytes(test::TinyRandom& random, std::size_t longest) {
  std::string out;
  for (std::size_t i = random.bits() % longest; i > 0; --i) {
    // Half of them from text, so that words, merges and broken characters meet.
    out += random.bits() % 2 == 0 ? static_cast<char>(random.bits())
                                  : "the and \n\xC3\xA9\xE4\xB8\xAD"[random.bits() % 14];
  }
  return out;
}

TEST(ByteAlphabet, IsABijection) {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  std::string back;
  EXPECT_TRUE(append_alphabet_bytes(alphabet_text(all), back));
  EXPECT_EQ(back, all);
  EXPECT_EQ(alphabet_text(" \nA"),
            "\xC4\xA0\xC4\x8A"
            "A");
  for (const char* bad : {" ", "\n", "\xC2\xAD", "\xE2\x82\xAC", "\xC5\x84", "\xC4",
                          "\xC4"
                          "A",
                          "\x80", "\xC3"}) {
    EXPECT_FALSE(append_alphabet_bytes(bad, back)) << bad;
  }
}

TEST(PreTokenizer, WordsAreTheText) {
  test::TinyRandom random(5);
  for (const char* name : kPreTokenizers) {
    const PreTokenizer pre(name);
    EXPECT_EQ(pre.name(), name);
    EXPECT_EQ(pre.whole_words_first(), pre.name() == "llama-bpe");
    for (int round = 0; round < 500; ++round) {
      const std::string text = random_bytes(random, 60);
      std::vector<std::string_view> words;
      pre.split(text, words);
      std::string joined;
      for (const std::string_view word : words) {
        EXPECT_FALSE(word.empty());
        joined += word;
      }
      EXPECT_EQ(joined, text);
    }
  }
  test::expect_error(ErrorCode::unsupported,
                     "pre-tokenizer 'bert' is unknown, expected one of smollm, gpt-2, llama-bpe, qwen2",
                     [] { PreTokenizer("bert"); });
}

TEST(Tokenizer, AnyBytesRoundTrip) {
  test::TinyRandom random(6);
  for (const char* name : kPreTokenizers) {
    const Tokenizer tokenizer = tiny_tokenizer(name);
    EXPECT_EQ(tokenizer.missing_bytes(), "");
    for (int round = 0; round < 500; ++round) {
      const std::string text = random_bytes(random, 80);
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(text, Specials::recognise)), text);
    }
  }
}

TEST(Tokenizer, MergesBestPairFirstLeftmostFirst) {
  const Tokenizer tokenizer = tiny_tokenizer();
  const auto pieces = [&](std::string_view text) {
    std::vector<std::string> out;
    for (const TokenId token : tokenizer.encode(text)) out.emplace_back(tokenizer.bytes_of(token));
    return out;
  };
  EXPECT_EQ(pieces(" the thing"), (std::vector<std::string>{" the", " ", "th", "ing"}));
  EXPECT_EQ(pieces("     "), (std::vector<std::string>{"  ", "  ", " "}));
  EXPECT_EQ(pieces(""), (std::vector<std::string>{}));
}

TEST(Tokenizer, SpecialTokens) {
  const Tokenizer tokenizer = tiny_tokenizer();
  EXPECT_EQ(tokenizer.special("<|im_end|>"), 2);
  EXPECT_EQ(tokenizer.special("the"), std::nullopt);
  EXPECT_EQ(tokenizer.special("<|other|>"), std::nullopt);
  EXPECT_TRUE(tokenizer.is_special(0));
  EXPECT_FALSE(tokenizer.is_special(3));
  EXPECT_EQ(tokenizer.encode("<|im_end|><|im_end|>", Specials::recognise), (std::vector<TokenId>{2, 2}));
  const auto plain = tokenizer.encode("<|im_end|>");
  EXPECT_EQ(std::ranges::count_if(plain, [&](TokenId token) { return tokenizer.is_special(token); }), 0);
  EXPECT_EQ(tokenizer.decode(plain), "<|im_end|>");
  EXPECT_TRUE(tokenizer.ends_generation(0));
  EXPECT_TRUE(tokenizer.ends_generation(2));
  EXPECT_FALSE(tokenizer.ends_generation(1));
  EXPECT_FALSE(tokenizer.ends_generation(-1));
}

TEST(Tokenizer, IdsOutsideTheVocabularyAreRefused) {
  const Tokenizer tokenizer = tiny_tokenizer();
  const std::string range = ", expected 0.." + std::to_string(tokenizer.vocab_size() - 1);
  for (const TokenId bad : {-1, static_cast<TokenId>(tokenizer.vocab_size()), std::numeric_limits<TokenId>::max()}) {
    const std::string part = "token = " + std::to_string(bad) + range;
    test::expect_error(ErrorCode::invalid_argument, part, [&] {
      (void)tokenizer.decode(std::vector<TokenId>{3, bad});
    });
    test::expect_error(ErrorCode::invalid_argument, part, [&] { (void)tokenizer.bytes_of(bad); });
    test::expect_error(ErrorCode::invalid_argument, part, [&] { (void)tokenizer.is_special(bad); });
  }
}

// A text that is one word, or one run of blanks, must not take quadratic time: that would be 10^11 steps, minutes; n
// log n is far below a second. Processor time, so that a busy machine does not matter.
TEST(Tokenizer, LongWordsAreNotQuadratic) {
  for (const char* name : kPreTokenizers) {
    const Tokenizer tokenizer = tiny_tokenizer(name);
    for (const char* unit : {"a", "the", " ", "\n", "!", "9", "\xE4\xB8\xAD", "\xFF", "\xC3", " \n", "<|im_", "'"}) {
      std::string text;
      while (text.size() < 400000) text += unit;
      const std::clock_t start = std::clock();
      const auto tokens = tokenizer.encode(text, Specials::recognise);
      EXPECT_LT(std::clock() - start, 20 * CLOCKS_PER_SEC) << name << " " << unit;
      EXPECT_EQ(tokenizer.decode(tokens), text);
    }
  }
}

/// Metadata of a tokenizer of two letters, one merge and one special token; tests change one entry.
struct Metadata {
  std::string model = "gpt2";
  std::optional<std::string> pre = "gpt-2";
  std::vector<std::string> tokens{"a", "b", "ab", "<s>"};
  std::vector<std::int32_t> kinds{1, 1, 1, 3};
  std::vector<std::string> merges{"a b"};
  std::optional<std::uint32_t> bos;
  std::optional<std::uint32_t> eos;

  [[nodiscard]] std::vector<std::byte> bytes() const {
    test::GgufWriter file;
    file.string("tokenizer.ggml.model", model);
    if (pre) file.string("tokenizer.ggml.pre", *pre);
    file.strings("tokenizer.ggml.tokens", tokens).numbers("tokenizer.ggml.token_type", GgufType::i32, kinds);
    file.strings("tokenizer.ggml.merges", merges);
    if (bos) file.u32("tokenizer.ggml.bos_token_id", *bos);
    if (eos) file.u32("tokenizer.ggml.eos_token_id", *eos);
    return file.bytes();
  }
  [[nodiscard]] Tokenizer tokenizer() const {
    const auto file = bytes();
    return Tokenizer(Gguf::from_bytes(file, "t.gguf"));
  }
};

TEST(Tokenizer, BytesWithoutATokenAreLeftOut) {
  const Tokenizer tokenizer = Metadata().tokenizer();
  EXPECT_EQ(tokenizer.missing_bytes().size(), 254U);
  EXPECT_EQ(tokenizer.encode("abxba"), (std::vector<TokenId>{2, 1, 0}));
  EXPECT_EQ(tokenizer.encode("xyz"), (std::vector<TokenId>{}));
}

TEST(Tokenizer, UserDefinedTokensAreAlwaysRecognised) {
  Metadata data;
  data.tokens.emplace_back("<tool>");
  data.tokens.emplace_back("<tool>a");
  data.tokens.emplace_back("<unused>");
  data.kinds.insert(data.kinds.end(), {4, 4, 5});
  const Tokenizer tokenizer = data.tokenizer();
  EXPECT_EQ(tokenizer.encode("a<tool>b<s><tool>ab<unused>"), (std::vector<TokenId>{0, 4, 1, 5, 1}));
  EXPECT_EQ(tokenizer.encode("a<tool>b<s><tool>ab", Specials::recognise), (std::vector<TokenId>{0, 4, 1, 3, 5, 1}));
  EXPECT_FALSE(tokenizer.is_special(4));
  EXPECT_EQ(tokenizer.special("<tool>"), std::nullopt);
}

TEST(Tokenizer, BeginOfText) {
  Metadata data;
  EXPECT_EQ(data.tokenizer().bos(), std::nullopt);
  EXPECT_FALSE(data.tokenizer().add_bos());
  data.bos = 3;
  EXPECT_EQ(data.tokenizer().bos(), 3);
  EXPECT_FALSE(data.tokenizer().add_bos());
  data.pre = "llama-bpe";
  EXPECT_TRUE(data.tokenizer().add_bos());
}

TEST(Tokenizer, MalformedMetadataIsRefused) {
  struct Case {
    std::function<void(Metadata&)> change;
    ErrorCode code;
    const char* message;
  };
  const std::vector<Case> cases{
      {[](Metadata& d) { d.model = "llama"; }, ErrorCode::unsupported,
       "t.gguf: tokenizer.ggml.model = 'llama', expected 'gpt2' (byte-level BPE)"},
      {[](Metadata& d) { d.pre = "bert"; }, ErrorCode::unsupported,
       "pre-tokenizer 'bert' is unknown, expected one of smollm"},
      {[](Metadata& d) { d.pre.reset(); }, ErrorCode::io,
       "t.gguf: key 'tokenizer.ggml.pre' is missing, expected string"},
      {[](Metadata& d) { d.tokens.clear(); }, ErrorCode::io,
       "t.gguf: tokenizer.ggml.tokens has 0 entries, expected 1..2^31-1"},
      {[](Metadata& d) { d.kinds.pop_back(); }, ErrorCode::io,
       "t.gguf: tokenizer.ggml.token_type has 3 entries, expected 4, one a token"},
      {[](Metadata& d) { d.kinds[1] = 7; }, ErrorCode::io, "t.gguf: tokenizer.ggml.token_type[1] = 7, expected 1..6"},
      {[](Metadata& d) { d.kinds[1] = -1; }, ErrorCode::io, "t.gguf: tokenizer.ggml.token_type[1] = -1, expected 1..6"},
      {[](Metadata& d) { d.tokens[3] = ""; }, ErrorCode::io,
       "t.gguf: tokenizer.ggml.tokens[3] is empty, expected at least one byte"},
      {[](Metadata& d) { d.tokens[1] = "b c"; }, ErrorCode::io,
       "t.gguf: tokenizer.ggml.tokens[1] = 'b c', expected characters that stand for bytes"},
      {[](Metadata& d) { d.tokens[1] = "a"; }, ErrorCode::io,
       "t.gguf: tokenizer.ggml.tokens[1] = 'a', expected another text than [0]"},
      {[](Metadata& d) { d.merges[0] = "ab"; }, ErrorCode::io,
       "t.gguf: tokenizer.ggml.merges[0] = 'ab', expected two tokens with a space"},
      {[](Metadata& d) { d.merges[0] = " ab"; }, ErrorCode::io,
       "t.gguf: tokenizer.ggml.merges[0] = ' ab', expected two tokens with a space"},
      {[](Metadata& d) { d.merges[0] = "ab "; }, ErrorCode::io,
       "t.gguf: tokenizer.ggml.merges[0] = 'ab ', expected two tokens with a space"},
      {[](Metadata& d) { d.merges[0] = "a b a"; }, ErrorCode::io,
       "t.gguf: tokenizer.ggml.merges[0] = 'a b a', expected two tokens with a space"},
      {[](Metadata& d) { d.merges[0] = ""; }, ErrorCode::io,
       "t.gguf: tokenizer.ggml.merges[0] = '', expected two tokens with a space"},
      {[](Metadata& d) { d.merges[0] = "a c"; }, ErrorCode::io,
       "t.gguf: tokenizer.ggml.merges[0] has the part or result 'c', expected a token of type 1"},
      {[](Metadata& d) { d.merges[0] = "b a"; }, ErrorCode::io,
       "t.gguf: tokenizer.ggml.merges[0] has the part or result 'ba', expected a token of type 1"},
      {[](Metadata& d) { d.merges.emplace_back("a b"); }, ErrorCode::io,
       "t.gguf: tokenizer.ggml.merges[1] = 'a b', expected a pair that no earlier entry has"},
      {[](Metadata& d) { d.bos = 4; }, ErrorCode::io,
       "t.gguf: tokenizer.ggml.bos_token_id = 4, expected a token id below 4"},
      {[](Metadata& d) { d.eos = 4000000000U; }, ErrorCode::io,
       "t.gguf: tokenizer.ggml.eos_token_id = 4000000000, expected a token id below 4"},
  };
  (void)Metadata().tokenizer();
  for (const Case& c : cases) {
    Metadata data;
    c.change(data);
    test::expect_error(c.code, c.message, [&] { (void)data.tokenizer(); });
  }
}

}  // namespace
}  // namespace headwater::engine
