/* The arguments of `attend_documents` in packed_attention.c; in the forward pass `grad` and the gradients are NULL. */

#include <stdint.h>

typedef struct {
    const char *q, *k, *v;
    char *out;
    float *tops, *sums; /* (heads, tokens): the largest score of a row and the sum of its exponentials */
    const char *grad;
    char *q_grad, *k_grad, *v_grad;
    const int64_t *documents; /* (number, 5): start, length, source, start of the keys, number of keys */
    int64_t number, tokens, heads, width; /* tokens: of the queries; width: of a head */
    int64_t q_row, k_row, v_row, grad_row; /* strides between tokens; `out` has a stride of heads · width */
    int64_t q_grad_row, k_grad_row, v_grad_row;
    const int64_t *places; /* (tokens): the index of each query in its document; NULL: all of a document are there */
    int64_t half, threads;
    uint64_t seed;
    uint32_t dropped; /* dropout probability · 2^32 */
    float scale;
} Call;
