/* Activations of a feed-forward layer and their derivatives: value and slope have most of their arithmetic in common. */

#include "lanes.h"

enum { GELU, GELU_TANH, RELU };

typedef struct { vec value, slope; } Point;

#ifdef __AVX512F__
INLINE vec estimated_inverse(vec x) { return _mm512_rcp14_ps(x); } /* relative error up to 2^-14 */
#else
INLINE vec estimated_inverse(vec x) { return divide(all(1.0f), x); }
#endif

/* x · P(x), where P is the normal distribution function. For u = |x|, P(-u) = e^(-u²/2) · t · polynomial of t with
   t = 1 / (1 + 0.35 u), fitted to a relative error of 2e-7. */
INLINE Point gelu(vec x) {
    vec u = size_of(x), t = divide(all(1.0f), mul_add(u, all(0.35f), all(1.0f)));
    vec p = mul_add(t, all(-0.029146559536457062f), all(0.1439746916294098f));
    p = mul_add(p, t, all(-0.255720317363739f));
    p = mul_add(p, t, all(0.1591808944940567f));
    p = mul_add(p, t, all(-0.023114321753382683f));
    p = mul_add(p, t, all(0.10550983250141144f));
    p = mul_add(p, t, all(0.11983242630958557f));
    p = mul_add(p, t, all(0.13986192643642426f));
    p = mul_add(p, t, all(0.13962140679359436f));
    vec bell = normal_exponential(larger_of(mul(mul(x, x), all(-0.5f)), all(-87.0f))), tail = mul(bell, mul(p, t));
    vec below = choose(negative(x), tail, sub(all(1.0f), tail));
    return (Point){mul(x, below), mul_add(mul(x, all(0.3989422804f)), bell, below)};
}

/* The same with a relative error of 1e-4, a fraction of that of bf16: fewer terms, and no division where there is an estimate */
INLINE Point gelu_for_bf16(vec x) {
    vec u = size_of(x), t = estimated_inverse(mul_add(u, all(0.25f), all(1.0f)));
    vec p = mul_add(t, all(0.24342943727970123f), all(-0.10832693427801132f));
    p = mul_add(p, t, all(0.18423517048358917f));
    p = mul_add(p, t, all(0.0791291892528534f));
    p = mul_add(p, t, all(0.10152529180049896f));
    vec power = larger_of(mul(mul(x, x), all(-0.72134752f)), all(-125.0f)), n = to_nearest(power); /* of 2, for e^(-u²/2) */
    vec f = mul(sub(power, n), all(0.69314718f)), e = mul_add(f, all(0.04166667f), all(0.16666667f));
    e = mul_add(e, f, all(0.5f));
    e = mul_add(e, f, all(1.0f));
    vec bell = times_normal_power(mul_add(e, f, all(1.0f)), n), tail = mul(bell, mul(p, t));
    vec below = choose(negative(x), tail, sub(all(1.0f), tail));
    return (Point){mul(x, below), mul_add(mul(x, all(0.3989422804f)), bell, below)};
}

/* x · (1 + tanh(a)) / 2 with a = c · (x + 0.044715 x³), which is x / (1 + e^(-2a)) */
INLINE Point gelu_tanh(vec x) {
    const vec limit = all(80.0f);
    vec square = mul(x, x), inner = mul_add(mul(square, x), all(0.0713548162726f), mul(x, all(1.59576912161f))); /* 2a */
    vec e = normal_exponential(smaller_of(larger_of(sub(zeros(), inner), sub(zeros(), limit)), limit));
    vec share = divide(all(1.0f), add(all(1.0f), e));
    vec rise = mul_add(square, all(0.2140644488178f), all(1.59576912161f)); /* the derivative of 2a */
    return (Point){mul(x, share), mul_add(mul(mul(x, share), sub(all(1.0f), share)), rise, share)};
}

INLINE Point relu(vec x) {
    mask positive = above(x, zeros());
    vec kept = choose(is_nan(x), x, choose(positive, x, zeros()));
    return (Point){kept, choose(positive, all(1.0f), zeros())};
}

INLINE Point at(int kind, vec x) { return kind == GELU ? gelu(x) : kind == GELU_TANH ? gelu_tanh(x) : relu(x); }
