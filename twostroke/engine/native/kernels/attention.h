// Attention over pages in place: each page is read where it lies, scores never leave the cache of the core, and the
// softmax is kept up to date block by block (FlashAttention, arXiv:2205.14135; online softmax, arXiv:1805.02867).
#pragma once
#include <stdlib.h>

#include "paged.h"

#define STRIP 4  // queries side by side

// Do `work` for the next `strip` of `left` rows, a number that the compiler knows, and go on behind them.
#define EACH_STRIP(left, work, row)                                  \
    do {                                                             \
        const int64_t rows_left = left;                              \
        if (rows_left >= 4) { enum { strip = 4 }; work; row += 4; }  \
        else if (rows_left == 3) { enum { strip = 3 }; work; row += 3; } \
        else if (rows_left == 2) { enum { strip = 2 }; work; row += 2; } \
        else { enum { strip = 1 }; work; row += 1; }                 \
    } while (0)
#define SOON 8   // tokens whose keys are asked for ahead

// Running softmax of each row: what was largest, what the weights sum to, and the weighted values.
typedef struct {
    float largest[MOST_ROWS], total[MOST_ROWS];
    float values[MOST_ROWS * MOST_DIM];
    float scores[MOST_ROWS * BLOCK];
    float keys[MOST_DIM * BLOCK];  // turned: [head_dim][BLOCK]
    float block_values[BLOCK * MOST_DIM];
    const float *queries[MOST_ROWS];
    int64_t from[MOST_ROWS], to[MOST_ROWS];  // tokens that a row sees
} workspace;

// Turn the scores of `row` for `count` tokens from `start` into weights; older values shrink to the new scale.
static void weigh(workspace *s, int64_t row, int64_t start, int64_t count, int64_t head_dim) {
    float *scores = s->scores + row * BLOCK;
    int64_t from = s->from[row] - start, to = s->to[row] - start;
    if (from < 0) from = 0;
    if (to > count) to = count;
    for (int64_t i = 0; i < from && i < BLOCK; i++) scores[i] = -INFINITY;
    for (int64_t i = to < 0 ? 0 : to; i < BLOCK; i++) scores[i] = -INFINITY;
    vec most = v_all(-INFINITY);
    for (int64_t i = 0; i < BLOCK; i += LANES) most = v_max(most, v_load(scores + i));
    float before = s->largest[row], largest = v_largest(most);
    if (largest < before) largest = before;
    // A row that sees nothing of this block, and nothing before it, keeps zeros.
    vec shift = v_all(largest == -INFINITY ? 0.0f : largest), sum = v_zero();
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        vec weight = v_exp(v_sub(v_load(scores + i), shift));
        v_store(scores + i, weight);
        sum = v_add(sum, weight);
    }
    if (largest != before) {
        float shrink = before == -INFINITY ? 0.0f : expf(before - largest);
        s->total[row] *= shrink;
        for (int64_t d = 0; d < head_dim; d += LANES)
            v_store(s->values + row * head_dim + d, v_mul(v_load(s->values + row * head_dim + d), v_all(shrink)));
        s->largest[row] = largest;
    }
    s->total[row] += v_sum(sum);
}

// Scores of neighbouring heads that share a key, which is read once.
static inline __attribute__((always_inline)) void score_heads(
    const attention *a, workspace *s, const char *key, int64_t head, int64_t row, int64_t token, const int strip,
    const int64_t kind) {
    const int64_t head_dim = a->kv->head_dim;
    vec sums[STRIP];
    for (int i = 0; i < strip; i++) sums[i] = v_zero();
    for (int64_t d = 0; d < head_dim; d += LANES) {
        const vec part = v_load_value(key, head * head_dim + d, kind);
        for (int i = 0; i < strip; i++) sums[i] = v_fma(part, v_load(s->queries[row + i] + d), sums[i]);
    }
    for (int i = 0; i < strip; i++) s->scores[(row + i) * BLOCK + token] = v_sum(sums[i]) * a->kv->scale;
}

// Scores of one query's rows by dot products, token by token, all heads together: pages are read as they lie.
static inline __attribute__((always_inline)) void score_few(
    const attention *a, workspace *s, const char *const *keys, const char *const *values, int64_t count, int64_t rows,
    const int64_t kind) {
    const int64_t group = a->kv->group, wide = rows / group * a->kv->head_dim * value_bytes(kind);
    for (int64_t token = 0; token < count; token++) {
        for (int64_t byte = 0; byte < wide; byte += 64) {
            _mm_prefetch(values[token] + byte, _MM_HINT_T0);
            if (token + SOON < count) _mm_prefetch(keys[token + SOON] + byte, _MM_HINT_T0);
        }
        for (int64_t head = 0, row = 0; row < rows; head++)
            for (int64_t end = row + group; row < end;)
                EACH_STRIP(end - row, score_heads(a, s, keys[token], head, row, token, strip, kind), row);
    }
}

