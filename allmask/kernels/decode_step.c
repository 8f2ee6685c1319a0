/* One decoding step, or all steps of greedy or beam search, with VNNI, AVX2 or NEON. `TorchEngine` and search.py are
   the same in torch.

   Weights and precision are those of products.h; keys and values of the text are bf16 or fp32, everything else is fp32.
   All rows that continue a text read its keys and values in place; the tokens that a row generated are found by `path`
   and never moved. A model with one stack reads text and generated tokens together; the decoder of an encoder–decoder
   reads the generated tokens, then the source. */

#include "logits.h"
#include "products.h"

#define KEYS 64    /* the length of a text is padded to a multiple */
#define TOGETHER 4 /* rows of one text whose attention is computed together */

typedef struct {
    Linear qkv, output, cross_query, cross_output; /* weights of cross-attention are NULL if there is only one stack */
    Linear expand, up, contract;                   /* the weight of `up` is NULL unless the feed-forward is gated */
    Norm attention_norm, cross_norm, feed_forward_norm;
} Layer;
typedef struct {
    int64_t depth, width, heads, head_width, ffn_width, pre, activation;
    int64_t distances; /* with a bias of their own; larger distances share the last one */
    double epsilon, head_epsilon;
    const float *distance_bias; /* (heads, distances), added to the scores of generated tokens; or NULL */
    const Layer *layers;
    Norm last_norm;
    Linear transform; /* absent if its weight is NULL */
    Norm head_norm;
    Linear head;
} Network;
typedef struct {
    const void *keys, *values; /* (depth, texts, heads, D, keys) and (depth, texts, heads, keys, D) */
    const int32_t *lengths, *owner; /* (texts,), (rows,) */
    const int32_t *path;            /* (rows, path_row): the slot of the token that a row generated at each time */
    float *own;                     /* (depth, 2, room, slots, width): keys and values of generated tokens */
    int64_t kind, texts, padded, rows, slots, room, time, path_row; /* path_row > time */
} Memory;

/* ---- attention --------------------------------------------------------------------------------------------- */

/* Load n numbers into the cache. The keys and values of the next head follow those of this one, and of many texts they are
   not in the cache. */
INLINE void prefetch(const Kind kind, const void *p, int64_t at, int64_t n) {
    int64_t size = kind == FP32 ? 4 : 2;
    for (int64_t i = 0; i < n * size; i += 64) __builtin_prefetch((const char *)p + at * size + i, 0, 2);
}

/* The scores of `rows` rows of queries, `stride` apart, with the keys of a text; those of a row are `room` apart */
INLINE void score_text(const int rows, const Kind kind, const float *q, int64_t stride, const void *keys, int64_t at,
                       int64_t d, int64_t padded, int64_t length, float *score, int64_t room) {
    const int vectors = VECTORS(rows);
    for (int64_t k = 0; k < length; k += 16 * vectors) {
        vec sum[TOGETHER][4];
        UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < vectors; c++) sum[r][c] = zeros();
        for (int64_t i = 0; i < d; i++) {
            vec part[4];
            prefetch(kind, keys, at + (d + i) * padded + k, 16 * vectors);
            UNROLLED for (int c = 0; c < vectors; c++) part[c] = load_as(kind, keys, at + i * padded + k + 16 * c);
            UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < vectors; c++)
                sum[r][c] = mul_add(all(q[r * stride + i]), part[c], sum[r][c]);
        }
        UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < vectors; c++)
            save(score + r * room + k + 16 * c, sum[r][c]);
    }
    for (int r = 0; r < rows; r++)
        for (int64_t k = length; k % KEYS; k++) score[r * room + k] = -INFINITY;
}

static float dot(const float *a, const float *b, int64_t n) {
    vec sum = zeros();
    for (int64_t i = 0; i < n; i += 16) sum = mul_add(load(a + i), load(b + i), sum);
    return sum_of(sum);
}

