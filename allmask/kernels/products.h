/* Linear layers, norms and activations of fp32 rows, with VNNI (AVX-512 or AVX-VNNI), AVX2 or NEON; for decode_step.c and
   int8.c.

   Weights are int8 with one scale per output, bf16 or fp32. With int8 weights the activations are quantized to int8,
   too, with one scale per token. The result of a row does not depend on the other rows. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "lanes.h"

#define OUTPUTS 64 /* per block of weights: four vectors of sums */

typedef enum { INT8, BF16, FP32 } Kind;
typedef struct {
    const void *weight;
    const int32_t *offset;                   /* of int8 sums: -128 times the sum of LIMITED weights, else NULL */
    const float *scale, *bias, *input_scale; /* inputs are multiplied by input_scale, unless NULL, then quantized */
    int64_t in, out, kind;                   /* in is a multiple of 16 */
} Linear;
typedef struct { const float *weight, *bias; } Norm; /* layer norm, or RMS norm if bias is NULL; none if weight is NULL */

/* ---- activations and norms --------------------------------------------------------------------------------- */

INLINE vec load_as(const Kind kind, const void *p, int64_t at) {
    return kind == FP32 ? load((const float *)p + at) : load_bf16((const uint16_t *)p + at);
}

INLINE vec gelu(vec x) { /* erf as in Abramowitz and Stegun 7.1.26: error below 1.5e-7 */
    vec z = size_of(mul(x, all(0.70710678f))), one = all(1.f);
    vec t = divide(one, mul_add(all(0.3275911f), z, one));
    vec y = all(1.061405429f);
    const float poly[] = {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f, 0.f};
    UNROLLED for (int i = 0; i < 5; i++) y = mul_add(y, t, all(poly[i]));
    vec erf = mul_sub(y, exponential(sub(zeros(), mul(z, z))), one);
    erf = choose(negative(x), sub(zeros(), erf), erf);
    return mul(mul(x, all(0.5f)), add(one, erf));
}

INLINE vec gelu_tanh(vec x) { /* x · (1 + tanh u) / 2 is x / (1 + e^-2u) */
    vec u = mul_add(mul(mul(x, x), x), all(0.044715f), x);
    vec e = exponential(smaller_of(all(88.f), mul(u, all(-2 * 0.79788456f))));
    return divide(x, add(e, all(1.f)));
}

static void activate(float *x, int64_t n, int64_t kind) {
    for (int64_t i = 0; kind && i < n; i += 16) {
        vec v = load(x + i);
        v = kind == 1 ? larger_of(v, zeros()) : kind == 2 ? gelu(v) : gelu_tanh(v);
        save(x + i, v);
    }
}

static void normalize(const float *x, float *y, Norm norm, int64_t n, double epsilon) {
    vec sum = zeros(), square = sum;
    for (int64_t i = 0; norm.bias && i < n; i += 16) sum = add(sum, load(x + i));
    vec mean = all(sum_of(sum) / n);
    for (int64_t i = 0; i < n; i += 16) {
        vec v = sub(load(x + i), mean);
        square = mul_add(v, v, square);
    }
    vec factor = all((float)(1.0 / sqrt(sum_of(square) / n + epsilon)));
    for (int64_t i = 0; i < n; i += 16) {
        vec v = mul(mul(sub(load(x + i), mean), factor), load(norm.weight + i));
        save(y + i, norm.bias ? add(v, load(norm.bias + i)) : v);
    }
}

/* ---- int8 -------------------------------------------------------------------------------------------------- */

/* `Int8` stores a quantized activation. `Weights` holds STEP inputs for each of sixteen outputs, `Activations` those inputs of
   one row. `dot_int8` adds the dot products to sixteen sums, exactly.

   The instructions of x86 multiply unsigned by signed bytes. With VNNI, which adds four products to 32 bits at once, the
   weights are unsigned: 128 is added to them. AVX2 adds products in 16 bits, and the activations are unsigned: 128 is added
   to them. Weights are signed and so small that no sum of four products overflows; see `limited` in int8.py. NEON
   multiplies signed bytes. */

