/* Linear layers of many rows in int8, with VNNI, AVX2 or NEON, or in fp32. compiled_layers.py computes the same in torch.

   Rows are processed in chunks, so that intermediate results stay in the cache. Hidden states are fp32; the inputs and
   outputs of attention are fp32 or bf16. */

#include "attention_call.h"
#include "products.h"
#include "threads.h"

#define CHUNK 48 /* rows at a time, a multiple of ROWS: weights are read once for each, mostly from the third cache */
#define FLOAT_CHUNK 144 /* the same for fp32 weights, which have four times the bytes */

typedef struct { Norm norm; double epsilon; int64_t pre; } Residual; /* the norm comes before (pre) or after the step */
typedef struct { Linear expand, contract; int64_t activation; } FeedForward; /* 0 none, 1 relu, 2 gelu, 3 gelu by tanh */

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- weights -------------------------------------------------------------------------------------------------------- */

/* The largest sum of the positive, or of the negative, of the four weights that AVX2 adds up in 16 bits; `limited` in int8.py
   adds in the same order */
static float largest_four(const float *row, int64_t n) {
    float most[4] = {0, 0, 0, 0};
    for (int64_t i = 0; i < n; i += 8)
        UNROLLED for (int j = 0; j < 4; j++) {
            const float *x = row + i + 2 * (j / 2), sign = j % 2 ? -1.f : 1.f;
            float four[4] = {sign * x[0], sign * x[1], sign * x[4], sign * x[5]};
            UNROLLED for (int k = 0; k < 4; k++) four[k] = four[k] > 0 ? four[k] : 0;
            float sum = four[0] + four[1] + four[2] + four[3];
            most[j] = sum > most[j] ? sum : most[j];
        }
    return fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
}

/* Quantize and pack a weight (outputs, inputs), multiplied by `smoothing` (inputs,) unless that is NULL, as `pack` in int8.py
   does. `packed`, `scale` and `offset` have a multiple of OUTPUTS outputs; `offset` is NULL unless weights are LIMITED.
   Returns 0 if there is no memory, or if a weight is not finite. */
int pack_weight(int64_t outputs, int64_t inputs, const float *weight, const float *smoothing, uint8_t *packed,
                float *scale, int32_t *offset) {
    float *row = malloc(inputs * sizeof(float));
    if (!row) return 0;
    for (int64_t r = 0; r < (outputs + OUTPUTS - 1) / OUTPUTS * OUTPUTS; r++) {
        const int real = r < outputs;
        vec most = zeros(), finite = all(3.4028235e38f);
        int bad = 0;
        for (int64_t i = 0; i < inputs; i += 16) {
            vec v = real ? load(weight + r * inputs + i) : zeros();
            if (smoothing) v = mul(v, load(smoothing + i));
            bad |= any(above(size_of(v), finite)) || any(is_nan(v));
            most = larger_of(most, size_of(v));
            save(row + i, v);
        }
        if (bad) return free(row), 0;
        scale[r] = FORMAT == LIMITED ? largest_four(row, inputs) / 126.f : largest_of(most) / 127.f;
        if (!isfinite(scale[r])) return free(row), 0;
        vec unit = all(scale[r] > 1e-30f ? scale[r] : 1e-30f);
        ints sum = no_ints();
        uint8_t *to = packed + r / OUTPUTS * OUTPUTS * inputs + r % OUTPUTS * 4;
        for (int64_t i = 0; i < inputs; i += 16) {
            int32_t whole[16];
            uint8_t bytes[16];
            ints v = to_ints(divide(load(row + i), unit));
            sum = add_ints(sum, v);
            save_ints(whole, v);
            for (int k = 0; k < 16; k++) bytes[k] = (uint8_t)whole[k] ^ (FORMAT == UNSIGNED ? 128 : 0);
            for (int k = 0; k < 16; k += 4, to += 4 * OUTPUTS) memcpy(to, bytes + k, 4);
        }
        if (offset) offset[r] = -128 * sum_of_ints(sum);
    }
    free(row);
    return 1;
}

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

static int64_t chunk_of(const Linear *f) { return f->kind == INT8 ? CHUNK : FLOAT_CHUNK; }