static float exponentiate(float *score, int64_t n) { /* e^(score - max), in place; returns the sum */
    vec most = all(-INFINITY), sum = zeros();
    for (int64_t i = 0; i < n; i += 16) most = larger_of(most, load(score + i));
    most = all(largest_of(most));
    for (int64_t i = 0; i < n; i += 16) {
        vec e = exponential(sub(load(score + i), most));
        sum = add(sum, e);
        save(score + i, e);
    }
    return sum_of(sum);
}

typedef enum { TEXT = 1, OWN = 2 } Reads;

/* Sixteen outputs of `rows` rows: the values of a text, `d` apart, weighted by their scores. Each sum is in four parts, which
   do not depend on the number of rows. */
INLINE void weigh_text(const int rows, const Kind kind, const void *values, int64_t at, int64_t d, int64_t count,
                       const float *score, int64_t room, vec sum[TOGETHER][4]) {
    const int parts = VECTORS(rows);
    UNROLLED for (int first = 0; first < 4; first += parts) {
        vec part[TOGETHER][4];
        UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < parts; c++) part[r][c] = zeros();
        for (int64_t k = first; k < count; k += 4)
            UNROLLED for (int c = 0; c < parts; c++) {
                vec value = load_as(kind, values, at + (k + c) * d);
                UNROLLED for (int r = 0; r < rows; r++)
                    part[r][c] = mul_add(all(score[r * room + k + c]), value, part[r][c]);
            }
        UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < parts; c++) sum[r][first + c] = part[r][c];
    }
}

/* Attention of `rows` rows that continue one text, with the queries q (heads, d), `stride` apart. A score has `room` numbers
   for each row. */
INLINE void attend(const int rows, const Kind kind, const int reads, const Network *n, const Memory *m, int64_t layer,
                   int64_t row, const float *q, int64_t stride, float *y, float *score, int64_t room) {
    int64_t text = m->owner[row], length = reads & TEXT ? m->lengths[text] : 0, seen = (length + KEYS - 1) / KEYS * KEYS;
    int64_t d = n->head_width, width = n->heads * d, mine = reads & OWN ? m->time + 1 : 0, end = (seen + mine + 15) / 16 * 16;
    const float *keys = m->own + 2 * layer * m->room * m->slots * width, *values = keys + m->room * m->slots * width;
    const float *near = n->distance_bias;
    for (int64_t h = 0; h < n->heads; h++, q += d, y += d, keys += d, values += d, near += n->distances) {
        int64_t at = ((layer * m->texts + text) * n->heads + h) * d * m->padded;
        vec share[TOGETHER];
        if (reads & TEXT) score_text(rows, kind, q, stride, m->keys, at, d, m->padded, length, score, room);
        UNROLLED for (int r = 0; r < rows; r++) {
            const int32_t *path = m->path + (row + r) * m->path_row;
            float *own = score + r * room + seen;
            for (int64_t j = 0; j < mine; j++) own[j] = dot(q + r * stride, keys + (j * m->slots + path[j]) * width, d);
            for (int64_t j = 0; n->distance_bias && j < mine; j++) {
                int64_t ago = m->time - j;
                own[j] += near[ago < n->distances ? ago : n->distances - 1];
            }
            for (int64_t j = mine; j < end - seen; j++) own[j] = -INFINITY;
            share[r] = all(1.f / exponentiate(score + r * room, end));
        }
        for (int64_t k = 0; reads & TEXT && k < seen; k += 4) prefetch(kind, m->values, at + (m->padded + k) * d, 4 * d);
        for (int64_t i = 0; i < d; i += 16) {
            vec sum[TOGETHER][4];
            weigh_text(rows, kind, m->values, at + i, d, seen, score, room, sum);
            UNROLLED for (int r = 0; r < rows; r++) {
                const int32_t *path = m->path + (row + r) * m->path_row;
                for (int64_t j = 0; j < mine; j++) {
                    vec value = load(values + (j * m->slots + path[j]) * width + i);
                    sum[r][0] = mul_add(all(score[r * room + seen + j]), value, sum[r][0]);
                }
                vec whole = add(add(sum[r][0], sum[r][1]), add(sum[r][2], sum[r][3]));
                save(y + r * width + i, mul(whole, share[r]));
            }
        }
    }
}

