// Byte-level BPE tokenizer built from a GGUF file's own metadata: text is cut into words by the pattern that the file
// names, the bytes of a word are merged pair by pair in the order of the merge table, and what remains are the tokens.
// Pairs are keyed by two token ids, so that no string is built while encoding; words of any length cost n log n.
// Immutable after construction: one object may be used by many threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace headwater::engine {

class Gguf;

using TokenId = std::int32_t;

/// What text that looks like a special token ("<|im_end|>") becomes.
enum class Specials : std::uint8_t {
  as_text,    ///< ordinary tokens that spell it: what user content must use
  recognise,  ///< the special token
};

class Tokenizer {
 public:
  /// Throws Error: io when the metadata is missing or inconsistent, unsupported when the tokenizer's model or
  /// pre-tokenizer is unknown.
  explicit Tokenizer(const Gguf& gguf);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  /// Tokens of a text. Never adds a begin-of-text token; see add_bos(). Any bytes are accepted, valid UTF-8 or not; a
  /// byte for which the vocabulary has no token is left out (see missing_bytes()).
  [[nodiscard]] std::vector<TokenId> encode(std::string_view text, Specials specials = Specials::as_text) const;
  /// Appends to `out`.
  void encode_to(std::string_view text, Specials specials, std::vector<TokenId>& out) const;

  /// The bytes that the tokens spell; special tokens spell their name. Throws Error (invalid_argument) for an id
  /// outside the vocabulary.
  [[nodiscard]] std::string decode(std::span<const TokenId> tokens) const;
  /// Bytes of one token: a view that lives as long as the tokenizer. Throws as decode does.
  [[nodiscard]] std::string_view bytes_of(TokenId token) const;

  [[nodiscard]] std::size_t vocab_size() const noexcept;
  [[nodiscard]] bool is_special(TokenId token) const;
  /// Id of a special token by its text.
  [[nodiscard]] std::optional<TokenId> special(std::string_view text) const;

  [[nodiscard]] std::optional<TokenId> bos() const noexcept;
  [[nodiscard]] std::optional<TokenId> eos() const noexcept;
  /// Whether a plain prompt (not a chat) should start with bos().
  [[nodiscard]] bool add_bos() const noexcept;
  /// Whether a model says with this token that it is done: eos and the known end-of-turn tokens.
  [[nodiscard]] bool ends_generation(TokenId token) const;

  /// Name of the pre-tokenizer, "smollm" for instance.
  [[nodiscard]] std::string_view pre_tokenizer() const noexcept;
  /// Byte values for which the vocabulary has no token.
  [[nodiscard]] std::string_view missing_bytes() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<const Impl> impl_;
};

}  // namespace headwater::engine