// Add the weighted values of a block to neighbouring heads that share them, LANES of each at a time.
static inline __attribute__((always_inline)) void add_heads(
    const attention *a, workspace *s, const char *const *values, int64_t count, int64_t head, int64_t row, const int strip,
    const int64_t kind) {
    const int64_t head_dim = a->kv->head_dim;
    for (int64_t d = 0; d < head_dim; d += LANES) {
        vec sums[STRIP];
        for (int i = 0; i < strip; i++) sums[i] = v_load(s->values + (row + i) * head_dim + d);
        for (int64_t token = 0; token < count; token++) {
            const vec value = v_load_value(values[token], head * head_dim + d, kind);
            for (int i = 0; i < strip; i++) sums[i] = v_fma(v_all(s->scores[(row + i) * BLOCK + token]), value, sums[i]);
        }
        for (int i = 0; i < strip; i++) v_store(s->values + (row + i) * head_dim + d, sums[i]);
    }
}

static inline __attribute__((always_inline)) void add_few(
    const attention *a, workspace *s, const char *const *values, int64_t count, int64_t rows, const int64_t kind) {
    for (int64_t head = 0, row = 0; row < rows; head++)
        for (int64_t end = row + a->kv->group; row < end;)
            EACH_STRIP(end - row, add_heads(a, s, values, count, head, row, strip, kind), row);
}

// Bring a block's keys, turned, and values into the workspace as float32; tokens beyond `count` become zeros.
static inline __attribute__((always_inline)) void gather_block(
    const attention *a, workspace *s, const char *const *keys, const char *const *values, int64_t count, const int64_t kind) {
    const int64_t head_dim = a->kv->head_dim;
    for (int64_t token = 0; token < BLOCK; token += LANES)
        for (int64_t d = 0; d < head_dim; d += LANES) {
            vec square[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                const int64_t at = token + i;
                square[i] = at < count ? v_load_value(keys[at], d, kind) : v_zero();
                v_store(s->block_values + at * head_dim + d, at < count ? v_load_value(values[at], d, kind) : v_zero());
            }
            v_transpose(square);
            for (int64_t i = 0; i < LANES; i++) v_store(s->keys + (d + i) * BLOCK + token, square[i]);
        }
}

static inline __attribute__((always_inline)) void score_strip(
    const attention *a, workspace *s, int64_t row, const int strip) {
    const int64_t head_dim = a->kv->head_dim;
    enum { PASS = 4 };  // registers of scores; a block is as many at least
    for (int64_t token = 0; token < BLOCK; token += PASS * LANES) {
        vec sums[STRIP][PASS];
        for (int i = 0; i < strip; i++)
            for (int j = 0; j < PASS; j++) sums[i][j] = v_zero();
        for (int64_t d = 0; d < head_dim; d++) {
            vec keys[PASS];
            for (int j = 0; j < PASS; j++) keys[j] = v_load(s->keys + d * BLOCK + token + j * LANES);
            for (int i = 0; i < strip; i++) {
                vec query = v_all(s->queries[row + i][d]);
                for (int j = 0; j < PASS; j++) sums[i][j] = v_fma(query, keys[j], sums[i][j]);
            }
        }
        for (int i = 0; i < strip; i++)
            for (int j = 0; j < PASS; j++)
                v_store(s->scores + (row + i) * BLOCK + token + j * LANES, v_mul(sums[i][j], v_all(a->kv->scale)));
    }
}

static inline __attribute__((always_inline)) void add_strip(
    const attention *a, workspace *s, int64_t row, int64_t d, const int strip, const int wide) {
    const int64_t head_dim = a->kv->head_dim;
    vec sums[STRIP][4];
    for (int i = 0; i < strip; i++)
        for (int j = 0; j < wide; j++) sums[i][j] = v_load(s->values + (row + i) * head_dim + d + j * LANES);
    for (int64_t token = 0; token < BLOCK; token++) {
        vec values[4];
        for (int j = 0; j < wide; j++) values[j] = v_load(s->block_values + token * head_dim + d + j * LANES);
        for (int i = 0; i < strip; i++) {
            vec weight = v_all(s->scores[(row + i) * BLOCK + token]);
            for (int j = 0; j < wide; j++) sums[i][j] = v_fma(weight, values[j], sums[i][j]);
        }
    }
    for (int i = 0; i < strip; i++)
        for (int j = 0; j < wide; j++) v_store(s->values + (row + i) * head_dim + d + j * LANES, sums[i][j]);
}

