// Attention of many queries on tiles. Scores are turned, [tokens, rows], so that a softmax over tokens needs no sums across a
// register, and weights are where the product with the values wants them; so are the sums, [head_dim, rows].
#pragma once
#include "paged.h"
#include "tiles.h"

#ifdef HAS_TILES
#include <stdlib.h>

#define PAIR (2 * TILE)  // rows that are multiplied together
#define MOST_STEPS (MOST_DIM / DEPTH)

typedef struct {
    char queries[MOST_ROWS / TILE][MOST_STEPS][INPUT_PARTS][TILE_BYTES];  // rows are pairs of dimensions
    char keys[BLOCK / PAIR][MOST_STEPS][2][2][TILE_BYTES];                // strips: rows are tokens
    char values[MOST_DIM / PAIR][BLOCK / DEPTH][2][2][TILE_BYTES];        // strips: rows are dimensions
    char weights[2][BLOCK / DEPTH][INPUT_PARTS][TILE_BYTES];              // of a pair; rows are pairs of tokens
    float scores[2][BLOCK][TILE];
    float sums[MOST_ROWS / TILE][MOST_DIM][TILE];
    float largest[MOST_ROWS], total[MOST_ROWS];
    int32_t from[MOST_ROWS], to[MOST_ROWS];  // tokens that a row sees
} tile_workspace;

// Queries, scaled so that weights are powers of two, turned and split; rows that are missing see nothing.
static void prepare_rows(const attention *a, const piece *p, tile_workspace *s, int64_t blocks) {
    const int64_t head_dim = a->kv->head_dim;
    const float scale = a->kv->scale * 1.44269504088896341f;
    float scaled[TILE][MOST_DIM];
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * TILE, left = p->rows - first, count = left < TILE ? left < 0 ? 0 : left : TILE;
        for (int64_t i = 0; i < TILE; i++) {
            s->largest[first + i] = -INFINITY;
            s->total[first + i] = 0;
            s->from[first + i] = i < count ? (int32_t)row_first(a, p, first + i) : 0;
            s->to[first + i] = i < count ? (int32_t)row_end(p, first + i) : 0;
            if (i >= count) continue;
            const float *from = row_numbers(a, p, first + i);
            for (int64_t d = 0; d < head_dim; d += LANES) v_store(scaled[i] + d, v_mul(v_load(from + d), v_all(scale)));
        }
        pack_vectors(scaled[0], MOST_DIM, count, head_dim, s->queries[block][0][0]);
        memset(s->sums[block], 0, (size_t)(head_dim + TILE) / PAIR * PAIR * TILE * sizeof(float));
    }
}

// A block's keys as strips; tokens beyond `count` and dimensions beyond the head are zeros.
static inline __attribute__((always_inline)) void unpack_keys(
    const attention *a, const piece *p, tile_workspace *s, int64_t start, int64_t count, const int64_t kind, const int64_t parts) {
    const int64_t head_dim = a->kv->head_dim;
    for (int64_t token = 0; token < BLOCK; token++) {
        const char *row = token < count ? token_row(a, p->pages, start + token, p->head, 0) : NULL;
        for (int64_t d = 0; d < head_dim; d += DEPTH) {
            __m512i split_row[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
            vec high = row && d + LANES < head_dim ? v_load_value(row, d + LANES, kind) : v_zero();
            if (row) split(v_load_value(row, d, kind), high, parts, split_row);
            for (int64_t part = 0; part < parts; part++)
                _mm512_store_si512(s->keys[token / PAIR][d / DEPTH][part][token / TILE % 2] + token % TILE * 64, split_row[part]);
        }
    }
}

// Two numbers' upper halves, side by side.
static inline __m512i beside(vec a, vec b) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a), 16), _mm512_and_si512(_mm512_castps_si512(b), upper));
}

