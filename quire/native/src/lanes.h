/* Lanes: one vector register of outputs, the same few operations for every instruction set.
 *
 * A lane is one output of a product (or one token of attention). Every operation is exact or
 * rounds once, as IEEE says, so all instruction sets give the same bits. LANES divides 16, the
 * height of a panel. Chosen by the flags this file is compiled with; QUIRE_PLAIN: plain C.
 */
#ifndef QUIRE_LANES_H
#define QUIRE_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__aarch64__) && !defined(QUIRE_PLAIN)
#include "lanes_neon.h"

#elif defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(QUIRE_PLAIN)
#define LANES 16
#include <immintrin.h>
typedef __m512 vf;  /* floats */
typedef __m512i vi; /* int32 */
typedef __m512i vb; /* 4 bytes a lane */

static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
static inline vf vf_set(float a) { return _mm512_set1_ps(a); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf vf_abs(vf a) { return _mm512_abs_ps(a); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_half(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline void vf_to_half(uint16_t *p, vf a) { /* to nearest, ties to even */
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf vf_bfloat(const uint16_t *p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
static inline vf vf_of_u8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline vf vf_of_s8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* E4M3 without NaN, times 2^-8: as fp16, whose exponents have one bit more */
static inline vf vf_of_e4m3(const uint8_t *p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    const __m256i bits = _mm256_set1_epi16((short)0xbfff);
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), bits));
}
static inline vi vi_of_u8(const uint8_t *p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
/* of a byte in each lane, the lower four bits less 7.5, and the upper four */
static inline vf vf_low4(vi a) {
    const __m512 values = _mm512_setr_ps(-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -0.5f,
                                         0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f);
    return _mm512_permutexvar_ps(a, values); /* looks at four bits alone */
}
static inline vf vf_high4(vi a) { return vf_low4(_mm512_srli_epi32(a, 4)); }
static inline vf vf_of_vi(vi a) { return _mm512_cvtepi32_ps(a); }
static inline vi vi_of_vf(vf a) { return _mm512_cvtps_epi32(a); } /* to nearest, ties to even */
static inline vi vi_set(int32_t a) { return _mm512_set1_epi32(a); }
static inline vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline vi vi_mul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
static inline vi vi_shl(vi a, int n) { return _mm512_slli_epi32(a, n); }
static inline vi vi_shr(vi a, int n) { return _mm512_srli_epi32(a, n); } /* zeros come in */
static inline vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
static inline vf vf_bits(vi a) { return _mm512_castsi512_ps(a); }
static inline vf vf_pick(const float *table, vi index) { /* of 16 */
    return _mm512_permutexvar_ps(index, _mm512_loadu_ps(table));
}
static inline vf vf_among(const float *four, vi index) { /* by two bits, whatever is above them */
    return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(four)), index);
}
static inline vb vb_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
static inline vb vb_set(int a) { return _mm512_set1_epi8((char)a); }
static inline vb vb_and(vb a, vb b) { return _mm512_and_si512(a, b); }
static inline vb vb_or(vb a, vb b) { return _mm512_or_si512(a, b); }
#define vb_shr(a, n) _mm512_srli_epi16((a), (n)) /* bits cross bytes: mask them off */
#define vb_shl(a, n) _mm512_slli_epi16((a), (n))
/* every 16 bytes look among the 16 beside them */
static inline vb vb_look(vb table, vb index) { return _mm512_shuffle_epi8(table, index); }
static inline vb vb_four(const int8_t *p) {
    int32_t w;
    memcpy(&w, p, 4);
    return _mm512_set1_epi32(w);
}
/* sums of 4 products a lane; codes 0..63 */
static inline vi vi_dot(vi acc, vb codes, vb x) { return _mm512_dpbusd_epi32(acc, codes, x); }
/* the same for codes -128..127, up to DOT8_BIAS * the sum of x */
#define DOT8_BIAS 128
static inline vi vi_dot8(vi acc, vb codes, vb x) {
    return _mm512_dpbusd_epi32(acc, _mm512_xor_si512(codes, _mm512_set1_epi8((char)0x80)), x);
}
/* Of rounding: bits of a magnitude, the largest and the sum of lanes, lanes as bytes. */
#define HAS_ROUNDING 1
static inline vi vi_magnitude(vf a) { return _mm512_castps_si512(_mm512_abs_ps(a)); }
static inline vi vi_max(vi a, vi b) { return _mm512_max_epi32(a, b); }
static inline int32_t vi_top(vi a) { return _mm512_reduce_max_epi32(a); }
static inline int32_t vi_sum(vi a) { return _mm512_reduce_add_epi32(a); }
static inline void vi_narrow(int8_t *p, vi a) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(a));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(QUIRE_PLAIN)
#define LANES 8
#include <immintrin.h>
typedef __m256 vf;
typedef __m256i vi;
typedef __m256i vb;