/* ---- the parts of a layer; each returns 0 if there is no memory ---------------------------------------------------- */

/* The norm of a residual step, of rows of `width` numbers */
int normalize_rows(const Residual *residual, int64_t rows, int64_t width, const float *x, float *y) {
    for (int64_t r = 0; r < rows; r++) normalize(x + r * width, y + r * width, residual->norm, width, residual->epsilon);
    return 1;
}

/* One row: y = x + step, then the norm if it comes after */
static void add_residual(const Residual *residual, const float *x, const float *step, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] + step[i];
    if (residual->norm.weight && !residual->pre) normalize(y, y, residual->norm, n, residual->epsilon);
}

/* y (rows, out) = f(h), h (rows, in), both fp32 or bf16; with a `residual` y = x + f(h) in fp32, the end of the attention
   step, where h is the output of attention. With `before`, its norm is applied to h first, if it comes before the step. */
static int linear_rows(const Linear *f, const Residual *before, const Residual *residual, int64_t rows, const void *h,
                       int64_t h_kind, const float *x, void *y, int64_t y_kind) {
    int64_t chunk = chunk_of(f);
    float *in = aligned_alloc(64, chunk * (f->in + f->out) * sizeof(float) + int8_size(chunk, f->in));
    if (!in) return 0;
    float *step = in + chunk * f->in;
    Int8 *buffer = (Int8 *)(step + chunk * f->out);
    for (int64_t r = 0; r < rows; r += chunk) {
        int64_t count = smaller(chunk, rows - r);
        float *to = residual || y_kind == BF16 ? step : (float *)y + r * f->out;
        const float *from = as_fp32(h, h_kind, r * f->in, count * f->in, in);
        for (int64_t i = 0; before && before->pre && i < count; i++)
            normalize(from + i * f->in, in + i * f->in, before->norm, f->in, before->epsilon);
        linear(f, before && before->pre ? in : from, count, to, buffer);
        if (y_kind == BF16) to_bf16(to, count * f->out, (uint16_t *)y + r * f->out);
        for (int64_t i = 0; residual && i < count; i++)
            add_residual(residual, x + (r + i) * f->out, step + i * f->out, f->out, (float *)y + (r + i) * f->out);
    }
    free(in);
    return 1;
}

int apply_linear(const Linear *f, const Residual *residual, int64_t rows, const void *h, int64_t h_kind, const float *x,
                 void *y, int64_t y_kind) {
    return linear_rows(f, NULL, residual, rows, h, h_kind, x, y, y_kind);
}

/* step (count, width) = contract(activate(expand(h))); `inner` (count, ffn_width) and `buffer` are scratch */
static void feed_chunk(const FeedForward *part, int64_t count, const float *h, float *step, float *inner, Int8 *buffer) {
    const Linear *contract = &part->contract;
    linear(&part->expand, h, count, inner, buffer);
    if (contract->kind == FP32) {
        activate(inner, count * contract->in, part->activation);
        linear(contract, inner, count, step, buffer);
        return;
    }
    Inputs in = int8_inputs(contract, inner, count, buffer);
    for (int64_t r = 0; r < count; r++) {
        float top = activate_row(part->activation, inner + r * contract->in, contract->in);
        quantize(rows_from(in, r, contract->in), NULL, contract->in, top);
    }
    blocks(INT8, contract, in, count, step);
}