// A block's values as strips, turned: pairs of tokens lie side by side.
static inline __attribute__((always_inline)) void unpack_values(
    const attention *a, const piece *p, tile_workspace *s, int64_t start, int64_t count, const int64_t kind, const int64_t parts) {
    const char *rows[BLOCK];
    for (int64_t token = 0; token < count; token++) rows[token] = token_row(a, p->pages, start + token, p->head, 1);
    for (int64_t d = 0; d < a->kv->head_dim; d += TILE)
        for (int64_t step = 0; step < BLOCK / DEPTH; step++) {
            __m512i square[2][TILE];
            for (int64_t i = 0; i < TILE; i++) {
                const int64_t token = step * DEPTH + 2 * i;
                vec first = token < count ? v_load_value(rows[token], d, kind) : v_zero();
                vec second = token + 1 < count ? v_load_value(rows[token + 1], d, kind) : v_zero();
                vec f = parts == 2 ? v_upper(first) : first, g = parts == 2 ? v_upper(second) : second;
                square[0][i] = beside(f, g);
                square[1][i] = beside(v_upper(v_sub(first, f)), v_upper(v_sub(second, g)));
            }
            for (int64_t part = 0; part < parts; part++) {
                v_transpose((vec *)square[part]);
                for (int64_t i = 0; i < TILE; i++)
                    _mm512_store_si512(s->values[d / PAIR][step][part][d / TILE % 2] + i * 64, square[part][i]);
            }
        }
}

static inline void store_sums(float *first, float *second) {
    _tile_stored(0, first, 64);
    _tile_stored(1, first + TILE * TILE, 64);
    _tile_stored(2, second, 64);
    _tile_stored(3, second + TILE * TILE, 64);
}

// Scores of two blocks of rows, from `block`, for a block of tokens.
static inline __attribute__((always_inline)) void score_pair(tile_workspace *s, int64_t block, int64_t steps, const int64_t parts) {
    for (int64_t tokens = 0; tokens < BLOCK / PAIR; tokens++) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t step = 0; step < steps; step++)
            multiply_two(s->keys[tokens][step][0][0], s->queries[block][step][0], s->queries[block + 1][step][0], parts);
        store_sums(s->scores[0][tokens * PAIR], s->scores[1][tokens * PAIR]);
    }
}

// Scores that a row may not see become -inf.
static void hide(tile_workspace *s, int64_t block, int64_t side, int64_t start) {
    const __m512i from = _mm512_loadu_si512(s->from + block * TILE), to = _mm512_loadu_si512(s->to + block * TILE);
    for (int64_t i = 0; i < BLOCK; i++) {
        const __m512i token = _mm512_set1_epi32((int)(start + i));
        const __mmask16 seen = _mm512_cmpge_epi32_mask(token, from) & _mm512_cmplt_epi32_mask(token, to);
        v_store(s->scores[side][i], _mm512_mask_mov_ps(v_all(-INFINITY), seen, v_load(s->scores[side][i])));
    }
}

// Turn scores into weights, packed in parts; older sums shrink to the new scale.
static void weigh_block(tile_workspace *s, int64_t block, int64_t side, int64_t head_dim) {
    const float(*scores)[TILE] = s->scores[side];
    const vec before = v_load(s->largest + block * TILE);
    vec largest = before, total = v_zero();
    for (int64_t i = 0; i < BLOCK; i++) largest = v_max(v_load(scores[i]), largest);
    // A row that has seen nothing so far keeps zeros.
    const __mmask16 seen = _mm512_cmp_ps_mask(largest, v_all(-INFINITY), _CMP_NEQ_UQ);
    const vec shift = _mm512_maskz_mov_ps(seen, largest), shrink = v_exp2(v_sub(before, shift));
    for (int64_t i = 0; i < BLOCK; i += 2) {
        const vec first = v_exp2(v_sub(v_load(scores[i]), shift)), second = v_exp2(v_sub(v_load(scores[i + 1]), shift));
        const vec f = v_upper(first), g = v_upper(second);
        char(*to)[TILE_BYTES] = s->weights[side][i / DEPTH];
        total = v_add(total, v_add(first, second));
        _mm512_store_si512(to[0] + i % DEPTH * 32, beside(f, g));
        _mm512_store_si512(to[1] + i % DEPTH * 32, beside(v_upper(v_sub(first, f)), v_upper(v_sub(second, g))));
    }
    v_store(s->total + block * TILE, v_fma(v_load(s->total + block * TILE), shrink, total));
    if (!_mm512_cmp_ps_mask(largest, before, _CMP_NEQ_UQ)) return;
    v_store(s->largest + block * TILE, largest);
    for (int64_t d = 0; d < head_dim; d++) v_store(s->sums[block][d], v_mul(v_load(s->sums[block][d]), shrink));
}

