/* The log-sum-exp of rows of logits and their largest values, with AVX-512, AVX2 or NEON. top_tokens.py computes the
   same in torch where this cannot be compiled. */

#include "logits.h"

void log_totals(const float *x, int64_t rows, int64_t n, float *total) {
    for (int64_t r = 0; r < rows; r++) total[r] = log_sum_exp(x + r * n, n);
}

void best(const float *x, int64_t rows, int64_t n, int64_t k, float *values, int64_t *tokens) {
    for (int64_t r = 0; r < rows; r++) best_of(x + r * n, n, k, values + r * k, tokens + r * k);
}
