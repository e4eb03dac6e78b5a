// The AVX2 + FMA + F16C level: all products in fp32.
#include "cpu/simd/entry.h"
#include "cpu/simd/vec_avx2.h"

namespace headwater::cpu {

const Kernels kAvx2Kernels = simd::kernels_of<simd::Avx2>;

}  // namespace headwater::cpu