static inline __attribute__((always_inline)) void add_pair(tile_workspace *s, int64_t block, int64_t head_dim, const int64_t parts) {
    for (int64_t d = 0; d < head_dim; d += PAIR) {
        float *first = s->sums[block][d], *second = s->sums[block + 1][d];
        _tile_loadd(0, first, 64);
        _tile_loadd(1, first + TILE * TILE, 64);
        _tile_loadd(2, second, 64);
        _tile_loadd(3, second + TILE * TILE, 64);
        for (int64_t step = 0; step < BLOCK / DEPTH; step++)
            multiply_two(s->values[d / PAIR][step][0][0], s->weights[0][step][0], s->weights[1][step][0], parts);
        store_sums(first, second);
    }
}

static inline __attribute__((always_inline)) void attend_blocks(
    const attention *a, const piece *p, tile_workspace *s, int64_t blocks, const int64_t kind, const int64_t parts) {
    const int64_t head_dim = a->kv->head_dim, steps = (head_dim + DEPTH - 1) / DEPTH, end = row_end(p, p->rows - 1);
    for (int64_t start = row_first(a, p, 0); start < end; start += BLOCK) {
        const int64_t count = end - start < BLOCK ? end - start : BLOCK;
        unpack_keys(a, p, s, start, count, kind, parts);
        unpack_values(a, p, s, start, count, kind, parts);
        for (int64_t block = 0; block < blocks; block += 2) {
            const int64_t first = block * TILE, last = first + PAIR < p->rows ? first + PAIR - 1 : p->rows - 1;
            if (s->to[last] <= start || s->from[first] >= start + BLOCK) continue;
            WRITTEN;
            score_pair(s, block, steps, parts);
            WRITTEN;
            for (int64_t side = 0; side < 2; side++) {
                if (s->from[last] > start || s->to[first] < start + BLOCK || first + PAIR > p->rows) hide(s, block + side, side, start);
                weigh_block(s, block + side, side, head_dim);
            }
            WRITTEN;
            add_pair(s, block, head_dim, parts);
        }
    }
    WRITTEN;
}

// Attend the rows of a piece on tiles.
static void attend_on_tiles(const attention *a, const piece *p) {
    static __thread tile_workspace *kept;
    if (!kept) {
        if (!(kept = aligned_alloc(64, (sizeof *kept + 63) / 64 * 64))) abort();
        memset(kept, 0, sizeof *kept);  // strips beyond an odd number of dimensions stay zeros
    }
    tile_workspace *s = kept;
    const int64_t head_dim = a->kv->head_dim, blocks = (p->rows + PAIR - 1) / PAIR * 2;
    prepare_rows(a, p, s, blocks);
    tiles_configure();
    if (a->kv->kind == FLOAT) attend_blocks(a, p, s, blocks, FLOAT, 2);
    else if (a->kv->kind == HALF) attend_blocks(a, p, s, blocks, HALF, 2);
    else attend_blocks(a, p, s, blocks, BFLOAT, 1);
    _tile_release();
    for (int64_t block = 0; block * TILE < p->rows; block++) {
        const vec share = v_div(v_all(1.0f), v_load(s->total + block * TILE));
        for (int64_t d = 0; d < head_dim; d += TILE) {
            vec square[TILE];
            for (int64_t i = 0; i < TILE; i++) square[i] = v_mul(v_load(s->sums[block][d + i]), share);
            v_transpose(square);
            for (int64_t i = 0; i < TILE && block * TILE + i < p->rows; i++)
                v_store(row_out(a, p, block * TILE + i) + d, square[i]);
        }
    }
}
#endif
