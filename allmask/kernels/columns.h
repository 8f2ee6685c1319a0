/* Sums over the rows of a matrix, by blocks of rows: in fp32 within a block, in fp64 over the blocks, so that they do
   not depend on the number of threads. */

#include <stdint.h>

#define BLOCK 32 /* rows */

static int64_t blocks_of(int64_t rows) { return (rows + BLOCK - 1) / BLOCK; }
static int64_t end_of_block(int64_t block, int64_t rows) { return (block + 1) * BLOCK < rows ? (block + 1) * BLOCK : rows; }

/* out[n] = sums of the rows of partial[blocks][n], which are `apart` numbers apart */
static void sum_blocks(const float *partial, int64_t blocks, int64_t n, int64_t apart, float *out) {
    for (int64_t start = 0; start < n; start += 256) {
        int64_t count = n - start < 256 ? n - start : 256;
        double sums[256] = {0};
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t i = 0; i < count; i++) sums[i] += partial[block * apart + start + i];
        for (int64_t i = 0; i < count; i++) out[start + i] = (float)sums[i];
    }
}
