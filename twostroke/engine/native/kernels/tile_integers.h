// x times an int8 matrix for many tokens on tiles of integers. Weights are multiplied as they lie in memory. Each token's numbers
// become integers of 24 bits, as parts of its largest, and these three digits of 8 bits: sums of integers are exact, so only the
// rounding to 24 bits is lost, which float32 would lose as well.
#pragma once
#include "matrix.h"
#include "pool.h"
#include "tiles.h"

#ifdef HAS_TILES
#define DIGITS 3
#define BYTES 64              // columns of the matrix that one tile spans
#define MOST_INTEGER 0x7f7f00  // with some room for rounding, every digit of it is at most 127
#define DIGIT_BYTES (1 << 20)  // packed digits of one pass
#define ITEM_ROWS 128
#define FAR (16 * TILE)  // rows of the matrix that are asked for ahead

typedef struct {
    product of;
    int64_t steps;
    char *inputs;   // [token blocks][DIGITS][steps] tiles whose rows are four columns and whose columns are tokens
    float *scales;  // [tokens, rounded up]: what a token's integers are to be multiplied by
} integer_product;

// Sums of more columns could exceed 32 bits: a digit times a weight is 128 * 127 at most.
static int fits_integers(const matrix *w) {
    return w->kind == INT8 && w->columns % BYTES == 0 && w->columns <= 1 << 17 && w->rows % (2 * TILE) == 0;
}

// Sixty-four numbers as digits: the byte i of each integer is digit i plus 128.
static inline __attribute__((always_inline)) void split_digits(const float *x, vec factor, __m512i *digits) {
    const __m512i offset = _mm512_set1_epi32(0x808080);
    __m128i bytes[DIGITS][4];
    for (int i = 0; i < 4; i++) {
        const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(v_mul(v_load(x + i * LANES), factor)), offset);
        bytes[0][i] = _mm512_cvtepi32_epi8(whole);
        bytes[1][i] = _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8));
        bytes[2][i] = _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 16));
    }
    for (int digit = 0; digit < DIGITS; digit++)
        digits[digit] = _mm512_xor_si512(_mm512_loadu_si512(bytes[digit]), _mm512_set1_epi8((char)0x80));
}

// The largest magnitude of a token; one that is no number stays none.
static inline float magnitude(const float *x, int64_t count) {
    vec most = v_zero(), sum = v_zero();
    for (int64_t k = 0; k < count; k += LANES) {
        most = v_max(_mm512_abs_ps(v_load(x + k)), most);
        sum = v_fma(v_load(x + k), v_zero(), sum);
    }
    return v_largest(most) + v_sum(sum);
}

static void digits_item(void *context, int64_t block) {
    const integer_product *p = context;
    char *to = p->inputs + block * DIGITS * p->steps * TILE_BYTES;
    vec factors[TILE];
    for (int64_t i = 0; i < TILE; i++) {
        const int64_t token = block * TILE + i;
        const float largest = token < p->of.tokens ? magnitude(p->of.x + token * p->of.x_stride, p->of.w->columns) : 0;
        p->scales[token] = largest / MOST_INTEGER;
        factors[i] = v_all(largest > 1e-30f ? MOST_INTEGER / largest : 0.0f);
    }
    for (int64_t step = 0; step < p->steps; step++, to += TILE_BYTES) {
        __m512i rows[DIGITS][TILE];
        for (int64_t i = 0; i < TILE; i++) {
            const int64_t token = block * TILE + i;
            __m512i digits[DIGITS] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
            if (token < p->of.tokens) split_digits(p->of.x + token * p->of.x_stride + step * BYTES, factors[i], digits);
            for (int digit = 0; digit < DIGITS; digit++) rows[digit][i] = digits[digit];
        }
        for (int digit = 0; digit < DIGITS; digit++) {
            v_transpose((vec *)rows[digit]);
            for (int i = 0; i < TILE; i++) _mm512_store_si512(to + digit * p->steps * TILE_BYTES + i * 64, rows[digit][i]);
        }
    }
}

// Ask for a part of a strip to come: its 32 rows lie one after the other.
static inline __attribute__((always_inline)) void ask_for(const char *next, int64_t step) {
    for (int i = 0; i < 2 * TILE; i++) _mm_prefetch(next + step * 2 * TILE * BYTES + i * BYTES, _MM_HINT_T1);
}

