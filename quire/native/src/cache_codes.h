/* Rows of a head as codes that share a scale; attn/cache_codes.py says what they are.
 *
 * Each step is exact or rounds once, so every instruction set makes the same codes.
 */
#ifndef QUIRE_CACHE_CODES_H
#define QUIRE_CACHE_CODES_H

#include "lanes.h"
#include "quire_native.h"

#define NO_NUMBER 0x7fc0 /* NaN as a bf16 */
#define SCALES 32        /* tried for a row of E4M3; STRIDE last places of a bf16 lie between two */
#define STRIDE 4
#define LEAST_EXPONENT 32 /* of such a scale */

/* Every `block` numbers times the Hadamard matrix of +1 and -1, times `factor`, a power of two. */
static inline void turn_head(float *x, int dim, int block, float factor) {
    for (int step = 1; step < block; step *= 2)
        for (int i = 0; i < dim; i += 2 * step) {
            int j = i;
            for (; step >= LANES && j < i + step; j += LANES) {
                const vf a = vf_load(x + j), b = vf_load(x + j + step);
                vf_store(x + j, vf_add(a, b));
                vf_store(x + j + step, vf_sub(a, b));
            }
            for (; j < i + step; j++) {
                const float a = x[j], b = x[j + step];
                x[j] = a + b;
                x[j + step] = a - b;
            }
        }
    for (int i = 0; i < dim; i += LANES) vf_store(x + i, vf_mul(vf_load(x + i), vf_set(factor)));
}

/* The scale of a row as a bf16, rounded up; `fixed` unless that is 0. */
static inline uint16_t scale_of_row(const float *x, int dim, float largest_code, float fixed) {
    vi most = vi_magnitude(vf_load(x));
    for (int i = LANES; i < dim; i += LANES) most = vi_max(most, vi_magnitude(vf_load(x + i)));
    uint32_t bits = (uint32_t)vi_top(most);
    if (bits >= 0x7f800000) return NO_NUMBER;
    float top;
    memcpy(&top, &bits, 4);
    top = fixed > 0.0f ? fixed : top / largest_code;
    memcpy(&bits, &top, 4);
    return (uint16_t)((bits + 0xffff) >> 16);
}

/* The E4M3 numbers nearest to magnitudes of at most 448. A sum whose last place is E4M3's step
 * rounds as E4M3 does; below 2^-6 the step is 2^-9. */
static inline vf near_e4m3(vf magnitude) {
    const vf power = vf_bits(vi_and(vi_magnitude(magnitude), vi_set(0x7f800000)));
    const vf large = vf_max(vf_mul(power, vf_set(1572864.0f)), vf_set(24576.0f)); /* 1.5 * 2^20 */
    return vf_sub(vf_add(magnitude, large), large);
}

/* Squared errors of a row by this scale, each in whole units. */
static inline int32_t cost_of_scale(const float *x, int dim, float scale, float unit) {
    vi sum = vi_set(0);
    for (int i = 0; i < dim; i += LANES) {
        const vf magnitude = vf_abs(vf_load(x + i));
        const vf near = near_e4m3(vf_min(vf_set(448.0f), vf_div(magnitude, vf_set(scale))));
        const vf off = vf_abs(vf_sub(vf_mul(near, vf_set(scale)), magnitude));
        const vi whole = vi_of_vf(vf_mul(off, vf_set(unit)));
        sum = vi_add(sum, vi_mul(whole, whole));
    }
    return vi_sum(sum);
}

/* Of the scales from the least one to nearly twice that, the one whose codes are nearest. */
static inline uint16_t finest_scale(const float *x, int dim, uint16_t least) {
    const int exponent = least >> 7;
    if (exponent < LEAST_EXPONENT || exponent > 254) return least;
    uint32_t bits = (uint32_t)(259 - exponent) << 23;
    float unit, scale;
    memcpy(&unit, &bits, 4);
    uint16_t found = least;
    int32_t lowest = INT32_MAX;
    for (int i = 0; i < SCALES; i++) {
        bits = (uint32_t)(least + STRIDE * i) << 16;
        memcpy(&scale, &bits, 4);
        const int32_t cost = cost_of_scale(x, dim, scale, unit);
        if (cost < lowest) found = (uint16_t)(bits >> 16), lowest = cost;
    }
    return found;
}

/* E4M3 of a number within +-448, to nearest, ties to even. */
static inline uint8_t e4m3_of(float x) {
    uint32_t bits, small;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80;
    bits &= 0x7fffffff;
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    const float shifted = magnitude + 16384.0f; /* its last place is 2^-9, E4M3's smallest number */
    memcpy(&small, &shifted, 4);
    const uint32_t normal = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    return (uint8_t)(sign | (bits < 0x3c800000 ? small - 0x46800000 : normal - (120 << 3)));
}

/* Codes of a row, a byte each, by the scale that is returned as a bf16. */
static inline uint16_t codes_of_row(const float *x, int dim, int form, float fixed, uint8_t *codes) {
    const float top = form == CACHE_INT8 ? 127.0f : form == CACHE_FP8 ? 448.0f : 7.5f;
    uint16_t found = scale_of_row(x, dim, top, fixed);
    if (form == CACHE_FP8 && !(fixed > 0.0f)) found = finest_scale(x, dim, found);
    const uint32_t bits = (uint32_t)found << 16;
    float scale;
    memcpy(&scale, &bits, 4);
    const int has_numbers = scale > 0.0f; /* nor NaN */
    for (int i = 0; i < dim; i += LANES) {
        vf ratio = has_numbers ? vf_div(vf_load(x + i), vf_set(scale)) : vf_set(0.0f);
        ratio = vf_max(vf_set(-top), vf_min(vf_set(top), ratio));
        if (form == CACHE_FP8) {
            float at[LANES];
            vf_store(at, ratio);
            for (int j = 0; j < LANES; j++) codes[i + j] = e4m3_of(at[j]);
        } else {
            if (form == CACHE_INT4) ratio = vf_add(ratio, vf_set(top));
            vi_narrow((int8_t *)codes + i, vi_of_vf(ratio));
        }
    }
    return found;
}

#endif
