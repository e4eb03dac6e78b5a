// Eight fp32 lanes of AVX2 + FMA + F16C: the vocabulary that the kernels in this folder are written in.
//
// Every level defines the same names; loads and stores are unaligned (free where the address happens to be aligned).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "headwater/types.h"

namespace headwater::cpu::simd {

#define HEADWATER_INLINE [[gnu::always_inline]] static inline

struct Avx2 {
  static constexpr Isa kIsa = Isa::avx2;
  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 16;
  static constexpr int kFewRows = 12;  ///< stacked rows up to which the few-rows kernel is faster (at most kFewRowsMax)
  static constexpr bool kDotBf16 = false;
  static constexpr float kExp2Floor = -127.0F;  ///< scale_by_power(1, kExp2Floor) is exactly 0
  using F = __m256;
  using Mask = __m256;

  HEADWATER_INLINE F zero() noexcept { return _mm256_setzero_ps(); }
  HEADWATER_INLINE F set1(float x) noexcept { return _mm256_set1_ps(x); }
  HEADWATER_INLINE F load(const float* p) noexcept { return _mm256_loadu_ps(p); }
  HEADWATER_INLINE void store(float* p, F x) noexcept { _mm256_storeu_ps(p, x); }
  /// Eight lanes; other levels also load fewer.
  HEADWATER_INLINE F load_first(const void* p, int /*n*/) noexcept {
    return _mm256_loadu_ps(static_cast<const float*>(p));
  }
  /// The 32 bits at p in every lane.
  HEADWATER_INLINE F broadcast(const void* p) noexcept {
    float x;
    std::memcpy(&x, p, sizeof x);
    return _mm256_set1_ps(x);
  }

  /// Asks for a cache line: into L2, or into L1.
  HEADWATER_INLINE void prefetch_far(const char* p) noexcept { _mm_prefetch(p, _MM_HINT_T1); }
  HEADWATER_INLINE void prefetch_near(const char* p) noexcept { _mm_prefetch(p, _MM_HINT_T0); }

