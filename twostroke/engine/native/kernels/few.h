// x times a matrix for few tokens: bound by reading the weights, so each is read once and turned into float32 on the fly.
#pragma once
#include "matrix.h"
#include "pool.h"

#define FEW 4  // tokens of one pass over the weights
#define SIDE 4  // rows of the matrix side by side

typedef struct {
    product of;
    int64_t item_rows;  // of the matrix, in one item of a parallel region
} few_product;

// Sums of `side` rows, `apart` from each other, with `few` tokens; `side` and `few` are constants where this is inlined.
static inline __attribute__((always_inline)) void few_block(
    const few_product *p, int64_t row, int64_t apart, int64_t token, const int side, const int few, const int64_t kind) {
    const int64_t columns = p->of.w->columns, line = 64 / value_bytes(kind);
    const char *weights[SIDE];
    const float *x[FEW];
    vec sums[SIDE][FEW];
    for (int i = 0; i < side; i++) weights[i] = matrix_row(p->of.w, row + i * apart, kind);
    for (int j = 0; j < few; j++) x[j] = p->of.x + (token + j) * p->of.x_stride;
    for (int i = 0; i < side; i++)
        for (int j = 0; j < few; j++) sums[i][j] = v_zero();
    int64_t k = 0;
    for (; k + line <= columns; k += line) {
        for (int i = 0; i < side; i++) _mm_prefetch(weights[i] + k * value_bytes(kind) + AHEAD, _MM_HINT_T0);
        for (int64_t at = k; at < k + line; at += LANES) {
            vec inputs[FEW];
            for (int j = 0; j < few; j++) inputs[j] = v_load(x[j] + at);
            for (int i = 0; i < side; i++) {
                vec value = v_load_value(weights[i], at, kind);
                for (int j = 0; j < few; j++) sums[i][j] = v_fma(value, inputs[j], sums[i][j]);
            }
        }
    }
    for (int i = 0; i < side; i++)
        for (int j = 0; j < few; j++) {
            float sum = v_sum(sums[i][j]);
            for (int64_t rest = k; rest < columns; rest++) sum += load_value(weights[i], rest, kind) * x[j][rest];
            int64_t at = row + i * apart;
            float *to = p->of.out + (token + j) * p->of.out_stride + at;
            *to = finished(p->of.w, at, sum, *to, p->of.add);
        }
}

static inline __attribute__((always_inline)) void few_tokens(
    const few_product *p, int64_t row, int64_t apart, const int side, const int64_t kind) {
    int64_t token = 0;
    for (; token + 4 <= p->of.tokens; token += 4) few_block(p, row, apart, token, side, 4, kind);
    if (p->of.tokens - token == 3) few_block(p, row, apart, token, side, 3, kind);
    if (p->of.tokens - token == 2) few_block(p, row, apart, token, side, 2, kind);
    if (p->of.tokens - token == 1) few_block(p, row, apart, token, side, 1, kind);
}

// Side by side go rows far apart: the processor's prefetcher follows a few long streams better than many short ones.
static inline __attribute__((always_inline)) void few_rows(
    const few_product *p, int64_t first, int64_t last, const int64_t kind) {
    int64_t apart = (last - first) / SIDE, row = first;
    for (; row < first + apart; row++) few_tokens(p, row, apart, SIDE, kind);
    for (row = first + SIDE * apart; row < last; row++) few_tokens(p, row, 1, 1, kind);
}

static void few_item(void *context, int64_t item) {
    const few_product *p = context;
    int64_t first = item * p->item_rows, last = first + p->item_rows;
    if (last > p->of.w->rows) last = p->of.w->rows;
    if (p->of.w->kind == HALF) few_rows(p, first, last, HALF);
    else if (p->of.w->kind == BFLOAT) few_rows(p, first, last, BFLOAT);
    else few_rows(p, first, last, INT8);
}

static void few_linear(const product *of, int64_t threads) {
    // Items large enough that taking one costs nothing, several for each thread so that they end together.
    const int64_t rows = threads > 1 ? of->w->rows / (4 * threads) / SIDE * SIDE : of->w->rows;
    few_product p = {*of, rows < SIDE ? SIDE : rows};
    parallel(few_item, &p, (of->w->rows + p.item_rows - 1) / p.item_rows, threads);
}
