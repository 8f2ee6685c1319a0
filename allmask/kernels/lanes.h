/* Vectors of sixteen numbers: one register with AVX-512, two with AVX2, four with NEON. Code written with them compiles
   for all three. */

#ifndef LANES
#define LANES 16

#include <stdint.h>

#define UNROLLED _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline))

#if defined __aarch64__

#include "lanes_neon.h"

#elif defined __AVX512F__

#include <immintrin.h>

typedef __m512 vec;
typedef __m512i ints;
typedef __mmask16 mask; /* one bit per number */

INLINE vec zeros(void) { return _mm512_setzero_ps(); }
INLINE vec all(float x) { return _mm512_set1_ps(x); }
INLINE vec load(const float *from) { return _mm512_loadu_ps(from); }
INLINE void save(float *to, vec x) { _mm512_storeu_ps(to, x); }
INLINE vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec divide(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec square_root(vec x) { return _mm512_sqrt_ps(x); }
INLINE vec mul_add(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec mul_sub(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); } /* c - a · b */
INLINE vec larger_of(vec a, vec b) { return _mm512_max_ps(a, b); }            /* b, if either is NaN */
INLINE vec smaller_of(vec a, vec b) { return _mm512_min_ps(a, b); }
INLINE vec size_of(vec x) { return _mm512_abs_ps(x); }
INLINE vec to_nearest(vec x) { return _mm512_roundscale_ps(x, 0); }
INLINE vec times_power(vec x, vec n) { return _mm512_scalef_ps(x, n); } /* x · 2^n for whole n */
INLINE vec times_normal_power(vec x, vec n) { return _mm512_scalef_ps(x, n); } /* the same for -126 <= n <= 127 */
INLINE float sum_of(vec x) { return _mm512_reduce_add_ps(x); }
INLINE float largest_of(vec x) { return _mm512_reduce_max_ps(x); }

INLINE mask first(int64_t n) { return n >= LANES ? 0xffff : n > 0 ? (1 << n) - 1 : 0; } /* the first n places */
INLINE mask negative(vec x) { return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ); }
INLINE mask above(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE mask at_most(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
INLINE mask is_nan(vec x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
INLINE int any(mask m) { return m != 0; }
INLINE vec choose(mask m, vec yes, vec no) { return _mm512_mask_mov_ps(no, m, yes); }
INLINE vec load_some(mask m, const float *from) { return _mm512_maskz_loadu_ps(m, from); } /* elsewhere 0, unread */
INLINE void save_some(mask m, float *to, vec x) { _mm512_mask_storeu_ps(to, m, x); }

INLINE ints load_ints(const void *from) { return _mm512_loadu_si512(from); }
INLINE ints load_some_ints(mask m, const void *from) { return _mm512_maskz_loadu_epi32(m, from); }
INLINE void save_ints(void *to, ints x) { _mm512_storeu_si512(to, x); }
INLINE vec as_floats(ints bits) { return _mm512_castsi512_ps(bits); }
INLINE ints no_ints(void) { return _mm512_setzero_si512(); }
INLINE ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
INLINE ints add_ints(ints a, ints b) { return _mm512_add_epi32(a, b); }
INLINE ints sub_ints(ints a, ints b) { return _mm512_sub_epi32(a, b); }
INLINE ints mul_ints(ints a, ints b) { return _mm512_mullo_epi32(a, b); }
INLINE ints either(ints a, ints b) { return _mm512_xor_si512(a, b); }
INLINE ints shifted(ints x, const int bits) { return _mm512_srli_epi32(x, bits); } /* to the right, unsigned */
INLINE mask at_least(ints a, ints b) { return _mm512_cmp_epu32_mask(a, b, _MM_CMPINT_NLT); } /* unsigned */
INLINE ints places(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE ints to_ints(vec x) { return _mm512_cvtps_epi32(x); }
INLINE vec to_floats(ints x) { return _mm512_cvtepi32_ps(x); }
INLINE int32_t sum_of_ints(ints x) { return _mm512_reduce_add_epi32(x); }

INLINE vec load_bf16(const uint16_t *from) { /* bf16 is the upper half of fp32 */
    __m256i half = _mm256_loadu_si256((const __m256i *)from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE void save_bf16(uint16_t *to, int64_t n, vec x) { /* the first n, to the nearest, ties to even */
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm256_mask_storeu_epi16(to, first(n), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
}

#ifdef __AVX512BF16__
INLINE void save_all_bf16(uint16_t *to, vec x) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x)); }
#endif

#else

#include <immintrin.h>

typedef struct { __m256 a, b; } vec;
typedef struct { __m256i a, b; } ints;
typedef vec mask; /* all 32 bits of a number are set or clear */

INLINE vec zeros(void) { return (vec){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE vec all(float x) { return (vec){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE vec load(const float *from) { return (vec){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
INLINE void save(float *to, vec x) { _mm256_storeu_ps(to, x.a), _mm256_storeu_ps(to + 8, x.b); }
INLINE vec add(vec a, vec b) { return (vec){_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
INLINE vec sub(vec a, vec b) { return (vec){_mm256_sub_ps(a.a, b.a), _mm256_sub_ps(a.b, b.b)}; }
INLINE vec mul(vec a, vec b) { return (vec){_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
INLINE vec divide(vec a, vec b) { return (vec){_mm256_div_ps(a.a, b.a), _mm256_div_ps(a.b, b.b)}; }
INLINE vec square_root(vec x) { return (vec){_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
INLINE vec mul_add(vec a, vec b, vec c) {
    return (vec){_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)};
}
INLINE vec mul_sub(vec a, vec b, vec c) { /* c - a · b */
    return (vec){_mm256_fnmadd_ps(a.a, b.a, c.a), _mm256_fnmadd_ps(a.b, b.b, c.b)};
}
INLINE vec larger_of(vec a, vec b) { return (vec){_mm256_max_ps(a.a, b.a), _mm256_max_ps(a.b, b.b)}; }
INLINE vec smaller_of(vec a, vec b) { return (vec){_mm256_min_ps(a.a, b.a), _mm256_min_ps(a.b, b.b)}; }
INLINE vec size_of(vec x) {
    const __m256 sign = _mm256_set1_ps(-0.f);
    return (vec){_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INLINE vec to_nearest(vec x) {
    return (vec){_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                 _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

INLINE __m256 power_of_two(__m256i n) { /* for -126 <= n <= 127 */
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
INLINE __m256 eight_times_power(__m256 x, __m256 n) { /* in two steps, so that subnormal numbers are reached */
    __m256i whole = _mm256_max_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(-252)), half = _mm256_srai_epi32(whole, 1);
    return _mm256_mul_ps(_mm256_mul_ps(x, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
}
INLINE vec times_power(vec x, vec n) { return (vec){eight_times_power(x.a, n.a), eight_times_power(x.b, n.b)}; }
INLINE vec times_normal_power(vec x, vec n) { /* for -126 <= n <= 127 */
    return (vec){_mm256_mul_ps(x.a, power_of_two(_mm256_cvtps_epi32(n.a))),
                 _mm256_mul_ps(x.b, power_of_two(_mm256_cvtps_epi32(n.b)))};
}

INLINE float sum_of(vec x) {
    __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
INLINE float largest_of(vec x) {
    __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

INLINE mask first(int64_t n) { /* the first n places */
    const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    int32_t count = n < 0 ? 0 : n > LANES ? LANES : n;
    return (mask){_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), places)),
                  _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8), places))};
}
INLINE mask above(vec a, vec b) {
    return (mask){_mm256_cmp_ps(a.a, b.a, _CMP_GT_OQ), _mm256_cmp_ps(a.b, b.b, _CMP_GT_OQ)};
}
INLINE mask at_most(vec a, vec b) {
    return (mask){_mm256_cmp_ps(a.a, b.a, _CMP_LE_OQ), _mm256_cmp_ps(a.b, b.b, _CMP_LE_OQ)};
}
INLINE mask negative(vec x) { return above(zeros(), x); }
INLINE mask is_nan(vec x) {
    return (mask){_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)};
}
INLINE int any(mask m) { return _mm256_movemask_ps(_mm256_or_ps(m.a, m.b)) != 0; }
INLINE vec choose(mask m, vec yes, vec no) {
    return (vec){_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}
INLINE vec load_some(mask m, const float *from) { /* elsewhere 0, unread */
    return (vec){_mm256_maskload_ps(from, _mm256_castps_si256(m.a)),
                 _mm256_maskload_ps(from + 8, _mm256_castps_si256(m.b))};
}
INLINE void save_some(mask m, float *to, vec x) {
    _mm256_maskstore_ps(to, _mm256_castps_si256(m.a), x.a);
    _mm256_maskstore_ps(to + 8, _mm256_castps_si256(m.b), x.b);
}

INLINE ints load_ints(const void *from) {
    return (ints){_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)from + 1)};
}
INLINE ints load_some_ints(mask m, const void *from) {
    return (ints){_mm256_maskload_epi32((const int *)from, _mm256_castps_si256(m.a)),
                  _mm256_maskload_epi32((const int *)from + 8, _mm256_castps_si256(m.b))};
}
INLINE void save_ints(void *to, ints x) {
    _mm256_storeu_si256((__m256i *)to, x.a), _mm256_storeu_si256((__m256i *)to + 1, x.b);
}
INLINE vec as_floats(ints bits) { return (vec){_mm256_castsi256_ps(bits.a), _mm256_castsi256_ps(bits.b)}; }
INLINE ints no_ints(void) { return (ints){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE ints all_ints(int32_t x) { return (ints){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE ints add_ints(ints a, ints b) { return (ints){_mm256_add_epi32(a.a, b.a), _mm256_add_epi32(a.b, b.b)}; }
INLINE ints sub_ints(ints a, ints b) { return (ints){_mm256_sub_epi32(a.a, b.a), _mm256_sub_epi32(a.b, b.b)}; }
INLINE ints mul_ints(ints a, ints b) { return (ints){_mm256_mullo_epi32(a.a, b.a), _mm256_mullo_epi32(a.b, b.b)}; }
INLINE ints either(ints a, ints b) { return (ints){_mm256_xor_si256(a.a, b.a), _mm256_xor_si256(a.b, b.b)}; }
INLINE ints shifted(ints x, const int bits) { /* to the right, unsigned */
    return (ints){_mm256_srli_epi32(x.a, bits), _mm256_srli_epi32(x.b, bits)};
}
INLINE mask at_least(ints a, ints b) { /* unsigned */
    return (mask){_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_max_epu32(a.a, b.a), a.a)),
                  _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_max_epu32(a.b, b.b), a.b))};
}
INLINE ints places(void) {
    return (ints){_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
INLINE ints to_ints(vec x) { return (ints){_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE vec to_floats(ints x) { return (vec){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE int32_t sum_of_ints(ints x) {
    __m256i eight = _mm256_add_epi32(x.a, x.b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_srli_si128(four, 4)));
}

INLINE vec load_bf16(const uint16_t *from) { /* bf16 is the upper half of fp32 */
    __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + 8)));
    return (vec){_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}

INLINE __m256i upper_halves(__m256 x) { /* to the nearest bf16, ties to even */
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}
INLINE void save_bf16(uint16_t *to, int64_t n, vec x) { /* the first n */
    __m256i mixed = _mm256_packus_epi32(upper_halves(x.a), upper_halves(x.b)); /* quarters a, b, a, b */
    uint16_t sixteen[LANES];
    _mm256_storeu_si256((__m256i *)(n >= LANES ? to : sixteen), _mm256_permute4x64_epi64(mixed, 0xd8));
    for (int64_t i = 0; n < LANES && i < n; i++) to[i] = sixteen[i];
}

#endif

#ifndef __AVX512BF16__
INLINE void save_all_bf16(uint16_t *to, vec x) { save_bf16(to, LANES, x); }
#endif

/* e^f for |f| <= ln 2 / 2 (Cephes) */
INLINE vec small_exponential(vec f) {
    vec p = mul_add(f, all(1.9875691500e-4f), all(1.3981999507e-3f));
    p = mul_add(p, f, all(8.3334519073e-3f));
    p = mul_add(p, f, all(4.1665795894e-2f));
    p = mul_add(p, f, all(1.6666665459e-1f));
    p = mul_add(p, f, all(5.0000001201e-1f));
    return add(mul_add(mul(p, f), f, f), all(1.0f));
}

/* e^x for x <= 88, to 1 ulp: 2^n times a polynomial in the remainder. 0 for x <= -87; NaN stays NaN. */
INLINE vec exponential(vec x) {
    vec n = to_nearest(mul(x, all(1.44269504f)));
    vec f = mul_add(n, all(2.12194440e-4f), mul_sub(n, all(0.693359375f), x)); /* ln 2 in two parts */
    return choose(at_most(x, all(-87.0f)), zeros(), times_power(small_exponential(f), n));
}

/* e^x for -87 <= x <= 88, to 1 ulp; NaN stays NaN */
INLINE vec normal_exponential(vec x) {
    vec n = to_nearest(mul(x, all(1.44269504f)));
    vec f = mul_add(n, all(2.12194440e-4f), mul_sub(n, all(0.693359375f), x));
    return times_normal_power(small_exponential(f), n);
}

#endif
