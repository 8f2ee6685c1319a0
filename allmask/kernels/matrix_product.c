/* Matrix products of training: of a linear layer, and of its two gradients.

       c[rows][columns] = Σ over depth of a · b (+ bias[columns])

   The first factor is stored as a[rows][depth] or, `a_across`, as a[depth][rows]; the second as b[depth][columns] or,
   `b_across`, as b[columns][depth]. Factors are fp32, or bf16 (`half`), where `exact` says that b is fp32 all the same: it is
   rounded on the way. The result is fp32, or bf16 (`low`). All sums are fp32. Rows and columns of weights are multiples of
   32; the number of tokens is any. With an `activation` f the result is f(…), and its slope f'(…) is saved beside it; with a
   slope alone the result is multiplied by that, as the gradient of such a result is.

   As in packed_attention.c, the unit of a product is 32 bits: one fp32 number, or two bf16 numbers adjacent along the depth.
   The second factor is copied to strips of SIDE columns, in which the units of one step lie side by side; so is a first
   factor that is across, to panels of ROWS. Rows of another one are copied, some at a time, if they would share a set of the
   first cache. Then ROWS rows by SIDE columns of sums stay in registers. A result does not depend on the number of threads,
   and that of a row of a not on the other rows. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "activation.h"
#include "lanes.h"
#include "threads.h"
#include "transpose.h"

#ifdef __AVX512F__
#define ROWS 12 /* 12 × 2 registers of sums, of 32 */
#define VECTORS 2
#else
#define ROWS 6 /* 6 × 2 registers of sums, of 16 */
#define VECTORS 1
#endif
#define ALL_ROWS _Pragma("GCC unroll 16")
#define SIDE (VECTORS * LANES)
#define DEPTH 384        /* units at a time, if the depth is the number of tokens */
#define DEEP ((128 << 10) / (SIDE * 4)) /* the same, if it is not: so that a strip of them stays in the second cache */
#define NEAR (256 << 10) /* bytes of the first factor that are multiplied by all strips, one after another */
#define FEW (128 << 10)  /* the same, if they are copied to panels; these and the strips then stay in the second cache */
#define PAGE 4096        /* bytes; what is so far apart shares a set of the first cache */
#define PANEL (DEPTH * ROWS + LANES) /* units from one to the next: LANES of them are saved at a time */

typedef struct {
    const char *a, *b;
    const float *bias; /* NULL: none */
    char *c;
    char *slope; /* of the activation, of the shape and kind of c; NULL: none */
    float *sums; /* the sums of a over its depth, if it is across; NULL: not wanted */
    int64_t rows, columns, depth, a_row, b_row, c_row; /* …_row: the stride of rows in memory, in numbers */
    int64_t a_across, b_across, half, exact, low, activation, threads; /* activation: 0 for none, 1 for the first */
} Call; /* as packed by matrix_product.py */

typedef struct {
    Call call;
    unit *strips, *panels; /* copies of b, and of a: those of one item of work for each thread */
    float *sums;           /* across: of a, [panels of all items][LANES]; else of c, [each][wide] for each thread, if not all
                              of the depth is multiplied at a time */
    int64_t units;         /* of the depth, as many as are copied at a time: all of them, if a is not across */
    int64_t start;         /* across: the first token of these */
    int64_t each;          /* rows of an item of work */
    int64_t wide;          /* columns of all strips */
    int64_t room;          /* units of `panels` for each thread */
} Job;

static int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- numbers and units ------------------------------------------------------------------------------------------- */

#ifdef __AVX512BF16__
INLINE ints two_rows(__m256i even, __m256i odd) { /* as units, the first row in the low halves */
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}
INLINE __m256i sixteen(int exact, const char *from, int64_t at) {
    if (exact) return (__m256i)_mm512_cvtneps_pbh(load((const float *)from + at));
    return _mm256_loadu_si256((const __m256i *)((const uint16_t *)from + at));
}
INLINE ints units_of_rows(int exact, const char *even, const char *odd, int64_t at) {
    return two_rows(sixteen(exact, even, at), odd ? sixteen(exact, odd, at) : _mm256_setzero_si256());
}
INLINE ints units_of_row(int exact, const char *from, int64_t at) { /* 32 numbers of one row */
    if (!exact) return load_ints((const uint16_t *)from + at);
    return _mm512_inserti64x4(_mm512_castsi256_si512(sixteen(1, from, at)), sixteen(1, from, at + LANES), 1);
}
INLINE void multiply_add_pairs(vec *sum, ints a, ints b) {
    /* _mm512_dpbf16_ps; gcc 12 copies sums around the intrinsic */
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(*sum) : "v"(b), "v"(a));
}
INLINE vec sum_of_pairs(ints x) { /* of the two numbers of each unit */
    vec odd = as_floats(_mm512_and_si512(x, all_ints((int32_t)0xffff0000u)));
    return add(as_floats(_mm512_slli_epi32(x, 16)), odd);
}
#else /* such a library is never called with bf16 */
INLINE ints units_of_rows(int exact, const char *even, const char *odd, int64_t at) { return no_ints(); }
INLINE ints units_of_row(int exact, const char *from, int64_t at) { return no_ints(); }
INLINE void multiply_add_pairs(vec *sum, ints a, ints b) {}
INLINE vec sum_of_pairs(ints x) { return zeros(); }
#endif

