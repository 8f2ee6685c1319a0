/* Linear layers, norms and activations of fp32 rows, for processors with AVX-512 VNNI: what step.c and encoder.c share.

   Weights are bytes with one scale an output, bf16 or fp32; for bytes the activations of each token are bytes, too, with
   a scale of their own. No row's rounding depends on the other rows. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 6    /* of activations that share one pass over a block of weights: 6 × 4 sums stay in registers */
#define OUTPUTS 64 /* of a block of weights: four registers of sixteen sums */
#define UNROLLED _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline))

typedef enum { BYTES, BF16, FP32 } Kind;
typedef struct {
    const void *weight;
    const float *scale, *bias, *balance; /* with a balance, inputs are multiplied by it before they become bytes */
    int64_t in, out, kind;               /* in % 16 is 0 */
} Linear;
typedef struct { const float *weight, *bias; } Norm; /* without a weight there is none, without a bias it is RMS */

/* ---- sixteen numbers at a time ----------------------------------------------------------------------------- */

INLINE __m512 load(const Kind kind, const void *p, int64_t at) { /* bf16 is the upper half of fp32 */
    if (kind == FP32) return _mm512_loadu_ps((const float *)p + at);
    __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)p + at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE __m512 expo(__m512 x) { /* 2^n · e^r with |r| <= ln 2 / 2 */
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-200.f)), _mm512_set1_ps(88.f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.f / 720);
    const float taylor[] = {1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f};
    UNROLLED for (int i = 0; i < 6; i++) y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(taylor[i]));
    return _mm512_scalef_ps(y, n);
}

INLINE __m512 gelu(__m512 x) { /* erf by Abramowitz and Stegun 7.1.26, to 1.5e-7 */
    __m512 z = _mm512_abs_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.70710678f))), one = _mm512_set1_ps(1.f);
    __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(_mm512_set1_ps(0.3275911f), z, one));
    __m512 y = _mm512_set1_ps(1.061405429f);
    const float poly[] = {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f, 0.f};
    UNROLLED for (int i = 0; i < 5; i++) y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(poly[i]));
    __m512 erf = _mm512_fnmadd_ps(y, expo(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(z, z))), one);
    erf = _mm512_mask_sub_ps(erf, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), _mm512_setzero_ps(), erf);
    return _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)), _mm512_add_ps(one, erf));
}

INLINE __m512 gelu_tanh(__m512 x) { /* x · (1 + tanh u) / 2 is x / (1 + e^-2u) */
    __m512 u = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_mul_ps(x, x), x), _mm512_set1_ps(0.044715f), x);
    __m512 e = expo(_mm512_mul_ps(u, _mm512_set1_ps(-2 * 0.79788456f)));
    return _mm512_div_ps(x, _mm512_add_ps(e, _mm512_set1_ps(1.f)));
}

static void activate(float *x, int64_t n, int64_t kind) {
    for (int64_t i = 0; kind && i < n; i += 16) {
        __m512 v = _mm512_loadu_ps(x + i);
        v = kind == 1 ? _mm512_max_ps(v, _mm512_setzero_ps()) : kind == 2 ? gelu(v) : gelu_tanh(v);
        _mm512_storeu_ps(x + i, v);
    }
}

static void normalise(const float *x, float *y, Norm norm, int64_t n, double epsilon) {
    __m512 sum = _mm512_setzero_ps(), square = sum;
    for (int64_t i = 0; norm.bias && i < n; i += 16) sum = _mm512_add_ps(sum, _mm512_loadu_ps(x + i));
    __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / n);
    for (int64_t i = 0; i < n; i += 16) {
        __m512 v = _mm512_sub_ps(_mm512_loadu_ps(x + i), mean);
        square = _mm512_fmadd_ps(v, v, square);
    }
    __m512 by = _mm512_set1_ps((float)(1.0 / sqrt(_mm512_reduce_add_ps(square) / n + epsilon)));
    for (int64_t i = 0; i < n; i += 16) {
        __m512 v = _mm512_mul_ps(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(x + i), mean), by),
                                 _mm512_loadu_ps(norm.weight + i));
        _mm512_storeu_ps(y + i, norm.bias ? _mm512_add_ps(v, _mm512_loadu_ps(norm.bias + i)) : v);
    }
}

/* ---- products ---------------------------------------------------------------------------------------------- */

INLINE __m512 balanced(const float *x, const float *balance, int64_t i) {
    __m512 v = _mm512_loadu_ps(x + i);
    return balance ? _mm512_mul_ps(v, _mm512_loadu_ps(balance + i)) : v;
}

INLINE float largest(const float *x, const float *balance, int64_t n) {
    __m512 most = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(balanced(x, balance, i)));
    return _mm512_reduce_max_ps(most);
}

