// Pages of keys and values, and the pieces into which attention over them is cut.
#pragma once
#include "matrix.h"

#define BLOCK 64       // tokens that are scored at once
#define MOST_ROWS 256  // queries times heads of one item
#define MOST_DIM 256
#define SPAN 256       // tokens of a part, where a single query's context is cut

typedef struct {
    char *pages;
    int64_t page_bytes, page_tokens, kv_heads, group, head_dim, kind;
    float scale;
} cache;

typedef struct {
    const cache *kv;
    const int64_t *slot_page, *slot_offset;  // where each token's key and value go
    const int32_t *qo_indptr, *kv_indptr, *kv_indices, *kv_last_page_len;
    const int32_t *items;  // [n, 7]: segment, first key-value head, heads, first query of the segment, queries, first token, slot
    const int32_t *merges;  // [m, 5]: query of all, first key-value head, heads, first slot, slots
    int64_t item_count, merge_count;
    float *partial;  // [slots, rows of an item, head_dim + 2]: weighted values, their largest score, the sum of weights
    int64_t tiles;   // whether many queries may go to tiles, which keep 16 bits of a number
    // What differs from layer to layer.
    int64_t layer;
    int64_t window;  // how many of the latest tokens a query sees; 0 is all
    const float *q;
    int64_t q_stride;
    float *out;  // [T, heads, head_dim]
} attention;

static inline const char *token_row(const attention *a, const int32_t *pages, int64_t token, int64_t head, int64_t part) {
    const cache *kv = a->kv;
    int64_t row = ((a->layer * 2 + part) * kv->page_tokens + token % kv->page_tokens) * kv->kv_heads + head;
    return kv->pages + pages[token / kv->page_tokens] * kv->page_bytes + row * kv->head_dim * value_bytes(kv->kind);
}

// Write a token's keys or values. What 16 bits cannot hold becomes NaN: an infinite key could leave a score of -inf, a token that
// is silently passed over.
static void append_row(const cache *kv, int64_t layer, int64_t part, int64_t page, int64_t offset, const float *from) {
    const int64_t numbers = kv->kv_heads * kv->head_dim;
    const int64_t row = (layer * 2 + part) * kv->page_tokens + offset;
    char *to = kv->pages + page * kv->page_bytes + row * numbers * value_bytes(kv->kind);
    if (kv->kind == FLOAT) memcpy(to, from, (size_t)numbers * sizeof(float));
    else if (kv->kind == HALF)  // heads are whole registers
        for (int64_t i = 0; i < numbers; i += LANES) v_store_half((uint16_t *)to + i, v_load(from + i));
    else
        for (int64_t i = 0; i < numbers; i++) {
            const uint16_t bits = to_bfloat(from[i]);
            ((uint16_t *)to)[i] = (bits & 0x7f80) == 0x7f80 ? 0x7fc0 : bits;
        }
}

// An item: rows are its queries, each with the heads that share its key-value heads.
typedef struct {
    const int32_t *pages;
    int64_t head, query, queries;  // first key-value head; first query, of all
    int64_t per_query, rows;
    int64_t position;  // of the first query in its context
    int64_t begin, end;  // tokens that this item is about
    float *partial;      // where the results go if they are a part, else NULL
} piece;

static inline piece piece_of(const attention *a, int64_t number) {
    const int32_t *item = a->items + 7 * number;
    const int64_t segment = item[0], head = item[1], heads = item[2], first = item[3], queries = item[4], slot = item[6];
    const int64_t pages = a->kv_indptr[segment + 1] - a->kv_indptr[segment], per_query = heads * a->kv->group;
    const int64_t length = (pages - 1) * a->kv->page_tokens + a->kv_last_page_len[segment];
    return (piece){
        .pages = a->kv_indices + a->kv_indptr[segment],
        .head = head,
        .query = a->qo_indptr[segment] + first,
        .queries = queries,
        .per_query = per_query,
        .rows = queries * per_query,
        .position = length - (a->qo_indptr[segment + 1] - a->qo_indptr[segment]) + first,
        .begin = item[5],
        .end = slot < 0 ? length : item[5] + SPAN,
        .partial = slot < 0 ? NULL : a->partial + slot * per_query * (a->kv->head_dim + 2),
    };
}

// Where a row's query lies among all queries and heads: q has strides, out has none.
static inline int64_t row_query(const piece *p, int64_t row) { return p->query + row / p->per_query; }
static inline int64_t row_head(const attention *a, const piece *p, int64_t row) { return p->head * a->kv->group + row % p->per_query; }
static inline const float *row_numbers(const attention *a, const piece *p, int64_t row) {
    return a->q + row_query(p, row) * a->q_stride + row_head(a, p, row) * a->kv->head_dim;
}
static inline float *row_out(const attention *a, const piece *p, int64_t row) {
    return a->out + (row_query(p, row) * a->kv->kv_heads * a->kv->group + row_head(a, p, row)) * a->kv->head_dim;
}

// The tokens that a row sees in this item: from the first up to the end.
static inline int64_t row_end(const piece *p, int64_t row) {
    const int64_t end = p->position + row / p->per_query + 1;
    return end < p->end ? end : p->end;
}
static inline int64_t row_first(const attention *a, const piece *p, int64_t row) {
    const int64_t first = p->position + row / p->per_query + 1 - a->window;
    return a->window && first > p->begin ? first : p->begin;
}
