/* Numbers of a row: sums in one order, exponentials, the norm. For kernels of every instruction set. */
#ifndef QUIRE_ROWS_H
#define QUIRE_ROWS_H

#include "lanes.h"

#define WIDE 16 /* chains of a sum */

static inline float tree_sum(float *at) {
    for (int step = WIDE / 2; step; step /= 2)
        for (int i = 0; i < step; i++) at[i] += at[i + step];
    return at[0];
}

/* e^x within 2 units in the last place, for x in [-87, 88]; clamped outside.
 * NaN stays: of two operands of which one is NaN, vf_max and vf_min give the second. */
static inline vf vf_exp(vf x) {
    x = vf_min(vf_set(88.0f), vf_max(vf_set(-87.0f), x));
    const vi whole = vi_of_vf(vf_mul(x, vf_set(1.44269504088896341f)));
    const vf n = vf_of_vi(whole);
    vf r = vf_fma(n, vf_set(-0.693359375f), x); /* exact: few bits */
    r = vf_fma(n, vf_set(2.12194440e-4f), r);
    vf p = vf_set(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set(5.0000001201e-1f));
    p = vf_fma(p, vf_mul(r, r), vf_add(r, vf_set(1.0f)));
    return vf_mul(p, vf_bits(vi_shl(vi_add(whole, vi_set(127)), 23)));
}

static inline vf vf_tanh(vf x) { /* 1 - 2 / (e^2x + 1) */
    const vf e = vf_exp(vf_add(x, x));
    return vf_sub(vf_set(1.0f), vf_div(vf_set(2.0f), vf_add(e, vf_set(1.0f))));
}

static inline vf sigmoid_of(vf x) {
    return vf_div(vf_set(1.0f), vf_add(vf_set(1.0f), vf_exp(vf_sub(vf_set(0.0f), x))));
}

/* 1 / sqrt(mean of squares + eps) of `size` numbers, a multiple of 16. */
static inline float inverse_rms(const float *x, int size, float eps) {
    float sums[WIDE];
    for (int lane = 0; lane < WIDE; lane += LANES) {
        vf acc = vf_set(0.0f);
        for (int i = lane; i < size; i += WIDE) {
            const vf v = vf_load(x + i);
            acc = vf_fma(v, v, acc);
        }
        vf_store(sums + lane, acc);
    }
    return 1.0f / sqrtf(tree_sum(sums) / (float)size + eps);
}

/* The sum of `size` numbers, a multiple of 16, or of their squared distances from a center. */
static inline float row_sum(const float *x, int size) {
    float sums[WIDE];
    for (int lane = 0; lane < WIDE; lane += LANES) {
        vf acc = vf_set(0.0f);
        for (int i = lane; i < size; i += WIDE) acc = vf_add(acc, vf_load(x + i));
        vf_store(sums + lane, acc);
    }
    return tree_sum(sums);
}

static inline float row_spread(const float *x, float center, int size) {
    float sums[WIDE];
    for (int lane = 0; lane < WIDE; lane += LANES) {
        vf acc = vf_set(0.0f);
        for (int i = lane; i < size; i += WIDE) {
            const vf v = vf_sub(vf_load(x + i), vf_set(center));
            acc = vf_fma(v, v, acc);
        }
        vf_store(sums + lane, acc);
    }
    return tree_sum(sums);
}

static inline void scale_row(const float *x, const float *weight, float factor, int size, float *out) {
    for (int i = 0; i < size; i += LANES)
        vf_store(out + i, vf_mul(vf_mul(vf_load(x + i), vf_set(factor)), vf_load(weight + i)));
}

#endif
