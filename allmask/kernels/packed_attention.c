/* Attention of short documents, packed one after another, each over itself or over a partner, and its gradients.

   General kernels spend most of their time on calls for many small matrices, and memory on weights saved for the
   backward pass. Here one head of one document is a piece of work inside the first caches: 32 queries at a time read
   their keys, and the backward pass recomputes the weights from the largest score and the sum of each row.

   The first `source` tokens of a document read each other; each later token reads all tokens up to itself. So
   source == length is bidirectional, source == 0 causal. The keys may be those of a partner document in another row of
   tokens, as in the cross-attention of a decoder; a source beyond both lengths then reads all of them.

   Matrices are multiplied in units of 32 bits: one fp32 number, or two bf16 numbers adjacent along the inner dimension.
   `half` is 1 for bf16 and 0 for fp32, so width >> half counts units. All sums are in fp32. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention_call.h"
#include "dropout.h"
#include "lanes.h"
#include "threads.h"
#include "transpose.h"

#ifdef __AVX512F__
#define ROWS 8 /* of a tile: ROWS × LANES sums take a quarter of the registers, with AVX2 and NEON half of them */
#else
#define ROWS 4
#endif
#define STRIP 32 /* queries at a time */

typedef struct {
    int64_t start, length, source, key_start, keys, padded, head; /* padded: the number of keys, rounded up */
    uint64_t seed;
    const int64_t *places; /* of its queries; NULL: 0, 1, 2, … */
} Piece;

static int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- arithmetic -------------------------------------------------------------------------------------------- */

/* Which of the keys j to j + 15 are among the first `seen` */
INLINE mask among(int64_t j, int64_t seen) { return first(seen - j); }

/* bf16 products; on processors without them this library is never called with bf16. */
#ifdef __aarch64__
INLINE halves to_bf16(vec x) { return rounded(x); }
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
INLINE float32x4_t four_pairs(float32x4_t sum, uint32x4_t a, int32x4_t b) {
    return vbfdotq_f32(sum, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_s32(b));
}
INLINE vec multiply_add_pairs(vec sum, unit a, ints b) {
    return EACH_THREE(vec, four_pairs, sum, SAME(mask, vdupq_n_u32(a)), b);
}
#else
INLINE vec multiply_add_pairs(vec sum, unit a, ints b) { return (void)a, (void)b, sum; }
#endif
INLINE ints paired(halves even, halves odd) {
    uint16x8x2_t left = vzipq_u16(even.a, odd.a), right = vzipq_u16(even.b, odd.b);
    return (ints){{vreinterpretq_s32_u16(left.val[0]), vreinterpretq_s32_u16(left.val[1]),
                   vreinterpretq_s32_u16(right.val[0]), vreinterpretq_s32_u16(right.val[1])}};
}
#else
typedef __m256i halves; /* sixteen numbers of 16 bits */
INLINE halves load_halves(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE void save_halves(void *to, halves x) { _mm256_storeu_si256((__m256i *)to, x); }
#ifdef __AVX512BF16__
INLINE halves to_bf16(vec x) { return (__m256i)_mm512_cvtneps_pbh(x); } /* to the nearest bf16, ties to even */
INLINE vec multiply_add_pairs(vec sum, unit a, ints b) {
    /* _mm512_dpbf16_ps; gcc 12 copies sums around the intrinsic */
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(b), "v"(_mm512_set1_epi32((int)a)));
    return sum;
}

/* Two rows of 16 bf16 numbers as units, the first row in the low halves */
INLINE ints paired(halves even, halves odd) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}
#else
INLINE halves to_bf16(vec x) { return (void)x, _mm256_setzero_si256(); }
INLINE vec multiply_add_pairs(vec sum, unit a, ints b) { return (void)a, (void)b, sum; }
INLINE ints paired(halves even, halves odd) { return (void)even, (void)odd, no_ints(); }
#endif
#endif

/* sum + a · b, where the unit a is broadcast */
INLINE vec multiply_add(int half, vec sum, const unit *a, ints b) {
    if (half) return multiply_add_pairs(sum, *a, b);
    return mul_add(all(*(const real *)a), as_floats(b), sum);
}

