// Attention over pages in place: each page is read where it lies, scores never leave the cache of the core, and the
// softmax is kept up to date block by block (FlashAttention, arXiv:2205.14135; online softmax, arXiv:1805.02867).
#pragma once
#include "matrix.h"
#include "pool.h"

#define FLOAT 3        // a fourth kind of number, beside those of a matrix
#define BLOCK 64       // tokens that are scored at once
#define MOST_ROWS 128  // queries times heads of one item
#define MOST_DIM 256
#define STRIP 4        // queries side by side

typedef struct {
    char *pages;
    int64_t page_bytes, page_tokens, kv_heads, group, head_dim, kind;
    float scale;
} cache;

typedef struct {
    const cache *kv;
    const int32_t *qo_indptr, *kv_indptr, *kv_indices, *kv_last_page_len;
    const int32_t *items;  // [n, 5]: segment, first key-value head, heads, first query of the segment, queries
    int64_t window;        // how many of the latest tokens a query sees; 0 is all
    int64_t layer;
    const float *q;
    int64_t q_stride;
    float *out;  // [T, heads, head_dim]
} attention;

static inline __attribute__((always_inline)) int64_t kind_bytes(int64_t kind) { return kind == FLOAT ? 4 : 2; }

static inline __attribute__((always_inline)) vec v_load_number(const void *row, int64_t at, int64_t kind) {
    return kind == FLOAT ? v_load((const float *)row + at) : v_load_value(row, at, kind);
}

static inline const char *token_row(const attention *a, const int32_t *pages, int64_t token, int64_t head, int64_t part) {
    const cache *kv = a->kv;
    int64_t row = ((a->layer * 2 + part) * kv->page_tokens + token % kv->page_tokens) * kv->kv_heads + head;
    return kv->pages + pages[token / kv->page_tokens] * kv->page_bytes + row * kv->head_dim * kind_bytes(kv->kind);
}

static void append_row(const cache *kv, int64_t layer, int64_t part, int64_t page, int64_t offset, const float *from) {
    const int64_t numbers = kv->kv_heads * kv->head_dim;
    const int64_t row = (layer * 2 + part) * kv->page_tokens + offset;
    char *to = kv->pages + page * kv->page_bytes + row * numbers * kind_bytes(kv->kind);
    if (kv->kind == FLOAT) {
        memcpy(to, from, (size_t)numbers * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < numbers; i++)
        ((uint16_t *)to)[i] = kv->kind == HALF ? to_half(from[i]) : to_bfloat(from[i]);
}

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

// Scores of one query's rows by dot products, token by token, all heads together: pages are read as they lie.
static inline __attribute__((always_inline)) void score_few(
    const attention *a, workspace *s, const char *const *keys, const char *const *values, int64_t count, int64_t rows,
    const int64_t kind) {
    const int64_t head_dim = a->kv->head_dim, group = a->kv->group, wide = rows / group * head_dim * kind_bytes(kind);
    for (int64_t token = 0; token < count; token++) {
        for (int64_t byte = 0; byte < wide; byte += 64) _mm_prefetch(values[token] + byte, _MM_HINT_T0);
        for (int64_t row = 0; row < rows; row++) {
            vec sum = v_zero();
            for (int64_t d = 0; d < head_dim; d += LANES)
                sum = v_fma(v_load_number(keys[token], row / group * head_dim + d, kind), v_load(s->queries[row] + d), sum);
            s->scores[row * BLOCK + token] = v_sum(sum) * a->kv->scale;
        }
    }
}

static inline __attribute__((always_inline)) void add_few(
    const attention *a, workspace *s, const char *const *values, int64_t count, int64_t rows, const int64_t kind) {
    const int64_t head_dim = a->kv->head_dim, group = a->kv->group;
    for (int64_t first = 0, strip; first < rows; first += strip) {
        const int64_t head = first / group, left = (head + 1) * group - first;
        strip = left < STRIP ? left : STRIP;
        for (int64_t d = 0; d < head_dim; d += LANES) {
            vec sums[STRIP];
            for (int64_t i = 0; i < strip; i++) sums[i] = v_load(s->values + (first + i) * head_dim + d);
            for (int64_t token = 0; token < count; token++) {
                vec value = v_load_number(values[token], head * head_dim + d, kind);
                for (int64_t i = 0; i < strip; i++)
                    sums[i] = v_fma(v_all(s->scores[(first + i) * BLOCK + token]), value, sums[i]);
            }
            for (int64_t i = 0; i < strip; i++) v_store(s->values + (first + i) * head_dim + d, sums[i]);
        }
    }
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
                square[i] = at < count ? v_load_number(keys[at], d, kind) : v_zero();
                v_store(s->block_values + at * head_dim + d, at < count ? v_load_number(values[at], d, kind) : v_zero());
            }
            v_transpose(square);
            for (int64_t i = 0; i < LANES; i++) v_store(s->keys + (d + i) * BLOCK + token, square[i]);
        }
}