/* Bytes from -127 to 127 of numbers up to `top` */
INLINE void quantise(const float *x, const float *balance, int64_t n, float top, int8_t *q, float *scale,
                     int32_t *shift) {
    __m512 by = _mm512_set1_ps(top > 0 ? 127.f / top : 0.f);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 16) {
        __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(balanced(x, balance, i), by));
        sum = _mm512_add_epi32(sum, v);
        _mm_storeu_si128((__m128i *)(q + i), _mm512_cvtsepi32_epi8(v));
    }
    *scale = top / 127.f;
    *shift = 128 * _mm512_reduce_add_epi32(sum); /* weights are stored 128 too high, to be unsigned */
}

INLINE void dot_bytes(__m512i *sum, __m512i unsigned_bytes, __m512i signed_bytes) {
    /* _mm512_dpbusd_epi32; gcc 12 copies every sum to another register and back around the intrinsic */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

typedef struct { const float *x; int8_t *bytes; float *scale; int32_t *shift; } Inputs;

INLINE void sum_bytes(const int rows, const Linear *f, Inputs in, int64_t first, __m512 y[ROWS][4]) {
    const uint8_t *w = (const uint8_t *)f->weight + first * f->in;
    __m512i sum[ROWS][4];
    UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < 4; c++) sum[r][c] = _mm512_setzero_si512();
    for (int64_t k = 0; k < f->in; k += 4, w += 4 * OUTPUTS) {
        __m512i part[4];
        UNROLLED for (int c = 0; c < 4; c++) part[c] = _mm512_loadu_si512(w + 64 * c);
        /* the next block comes while this one is multiplied: a step's weights are not in the cache */
        UNROLLED for (int c = 0; c < 4; c++) _mm_prefetch((const char *)w + OUTPUTS * f->in + 64 * c, _MM_HINT_T1);
        UNROLLED for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, in.bytes + r * f->in + k, 4);
            __m512i x = _mm512_set1_epi32(four);
            UNROLLED for (int c = 0; c < 4; c++) dot_bytes(&sum[r][c], part[c], x);
        }
    }
    UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < 4; c++) {
        __m512 whole = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum[r][c], _mm512_set1_epi32(in.shift[r])));
        __m512 by = _mm512_loadu_ps(f->scale + first + 16 * c);
        y[r][c] = _mm512_mul_ps(whole, _mm512_mul_ps(by, _mm512_set1_ps(in.scale[r])));
    }
}

INLINE void sum_floats(const int rows, const Kind kind, const Linear *f, Inputs in, int64_t first, __m512 y[ROWS][4]) {
    UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < 4; c++) y[r][c] = _mm512_setzero_ps();
    for (int64_t k = 0; k < f->in; k++) {
        __m512 part[4];
        UNROLLED for (int c = 0; c < 4; c++) part[c] = load(kind, f->weight, first * f->in + k * OUTPUTS + 16 * c);
        UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < 4; c++)
            y[r][c] = _mm512_fmadd_ps(part[c], _mm512_set1_ps(in.x[r * f->in + k]), y[r][c]);
    }
}

INLINE void block(const int rows, const Kind kind, const Linear *f, Inputs in, int64_t first, float *out) {
    __m512 y[ROWS][4];
    if (kind == BYTES) sum_bytes(rows, f, in, first, y);
    else sum_floats(rows, kind, f, in, first, y);
    UNROLLED for (int c = 0; c < 4; c++) {
        int64_t at = first + 16 * c, left = f->out - at;
        __mmask16 real = left >= 16 ? 0xffff : left > 0 ? (1 << left) - 1 : 0;
        __m512 bias = f->bias ? _mm512_maskz_loadu_ps(real, f->bias + at) : _mm512_setzero_ps();
        UNROLLED for (int r = 0; r < rows; r++)
            _mm512_mask_storeu_ps(out + r * f->out + at, real, _mm512_add_ps(y[r][c], bias));
    }
}

INLINE void blocks(const Kind kind, const Linear *f, Inputs in, int64_t rows, float *out) {
    for (int64_t first = 0; first < f->out; first += OUTPUTS)
        for (int64_t r = 0; r < rows; r += ROWS) {
            Inputs part = {in.x + r * f->in, in.bytes + r * f->in, in.scale + r, in.shift + r};
#define CASE(n) case n: block(n, kind, f, part, first, out + r * f->out); break;
            switch (rows - r < ROWS ? rows - r : ROWS) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
        }
}

/* Rows of bytes with their scales, in memory for rows · (in + 8) bytes */
INLINE Inputs places(const Linear *f, const float *x, int64_t rows, int8_t *bytes) {
    float *scale = (float *)(bytes + rows * f->in);
    return (Inputs){x, bytes, scale, (int32_t *)(scale + rows)};
}

static void linear(const Linear *f, const float *x, int64_t rows, float *y, int8_t *bytes) {
    Inputs in = places(f, x, rows, bytes);
    if (f->kind == FP32) blocks(FP32, f, in, rows, y);
    else if (f->kind == BF16) blocks(BF16, f, in, rows, y);
    else {
        for (int64_t r = 0; r < rows; r++, x += f->in)
            quantise(x, f->balance, f->in, largest(x, f->balance, f->in), in.bytes + r * f->in, in.scale + r, in.shift + r);
        blocks(BYTES, f, in, rows, y);
    }
}
