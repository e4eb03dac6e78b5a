// Sixteen fp32 lanes of AVX-512 (F, BW, DQ, VL), and the same with bf16 dot products; the names of vec_avx2.h.
#pragma once

// GCC 12 takes the deliberately undefined operands inside its own intrinsics for a mistake of ours.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>
#include <cstring>

#include "headwater/types.h"

namespace headwater::cpu::simd {

#ifndef HEADWATER_INLINE
#define HEADWATER_INLINE [[gnu::always_inline]] static inline
#endif

struct Avx512 {
  static constexpr Isa kIsa = Isa::avx512;
  static constexpr int kLanes = 16;
  static constexpr int kRegisters = 32;
  static constexpr int kFewRows = 12;  ///< stacked rows up to which the few-rows kernel is faster (at most kFewRowsMax)
  static constexpr bool kDotBf16 = false;
  static constexpr float kExp2Floor = -1000.0F;  ///< scale_by_power(1, kExp2Floor) is exactly 0
  using F = __m512;
  using Mask = __mmask16;

  HEADWATER_INLINE F zero() noexcept { return _mm512_setzero_ps(); }
  HEADWATER_INLINE F set1(float x) noexcept { return _mm512_set1_ps(x); }
  HEADWATER_INLINE F load(const float* p) noexcept { return _mm512_loadu_ps(p); }
  HEADWATER_INLINE void store(float* p, F x) noexcept { _mm512_storeu_ps(p, x); }
  /// The first n lanes, the others zero and not read.
  HEADWATER_INLINE F load_first(const void* p, int n) noexcept {
    return n >= kLanes ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1U << n) - 1U), p);
  }
  /// The 32 bits at p in every lane.
  HEADWATER_INLINE F broadcast(const void* p) noexcept {
    float x;
    std::memcpy(&x, p, sizeof x);
    return _mm512_set1_ps(x);
  }
  /// Asks for a cache line: into L2, or into L1.
  HEADWATER_INLINE void prefetch_far(const char* p) noexcept { _mm_prefetch(p, _MM_HINT_T1); }
  HEADWATER_INLINE void prefetch_near(const char* p) noexcept { _mm_prefetch(p, _MM_HINT_T0); }

  HEADWATER_INLINE F add(F a, F b) noexcept { return _mm512_add_ps(a, b); }
  HEADWATER_INLINE F sub(F a, F b) noexcept { return _mm512_sub_ps(a, b); }
  HEADWATER_INLINE F mul(F a, F b) noexcept { return _mm512_mul_ps(a, b); }
  HEADWATER_INLINE F div(F a, F b) noexcept { return _mm512_div_ps(a, b); }
  HEADWATER_INLINE F fma(F a, F b, F c) noexcept { return _mm512_fmadd_ps(a, b, c); }
  /// b where either is NaN.
  HEADWATER_INLINE F max(F a, F b) noexcept { return _mm512_max_ps(a, b); }
  HEADWATER_INLINE F round(F x) noexcept {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  /// x * 2^n.
  HEADWATER_INLINE F scale_by_power(F x, F n) noexcept { return _mm512_scalef_ps(x, n); }
  /// Exponent and mantissa in [1, 2) of a positive normal number.
  HEADWATER_INLINE F exponent(F x) noexcept { return _mm512_getexp_ps(x); }
  HEADWATER_INLINE F mantissa(F x) noexcept { return _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src); }

  HEADWATER_INLINE Mask less(F a, F b) noexcept { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  HEADWATER_INLINE Mask equal(F a, F b) noexcept { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  /// mask ? a : b.
  HEADWATER_INLINE F select(Mask mask, F a, F b) noexcept { return _mm512_mask_blend_ps(mask, b, a); }
  HEADWATER_INLINE bool all(Mask mask) noexcept { return mask == 0xFFFF; }

  HEADWATER_INLINE __m512i load_i32(const std::int32_t* p) noexcept { return _mm512_loadu_si512(p); }
  HEADWATER_INLINE __m512i count_from(std::int32_t first) noexcept {
    return _mm512_add_epi32(_mm512_set1_epi32(first),
                            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }
  /// Lanes whose range contains pos: pos < hi and (pos >= lo or `sink`). Ranges are int32 per lane.
  HEADWATER_INLINE Mask in_range(const std::int32_t* lo, const std::int32_t* hi, std::int32_t pos, bool sink) noexcept {
    const __m512i at = _mm512_set1_epi32(pos);
    const auto below = _mm512_cmpgt_epi32_mask(load_i32(hi), at);
    const auto since = _mm512_cmple_epi32_mask(load_i32(lo), at);
    return static_cast<Mask>(below & (sink ? 0xFFFF : since));
  }
  /// Lane i stands for position pos + i: inside [lo, hi) or below min(sink_end, hi).
  HEADWATER_INLINE Mask positions_in_range(std::int32_t lo, std::int32_t hi, std::int32_t sink_end,
                                           std::int32_t pos) noexcept {
    const __m512i at = count_from(pos);
    const auto below = _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32(hi));
    const auto since = _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(lo));
    const auto sink = _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32(sink_end));
    return static_cast<Mask>(below & (since | sink));
  }
  /// float(offset + i) in lane i.
  HEADWATER_INLINE F iota(std::int32_t offset) noexcept { return _mm512_cvtepi32_ps(count_from(offset)); }
  /// float(pos - p[i]) in lane i.
  HEADWATER_INLINE F distance(std::int32_t pos, const std::int32_t* p) noexcept {
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_set1_epi32(pos), load_i32(p)));
  }

  /// Halves of two vectors, combined crosswise by op: x's two halves, then y's.
  template <class Op>
  HEADWATER_INLINE F fold_halves(F x, F y, Op op) noexcept {
    return op(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xEE));
  }
  /// op over the lanes of four vectors; result i for vector i in the low four lanes.
  template <class Op>
  HEADWATER_INLINE __m128 reduce4(F a, F b, F c, F d, Op op) noexcept {
    const F ab = op(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));  // a b a b in each quarter
    const F cd = op(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const F x = op(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));  // a b c d in each quarter
    const F y = op(x, _mm512_shuffle_f32x4(x, x, 0x4E));
    return _mm512_castps512_ps128(op(y, _mm512_shuffle_f32x4(y, y, 0xB1)));
  }
  /// The sums of the lanes of four vectors, written to p[0..3].
  HEADWATER_INLINE void reduce_add4(F a, F b, F c, F d, float* p) noexcept {
    _mm_storeu_ps(p, reduce4(
                         a, b, c, d, [](F x, F y) __attribute__((always_inline)) { return _mm512_add_ps(x, y); }));
  }
  /// The same for two pairs that go to different places.
  HEADWATER_INLINE void reduce_add2x2(F a, F b, F c, F d, float* ab, float* cd) noexcept {
    const __m128 x = reduce4(
        a, b, c, d, [](F y, F z) __attribute__((always_inline)) { return _mm512_add_ps(y, z); });
    _mm_storel_pi(reinterpret_cast<__m64*>(ab), x);
    _mm_storeh_pi(reinterpret_cast<__m64*>(cd), x);
  }
  /// The greatest lanes of four vectors, written to p[0..3].
  HEADWATER_INLINE void reduce_max4(F a, F b, F c, F d, float* p) noexcept {
    _mm_storeu_ps(p, reduce4(
                         a, b, c, d, [](F x, F y) __attribute__((always_inline)) { return _mm512_max_ps(x, y); }));
  }

  // Sixteen elements of a type as fp32.
  HEADWATER_INLINE F load_f16(const void* p) noexcept {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }
  HEADWATER_INLINE F load_bf16(const void* p) noexcept {
    const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  }
  /// e4m3 times 2^-8 (kv_factor undoes it): the bits are an fp16's, shifted; 0x7F becomes NaN.
  HEADWATER_INLINE F load_f8(const void* p) noexcept {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    const __m256i bits =
        _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(wide, 8), 1), _mm256_set1_epi16(short(0xBF80)));
    const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7F));
    const auto nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7F));
    return _mm512_cvtph_ps(_mm256_mask_blend_epi16(nan, bits, _mm256_set1_epi16(0x7E00)));
  }
  /// 32 bf16 as the sixteen of even and the sixteen of odd index: one load and two cheap operations.
  HEADWATER_INLINE void load_bf16_split(const void* p, F& even, F& odd) noexcept {
    __m512i x = _mm512_loadu_si512(p);
    asm("" : "+v"(x));  // one load, not one for each use
    even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int(0xFFFF0000U))));
  }
  /// The same, one at a time.
  HEADWATER_INLINE F load_bf16_even(const void* p) noexcept {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
  }
  HEADWATER_INLINE F load_bf16_odd(const void* p) noexcept {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xFFFF0000U))));
  }
  /// Each lane a pair of bf16: the first, and the second, as fp32.
  HEADWATER_INLINE F even_of_pairs(F x) noexcept {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 16));
  }
  HEADWATER_INLINE F odd_of_pairs(F x) noexcept {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(int(0xFFFF0000U))));
  }
  /// Even and odd elements of 32 consecutive values.
  HEADWATER_INLINE void split(F first, F second, F& even, F& odd) noexcept {
    const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odds = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    even = _mm512_permutex2var_ps(first, evens, second);
    odd = _mm512_permutex2var_ps(first, odds, second);
  }
  /// The inverse: evens and odds as 32 consecutive values.
  HEADWATER_INLINE void join_split(F even, F odd, F& first, F& second) noexcept {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    first = _mm512_permutex2var_ps(even, low, odd);
    second = _mm512_permutex2var_ps(even, high, odd);
  }

  HEADWATER_INLINE void store_f16(void* p, F x) noexcept {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  /// Round to nearest even; NaN stays NaN, subnormals stay.
  HEADWATER_INLINE void store_bf16(void* p, F x) noexcept {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const auto nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_blend_epi32(nan, rounded, _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000)));
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }

  /// Transposes a 16 x 16 block in registers.
  HEADWATER_INLINE void transpose(F (&r)[kLanes]) noexcept {
    F t[kLanes];
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // 4 x 4 blocks within each quarter
      const F a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
      const F c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
      t[i] = _mm512_shuffle_ps(a, c, 0x44);
      t[i + 1] = _mm512_shuffle_ps(a, c, 0xEE);
      t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
      t[i + 3] = _mm512_shuffle_ps(b, d, 0xEE);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // quarters: t[i + 4 j] holds, in quarter q, column 4 q + i of rows 4 j ..
      const F a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x44), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xEE);
      const F c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x44), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xEE);
      r[i] = _mm512_shuffle_f32x4(a, c, 0x88);
      r[i + 4] = _mm512_shuffle_f32x4(a, c, 0xDD);
      r[i + 8] = _mm512_shuffle_f32x4(b, d, 0x88);
      r[i + 12] = _mm512_shuffle_f32x4(b, d, 0xDD);
    }
  }
};

