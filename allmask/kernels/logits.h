/* The log-sum-exp of a row of logits and its largest values; for top_tokens.c and decode_step.c. */

#include <math.h>

#include "lanes.h"

#define STRIDE 64 /* numbers compared at a time with the smallest of the best so far */

INLINE vec load_padded(const float *x, int64_t i, int64_t n) {
    if (n - i >= LANES) return load(x + i);
    mask real = first(n - i);
    return choose(real, load_some(real, x + i), all(-INFINITY));
}

/* NaN if a number is NaN or +infinity, or if all are -infinity */
static float log_sum_exp(const float *x, int64_t n) {
    vec most = all(-INFINITY), sum = zeros();
    int bad = 0;
    for (int64_t i = 0; i < n; i += 16) {
        vec v = load_padded(x, i, n);
        bad |= any(is_nan(v));
        most = larger_of(most, v);
    }
    float top = largest_of(most);
    if (bad || !isfinite(top)) return NAN;
    for (int64_t i = 0; i < n; i += 16) {
        vec e = exponential(sub(load_padded(x, i, n), all(top)));
        sum = add(sum, n - i >= LANES ? e : choose(first(n - i), e, zeros()));
    }
    return top + logf(sum_of(sum));
}

/* The k largest of x, best first; of equal ones the first. -INFINITY where there are fewer than k. */
static void best_of(const float *x, int64_t n, int64_t k, float *value, int64_t *token) {
    for (int64_t i = 0; i < k; i++) {
        value[i] = -INFINITY;
        token[i] = 0;
    }
    for (int64_t i = 0; i < n; i += STRIDE) {
        vec v[4], worst = all(value[k - 1]);
        UNROLLED for (int c = 0; c < 4; c++) v[c] = load_padded(x, i + 16 * c, n);
        vec top = larger_of(larger_of(v[0], v[1]), larger_of(v[2], v[3]));
        if (!any(above(top, worst))) continue;
        for (int64_t j = i; j < i + STRIDE && j < n; j++) {
            if ((j - i) % 16 == 0 && !any(above(v[(j - i) / 16], all(value[k - 1])))) {
                j += 15;
                continue;
            }
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
