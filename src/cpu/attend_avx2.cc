// The AVX2 + FMA + F16C level: all products in fp32.
#include "cpu/simd/entry.h"
#include "cpu/simd/vec_avx2.h"

namespace headwater::cpu {

const Kernels kAvx2Kernels = {Isa::avx2, simd::Entry<simd::Avx2>::attend, simd::Entry<simd::Avx2>::scratch,
                              simd::Entry<simd::Avx2>::merge_row};

}  // namespace headwater::cpu