/* c[ROWS][16] += a[ROWS][depth] · b[depth][16]; strides: `row` and `step` of the rows and columns of a, `wide` of b */
INLINE void product(int half, const unit *a, int64_t row, int64_t step, const unit *b, int64_t wide, int64_t depth,
                    vec c[ROWS]) {
    vec sum[ROWS];
    memcpy(sum, c, sizeof sum);
    for (int64_t d = 0; d < depth; d++) {
        ints across = load_ints(b + d * wide);
        for (int i = 0; i < ROWS; i++) sum[i] = multiply_add(half, sum[i], a + i * row + d * step, across);
    }
    memcpy(c, sum, sizeof sum);
}

/* ---- layouts ------------------------------------------------------------------------------------------------- */

/* to[pitch][padded] = from[padded][pitch] transposed */
static void transpose_all(const unit *from, int64_t padded, int64_t pitch, unit *to) {
    for (int64_t j = 0; j < padded; j += LANES)
        for (int64_t d = 0; d < pitch; d += LANES) {
            ints a[LANES];
            for (int i = 0; i < LANES; i++) a[i] = load_ints(from + (j + i) * pitch + d);
            transpose(a);
            for (int i = 0; i < LANES; i++) save_ints(to + (d + i) * padded + j, a[i]);
        }
}

/* Rows of tokens as the second factor of a product along the tokens: fp32 in place, bf16 with two tokens per unit.
   Returns their address and sets the stride `wide` of their rows. */
INLINE const unit *along_tokens(int half, const unit *rows, int64_t count, int64_t width, int64_t pitch, unit *to,
                                int64_t *wide) {
    *wide = half ? width : pitch;
    if (!half) return rows;
    for (int64_t j = 0; j < count; j += 2)
        for (int64_t d = 0; d < width; d += LANES) {
            const unit *first = rows + j * pitch + d / 2;
            save_ints(to + j / 2 * width + d, paired(load_halves(first), load_halves(first + pitch)));
        }
    return to;
}

/* Weights, to be transposed, as the first factor of a product along the queries */
INLINE const unit *along_queries(int half, const float *weights, int64_t rows, int64_t keys, int64_t wide, unit *to) {
    if (!half) return (const unit *)weights;
    for (int64_t r = 0; r < rows; r += 2)
        for (int64_t j = 0; j < keys; j += LANES) {
            const char *even = (const char *)(weights + r * wide), *odd = (const char *)(weights + (r + 1) * wide);
            save_ints(to + r / 2 * wide + j, paired(load_halves(even + 2 * j), load_halves(odd + 2 * j)));
        }
    return to;
}

INLINE void store(int half, vec x, char *to, int64_t at) {
    if (half) save_halves(to + 2 * at, to_bf16(x));
    else save((float *)(to + 4 * at), x);
}

/* ---- one document and head ------------------------------------------------------------------------------------ */

/* How many keys a query reads: the first of them, in a row */
static int64_t keys_seen(const Piece *piece, int64_t query) {
    int64_t place = piece->places ? piece->places[query] : query;
    return place < piece->source ? smaller(piece->source, piece->keys) : place + 1;
}

/* A strip lies within the source or after it, so that no query computes scores of keys it does not read. Of chosen
   queries, which are in order, the last one of a strip reads most. */
static int64_t strip_end(const Piece *piece, int64_t first) {
    if (piece->places) return smaller(first + STRIP, piece->length);
    return smaller(first + STRIP, first < piece->source ? smaller(piece->source, piece->length) : piece->length);
}

/* The address of the piece's head of a token, in a tensor whose tokens have the stride `row` */
static char *head_of(const void *base, int64_t row, const Call *call, const Piece *piece, int64_t token) {
    return (char *)base + ((token * row + piece->head * call->width) << (call->half ? 1 : 2));
}

/* Copy `count` tokens from `first` on, `pitch` units each; pad with zeros to `pitch` units and `padded` tokens */
static void load_tokens(const Call *call, const Piece *piece, const char *base, int64_t row, int64_t first, int64_t count,
                  int64_t padded, unit *to) {
    int64_t units = call->width >> call->half, pitch = round_up(units, LANES);
    for (int64_t j = 0; j < count; j++) {
        const char *from = head_of(base, row, call, piece, first + j);
        for (int64_t d = 0; d < pitch; d += LANES) {
            const char *these = from + d * sizeof(unit);
            __builtin_prefetch(these + units * sizeof(unit)); /* of the next head */
            save_ints(to + j * pitch + d, units - d >= LANES ? load_ints(these) : load_some_ints(among(d, units), these));
        }
    }
    memset(to + count * pitch, 0, (padded - count) * pitch * sizeof(unit));
}

