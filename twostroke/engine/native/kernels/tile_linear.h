// x times a matrix for many tokens on tiles.
#pragma once
#include "matrix.h"
#include "pool.h"
#include "tiles.h"

#ifdef HAS_TILES
#define STRIPS 4  // of an item
#define STEP_BYTES(parts) ((parts) * 2 * TILE_BYTES + 64)  // of a strip; one line more, or steps would share cache sets
#define INPUT_BYTES (3 << 19)  // packed inputs of one pass; they and a strip of weights share the second-level cache

typedef struct {
    product of;
    int64_t steps, parts;  // tiles along the columns; parts of a weight
    char *inputs;          // [token blocks][steps][INPUT_PARTS] tiles
} tile_product;

static void pack_item(void *context, int64_t block) {
    const tile_product *p = context;
    const int64_t token = block * TILE, left = p->of.tokens - token;
    char *to = p->inputs + block * p->steps * INPUT_PARTS * TILE_BYTES;
    pack_vectors(p->of.x + token * p->of.x_stride, p->of.x_stride, left < TILE ? left : TILE, p->of.w->columns, to);
}

// One row's 32 numbers from column `at`, as parts; columns and rows beyond the matrix are zeros.
static inline __attribute__((always_inline)) void unpack(
    const matrix *w, const char *row, int64_t at, int64_t inside, const int64_t kind, const int64_t parts, __m512i *split_row) {
    if (!inside) {
        for (int64_t part = 0; part < parts; part++) split_row[part] = _mm512_setzero_si512();
    } else if (at + DEPTH <= w->columns) {
        split(v_load_value(row, at, kind), v_load_value(row, at + LANES, kind), parts, split_row);
    } else {
        float rest[DEPTH] = {0};
        for (int64_t k = at; k < w->columns; k++) rest[k - at] = load_value(row, k, kind);
        split(v_load(rest), v_load(rest + LANES), parts, split_row);
    }
}

// A strip being unpacked: 16 rows from `first` and 16 from `second`, to [steps][parts][2] tiles whose rows are rows of the
// matrix. The two lie far apart: the processor's prefetcher keeps up with two long streams better than with one.
typedef struct {
    int64_t first, second, row, step;
    char *strip;
} unpacking;

// Unpack the next 32 columns of `count` rows of each half.
static inline __attribute__((always_inline)) void unpack_some(
    const tile_product *p, unpacking *u, int64_t count, const int64_t kind, const int64_t parts) {
    for (; count > 0 && u->row < TILE; count--) {
        for (int j = 0; j < 2; j++) {
            const int64_t row = (j ? u->second : u->first) + u->row;
            const char *from = matrix_row(p->of.w, row, kind);
            char *to = u->strip + u->step * STEP_BYTES(parts) + j * TILE_BYTES + u->row * 64;
            __m512i split_row[2];
            _mm_prefetch(from + u->step * DEPTH * value_bytes(kind) + AHEAD, _MM_HINT_T0);
            unpack(p->of.w, from, u->step * DEPTH, row < p->of.w->rows, kind, parts, split_row);
            for (int64_t part = 0; part < parts; part++) _mm512_store_si512(to + part * 2 * TILE_BYTES, split_row[part]);
        }
        if (++u->step == p->steps) u->step = 0, u->row++;
    }
}

#define MULTIPLY_ONE(sums, others, inputs)   \
    do {                                     \
        _tile_dpbf16ps(sums, 4, inputs);     \
        _tile_dpbf16ps(others, 5, inputs);   \
    } while (0)

// Products with one block of tokens, in two sums each, since one could not take them as fast as they come: tiles 0 and 1, 2 and 3.
static inline __attribute__((always_inline)) void multiply_one(const char *weights, const char *first, const int64_t parts) {
    LOAD_WEIGHTS(0);
    _tile_loadd(6, first + TILE_BYTES, 64);
    MULTIPLY_ONE(0, 1, 6);
    _tile_loadd(7, first, 64);
    MULTIPLY_ONE(2, 3, 7);
    if (parts == 2) {
        LOAD_WEIGHTS(1);
        MULTIPLY_ONE(0, 1, 7);
    }
}

// Multiply a strip with 16 tokens, or 32 when there is a `second` block, to [2 token blocks][2 halves] tiles of `sums`.
// Meanwhile the next strip is unpacked, on the units that tiles leave idle.
static inline __attribute__((always_inline)) void multiply_strip(
    const tile_product *p, const char *weights, const char *first, const char *second, float *sums, unpacking *next,
    const int64_t kind, const int64_t parts) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < p->steps; step++, weights += STEP_BYTES(parts), first += INPUT_PARTS * TILE_BYTES) {
        if (second) multiply_two(weights, first, second + step * INPUT_PARTS * TILE_BYTES, parts);
        else multiply_one(weights, first, parts);
        unpack_some(p, next, TILE, kind, parts);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
    if (!second)
        for (int i = 0; i < 512; i += LANES) v_store(sums + i, v_add(v_load(sums + i), v_load(sums + 512 + i)));
}