/* Attention of all rows; their queries are `stride` apart. Rows of one text are computed together. */
static void attend_all(const int reads, const Network *n, const Memory *m, int64_t layer, const float *q, int64_t stride,
                       float *y, float *score, int64_t room) {
    int64_t count, width = n->heads * n->head_width;
    for (int64_t r = 0; r < m->rows; r += count, q += count * stride, y += count * width) {
        count = 1;
        while (reads & TEXT && count < TOGETHER && r + count < m->rows && m->owner[r + count] == m->owner[r]) count++;
        count -= count == 3;
#define ATTEND(rows, kind, reads) attend(rows, kind, reads, n, m, layer, r, q, stride, y, score, room)
#define ATTEND_TEXT(kind, reads) \
    (count == 4 ? ATTEND(4, kind, reads) : count == 2 ? ATTEND(2, kind, reads) : ATTEND(1, kind, reads))
        if (reads == OWN) ATTEND(1, FP32, OWN);
        else if (reads == TEXT && m->kind == FP32) ATTEND_TEXT(FP32, TEXT);
        else if (reads == TEXT) ATTEND_TEXT(BF16, TEXT);
        else if (m->kind == FP32) ATTEND_TEXT(FP32, TEXT | OWN);
        else ATTEND_TEXT(BF16, TEXT | OWN);
    }
}

/* ---- the network ------------------------------------------------------------------------------------------- */

static void normalize_rows(const float *x, float *y, Norm norm, int64_t rows, int64_t n, double epsilon) {
    for (int64_t r = 0; r < rows; r++) normalize(x + r * n, y + r * n, norm, n, epsilon);
}

/* Compute logits (rows, head.out) of hidden states (rows, width), which are overwritten. Returns 0 if there is no
   memory. */
int output_logits(const Network *n, int64_t rows, float *x, float *logits) {
    float *y = malloc(rows * n->width * sizeof(float) + int8_size(rows, n->width));
    if (!y) return 0;
    Int8 *buffer = (Int8 *)(y + rows * n->width);
    if (n->transform.weight) {
        linear(&n->transform, x, rows, y, buffer);
        activate(y, rows * n->width, n->activation);
        normalize_rows(y, x, n->head_norm, rows, n->width, n->head_epsilon);
    }
    linear(&n->head, x, rows, logits, buffer);
    free(y);
    return 1;
}

/* Append the keys and values of the new tokens to `own` */
static void append_keys_values(const Memory *m, int64_t layer, const float *qkv, int64_t width) {
    for (int64_t part = 0; part < 2; part++)
        for (int64_t r = 0; r < m->rows; r++) {
            int64_t at = (((2 * layer + part) * m->room + m->time) * m->slots + r) * width;
            memcpy(m->own + at, qkv + (3 * r + 1 + part) * width, width * sizeof(float));
        }
}

typedef struct { float *x, *h, *y, *z, *score; Int8 *q; int64_t room; } Space; /* x: the hidden states; others: scratch */

/* The input of a residual step: the hidden states, normalized if the norm comes before */
static const float *enter(const Network *n, Norm norm, int64_t rows, Space s) {
    if (n->pre) normalize_rows(s.x, s.h, norm, rows, n->width, n->epsilon);
    return n->pre ? s.h : s.x;
}

/* Add the output of a residual step, in s.h, to the hidden states */
static void leave(const Network *n, Norm norm, int64_t rows, Space s) {
    for (int64_t i = 0; i < rows * n->width; i++) s.x[i] += s.h[i];
    if (!n->pre) normalize_rows(s.x, s.x, norm, rows, n->width, n->epsilon);
}

