/* One decoding step, for processors with AVX-512 VNNI. engines.py says in torch what this must compute.

   Weights are bytes with one scale an output, bf16 or fp32. For bytes the activations of each token are bytes, too, with
   a scale of their own. No row's rounding depends on the other rows. Keys and values of the text are bf16 or fp32,
   everything else is fp32. A text is read in place by all rows that continue it; what rows wrote themselves is found by
   `path` and never moved. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 6    /* of activations that share one pass over a block of weights: 6 × 4 sums stay in registers */
#define OUTPUTS 64 /* of a block of weights: four registers of sixteen sums */
#define KEYS 64    /* of a text are scored at a time; its length is padded to a multiple */
#define CHUNK 64   /* rows of a text go through the feed-forward layer at a time, so that they stay in the cache */
#define UNROLLED _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline))

typedef enum { BYTES, BF16, FP32 } Kind;
typedef struct { const void *weight; const float *scale, *bias; int64_t in, out, kind; } Linear; /* in % 16 is 0 */
typedef struct { const float *weight, *bias; } Norm; /* without a weight there is none, without a bias it is RMS */
typedef struct { Linear qkv, output, expand, contract; Norm attention, feed; } Layer;
typedef struct {
    int64_t depth, width, heads, inner, pre, activation; /* 0 none, 1 relu, 2 gelu, 3 gelu by tanh */
    double epsilon, head_epsilon;
    const Layer *layers;
    Norm last;
    Linear transform; /* without a weight there is none */
    Norm head_norm;
    Linear head;
} Network;
typedef struct {
    const void *keys, *values; /* (depth, texts, heads, D, keys) and (depth, texts, heads, keys, D) */
    const int32_t *lengths, *owner; /* (texts,), (rows,) */
    const int32_t *path;           /* (rows, time + 1): in which slot a row finds what it wrote at each time */
    float *own;                    /* (depth, 2, room, slots, width) */
    int64_t kind, texts, padded, rows, slots, room, time;
} Memory;

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

static void quantise(const float *x, int64_t n, int8_t *q, float *scale, int32_t *shift) {
    __m512 most = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(x + i)));
    float top = _mm512_reduce_max_ps(most);
    __m512 by = _mm512_set1_ps(top > 0 ? 127.f / top : 0.f);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 16) {
        __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), by));
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

typedef struct { const float *x; const int8_t *bytes; const float *scale; const int32_t *shift; } Inputs;

INLINE void sum_bytes(const int rows, const Linear *f, Inputs in, int64_t first, __m512 y[ROWS][4]) {
    const uint8_t *w = (const uint8_t *)f->weight + first * f->in;
    __m512i sum[ROWS][4];
    UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < 4; c++) sum[r][c] = _mm512_setzero_si512();
    for (int64_t k = 0; k < f->in; k += 4, w += 4 * OUTPUTS) {
        __m512i part[4];
        UNROLLED for (int c = 0; c < 4; c++) part[c] = _mm512_loadu_si512(w + 64 * c);
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

static void linear(const Linear *f, const float *x, int64_t rows, float *y, int8_t *bytes) {
    float *scale = (float *)(bytes + rows * f->in);
    int32_t *shift = (int32_t *)(scale + rows);
    Inputs in = {x, bytes, scale, shift};
    if (f->kind == FP32) blocks(FP32, f, in, rows, y);
    else if (f->kind == BF16) blocks(BF16, f, in, rows, y);
    else {
        for (int64_t r = 0; r < rows; r++) quantise(x + r * f->in, f->in, bytes + r * f->in, scale + r, shift + r);
        blocks(BYTES, f, in, rows, y);
    }
}

/* ---- attention --------------------------------------------------------------------------------------------- */

INLINE void score_text(const Kind kind, const float *q, const void *keys, int64_t at, int64_t d, int64_t padded,
                       int64_t length, float *score) {
    for (int64_t k = 0; k < length; k += KEYS) {
        __m512 sum[4];
        UNROLLED for (int c = 0; c < 4; c++) sum[c] = _mm512_setzero_ps();
        for (int64_t i = 0; i < d; i++)
            UNROLLED for (int c = 0; c < 4; c++)
                sum[c] = _mm512_fmadd_ps(_mm512_set1_ps(q[i]), load(kind, keys, at + i * padded + k + 16 * c), sum[c]);
        UNROLLED for (int c = 0; c < 4; c++) _mm512_storeu_ps(score + k + 16 * c, sum[c]);
    }
    for (int64_t k = length; k % KEYS; k++) score[k] = -INFINITY;
}

static float dot(const float *a, const float *b, int64_t n) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) sum = _mm512_fmadd_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i), sum);
    return _mm512_reduce_add_ps(sum);
}

static float exponentiate(float *score, int64_t n) { /* in place; returns the sum */
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(score + i));
    most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int64_t i = 0; i < n; i += 16) {
        __m512 e = expo(_mm512_sub_ps(_mm512_loadu_ps(score + i), most));
        sum = _mm512_add_ps(sum, e);
        _mm512_storeu_ps(score + i, e);
    }
    return _mm512_reduce_add_ps(sum);
}

