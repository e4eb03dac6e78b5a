// Detokenizer and stop strings: whatever the pieces in which text arrives, the same text comes out, never a part of a
// stop string and never a part of a character.
#include "engine/stop_strings.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/utf8.h"
#include "engine_io/expect.h"
#include "support/tiny_gguf.h"

namespace headwater::engine {
namespace {

struct Shown {
  std::string text;
  std::optional<std::size_t> matched;
  bool operator==(const Shown&) const = default;
};

/// Feeds `text` cut at random (by `seed`) and checks on the way that what is shown is never taken back.
Shown feed(const std::string& text, const std::vector<std::string>& stops, std::uint64_t seed) {
  test::TinyRandom random(seed);
  StopStrings stream(stops);
  Shown shown;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = std::min<std::size_t>(text.size() - at, 1 + random.bits() % 4);
    shown.text += stream.push(std::string_view(text).substr(at, length));
    at += length;
  }
  shown.text += stream.finish();
  shown.matched = stream.matched();
  return shown;
}

/// The definition, in the plainest form: the first place where some stop string ends, the longest of those that end
/// there.
Shown expected(const std::string& text, const std::vector<std::string>& stops) {
  for (std::size_t end = 1; end <= text.size(); ++end) {
    Shown best;
    std::size_t longest = 0;
    for (std::size_t i = 0; i < stops.size(); ++i) {
      if (stops[i].size() > longest && std::string_view(text).substr(0, end).ends_with(stops[i])) {
        best = {text.substr(0, end - stops[i].size()), i};
        longest = stops[i].size();
      }
    }
    if (longest > 0) return best;
  }
  return {text, std::nullopt};
}

TEST(StopStrings, Examples) {
  EXPECT_EQ(feed("hello\n\nworld", {"\n\n"}, 1), (Shown{"hello", 0}));
  EXPECT_EQ(feed("hello\nworld", {"\n\n"}, 1), (Shown{"hello\nworld", {}}));
  EXPECT_EQ(feed("hello\n", {"\n\n"}, 1), (Shown{"hello\n", {}}));
  EXPECT_EQ(feed("aab", {"aab", "ab"}, 1), (Shown{"", 0}));
  EXPECT_EQ(feed("xabc", {"abcd", "b"}, 1), (Shown{"xa", 1}));
  EXPECT_EQ(feed("aaab", {"aab"}, 1), (Shown{"a", 0}));
  EXPECT_EQ(feed("na\xC3\xAFve", {"\xC3\xAF"}, 1), (Shown{"na", 0}));
  EXPECT_EQ(feed("text", {}, 1), (Shown{"text", {}}));
}

TEST(StopStrings, RandomTextsInRandomPieces) {
  test::TinyRandom random(7);
  const auto word = [&](std::size_t longest) {
    std::string out;
    for (std::size_t i = 1 + random.bits() % longest; i > 0; --i) out += "ab\n"[random.bits() % 3];
    return out;
  };
  int stopped = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> stops(random.bits() % 4);
    for (std::string& stop : stops) stop = word(6);
    const std::string text = word(30);
    const Shown want = expected(text, stops);
    for (std::uint64_t seed = 0; seed < 3; ++seed) ASSERT_EQ(feed(text, stops, seed), want) << text;
    stopped += want.matched ? 1 : 0;
  }
  EXPECT_GT(stopped, 500);
  EXPECT_LT(stopped, 2500);
}

// Nothing is held back longer than needed: only what may still become a stop string.
TEST(StopStrings, ShowsAsEarlyAsPossible) {
  StopStrings stream({"END"});
  EXPECT_EQ(stream.push("some text"), "some text");
  EXPECT_EQ(stream.push(" E"), " ");
  EXPECT_EQ(stream.push("N"), "");
  EXPECT_EQ(stream.push("EN"), "EN");
  EXPECT_EQ(stream.push("D and more"), "");
  EXPECT_TRUE(stream.stopped());
  EXPECT_EQ(stream.push("more"), "");
  EXPECT_EQ(stream.finish(), "");
}

TEST(StopStrings, LongTextsCostTheSamePerByte) {
  // All a's against a stop string of a's and a b: a matcher that starts over would need 10^10 steps.
  StopStrings stream({std::string(100000, 'a') + "b"});
  std::size_t shown = 0;
  for (int i = 0; i < 300000; ++i) shown += stream.push("a").size();
  EXPECT_EQ(shown, 200000U);
  EXPECT_EQ(stream.finish().size(), 100000U);
}

TEST(StopStrings, Refusals) {
  test::expect_error(ErrorCode::invalid_argument, "stop[1] is empty, expected at least one byte", [] {
    StopStrings({"a", ""});
  });
  test::expect_error(ErrorCode::invalid_argument, "stop[0] has byte 0xc3 at 1, expected valid UTF-8",
                     [] { StopStrings({"a\xC3"}); });
}