static void run_layer(const Network *n, const Memory *m, int64_t number, Space s) {
    const Layer *layer = n->layers + number;
    int64_t rows = m->rows, width = n->heads * n->head_width;
    linear(&layer->qkv, enter(n, layer->attention_norm, rows, s), rows, s.y, s.q);
    append_keys_values(m, number, s.y, width);
    attend_all(layer->cross_query.weight ? OWN : TEXT | OWN, n, m, number, s.y, 3 * width, s.z, s.score,
               s.room);
    linear(&layer->output, s.z, rows, s.h, s.q);
    leave(n, layer->attention_norm, rows, s);
    if (layer->cross_query.weight) {
        linear(&layer->cross_query, enter(n, layer->cross_norm, rows, s), rows, s.y, s.q);
        attend_all(TEXT, n, m, number, s.y, width, s.z, s.score, s.room);
        linear(&layer->cross_output, s.z, rows, s.h, s.q);
        leave(n, layer->cross_norm, rows, s);
    }
    const float *from = enter(n, layer->feed_forward_norm, rows, s);
    linear(&layer->expand, from, rows, s.y, s.q);
    activate(s.y, rows * n->ffn_width, n->activation);
    if (layer->up.weight) {
        linear(&layer->up, from, rows, s.z, s.q);
        for (int64_t i = 0; i < rows * n->ffn_width; i++) s.y[i] *= s.z[i];
    }
    linear(&layer->contract, s.y, rows, s.h, s.q);
    leave(n, layer->feed_forward_norm, rows, s);
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Turn the embedded tokens x (rows, width), one more per row, into hidden states, and compute their logits. Returns 0 if
   there is no memory. Static, because the C library has a `step`, which a call from here would reach. */
static int compute_step(const Network *n, const Memory *m, float *x, float *logits) {
    int64_t rows = m->rows, width = n->width, wide = larger(larger(n->ffn_width, 3 * n->heads * n->head_width), width);
    int64_t scores = m->padded + KEYS + m->time + 32;
    float *h = malloc((rows * (width + 2 * wide) + TOGETHER * scores) * sizeof(float) + int8_size(rows, wide));
    if (!h) return 0;
    float *y = h + rows * width, *z = y + rows * wide, *score = z + rows * wide;
    Space s = {x, h, y, z, score, (Int8 *)(score + TOGETHER * scores), scores};
    for (int64_t i = 0; i < n->depth; i++) run_layer(n, m, i, s);
    if (n->last_norm.weight) normalize_rows(x, x, n->last_norm, rows, width, n->epsilon);
    free(h);
    return output_logits(n, rows, x, logits);
}

int step(const Network *n, const Memory *m, float *x, float *logits) { return compute_step(n, m, x, logits); }

/* ---- greedy search ------------------------------------------------------------------------------------------- */

typedef struct {
    const float *tokens, *positions, *segment; /* (vocabulary, width), (number of positions, width) or NULL, (width,) */
    Norm norm;
    double epsilon;
    float scale; /* of the vectors of tokens */
} Embedding;
typedef struct {
    const int64_t *end, *banned;           /* tokens */
    const int64_t *prompts, *prompt_start; /* tokens of all texts, (texts + 1,); whose n-grams must not be repeated */
    const int64_t *limits;                 /* (texts,): the number of new tokens */
    int64_t ends, banneds, min_new, ngram; /* ngram: no n-gram of this size is repeated; 0: all may be */
    double end_bias;
} Rules;
typedef struct {
    int64_t *tokens, *counts; /* (texts, written_row), (texts,) */
    double *log_probability;  /* (texts,) */
    int64_t written_row;
} Written;

/* x (rows, width): the embedded tokens. The order of the sums is that of nn/layers.py. */
void embed_tokens(const Network *n, const Embedding *e, int64_t rows, const int64_t *tokens, const int64_t *positions,
                  float *x) {
    for (int64_t r = 0; r < rows; r++, x += n->width) {
        const float *token = e->tokens + tokens[r] * n->width;
        for (int64_t i = 0; i < n->width; i += 16) {
            vec v = mul(load(token + i), all(e->scale));
            if (e->positions) v = add(v, load(e->positions + positions[r] * n->width + i));
            save(x + i, add(v, load(e->segment + i)));
        }
        if (e->norm.weight) normalize(x, x, e->norm, n->width, e->epsilon);
    }
}

static int among(const int64_t *tokens, int64_t count, int64_t token) {
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] == token) return 1;
    return 0;
}