INLINE void attend(const Kind kind, const Memory *m, int64_t layer, int64_t row, int64_t heads, int64_t d,
                   const float *q, float *y, float *score) {
    int64_t text = m->owner[row], length = m->lengths[text], seen = (length + KEYS - 1) / KEYS * KEYS;
    int64_t mine = m->time + 1, width = heads * d, end = (seen + mine + 15) / 16 * 16;
    const int32_t *path = m->path + row * mine;
    const float *keys = m->own + 2 * layer * m->room * m->slots * width, *values = keys + m->room * m->slots * width;
    for (int64_t h = 0; h < heads; h++, q += d, y += d, keys += d, values += d) {
        int64_t at = ((layer * m->texts + text) * heads + h) * d * m->padded;
        score_text(kind, q, m->keys, at, d, m->padded, length, score);
        for (int64_t j = 0; j < mine; j++) score[seen + j] = dot(q, keys + (j * m->slots + path[j]) * width, d);
        for (int64_t j = seen + mine; j < end; j++) score[j] = -INFINITY;
        __m512 share = _mm512_set1_ps(1.f / exponentiate(score, end));
        for (int64_t i = 0; i < d; i += 16) {
            __m512 sum[4];
            UNROLLED for (int c = 0; c < 4; c++) sum[c] = _mm512_setzero_ps();
            for (int64_t k = 0; k < seen; k += 4)
                UNROLLED for (int c = 0; c < 4; c++)
                    sum[c] = _mm512_fmadd_ps(_mm512_set1_ps(score[k + c]), load(kind, m->values, at + i + (k + c) * d), sum[c]);
            for (int64_t j = 0; j < mine; j++) {
                __m512 value = _mm512_loadu_ps(values + (j * m->slots + path[j]) * width + i);
                sum[0] = _mm512_fmadd_ps(_mm512_set1_ps(score[seen + j]), value, sum[0]);
            }
            __m512 all = _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
            _mm512_storeu_ps(y + i, _mm512_mul_ps(all, share));
        }
    }
}

/* ---- the network ------------------------------------------------------------------------------------------- */

static void each(const float *x, float *y, Norm norm, int64_t rows, int64_t n, double epsilon) {
    for (int64_t r = 0; r < rows; r++) normalise(x + r * n, y + r * n, norm, n, epsilon);
}

static void add(float *x, const float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] += y[i];
}

/* Logits (rows, head.out) of hidden states (rows, width), which are overwritten. 0 if there was no memory. */
int head(const Network *n, int64_t rows, float *x, float *logits) {
    int8_t *q = malloc(rows * (n->width + 8));
    float *y = malloc(rows * n->width * sizeof(float));
    if (q && y) {
        if (n->transform.weight) {
            linear(&n->transform, x, rows, y, q);
            activate(y, rows * n->width, n->activation);
            each(y, x, n->head_norm, rows, n->width, n->head_epsilon);
        }
        linear(&n->head, x, rows, logits, q);
    }
    free(q);
    free(y);
    return q && y;
}

/* One layer's feed-forward of hidden states (rows, width), in place: what a text is read with. */
int feed(const Network *n, int64_t layer, int64_t rows, float *x) {
    const Layer *part = n->layers + layer;
    float *y = malloc(CHUNK * n->inner * sizeof(float));
    int8_t *q = malloc(CHUNK * ((n->inner > n->width ? n->inner : n->width) + 8));
    for (int64_t r = 0; y && q && r < rows; r += CHUNK) {
        int64_t some = rows - r < CHUNK ? rows - r : CHUNK;
        linear(&part->expand, x + r * n->width, some, y, q);
        activate(y, some * n->inner, n->activation);
        linear(&part->contract, y, some, x + r * n->width, q);
    }
    free(y);
    free(q);
    return y && q;
}

static void remember(const Memory *m, int64_t layer, const float *qkv, int64_t width) {
    for (int64_t part = 0; part < 2; part++)
        for (int64_t r = 0; r < m->rows; r++) {
            int64_t at = (((2 * layer + part) * m->room + m->time) * m->slots + r) * width;
            memcpy(m->own + at, qkv + (3 * r + 1 + part) * width, width * sizeof(float));
        }
}

/* The embedded tokens x (rows, width), one more for each row, become hidden states; their logits are written. */
int step(const Network *n, const Memory *m, float *x, float *logits) {
    int64_t rows = m->rows, width = n->width, wide = n->inner > 3 * width ? n->inner : 3 * width, d = width / n->heads;
    float *h = malloc(rows * width * sizeof(float)), *y = malloc(rows * wide * sizeof(float));
    float *score = malloc((m->padded + KEYS + m->time + 32) * sizeof(float));
    int8_t *q = malloc(rows * (wide + 8));
    int good = h && y && score && q;
    for (int64_t i = 0; good && i < n->depth; i++) {
        const Layer *layer = n->layers + i;
        if (n->pre) each(x, h, layer->attention, rows, width, n->epsilon);
        linear(&layer->qkv, n->pre ? h : x, rows, y, q);
        remember(m, i, y, width);
        for (int64_t r = 0; r < rows; r++) {
            if (m->kind == FP32) attend(FP32, m, i, r, n->heads, d, y + 3 * r * width, h + r * width, score);
            else attend(BF16, m, i, r, n->heads, d, y + 3 * r * width, h + r * width, score);
        }
        linear(&layer->output, h, rows, y, q);
        add(x, y, rows * width);
        each(x, n->pre ? h : x, n->pre ? layer->feed : layer->attention, rows, width, n->epsilon);
        linear(&layer->expand, n->pre ? h : x, rows, y, q);
        activate(y, rows * n->inner, n->activation);
        linear(&layer->contract, y, rows, h, q);
        add(x, h, rows * width);
        if (!n->pre) each(x, x, layer->feed, rows, width, n->epsilon);
    }
    if (good && n->last.weight) each(x, x, n->last, rows, width, n->epsilon);
    free(h);
    free(y);
    free(score);
    free(q);
    return good && head(n, rows, x, logits);
}