/* y = x + feed-forward of x: the second step of a layer; without a `residual` the feed-forward alone */
int feed_forward(const FeedForward *part, const Residual *residual, int64_t rows, const float *x, float *y) {
    int64_t width = part->expand.in, ffn_width = part->expand.out, chunk = chunk_of(&part->expand);
    int64_t numbers = chunk * (2 * width + ffn_width), pre = residual && residual->pre;
    float *h = aligned_alloc(64, numbers * sizeof(float) + int8_size(chunk, larger(width, ffn_width)));
    if (!h) return 0;
    float *step = h + chunk * width, *inner = step + chunk * width;
    for (int64_t r = 0; r < rows; r += chunk) {
        int64_t count = smaller(chunk, rows - r);
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

/* ---- all layers of an encoder, for packed documents -------------------------------------------------------------- */

#define GROUP 512 /* tokens that pass through all layers together, per thread: their hidden states stay in the cache */

typedef struct { Linear qkv, output; FeedForward feed; Residual attention_step, feed_step; } EncoderLayer;
typedef struct {
    const EncoderLayer *layers;
    int (*attend)(const Call *);                      /* of packed_attention.c; it returns 0 */
    int64_t depth, heads, head_width, kind, threads; /* kind: of queries, keys and values, BF16 or FP32 */
} Encoder;
typedef struct {           /* what a writer needs of its prompts, which are the documents */
    uint16_t *keys, *values; /* (depth, texts, heads, D, padded) and (depth, texts, heads, padded, D), in bf16 */
    float *last;             /* (texts, width): the last hidden state of each document */
    const int64_t *text;     /* (texts,): which text each document is */
    int64_t texts, padded;
} Prompts;

typedef enum { PROJECT, JOIN, FEED } Part;
typedef struct {
    const Encoder *encoder;
    const EncoderLayer *layer;
    Part part;
    int64_t rows, each; /* `each`: rows of an item */
    float *x;
    char *qkv, *read; /* queries, keys and values (rows, 3, heads · D); the output of attention */
    atomic_int failed;
} Stage;

static void run_stage(const void *context, int64_t item, int64_t worker) {
    Stage *s = (Stage *)context;
    const EncoderLayer *layer = s->layer;
    int64_t first = item * s->each, rows = smaller(s->each, s->rows - first), kind = s->encoder->kind, ok;
    int64_t size = kind == BF16 ? 2 : 4;
    float *x = s->x + first * layer->qkv.in;
    (void)worker;
    if (rows <= 0) return;
    if (s->part == PROJECT)
        ok = linear_rows(&layer->qkv, &layer->attention_step, NULL, rows, x, FP32, NULL,
                         s->qkv + first * layer->qkv.out * size, kind);
    else if (s->part == JOIN)
        ok = apply_linear(&layer->output, &layer->attention_step, rows, s->read + first * layer->output.in * size, kind, x,
                          x, FP32);
    else ok = feed_forward(&layer->feed, &layer->feed_step, rows, x, x);
    if (!ok) s->failed = 1;
}

static int run_part(Stage *s, Part part, int64_t rows, float *x) {
    int64_t items = smaller(s->encoder->threads, (rows + CHUNK - 1) / CHUNK);
    s->part = part, s->rows = rows, s->x = x;
    s->each = (rows + items * CHUNK - 1) / (items * CHUNK) * CHUNK;
    share_work(run_stage, s, items, items);
    return !s->failed;
}

/* Store the keys and values of a text, which begin at token `start` */
static void save_text(const Encoder *e, const Prompts *p, int64_t layer, int64_t text, const char *qkv, int64_t start,
                      int64_t length) {
    int64_t d = e->head_width, inner = e->heads * d;
    float scratch[d];
    uint16_t rows[16][d];
    for (int64_t h = 0; h < e->heads; h++) {
        uint16_t *keys = p->keys + ((layer * p->texts + text) * e->heads + h) * d * p->padded;
        uint16_t *values = p->values + ((layer * p->texts + text) * e->heads + h) * d * p->padded;
        for (int64_t first = 0, count; first < length; first += count) { /* sixteen tokens are transposed at a time */
            count = smaller(16, length - first);
            for (int64_t t = 0; t < count; t++) {
                int64_t at = (start + first + t) * 3 * inner + inner + h * d;
                to_bf16(as_fp32(qkv, e->kind, at, d, scratch), d, rows[t]);
                to_bf16(as_fp32(qkv, e->kind, at + inner, d, scratch), d, values + (first + t) * d);
            }
            for (int64_t i = 0; i < d; i++)
                for (int64_t t = 0; t < count; t++) keys[i * p->padded + first + t] = rows[t][i];
        }
    }
}

typedef struct { char *qkv, *read; float *statistics; int64_t *documents; } Scratch;

/* Compute the layers for some documents, whose first token is x, in place; `first` is the number of the first document */
static int run_layers(const Encoder *e, const int64_t *documents, int64_t number, int64_t tokens, float *x,
                      const Prompts *prompts, int64_t first, Scratch s) {
    int64_t width = e->layers->qkv.in, d = e->head_width, inner = e->heads * d, size = e->kind == BF16 ? 2 : 4;
    Stage stage = {.encoder = e, .qkv = s.qkv, .read = s.read};
    Call call = {.q = s.qkv, .k = s.qkv + inner * size, .v = s.qkv + 2 * inner * size, .out = s.read, .tops = s.statistics,
                 .sums = s.statistics + e->heads * tokens, .documents = s.documents, .number = number, .tokens = tokens,
                 .heads = e->heads, .width = d, .q_row = 3 * inner, .k_row = 3 * inner, .v_row = 3 * inner,
                 .half = e->kind == BF16, .threads = e->threads, .scale = 1.f / sqrtf(d)};
    for (int64_t i = 0; i < 5 * number; i++)
        s.documents[i] = documents[i] - (i % 5 == 0 || i % 5 == 3 ? documents[0] : 0);
    for (int64_t number_of_layer = 0; number_of_layer < e->depth; number_of_layer++) {
        const EncoderLayer *layer = stage.layer = e->layers + number_of_layer;
        if (!run_part(&stage, PROJECT, tokens, x)) return 0;
        for (int64_t i = 0; prompts && i < number; i++)
            save_text(e, prompts, number_of_layer, prompts->text[first + i], s.qkv, s.documents[5 * i], s.documents[5 * i + 1]);
        if (prompts && layer == e->layers + e->depth - 1) { /* of the last layer only the last tokens are needed */
            float *last = prompts->last + first * width;
            for (int64_t i = 0; i < number; i++) {
                int64_t *document = s.documents + 5 * i, end = document[0] + document[1] - 1;
                memcpy(last + i * width, x + end * width, width * sizeof(float));
                memmove(s.qkv + i * 3 * inner * size, s.qkv + end * 3 * inner * size, inner * size); /* queries */
                document[0] = i, document[2] = document[4], document[1] = 1;
            }
            call.tokens = number;
            return !e->attend(&call) && run_part(&stage, JOIN, number, last) &&
                   run_part(&stage, FEED, number, last);
        }
        if (e->attend(&call) || !run_part(&stage, JOIN, tokens, x) || !run_part(&stage, FEED, tokens, x)) return 0;
    }
    return 1;
}

static Scratch allocate(const Encoder *e, int64_t tokens, int64_t number) {
    int64_t inner = e->heads * e->head_width, size = e->kind == BF16 ? 2 : 4;
    return (Scratch){malloc(tokens * 3 * inner * size), malloc(tokens * inner * size),
                     malloc(2 * e->heads * tokens * sizeof(float)), malloc(5 * number * sizeof(int64_t))};
}

static int is_allocated(Scratch s) { return s.qkv && s.read && s.statistics && s.documents; }
static void release(Scratch s) { free(s.qkv), free(s.read), free(s.statistics), free(s.documents); }

typedef struct { int64_t first, end, tokens; } Group; /* documents that pass through all layers together */
typedef struct {
    const Encoder *encoder; /* with one thread: each computes other groups */
    const int64_t *documents;
    const Group *groups;
    float *x;
    const Prompts *prompts;
    Scratch *scratch; /* of each thread */
    atomic_int failed;
} Groups;

/* Divide documents, in their order, into groups of at most `limit` tokens; return how many there are. A longer document is
   a group of its own. */
static int64_t group_by_limit(const int64_t *documents, int64_t number, int64_t limit, Group *groups) {
    int64_t count = 0, tokens = 0;
    for (int64_t i = 0; i < number; i++) {
        int64_t length = documents[5 * i + 1], is_new = i == 0 || tokens + length > limit;
        tokens = is_new ? length : tokens + length;
        if (is_new) groups[count++].first = i;
        groups[count - 1].end = i + 1, groups[count - 1].tokens = tokens;
    }
    return count;
}

static int compare_tokens(const void *a, const void *b) {
    int64_t one = ((const Group *)a)->tokens, other = ((const Group *)b)->tokens;
    return (one < other) - (one > other);
}

/* Divide documents into groups for threads that need not wait for each other after each part of a layer; return how many
   there are, the largest first. Returns 0 if such groups would keep one thread busy for much longer than the others. */
static int64_t group_fairly(const Encoder *e, const int64_t *documents, int64_t number, Group *groups) {
    int64_t longest = 0, total = 0, busy[MAX_THREADS] = {0}, most = 0;
    for (int64_t i = 0; i < number; i++) longest = larger(longest, documents[5 * i + 1]), total += documents[5 * i + 1];
    int64_t wanted = larger(smaller(2 * e->threads, total / CHUNK), total / GROUP), low = longest, high = total;
    if (wanted < e->threads || number < e->threads) return 0;
    while (low < high) { /* the smallest limit with which there are not more groups than wanted */
        int64_t limit = (low + high) / 2;
        if (group_by_limit(documents, number, limit, groups) <= wanted) high = limit;
        else low = limit + 1;
    }
    int64_t count = group_by_limit(documents, number, low, groups);
    qsort(groups, count, sizeof(Group), compare_tokens);
    for (int64_t i = 0; i < count; i++) { /* the thread that is free first takes the next group */
        int64_t free_first = 0;
        for (int64_t t = 1; t < e->threads; t++) free_first = busy[t] < busy[free_first] ? t : free_first;
        most = larger(most, busy[free_first] += groups[i].tokens);
    }
    return 4 * most * e->threads <= 5 * total ? count : 0;
}

static void run_group(const void *context, int64_t item, int64_t worker) {
    Groups *g = (Groups *)context;
    Group one = g->groups[item];
    const int64_t *documents = g->documents + 5 * one.first;
    float *x = g->x + documents[0] * g->encoder->layers->qkv.in;
    if (!run_layers(g->encoder, documents, one.end - one.first, one.tokens, x, g->prompts, one.first, g->scratch[worker]))
        g->failed = 1;
}

/* Compute groups of documents, each on one thread. Returns 0 if there is no memory. */
static int run_groups(const Encoder *e, const int64_t *documents, const Group *groups, int64_t count, float *x,
                      const Prompts *prompts) {
    Encoder alone = *e;
    Scratch scratch[MAX_THREADS];
    Groups all = {&alone, documents, groups, x, prompts, scratch, 0};
    int64_t most = 0, threads = smaller(e->threads, count);
    alone.threads = 1;
    for (int64_t i = 0; i < count; i++) most = larger(most, groups[i].end - groups[i].first);
    for (int64_t t = 0; t < threads; t++) {
        scratch[t] = allocate(e, groups[0].tokens, most);
        all.failed |= !is_allocated(scratch[t]);
    }
    if (!all.failed) share_work(run_group, &all, count, threads);
    for (int64_t t = 0; t < threads; t++) release(scratch[t]);
    return !all.failed;
}

/* x (tokens, width), the embedded tokens of documents one after another, become hidden states, in place; `documents` are
   those of packed_attention.c. With `prompts` they are scratch. Returns 0 if there is no memory. */
int encode(const Encoder *e, const int64_t *documents, int64_t number, float *x, const Prompts *prompts) {
    int64_t width = e->layers->qkv.in, most = 0, count = 0;
    if (e->threads > 1) {
        Group *groups = malloc(number * sizeof(Group));
        if (!groups) return 0;
        count = group_fairly(e, documents, number, groups);
        int ok = count && run_groups(e, documents, groups, count, x, prompts);
        free(groups);
        if (count) return ok;
    }
    for (int64_t i = 0; i < number; i++) most = larger(most, documents[5 * i + 1]);
    Scratch s = allocate(e, most + GROUP * e->threads, number); /* a group ends with the document that reaches GROUP */
    int ok = is_allocated(s);
    for (int64_t first = 0, end; ok && first < number; first = end) {
        int64_t tokens = 0;
        for (end = first; end < number && tokens < GROUP * e->threads; end++) tokens += documents[5 * end + 1];
        const int64_t *group = documents + 5 * first;
        ok = run_layers(e, group, end - first, tokens, x + group[0] * width, prompts, first, s);
    }
    release(s);
    return ok;
}