static inline vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vf_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
static inline vf vf_set(float a) { return _mm256_set1_ps(a); }
static inline vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf vf_half(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline void vf_to_half(uint16_t *p, vf a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf vf_bfloat(const uint16_t *p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
static inline vf vf_of_u8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline vf vf_of_s8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline vf vf_of_e4m3(const uint8_t *p) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbfff)));
}
static inline vi vi_of_u8(const uint8_t *p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
static inline vf vf_low4(vi a) {
    const __m256i low = _mm256_and_si256(a, _mm256_set1_epi32(15));
    return _mm256_sub_ps(_mm256_cvtepi32_ps(low), _mm256_set1_ps(7.5f));
}
static inline vf vf_high4(vi a) { return vf_low4(_mm256_srli_epi32(a, 4)); }
static inline vf vf_of_vi(vi a) { return _mm256_cvtepi32_ps(a); }
static inline vi vi_of_vf(vf a) { return _mm256_cvtps_epi32(a); }
static inline vi vi_set(int32_t a) { return _mm256_set1_epi32(a); }
static inline vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
static inline vi vi_mul(vi a, vi b) { return _mm256_mullo_epi32(a, b); }
static inline vi vi_shl(vi a, int n) { return _mm256_slli_epi32(a, n); }
static inline vi vi_shr(vi a, int n) { return _mm256_srli_epi32(a, n); }
static inline vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
static inline vf vf_bits(vi a) { return _mm256_castsi256_ps(a); }
static inline vf vf_pick(const float *table, vi index) { /* the third bit chooses a half */
    const vf low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
    const vf high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
static inline vf vf_among(const float *four, vi index) {
    const __m128 all = _mm_loadu_ps(four);
    return _mm256_permutevar_ps(_mm256_set_m128(all, all), index);
}
static inline vb vb_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline vb vb_set(int a) { return _mm256_set1_epi8((char)a); }
static inline vb vb_and(vb a, vb b) { return _mm256_and_si256(a, b); }
static inline vb vb_or(vb a, vb b) { return _mm256_or_si256(a, b); }
#define vb_shr(a, n) _mm256_srli_epi16((a), (n))
#define vb_shl(a, n) _mm256_slli_epi16((a), (n))
static inline vb vb_look(vb table, vb index) { return _mm256_shuffle_epi8(table, index); }
static inline vb vb_four(const int8_t *p) {
    int32_t w;
    memcpy(&w, p, 4);
    return _mm256_set1_epi32(w);
}
#define HAS_ROUNDING 1
static inline vi vi_magnitude(vf a) { return _mm256_castps_si256(vf_abs(a)); }
static inline vi vi_max(vi a, vi b) { return _mm256_max_epi32(a, b); }
static inline int32_t vi_top(vi a) {
    __m128i v = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    v = _mm_max_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}
static inline int32_t vi_sum(vi a) {
    __m128i v = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}
static inline void vi_narrow(int8_t *p, vi a) {
    const __m128i v = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(v, v));
}
#ifdef __AVXVNNI__
static inline vi vi_dot(vi acc, vb codes, vb x) { return _mm256_dpbusd_avx_epi32(acc, codes, x); }
#define DOT8_BIAS 128
static inline vi vi_dot8(vi acc, vb codes, vb x) {
    return _mm256_dpbusd_avx_epi32(acc, _mm256_xor_si256(codes, _mm256_set1_epi8((char)0x80)), x);
}
#else
/* Pairs of products are summed in 16 bits as long as they fit. */
#define HAS_PAIRS 1
#define PAIRS_HOLD(bits) ((bits) <= 4 ? 8 : (bits) == 5 ? 4 : 2)
typedef __m256i vp;
static inline vp vp_begin(vi acc) { return (void)acc, _mm256_setzero_si256(); }
static inline vp vp_dot(vp acc, vb codes, vb x) {
    return _mm256_add_epi16(acc, _mm256_maddubs_epi16(codes, x));
}
static inline vi vp_end(vi acc, vp pairs) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#define DOT8_BIAS 0
static inline vi vi_dot8(vi acc, vb codes, vb x) { /* 2 * 128 * 127 fits 16 bits */
    vb pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

#else
#define LANES 8
typedef struct { float at[LANES]; } vf;
typedef struct { int32_t at[LANES]; } vi;
typedef struct { uint8_t at[4 * LANES]; } vb;
#define EACH(type, expr) \
    type r; \
    for (int i = 0; i < LANES; i++) r.at[i] = (expr); \
    return r
#define EACH_BYTE(expr) \
    vb r; \
    for (int i = 0; i < 4 * LANES; i++) r.at[i] = (uint8_t)(expr); \
    return r

static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, rest = h & 1023, bits;
    if (exponent == 0) {
        float small = (float)rest * 5.9604644775390625e-08f; /* 2^-24 */
        return sign ? -small : small;
    }
    bits = sign | (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | rest << 13;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline uint16_t float_to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;  /* NaN */
    if (bits >= 0x477ff000) return sign | 0x7c00; /* rounds to infinity */
    if (bits < 0x38800000) return sign | (uint16_t)nearbyintf(fabsf(f) * 16777216.0f); /* 2^24 */
    return sign | (uint16_t)((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}
static inline float bits_to_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline vf vf_load(const float *p) { EACH(vf, p[i]); }
static inline void vf_store(float *p, vf a) { memcpy(p, a.at, sizeof a.at); }
static inline vf vf_set(float a) { EACH(vf, a); }
static inline vf vf_add(vf a, vf b) { EACH(vf, a.at[i] + b.at[i]); }
static inline vf vf_sub(vf a, vf b) { EACH(vf, a.at[i] - b.at[i]); }
static inline vf vf_mul(vf a, vf b) { EACH(vf, a.at[i] * b.at[i]); }
static inline vf vf_div(vf a, vf b) { EACH(vf, a.at[i] / b.at[i]); }
static inline vf vf_max(vf a, vf b) { EACH(vf, a.at[i] > b.at[i] ? a.at[i] : b.at[i]); }
static inline vf vf_min(vf a, vf b) { EACH(vf, a.at[i] < b.at[i] ? a.at[i] : b.at[i]); }
static inline vf vf_abs(vf a) { EACH(vf, fabsf(a.at[i])); }
static inline vf vf_fma(vf a, vf b, vf c) { EACH(vf, fmaf(a.at[i], b.at[i], c.at[i])); }
static inline vf vf_half(const uint16_t *p) { EACH(vf, half_to_float(p[i])); }
static inline void vf_to_half(uint16_t *p, vf a) {
    for (int i = 0; i < LANES; i++) p[i] = float_to_half(a.at[i]);
}
static inline vf vf_bfloat(const uint16_t *p) { EACH(vf, bits_to_float((uint32_t)p[i] << 16)); }
static inline vf vf_of_u8(const uint8_t *p) { EACH(vf, (float)p[i]); }
static inline vf vf_of_s8(const int8_t *p) { EACH(vf, (float)p[i]); }
static inline vf vf_of_e4m3(const uint8_t *p) {
    EACH(vf, half_to_float((uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7)));
}
static inline vi vi_of_u8(const uint8_t *p) { EACH(vi, p[i]); }
static inline vf vf_low4(vi a) { EACH(vf, (float)(a.at[i] & 15) - 7.5f); }
static inline vf vf_high4(vi a) { EACH(vf, (float)(a.at[i] >> 4) - 7.5f); }
static inline vf vf_of_vi(vi a) { EACH(vf, (float)a.at[i]); }
static inline int32_t nearest(float a) {
    /* as the vector instruction: out of range and NaN give the smallest integer */
    return a >= -2147483648.0f && a < 2147483648.0f ? (int32_t)nearbyintf(a) : INT32_MIN;
}
static inline vi vi_of_vf(vf a) { EACH(vi, nearest(a.at[i])); }
static inline vi vi_set(int32_t a) { EACH(vi, a); }
static inline vi vi_mul(vi a, vi b) { EACH(vi, (int32_t)((uint32_t)a.at[i] * (uint32_t)b.at[i])); }
static inline vi vi_add(vi a, vi b) { EACH(vi, (int32_t)((uint32_t)a.at[i] + (uint32_t)b.at[i])); }
static inline vi vi_shl(vi a, int n) { EACH(vi, (int32_t)((uint32_t)a.at[i] << n)); }
static inline vi vi_shr(vi a, int n) { EACH(vi, (int32_t)((uint32_t)a.at[i] >> n)); }
static inline vi vi_and(vi a, vi b) { EACH(vi, a.at[i] & b.at[i]); }
static inline vf vf_bits(vi a) { EACH(vf, bits_to_float((uint32_t)a.at[i])); }
static inline vf vf_pick(const float *table, vi index) { EACH(vf, table[index.at[i] & 15]); }
static inline vf vf_among(const float *four, vi index) { EACH(vf, four[index.at[i] & 3]); }
static inline vb vb_load(const uint8_t *p) { EACH_BYTE(p[i]); }
static inline vb vb_set(int a) { EACH_BYTE(a); }
static inline vb vb_and(vb a, vb b) { EACH_BYTE(a.at[i] & b.at[i]); }
static inline vb vb_or(vb a, vb b) { EACH_BYTE(a.at[i] | b.at[i]); }
static inline vb vb_shr(vb a, int n) { EACH_BYTE(a.at[i] >> n); }
static inline vb vb_shl(vb a, int n) { EACH_BYTE(a.at[i] << n); }
static inline vb vb_look(vb table, vb index) { EACH_BYTE(table.at[i / 16 * 16 + (index.at[i] & 15)]); }
static inline vb vb_four(const int8_t *p) { EACH_BYTE(p[i & 3]); }
static inline vi vi_dot(vi acc, vb codes, vb x) {
    for (int i = 0; i < 4 * LANES; i++) acc.at[i / 4] += (int)codes.at[i] * (int8_t)x.at[i];
    return acc;
}
#define DOT8_BIAS 0
static inline vi vi_dot8(vi acc, vb codes, vb x) {
    for (int i = 0; i < 4 * LANES; i++) acc.at[i / 4] += (int)(int8_t)codes.at[i] * (int8_t)x.at[i];
    return acc;
}
#endif

/* Sums of products on their way to a lane: begun from a sum, added to it in the end. */
#ifndef HAS_PAIRS
#define PAIRS_HOLD(bits) 8 /* vectors, any number of them: these are whole sums */
typedef vi vp;
static inline vp vp_begin(vi acc) { return acc; }
static inline vp vp_dot(vp acc, vb codes, vb x) { return vi_dot(acc, codes, x); }
static inline vi vp_end(vi acc, vp pairs) { return (void)acc, pairs; }
#endif

#ifndef HAS_ROUNDING
static inline vi vi_magnitude(vf a) {
    uint32_t bits[LANES];
    memcpy(bits, &a, sizeof bits);
    for (int i = 0; i < LANES; i++) bits[i] &= 0x7fffffffu;
    vi r;
    memcpy(&r, bits, sizeof r);
    return r;
}
static inline vi vi_max(vi a, vi b) {
    int32_t x[LANES], y[LANES];
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    for (int i = 0; i < LANES; i++) x[i] = x[i] > y[i] ? x[i] : y[i];
    memcpy(&a, x, sizeof a);
    return a;
}
static inline int32_t vi_top(vi a) {
    int32_t x[LANES], top = INT32_MIN;
    memcpy(x, &a, sizeof x);
    for (int i = 0; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
}
static inline int32_t vi_sum(vi a) {
    int32_t x[LANES];
    uint32_t sum = 0;
    memcpy(x, &a, sizeof x);
    for (int i = 0; i < LANES; i++) sum += (uint32_t)x[i];
    return (int32_t)sum;
}
static inline void vi_narrow(int8_t *p, vi a) {
    int32_t x[LANES];
    memcpy(x, &a, sizeof x);
    for (int i = 0; i < LANES; i++) p[i] = (int8_t)(x[i] < -128 ? -128 : x[i] > 127 ? 127 : x[i]);
}
#endif

/* One lane's worth of rounding for odd ends, with the same instructions' results. */
static inline float lane_fma(float a, float b, float c) { return fmaf(a, b, c); }

#endif
