// Byte-pair merging of one word. The symbols form a linked list, and the pairs that may merge wait in a heap by rank,
// then by place: always the best pair of the whole word, leftmost first, in n log n steps for a word of n bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "engine/tokenizer.h"

namespace headwater::engine {

/// Memory that one thread reuses from word to word.
struct BpeScratch {
  struct Symbol {
    TokenId token;      ///< kNoToken once it was merged into its left neighbour
    std::int32_t prev;  ///< -1: none
    std::int32_t next;  ///< -1: none
  };
  struct Candidate {
    std::uint32_t rank;
    std::int32_t left;   ///< index of the left symbol
    TokenId left_token;  ///< both as they were when this entry was made: otherwise it is stale
    TokenId right_token;
    TokenId merged;
  };
  std::vector<std::string_view> words;
  std::vector<Symbol> symbols;
  std::vector<Candidate> heap;
};

class Bpe {
 public:
  static constexpr TokenId kNoToken = -1;

  Bpe() = default;
  /// byte_tokens[b]: the token of byte b, or kNoToken. Room is made for num_merges merges.
  Bpe(const std::array<TokenId, 256>& byte_tokens, std::size_t num_merges);

  /// Merges are added best first. False if the pair is known already.
  [[nodiscard]] bool add_merge(TokenId left, TokenId right, TokenId merged);

  /// Appends the tokens of `word`. Bytes without a token are left out.
  void encode(std::string_view word, BpeScratch& scratch, std::vector<TokenId>& out) const;

 private:
  /// An entry of the open-addressing table of pairs; its rank is kEmpty if free.
  struct Merge {
    TokenId left;
    TokenId right;
    TokenId merged;
    std::uint32_t rank;
  };
  static constexpr std::uint32_t kEmpty = 0xFFFFFFFF;

  [[nodiscard]] std::size_t slot_of(TokenId left, TokenId right) const noexcept;
  [[nodiscard]] const Merge* find(TokenId left, TokenId right) const noexcept;

  std::array<TokenId, 256> byte_tokens_{};
  std::vector<Merge> table_;  ///< a power of two, at most half full
  std::uint32_t num_merges_ = 0;
};

}  // namespace headwater::engine
