// ops_kernels.h compiled for AVX-512.
#include "engine/ops_kernels.h"

namespace headwater::engine {

extern const Ops kAvx512Ops = {"avx512", &rms_norm_kernel, &rope_kernel, &swiglu_kernel, &convert_kernel};

}  // namespace headwater::engine
