/* What a search asks of a row of logits: the logarithm of the sum of their exponentials, and the best few. For
   processors with AVX-512. shortlist.py says in torch what this must compute. */

#include "../inference/products.h"

#define STRIDE 64 /* numbers that are compared with the worst of the best at a time */

static __mmask16 real(int64_t left) { return left >= 16 ? 0xffff : left > 0 ? (1 << left) - 1 : 0; }

INLINE __m512 some(const float *x, int64_t i, int64_t n) {
    return _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), real(n - i), x + i);
}

/* NaN, if a number is NaN or none is finite, or one is infinite */
static float log_total(const float *x, int64_t n) {
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    __mmask16 bad = 0;
    for (int64_t i = 0; i < n; i += 16) {
        __m512 v = some(x, i, n);
        bad |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        most = _mm512_max_ps(most, v);
    }
    float top = _mm512_reduce_max_ps(most);
    if (bad || !isfinite(top)) return NAN;
    for (int64_t i = 0; i < n; i += 16) {
        __m512 e = expo(_mm512_sub_ps(some(x, i, n), _mm512_set1_ps(top)));
        sum = _mm512_mask_add_ps(sum, real(n - i), sum, e);
    }
    return top + logf(_mm512_reduce_add_ps(sum));
}

/* The k largest of x, best first; of equal ones those that stand first. -INFINITY where there are fewer. */
static void best_of(const float *x, int64_t n, int64_t k, float *value, int64_t *token) {
    for (int64_t i = 0; i < k; i++) {
        value[i] = -INFINITY;
        token[i] = 0;
    }
    for (int64_t i = 0; i < n; i += STRIDE) {
        __m512 v[4], worst = _mm512_set1_ps(value[k - 1]);
        UNROLLED for (int c = 0; c < 4; c++) v[c] = some(x, i + 16 * c, n);
        __m512 top = _mm512_max_ps(_mm512_max_ps(v[0], v[1]), _mm512_max_ps(v[2], v[3]));
        if (!_mm512_cmp_ps_mask(top, worst, _CMP_GT_OQ)) continue;
        for (int64_t j = i; j < i + STRIDE && j < n; j++) {
            if (!(x[j] > value[k - 1])) continue;
            int64_t at = k - 1;
            for (; at > 0 && x[j] > value[at - 1]; at--) {
                value[at] = value[at - 1];
                token[at] = token[at - 1];
            }
            value[at] = x[j];
            token[at] = j;
        }
    }
}

void log_totals(const float *x, int64_t rows, int64_t n, float *total) {
    for (int64_t r = 0; r < rows; r++) total[r] = log_total(x + r * n, n);
}

void best(const float *x, int64_t rows, int64_t n, int64_t k, float *values, int64_t *tokens) {
    for (int64_t r = 0; r < rows; r++) best_of(x + r * n, n, k, values + r * k, tokens + r * k);
}