/* Exclude tokens after which the last `size` tokens would repeat earlier ones; the history has two parts, a and b */
static void exclude_repeating(const int64_t *a, int64_t in_a, const int64_t *b, int64_t in_b, int64_t size, float *logits) {
    int64_t length = in_a + in_b;
#define TOKEN(i) ((i) < in_a ? a[i] : b[(i) - in_a])
    for (int64_t start = 0; start + size <= length; start++) {
        int64_t same = 0;
        while (same < size - 1 && TOKEN(start + same) == TOKEN(length - size + 1 + same)) same++;
        if (same == size - 1) logits[TOKEN(start + size - 1)] = -INFINITY;
    }
#undef TOKEN
}

/* Exclude what the rules forbid for a text that has `count` tokens */
static void apply_rules(const Rules *rules, int64_t text, const int64_t *tokens, int64_t count, float *logits) {
    for (int64_t i = 0; i < rules->banneds; i++) logits[rules->banned[i]] = -INFINITY;
    for (int64_t i = 0; i < rules->ends; i++)
        logits[rules->end[i]] = count < rules->min_new ? -INFINITY : logits[rules->end[i]] + (float)rules->end_bias;
    if (!rules->ngram) return;
    const int64_t *start = rules->prompt_start + text;
    exclude_repeating(rules->prompts + start[0], start[1] - start[0], tokens, count, rules->ngram, logits);
}

/* Write the likeliest token of each row, until all rows ended. `logits` (rows, head.out) are those of the first new token,
   and are overwritten, as are `owner`, `path` and `positions` (rows,), the position of the newest token. m->time is the
   time of the newest token, -1 if there is none. Returns 1, 0 if there is no memory, -1 if a logit is NaN. */
int write_greedy(const Network *n, const Embedding *e, const Memory *memory, const Rules *rules, float *logits,
                 int32_t *owner, int32_t *path, int64_t *positions, const Written *written) {
    Memory m = *memory;
    int64_t vocabulary = n->head.out;
    float *x = malloc(m.rows * (n->width * sizeof(float) + sizeof(int64_t)));
    if (!x) return 0;
    int64_t *next = (int64_t *)(x + m.rows * n->width);
    for (;;) {
        int64_t going = 0;
        for (int64_t r = 0; r < m.rows; r++) {
            float *row = logits + r * vocabulary, total = log_sum_exp(row, vocabulary), score;
            if (isnan(total)) return free(x), -1;
            int64_t text = owner[r], *tokens = written->tokens + text * written->written_row, token;
            apply_rules(rules, text, tokens, written->counts[text], row);
            best_of(row, vocabulary, 1, &score, &token);
            float gain = score - total;
            if (!(gain > -INFINITY)) continue; /* nothing is allowed: the text ends as it is */
            int is_end = among(rules->end, rules->ends, token);
            written->log_probability[text] += gain - (is_end ? rules->end_bias : 0.);
            tokens[written->counts[text]++] = token;
            if (is_end || written->counts[text] >= rules->limits[text]) continue;
            memmove(path + going * m.path_row, path + r * m.path_row, (m.time + 1) * sizeof(int32_t));
            owner[going] = owner[r];
            positions[going] = positions[r] + 1;
            next[going++] = token;
        }
        if (!going) return free(x), 1;
        m.rows = going;
        m.time++;
        for (int64_t r = 0; r < going; r++) path[r * m.path_row + m.time] = r;
        embed_tokens(n, e, going, next, positions, x);
        if (!compute_step(n, &m, x, logits)) return free(x), 0;
    }
}

