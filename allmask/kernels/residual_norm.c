/* The end of a residual step of a post-norm layer, and its gradients: bias, dropout, addition and layer norm at once.

       s = x + dropout(step + bias),   y = (s - mean(s)) · r · weight + shift,   r = 1 / sqrt(var(s) + epsilon)

   With g = y_grad, n = (s - mean(s)) · r and h = g · weight:

       x_grad = r · (h - mean(h) - n · mean(h · n)),   step_grad = dropout(x_grad)
       weight_grad = Σ g · n,   shift_grad = Σ g,   bias_grad = Σ step_grad over the rows

   x, y and sums are fp32; `step` is fp32 or bf16. The next matrix product may want y in bf16: `low` is that copy, and
   `low_grad` the gradient that comes back from there. The width is a multiple of 16. No row depends on the others. */

#include <math.h>
#include <stdlib.h>

#include "columns.h"
#include "dropout.h"
#include "threads.h"

typedef struct {
    const float *x, *bias, *weight, *shift;
    const char *step;
    float *sums;        /* s */
    float *means, *scales; /* of each row: mean(s) and r */
    float *y;
    uint16_t *low;                         /* NULL: not wanted */
    const float *grad;                     /* of y; NULL: none */
    const uint16_t *low_grad;              /* NULL: none */
    float *x_grad;
    char *step_grad;
    float *partial;                        /* (blocks, 3, width): gradients of weight, shift and bias by block of rows */
    float *weight_grad, *shift_grad, *bias_grad;
    int64_t rows, width, half, threads;    /* half: step is bf16 */
    uint64_t seed;
    uint32_t dropped;                      /* dropout probability · 2^32 */
    float epsilon;
} Call; /* as packed by residual_norm.py */

INLINE vec load_step(int half, const char *from, int64_t i) {
    return half ? load_bf16((const uint16_t *)from + i) : load((const float *)from + i);
}
INLINE void save_step(int half, char *to, int64_t i, vec x) {
    if (half) save_all_bf16((uint16_t *)to + i, x);
    else save((float *)to + i, x);
}
INLINE vec dropout(vec x, uint64_t row, int64_t i, uint32_t dropped, vec factor) {
    return dropped ? choose(not_dropped(row, i, dropped), mul(x, factor), zeros()) : x;
}
INLINE float factor_of(uint32_t dropped) { return 1.0f / (1.0f - dropped * 0x1p-32f); }

INLINE void forward_row(int half, const Call *call, int64_t row) {
    int64_t n = call->width, at = row * n;
    const float *x = call->x + at;
    const char *step = call->step + (at << (half ? 1 : 2));
    float *s = call->sums + at, *y = call->y + at;
    uint64_t hash = mix(call->seed ^ (uint64_t)row);
    vec factor = all(factor_of(call->dropped)), total = zeros(), squares = zeros();
    for (int64_t i = 0; i < n; i += LANES) {
        vec added = load_step(half, step, i);
        if (call->bias) added = add(added, load(call->bias + i));
        vec sum = add(load(x + i), dropout(added, hash, i, call->dropped, factor));
        save(s + i, sum);
        total = add(total, sum);
    }
    vec mean = all(sum_of(total) / n);
    for (int64_t i = 0; i < n; i += LANES) {
        vec off = sub(load(s + i), mean);
        squares = mul_add(off, off, squares);
    }
    float scale = (float)(1 / sqrt((double)sum_of(squares) / n + call->epsilon));
    vec scales = all(scale);
    for (int64_t i = 0; i < n; i += LANES) {
        vec out = mul_add(mul(sub(load(s + i), mean), scales), load(call->weight + i), load(call->shift + i));
        save(y + i, out);
        if (call->low) save_all_bf16(call->low + at + i, out);
    }
    call->means[row] = sum_of(total) / n;
    call->scales[row] = scale;
}

static void forward_block(const void *context, int64_t block, int64_t worker) {
    const Call *call = context;
    for (int64_t row = block * BLOCK; row < end_of_block(block, call->rows); row++)
        call->half ? forward_row(1, call, row) : forward_row(0, call, row);
}

INLINE vec grad_at(const Call *call, int64_t at) {
    vec g = call->grad ? load(call->grad + at) : zeros();
    return call->low_grad ? add(g, load_bf16(call->low_grad + at)) : g;
}

INLINE void backward_row(int half, const Call *call, int64_t row, float *sums) {
    int64_t n = call->width, at = row * n;
    const float *s = call->sums + at;
    float *x_grad = call->x_grad + at;
    char *step_grad = call->step_grad + (at << (half ? 1 : 2));
    uint64_t hash = mix(call->seed ^ (uint64_t)row);
    vec mean = all(call->means[row]), scale = all(call->scales[row]), factor = all(factor_of(call->dropped));
    vec first_sum = zeros(), second_sum = zeros();
    for (int64_t i = 0; i < n; i += LANES) {
        vec normed = mul(sub(load(s + i), mean), scale), g = grad_at(call, at + i), h = mul(g, load(call->weight + i));
        first_sum = add(first_sum, h);
        second_sum = mul_add(h, normed, second_sum);
        save(sums + i, mul_add(g, normed, load(sums + i)));
        save(sums + n + i, add(g, load(sums + n + i)));
        save(x_grad + i, h);
    }
    vec middle = all(sum_of(first_sum) / n), slope = all(sum_of(second_sum) / n);
    for (int64_t i = 0; i < n; i += LANES) {
        vec normed = mul(sub(load(s + i), mean), scale);
        vec back = mul(scale, mul_sub(normed, slope, sub(load(x_grad + i), middle)));
        vec step = dropout(back, hash, i, call->dropped, factor);
        save(x_grad + i, back);
        save_step(half, step_grad, i, step);
        save(sums + 2 * n + i, add(step, load(sums + 2 * n + i)));
    }
}

static void backward_block(const void *context, int64_t block, int64_t worker) {
    const Call *call = context;
    float *sums = call->partial + 3 * block * call->width;
    for (int64_t i = 0; i < 3 * call->width; i++) sums[i] = 0;
    for (int64_t row = block * BLOCK; row < end_of_block(block, call->rows); row++)
        call->half ? backward_row(1, call, row, sums) : backward_row(0, call, row, sums);
}

static void run(Work *work, const Call *call) {
    int64_t blocks = blocks_of(call->rows), most = blocks < MAX_THREADS ? blocks : MAX_THREADS;
    if (blocks) share_work(work, call, blocks, call->threads < most ? call->threads : most);
}

void residual_norm(const Call *call) { run(forward_block, call); }

/* Returns 1 if there is no memory. */
int residual_norm_backward(const Call *call) {
    int64_t blocks = blocks_of(call->rows), n = call->width;
    Call by_block = *call;
    by_block.partial = malloc((blocks * 3 * n + 1) * sizeof(float));
    if (!by_block.partial) return 1;
    run(backward_block, &by_block);
    sum_blocks(by_block.partial, blocks, n, 3 * n, call->weight_grad);
    sum_blocks(by_block.partial + n, blocks, n, 3 * n, call->shift_grad);
    sum_blocks(by_block.partial + 2 * n, blocks, n, 3 * n, call->bias_grad);
    free(by_block.partial);
    return 0;
}
