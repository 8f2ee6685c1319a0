/* Transpose blocks of sixteen by sixteen units of 32 bits: one fp32 number, or two bf16 numbers, each. */

#include <string.h>

#include "lanes.h"

typedef float real __attribute__((may_alias));
typedef uint32_t unit __attribute__((may_alias));

/* Transpose sixteen rows in place */
#ifdef __AVX512F__
INLINE void transpose(ints a[LANES]) { /* four times a perfect shuffle of the rows */
    const ints low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const ints high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int round = 0; round < 4; round++) {
        ints b[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            b[2 * i] = _mm512_permutex2var_epi32(a[i], low, a[i + LANES / 2]);
            b[2 * i + 1] = _mm512_permutex2var_epi32(a[i], high, a[i + LANES / 2]);
        }
        memcpy(a, b, sizeof b);
    }
}
#elif defined __aarch64__
INLINE void transpose(ints a[LANES]) { /* sixteen blocks of four by four, each at the place of its mirror image */
    ints b[LANES];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int32x4x2_t top = vtrnq_s32(a[4 * i].q[j], a[4 * i + 1].q[j]);
            int32x4x2_t bottom = vtrnq_s32(a[4 * i + 2].q[j], a[4 * i + 3].q[j]);
            for (int k = 0; k < 2; k++) {
                b[4 * j + k].q[i] = vcombine_s32(vget_low_s32(top.val[k]), vget_low_s32(bottom.val[k]));
                b[4 * j + k + 2].q[i] = vcombine_s32(vget_high_s32(top.val[k]), vget_high_s32(bottom.val[k]));
            }
        }
    memcpy(a, b, sizeof b);
}
#else
INLINE void transpose_eight(__m256i a[8]) { /* pairs, then fours, then halves */
    __m256i b[8];
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm256_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm256_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x20);
        b[i + 4] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x31);
    }
    memcpy(a, b, sizeof b);
}
INLINE void transpose(ints a[LANES]) { /* each quarter, then swap two quarters */
    for (int half = 0; half < 2; half++) {
        __m256i left[8], right[8];
        for (int i = 0; i < 8; i++) left[i] = a[8 * half + i].a, right[i] = a[8 * half + i].b;
        transpose_eight(left);
        transpose_eight(right);
        for (int i = 0; i < 8; i++) a[8 * half + i] = (ints){left[i], right[i]};
    }
    for (int i = 0; i < 8; i++) {
        __m256i right = a[i].b;
        a[i].b = a[i + 8].a;
        a[i + 8].a = right;
    }
}
#endif