typedef enum { UNSIGNED, LIMITED, SIGNED } Format; /* of weights; as in int8.py */

#if defined __aarch64__

#define FORMAT SIGNED
#define STEP 8
#define ROWS 4
#define VECTORS(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 2 : 1)

typedef int8_t Int8;
typedef struct { int8x16_t first[4], second[4]; } Weights; /* four inputs, then four more, of four outputs in each register */
typedef int8x8_t Activations;

INLINE void save_int8(Int8 *to, ints x) {
    int16x8_t a = vcombine_s16(vqmovn_s32(x.q[0]), vqmovn_s32(x.q[1]));
    int16x8_t b = vcombine_s16(vqmovn_s32(x.q[2]), vqmovn_s32(x.q[3]));
    vst1q_s8(to, vcombine_s8(vqmovn_s16(a), vqmovn_s16(b)));
}

INLINE Weights load_weights(const uint8_t *from) {
    Weights w;
    UNROLLED for (int i = 0; i < 4; i++) {
        w.first[i] = vreinterpretq_s8_u8(vld1q_u8(from + 16 * i));
        w.second[i] = vreinterpretq_s8_u8(vld1q_u8(from + 4 * OUTPUTS + 16 * i));
    }
    return w;
}

INLINE Activations load_activations(const Int8 *from) { return vld1_s8(from); }

#ifdef __ARM_FEATURE_DOTPROD

INLINE void dot_int8(ints *sum, Weights w, Activations x) {
    UNROLLED for (int i = 0; i < 4; i++) {
        sum->q[i] = vdotq_lane_s32(sum->q[i], w.first[i], x, 0);
        sum->q[i] = vdotq_lane_s32(sum->q[i], w.second[i], x, 1);
    }
}

#else

INLINE int8x8_t four_twice(Activations x, const int second) {
    int32x2_t fours = vreinterpret_s32_s8(x);
    return vreinterpret_s8_s32(second ? vdup_lane_s32(fours, 1) : vdup_lane_s32(fours, 0));
}

INLINE void dot_int8(ints *sum, Weights w, Activations x) { /* two products fit in 16 bits: 2 · 127 · 127 < 2^15 */
    const int8x8_t x0 = four_twice(x, 0), x1 = four_twice(x, 1);
    UNROLLED for (int i = 0; i < 4; i++) {
        int16x8_t low = vmlal_s8(vmull_s8(vget_low_s8(w.first[i]), x0), vget_low_s8(w.second[i]), x1);
        int16x8_t high = vmlal_s8(vmull_s8(vget_high_s8(w.first[i]), x0), vget_high_s8(w.second[i]), x1);
        sum->q[i] = vaddq_s32(sum->q[i], vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
    }
}

#endif

#ifdef __ARM_FEATURE_MATMUL_INT8

/* One instruction multiplies two rows by two outputs, eight inputs each. So while two rows are summed, a register of the
   first has both rows of two outputs, and one of the second those of the next two; `separate` sorts them. */
#define PAIRS_OF_ROWS

INLINE void dot_two_rows(ints *even, ints *odd, Weights w, Activations x0, Activations x1) {
    const int8x16_t rows = vcombine_s8(x0, x1);
    UNROLLED for (int i = 0; i < 4; i++) {
        int32x4x2_t outputs = vzipq_s32(vreinterpretq_s32_s8(w.first[i]), vreinterpretq_s32_s8(w.second[i]));
        even->q[i] = vmmlaq_s32(even->q[i], rows, vreinterpretq_s8_s32(outputs.val[0]));
        odd->q[i] = vmmlaq_s32(odd->q[i], rows, vreinterpretq_s8_s32(outputs.val[1]));
    }
}

INLINE void separate(ints *even, ints *odd) {
    UNROLLED for (int i = 0; i < 4; i++) {
        int32x4_t two = even->q[i], next = odd->q[i];
        even->q[i] = vcombine_s32(vget_low_s32(two), vget_low_s32(next));
        odd->q[i] = vcombine_s32(vget_high_s32(two), vget_high_s32(next));
    }
}

#endif

#elif defined __AVX512F__

#define FORMAT UNSIGNED
#define STEP 4
#define ROWS 6          /* rows of activations per pass over a block of weights: 6 × 4 vectors of sums fit in registers */
#define VECTORS(rows) 4 /* of sums per row */

typedef int8_t Int8;
typedef __m512i Weights, Activations;

INLINE void save_int8(Int8 *to, ints x) { _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8(x)); }
INLINE Weights load_weights(const uint8_t *from) { return _mm512_loadu_si512(from); }