/* ---- beam search --------------------------------------------------------------------------------------------- */

typedef struct { int64_t beams, n_best; double length_penalty; } Search;
typedef struct { double log_probability; int64_t row, token; } Candidate; /* `row` continued by `token` */
typedef struct {                                                          /* the unfinished hypotheses, a row each */
    int32_t *owner, *path;       /* as in Memory */
    int64_t *positions, *tokens; /* (rows,): of the newest token; (rows, longest): what was written */
    double *log_probability;     /* (rows,) */
} Beams;

#define ALIGNED 64

static void *take(char **block, size_t bytes) { /* the next bytes of a block */
    void *from = *block;
    *block += (bytes + ALIGNED - 1) / ALIGNED * ALIGNED;
    return from;
}

static Beams take_beams(char **block, int64_t rows, int64_t row, int64_t path_row) {
    int32_t *owner = take(block, rows * sizeof(int32_t)), *path = take(block, rows * path_row * sizeof(int32_t));
    int64_t *positions = take(block, rows * sizeof(int64_t)), *tokens = take(block, rows * row * sizeof(int64_t));
    return (Beams){owner, path, positions, tokens, take(block, rows * sizeof(double))};
}

static double score_of(double log_probability, int64_t length, const Search *search) {
    return log_probability / pow(larger(1, length), search->length_penalty);
}

/* Insert a hypothesis of `length` tokens among the best of its text; of equal ones the first is better */
static void keep(const Search *search, const Written *written, int64_t text, const int64_t *tokens, int64_t length,
                 double log_probability) {
    int64_t first = text * search->n_best, row = written->written_row, at = search->n_best;
    double score = score_of(log_probability, length, search);
    for (; at > 0; at--) {
        int64_t before = first + at - 1, count = written->counts[before];
        if (count >= 0 && score_of(written->log_probability[before], count, search) >= score) break;
        if (count < 0 || at == search->n_best) continue; /* nothing to move, or it falls off the end */
        memcpy(written->tokens + (before + 1) * row, written->tokens + before * row, count * sizeof(int64_t));
        written->counts[before + 1] = count;
        written->log_probability[before + 1] = written->log_probability[before];
    }
    if (at == search->n_best) return;
    memcpy(written->tokens + (first + at) * row, tokens, length * sizeof(int64_t));
    written->counts[first + at] = length;
    written->log_probability[first + at] = log_probability;
}

/* Insert among the best `most`, best first; of equal ones the first is better. Returns how many there are. */
static int64_t insert(Candidate *best, int64_t count, int64_t most, Candidate new) {
    int64_t at = count < most ? count++ : most;
    if (at == most && !(new.log_probability > best[--at].log_probability)) return count;
    for (; at > 0 && new.log_probability > best[at - 1].log_probability; at--) best[at] = best[at - 1];
    best[at] = new;
    return count;
}

/* Whether no hypothesis that continues the best beam can beat the worst one that is kept: further tokens only lower the
   log-probability, and the length that divides it is best at its maximum if the penalty is positive, else at its minimum */
static int is_settled(const Search *search, const Written *written, int64_t text, int64_t limit, int64_t length,
                      double log_probability) {
    int64_t last = (text + 1) * search->n_best - 1;
    if (written->counts[last] < 0) return 0;
    double bound = log_probability / pow(search->length_penalty > 0 ? limit : length + 1, search->length_penalty);
    return bound <= score_of(written->log_probability[last], written->counts[last], search);
}

/* Beam search, as in search.py. `first` (texts, head.out) are the logits of the first new token, and are overwritten;
   `positions` (texts,) are those of the newest tokens. m->time is that of the newest token, -1 if there is none; m->slots
   is at least texts · beams. `written` has n_best hypotheses per text, best first; counts are -1 where there are fewer.
   Returns 1, 0 if there is no memory, -1 if a logit is NaN. */
