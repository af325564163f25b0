/* Parts of a softmax, each relative to its own top, folded together in order. */
#ifndef QUIRE_SOFTMAX_H
#define QUIRE_SOFTMAX_H

#include "rows.h"

typedef struct {
    float top, sum; /* of scores, and of their exponentials relative to the top; sum 0: no keys */
} level;

/* What two levels are scaled by to meet at the higher top. */
static inline level factors(float top, float other) {
    float x[LANES] = {0.0f};
    const float most = other > top ? other : top;
    x[0] = top - most, x[1] = other - most;
    vf_store(x, vf_exp(vf_load(x)));
    return (level){x[0], x[1]};
}

/* Later keys into what there is of earlier ones. */
static inline void fold(level *at, float *out, level later, const float *values, int dim) {
    if (at->sum == 0.0f) {
        *at = later;
        memcpy(out, values, (size_t)dim * 4);
    } else if (later.sum != 0.0f) {
        const level by = factors(at->top, later.top);
        at->sum = lane_fma(at->sum, by.top, later.sum * by.sum);
        at->top = later.top > at->top ? later.top : at->top;
        for (int i = 0; i < dim; i += LANES)
            vf_store(out + i, vf_fma(vf_load(out + i), vf_set(by.top),
                                     vf_mul(vf_load(values + i), vf_set(by.sum))));
    }
}

#endif
