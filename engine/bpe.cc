#include "engine/bpe.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "headwater/error.h"

namespace headwater::engine {
namespace {

/// Order of a heap whose front is the best candidate.
struct Worse {
  bool operator()(const BpeScratch::Candidate& a, const BpeScratch::Candidate& b) const noexcept {
    return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
  }
};

}  // namespace

Bpe::Bpe(const std::array<TokenId, 256>& byte_tokens, std::size_t num_merges)
    : byte_tokens_(byte_tokens),
      table_(std::bit_ceil(2 * num_merges + 1), Merge{kNoToken, kNoToken, kNoToken, kEmpty}) {}

std::size_t Bpe::slot_of(TokenId left, TokenId right) const noexcept {
  const std::uint64_t key =
      static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
  std::size_t slot = (key * 0x9E3779B97F4A7C15U) >> 32;  // Fibonacci hashing: the upper half is well mixed
  for (;; ++slot) {
    const Merge& entry = table_[slot &= table_.size() - 1];
    if (entry.rank == kEmpty || (entry.left == left && entry.right == right)) return slot;
  }
}

const Bpe::Merge* Bpe::find(TokenId left, TokenId right) const noexcept {
  const Merge& entry = table_[slot_of(left, right)];
  return entry.rank == kEmpty ? nullptr : &entry;
}

bool Bpe::add_merge(TokenId left, TokenId right, TokenId merged) {
  Merge& entry = table_[slot_of(left, right)];
  if (entry.rank != kEmpty) return false;
  entry = {left, right, merged, num_merges_++};
  return true;
}

void Bpe::encode(std::string_view word, BpeScratch& scratch, std::vector<TokenId>& out) const {
  if (word.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw Error(ErrorCode::invalid_argument,
                "word.size() = " + std::to_string(word.size()) + ", expected less than 2^31");
  }
  auto& symbols = scratch.symbols;
  auto& heap = scratch.heap;
  symbols.clear();
  heap.clear();
  for (const char c : word) {
    const TokenId token = byte_tokens_[static_cast<unsigned char>(c)];
    if (token == kNoToken) continue;
    const auto index = static_cast<std::int32_t>(symbols.size());
    symbols.push_back({token, index - 1, index + 1});
  }
  if (symbols.empty()) return;
  symbols.back().next = -1;

  const auto at = [&](std::int32_t index) -> BpeScratch::Symbol& { return symbols[static_cast<std::size_t>(index)]; };
  // Adds the pair that begins at `left` to the heap's storage, if it may merge.
  const auto offer = [&](std::int32_t left) {
    if (left < 0 || at(left).next < 0) return false;
    const TokenId left_token = at(left).token;
    const TokenId right_token = at(at(left).next).token;
    const Merge* merge = find(left_token, right_token);
    if (merge == nullptr) return false;
    heap.push_back({merge->rank, left, left_token, right_token, merge->merged});
    return true;
  };
  for (std::int32_t i = 0; at(i).next >= 0; ++i) offer(i);
  std::make_heap(heap.begin(), heap.end(), Worse{});
  const auto push = [&](std::int32_t left) {
    if (offer(left)) std::push_heap(heap.begin(), heap.end(), Worse{});
  };

  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), Worse{});
    const BpeScratch::Candidate best = heap.back();
    heap.pop_back();
    BpeScratch::Symbol& left = at(best.left);
    if (left.token != best.left_token || left.next < 0 || at(left.next).token != best.right_token) continue;  // stale
    BpeScratch::Symbol& right = at(left.next);
    left.token = best.merged;
    right.token = kNoToken;
    left.next = right.next;
    if (left.next >= 0) at(left.next).prev = best.left;
    push(left.prev);
    push(best.left);
  }
  for (std::int32_t i = 0; i >= 0; i = at(i).next) out.push_back(at(i).token);
}

}  // namespace headwater::engine