INLINE Activations load_activations(const Int8 *from) {
    int32_t four;
    memcpy(&four, from, 4);
    return _mm512_set1_epi32(four);
}

INLINE void dot_int8(ints *sum, Weights w, Activations x) {
    /* _mm512_dpbusd_epi32; gcc 12 copies every sum to another register and back around the intrinsic */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(w), "v"(x));
}

#else

#define ROWS 4
#define VECTORS(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 2 : 1)

INLINE __m256i load_256(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE __m256i broadcast(const void *four) { return _mm256_castps_si256(_mm256_broadcast_ss((const float *)four)); }
INLINE __m256i sixteen_bits(ints x) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8); }

#ifdef __AVXVNNI__

#define FORMAT UNSIGNED
#define STEP 4

typedef int8_t Int8;
typedef ints Weights;
typedef __m256i Activations;

INLINE void save_int8(Int8 *to, ints x) {
    __m256i mixed = sixteen_bits(x);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(mixed), _mm256_extracti128_si256(mixed, 1));
    _mm_storeu_si128((__m128i *)to, bytes);
}

INLINE Weights load_weights(const uint8_t *from) { return (Weights){load_256(from), load_256(from + 32)}; }
INLINE Activations load_activations(const Int8 *from) { return broadcast(from); }

#ifndef VNNI_PREFIX
#define VNNI_PREFIX "%{vex%} " /* the same instruction of AVX-512 has another encoding */
#endif

INLINE void dot_int8(ints *sum, Weights w, Activations x) {
    __asm__(VNNI_PREFIX "vpdpbusd %2, %1, %0" : "+x"(sum->a) : "x"(w.a), "x"(x));
    __asm__(VNNI_PREFIX "vpdpbusd %2, %1, %0" : "+x"(sum->b) : "x"(w.b), "x"(x));
}

#else

#define FORMAT LIMITED
#define STEP 8

typedef uint8_t Int8;
typedef struct { __m256i a[2], b[2]; } Weights; /* four inputs each of eight outputs (a) and eight more (b) */
typedef struct { __m256i first, second; } Activations;

INLINE void save_int8(Int8 *to, ints x) {
    __m256i mixed = _mm256_add_epi16(sixteen_bits(x), _mm256_set1_epi16(128));
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(mixed), _mm256_extracti128_si256(mixed, 1));
    _mm_storeu_si128((__m128i *)to, bytes);
}

INLINE Weights load_weights(const uint8_t *from) {
    const uint8_t *next = from + 4 * OUTPUTS;
    return (Weights){{load_256(from), load_256(next)}, {load_256(from + 32), load_256(next + 32)}};
}

INLINE Activations load_activations(const Int8 *from) { return (Activations){broadcast(from), broadcast(from + 4)}; }

INLINE void add_products(__m256i *sum, const __m256i w[2], Activations x) {
    __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(x.first, w[0]), _mm256_maddubs_epi16(x.second, w[1]));
    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    __asm__("" : "+x"(*sum)); /* keeps this order: gcc 12 would add the products first and run out of registers */
}

INLINE void dot_int8(ints *sum, Weights w, Activations x) {
    add_products(&sum->a, w.a, x);
    add_products(&sum->b, w.b, x);
}

#endif
#endif

