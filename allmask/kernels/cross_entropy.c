/* Softmax of rows of bf16 logits and its gradients, one row at a time inside the first cache. All sums are in fp32. */

#include <math.h>

#include "lanes.h"

#define MAX_COLUMNS 4096

INLINE vec load_some_bf16(const uint16_t *from, mask some) {
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, from)), 16);
}

INLINE void save_some_bf16(uint16_t *to, mask some, vec x) {
    _mm256_mask_storeu_epi16(to, some, (__m256i)_mm512_cvtneps_pbh(x));
}

/* Replace each row of logits by its softmax; `log_sums` receives the logarithm of the sum of their exponentials.
   Returns 1 if there are too many columns. */
int softmax(uint16_t *logits, int64_t rows, int64_t columns, float *log_sums) {
    float exponentials[MAX_COLUMNS];
    if (columns > MAX_COLUMNS) return 1;
    for (int64_t r = 0; r < rows; r++, logits += columns) {
        vec most = all(-INFINITY), total = zeros();
        for (int64_t j = 0; j < columns; j += LANES) {
            mask some = first(columns - j);
            most = _mm512_mask_max_ps(most, some, load_some_bf16(logits + j, some), most);
        }
        float top = _mm512_reduce_max_ps(most);
        for (int64_t j = 0; j < columns; j += LANES) {
            mask some = first(columns - j);
            vec x = _mm512_maskz_mov_ps(some, exponential(load_some_bf16(logits + j, some) - top));
            _mm512_mask_storeu_ps(exponentials + j, some, x);
            total += x;
        }
        float sum = sum_of(total);
        for (int64_t j = 0; j < columns; j += LANES) {
            mask some = first(columns - j);
            save_some_bf16(logits + j, some, _mm512_maskz_loadu_ps(some, exponentials + j) * (1.0f / sum));
        }
        log_sums[r] = top + logf(sum);
    }
    return 0;
}

/* to = from · the factor of its row - common */
void scale_and_shift(const uint16_t *from, int64_t rows, int64_t columns, const float *factors, float common, uint16_t *to) {
    for (int64_t r = 0; r < rows; r++, from += columns, to += columns)
        for (int64_t j = 0; j < columns; j += LANES) {
            mask some = first(columns - j);
            save_some_bf16(to + j, some, load_some_bf16(from + j, some) * factors[r] - common);
        }
}
