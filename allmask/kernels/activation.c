/* The activation between the two products of a feed-forward layer, and its gradients: bias, activation and dropout at once.

       y = dropout(f(x + bias)),   slope = dropout(f'(x + bias))
       x_grad = y_grad · slope,   bias_grad = Σ x_grad over the rows

   f is GELU with the normal distribution function, GELU with tanh, or ReLU. Value and slope have most of their
   arithmetic in common, so the slope is computed in the forward pass and saved instead of x. Tensors are fp32 or bf16,
   sums fp32. The width is a multiple of 16. No row depends on the others. */

#include <stdlib.h>

#include "activation.h"
#include "columns.h"
#include "dropout.h"
#include "threads.h"

typedef struct {
    const char *x, *grad; /* grad: of y, in the backward pass */
    const float *bias;
    char *slope, *out; /* out: y, or x_grad */
    float *partial;    /* (blocks, width): the gradient of the bias by block of rows */
    float *bias_grad;
    int64_t rows, width, half, kind, threads; /* half: x and y are bf16 */
    uint64_t seed;
    uint32_t dropped; /* dropout probability · 2^32 */
} Call;               /* as packed by activation.py */

/* ---- rows ------------------------------------------------------------------------------------------------------- */

INLINE vec load_number(int half, const char *from, int64_t i) {
    return half ? load_bf16((const uint16_t *)from + i) : load((const float *)from + i);
}
INLINE void save_number(int half, char *to, int64_t i, vec x) {
    if (half) save_all_bf16((uint16_t *)to + i, x);
    else save((float *)to + i, x);
}

INLINE void forward_rows(int half, int kind, const Call *call, int64_t block) {
    int64_t n = call->width;
    vec factor = all(1.0f / (1.0f - call->dropped * 0x1p-32f));
    for (int64_t row = block * BLOCK; row < end_of_block(block, call->rows); row++) {
        int64_t start = (row * n) << (half ? 1 : 2);
        uint64_t hash = mix(call->seed ^ (uint64_t)row);
        for (int64_t i = 0; i < n; i += LANES) {
            Point found = at(kind, add(load_number(half, call->x + start, i), load(call->bias + i)));
            if (call->dropped) {
                vec share = choose(not_dropped(hash, i, call->dropped), factor, zeros());
                found = (Point){mul(found.value, share), mul(found.slope, share)};
            }
            save_number(half, call->out + start, i, found.value);
            save_number(half, call->slope + start, i, found.slope);
        }
    }
}

INLINE void backward_rows(int half, const Call *call, int64_t block) {
    int64_t n = call->width;
    float *sums = call->partial + block * n;
    for (int64_t i = 0; i < n; i++) sums[i] = 0;
    for (int64_t row = block * BLOCK; row < end_of_block(block, call->rows); row++) {
        int64_t start = (row * n) << (half ? 1 : 2);
        for (int64_t i = 0; i < n; i += LANES) {
            vec x_grad = mul(load_number(half, call->slope + start, i), load_number(half, call->grad + start, i));
            save_number(half, call->out + start, i, x_grad);
            save(sums + i, add(x_grad, load(sums + i)));
        }
    }
}

INLINE void forward_kind(int kind, const Call *call, int64_t block) {
    call->half ? forward_rows(1, kind, call, block) : forward_rows(0, kind, call, block);
}

static void forward_block(const void *context, int64_t block, int64_t worker) {
    const Call *call = context;
    if (call->kind == GELU) forward_kind(GELU, call, block);
    else if (call->kind == GELU_TANH) forward_kind(GELU_TANH, call, block);
    else forward_kind(RELU, call, block);
}

static void backward_block(const void *context, int64_t block, int64_t worker) {
    const Call *call = context;
    call->half ? backward_rows(1, call, block) : backward_rows(0, call, block);
}

static void run(Work *work, const Call *call) {
    int64_t blocks = blocks_of(call->rows), most = blocks < MAX_THREADS ? blocks : MAX_THREADS;
    if (blocks) share_work(work, call, blocks, call->threads < most ? call->threads : most);
}

void activate(const Call *call) { run(forward_block, call); }

/* Returns 1 if there is no memory. */
int activate_backward(const Call *call) {
    int64_t blocks = blocks_of(call->rows);
    Call by_block = *call;
    by_block.partial = malloc((blocks * call->width + 1) * sizeof(float));
    if (!by_block.partial) return 1;
    run(backward_block, &by_block);
    sum_blocks(by_block.partial, blocks, call->width, call->width, call->bias_grad);
    free(by_block.partial);
    return 0;
}
