#include "engine/tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <set>
#include <unordered_map>
#include <utility>

#include "engine/bpe.h"
#include "engine/byte_alphabet.h"
#include "engine/gguf.h"
#include "engine/pretokenizer.h"
#include "headwater/error.h"

namespace headwater::engine {
namespace {

/// Kinds of tokens, with the file's numbers.
enum class TokenKind : std::int32_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

/// End-of-turn and end-of-text tokens of known models, besides the one that the file names.
constexpr std::array<std::string_view, 5> kEndTokens{"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>",
                                                     "<|end_of_text|>"};

/// Finds the leftmost, and there the longest, of a set of texts.
class TextMatcher {
 public:
  struct Match {
    std::size_t begin;
    std::size_t length;
    TokenId token;
  };

  void add(std::string_view text, TokenId token) { by_first_byte_[index(text[0])].emplace_back(text, token); }

  /// To be called once, after the last add().
  void sort() {
    for (auto& bucket : by_first_byte_) {
      std::ranges::sort(bucket, std::greater{}, [](const auto& entry) { return entry.first.size(); });
    }
  }

  [[nodiscard]] std::optional<Match> find(std::string_view text, std::size_t from) const {
    for (std::size_t at = from; at < text.size(); ++at) {
      for (const auto& [candidate, token] : by_first_byte_[index(text[at])]) {
        if (text.substr(at).starts_with(candidate)) return Match{at, candidate.size(), token};
      }
    }
    return std::nullopt;
  }

 private:
  static std::size_t index(char c) { return static_cast<unsigned char>(c); }
  std::array<std::vector<std::pair<std::string_view, TokenId>>, 256> by_first_byte_;
};

}  // namespace

struct Tokenizer::Impl {
  explicit Impl(const Gguf& gguf);

  void read_tokens(const Gguf& gguf);
  void read_merges(const Gguf& gguf);
  void read_ends(const Gguf& gguf);
  [[nodiscard]] std::optional<TokenId> read_id(const Gguf& gguf, std::string_view key) const;
  void check(TokenId token) const;
  void encode_text(std::string_view text, BpeScratch& scratch, std::vector<TokenId>& out) const;