INLINE const char *row_of(int half, const char *base, int64_t stride, int64_t row) {
    return base + ((row * stride) << (half ? 1 : 2));
}

/* Sixteen columns of unit number `at` of a matrix whose depth goes down the rows; zeros from row `end` on */
INLINE ints down(int half, int exact, const char *base, int64_t stride, int64_t at, int64_t end, int64_t column) {
    int narrow = half && !exact;
    int64_t row = at << half;
    if (row >= end) return no_ints();
    if (!half) return load_ints((const float *)row_of(0, base, stride, row) + column);
    const char *odd = row + 1 < end ? row_of(narrow, base, stride, row + 1) : NULL;
    return units_of_rows(exact, row_of(narrow, base, stride, row), odd, column);
}

/* Sixteen units, from number `at` on, of a row that is the depth */
INLINE ints along(int half, int exact, const char *base, int64_t stride, int64_t row, int64_t at) {
    if (!half) return load_ints((const float *)row_of(0, base, stride, row) + at);
    return units_of_row(exact, row_of(!exact, base, stride, row), 2 * at);
}

/* ---- copies -------------------------------------------------------------------------------------------------------- */

/* Where unit number `at` of a strip of b is: strips[parts of DEEP units][number][units][SIDE] */
INLINE unit *place_of(const Job *job, int64_t number, int64_t at) {
    int64_t first = at / DEEP * DEEP, units = smaller(job->units - first, DEEP);
    return job->strips + first * job->wide + (number * units + at - first) * SIDE;
}

/* One strip of a b that is across */
INLINE void copy_strip(int half, int exact, const Job *job, int64_t number) {
    const Call *call = &job->call;
    for (int v = 0; v < VECTORS; v++) {
        int64_t column = number * SIDE + v * LANES;
        int64_t last = column < call->columns ? column : call->columns - LANES; /* beyond the end: copied, never used */
        for (int64_t at = 0; at < job->units; at += LANES) {
            unit *here = place_of(job, number, at) + v * LANES;
            ints block[LANES];
            for (int i = 0; i < LANES; i++) {
                const char *ahead = row_of(half && !exact, call->b, call->b_row, last + LANES + i) + (at << (exact ? 3 : 2));
                __builtin_prefetch(ahead, 0, 2);
                if (exact) __builtin_prefetch(ahead + LANES * sizeof(float), 0, 2);
                block[i] = along(half, exact, call->b, call->b_row, last + i, at);
            }
            transpose(block);
            for (int i = 0; i < LANES; i++) save_ints(here + i * SIDE, block[i]);
        }
    }
}

/* LANES units of all strips of another b, row after row as it lies in memory */
INLINE void copy_units(int half, int exact, const Job *job, int64_t number) {
    const Call *call = &job->call;
    for (int64_t at = number * LANES; at < smaller((number + 1) * LANES, job->units); at++) {
        unit *to = place_of(job, 0, at);
        int64_t apart = smaller(job->units - at / DEEP * DEEP, DEEP) * SIDE;
        for (int64_t column = 0; column < job->wide; column += SIDE, to += apart)
            UNROLLED for (int v = 0; v < VECTORS; v++) {
                int64_t last = smaller(column + v * LANES, call->columns - LANES);
                save_ints(to + v * LANES, down(half, exact, call->b, call->b_row, (job->start >> half) + at, call->depth, last));
            }
    }
}

/* Sixteen columns of a that is across, fewer at its end */
INLINE ints columns_of(int half, const Call *call, int64_t at, int64_t column) {
    if (column + LANES <= call->rows) return down(half, 0, call->a, call->a_row, at, call->depth, column);
    int size = half ? 2 : 4;
    char rows[2 * LANES * sizeof(float)] = {0};
    for (int i = 0; i <= half && (at << half) + i < call->depth; i++)
        memcpy(rows + i * LANES * size, row_of(half, call->a, call->a_row, (at << half) + i) + column * size,
               (call->rows - column) * size);
    return down(half, 0, rows, LANES, 0, 2, 0);
}

