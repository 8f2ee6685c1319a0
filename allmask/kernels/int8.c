/* The linear layers of a text's many rows, in bytes, with AVX-512 VNNI or AVX2. bytes.py says in torch what this
   must compute.

   Rows go through in chunks, so that what is between two products stays in the cache. The hidden states are fp32; what
   goes into attention and comes out of it is fp32 or bf16. */

#include "products.h"

#define CHUNK 48 /* rows at a time, a multiple of ROWS */

typedef struct { Norm norm; double epsilon; int64_t pre; } Residual; /* a residual step is normalised before or after */
typedef struct { Linear expand, contract; int64_t activation; } FeedForward; /* 0 none, 1 relu, 2 gelu, 3 gelu by tanh */

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- fp32 and bf16 ------------------------------------------------------------------------------------------- */

/* n numbers from `at` on as fp32: where they are, or widened into `to` */
static const float *widened(const void *from, Kind kind, int64_t at, int64_t n, float *to) {
    if (kind == FP32) return (const float *)from + at;
    for (int64_t i = 0; i < n; i += 16) save(to + i, load_as(BF16, from, at + i));
    return to;
}

static void narrow(const float *from, int64_t n, uint16_t *to) { /* to the nearest bf16, ties to even */
    for (int64_t i = 0; i < n; i += 16) save_bf16(to + i, n - i, load_some(first(n - i), from + i));
}

/* ---- activations that bytes cannot tell from the exact ones ----------------------------------------------------- */

/* x · (1 + t(x)) / 2, where t is erf(x / √2) or GELU's tanh: odd, and 1 to 2e-5 beyond 4.25. Up to there a polynomial
   keeps GELU to 3e-5; the step from one byte to the next is 0.8 % of a row's largest. */
INLINE vec quick_gelu(vec x, const float odd[9]) {
    const vec end = all(4.25f), half = mul(x, all(0.5f));
    vec z = larger_of(smaller_of(x, end), sub(zeros(), end));
    vec square = mul(z, z), p = all(odd[8]);
    UNROLLED for (int i = 7; i >= 0; i--) p = mul_add(p, square, all(odd[i]));
    return mul_add(mul(p, z), half, half);
}

/* A row in place; returns its largest size. */
INLINE float bend(const int64_t kind, float *x, int64_t n) {
    const float by_erf[] = {0.797638476f,     -0.13238059f,     0.0194375683f,    -0.00215815892f, 0.000176978749f,
                            -1.02950689e-05f, 3.97233919e-07f, -9.03066777e-09f, 9.09421635e-11f};
    const float by_tanh[] = {0.797575712f,     -0.132906377f,   0.0198099241f,    -0.00225738576f, 0.000190960243f,
                             -1.14460217e-05f, 4.5303824e-07f, -1.05108757e-08f, 1.07534197e-10f};
    vec most = zeros();
    for (int64_t i = 0; i < n; i += 16) {
        vec v = load(x + i);
        if (kind == 1) v = larger_of(v, zeros());
        if (kind == 2) v = quick_gelu(v, by_erf);
        if (kind == 3) v = quick_gelu(v, by_tanh);
        save(x + i, v);
        most = larger_of(most, size_of(v));
    }
    return largest_of(most);
}

static float activated(int64_t kind, float *x, int64_t n) {
    switch (kind) {
    case 1: return bend(1, x, n);
    case 2: return bend(2, x, n);
    case 3: return bend(3, x, n);
    default: return bend(0, x, n);
    }
}

/* ---- what a layer is made of; each returns 0 if there was no memory ----------------------------------------------- */

/* y (rows, out) = f of x (rows, in), each fp32 or bf16 */
int apply_linear(const Linear *f, int64_t rows, const void *x, int64_t x_kind, void *y, int64_t y_kind) {
    float *wide = aligned_alloc(64, CHUNK * f->in * sizeof(float)), *out = malloc(CHUNK * f->out * sizeof(float));
    Byte *bytes = malloc(room_for(CHUNK, f->in));
    int good = wide && out && bytes;
    for (int64_t r = 0; good && r < rows; r += CHUNK) {
        int64_t some = smaller(CHUNK, rows - r), n = some * f->out;
        float *to = y_kind == FP32 ? (float *)y + r * f->out : out;
        linear(f, widened(x, x_kind, r * f->in, some * f->in, wide), some, to, bytes);
        if (y_kind == BF16) narrow(to, n, (uint16_t *)y + r * f->out);
    }
    free(wide);
    free(out);
    free(bytes);
    return good;
}

/* One row: y = x + step, normalised if that comes after */
static void leave(const Residual *residual, const float *x, const float *step, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] + step[i];
    if (residual->norm.weight && !residual->pre) normalise(y, y, residual->norm, n, residual->epsilon);
}

/* y = x + f of `mixed`, what attention read: the end of a layer's first step */
int residual_linear(const Linear *f, const Residual *residual, int64_t rows, const void *mixed, int64_t kind, const float *x, float *y) {
    float *wide = aligned_alloc(64, CHUNK * f->in * sizeof(float)), *step = malloc(CHUNK * f->out * sizeof(float));
    Byte *bytes = malloc(room_for(CHUNK, f->in));
    int good = wide && step && bytes;
    for (int64_t r = 0; good && r < rows; r += CHUNK) {
        int64_t some = smaller(CHUNK, rows - r);
        linear(f, widened(mixed, kind, r * f->in, some * f->in, wide), some, step, bytes);
        for (int64_t i = 0; i < some; i++)
            leave(residual, x + (r + i) * f->out, step + i * f->out, f->out, y + (r + i) * f->out);
    }
    free(wide);
    free(step);
    free(bytes);
    return good;
}

/* step (some, width) = contract(activate(expand(h))); `inner` and `bytes` are for what is between */
static void feed_chunk(const FeedForward *part, int64_t some, const float *h, float *step, float *inner, Byte *bytes) {
    const Linear *second = &part->contract;
    linear(&part->expand, h, some, inner, bytes);
    Inputs in = spread(second, inner, some, bytes);
    for (int64_t r = 0; r < some; r++) {
        float *row = inner + r * second->in, top = activated(part->activation, row, second->in);
        quantise(row, NULL, second->in, top, in.bytes + r * second->in, in.scale + r, in.shift + r);
    }
    blocks(BYTES, second, in, some, step);
}

/* y = x + feed-forward of x, a layer's second step; without `residual` the feed-forward alone */
int feed_forward(const FeedForward *part, const Residual *residual, int64_t rows, const float *x, float *y) {
    int64_t width = part->expand.in, wide = part->expand.out;
    float *h = aligned_alloc(64, CHUNK * 2 * width * sizeof(float)), *inner = malloc(CHUNK * wide * sizeof(float));
    Byte *bytes = malloc(room_for(CHUNK, larger(width, wide)));
    int good = h && inner && bytes, pre = residual && residual->pre;
    for (int64_t r = 0; good && r < rows; r += CHUNK) {
        int64_t some = smaller(CHUNK, rows - r);
        const float *from = x + r * width;
        float *to = y + r * width, *step = h + CHUNK * width;
        for (int64_t i = 0; pre && i < some; i++)
            normalise(from + i * width, h + i * width, residual->norm, width, residual->epsilon);
        feed_chunk(part, some, pre ? h : from, residual ? step : to, inner, bytes);
        for (int64_t i = 0; residual && i < some; i++)
            leave(residual, from + i * width, step + i * width, width, to + i * width);
    }
    free(h);
    free(inner);
    free(bytes);
    return good;
}
