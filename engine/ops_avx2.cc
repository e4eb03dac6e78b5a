// ops_kernels.h compiled for AVX2 and FMA.
#include "engine/ops_kernels.h"

namespace headwater::engine {

extern const Ops kAvx2Ops = {"avx2", &rms_norm_kernel, &rope_kernel, &swiglu_kernel, &convert_kernel};

}  // namespace headwater::engine
