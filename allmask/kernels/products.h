/* Linear layers, norms and activations of fp32 rows, with AVX-512 VNNI or AVX2: what decode_step.c and int8.c share.

   Weights are bytes with one scale an output, bf16 or fp32; for bytes the activations of each token are bytes, too, with
   a scale of their own. No row's rounding depends on the other rows. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "exponential.h"

#define OUTPUTS 64 /* of a block of weights: four times sixteen sums */

typedef enum { BYTES, BF16, FP32 } Kind;
typedef struct {
    const void *weight;
    const float *scale, *bias, *input_scale; /* with an input_scale, inputs are multiplied by it before they become bytes */
    int64_t in, out, kind;               /* in % 16 is 0 */
} Linear;
typedef struct { const float *weight, *bias; } Norm; /* without a weight there is none, without a bias it is RMS */

/* ---- sixteen numbers at a time ----------------------------------------------------------------------------- */

INLINE vec load_as(const Kind kind, const void *p, int64_t at) {
    return kind == FP32 ? load((const float *)p + at) : load_bf16((const uint16_t *)p + at);
}

INLINE vec gelu(vec x) { /* erf by Abramowitz and Stegun 7.1.26, to 1.5e-7 */
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

static void normalise(const float *x, float *y, Norm norm, int64_t n, double epsilon) {
    vec sum = zeros(), square = sum;
    for (int64_t i = 0; norm.bias && i < n; i += 16) sum = add(sum, load(x + i));
    vec mean = all(sum_of(sum) / n);
    for (int64_t i = 0; i < n; i += 16) {
        vec v = sub(load(x + i), mean);
        square = mul_add(v, v, square);
    }
    vec by = all((float)(1.0 / sqrt(sum_of(square) / n + epsilon)));
    for (int64_t i = 0; i < n; i += 16) {
        vec v = mul(mul(sub(load(x + i), mean), by),
                                 load(norm.weight + i));
        save(y + i, norm.bias ? add(v, load(norm.bias + i)) : v);
    }
}

/* ---- bytes ------------------------------------------------------------------------------------------------- */

/* `Byte` is what an activation is kept as; `Weights` are four inputs of sixteen outputs each, 128 too high, to be
   unsigned; `Four` are the four inputs that they meet. `dot_bytes` adds the sixteen products, exactly. */

#ifdef __AVX512F__

#define ROWS 6       /* of activations that share one pass over a block of weights: 6 × 4 sums stay in registers */
#define WIDE(rows) 4 /* times sixteen sums of each */

typedef int8_t Byte;
typedef __m512i Weights, Four;

INLINE void save_bytes(Byte *to, ints x) { _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8(x)); }
INLINE Weights load_weights(const uint8_t *from) { return _mm512_loadu_si512(from); }

INLINE Four load_four(const Byte *from) {
    int32_t four;
    memcpy(&four, from, 4);
    return _mm512_set1_epi32(four);
}

INLINE void dot_bytes(ints *sum, Weights w, Four x) {
    /* _mm512_dpbusd_epi32; gcc 12 copies every sum to another register and back around the intrinsic */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(w), "v"(x));
}

#else

#define ROWS 4
#define WIDE(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 2 : 1)

/* Products are of 16 bits each: pairs of bytes would not fit. So a byte has two, and of four inputs the first and third
   stand before the second and fourth, as masking and shifting leave them of the weights. */
typedef int16_t Byte;
typedef struct { __m256i even[2], odd[2]; } Weights;
typedef struct { __m256i even, odd; } Four;

INLINE void save_bytes(Byte *to, ints x) {
    const __m256i sorted = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,
                                            0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    __m256i mixed = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8); /* from quarters a, b, a, b */
    _mm256_storeu_si256((__m256i *)to, _mm256_shuffle_epi8(mixed, sorted));
}

INLINE Weights load_weights(const uint8_t *from) {
    const __m256i low = _mm256_set1_epi16(0xff);
    __m256i a = _mm256_loadu_si256((const __m256i *)from), b = _mm256_loadu_si256((const __m256i *)(from + 32));
    return (Weights){{_mm256_and_si256(a, low), _mm256_and_si256(b, low)},
                     {_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)}};
}

INLINE __m256i broadcast(const Byte *pair) { return _mm256_castps_si256(_mm256_broadcast_ss((const float *)pair)); }
INLINE Four load_four(const Byte *from) { return (Four){broadcast(from), broadcast(from + 2)}; }

INLINE void add_products(__m256i *sum, __m256i w, __m256i x) {
    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(w, x));
    __asm__("" : "+x"(*sum)); /* in this order: gcc 12 adds products to each other first, and runs out of registers */
}

INLINE void dot_bytes(ints *sum, Weights w, Four x) {
    add_products(&sum->a, w.even[0], x.even);
    add_products(&sum->b, w.even[1], x.even);
    add_products(&sum->a, w.odd[0], x.odd);
    add_products(&sum->b, w.odd[1], x.odd);
}

#endif

INLINE vec scaled(const float *x, const float *input_scale, int64_t i) {
    vec v = load(x + i);
    return input_scale ? mul(v, load(input_scale + i)) : v;
}

INLINE float largest(const float *x, const float *input_scale, int64_t n) {
    vec most = zeros();
    for (int64_t i = 0; i < n; i += 16) most = larger_of(most, size_of(scaled(x, input_scale, i)));
    return largest_of(most);
}