  HEADWATER_INLINE F add(F a, F b) noexcept { return _mm256_add_ps(a, b); }
  HEADWATER_INLINE F sub(F a, F b) noexcept { return _mm256_sub_ps(a, b); }
  HEADWATER_INLINE F mul(F a, F b) noexcept { return _mm256_mul_ps(a, b); }
  HEADWATER_INLINE F div(F a, F b) noexcept { return _mm256_div_ps(a, b); }
  HEADWATER_INLINE F fma(F a, F b, F c) noexcept { return _mm256_fmadd_ps(a, b, c); }
  /// b where either is NaN.
  HEADWATER_INLINE F max(F a, F b) noexcept { return _mm256_max_ps(a, b); }
  HEADWATER_INLINE F round(F x) noexcept { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

  /// x * 2^n for integral n in [-127, 127] and x in [0.5, 2): adds to the exponent; n = -127 gives 0 for x = 1.
  HEADWATER_INLINE F scale_by_power(F x, F n) noexcept {
    const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), shift));
  }
  /// Exponent and mantissa in [1, 2) of a positive normal number.
  HEADWATER_INLINE F exponent(F x) noexcept {
    const __m256i e = _mm256_srli_epi32(_mm256_castps_si256(x), 23);
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(e, _mm256_set1_epi32(127)));
  }
  HEADWATER_INLINE F mantissa(F x) noexcept {
    const __m256i m = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x007FFFFF));
    return _mm256_castsi256_ps(_mm256_or_si256(m, _mm256_set1_epi32(0x3F800000)));
  }

  HEADWATER_INLINE Mask less(F a, F b) noexcept { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  HEADWATER_INLINE Mask equal(F a, F b) noexcept { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
  /// mask ? a : b.
  HEADWATER_INLINE F select(Mask mask, F a, F b) noexcept { return _mm256_blendv_ps(b, a, mask); }
  HEADWATER_INLINE bool all(Mask mask) noexcept { return _mm256_movemask_ps(mask) == 0xFF; }

  /// Lanes whose range contains pos: pos < hi and (pos >= lo or pos < sink_end). Ranges are int32 per lane.
  HEADWATER_INLINE Mask in_range(const std::int32_t* lo, const std::int32_t* hi, std::int32_t pos, bool sink) noexcept {
    const __m256i at = _mm256_set1_epi32(pos);
    const __m256i below = _mm256_cmpgt_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(hi)), at);
    const __m256i before = _mm256_cmpgt_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(lo)), at);
    const __m256i hidden = sink ? _mm256_setzero_si256() : before;
    return _mm256_castsi256_ps(_mm256_andnot_si256(hidden, below));
  }
  /// Lane i stands for position pos + i: inside [lo, hi) or below min(sink_end, hi).
  HEADWATER_INLINE Mask positions_in_range(std::int32_t lo, std::int32_t hi, std::int32_t sink_end,
                                           std::int32_t pos) noexcept {
    const __m256i at = _mm256_add_epi32(_mm256_set1_epi32(pos), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), at);
    const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(lo), at);
    const __m256i sink = _mm256_cmpgt_epi32(_mm256_set1_epi32(sink_end), at);
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_andnot_si256(sink, before), below));
  }
  /// float(pos + i - origin) in lane i.
  HEADWATER_INLINE F iota(std::int32_t offset) noexcept {
    return _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_set1_epi32(offset), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
  }
  /// float(pos - p[i]) in lane i.
  HEADWATER_INLINE F distance(std::int32_t pos, const std::int32_t* p) noexcept {
    const __m256i origin = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_set1_epi32(pos), origin));
  }

  /// The sums of the lanes of four vectors, written to p[0..3].
  HEADWATER_INLINE void reduce_add4(F a, F b, F c, F d, float* p) noexcept {
    const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
  }

  /// The same for two pairs that go to different places.
  HEADWATER_INLINE void reduce_add2x2(F a, F b, F c, F d, float* ab, float* cd) noexcept {
    const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    const __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    _mm_storel_pi(reinterpret_cast<__m64*>(ab), y);
    _mm_storeh_pi(reinterpret_cast<__m64*>(cd), y);
  }
  /// The greatest lanes of four vectors, written to p[0..3].
  HEADWATER_INLINE void reduce_max4(F a, F b, F c, F d, float* p) noexcept {
    const F ab = _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));  // a b a b
    const F cd = _mm256_max_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const F x = _mm256_max_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));  // a b c d
    _mm_storeu_ps(p, _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
  }

  // Eight elements of a type as fp32.
  HEADWATER_INLINE F load_f16(const void* p) noexcept {
    return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  HEADWATER_INLINE F load_bf16(const void* p) noexcept {
    const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  }
  /// e4m3 times 2^-8: the bits are an fp16's, shifted; 0x7F becomes NaN.
  HEADWATER_INLINE F load_f8(const void* p) noexcept {
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
    const __m128i bits = _mm_and_si128(_mm_srai_epi16(_mm_slli_epi16(wide, 8), 1), _mm_set1_epi16(short(0xBF80)));
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7F)), _mm_set1_epi16(0x7F));
    return _mm256_cvtph_ps(_mm_or_si128(bits, _mm_and_si128(nan, _mm_set1_epi16(0x7E00))));
  }
  /// Sixteen bf16 as the eight of even and the eight of odd index: one load and two cheap operations.
  HEADWATER_INLINE void load_bf16_split(const void* p, F& even, F& odd) noexcept {
    __m256i x = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    asm("" : "+x"(x));  // one load, not one for each use: load ports are the scarce thing here
    even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xFFFF0000U))));
  }
  /// The same, one at a time.
  HEADWATER_INLINE F load_bf16_even(const void* p) noexcept {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)), 16));
  }
  HEADWATER_INLINE F load_bf16_odd(const void* p) noexcept {
    const __m256i x = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xFFFF0000U))));
  }
  /// Each lane a pair of bf16: the first, and the second, as fp32.
  HEADWATER_INLINE F even_of_pairs(F x) noexcept {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 16));
  }
  HEADWATER_INLINE F odd_of_pairs(F x) noexcept {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(int(0xFFFF0000U))));
  }
  /// Even and odd elements of sixteen consecutive values.
  HEADWATER_INLINE void split(F first, F second, F& even, F& odd) noexcept {
    const F lo = _mm256_permute2f128_ps(first, second, 0x20);
    const F hi = _mm256_permute2f128_ps(first, second, 0x31);
    even = _mm256_shuffle_ps(lo, hi, 0x88);
    odd = _mm256_shuffle_ps(lo, hi, 0xDD);
  }
  /// The inverse: evens and odds as sixteen consecutive values.
  HEADWATER_INLINE void join_split(F even, F odd, F& first, F& second) noexcept {
    const F lo = _mm256_unpacklo_ps(even, odd);
    const F hi = _mm256_unpackhi_ps(even, odd);
    first = _mm256_permute2f128_ps(lo, hi, 0x20);
    second = _mm256_permute2f128_ps(lo, hi, 0x31);
  }

  HEADWATER_INLINE void store_f16(void* p, F x) noexcept {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  /// Round to nearest even; NaN stays NaN.
  HEADWATER_INLINE void store_bf16(void* p, F x) noexcept {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000)), nan);
    const __m256i high = _mm256_srli_epi32(rounded, 16);
    _mm_storeu_si128(static_cast<__m128i*>(p),
                     _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
  }

  /// Transposes an 8 x 8 block in registers.
  HEADWATER_INLINE void transpose(F (&r)[kLanes]) noexcept {
    const F a0 = _mm256_unpacklo_ps(r[0], r[1]), a1 = _mm256_unpackhi_ps(r[0], r[1]);
    const F a2 = _mm256_unpacklo_ps(r[2], r[3]), a3 = _mm256_unpackhi_ps(r[2], r[3]);
    const F a4 = _mm256_unpacklo_ps(r[4], r[5]), a5 = _mm256_unpackhi_ps(r[4], r[5]);
    const F a6 = _mm256_unpacklo_ps(r[6], r[7]), a7 = _mm256_unpackhi_ps(r[6], r[7]);
    const F b0 = _mm256_shuffle_ps(a0, a2, 0x44), b1 = _mm256_shuffle_ps(a0, a2, 0xEE);
    const F b2 = _mm256_shuffle_ps(a1, a3, 0x44), b3 = _mm256_shuffle_ps(a1, a3, 0xEE);
    const F b4 = _mm256_shuffle_ps(a4, a6, 0x44), b5 = _mm256_shuffle_ps(a4, a6, 0xEE);
    const F b6 = _mm256_shuffle_ps(a5, a7, 0x44), b7 = _mm256_shuffle_ps(a5, a7, 0xEE);
    r[0] = _mm256_permute2f128_ps(b0, b4, 0x20);
    r[1] = _mm256_permute2f128_ps(b1, b5, 0x20);
    r[2] = _mm256_permute2f128_ps(b2, b6, 0x20);
    r[3] = _mm256_permute2f128_ps(b3, b7, 0x20);
    r[4] = _mm256_permute2f128_ps(b0, b4, 0x31);
    r[5] = _mm256_permute2f128_ps(b1, b5, 0x31);
    r[6] = _mm256_permute2f128_ps(b2, b6, 0x31);
    r[7] = _mm256_permute2f128_ps(b3, b7, 0x31);
  }
};

}  // namespace headwater::cpu::simd
