// A stored matrix [rows, columns], as twostroke.engine.matrix describes it, and how its numbers become float32.
#pragma once
#include "vector.h"

#define AHEAD 1024  // bytes that are asked for early

enum { HALF, BFLOAT, INT8, FLOAT };  // kinds of number; FLOAT is for keys and values only

typedef struct {
    const void *values;   // row-major
    const float *scales;  // [rows] with INT8, else NULL
    const float *bias;    // [rows] or NULL
    int64_t rows, columns;
    int64_t kind;
} matrix;

static inline __attribute__((always_inline)) int64_t value_bytes(int64_t kind) {
    return kind == INT8 ? 1 : kind == FLOAT ? 4 : 2;
}

static inline __attribute__((always_inline)) vec v_load_value(const void *row, int64_t at, int64_t kind) {
    if (kind == HALF) return v_load_half((const uint16_t *)row + at);
    if (kind == BFLOAT) return v_load_bfloat((const uint16_t *)row + at);
    if (kind == FLOAT) return v_load((const float *)row + at);
    return v_load_int8((const int8_t *)row + at);
}

static inline __attribute__((always_inline)) float load_value(const void *row, int64_t at, int64_t kind) {
    if (kind == HALF) return from_half(((const uint16_t *)row)[at]);
    if (kind == BFLOAT) return from_bfloat(((const uint16_t *)row)[at]);
    return (float)((const int8_t *)row)[at];
}

static inline __attribute__((always_inline)) const void *matrix_row(const matrix *w, int64_t row, int64_t kind) {
    return (const char *)w->values + row * w->columns * value_bytes(kind);
}

// What is left to do with a sum: scale, bias, and whether the result replaces or joins what is there.
static inline float finished(const matrix *w, int64_t row, float sum, float before, int64_t add) {
    if (w->scales) sum *= w->scales[row];
    if (w->bias) sum += w->bias[row];
    return add ? before + sum : sum;
}

// out [tokens, rows] = x [tokens, columns] times w, plus the bias; `add` joins it to what is there. Strides count numbers.
typedef struct {
    const matrix *w;
    const float *x;
    int64_t x_stride;
    float *out;
    int64_t out_stride;
    int64_t tokens, add;
} product;

// Tokens `first` up to `last` of a product.
static inline product some_tokens(const product *whole, int64_t first, int64_t last) {
    product some = *whole;
    some.x += first * some.x_stride;
    some.out += first * some.out_stride;
    some.tokens = (last < whole->tokens ? last : whole->tokens) - first;
    return some;
}
