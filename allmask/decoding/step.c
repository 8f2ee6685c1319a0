/* One decoding step, for processors with AVX-512 VNNI. engines.py says in torch what this must compute.

   Weights are bytes with one scale an output, bf16 or fp32. For bytes the activations of each token are bytes, too, with
   a scale of their own. No row's rounding depends on the other rows. Keys and values of the text are bf16 or fp32,
   everything else is fp32. A text is read in place by all rows that continue it; what rows wrote themselves is found by
   `path` and never moved. */

#include "../inference/products.h"

#define KEYS 64    /* of a text are scored at a time; its length is padded to a multiple */

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