/* scores[rows][keys] = rows of a · transposed keys · factor */
INLINE void score(int half, const unit *a, int64_t rows, int64_t pitch, int64_t depth, const unit *transposed, int64_t wide,
                  int64_t keys, float factor, float *scores) {
    for (int64_t j = 0; j < keys; j += LANES)
        for (int64_t r = 0; r < rows; r += ROWS) {
            vec c[ROWS];
            for (int i = 0; i < ROWS; i++) c[i] = zeros();
            product(half, a + r * pitch, pitch, 1, transposed + j, wide, depth, c);
            for (int i = 0; i < ROWS; i++) save(scores + (r + i) * wide + j, mul(c[i], all(factor)));
        }
}

/* Turn the scores of one query into weights, not yet divided by their sum; 0 beyond the keys that it reads, and where
   they are dropped, which does not change the sum. bf16 weights take the first half of the row. */
INLINE void softmax_row(int half, float *s, int64_t seen, int64_t keys, uint32_t dropped, uint64_t query, float *top,
                        float *sum) {
    const vec never = all(-INFINITY);
    vec most = never, total = zeros();
    for (int64_t j = 0; j < keys; j += LANES) {
        vec scores = load(s + j);
        if (j + LANES > seen) save(s + j, scores = choose(among(j, seen), scores, never));
        most = larger_of(scores, most);
    }
    *top = largest_of(most);
    for (int64_t j = 0; j < keys; j += LANES) {
        vec weights = exponential(sub(load(s + j), all(*top)));
        store(half, dropped ? choose(not_dropped(query, j, dropped), weights, zeros()) : weights, (char *)s, j);
        total = add(total, weights);
    }
    *sum = sum_of(total);
}

/* The weighted sum of the rows for each of `count` queries from `first` on, times the factor of the query */
INLINE void weighted_sum(int half, const Call *call, const Piece *piece, int64_t first, int64_t count, const unit *weights,
                  int64_t seen, const unit *rows, int64_t row, const float *factors, char *to, int64_t apart) {
    int64_t wide = piece->padded;
    for (int64_t r = 0; r < count; r += ROWS)
        for (int64_t d = 0; d < call->width; d += LANES) {
            vec c[ROWS];
            for (int i = 0; i < ROWS; i++) c[i] = zeros();
            product(half, weights + r * wide, wide, 1, rows + d, row, (seen + half) >> half, c);
            char *token = head_of(to, apart, call, piece, piece->start + first + r);
            for (int64_t i = 0; i < ROWS && r + i < count; i++) store(half, mul(c[i], all(factors[r + i])), token, i * apart + d);
        }
}

INLINE void forward(int half, const Call *call, const Piece *piece, unit *scratch) {
    int64_t width = call->width, units = width >> half, pitch = round_up(units, LANES), wide = piece->padded;
    unit *rows = scratch, *transposed = rows + wide * pitch, *pairs = transposed + wide * pitch;
    unit *queries = pairs + wide * width;
    float *scores = (float *)(queries + STRIP * pitch), factors[STRIP], share = 1.0f - call->dropped * 0x1p-32f;
    int64_t value_row;

    load_tokens(call, piece, call->k, call->k_row, piece->key_start, piece->keys, wide, rows);
    transpose_all(rows, wide, pitch, transposed);
    load_tokens(call, piece, call->v, call->v_row, piece->key_start, piece->keys, wide, rows);
    const unit *values = along_tokens(half, rows, wide, width, pitch, pairs, &value_row);

    for (int64_t first = 0, end; first < piece->length; first = end) {
        end = strip_end(piece, first);
        int64_t count = end - first, padded = round_up(count, ROWS);
        int64_t seen = keys_seen(piece, end - 1), keys = round_up(seen, LANES);
        int64_t at = piece->head * call->tokens + piece->start + first;
        load_tokens(call, piece, call->q, call->q_row, piece->start + first, count, padded, queries);
        score(half, queries, padded, pitch, units, transposed, wide, keys, call->scale, scores);
        for (int64_t r = 0; r < count; r++) {
            softmax_row(half, scores + r * wide, keys_seen(piece, first + r), keys, call->dropped,
                        mix(piece->seed ^ (uint64_t)(first + r)), call->tops + at + r, call->sums + at + r);
            factors[r] = 1.0f / (call->sums[at + r] * share);
        }
        weighted_sum(half, call, piece, first, count, (const unit *)scores, seen, values, value_row, factors, call->out,
                     call->heads * call->width);
    }
}