/* Rows per pass of fp32 and bf16 weights. AVX2 has room for six with one vector of sums each: more products per load. */
#define FLOAT_ROWS (FORMAT == SIGNED ? ROWS : 6)
#define MAX_ROWS 6

int weight_format(void) { return FORMAT; }

INLINE vec scaled(const float *x, const float *input_scale, int64_t i) {
    vec v = load(x + i);
    return input_scale ? mul(v, load(input_scale + i)) : v;
}

INLINE float largest(const float *x, const float *input_scale, int64_t n) {
    vec most = zeros();
    for (int64_t i = 0; i < n; i += 16) most = larger_of(most, size_of(scaled(x, input_scale, i)));
    return largest_of(most);
}

typedef struct { const float *x; Int8 *quantized; float *scale; int32_t *shift; } Inputs; /* rows; see `int8_inputs` */

INLINE Inputs rows_from(Inputs in, int64_t row, int64_t width) {
    return (Inputs){in.x + row * width, in.quantized + row * width, in.scale + row, in.shift + row};
}

/* Quantize one row of numbers up to `top` to -127 … 127 */
INLINE void quantize(Inputs row, const float *input_scale, int64_t n, float top) {
    vec factor = all(top > 0 ? 127.f / top : 0.f);
    ints sum = no_ints();
    for (int64_t i = 0; i < n; i += 16) {
        ints v = to_ints(mul(scaled(row.x, input_scale, i), factor));
        sum = add_ints(sum, v);
        save_int8(row.quantized + i, v);
    }
    *row.scale = top / 127.f;
    *row.shift = FORMAT == UNSIGNED ? 128 * sum_of_ints(sum) : 0; /* to be subtracted, because 128 was added to the weights */
}

/* ---- products ---------------------------------------------------------------------------------------------- */

/* `start` is the first output of a block of weights; 16 · VECTORS(rows) of its outputs are computed, from `at` on */
INLINE void sum_int8(const int rows, const Linear *f, Inputs in, int64_t start, int64_t at, vec y[MAX_ROWS][4]) {
    const uint8_t *w = (const uint8_t *)f->weight + start * f->in + 4 * at;
    const int vectors = VECTORS(rows);
    ints sum[MAX_ROWS][4];
    UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < vectors; c++)
        sum[r][c] = FORMAT == LIMITED ? load_ints(f->offset + start + at + 16 * c) : no_ints();
    for (int64_t k = 0; k < f->in; k += STEP, w += STEP * OUTPUTS) {
        Weights part[4];
        UNROLLED for (int c = 0; c < vectors; c++) part[c] = load_weights(w + 64 * c);
        /* load the next block while this one is multiplied: weights are not in the cache. With one row there is too little
           to multiply, and loads alone are faster. */
        UNROLLED for (int i = 0; rows > 1 && i < STEP; i += 4) UNROLLED for (int c = 0; c < vectors; c++)
            __builtin_prefetch(w + OUTPUTS * (f->in + i) + 64 * c, 0, 2);
        int r = 0;
#ifdef PAIRS_OF_ROWS
        UNROLLED for (; r + 1 < rows; r += 2) {
            Activations even = load_activations(in.quantized + r * f->in + k);
            Activations odd = load_activations(in.quantized + (r + 1) * f->in + k);
            UNROLLED for (int c = 0; c < vectors; c++) dot_two_rows(&sum[r][c], &sum[r + 1][c], part[c], even, odd);
        }
#endif
        UNROLLED for (; r < rows; r++) {
            Activations x = load_activations(in.quantized + r * f->in + k);
            UNROLLED for (int c = 0; c < vectors; c++) dot_int8(&sum[r][c], part[c], x);
        }
    }
#ifdef PAIRS_OF_ROWS
    UNROLLED for (int r = 0; r + 1 < rows; r += 2) UNROLLED for (int c = 0; c < vectors; c++)
        separate(&sum[r][c], &sum[r + 1][c]);
