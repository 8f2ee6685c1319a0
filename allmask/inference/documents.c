/* Attention of many short documents that stand side by side, each over itself.

   What the general kernel spends on such documents is mostly the calls for its small matrices. Here keys are turned once
   per document and head, eight queries at a time meet sixteen keys at a time, and everything stays in the first caches.
   All sums are in fp32. Rows of q, k, v and out are `row` numbers apart; a head is `width` of them, a multiple of 16. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define QUERIES 8

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(4)));

static inline vec larger(vec a, vec b) {
    ivec chosen = a > b;
    return (vec)((chosen & (ivec)a) | (~chosen & (ivec)b));
}

static int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* c[8][16] = a[8][depth] · b[depth][16] */
static inline void product(const float *a, int64_t lda, const float *b, int64_t ldb, int64_t depth, vec c[QUERIES]) {
    vec sum[QUERIES] = {0};
    for (int64_t d = 0; d < depth; d++) {
        vec row = *(const vec *)(b + d * ldb);
        for (int i = 0; i < QUERIES; i++) sum[i] += a[i * lda + d] * row;
    }
    memcpy(c, sum, sizeof sum);
}

/* e^x for x <= 0: 2^n from the exponent bits times a polynomial for the rest; below -87 it is 0 to fp32 */
static inline vec exponential(vec x) {
    const vec zero = {0};
    x = larger(x, zero - 87.0f);
    vec scaled = x * 1.44269504f;
    ivec whole = __builtin_convertvector(scaled - 0.5f, ivec);
    vec n = __builtin_convertvector(whole, vec);
    vec f = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2 in two parts */
    vec p = zero + 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    return p * (vec)((whole + 127) << 23);
}

/* Scores of one query become weights; returns what to divide by. Places beyond `length` weigh nothing. */
static float weigh(float *s, int64_t length, int64_t padded) {
    for (int64_t j = length; j < padded; j++) s[j] = -INFINITY;
    vec top = *(vec *)s;
    for (int64_t j = LANES; j < padded; j += LANES) top = larger(*(vec *)(s + j), top);
    float highest = top[0];
    for (int i = 1; i < LANES; i++) highest = top[i] > highest ? top[i] : highest;
    vec total = {0};
    for (int64_t j = 0; j < padded; j += LANES) total += *(vec *)(s + j) = exponential(*(vec *)(s + j) - highest);
    for (int64_t j = length; j < padded; j++) s[j] = 0.0f;
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) sum += total[i];
    return sum;
}

static inline float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void load(const void *from, int64_t at, int is_bf16, int64_t width, float *to) {
    if (is_bf16) {
        for (int64_t d = 0; d < width; d++) to[d] = from_bf16(((const uint16_t *)from)[at + d]);
    } else {
        for (int64_t d = 0; d < width; d += LANES) *(vec *)(to + d) = *(const vec *)((const float *)from + at + d);
    }
}

static void store(const float *from, float factor, void *to, int64_t at, int is_bf16, int64_t width) {
    if (is_bf16) {
        for (int64_t d = 0; d < width; d++) ((uint16_t *)to)[at + d] = to_bf16(from[d] * factor);
    } else {
        for (int64_t d = 0; d < width; d += LANES) *(vec *)((float *)to + at + d) = *(const vec *)(from + d) * factor;
    }
}

/* Document i is the tokens starts[i] to starts[i + 1]. Returns 0, or 1 if there is no memory. */
int attend_documents(const void *q, const void *k, const void *v, void *out, const int64_t *starts, int64_t documents,
                     int64_t heads, int64_t width, float scale, int is_bf16) {
    int64_t longest = 0, row = heads * width;
    for (int64_t i = 0; i < documents; i++) {
        int64_t length = starts[i + 1] - starts[i];
        longest = length > longest ? length : longest;
    }
    int64_t most = round_up(longest, LANES);
    float *turned = aligned_alloc(64, sizeof(float) * (2 * most * width + QUERIES * (most + 2 * width)));
    if (turned == NULL) return 1;
    float *values = turned + most * width, *scores = values + most * width;
    float *queries = scores + QUERIES * most, *mixed = queries + QUERIES * width;

    for (int64_t i = 0; i < documents; i++) {
        int64_t first = starts[i], length = starts[i + 1] - first, padded = round_up(length, LANES);
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t j = 0; j < length; j++) {
                int64_t at = (first + j) * row + h * width;
                load(k, at, is_bf16, width, mixed);
                for (int64_t d = 0; d < width; d++) turned[d * padded + j] = mixed[d];
                load(v, at, is_bf16, width, values + j * width);
            }
            for (int64_t d = 0; d < width; d++)
                for (int64_t j = length; j < padded; j++) turned[d * padded + j] = 0.0f;
            for (int64_t start = 0; start < length; start += QUERIES) {
                int64_t count = length - start < QUERIES ? length - start : QUERIES;
                vec c[QUERIES];
                float weight[QUERIES];
                for (int64_t r = 0; r < QUERIES; r++) { /* a block that is not full repeats its last query */
                    int64_t token = first + start + (r < count ? r : count - 1);
                    load(q, token * row + h * width, is_bf16, width, queries + r * width);
                    for (int64_t d = 0; d < width; d++) queries[r * width + d] *= scale;
                }
                for (int64_t j = 0; j < padded; j += LANES) {
                    product(queries, width, turned + j, padded, width, c);
                    for (int r = 0; r < QUERIES; r++) *(vec *)(scores + r * padded + j) = c[r];
                }
                for (int r = 0; r < QUERIES; r++) weight[r] = weigh(scores + r * padded, length, padded);
                for (int64_t d = 0; d < width; d += LANES) {
                    product(scores, padded, values + d, width, length, c);
                    for (int r = 0; r < QUERIES; r++) *(vec *)(mixed + r * width + d) = c[r];
                }
                for (int64_t r = 0; r < count; r++)
                    store(mixed + r * width, 1.0f / weight[r], out, (first + start + r) * row + h * width, is_bf16,
                          width);
            }
        }
    }
    free(turned);
    return 0;
}
