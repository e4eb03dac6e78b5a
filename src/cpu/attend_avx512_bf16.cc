// The AVX-512-BF16 level: bf16 queries on bf16 KV are dot products with fp32 sums, everything else fp32.
#include "cpu/simd/entry.h"
#include "cpu/simd/vec_avx512.h"

namespace headwater::cpu {

const Kernels kAvx512Bf16Kernels = simd::kernels_of<simd::Avx512Bf16>;

}  // namespace headwater::cpu
