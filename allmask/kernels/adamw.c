/* A step of AdamW (arXiv 1711.05101) on several tensors, in one pass over memory each.

       m += (1 - β1) · (g - m),   v = β2 · v + (1 - β2) · g²,   w = decay · w - rate · m / (sqrt(v) / root + ε)

   where g is the gradient times a factor, that of clipping. Every operation is rounded as in torch's fused AdamW, so the
   results have the same bits. Of a table of which only some rows were ever read, the others have neither gradient nor m and v:
   there only w decays. Sizes are multiples of 16. */

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off") /* products are rounded before they are added to something */
#endif

#include "lanes.h"
#include "threads.h"

#define BLOCK (1 << 16) /* numbers of an item of work */

typedef struct {
    float **weights, **grads, **means, **squares; /* m and v */
    const uint8_t **rows;                         /* of each tensor: NULL, or for each row whether it was ever read */
    const int64_t *sizes, *widths;                /* in numbers; a row is as wide */
    const float *rates, *roots;                   /* the learning rate and sqrt(v), both with bias correction */
    int64_t count, threads;
    float factor, decay, first, second, keep, epsilon; /* first: 1 - β1, second: 1 - β2, keep: β2 */
} Call; /* as packed by adamw.py */

static void update(const Call *call, int64_t n, int64_t from, int64_t to) {
    float *w = call->weights[n], *m = call->means[n], *v = call->squares[n];
    const float *grad = call->grads[n];
    int near = call->first < 0.5f; /* the new m is nearer to the old one than to g: computed from the nearer one */
    vec factor = all(call->factor), decay = all(call->decay), share = all(near ? call->first : call->first - 1);
    vec second = all(call->second), keep = all(call->keep), epsilon = all(call->epsilon), rate = all(-call->rates[n]), root = all(call->roots[n]);
    for (int64_t i = from; i < to; i += LANES) {
        vec g = mul(load(grad + i), factor), mean = load(m + i);
        mean = mul_add(share, sub(g, mean), near ? mean : g);
        vec square = mul_add(mul(second, g), g, mul(load(v + i), keep));
        vec scale = add(divide(square_root(square), root), epsilon);
        save(m + i, mean);
        save(v + i, square);
        save(w + i, add(mul(load(w + i), decay), divide(mul(rate, mean), scale)));
    }
}

static void only_decay(const Call *call, int64_t n, int64_t from, int64_t to) {
    float *w = call->weights[n];
    if (call->decay == 1) return;
    for (int64_t i = from; i < to; i += LANES) save(w + i, mul(load(w + i), all(call->decay)));
}

static int64_t blocks_of(int64_t size) { return (size + BLOCK - 1) / BLOCK; }

static void update_block(const void *context, int64_t item, int64_t worker) {
    const Call *call = context;
    int64_t n = 0;
    for (; item >= blocks_of(call->sizes[n]); n++) item -= blocks_of(call->sizes[n]);
    int64_t from = item * BLOCK, end = from + BLOCK < call->sizes[n] ? from + BLOCK : call->sizes[n];
    const uint8_t *rows = call->rows[n];
    if (!rows) update(call, n, from, end);
    for (int64_t to; rows && from < end; from = to) {
        int64_t row = from / call->widths[n];
        to = (row + 1) * call->widths[n] < end ? (row + 1) * call->widths[n] : end;
        rows[row] ? update(call, n, from, to) : only_decay(call, n, from, to);
    }
}

void adamw(const Call *call) {
    int64_t blocks = 0;
    for (int64_t n = 0; n < call->count; n++) blocks += blocks_of(call->sizes[n]);
    int64_t most = blocks < MAX_THREADS ? blocks : MAX_THREADS;
    if (blocks) share_work(update_block, call, blocks, call->threads < most ? call->threads : most);
}
