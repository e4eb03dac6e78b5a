// The AVX-512 level: all products in fp32.
#include "cpu/simd/entry.h"
#include "cpu/simd/vec_avx512.h"

namespace headwater::cpu {

const Kernels kAvx512Kernels = {Isa::avx512, simd::Entry<simd::Avx512>::attend, simd::Entry<simd::Avx512>::scratch,
                                simd::Entry<simd::Avx512>::merge_row};

}  // namespace headwater::cpu