#endif
    UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < vectors; c++) {
        vec whole = to_floats(sub_ints(sum[r][c], all_ints(in.shift[r])));
        vec factor = load(f->scale + start + at + 16 * c);
        y[r][c] = mul(whole, mul(factor, all(in.scale[r])));
    }
}

INLINE void sum_floats(const int rows, const Kind kind, const Linear *f, Inputs in, int64_t start, int64_t at,
                       vec y[MAX_ROWS][4]) {
    const int vectors = VECTORS(rows);
    UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < vectors; c++) y[r][c] = zeros();
    for (int64_t k = 0; k < f->in; k++) {
        vec part[4];
        UNROLLED for (int c = 0; c < vectors; c++)
            part[c] = load_as(kind, f->weight, (start + at + 16 * c) * f->in + 16 * k);
        UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < vectors; c++)
            y[r][c] = mul_add(part[c], all(in.x[r * f->in + k]), y[r][c]);
    }
}

INLINE void tile(const int rows, const Kind kind, const Linear *f, Inputs in, int64_t start, int64_t at, float *out) {
    const int vectors = VECTORS(rows);
    vec y[MAX_ROWS][4];
    if (kind == INT8) sum_int8(rows, f, in, start, at, y);
    else sum_floats(rows, kind, f, in, start, at, y);
    UNROLLED for (int c = 0; c < vectors; c++) {
        int64_t to = start + at + 16 * c;
        if (f->out - to >= LANES) { /* stores with a mask are slow */
            vec bias = f->bias ? load(f->bias + to) : zeros();
            UNROLLED for (int r = 0; r < rows; r++) save(out + r * f->out + to, add(y[r][c], bias));
            continue;
        }
        mask real = first(f->out - to);
        vec bias = f->bias ? load_some(real, f->bias + to) : zeros();
        UNROLLED for (int r = 0; r < rows; r++) save_some(real, out + r * f->out + to, add(y[r][c], bias));
    }
}

/* `groups` times `rows` rows, each with the same strip of weights, which stays in the first cache */
INLINE void block(const int rows, int64_t groups, const Kind kind, const Linear *f, Inputs in, int64_t start, float *out) {
    for (int64_t at = 0; at < OUTPUTS; at += 16 * VECTORS(rows))
        for (int64_t r = 0; r < groups * rows; r += rows)
            tile(rows, kind, f, rows_from(in, r, f->in), start, at, out + r * f->out);
}

INLINE void blocks(const Kind kind, const Linear *f, Inputs in, int64_t rows, float *out) {
    const int each = kind == INT8 ? ROWS : FLOAT_ROWS;
    int64_t r = rows / each * each;
    Inputs rest = rows_from(in, r, f->in);
    for (int64_t start = 0; start < f->out; start += OUTPUTS) {
        block(each, rows / each, kind, f, in, start, out);
#define CASE(n) case n: block(n, 1, kind, f, rest, start, out + r * f->out); break;
        switch (rows - r) {
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
        }
    }
}

/* The bytes of quantized rows with their scales and shifts */
static int64_t int8_size(int64_t rows, int64_t in) { return rows * (in * sizeof(Int8) + 8); }

/* Rows to be quantized into a buffer of `int8_size` bytes */
INLINE Inputs int8_inputs(const Linear *f, const float *x, int64_t rows, Int8 *buffer) {
    float *scale = (float *)(buffer + rows * f->in);
    return (Inputs){x, buffer, scale, (int32_t *)(scale + rows)};
}

static void linear(const Linear *f, const float *x, int64_t rows, float *y, Int8 *buffer) {
    Inputs in = int8_inputs(f, x, rows, buffer);
    if (f->kind == FP32) blocks(FP32, f, in, rows, y);
    else if (f->kind == BF16) blocks(BF16, f, in, rows, y);
    else {
        for (int64_t r = 0; r < rows; r++, x += f->in)
            quantize(rows_from(in, r, f->in), f->input_scale, f->in, largest(x, f->input_scale, f->in));
        blocks(INT8, f, in, rows, y);
    }
}
