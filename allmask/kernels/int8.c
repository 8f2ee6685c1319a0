/* Int8 linear layers of many rows, with VNNI, AVX2 or NEON. int8_layers.py computes the same in torch.

   Rows are processed in chunks, so that intermediate results stay in the cache. Hidden states are fp32; the inputs and
   outputs of attention are fp32 or bf16. */

#include "products.h"

#define CHUNK 48 /* rows at a time, a multiple of ROWS */

typedef struct { Norm norm; double epsilon; int64_t pre; } Residual; /* the norm comes before (pre) or after the step */
typedef struct { Linear expand, contract; int64_t activation; } FeedForward; /* 0 none, 1 relu, 2 gelu, 3 gelu by tanh */

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- fp32 and bf16 ------------------------------------------------------------------------------------------- */

/* n numbers from `at` on as fp32: in place, or converted into `to` */
static const float *as_fp32(const void *from, Kind kind, int64_t at, int64_t n, float *to) {
    if (kind == FP32) return (const float *)from + at;
    for (int64_t i = 0; i < n; i += 16) save(to + i, load_as(BF16, from, at + i));
    return to;
}

static void to_bf16(const float *from, int64_t n, uint16_t *to) { /* round to nearest, ties to even */
    for (int64_t i = 0; i < n; i += 16) save_bf16(to + i, n - i, load_some(first(n - i), from + i));
}

/* ---- approximate activations, exact enough for int8 ------------------------------------------------------------- */

/* x · (1 + t(x)) / 2, where t is erf(x / √2) or the tanh of GELU: an odd function, within 2e-5 of 1 beyond 4.25. Below
   that a polynomial approximates GELU to 3e-5; one int8 step is 0.8 % of a row's largest value. */
INLINE vec quick_gelu(vec x, const float odd[9]) {
    const vec end = all(4.25f), half = mul(x, all(0.5f));
    vec z = larger_of(smaller_of(x, end), sub(zeros(), end));
    vec square = mul(z, z), p = all(odd[8]);
    UNROLLED for (int i = 7; i >= 0; i--) p = mul_add(p, square, all(odd[i]));
    return mul_add(mul(p, z), half, half);
}

/* Activate a row in place; returns its largest absolute value. */
INLINE float activate_as(const int64_t kind, float *x, int64_t n) {
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

static float activate_row(int64_t kind, float *x, int64_t n) { /* compiled once for each kind */
    switch (kind) {
    case 1: return activate_as(1, x, n);
    case 2: return activate_as(2, x, n);
    case 3: return activate_as(3, x, n);
    default: return activate_as(0, x, n);
    }
}

/* ---- the parts of a layer; each returns 0 if there is no memory ---------------------------------------------------- */

/* One row: y = x + step, then the norm if it comes after */
static void add_residual(const Residual *residual, const float *x, const float *step, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] + step[i];
    if (residual->norm.weight && !residual->pre) normalize(y, y, residual->norm, n, residual->epsilon);
}

/* y (rows, out) = f(h), h (rows, in), both fp32 or bf16; with a `residual` y = x + f(h) in fp32, the end of the attention
   step, where h is the output of attention */
int apply_linear(const Linear *f, const Residual *residual, int64_t rows, const void *h, int64_t h_kind, const float *x,
                 void *y, int64_t y_kind) {
    float *in = aligned_alloc(64, CHUNK * (f->in + f->out) * sizeof(float) + int8_size(CHUNK, f->in));
    if (!in) return 0;
    float *step = in + CHUNK * f->in;
    Int8 *buffer = (Int8 *)(step + CHUNK * f->out);
    for (int64_t r = 0; r < rows; r += CHUNK) {
        int64_t count = smaller(CHUNK, rows - r);
        float *to = residual || y_kind == BF16 ? step : (float *)y + r * f->out;
        linear(f, as_fp32(h, h_kind, r * f->in, count * f->in, in), count, to, buffer);
        if (y_kind == BF16) to_bf16(to, count * f->out, (uint16_t *)y + r * f->out);
        for (int64_t i = 0; residual && i < count; i++)
            add_residual(residual, x + (r + i) * f->out, step + i * f->out, f->out, (float *)y + (r + i) * f->out);
    }
    free(in);
    return 1;
}

/* step (count, width) = contract(activate(expand(h))); `inner` (count, ffn_width) and `buffer` are scratch */
static void feed_chunk(const FeedForward *part, int64_t count, const float *h, float *step, float *inner, Int8 *buffer) {
    const Linear *contract = &part->contract;
    linear(&part->expand, h, count, inner, buffer);
    Inputs in = int8_inputs(contract, inner, count, buffer);
    for (int64_t r = 0; r < count; r++) {
        float top = activate_row(part->activation, inner + r * contract->in, contract->in);
        quantize(rows_from(in, r, contract->in), NULL, contract->in, top);
    }
    blocks(INT8, contract, in, count, step);
}

/* y = x + feed-forward of x: the second step of a layer; without a `residual` the feed-forward alone */
int feed_forward(const FeedForward *part, const Residual *residual, int64_t rows, const float *x, float *y) {
    int64_t width = part->expand.in, ffn_width = part->expand.out;
    int64_t numbers = CHUNK * (2 * width + ffn_width), pre = residual && residual->pre;
    float *h = aligned_alloc(64, numbers * sizeof(float) + int8_size(CHUNK, larger(width, ffn_width)));
    if (!h) return 0;
    float *step = h + CHUNK * width, *inner = step + CHUNK * width;
    for (int64_t r = 0; r < rows; r += CHUNK) {
        int64_t count = smaller(CHUNK, rows - r);
        const float *from = x + r * width;
        float *to = y + r * width;
        for (int64_t i = 0; pre && i < count; i++)
            normalize(from + i * width, h + i * width, residual->norm, width, residual->epsilon);
        feed_chunk(part, count, pre ? h : from, residual ? step : to, inner, (Int8 *)(h + numbers));
        for (int64_t i = 0; residual && i < count; i++)
            add_residual(residual, from + i * width, step + i * width, width, to + i * width);
    }
    free(h);
    return 1;
}
