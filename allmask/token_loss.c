/* Softmax of rows of logits in bf16 and its gradients, a row at a time inside the first cache. All sums are in fp32. */

#include <math.h>
#include <stdint.h>

#include "exponential.h"

#define MOST 4096 /* columns */

INLINE __mmask16 first(int64_t count) { return count >= LANES ? 0xffff : (1 << count) - 1; }

INLINE vec load(const uint16_t *from, __mmask16 some) {
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, from)), 16);
}

INLINE void save(uint16_t *to, __mmask16 some, vec x) {
    _mm256_mask_storeu_epi16(to, some, (__m256i)_mm512_cvtneps_pbh(x));
}

/* Logits become shares, each row for itself; `sums` are the logarithms of the sums of their exponentials.
   Returns 1 if there are too many columns. */
int shares(uint16_t *logits, int64_t rows, int64_t columns, float *sums) {
    float kept[MOST];
    if (columns > MOST) return 1;
    for (int64_t r = 0; r < rows; r++, logits += columns) {
        vec most = _mm512_set1_ps(-INFINITY), all = _mm512_setzero_ps();
        for (int64_t j = 0; j < columns; j += LANES) {
            __mmask16 some = first(columns - j);
            most = _mm512_mask_max_ps(most, some, load(logits + j, some), most);
        }
        float top = _mm512_reduce_max_ps(most);
        for (int64_t j = 0; j < columns; j += LANES) {
            __mmask16 some = first(columns - j);
            vec x = _mm512_maskz_mov_ps(some, exponential(load(logits + j, some) - top));
            _mm512_mask_storeu_ps(kept + j, some, x);
            all += x;
        }
        float sum = _mm512_reduce_add_ps(all);
        for (int64_t j = 0; j < columns; j += LANES) {
            __mmask16 some = first(columns - j);
            save(logits + j, some, _mm512_maskz_loadu_ps(some, kept + j) * (1.0f / sum));
        }
        sums[r] = top + logf(sum);
    }
    return 0;
}

/* to = from · the factor of its row - common */
void slopes(const uint16_t *from, int64_t rows, int64_t columns, const float *factors, float common, uint16_t *to) {
    for (int64_t r = 0; r < rows; r++, from += columns, to += columns)
        for (int64_t j = 0; j < columns; j += LANES) {
            __mmask16 some = first(columns - j);
            save(to + j, some, load(from + j, some) * factors[r] - common);
        }
}
