/* Sixteen exponentials at a time. */

#include <immintrin.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef __m512 vec; /* 16 numbers */

/* e^x for x <= 0: a power of two times a polynomial for the rest. Below -87 it is 0; what is no number stays so. */
INLINE vec exponential(vec x) {
    __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLE_UQ);
    vec n = _mm512_roundscale_ps(x * 1.44269504f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vec f = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2 in two parts */
    vec p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    return _mm512_maskz_scalef_ps(counts, p, n);
}