TEST(Utf8Stream, CutsAtCharacters) {
  const std::string text = "a\xC3\xA9\xE4\xB8\xAD\xF0\x9F\x98\x80z";
  Utf8Stream stream;
  std::string shown;
  for (const char c : text) {
    const std::string piece = stream.push(std::string_view(&c, 1));
    EXPECT_EQ(valid_utf8_prefix(piece), piece.size());
    shown += piece;
  }
  EXPECT_EQ(shown, text);
  EXPECT_EQ(stream.finish(), "");
}

TEST(Utf8Stream, ReplacesWhatIsNoCharacter) {
  const std::string bad = "\xEF\xBF\xBD";
  const auto shown = [](std::string_view text) {
    Utf8Stream stream;
    std::string out = stream.push(text);
    return out + stream.finish();
  };
  EXPECT_EQ(shown("a\x80"
                  "b"),
            "a" + bad + "b");
  EXPECT_EQ(shown("\xC0\x80"), bad + bad);
  EXPECT_EQ(shown("\xE4\xB8"), bad);
  EXPECT_EQ(shown("\xE4\xB8"
                  "a"),
            bad + "a");
  EXPECT_EQ(shown("\xF0\x9F\x98\xC3\xA9"), bad + "\xC3\xA9");
  EXPECT_EQ(shown("\xED\xA0\x80"), bad + bad + bad);            // a surrogate
  EXPECT_EQ(shown("\xF4\x90\x80\x80"), bad + bad + bad + bad);  // above U+10FFFF
  EXPECT_EQ(shown("\xE0\x80\x80"), bad + bad + bad);            // overlong
  EXPECT_EQ(shown("\xFF"), bad);
}

TEST(Utf8Stream, AnyBytesAnyPiecesGiveTheSameValidText) {
  test::TinyRandom random(11);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes;
    for (std::size_t i = random.bits() % 12; i > 0; --i) {
      bytes += "\x41\x80\xBF\xC3\xA9\xE4\xB8\xAD\xED\xF0\x9F\x98\xF4\xFF"[random.bits() % 14];
    }
    Utf8Stream whole;
    std::string once = whole.push(bytes);
    once += whole.finish();
    EXPECT_EQ(valid_utf8_prefix(once), once.size());
    Utf8Stream stream;
    std::string pieces;
    for (const char c : bytes) pieces += stream.push(std::string_view(&c, 1));
    pieces += stream.finish();
    EXPECT_EQ(pieces, once);
  }
}

class TinyStream : public testing::Test {
 protected:
  std::vector<std::byte> file_ = test::tiny_gguf();
  Tokenizer tokenizer_{Gguf::from_bytes(file_)};

  Shown stream(const std::vector<TokenId>& tokens, std::vector<std::string> stops, bool show_specials = false) {
    TextStream out(tokenizer_, StopStrings(std::move(stops)), show_specials);
    Shown shown;
    for (const TokenId token : tokens) {
      const std::string piece = out.push(token);
      EXPECT_EQ(valid_utf8_prefix(piece), piece.size());
      shown.text += piece;
      if (out.stopped()) break;
    }
    shown.text += out.finish();
    shown.matched = out.matched();
    return shown;
  }
};

TEST_F(TinyStream, TokensBecomeText) {
  const std::string text =
      "the end \xF0\x9F\x98\x80 is n\xC3\xA9"
      "ar";
  EXPECT_EQ(stream(tokenizer_.encode(text), {}), (Shown{text, {}}));
  EXPECT_EQ(stream(tokenizer_.encode(text), {"is"}), (Shown{"the end \xF0\x9F\x98\x80 ", 0}));
  EXPECT_EQ(stream(tokenizer_.encode(text), {"\xC3\xA9"}), (Shown{"the end \xF0\x9F\x98\x80 is n", 0}));
}

TEST_F(TinyStream, SpecialTokensAreShownOnlyWhenAsked) {
  const auto tokens = tokenizer_.encode("a<|im_end|>b", Specials::recognise);
  ASSERT_EQ(tokens.size(), 3U);
  EXPECT_EQ(stream(tokens, {}), (Shown{"ab", {}}));
  EXPECT_EQ(stream(tokens, {}, true), (Shown{"a<|im_end|>b", {}}));
}

TEST_F(TinyStream, AnAnswerCutInsideACharacterEndsInAReplacement) {
  auto tokens = tokenizer_.encode("ok \xE4\xB8\xAD");
  tokens.pop_back();
  EXPECT_EQ(stream(tokens, {}), (Shown{"ok \xEF\xBF\xBD", {}}));
  // The replacement itself may complete a stop string.
  EXPECT_EQ(stream(tokens, {"\xEF\xBF\xBD"}), (Shown{"ok ", 0}));
}

}  // namespace
}  // namespace headwater::engine