// A strip of 32 rows times one block of tokens, all digits at once: [DIGITS][2] tiles of sums.
static inline __attribute__((always_inline)) void integers_one(
    const integer_product *p, const char *rows, const char *inputs, const char *next, int32_t *sums) {
    const int64_t digit = p->steps * TILE_BYTES, columns = p->of.w->columns;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    for (int64_t step = 0; step < p->steps; step++, rows += BYTES, inputs += TILE_BYTES) {
        if (next) ask_for(next, step);
        _tile_loadd(7, inputs, 64);
        _tile_loadd(6, rows, columns);
        _tile_dpbssd(0, 6, 7);
        _tile_loadd(7, inputs + digit, 64);
        _tile_dpbssd(2, 6, 7);
        _tile_loadd(7, inputs + 2 * digit, 64);
        _tile_dpbssd(4, 6, 7);
        _tile_loadd(6, rows + TILE * columns, columns);
        _tile_dpbssd(5, 6, 7);
        _tile_loadd(7, inputs + digit, 64);
        _tile_dpbssd(3, 6, 7);
        _tile_loadd(7, inputs, 64);
        _tile_dpbssd(1, 6, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
    _tile_stored(4, sums + 1024, 64);
    _tile_stored(5, sums + 1280, 64);
}

// The same for two blocks, digit by digit: [2 blocks][DIGITS][2] tiles of sums.
static inline __attribute__((always_inline)) void integers_two(
    const integer_product *p, const char *rows, const char *first, const char *second, const char *next, int32_t *sums) {
    const int64_t columns = p->of.w->columns;
    for (int digit = 0; digit < DIGITS; digit++, sums += 512) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t step = 0; step < p->steps; step++, first += TILE_BYTES, second += TILE_BYTES) {
            if (next && digit == 0) ask_for(next, step);
            _tile_loadd(4, rows + step * BYTES, columns);
            _tile_loadd(5, rows + step * BYTES + TILE * columns, columns);
            _tile_loadd(6, first, 64);
            _tile_loadd(7, second, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 5, 6);
            _tile_dpbssd(2, 4, 7);
            _tile_dpbssd(3, 5, 7);
        }
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + 256, 64);
        _tile_stored(2, sums + 1536, 64);
        _tile_stored(3, sums + 1792, 64);
    }
}

// Put the digits of a tile of sums together; rows of the matrix by tokens go to where tokens are rows.
static void write_integers(const integer_product *p, const int32_t *sums, int64_t row, int64_t token) {
    const int64_t tokens = p->of.tokens - token < TILE ? p->of.tokens - token : TILE;
    const vec scales = v_load(p->scales + token), weights = v_load(p->of.w->scales + row);
    const vec bias = p->of.w->bias ? v_load(p->of.w->bias + row) : v_zero();
    vec square[TILE];
    for (int i = 0; i < TILE; i++) {
        vec sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums + 1024 + i * TILE));
        sum = v_fma(sum, v_all(256.0f), _mm512_cvtepi32_ps(_mm512_load_si512(sums + 512 + i * TILE)));
        sum = v_fma(sum, v_all(256.0f), _mm512_cvtepi32_ps(_mm512_load_si512(sums + i * TILE)));
        square[i] = v_mul(sum, scales);
    }
    v_transpose(square);
    for (int64_t i = 0; i < tokens; i++) {
        float *to = p->of.out + (token + i) * p->of.out_stride + row;
        const vec result = v_fma(square[i], weights, bias);
        v_store(to, p->of.add ? v_add(result, v_load(to)) : result);
    }
}

// Multiply the strip of 32 rows from `row` with all tokens.
static void multiply_integers(const integer_product *p, int64_t row, int32_t *sums) {
    const int64_t block_bytes = DIGITS * p->steps * TILE_BYTES, far = row + FAR;
    const char *rows = matrix_row(p->of.w, row, INT8), *next = far < p->of.w->rows ? matrix_row(p->of.w, far, INT8) : NULL;
    for (int64_t token = 0; token < p->of.tokens; token += 2 * TILE, next = NULL) {
        const char *inputs = p->inputs + token / TILE * block_bytes;
        const int two = token + TILE < p->of.tokens;
        if (two) integers_two(p, rows, inputs, inputs + block_bytes, next, sums);
        else integers_one(p, rows, inputs, next, sums);
        WRITTEN;
        for (int i = 0; i < 2 + 2 * two; i++)
            write_integers(p, sums + i / 2 * 1536 + i % 2 * 256, row + i % 2 * TILE, token + i / 2 * TILE);
    }
}

static void integers_item(void *context, int64_t item) {
    const integer_product *p = context;
    int32_t sums[4 * DIGITS * TILE * TILE] __attribute__((aligned(64)));
    const int64_t first = item * ITEM_ROWS, last = first + ITEM_ROWS < p->of.w->rows ? first + ITEM_ROWS : p->of.w->rows;
    tiles_configure();
    for (int64_t row = first; row < last; row += 2 * TILE) multiply_integers(p, row, sums);
    _tile_release();
}

static void integer_linear(const product *of, int64_t threads) {
    integer_product p = {*of, of->w->columns / BYTES, NULL, NULL};
    const int64_t block_bytes = DIGITS * p.steps * TILE_BYTES, pass = pass_tokens(DIGIT_BYTES, block_bytes);
    const int64_t blocks = ((of->tokens < pass ? of->tokens : pass) + TILE - 1) / TILE;
    p.inputs = scratch(INPUTS, (size_t)(blocks * (block_bytes + TILE * 4)));
    if (!p.inputs) abort();
    p.scales = (float *)(p.inputs + blocks * block_bytes);
    for (int64_t token = 0; token < of->tokens; token += pass) {
        p.of = some_tokens(of, token, token + pass);
        parallel(digits_item, &p, (p.of.tokens + TILE - 1) / TILE, threads);
        parallel(integers_item, &p, (of->w->rows + ITEM_ROWS - 1) / ITEM_ROWS, threads);
    }
}
#endif
