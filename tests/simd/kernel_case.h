// Drives one level's kernels on hand-made work items and compares with a float64 loop.
//
// A case is one page table of `num_keys` tokens and some query rows, each with its own visible range. Everything that
// must not be read, or must not matter, is NaN: unused pages and tails of pages, tokens before the first, gaps between
// strides, partial slots, scratch (of exactly the promised size, fenced), outputs.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/convert.h"
#include "cpu/kernels.h"

namespace headwater::test {

enum class Layout { nhd, hnd, pair_nhd, pair_hnd, side_by_side, v_in_k };

struct CaseSpec {
  Isa isa = Isa::scalar;
  DType q = DType::f32;
  DType kv = DType::f32;
  DType out = DType::f32;
  int num_kv_heads = 2;
  int group_size = 4;
  int head_dim_qk = 64;
  int head_dim_vo = 64;
  int page_size = 16;
  Layout layout = Layout::hnd;
  int num_rows = 3;
  int num_keys = 100;
  int first_token = 0;  ///< of the first page
  std::int32_t pos_begin = 0;
  float q_size = 1.0F;  ///< greater: more peaked
  bool ragged = true;   ///< rows with their own ranges
  float soft_cap = 0.0F;
  bool alibi = false;
  bool sinks = false;
  int num_sink_tokens = 0;
  bool scales = false;
  LseBase base = LseBase::two;
  bool batch_invariant = false;
  int invariant_chunk = 128;
  std::uint64_t seed = 1;

  [[nodiscard]] std::string name() const {
    return std::string(name_of(isa)) + " q " + std::string(name_of(q)) + " kv " + std::string(name_of(kv)) + " out " +
           std::string(name_of(out)) + " heads " + std::to_string(num_kv_heads) + "x" + std::to_string(group_size) +
           " dims " + std::to_string(head_dim_qk) + "/" + std::to_string(head_dim_vo) + " page " +
           std::to_string(page_size) + " layout " + std::to_string(static_cast<int>(layout)) + " rows " +
           std::to_string(num_rows) + " keys " + std::to_string(num_keys) + " first " + std::to_string(first_token) +
           " pos " + std::to_string(pos_begin) + " seed " + std::to_string(seed);
  }
};

/// Bytes of a tensor in any element type; starts as NaN everywhere.
class Tensor {
 public:
  Tensor(DType dtype, std::size_t n) : dtype_(dtype), bytes_(n * size_of(dtype), 0xFF) {
    if (dtype == DType::f8e4m3) std::memset(bytes_.data(), 0x7F, bytes_.size());
  }
  /// Stores x rounded to the type; returns the stored value.
  double set(std::int64_t i, float x) {
    double stored = 0;
    cpu::with_type(dtype_, [&](auto tag) {
      const auto value = cpu::from_f32<decltype(tag)>(x);
      std::memcpy(bytes_.data() + i * static_cast<std::int64_t>(sizeof value), &value, sizeof value);
      stored = static_cast<double>(cpu::to_f32(value));
    });
    return stored;
  }
  [[nodiscard]] double get(std::int64_t i) const {
    double x = 0;
    cpu::with_type(dtype_, [&](auto tag) {
      std::memcpy(&tag, bytes_.data() + i * static_cast<std::int64_t>(sizeof tag), sizeof tag);
      x = static_cast<double>(cpu::to_f32(tag));
    });
    return x;
  }
  [[nodiscard]] void* data() { return bytes_.data(); }
  [[nodiscard]] const std::vector<unsigned char>& bytes() const { return bytes_; }

 private:
  DType dtype_;
  std::vector<unsigned char> bytes_;
};

/// A piece of the key range and of the rows, as the caller of Case::run cuts them.
struct Piece {
  int key_begin = 0;
  int num_keys = 0;
  std::vector<std::int32_t> rows;
};

struct Errors {
  double o = 0;             ///< max |o - ref| / max |ref|
  double lse = 0;           ///< max |lse - ref|
  bool exact_empty = true;  ///< rows without keys: O = 0, LSE = -inf
  bool fences = true;
};

class Case {
 public:
  explicit Case(const CaseSpec& spec);

  /// One item over all rows and keys, straight to the output.
  void run_direct();
  /// Pieces leave partial states; then every row is merged. In batch-invariant mode pieces leave one state a chunk, or
  /// one folded state where `fold_first` and the piece starts the keys.
  void run_pieces(const std::vector<Piece>& pieces, bool fold_first = true);

  [[nodiscard]] Errors errors() const;
  /// Bits of outputs and LSE.
  [[nodiscard]] std::vector<unsigned char> bits() const;
  [[nodiscard]] std::vector<std::int32_t> all_rows() const;
  /// Shrinks the range that an item promises to be unmasked, so that more tiles take the masked path.
  bool distrust_unmasked = false;

  std::vector<detail::RowRange> ranges;

 private:
  detail::WorkItem item_of(const Piece& piece);
  void attend(const detail::WorkItem& item);
  [[nodiscard]] std::int64_t kv_index(const PagedTensor& t, int key, int head) const;
  [[nodiscard]] bool visible(int row, int key) const;

  CaseSpec spec_;
  std::mt19937_64 rng_;
  Tensor q_;
  Tensor k_;
  Tensor v_;
  Tensor out_;
  std::vector<float> lse_;
  KvCache kv_;
  cpu::AttendParams params_;
  std::vector<std::int32_t> page_ids_;
  std::vector<std::int32_t> item_rows_;
  std::vector<float> slopes_, sinks_, k_scale_, v_scale_;
  std::vector<float> partial_o_, partial_lse_;
  bool fences_ = true;
};

}  // namespace headwater::test