/* One query: turn scores into weights (without the factor of dropout), and gradients of the weights into gradients of
   the scores. In bf16 both take the first halves of their rows. */
INLINE void softmax_row_backward(int half, float *s, float *g, int64_t seen, int64_t keys, float top, float inverse,
                                 uint32_t dropped, float factor, uint64_t query) {
    vec mean = zeros();
    for (int64_t j = 0; j < keys; j += LANES) {
        vec weight = mul(exponential(sub(load(s + j), all(top))), all(inverse)), slope = mul(load(g + j), all(factor));
        if (j + LANES > seen) weight = choose(among(j, seen), weight, zeros());
        if (dropped) { /* a negative weight is remembered as a dropped one */
            mask kept = not_dropped(query, j, dropped);
            slope = choose(kept, slope, zeros());
            mean = mul_add(weight, slope, mean);
            weight = choose(kept, weight, sub(zeros(), weight));
        } else {
            mean = mul_add(weight, slope, mean);
        }
        save(s + j, weight);
        save(g + j, slope);
    }
    float middle = sum_of(mean);
    for (int64_t j = 0; j < keys; j += LANES) {
        vec weight = load(s + j);
        store(half, mul(size_of(weight), sub(load(g + j), all(middle))), (char *)g, j);
        store(half, dropped ? choose(negative(weight), zeros(), weight) : weight, (char *)s, j);
    }
}

/* sums[keys][width] += weights[queries][keys]ᵀ · rows[queries][width] */
INLINE void add_products(int half, const unit *weights, int64_t wide, int64_t keys, int64_t queries, const unit *rows,
                    int64_t row, int64_t width, float *sums) {
    for (int64_t j = 0; j < keys; j += ROWS)
        for (int64_t d = 0; d < width; d += LANES) {
            vec c[ROWS];
            for (int i = 0; i < ROWS; i++) c[i] = load(sums + (j + i) * width + d);
            product(half, weights + j, 1, wide, rows + d, row, (queries + half) >> half, c);
            for (int i = 0; i < ROWS; i++) save(sums + (j + i) * width + d, c[i]);
        }
}

INLINE void save_sums(int half, const Call *call, const Piece *piece, const float *sums, float factor, char *to,
                      int64_t apart) {
    for (int64_t j = 0; j < piece->keys; j++) {
        char *token = head_of(to, apart, call, piece, piece->key_start + j);
        for (int64_t d = 0; d < call->width; d += LANES)
            store(half, mul(load(sums + j * call->width + d), all(factor)), token, d);
    }
}