/* LANES units of these columns, from number `at` on, and their sums. What is saved beyond ROWS of them is overwritten by the
   next unit. `whole`: all of them exist, so that nothing has to be asked on the way. */
INLINE vec copy_block(int half, int whole, const Call *call, int64_t at, int64_t column, unit *to) {
    const char *from = row_of(half, call->a, call->a_row, at << half) + (column << (half ? 1 : 2));
    int64_t apart = call->a_row << (half ? 1 : 2);
    vec total = zeros();
    for (int i = 0; i < LANES; i++, from += apart << half) {
        ints some = !whole ? columns_of(half, call, at + i, column) : half ? units_of_rows(0, from, from + apart, 0) : load_ints(from);
        total = add(total, half ? sum_of_pairs(some) : as_floats(some));
        save_ints(to + i * ROWS, some);
    }
    return total;
}

/* Columns `row` to `end_row` of a that is across: panels[number][units][ROWS], and their sums */
INLINE void copy_panels(int half, const Job *job, int64_t row, int64_t end_row, unit *panels) {
    const Call *call = &job->call;
    int64_t first = row / ROWS, end = (end_row + ROWS - 1) / ROWS;
    for (int64_t at = 0; at < job->units; at += LANES)
        for (int64_t panel = first; panel < end; panel++) {
            unit *to = panels + (panel - first) * PANEL + at * ROWS;
            int64_t unit_at = (job->start >> half) + at, column = panel * ROWS;
            int whole = (unit_at + LANES) << half <= call->depth && column + LANES <= call->rows;
            vec total = whole ? copy_block(half, 1, call, unit_at, column, to) : copy_block(half, 0, call, unit_at, column, to);
            float *sums = job->sums + panel * LANES;
            save(sums, add(load(sums), total));
        }
}

static void copy_item(const void *context, int64_t item, int64_t worker) {
    const Job *job = context;
    int half = job->call.half, exact = job->call.exact;
    if (job->call.b_across) half ? exact ? copy_strip(1, 1, job, item) : copy_strip(1, 0, job, item) : copy_strip(0, 0, job, item);
    else half ? exact ? copy_units(1, 1, job, item) : copy_units(1, 0, job, item) : copy_units(0, 0, job, item);
}

/* `units` of each row from `row` to `end`, from number `start` on, to panels[each][units + LANES]; zeros after the last one */
static void copy_rows(const Job *job, int64_t row, int64_t end, int64_t start, int64_t units, unit *to) {
    const Call *call = &job->call;
    int64_t after = row + round_up(end - row, ROWS);
    for (; row < after; row++, to += units + LANES) {
        const unit *from = (const unit *)row_of(call->half, call->a, call->a_row, row) + start;
        if (row < end) memcpy(to, from, units * sizeof(unit));
        else memset(to, 0, units * sizeof(unit));
    }
}

/* ---- products ------------------------------------------------------------------------------------------------------ */

/* sums[ROWS][SIDE] of `units` steps, added to those that are there if there are `more` */
INLINE void multiply(int half, const unit *a, int64_t row, int64_t step, const unit *b, int64_t units, int more,
                     vec to[ROWS][VECTORS]) {
    vec sum[ROWS][VECTORS];
    ALL_ROWS for (int r = 0; r < ROWS; r++) UNROLLED for (int v = 0; v < VECTORS; v++) sum[r][v] = zeros();
    if (more) ALL_ROWS for (int r = 0; r < ROWS; r++) UNROLLED for (int v = 0; v < VECTORS; v++) sum[r][v] = to[r][v];
    for (int64_t d = 0; d < units; d++, b += SIDE) {
        ints across[VECTORS];
        UNROLLED for (int v = 0; v < VECTORS; v++) across[v] = load_ints(b + v * LANES);
        ALL_ROWS for (int r = 0; r < ROWS; r++) {
            const unit *one = a + r * row + d * step;
            if (half) {
                ints all_same = all_ints((int32_t)*one);
                UNROLLED for (int v = 0; v < VECTORS; v++) multiply_add_pairs(&sum[r][v], all_same, across[v]);
            } else {
                vec all_same = all(*(const real *)one);
                UNROLLED for (int v = 0; v < VECTORS; v++) sum[r][v] = mul_add(all_same, as_floats(across[v]), sum[r][v]);
            }
        }
    }
    ALL_ROWS for (int r = 0; r < ROWS; r++) UNROLLED for (int v = 0; v < VECTORS; v++) to[r][v] = sum[r][v];
}