static inline __attribute__((always_inline)) void score_strip(
    const attention *a, workspace *s, int64_t row, const int strip) {
    const int64_t head_dim = a->kv->head_dim;
    enum { WIDE = BLOCK / LANES, PASS = WIDE < 4 ? WIDE : 4 };
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
    const attention *a, workspace *s, const int32_t *pages, int64_t head, int64_t rows, int64_t queries, const int64_t kind) {
    const int64_t head_dim = a->kv->head_dim;
    const int64_t end = s->to[rows - 1];
    for (int64_t start = s->from[0]; start < end; start += BLOCK) {
        const char *keys[BLOCK], *values[BLOCK];
        const int64_t count = end - start < BLOCK ? end - start : BLOCK;
        for (int64_t i = 0; i < count; i++) {
            keys[i] = token_row(a, pages, start + i, head, 0);
            values[i] = token_row(a, pages, start + i, head, 1);
        }
        if (queries == 1) {
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

static void attend_item(void *context, int64_t number) {
    const attention *a = context;
    const cache *kv = a->kv;
    static __thread workspace *kept;
    if (!kept && !(kept = aligned_alloc(64, (sizeof *kept + 63) / 64 * 64))) abort();
    workspace *s = kept;
    const int32_t *item = a->items + 5 * number;
    const int64_t segment = item[0], head = item[1], heads = item[2], first = item[3], queries = item[4];
    const int64_t query = a->qo_indptr[segment] + first, per_query = heads * kv->group, rows = queries * per_query;
    const int64_t pages = a->kv_indptr[segment + 1] - a->kv_indptr[segment];
    const int64_t length = (pages - 1) * kv->page_tokens + a->kv_last_page_len[segment];
    const int64_t position = length - (a->qo_indptr[segment + 1] - a->qo_indptr[segment]) + first;
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = row / per_query;
        s->queries[row] = a->q + (query + at) * a->q_stride + (head * kv->group + row % per_query) * kv->head_dim;
        s->to[row] = position + at + 1;
        s->from[row] = a->window && s->to[row] > a->window ? s->to[row] - a->window : 0;
        s->largest[row] = -INFINITY;
        s->total[row] = 0;
    }
    memset(s->values, 0, (size_t)(rows * kv->head_dim) * sizeof(float));
    const int32_t *table = a->kv_indices + a->kv_indptr[segment];
    if (kv->kind == FLOAT) attend_rows(a, s, table, head, rows, queries, FLOAT);
    else if (kv->kind == HALF) attend_rows(a, s, table, head, rows, queries, HALF);
    else attend_rows(a, s, table, head, rows, queries, BFLOAT);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t at = (query + row / per_query) * kv->kv_heads * kv->group + head * kv->group + row % per_query;
        vec share = v_all(1.0f / s->total[row]);
        for (int64_t d = 0; d < kv->head_dim; d += LANES)
            v_store(a->out + at * kv->head_dim + d, v_mul(v_load(s->values + row * kv->head_dim + d), share));
    }
}