  PreTokenizer pre;
  std::string blob;                                        // the bytes of all tokens; never changes after construction
  std::vector<std::string_view> bytes;                     // [token], into blob
  std::vector<bool> specials;                              // [token]
  std::unordered_map<std::string_view, TokenId> ordinary;  // bytes -> token, of normal tokens
  std::unordered_map<std::string_view, TokenId> special_ids;
  TextMatcher always;     // user-defined tokens: recognised in any text
  TextMatcher on_demand;  // those and the special ones
  Bpe bpe;
  std::string missing;
  std::optional<TokenId> bos;
  std::optional<TokenId> eos;
  bool add_bos = false;
  std::set<TokenId> ends;
};

namespace {

std::string_view pre_tokenizer_name(const Gguf& gguf) {
  const std::string_view model = gguf.string("tokenizer.ggml.model");
  if (model != "gpt2") {
    throw Error(ErrorCode::unsupported, fmt::format("{}: tokenizer.ggml.model = {}, expected 'gpt2' (byte-level BPE)",
                                                    gguf.name(), quoted(model)));
  }
  return gguf.string("tokenizer.ggml.pre");
}

[[noreturn]] void fail(const Gguf& gguf, const std::string& what) {
  throw Error(ErrorCode::io, fmt::format("{}: {}", gguf.name(), what));
}

}  // namespace

Tokenizer::Impl::Impl(const Gguf& gguf) : pre(pre_tokenizer_name(gguf)) {
  read_tokens(gguf);
  read_merges(gguf);
  read_ends(gguf);
}

void Tokenizer::Impl::read_tokens(const Gguf& gguf) {
  const auto texts = gguf.strings("tokenizer.ggml.tokens");
  const auto kinds = gguf.integers("tokenizer.ggml.token_type");
  if (texts.empty() || texts.size() > static_cast<std::size_t>(std::numeric_limits<TokenId>::max())) {
    fail(gguf, fmt::format("tokenizer.ggml.tokens has {} entries, expected 1..2^31-1", texts.size()));
  }
  if (kinds.size() != texts.size()) {
    fail(gguf,
         fmt::format("tokenizer.ggml.token_type has {} entries, expected {}, one a token", kinds.size(), texts.size()));
  }
  // A token's bytes are never longer than its text, so the blob is not moved while views into it are made.
  std::size_t total = 0;
  for (const std::string_view text : texts) total += text.size();
  blob.reserve(total);
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const auto kind = static_cast<TokenKind>(kinds[i]);
    if (kind < TokenKind::normal || kind > TokenKind::byte) {
      fail(gguf, fmt::format("tokenizer.ggml.token_type[{}] = {}, expected 1..6", i, kinds[i]));
    }
    if (texts[i].empty()) fail(gguf, fmt::format("tokenizer.ggml.tokens[{}] is empty, expected at least one byte", i));
    const std::size_t begin = blob.size();
    if (kind != TokenKind::normal) {
      blob += texts[i];
    } else if (!append_alphabet_bytes(texts[i], blob)) {
      fail(gguf, fmt::format("tokenizer.ggml.tokens[{}] = {}, expected characters that stand for bytes", i,
                             quoted(texts[i])));
    }
    bytes.push_back(std::string_view(blob).substr(begin));
    const auto token = static_cast<TokenId>(i);
    const bool is_special = kind == TokenKind::control || kind == TokenKind::unknown;
    specials.push_back(is_special);
    if (kind == TokenKind::user_defined) always.add(bytes.back(), token);
    if (kind == TokenKind::user_defined || is_special) on_demand.add(bytes.back(), token);
    auto& index = kind == TokenKind::normal ? ordinary : special_ids;
    if (const auto [entry, added] = index.emplace(bytes.back(), token); !added) {
      fail(gguf, fmt::format("tokenizer.ggml.tokens[{}] = {}, expected another text than [{}]", i, quoted(texts[i]),
                             entry->second));
    }
  }
  std::erase_if(special_ids, [this](const auto& entry) { return !specials[static_cast<std::size_t>(entry.second)]; });
  always.sort();
  on_demand.sort();
}

void Tokenizer::Impl::read_merges(const Gguf& gguf) {
  std::array<TokenId, 256> byte_tokens{};
  for (int byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    const auto found = ordinary.find(std::string_view(&c, 1));
    byte_tokens[static_cast<std::size_t>(byte)] = found == ordinary.end() ? Bpe::kNoToken : found->second;
    if (found == ordinary.end()) missing += c;
  }
  const auto merges = gguf.strings("tokenizer.ggml.merges");
  bpe = Bpe(byte_tokens, merges.size());
  std::string left;
  std::string right;
  const auto lookup = [&](const std::string& part, std::size_t i) {
    const auto found = ordinary.find(part);
    if (found == ordinary.end()) {
      fail(gguf, fmt::format("tokenizer.ggml.merges[{}] has the part or result {}, expected a token of type 1", i,
                             quoted(part)));
    }
    return found->second;
  };
  for (std::size_t i = 0; i < merges.size(); ++i) {
    const std::size_t space = merges[i].find(' ');
    left.clear();
    right.clear();
    if (space == 0 || space >= merges[i].size() - 1 || !append_alphabet_bytes(merges[i].substr(0, space), left) ||
        !append_alphabet_bytes(merges[i].substr(space + 1), right)) {
      fail(gguf, fmt::format("tokenizer.ggml.merges[{}] = {}, expected two tokens with a space between them", i,
                             quoted(merges[i])));
    }
    const TokenId left_id = lookup(left, i);
    const TokenId right_id = lookup(right, i);
    if (!bpe.add_merge(left_id, right_id, lookup(left + right, i))) {
      fail(gguf, fmt::format("tokenizer.ggml.merges[{}] = {}, expected a pair that no earlier entry has", i,
                             quoted(merges[i])));
    }
  }
}