// One tile of sums, rows of the matrix by tokens, goes to where tokens are rows.
static void write_tile(const tile_product *p, const float *sums, int64_t row, int64_t token) {
    int64_t rows = p->of.w->rows - row < TILE ? p->of.w->rows - row : TILE;
    int64_t tokens = p->of.tokens - token < TILE ? p->of.tokens - token : TILE;
    if (rows <= 0 || tokens <= 0) return;
    __m512i turned[TILE];
    __mmask16 mask = (__mmask16)((1u << rows) - 1);
    for (int i = 0; i < TILE; i++) turned[i] = _mm512_load_si512(sums + i * TILE);
    v_transpose((vec *)turned);
    vec scales = p->of.w->scales ? _mm512_maskz_loadu_ps(mask, p->of.w->scales + row) : v_all(1.0f);
    vec bias = p->of.w->bias ? _mm512_maskz_loadu_ps(mask, p->of.w->bias + row) : v_zero();
    for (int64_t i = 0; i < tokens; i++) {
        float *to = p->of.out + (token + i) * p->of.out_stride + row;
        vec result = v_fma(_mm512_castsi512_ps(turned[i]), scales, bias);
        if (p->of.add) result = v_add(result, _mm512_maskz_loadu_ps(mask, to));
        _mm512_mask_storeu_ps(to, mask, result);
    }
}

static int64_t strips(const matrix *w) { return (w->rows + 2 * TILE - 1) / (2 * TILE); }

// Multiply strips from `begin` up to `end` with all tokens.
static inline __attribute__((always_inline)) void multiply_strips(
    const tile_product *p, int64_t begin, int64_t end, char *buffers, const int64_t kind, const int64_t parts) {
    float sums[4 * TILE * TILE] __attribute__((aligned(64)));
    const int64_t block_bytes = p->steps * INPUT_PARTS * TILE_BYTES, strip_bytes = p->steps * STEP_BYTES(parts);
    unpacking next = {begin * TILE, (strips(p->of.w) + begin) * TILE, 0, 0, buffers};
    unpack_some(p, &next, TILE * p->steps, kind, parts);
    for (int64_t number = begin; number < end; number++) {
        const int64_t first = next.first, second = next.second;
        const char *strip = next.strip;
        const int64_t left = number + 1 < end ? 0 : TILE;  // after the last one there is nothing to unpack
        next = (unpacking){first + TILE, second + TILE, left, 0, buffers + (number + 1 - begin) % 2 * strip_bytes};
        WRITTEN;
        for (int64_t token = 0; token < p->of.tokens; token += 2 * TILE) {
            const char *inputs = p->inputs + token / TILE * block_bytes;
            const char *beside = token + TILE < p->of.tokens ? inputs + block_bytes : NULL;
            multiply_strip(p, strip, inputs, beside, sums, &next, kind, parts);
            for (int tile = 0; tile < 4; tile++)
                write_tile(p, sums + tile * TILE * TILE, tile % 2 ? second : first, token + tile / 2 * TILE);
        }
    }
}

static void strips_item(void *context, int64_t item) {
    const tile_product *p = context;
    char *buffers = scratch(WEIGHTS, (size_t)(2 * p->steps * STEP_BYTES(p->parts)));
    if (!buffers) abort();
    const int64_t all = strips(p->of.w), begin = item * STRIPS, end = begin + STRIPS < all ? begin + STRIPS : all;
    tiles_configure();
    if (p->of.w->kind == HALF) multiply_strips(p, begin, end, buffers, HALF, 2);
    else if (p->of.w->kind == BFLOAT) multiply_strips(p, begin, end, buffers, BFLOAT, 1);
    else multiply_strips(p, begin, end, buffers, INT8, 1);
    _tile_release();
}

static void tile_linear(const product *of, int64_t threads) {
    tile_product p = {*of, (of->w->columns + DEPTH - 1) / DEPTH, of->w->kind == HALF ? 2 : 1, NULL};
    const int64_t block_bytes = p.steps * INPUT_PARTS * TILE_BYTES, pass = pass_tokens(INPUT_BYTES, block_bytes);
    const int64_t blocks = ((of->tokens < pass ? of->tokens : pass) + TILE - 1) / TILE;
    p.inputs = scratch(INPUTS, (size_t)(blocks * block_bytes));
    if (!p.inputs) abort();
    for (int64_t token = 0; token < of->tokens; token += pass) {
        p.of = some_tokens(of, token, token + pass);
        parallel(pack_item, &p, (p.of.tokens + TILE - 1) / TILE, threads);
        parallel(strips_item, &p, (strips(of->w) + STRIPS - 1) / STRIPS, threads);
    }
}
#endif
