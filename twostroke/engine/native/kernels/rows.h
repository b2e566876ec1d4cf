// What happens between products, token by token: norms, rotations, gates.
#pragma once
#include "vector.h"

// x / sqrt(mean(x^2) + epsilon) * weight for each of `count` vectors of `size` (arXiv:1910.07467).
static void rms_norm(
    const float *x, int64_t x_stride, const float *weight, float epsilon, float *out, int64_t count, int64_t size) {
    for (int64_t i = 0; i < count; i++, x += x_stride, out += size) {
        vec squares = v_zero();
        int64_t k = 0;
        for (; k + LANES <= size; k += LANES) squares = v_fma(v_load(x + k), v_load(x + k), squares);
        float sum = v_sum(squares);
        for (int64_t rest = k; rest < size; rest++) sum += x[rest] * x[rest];
        float factor = 1.0f / sqrtf(sum / (float)size + epsilon);
        for (k = 0; k + LANES <= size; k += LANES)
            v_store(out + k, v_mul(v_mul(v_load(x + k), v_all(factor)), v_load(weight + k)));
        for (; k < size; k++) out[k] = x[k] * factor * weight[k];
    }
}

// Turn pairs (i, i + size / 2) of each head by its token's angles: cosines, then sines (arXiv:2104.09864).
static void rotate(float *heads, int64_t stride, int64_t tokens, int64_t count, int64_t size, const float *turns) {
    const int64_t half = size / 2;
    for (int64_t token = 0; token < tokens; token++, heads += stride, turns += size)
        for (int64_t head = 0; head < count; head++) {
            float *first = heads + head * size, *second = first + half;
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

// activation(gate) * up, with gate and up side by side in each token's 2 * size numbers.
static void gated(const float *gate_up, float *out, int64_t tokens, int64_t size, int64_t gelu) {
    for (int64_t token = 0; token < tokens; token++, gate_up += 2 * size, out += size) {
        int64_t k = 0;
        for (; k + LANES <= size; k += LANES)
            v_store(out + k, v_mul(activated(v_load(gate_up + k), gelu), v_load(gate_up + size + k)));
        for (; k < size; k++) {
            float lanes[LANES] = {gate_up[k]};
            v_store(lanes, activated(v_load(lanes), gelu));
            out[k] = lanes[0] * gate_up[size + k];
        }
    }
}