/* Not inline: with anything else in registers, gcc 12 keeps some of the sums in memory */
typedef void Multiply(const unit *a, int64_t row, const unit *b, int64_t units, int more, vec to[ROWS][VECTORS]);
#define MULTIPLY(name, half, row, step)                                                                                  \
    static __attribute__((noinline)) void name(const unit *a, int64_t a_row, const unit *b, int64_t units, int more,     \
                                               vec to[ROWS][VECTORS]) {                                                  \
        multiply(half, a, row, step, b, units, more, to);                                                                \
    }
MULTIPLY(rows_fp32, 0, a_row, 1)
MULTIPLY(rows_bf16, 1, a_row, 1)
MULTIPLY(panel_fp32, 0, 1, ROWS)
MULTIPLY(panel_bf16, 1, 1, ROWS)

/* What happens to sums: a bias is added, or they to those of the tokens before; then the activation, or the slope of one */
typedef enum { BIAS, ADD, ACTIVATE, SLOPE } Ending;

INLINE vec load_number(int low, const char *from, int64_t at) {
    return low ? load_bf16((const uint16_t *)from + at) : load((const float *)from + at);
}
INLINE void save_number(int low, char *to, int64_t at, vec x) {
    if (low) save_all_bf16((uint16_t *)to + at, x);
    else save((float *)to + at, x);
}

/* Save the sums of `count` rows from `row` on, and of one strip. The compiler knows `low` and `ending`, and `kind` if it is GELU,
   so that nothing is asked for each vector. */
INLINE void finish(int low, Ending ending, int kind, const Call *call, vec sum[ROWS][VECTORS], int64_t row, int64_t count,
                   int64_t strip) {
    int64_t column = strip * SIDE, vectors = smaller(VECTORS, (call->columns - column) / LANES), apart = call->c_row;
    const float *shift = ending != ADD && call->bias ? call->bias + column : NULL;
    char *c = call->c, *slope = call->slope;
    vec bias[VECTORS];
    for (int v = 0; v < vectors; v++) bias[v] = shift ? load(shift + v * LANES) : zeros();
    for (int64_t r = 0, place = row * apart + column; r < count; r++, place += apart)
        for (int64_t v = 0, at_column = place; v < vectors; v++, at_column += LANES) {
            vec x = add(sum[r][v], ending == ADD ? load_number(low, c, at_column) : bias[v]);
            if (ending == SLOPE) x = mul(x, load_number(low, slope, at_column));
            if (ending == ACTIVATE) {
                Point found = low && kind == GELU ? gelu_for_bf16(x) : at(kind, x);
                save_number(low, slope, at_column, found.slope);
                x = found.value;
            }
            save_number(low, c, at_column, x);
        }
}

INLINE void finish_as(int low, const Job *job, vec sum[ROWS][VECTORS], int64_t row, int64_t count, int64_t strip) {
    const Call *call = &job->call;
    if (job->start) finish(low, ADD, 0, call, sum, row, count, strip);
    else if (!call->slope) finish(low, BIAS, 0, call, sum, row, count, strip);
    else if (!call->activation) finish(low, SLOPE, 0, call, sum, row, count, strip);
    else if (call->activation == 1 + GELU) finish(low, ACTIVATE, GELU, call, sum, row, count, strip);
    else finish(low, ACTIVATE, call->activation - 1, call, sum, row, count, strip);
}

/* While sums are computed, fetch the places where they are saved */
INLINE void prefetch_results(const Call *call, int64_t row, int64_t rows, int64_t strip) {
    int64_t size = call->low ? 2 : 4;
    for (int64_t r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            int64_t place = ((row + r) * call->c_row + strip * SIDE + v * LANES) * size;
            __builtin_prefetch(call->c + place, 1);
            if (call->slope) __builtin_prefetch(call->slope + place, 1);
        }
}

INLINE void finish_tile(const Job *job, vec sum[ROWS][VECTORS], int64_t row, int64_t rows, int64_t strip) {
    job->call.low ? finish_as(1, job, sum, row, rows, strip) : finish_as(0, job, sum, row, rows, strip);
}

/* Rows of a that is across */
INLINE void multiply_panels(int half, const Job *job, int64_t first, int64_t end, unit *panels) {
    copy_panels(half, job, first, end, panels);
    for (int64_t strip = 0; strip * SIDE < job->call.columns; strip++)
        for (int64_t row = first; row < end; row += ROWS) {
            vec sum[ROWS][VECTORS];
            int64_t rows = smaller(end - row, ROWS);
            prefetch_results(&job->call, row, rows, strip);
            Multiply *by = half ? panel_bf16 : panel_fp32;
            by(panels + (row - first) / ROWS * PANEL, 0, place_of(job, strip, 0), job->units, 0, sum);
            finish_tile(job, sum, row, rows, strip);
        }
}

