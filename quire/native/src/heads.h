/* Numbers of a head: rotated by a token's position, and as fp16 for the cache. */
#ifndef QUIRE_HEADS_H
#define QUIRE_HEADS_H

#include "lanes.h"

static inline void rotate_head(float *x, const float *cos_at, const float *sin_at, int half) {
    for (int i = 0; i < half; i += LANES) {
        if (half - i < LANES) { /* narrow heads */
            for (int j = i; j < half; j++) {
                const float a = x[j], b = x[j + half];
                x[j] = lane_fma(b, 0.0f - sin_at[j], a * cos_at[j]); /* zeros as below */
                x[j + half] = lane_fma(a, sin_at[j], b * cos_at[j]);
            }
            return;
        }
        const vf a = vf_load(x + i), b = vf_load(x + half + i);
        const vf c = vf_load(cos_at + i), s = vf_load(sin_at + i);
        vf_store(x + i, vf_fma(b, vf_sub(vf_set(0.0f), s), vf_mul(a, c)));
        vf_store(x + half + i, vf_fma(a, s, vf_mul(b, c)));
    }
}

/* fp16 of a head. Finite numbers beyond the largest become it; what is no number becomes NaN. */
static inline void round_head(const float *x, int dim, uint16_t *out) {
    for (int i = 0; i < dim; i += LANES) {
        const vf v = vf_load(x + i);
        const vf fit = vf_max(vf_set(-65504.0f), vf_min(vf_set(65504.0f), v));
        vf_to_half(out + i, vf_add(fit, vf_sub(v, v))); /* infinity less itself is NaN */
    }
}

#endif
