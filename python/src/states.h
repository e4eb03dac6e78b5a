// Partial states and lists of page copies as Python gives them; the CPU's functions and CUDA's take the same ones.
#pragma once

#include <vector>

#include "bindings.h"

namespace headwater::python {

/// A pair (v, s), read; its shapes agree.
struct State {
  Rows v;
  Lse s;
  State(nb::handle v_object, const char* v_name, nb::handle s_object, const char* s_name, LseBase base,
        int device = kHost);
};

/// Outputs [rows, heads, head_dim] and [rows, heads], made where None was given.
struct Result {
  nb::object v_object;
  nb::object s_object;
  Rows v;
  Lse s;
  Result(nb::object out_v, nb::object out_s, nb::handle like_v, nb::handle like_s, std::int64_t rows, const Rows& in,
         LseBase base, int device = kHost);
  [[nodiscard]] nb::tuple pair() const { return nb::make_tuple(v_object, s_object); }
};

/// (src, dst, num_tokens) tuples.
[[nodiscard]] std::vector<cpu::PageCopy> page_copies(nb::handle copies);

}  // namespace headwater::python