/* Rows of another a, DEEP units of its depth at a time; until the last of these, sums are kept in fp32. Rows are copied if
   they are whole pages apart, and where fewer than ROWS are left. */
INLINE void multiply_rows(int half, const Job *job, int64_t first, int64_t end, unit *panels, float *kept) {
    const Call *call = &job->call;
    int64_t a_row = call->a_row >> half, copied = a_row * sizeof(unit) % PAGE ? end - (end - first) % ROWS : first;
    Multiply *by = half ? rows_bf16 : rows_fp32;
    for (int64_t start = 0; start < job->units; start += DEEP) {
        int64_t units = smaller(job->units - start, DEEP), apart = units + LANES;
        int last = start + units == job->units;
        copy_rows(job, copied, end, start, units, panels);
        for (int64_t strip = 0; strip * SIDE < call->columns; strip++)
            for (int64_t row = first; row < end; row += ROWS) {
                vec sum[ROWS][VECTORS];
                const unit *b = place_of(job, strip, start);
                int64_t rows = smaller(end - row, ROWS);
                float *these = kept + (row - first) * job->wide + strip * ROWS * SIDE;
                if (last) prefetch_results(call, row, rows, strip);
                if (start) memcpy(sum, these, sizeof sum);
                if (row < copied) by((const unit *)call->a + row * a_row + start, a_row, b, units, start > 0, sum);
                else by(panels + (row - copied) * apart, apart, b, units, start > 0, sum);
                if (last) finish_tile(job, sum, row, rows, strip);
                else memcpy(these, sum, sizeof sum);
            }
    }
}

INLINE void multiply_item(int half, const Job *job, int64_t item, int64_t worker) {
    int64_t first = item * job->each, end = smaller(first + job->each, job->call.rows);
    unit *panels = job->panels + worker * job->room;
    if (job->call.a_across) multiply_panels(half, job, first, end, panels);
    else multiply_rows(half, job, first, end, panels, job->sums + worker * job->each * job->wide);
}

static void product_item(const void *context, int64_t item, int64_t worker) {
    const Job *job = context;
    job->call.half ? multiply_item(1, job, item, worker) : multiply_item(0, job, item, worker);
}

static void run(Work *work, const Job *job, int64_t items) {
    share_work(work, job, items, smaller(smaller(job->call.threads, MAX_THREADS), items));
}

static void copy_and_multiply(const Job *job) {
    run(copy_item, job, job->call.b_across ? job->wide / SIDE : (job->units + LANES - 1) / LANES);
    run(product_item, job, (job->call.rows + job->each - 1) / job->each);
}

/* Returns 1 if there is no memory. */
int matrix_product(const Call *call) {
    int across = call->a_across, half = call->half;
    int64_t units = across ? DEPTH : call->depth >> half, panels = (call->rows + ROWS - 1) / ROWS;
    int64_t each = round_up((across ? FEW : NEAR) / (smaller(units, DEEP) * (int64_t)sizeof(unit)) + 1, ROWS);
    int64_t threads = smaller(call->threads, MAX_THREADS), wide = round_up(call->columns, SIDE);
    int64_t room = across ? each / ROWS * PANEL : each * (smaller(units, DEEP) + LANES);
    int64_t for_sums = across ? panels * LANES : units > DEEP ? threads * each * wide : 0;
    unit *scratch = aligned_alloc(64, round_up((wide * units + threads * room + for_sums) * sizeof(unit), 64));
    if (!scratch) return 1;
    Job job = {.call = *call, .strips = scratch, .panels = scratch + wide * units, .units = units, .each = each, .wide = wide,
               .room = room};
    job.sums = (float *)job.panels + threads * room;
    if (!across) copy_and_multiply(&job);
    if (across) memset(job.sums, 0, for_sums * sizeof(float));
    for (job.start = 0; across && job.start < call->depth; job.start += DEPTH << half) { /* DEPTH units of tokens at a time */
        int64_t left = (call->depth - job.start + half) >> half;
        job.units = left < DEPTH ? round_up(left, LANES) : DEPTH;
        copy_and_multiply(&job);
    }
    for (int64_t i = 0; call->sums && i < call->rows; i++) call->sums[i] = job.sums[i / ROWS * LANES + i % ROWS];
    free(scratch);
    return 0;
}