#ifdef __AVX512BF16__
struct Avx512Bf16 : Avx512 {
  static constexpr Isa kIsa = Isa::avx512_bf16;
  static constexpr bool kDotBf16 = true;

  /// acc + the products of the two bf16 in each 32-bit lane.
  HEADWATER_INLINE F dot_bf16(F acc, F a, F b) noexcept {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  /// Lane i: a[i] in the low and b[i] in the high half, rounded to bf16 (subnormals to zero).
  HEADWATER_INLINE F pair_bf16(F a, F b) noexcept {
    const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));  // a's sixteen, then b's
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both));
  }
  /// Sixteen weights rounded to bf16 (subnormals to zero).
  HEADWATER_INLINE void store_weights(void* p, F x) noexcept {
    _mm256_storeu_si256(static_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  }
  /// out[d] = bf16 a[d] in the low and b[d] in the high half; a missing row is zero. n is a multiple of 16.
  HEADWATER_INLINE void pair_rows(const char* a, const char* b, int n, float* out) noexcept {
    for (int d = 0; d < n; d += kLanes) {
      __m512i lo = _mm512_setzero_si512();
      __m512i hi = _mm512_setzero_si512();
      if (a != nullptr) lo = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + 2 * d)));
      if (b != nullptr) hi = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 2 * d)));
      _mm512_storeu_si512(out + d, _mm512_or_si512(lo, _mm512_slli_epi32(hi, 16)));
    }
  }
  /// 32 bf16 of two rows interleaved, quarter by quarter; join_interleaved puts fp32 results back in order.
  HEADWATER_INLINE void interleave_16(F a, F b, F& lo, F& hi) noexcept {
    lo = _mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_castps_si512(a), _mm512_castps_si512(b)));
    hi = _mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }
  HEADWATER_INLINE void join_interleaved(F lo, F hi, F& first, F& second) noexcept {
    // Quarter q of lo holds elements 8 q .. 8 q + 3, of hi 8 q + 4 .. 8 q + 7.
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    const F x = _mm512_permutex2var_ps(lo, low, hi);
    second = _mm512_permutex2var_ps(lo, high, hi);
    first = x;
  }
};
#endif

}  // namespace headwater::cpu::simd
