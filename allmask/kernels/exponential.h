/* The exponential of sixteen numbers. */

#include "lanes.h"

/* e^x for x <= 88, to 1 ulp: 2^n times a polynomial in the remainder (Cephes). 0 for x <= -87; NaN stays NaN. */
INLINE vec exponential(vec x) {
    vec n = to_nearest(mul(x, all(1.44269504f)));
    vec f = mul_add(n, all(2.12194440e-4f), mul_sub(n, all(0.693359375f), x)); /* ln 2 in two parts */
    vec p = mul_add(f, all(1.9875691500e-4f), all(1.3981999507e-3f));
    p = mul_add(p, f, all(8.3334519073e-3f));
    p = mul_add(p, f, all(4.1665795894e-2f));
    p = mul_add(p, f, all(1.6666665459e-1f));
    p = mul_add(p, f, all(5.0000001201e-1f));
    p = add(mul_add(mul(p, f), f, f), all(1.0f));
    return choose(at_most(x, all(-87.0f)), zeros(), times_power(p, n));
}
