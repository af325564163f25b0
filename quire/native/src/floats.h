/* Weights of floats, as their panels hold them: plain ones, of eight bits, or 16 values by number.
 *
 * Those of eight bits hold finite numbers alone: panels of others are not made.
 */
#ifndef QUIRE_FLOATS_H
#define QUIRE_FLOATS_H

#include "codes.h"

INLINE int has_scales(const int bits) { return bits >= CODES_E4M3 && bits <= CODES_VALUES4; }

/* LANES floats of eight bits. Read with fp32's exponent they are right, but the smallest, whose
 * first digit is no 1: these come out as 2^e + x for 2 x. */
INLINE vf float8_at(const uint8_t *p, const int bits) {
    const int shift = bits == CODES_E4M3 ? 20 : 21, bias = bits == CODES_E4M3 ? 120 : 112;
    const float edge = bits == CODES_E4M3 ? 0.015625f : 0.00006103515625f; /* the least with a 1 */
    const vi code = vi_of_u8(p), size = vi_shl(vi_and(code, vi_set(0x7f)), shift);
    const vf near = vf_bits(vi_add(size, vi_set(bias << 23)));
    const vf exact = vf_min(near, vf_fma(near, vf_set(2.0f), vf_set(-edge)));
    const vi sign = vi_shl(vi_and(code, vi_set(0x80)), 24);
    return vf_bits(vi_add(vi_magnitude(exact), sign));
}

/* LANES of a panel, from `lane` on, for input k; before scales. */
INLINE vf float_weights(const qn_weight *w, const int bits, int64_t panel, int k, int lane) {
    if (bits == CODES_VALUES4) {
        const int64_t pairs = (w->num_in + 1) / 2;
        const vi two = vi_of_u8(w->codes + (panel * pairs + k / 2) * PANEL + lane);
        return vf_pick((const float *)w->table, k % 2 ? vi_shr(two, 4) : vi_and(two, vi_set(15)));
    }
    const int64_t at = (panel * w->num_in + k) * PANEL + lane;
    return has_scales(bits) ? float8_at(w->codes + at, bits) : weights_at(w->codes, bits, at);
}

INLINE vf float_scales(const qn_weight *w, int64_t panel, int k, int lane) {
    const int64_t groups = (w->num_in + w->share - 1) / w->share, at = panel * groups + k / w->share;
    if (w->scale_kind == SCALES_PANEL) return vf_set(((const float *)w->scales)[at]);
    return vf_load((const float *)w->scales + at * PANEL + lane);
}

#endif
