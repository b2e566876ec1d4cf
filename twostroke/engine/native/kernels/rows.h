// What happens between products, token by token: norms, rotations, gates.
// Many tokens are shared among threads, some ten thousand numbers at a time.
#pragma once
#include "pool.h"
#include "vector.h"

#define ITEM_NUMBERS 16384

// How many tokens of `size` numbers an item has, and how many items that makes.
static inline int64_t item_tokens(int64_t size) { return size < ITEM_NUMBERS ? ITEM_NUMBERS / size : 1; }
static inline int64_t item_count(int64_t tokens, int64_t each) { return (tokens + each - 1) / each; }
static inline int64_t item_end(int64_t item, int64_t tokens, int64_t each) {
    return (item + 1) * each < tokens ? (item + 1) * each : tokens;
}

typedef struct {
    const float *x;
    int64_t x_stride, group;
    const float *weight;
    float epsilon;
    float *out;
    int64_t count, size, each;
} norm;

// x / sqrt(mean(x^2) + epsilon) * weight for each vector (arXiv:1910.07467).
static void norm_item(void *context, int64_t item) {
    const norm *n = context;
    const int64_t size = n->size;
    for (int64_t i = item * n->each; i < item_end(item, n->count, n->each); i++) {
        const float *x = n->x + i / n->group * n->x_stride + i % n->group * size;
        float *out = n->out + i * size;
        vec squares = v_zero();
        int64_t k = 0;
        for (; k + LANES <= size; k += LANES) squares = v_fma(v_load(x + k), v_load(x + k), squares);
        float sum = v_sum(squares);
        for (int64_t rest = k; rest < size; rest++) sum += x[rest] * x[rest];
        float factor = 1.0f / sqrtf(sum / (float)size + n->epsilon);
        for (k = 0; k + LANES <= size; k += LANES)
            v_store(out + k, v_mul(v_mul(v_load(x + k), v_all(factor)), v_load(n->weight + k)));
        for (; k < size; k++) out[k] = x[k] * factor * n->weight[k];
    }
}

typedef struct {
    float *heads;  // [tokens, count, size], tokens `stride` apart
    int64_t stride, tokens, count, size;
    const float *turns;  // [tokens, size]: cosines, then sines
    int64_t each;
} rotation;

// Turn pairs (i, i + size / 2) of each head by its token's angles (arXiv:2104.09864).
static void rotate_item(void *context, int64_t item) {
    const rotation *r = context;
    const int64_t size = r->size, half = size / 2;
    for (int64_t token = item * r->each; token < item_end(item, r->tokens, r->each); token++) {
        const float *turns = r->turns + token * size;
        for (int64_t head = 0; head < r->count; head++) {
            float *first = r->heads + token * r->stride + head * size, *second = first + half;
            int64_t k = 0;
            for (; k + LANES <= half; k += LANES) {
                vec a = v_load(first + k), b = v_load(second + k), cos = v_load(turns + k), sin = v_load(turns + half + k);
                v_store(first + k, v_sub(v_mul(a, cos), v_mul(b, sin)));
                v_store(second + k, v_fma(b, cos, v_mul(a, sin)));
            }
            for (; k < half; k++) {
                float a = first[k], b = second[k];
                first[k] = a * turns[k] - b * turns[half + k];
                second[k] = b * turns[k] + a * turns[half + k];
            }
        }
    }
}

static inline vec v_sigmoid(vec a) {
    return v_div(v_all(1.0f), v_add(v_all(1.0f), v_exp(v_min(v_sub(v_zero(), a), v_all(88.0f)))));
}

// SiLU, or the tanh approximation of GELU: x * sigmoid(2 u) equals x * (1 + tanh(u)) / 2.
static inline vec activated(vec a, int64_t gelu) {
    if (!gelu) return v_mul(a, v_sigmoid(a));
    vec cube = v_mul(v_mul(a, a), a);
    vec u = v_mul(v_all(1.5957691216057308f), v_fma(cube, v_all(0.044715f), a));  // 2 sqrt(2 / pi)
    return v_mul(a, v_sigmoid(u));
}

typedef struct {
    const float *gate_up;  // [tokens, 2 * size]
    float *out;            // [tokens, size]
    int64_t tokens, size, gelu, each;
} gate;

// activation(gate) * up, with gate and up side by side.
static void gate_item(void *context, int64_t item) {
    const gate *g = context;
    const int64_t size = g->size;
    for (int64_t token = item * g->each; token < item_end(item, g->tokens, g->each); token++) {
        const float *gate_up = g->gate_up + token * 2 * size;
        float *out = g->out + token * size;
        int64_t k = 0;
        for (; k + LANES <= size; k += LANES)
            v_store(out + k, v_mul(activated(v_load(gate_up + k), g->gelu), v_load(gate_up + size + k)));
        for (; k < size; k++) {
            float lanes[LANES] = {gate_up[k]};
            v_store(lanes, activated(v_load(lanes), g->gelu));
            out[k] = lanes[0] * gate_up[size + k];
        }
    }
}
