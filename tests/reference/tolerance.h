// The one tolerance rule of the project: used by every comparison of attention results, whatever back end made them.
//
//   class = the coarsest of q, 16-bit KV and out: fp32 2e-5, fp16 5e-3, bf16 2e-2; fp32 q and out on 16-bit KV 5e-3;
//           fp8 KV takes q's class (the reference reads the dequantised KV).
//   O:    masks of NaN and infinity equal; max |error| / max |reference| < class; and max |error| <= 2 x the error of a
//         naive implementation in the same types + rounding.
//   LSE:  masks equal; |error| < the LSE bound x max(1, |reference|). Probabilities may be 16-bit, LSE is always fp32.
#pragma once

#include <string>

#include "headwater/options.h"
#include "headwater/view.h"
#include "reference/attention.h"

namespace headwater::reference {

struct Tolerance {
  double o = 0.0;
  double lse = 0.0;
  DType naive = DType::f32;  ///< arithmetic of the naive implementation
};

Tolerance tolerance_of(const AttentionShape& shape);

/// What a comparison found; for tables.
struct Difference {
  double o_abs = 0.0;     ///< max |error| of O
  double o_rel = 0.0;     ///< the same / max |reference|
  double lse = 0.0;       ///< max of |error| / max(1, |reference|) of LSE
  std::string complaint;  ///< empty: within tolerance
};

/// Compares outputs with the reference. `naive` may be null (its bound is then left out); `lse.data` too.
Difference compare(const AttentionShape& shape, const Result& expected, const Result* naive, ConstRowsView out,
                   ConstLseView lse);

}  // namespace headwater::reference