std::optional<TokenId> Tokenizer::Impl::read_id(const Gguf& gguf, std::string_view key) const {
  if (gguf.find(key) == nullptr) return std::nullopt;
  const std::uint64_t id = gguf.unsigned_integer(key);
  if (id >= bytes.size()) fail(gguf, fmt::format("{} = {}, expected a token id below {}", key, id, bytes.size()));
  return static_cast<TokenId>(id);
}

void Tokenizer::Impl::read_ends(const Gguf& gguf) {
  bos = read_id(gguf, "tokenizer.ggml.bos_token_id");
  eos = read_id(gguf, "tokenizer.ggml.eos_token_id");
  add_bos = gguf.boolean("tokenizer.ggml.add_bos_token", pre.name() == "llama-bpe") && bos.has_value();
  if (eos) ends.insert(*eos);
  if (const auto eot = read_id(gguf, "tokenizer.ggml.eot_token_id")) ends.insert(*eot);
  for (const std::string_view text : kEndTokens) {
    if (const auto found = special_ids.find(text); found != special_ids.end()) ends.insert(found->second);
  }
}

void Tokenizer::Impl::check(TokenId token) const {
  if (token < 0 || static_cast<std::size_t>(token) >= bytes.size()) {
    throw Error(ErrorCode::invalid_argument, fmt::format("token = {}, expected 0..{}", token, bytes.size() - 1));
  }
}

void Tokenizer::Impl::encode_text(std::string_view text, BpeScratch& scratch, std::vector<TokenId>& out) const {
  scratch.words.clear();
  pre.split(text, scratch.words);
  for (const std::string_view word : scratch.words) {
    if (pre.whole_words_first()) {
      if (const auto found = ordinary.find(word); found != ordinary.end()) {
        out.push_back(found->second);
        continue;
      }
    }
    bpe.encode(word, scratch, out);
  }
}

Tokenizer::Tokenizer(const Gguf& gguf) : impl_(std::make_unique<const Impl>(gguf)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

std::vector<TokenId> Tokenizer::encode(std::string_view text, Specials specials) const {
  std::vector<TokenId> out;
  encode_to(text, specials, out);
  return out;
}

void Tokenizer::encode_to(std::string_view text, Specials specials, std::vector<TokenId>& out) const {
  const TextMatcher& matcher = specials == Specials::recognise ? impl_->on_demand : impl_->always;
  BpeScratch scratch;
  std::size_t at = 0;
  while (at < text.size()) {
    const auto match = matcher.find(text, at);
    impl_->encode_text(text.substr(at, (match ? match->begin : text.size()) - at), scratch, out);
    if (!match) break;
    out.push_back(match->token);
    at = match->begin + match->length;
  }
}

std::string Tokenizer::decode(std::span<const TokenId> tokens) const {
  std::string out;
  for (const TokenId token : tokens) out += bytes_of(token);
  return out;
}

std::string_view Tokenizer::bytes_of(TokenId token) const {
  impl_->check(token);
  return impl_->bytes[static_cast<std::size_t>(token)];
}

std::size_t Tokenizer::vocab_size() const noexcept {
  return impl_->bytes.size();
}

bool Tokenizer::is_special(TokenId token) const {
  impl_->check(token);
  return impl_->specials[static_cast<std::size_t>(token)];
}

std::optional<TokenId> Tokenizer::special(std::string_view text) const {
  const auto found = impl_->special_ids.find(text);
  return found == impl_->special_ids.end() ? std::nullopt : std::optional(found->second);
}

std::optional<TokenId> Tokenizer::bos() const noexcept {
  return impl_->bos;
}
std::optional<TokenId> Tokenizer::eos() const noexcept {
  return impl_->eos;
}
bool Tokenizer::add_bos() const noexcept {
  return impl_->add_bos;
}
bool Tokenizer::ends_generation(TokenId token) const {
  return impl_->ends.contains(token);
}
std::string_view Tokenizer::pre_tokenizer() const noexcept {
  return impl_->pre.name();
}
std::string_view Tokenizer::missing_bytes() const noexcept {
  return impl_->missing;
}

}  // namespace headwater::engine
