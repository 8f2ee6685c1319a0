/* RMS norm (arXiv 1910.07467) of fp32 rows and its gradients, with AVX-512, AVX2 or NEON.

       y  = x · r · weight,   r = 1 / sqrt(mean(x²) + epsilon)
       x_grad = r · h - x · r³ · mean(h · x),   h = grad · weight
       weight_grad = Σ over rows of grad · x · r

   The result of a row does not depend on the other rows. The gradient of the weight is summed in fp32 within a block of
   rows and in fp64 over the blocks, so it does not depend on the number of threads. */

#include <math.h>
#include <stdlib.h>

#include "columns.h"
#include "lanes.h"
#include "threads.h"

typedef struct {
    const float *x, *weight, *grad;
    float *out;         /* y, or the gradient of x */
    float *weight_grad; /* (blocks, width) by block of rows; NULL if it is not wanted */
    int64_t rows, width, threads;
    double epsilon;
} Call; /* as packed by rms_norm.py */

INLINE vec load_up_to(int64_t n, const float *from) { return n >= LANES ? load(from) : load_some(first(n), from); }
INLINE void save_up_to(int64_t n, float *to, vec x) {
    if (n >= LANES) save(to, x);
    else save_some(first(n), to, x);
}

/* The r of a row and, with a `grad`, the mean of h · x. Four sums at a time hide the latency of additions. */
typedef struct { double scale, mean; } Statistics;

INLINE Statistics row_statistics(const Call *call, const float *x, const float *grad) {
    int64_t n = call->width, i = 0;
    vec squares[4], products[4];
    UNROLLED for (int k = 0; k < 4; k++) squares[k] = products[k] = zeros();
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        UNROLLED for (int k = 0; k < 4; k++) {
            vec v = load(x + i + LANES * k);
            squares[k] = mul_add(v, v, squares[k]);
            if (grad) products[k] = mul_add(mul(load(grad + i + LANES * k), load(call->weight + i + LANES * k)), v, products[k]);
        }
    for (; i < n; i += LANES) {
        vec v = load_up_to(n - i, x + i);
        squares[0] = mul_add(v, v, squares[0]);
        if (grad) products[0] = mul_add(mul(load_up_to(n - i, grad + i), load_up_to(n - i, call->weight + i)), v, products[0]);
    }
    double square = sum_of(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
    double product = grad ? sum_of(add(add(products[0], products[1]), add(products[2], products[3]))) : 0;
    return (Statistics){1 / sqrt(square / n + call->epsilon), product / n};
}

static void forward_block(const void *context, int64_t block, int64_t worker) {
    const Call *call = context;
    int64_t n = call->width, end = end_of_block(block, call->rows);
    for (int64_t row = block * BLOCK; row < end; row++) {
        const float *x = call->x + row * n;
        float *y = call->out + row * n;
        vec scale = all((float)row_statistics(call, x, NULL).scale);
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) save(y + i, mul(mul(load(x + i), scale), load(call->weight + i)));
        if (i < n) save_up_to(n - i, y + i, mul(mul(load_up_to(n - i, x + i), scale), load_up_to(n - i, call->weight + i)));
    }
}

/* Up to 16 numbers of a row */
INLINE void backward_step(int64_t n, const float *x, const float *grad, const float *weight, vec scale, vec back,
                          float *x_grad, float *sums) {
    vec value = load_up_to(n, x), g = mul(load_up_to(n, grad), scale);
    save_up_to(n, x_grad, mul_sub(value, back, mul(g, load_up_to(n, weight))));
    if (sums) save_up_to(n, sums, mul_add(g, value, load_up_to(n, sums)));
}

static void backward_block(const void *context, int64_t block, int64_t worker) {
    const Call *call = context;
    int64_t n = call->width, end = end_of_block(block, call->rows);
    float *sums = call->weight_grad ? call->weight_grad + block * n : NULL;
    for (int64_t i = 0; sums && i < n; i++) sums[i] = 0;
    for (int64_t row = block * BLOCK; row < end; row++) {
        const float *x = call->x + row * n, *grad = call->grad + row * n;
        float *to = call->out + row * n;
        Statistics found = row_statistics(call, x, grad);
        vec scale = all((float)found.scale), back = all((float)(found.scale * found.scale * found.scale * found.mean));
        int64_t i = 0;
        if (sums)
            for (; i + LANES <= n; i += LANES)
                backward_step(LANES, x + i, grad + i, call->weight + i, scale, back, to + i, sums + i);
        else
            for (; i + LANES <= n; i += LANES)
                backward_step(LANES, x + i, grad + i, call->weight + i, scale, back, to + i, NULL);
        if (i < n) backward_step(n - i, x + i, grad + i, call->weight + i, scale, back, to + i, sums ? sums + i : NULL);
    }
}

static void run(Work *work, const Call *call) {
    int64_t blocks = blocks_of(call->rows), most = blocks < MAX_THREADS ? blocks : MAX_THREADS;
    share_work(work, call, blocks, call->threads < most ? call->threads : most);
}

void rms_norm(const Call *call) { run(forward_block, call); }

/* Returns 0 if there is no memory. */
int rms_norm_backward(const Call *call) {
    int64_t blocks = blocks_of(call->rows);
    if (!call->weight_grad || blocks == 1) {
        run(backward_block, call);
        return 1;
    }
    Call by_block = *call;
    by_block.weight_grad = malloc(blocks * call->width * sizeof(float));
    if (!by_block.weight_grad) return 0;
    run(backward_block, &by_block);
    sum_blocks(by_block.weight_grad, blocks, call->width, call->width, call->weight_grad);
    free(by_block.weight_grad);
    return 1;
}
