// A register of float32 lanes, the same code for AVX-512 (16 lanes) and AVX2 (8 lanes); chosen when compiled.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LANES 16
typedef __m512 vec;
static inline vec v_zero(void) { return _mm512_setzero_ps(); }
static inline vec v_all(float a) { return _mm512_set1_ps(a); }
static inline vec v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v_store(float *p, vec a) { _mm512_storeu_ps(p, a); }
static inline vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
static inline vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec v_min(vec a, vec b) { return _mm512_min_ps(a, b); }
static inline vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec v_round(vec a) { return _mm512_roundscale_ps(a, 0); }
static inline float v_sum(vec a) { return _mm512_reduce_add_ps(a); }
static inline float v_largest(vec a) { return _mm512_reduce_max_ps(a); }
static inline vec v_scale2(vec a, vec n) { return _mm512_scalef_ps(a, n); }  // a * 2^n
static inline vec v_load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline vec v_load_bfloat(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline vec v_load_int8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LANES 8
typedef __m256 vec;
static inline vec v_zero(void) { return _mm256_setzero_ps(); }
static inline vec v_all(float a) { return _mm256_set1_ps(a); }
static inline vec v_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void v_store(float *p, vec a) { _mm256_storeu_ps(p, a); }
static inline vec v_add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec v_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec v_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec v_div(vec a, vec b) { return _mm256_div_ps(a, b); }
static inline vec v_max(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec v_min(vec a, vec b) { return _mm256_min_ps(a, b); }
static inline vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec v_round(vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline float v_sum(vec a) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline float v_largest(vec a) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline vec v_scale2(vec a, vec n) {  // n is integral and a * 2^n is normal or underflows to nearly zero
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(bits));
}
static inline vec v_load_half(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
static inline vec v_load_bfloat(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline vec v_load_int8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
#else
#error "these kernels need AVX2 with FMA and F16C, or AVX-512"
#endif

// LANES halves, those that are not finite as the NaN that instructions make.
#if LANES == 16
static inline void v_store_half(uint16_t *p, vec a) {
    const __m256i bits = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), endless = _mm256_set1_epi16(0x7c00);
    const __mmask16 bad = _mm256_cmpeq_epi16_mask(_mm256_and_si256(bits, endless), endless);
    _mm256_storeu_si256((__m256i *)p, _mm256_mask_mov_epi16(bits, bad, _mm256_set1_epi16(0x7e00)));
}
#else
static inline void v_store_half(uint16_t *p, vec a) {
    const __m128i bits = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), endless = _mm_set1_epi16(0x7c00);
    const __m128i bad = _mm_cmpeq_epi16(_mm_and_si128(bits, endless), endless);
    _mm_storeu_si128((__m128i *)p, _mm_blendv_epi8(bits, _mm_set1_epi16(0x7e00), bad));
}
#endif

static inline float from_half(uint16_t bits) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))); }
static inline float from_bfloat(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}
static inline uint16_t to_bfloat(float value) {  // to nearest, ties to even; a NaN stays one
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    if (value != value) return (uint16_t)(wide >> 16 | 0x40);
    return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

// e^a to about one unit in the last place, for a <= 88; below -87 it is zero, at -inf too; a NaN stays one, which is why it is
// the second operand of v_max. Cephes' polynomial (S. Moshier, expf) after Cody and Waite's two-part reduction by ln 2.
static inline vec v_exp(vec a) {
    vec clamped = v_max(v_all(-88.0f), a);
    vec n = v_round(v_mul(clamped, v_all(1.44269504088896341f)));
    vec r = v_fma(n, v_all(-0.693359375f), clamped);
    r = v_fma(n, v_all(2.12194440e-4f), r);
    vec p = v_all(1.9875691500e-4f);
    p = v_fma(p, r, v_all(1.3981999507e-3f));
    p = v_fma(p, r, v_all(8.3334519073e-3f));
    p = v_fma(p, r, v_all(4.1665795894e-2f));
    p = v_fma(p, r, v_all(1.6666665459e-1f));
    p = v_fma(p, r, v_all(5.0000001201e-1f));
    vec e = v_scale2(v_add(v_fma(v_mul(r, r), p, r), v_all(1.0f)), n);
#if LANES == 16
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, v_all(-87.0f), _CMP_NLT_UQ), e);
#else
    return _mm256_and_ps(e, _mm256_cmp_ps(a, v_all(-87.0f), _CMP_NLT_UQ));
#endif
}

#if LANES == 16
// 2^a to two units in the last place, for a <= 127; below -150 it is zero, at -inf too; a NaN stays one. The polynomial has the
// least relative error on [-1/2, 1/2].
static inline vec v_exp2(vec a) {
    const vec clamped = v_max(v_all(-200.0f), a), r = _mm512_reduce_ps(clamped, 0);
    vec p = v_all(1.32647e-3f);
    p = v_fma(p, r, v_all(9.67151e-3f));
    p = v_fma(p, r, v_all(5.550734e-2f));
    p = v_fma(p, r, v_all(2.4022242e-1f));
    p = v_fma(p, r, v_all(6.9314698e-1f));
    return _mm512_scalef_ps(v_fma(p, r, v_all(1.0f)), v_sub(clamped, r));
}
#endif

// Turn a square of LANES by LANES numbers.
static inline void v_transpose(vec square[LANES]) {
#if LANES == 16
    __m512i *r = (__m512i *)square, t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            t[i + 8 * j] = _mm512_shuffle_i32x4(r[i + 8 * j], r[i + 8 * j + 4], 0x88);
            t[i + 8 * j + 4] = _mm512_shuffle_i32x4(r[i + 8 * j], r[i + 8 * j + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
#else
    float from[LANES][LANES], to[LANES][LANES];
    for (int i = 0; i < LANES; i++) v_store(from[i], square[i]);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) to[i][j] = from[j][i];
    for (int i = 0; i < LANES; i++) square[i] = v_load(to[i]);
#endif
}