INLINE void backward(int half, const Call *call, const Piece *piece, unit *scratch) {
    int64_t width = call->width, units = width >> half, pitch = round_up(units, LANES), wide = piece->padded;
    unit *rows = scratch, *keys_transposed = rows + wide * pitch, *values_transposed = keys_transposed + wide * pitch;
    unit *pairs = values_transposed + wide * pitch, *narrow = pairs + wide * width, *queries = narrow + STRIP * wide;
    unit *grads = queries + STRIP * pitch, *strip_pairs = grads + STRIP * pitch;
    float *scores = (float *)(strip_pairs + STRIP * width), *slopes = scores + STRIP * wide;
    float *k_sums = slopes + STRIP * wide, *v_sums = k_sums + wide * width;
    float factors[STRIP], factor = 1.0f / (1.0f - call->dropped * 0x1p-32f);
    int64_t key_row, row;

    for (int r = 0; r < STRIP; r++) factors[r] = call->scale;
    load_tokens(call, piece, call->v, call->v_row, piece->key_start, piece->keys, wide, rows);
    transpose_all(rows, wide, pitch, values_transposed);
    load_tokens(call, piece, call->k, call->k_row, piece->key_start, piece->keys, wide, rows);
    transpose_all(rows, wide, pitch, keys_transposed);
    const unit *key_lines = along_tokens(half, rows, wide, width, pitch, pairs, &key_row);
    memset(k_sums, 0, 2 * wide * width * sizeof(float));

    for (int64_t first = 0, end; first < piece->length; first = end) {
        end = strip_end(piece, first);
        int64_t count = end - first, padded = round_up(count, ROWS);
        int64_t seen = keys_seen(piece, end - 1), keys = round_up(seen, LANES);
        int64_t at = piece->head * call->tokens + piece->start + first;
        load_tokens(call, piece, call->q, call->q_row, piece->start + first, count, padded, queries);
        load_tokens(call, piece, call->grad, call->grad_row, piece->start + first, count, padded, grads);
        score(half, queries, padded, pitch, units, keys_transposed, wide, keys, call->scale, scores);
        score(half, grads, padded, pitch, units, values_transposed, wide, keys, 1.0f, slopes);
        for (int64_t r = 0; r < count; r++)
            softmax_row_backward(half, scores + r * wide, slopes + r * wide, keys_seen(piece, first + r), keys, call->tops[at + r],
                        1.0f / call->sums[at + r], call->dropped, factor, mix(piece->seed ^ (uint64_t)(first + r)));
        memset(scores + count * wide, 0, (padded - count) * wide * sizeof(float));
        memset(slopes + count * wide, 0, (padded - count) * wide * sizeof(float));

        const unit *weights = along_queries(half, scores, padded, keys, wide, narrow);
        const unit *lines = along_tokens(half, grads, padded, width, pitch, strip_pairs, &row);
        add_products(half, weights, wide, keys, count, lines, row, width, v_sums);
        weights = along_queries(half, slopes, padded, keys, wide, narrow);
        lines = along_tokens(half, queries, padded, width, pitch, strip_pairs, &row);
        add_products(half, weights, wide, keys, count, lines, row, width, k_sums);
        weighted_sum(half, call, piece, first, count, (const unit *)slopes, seen, key_lines, key_row, factors, call->q_grad,
                     call->q_grad_row);
    }
    save_sums(half, call, piece, k_sums, call->scale, call->k_grad, call->k_grad_row);
    save_sums(half, call, piece, v_sums, factor, call->v_grad, call->v_grad_row);
}

/* ---- all documents and heads, on several threads ----------------------------------------------------------------- */

typedef struct {
    const Call *call;
    unit *scratch; /* `units` of it per thread */
    int64_t units;
} Job;

static void run_piece(const void *context, int64_t number, int64_t worker) {
    const Job *job = context;
    const Call *call = job->call;
    unit *scratch = job->scratch + worker * job->units;
    const int64_t *document = call->documents + 5 * (number / call->heads), head = number % call->heads;
    uint64_t seed = mix(mix(mix(call->seed) ^ (uint64_t)document[0]) ^ (uint64_t)head);
    int64_t padded = round_up(document[4], LANES);
    const int64_t *places = call->places ? call->places + document[0] : NULL;
    Piece piece = {document[0], document[1], document[2], document[3], document[4], padded, head, seed, places};
    if (call->grad == NULL) {
        call->half ? forward(1, call, &piece, scratch) : forward(0, call, &piece, scratch);
    } else {
        call->half ? backward(1, call, &piece, scratch) : backward(0, call, &piece, scratch);
    }
}

static int64_t scratch_units(const Call *call) {
    int64_t longest = 0, pitch = round_up(call->width, LANES);
    for (int64_t i = 0; i < call->number; i++)
        longest = call->documents[5 * i + 4] > longest ? call->documents[5 * i + 4] : longest;
    int64_t wide = round_up(longest, LANES);
    return 6 * wide * pitch + 3 * STRIP * wide + 3 * STRIP * pitch; /* for the backward pass in fp32, which needs most */
}

/* Returns 1 if there is no memory. */
int attend_documents(const Call *call) {
    int64_t items = call->number * call->heads, threads = smaller(smaller(call->threads, MAX_THREADS), items);
    int64_t units = scratch_units(call);
    unit *scratch = threads > 0 ? aligned_alloc(64, units * threads * sizeof(unit)) : NULL;
    if (scratch == NULL) return threads > 0;
    Job job = {call, scratch, units};
    share_work(run_piece, &job, items, threads);
    free(scratch);
    return 0;
}
