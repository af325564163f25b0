/* Rows of a head as codes that share a scale; attn/cache_codes.py says what they are.
 *
 * Each step is exact or rounds once, so every instruction set makes the same codes.
 */
#ifndef QUIRE_CACHE_CODES_H
#define QUIRE_CACHE_CODES_H

#include "lanes.h"
#include "quire_native.h"

#define NO_NUMBER 0x7fc0 /* NaN as a bf16 */

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
    const uint16_t found = scale_of_row(x, dim, top, fixed);
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
