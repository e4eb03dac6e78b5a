// The AVX-512 level: all products in fp32.
#include "cpu/simd/entry.h"
#include "cpu/simd/vec_avx512.h"

namespace headwater::cpu {

const Kernels kAvx512Kernels = simd::kernels_of<simd::Avx512>;

}  // namespace headwater::cpu
