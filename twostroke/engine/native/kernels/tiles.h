// Products on AMX tiles. Every number is split into two bfloat16 parts, and parts are multiplied with parts, summed in float32
// (arXiv:1904.06376; oneMKL calls it bf16x2). Two parts hold a float16 number exactly, a float32 number to 2^-16; a bfloat16
// or int8 number is its own only part. Products of two lesser parts are left out.
#pragma once
#include <stdlib.h>

#include "vector.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && LANES == 16
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

#define TILE 16            // rows of a tile, and its columns of 32 bits
#define DEPTH 32           // columns of the matrix that one tile spans
#define TILE_BYTES 1024
#define INPUT_PARTS 2

static int use_tiles;

// What was written so far must be in memory: GCC before 14 believes that a tile instruction reads nothing (PR 114098).
#define WRITTEN __asm__ volatile("" ::: "memory")

// Ask the kernel for the tiles' registers; without its leave they fault.
static int tiles_allowed(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

static void tiles_configure(void) {
    struct __attribute__((packed)) {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shape.bytes[tile] = 64;
        shape.rows[tile] = TILE;
    }
    WRITTEN;
    _tile_loadconfig(&shape);
}

typedef enum { WEIGHTS, INPUTS, PACKED } packed;  // what lies in a buffer; then how many there are

// A buffer that the calling thread keeps for its next call, and for good: threads that call are few and last. NULL when there is no
// memory.
static char *scratch(packed which, size_t bytes) {
    static __thread char *kept[PACKED];
    static __thread size_t size[PACKED];
    if (size[which] < bytes) {
        free(kept[which]);
        kept[which] = aligned_alloc(64, (bytes + 63) / 64 * 64);
        size[which] = kept[which] ? bytes : 0;
    }
    return kept[which];
}

// How many tokens go through at once, so that their packed blocks take at most `most` bytes: whole pairs of blocks.
static inline int64_t pass_tokens(int64_t most, int64_t block_bytes) {
    const int64_t pairs = most / block_bytes / 2;
    return (pairs < 1 ? 1 : pairs) * 2 * TILE;
}

// The bfloat16 number next to each, as float32; a NaN stays one unless all its bits are set, and no instruction makes that.
static inline vec v_upper(vec a) {
    __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(0x8000));
    return _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32((int)0xffff0000)));
}

// Split 32 numbers into `parts` rows of 32 bfloat16: the number next to each, and the one next to what that leaves.
static inline __attribute__((always_inline)) void split(vec low, vec high, int64_t parts, __m512i *rows) {
    if (parts == 2) {
        const vec l = v_upper(low), h = v_upper(high);
        rows[1] = (__m512i)_mm512_cvtne2ps_pbh(v_sub(high, h), v_sub(low, l));
        low = l, high = h;
    }
    rows[0] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

static inline vec load_some(const float *p, int64_t count) {
    if (count >= LANES) return v_load(p);
    return count <= 0 ? v_zero() : _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
}

// Pack up to 16 vectors, `apart` from each other: tiles [steps][INPUT_PARTS] whose rows are pairs of columns and whose columns
// are vectors; missing ones are zeros.
static void pack_vectors(const float *x, int64_t apart, int64_t count, int64_t columns, char *to) {
    for (int64_t at = 0; at < columns; at += DEPTH, to += INPUT_PARTS * TILE_BYTES) {
        __m512i rows[INPUT_PARTS][TILE];
        for (int64_t i = 0; i < TILE; i++) {
            const float *from = x + i * apart + at;
            __m512i parts[INPUT_PARTS] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
            if (i < count) split(load_some(from, columns - at), load_some(from + LANES, columns - at - LANES), INPUT_PARTS, parts);
            for (int part = 0; part < INPUT_PARTS; part++) rows[part][i] = parts[part];
        }
        for (int part = 0; part < INPUT_PARTS; part++) {
            v_transpose((vec *)rows[part]);
            for (int i = 0; i < TILE; i++) _mm512_store_si512(to + part * TILE_BYTES + i * 64, rows[part][i]);
        }
    }
}

#define LOAD_WEIGHTS(part)                                                  \
    do {                                                                    \
        _tile_loadd(4, weights + (part) * 2 * TILE_BYTES, 64);              \
        _tile_loadd(5, weights + (part) * 2 * TILE_BYTES + TILE_BYTES, 64); \
    } while (0)
#define LOAD_INPUTS(part)                                  \
    do {                                                   \
        _tile_loadd(6, first + (part) * TILE_BYTES, 64);   \
        _tile_loadd(7, second + (part) * TILE_BYTES, 64);  \
    } while (0)
#define MULTIPLY                 \
    do {                         \
        _tile_dpbf16ps(0, 4, 6); \
        _tile_dpbf16ps(1, 5, 6); \
        _tile_dpbf16ps(2, 4, 7); \
        _tile_dpbf16ps(3, 5, 7); \
    } while (0)

// A step of the product of a strip, [parts][2] tiles of 16 rows each, with two blocks of 16 inputs, [INPUT_PARTS] tiles each, is
// added to tiles 0 to 3, [2 blocks][2 halves].
static inline __attribute__((always_inline)) void multiply_two(
    const char *weights, const char *first, const char *second, const int64_t parts) {
    LOAD_WEIGHTS(0);
    LOAD_INPUTS(1);
    MULTIPLY;
    LOAD_INPUTS(0);
    if (parts == 2) {
        MULTIPLY;
        LOAD_WEIGHTS(1);
    }
    MULTIPLY;
}
#endif
