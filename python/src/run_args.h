// The arrays of an attention call, imported and checked once for what does not depend on a plan. The CPU's run and
// CUDA's take the same ones.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bindings.h"

namespace headwater::python {

struct PyRunArgs {
  /// Optional ones as Python gave them.
  struct Optional {
    nb::handle lse;
    nb::handle alibi_slopes;
    nb::handle sinks;
    nb::handle k_scale;
    nb::handle v_scale;
  };

  Rows q;
  std::vector<Cache> caches;  ///< one for all levels, or one each
  Rows out;
  std::optional<Lse> lse;
  Array alibi_slopes;
  Array sinks;
  ScaleArg k_scale;
  ScaleArg v_scale;
  bool include_sink = true;
  std::optional<Isa> isa;  ///< of the CPU

  /// Everything but q and out; all on `device`.
  void import_rest(nb::handle kv, const std::string& kv_layout, const Optional& given, const std::string& lse_base,
                   bool with_sink, int device);
  /// What a plan of this shape needs; `num_rows`: rows of q, out and lse.
  void check_shapes(const AttentionShape& shape, std::int64_t num_rows, const char* what_rows) const;
  /// The caches, one a level.
  [[nodiscard]] std::vector<KvCache> views(std::size_t num_levels) const;
  /// Everything that the two back ends' RunArgs have in common.
  template <class Args>
  void fill(Args& args) const {
    args.q = q.read();
    args.out = out.view;
    if (lse) args.lse = lse->view;
    if (alibi_slopes.given()) args.alibi_slopes = static_cast<const float*>(alibi_slopes.data());
    if (sinks.given()) args.sinks = static_cast<const float*>(sinks.data());
    args.include_sink = include_sink;
    args.k_scale = k_scale.view();
    args.v_scale = v_scale.view();
  }
};

/// Describes the arrays, for docstrings.
extern const char* const kRunArgsDoc;

}  // namespace headwater::python
