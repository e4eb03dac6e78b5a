#include "engine/pretokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <array>

#include "engine/gguf.h"
#include "engine/utf8.h"
#include "headwater/error.h"

namespace headwater::engine {
namespace {

// In the patterns below `~` stands for the members of White_Space, to be used inside brackets: PCRE2's own \s has
// U+180E besides, and the tokenizers were trained without it.
constexpr std::string_view kWhiteSpace =
    R"(\t-\r \x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

struct Rule {
  std::string_view name;
  std::string_view pattern;
  bool whole_words_first;
};

constexpr std::array<Rule, 4> kRules{{
    // Digits are cut off one by one first, then the rest is cut as by gpt-2: hence blanks before a digit count as
    // blanks at an end.
    {"smollm", R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^~\p{L}\p{N}]+|[~]+(?![^~\p{N}])|[~]+)", false},
    {"gpt-2", R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^~\p{L}\p{N}]+|[~]+(?![^~])|[~]+)", false},
    {"llama-bpe",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^~\p{L}\p{N}]+[\r\n]*|[~]*[\r\n]+|[~]+(?![^~])|[~]+)",
     true},
    {"qwen2",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^~\p{L}\p{N}]+[\r\n]*|[~]*[\r\n]+|[~]+(?![^~])|[~]+)",
     false},
}};

const Rule& find_rule(std::string_view name) {
  std::string known;
  for (const Rule& rule : kRules) {
    if (rule.name == name) return rule;
    known += (known.empty() ? "" : ", ") + std::string(rule.name);
  }
  throw Error(ErrorCode::unsupported,
              fmt::format("pre-tokenizer {} is unknown, expected one of {}", quoted(name), known));
}

std::string expand(std::string_view pattern) {
  std::string out;
  for (const char c : pattern) {
    if (c == '~') {
      out += kWhiteSpace;
    } else {
      out += c;
    }
  }
  return out;
}

struct FreeMatchData {
  void operator()(pcre2_match_data* data) const noexcept { pcre2_match_data_free(data); }
};

}  // namespace

void PreTokenizer::FreeCode::operator()(pcre2_real_code_8* code) const noexcept {
  pcre2_code_free(code);
}

PreTokenizer::PreTokenizer(std::string_view name) : name_(name) {
  const Rule& rule = find_rule(name);
  whole_words_first_ = rule.whole_words_first;
  const std::string pattern = expand(rule.pattern);
  int error = 0;
  PCRE2_SIZE place = 0;
  code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), PCRE2_UTF | PCRE2_UCP, &error,
                            &place, nullptr));
  if (!code_) {
    throw Error(ErrorCode::internal, fmt::format("pattern of pre-tokenizer '{}': error {} at {}", name, error, place));
  }
  // Without machine code (some hardened systems) the same pattern is interpreted: slower, same words.
  pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);
}

void PreTokenizer::split(std::string_view text, std::vector<std::string_view>& words) const {
  while (!text.empty()) {
    const std::size_t valid = valid_utf8_prefix(text);
    if (valid > 0) split_valid(text.substr(0, valid), words);
    text.remove_prefix(valid);
    if (text.empty()) break;
    const std::size_t invalid = next_utf8(text).length;
    words.push_back(text.substr(0, invalid));
    text.remove_prefix(invalid);
  }
}

void PreTokenizer::split_valid(std::string_view text, std::vector<std::string_view>& words) const {
  const std::unique_ptr<pcre2_match_data, FreeMatchData> match(pcre2_match_data_create(1, nullptr));
  if (!match) throw std::bad_alloc();
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const PCRE2_SIZE* range = pcre2_get_ovector_pointer(match.get());
  std::size_t at = 0;
  while (at < text.size()) {
    // The text is known to be valid: checking it again at every match would make this quadratic.
    int found = pcre2_match(code_.get(), subject, text.size(), at, PCRE2_NO_UTF_CHECK, match.get(), nullptr);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) {
      found =
          pcre2_match(code_.get(), subject, text.size(), at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match.get(), nullptr);
    }
    if (found < 0 && found != PCRE2_ERROR_NOMATCH) {
      throw Error(ErrorCode::internal,
                  fmt::format("pre-tokenizer '{}' failed with PCRE2 error {} at byte {}", name_, found, at));
    }
    const std::size_t begin = found < 0 ? text.size() : range[0];
    const std::size_t end = found < 0 ? text.size() : range[1];
    if (begin > at) words.push_back(text.substr(at, begin - at));  // what no rule takes is a word of its own
    if (end > begin) words.push_back(text.substr(begin, end - begin));
    at = end;
  }
}

}  // namespace headwater::engine