int write_beams(const Network *n, const Embedding *e, const Memory *memory, const Rules *rules, const Search *search,
                float *first, const int64_t *positions, const Written *written) {
    Memory m = *memory;
    int64_t vocabulary = n->head.out, texts = m.rows, rows = texts * search->beams, row = written->written_row, length = 0;
    int64_t most = search->beams * (1 + rules->ends), wide = m.time + 1 + row; /* enough even if all ends are candidates */
    int64_t few = most < vocabulary ? most : vocabulary;
    size_t live = rows * (sizeof(double) + (1 + row) * sizeof(int64_t) + (1 + wide) * sizeof(int32_t)) + 5 * ALIGNED;
    size_t others = most * (sizeof(Candidate) + sizeof(int64_t) + sizeof(float)) + rows * sizeof(int64_t) + 6 * ALIGNED;
    char *block = malloc(2 * live + others + rows * (n->width + vocabulary) * sizeof(float)), *at = block;
    if (!block) return 0;
    Beams now = take_beams(&at, rows, row, wide), next = take_beams(&at, rows, row, wide);
    Candidate *best = take(&at, most * sizeof(Candidate));
    int64_t *token = take(&at, most * sizeof(int64_t)), *newest = take(&at, rows * sizeof(int64_t));
    float *value = take(&at, most * sizeof(float)), *x = take(&at, rows * n->width * sizeof(float));
    float *logits = first, *space = take(&at, rows * vocabulary * sizeof(float));
    for (int64_t r = 0; r < texts; r++) {
        now.owner[r] = memory->owner[r];
        now.positions[r] = positions[r];
        now.log_probability[r] = 0.;
        memcpy(now.path + r * wide, memory->path + r * memory->path_row, (m.time + 1) * sizeof(int32_t));
    }
    m.path_row = wide;
    for (;; length++) {
        int64_t going = 0;
        for (int64_t r = 0; r < m.rows;) { /* the beams of one text after another */
            int64_t text = now.owner[r], count = 0, start = going;
            for (; r < m.rows && now.owner[r] == text; r++) {
                float *line = logits + r * vocabulary, total = log_sum_exp(line, vocabulary);
                if (isnan(total)) return free(block), -1;
                const int64_t *tokens = now.tokens + r * row;
                apply_rules(rules, text, tokens, length, line);
                best_of(line, vocabulary, few, value, token);
                if (!(value[0] > -INFINITY)) /* nothing is allowed: it ends as it is */
                    keep(search, written, text, tokens, length, now.log_probability[r]);
                for (int64_t i = 0; i < few && value[i] > -INFINITY; i++)
                    count = insert(best, count, most, (Candidate){now.log_probability[r] + (value[i] - total), r, token[i]});
            }
            for (int64_t rank = 0; rank < count && going < start + search->beams; rank++) {
                Candidate c = best[rank];
                int64_t *tokens = next.tokens + going * row;
                memcpy(tokens, now.tokens + c.row * row, length * sizeof(int64_t));
                tokens[length] = c.token;
                if (among(rules->end, rules->ends, c.token) || length + 1 >= rules->limits[text]) {
                    if (rank < search->beams) keep(search, written, text, tokens, length + 1, c.log_probability);
                    continue;
                }
                memcpy(next.path + going * wide, now.path + c.row * wide, (m.time + 1) * sizeof(int32_t));
                next.path[going * wide + m.time + 1] = going;
                next.owner[going] = text;
                next.positions[going] = now.positions[c.row] + 1;
                next.log_probability[going] = c.log_probability;
                newest[going++] = c.token;
            }
            if (going > start && is_settled(search, written, text, rules->limits[text], length + 1,
                                            next.log_probability[start]))
                going = start;
        }
        Beams old = now;
        now = next, next = old;
        m.rows = going, m.owner = now.owner, m.path = now.path;
        m.time++;
        if (!going) return free(block), 1;
        embed_tokens(n, e, going, newest, now.positions, x);
        logits = space;
        if (!compute_step(n, &m, x, logits)) return free(block), 0;
    }
}