static inline __attribute__((always_inline)) void add_strips(const attention *a, workspace *s, int64_t row, const int strip) {
    int64_t d = 0;
    for (; d + 4 * LANES <= a->kv->head_dim; d += 4 * LANES) add_strip(a, s, row, d, strip, 4);
    for (; d < a->kv->head_dim; d += LANES) add_strip(a, s, row, d, strip, 1);
}

static inline __attribute__((always_inline)) void attend_rows(
    const attention *a, const piece *p, workspace *s, const int64_t kind) {
    const int64_t head_dim = a->kv->head_dim, rows = p->rows;
    const int64_t end = s->to[rows - 1];
    for (int64_t start = s->from[0]; start < end; start += BLOCK) {
        const char *keys[BLOCK], *values[BLOCK];
        const int64_t count = end - start < BLOCK ? end - start : BLOCK;
        for (int64_t i = 0; i < count; i++) {
            keys[i] = token_row(a, p->pages, start + i, p->head, 0);
            values[i] = token_row(a, p->pages, start + i, p->head, 1);
        }
        if (p->queries == 1) {
            score_few(a, s, keys, values, count, rows, kind);
            for (int64_t row = 0; row < rows; row++) weigh(s, row, start, count, head_dim);
            add_few(a, s, values, count, rows, kind);
            continue;
        }
        gather_block(a, s, keys, values, count, kind);
        int64_t row = 0;
        for (; row + STRIP <= rows; row += STRIP) score_strip(a, s, row, STRIP);
        for (; row < rows; row++) score_strip(a, s, row, 1);
        for (row = 0; row < rows; row++) weigh(s, row, start, count, head_dim);
        for (row = 0; row + STRIP <= rows; row += STRIP) add_strips(a, s, row, STRIP);
        for (; row < rows; row++) add_strips(a, s, row, 1);
    }
}

// Attend the rows of a piece with vectors.
static void attend_by_vectors(const attention *a, const piece *p) {
    const int64_t head_dim = a->kv->head_dim;
    static __thread workspace *kept;
    if (!kept && !(kept = aligned_alloc(64, (sizeof *kept + 63) / 64 * 64))) abort();
    workspace *s = kept;
    for (int64_t row = 0; row < p->rows; row++) {
        s->queries[row] = row_numbers(a, p, row);
        s->to[row] = row_end(p, row);
        s->from[row] = row_first(a, p, row);
        s->largest[row] = -INFINITY;
        s->total[row] = 0;
    }
    memset(s->values, 0, (size_t)(p->rows * head_dim) * sizeof(float));
    if (a->kv->kind == FLOAT) attend_rows(a, p, s, FLOAT);
    else if (a->kv->kind == HALF) attend_rows(a, p, s, HALF);
    else attend_rows(a, p, s, BFLOAT);
    for (int64_t row = 0; row < p->rows; row++) {
        float *out = p->partial ? p->partial + row * (head_dim + 2) : row_out(a, p, row);
        vec share = v_all(p->partial ? 1.0f : 1.0f / s->total[row]);
        for (int64_t d = 0; d < head_dim; d += LANES)
            v_store(out + d, v_mul(v_load(s->values + row * head_dim + d), share));
        if (p->partial) out[head_dim] = s->largest[row], out[head_dim + 1] = s->total[row];
    }
}

// Put the parts of one query's results together (FlashDecoding).
static void merge_parts(const attention *a, const int32_t *merge) {
    const int64_t query = merge[0], first = merge[1] * a->kv->group, rows = merge[2] * a->kv->group, count = merge[4];
    const int64_t head_dim = a->kv->head_dim, wide = head_dim + 2;
    for (int64_t row = 0; row < rows; row++) {
        const float *parts = a->partial + (merge[3] * rows + row) * wide;
        float *out = a->out + (query * a->kv->kv_heads * a->kv->group + first + row) * head_dim;
        float largest = -INFINITY, total = 0;
        for (int64_t i = 0; i < count; i++) largest = fmaxf(largest, parts[i * rows * wide + head_dim]);
        for (int64_t i = 0; i < count; i++)
            total += parts[i * rows * wide + head_dim + 1] * expf(parts[i * rows * wide + head_dim] - largest);
        for (int64_t d = 0; d < head_dim; d += LANES) v_store(out + d, v_zero());
        for (int64_t i = 0; i < count; i++) {
            const float *part = parts + i * rows * wide;
            const vec share = v_all(expf(part[head_dim] - largest) / total);
            for (int64_t d = 0; d < head_dim; d += LANES) v_store(out + d, v_fma(v_load(part + d), share, v_load(out + d)));
        }
    }
}