/* Bytes from -127 to 127 of numbers up to `top` */
INLINE void quantise(const float *x, const float *input_scale, int64_t n, float top, Byte *q, float *scale,
                     int32_t *shift) {
    vec by = all(top > 0 ? 127.f / top : 0.f);
    ints sum = no_ints();
    for (int64_t i = 0; i < n; i += 16) {
        ints v = to_ints(mul(scaled(x, input_scale, i), by));
        sum = add_ints(sum, v);
        save_bytes(q + i, v);
    }
    *scale = top / 127.f;
    *shift = 128 * sum_of_ints(sum); /* by so much the weights, 128 too high, make all sums too large */
}

/* ---- products ---------------------------------------------------------------------------------------------- */

typedef struct { const float *x; Byte *bytes; float *scale; int32_t *shift; } Inputs;

/* `start` is where a block of weights begins, `at` which of its outputs are summed: 16 · WIDE(rows) from there on */
INLINE void sum_bytes(const int rows, const Linear *f, Inputs in, int64_t start, int64_t at, vec y[ROWS][4]) {
    const uint8_t *w = (const uint8_t *)f->weight + start * f->in + 4 * at;
    const int wide = WIDE(rows);
    ints sum[ROWS][4];
    UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < wide; c++) sum[r][c] = no_ints();
    for (int64_t k = 0; k < f->in; k += 4, w += 4 * OUTPUTS) {
        Weights part[4];
        UNROLLED for (int c = 0; c < wide; c++) part[c] = load_weights(w + 64 * c);
        /* the next block comes while this one is multiplied: a step's weights are not in the cache */
        UNROLLED for (int c = 0; c < wide; c++) _mm_prefetch((const char *)w + OUTPUTS * f->in + 64 * c, _MM_HINT_T1);
        UNROLLED for (int r = 0; r < rows; r++) {
            Four x = load_four(in.bytes + r * f->in + k);
            UNROLLED for (int c = 0; c < wide; c++) dot_bytes(&sum[r][c], part[c], x);
        }
    }
    UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < wide; c++) {
        vec whole = to_floats(sub_ints(sum[r][c], all_ints(in.shift[r])));
        vec by = load(f->scale + start + at + 16 * c);
        y[r][c] = mul(whole, mul(by, all(in.scale[r])));
    }
}

INLINE void sum_floats(const int rows, const Kind kind, const Linear *f, Inputs in, int64_t start, int64_t at,
                       vec y[ROWS][4]) {
    const int wide = WIDE(rows);
    UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < wide; c++) y[r][c] = zeros();
    for (int64_t k = 0; k < f->in; k++) {
        vec part[4];
        UNROLLED for (int c = 0; c < wide; c++)
            part[c] = load_as(kind, f->weight, start * f->in + k * OUTPUTS + at + 16 * c);
        UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < wide; c++)
            y[r][c] = mul_add(part[c], all(in.x[r * f->in + k]), y[r][c]);
    }
}

INLINE void tile(const int rows, const Kind kind, const Linear *f, Inputs in, int64_t start, int64_t at, float *out) {
    const int wide = WIDE(rows);
    vec y[ROWS][4];
    if (kind == BYTES) sum_bytes(rows, f, in, start, at, y);
    else sum_floats(rows, kind, f, in, start, at, y);
    UNROLLED for (int c = 0; c < wide; c++) {
        int64_t to = start + at + 16 * c;
        mask real = first(f->out - to);
        vec bias = f->bias ? load_some(real, f->bias + to) : zeros();
        UNROLLED for (int r = 0; r < rows; r++) save_some(real, out + r * f->out + to, add(y[r][c], bias));
    }
}

/* `groups` times `rows` rows; a strip of weights that is in the first cache meets all of them */
INLINE void block(const int rows, int64_t groups, const Kind kind, const Linear *f, Inputs in, int64_t start, float *out) {
    for (int64_t at = 0; at < OUTPUTS; at += 16 * WIDE(rows))
        for (int64_t r = 0; r < groups * rows; r += rows) {
            Inputs part = {in.x + r * f->in, in.bytes + r * f->in, in.scale + r, in.shift + r};
            tile(rows, kind, f, part, start, at, out + r * f->out);
        }
}

INLINE void blocks(const Kind kind, const Linear *f, Inputs in, int64_t rows, float *out) {
    int64_t r = rows / ROWS * ROWS;
    Inputs rest = {in.x + r * f->in, in.bytes + r * f->in, in.scale + r, in.shift + r};
    for (int64_t start = 0; start < f->out; start += OUTPUTS) {
        block(ROWS, rows / ROWS, kind, f, in, start, out);
#define CASE(n) case n: block(n, 1, kind, f, rest, start, out + r * f->out); break;
        switch (rows - r) {
            CASE(1) CASE(2) CASE(3)
#if ROWS > 4
            CASE(4) CASE(5)
#endif
        }
    }
}

static int64_t room_for(int64_t rows, int64_t in) { return rows * (in * sizeof(Byte) + 8); } /* in bytes */

/* Rows of bytes with their scales, in memory for `room_for` them */
INLINE Inputs spread(const Linear *f, const float *x, int64_t rows, Byte *bytes) {
    float *scale = (float *)(bytes + rows * f->in);
    return (Inputs){x, bytes, scale, (int32_t *)(scale + rows)};
}

static void linear(const Linear *f, const float *x, int64_t rows, float *y, Byte *bytes) {
    Inputs in = spread(f, x, rows, bytes);
    if (f->kind == FP32) blocks(FP32, f, in, rows, y);
    else if (f->kind == BF16) blocks(BF16, f, in, rows, y);
    else {
        for (int64_t r = 0; r < rows; r++, x += f->in)
            quantise(x, f->input_scale, f->in, largest(x, f->input_scale, f->in), in.bytes + r * f->in, in.scale + r, in.shift + r);
        blocks(BYTES, f, in, rows, y);
    }
}
