// ops_kernels.h compiled for the baseline instruction set.
#include "engine/ops_kernels.h"

namespace headwater::engine {

extern const Ops kGenericOps = {"generic", &rms_norm_kernel, &rope_kernel, &swiglu_kernel, &convert_kernel};

}  // namespace headwater::engine
