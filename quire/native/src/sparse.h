/* Weights of which every four neighbouring inputs keep two (2:4), in floats of 16 bits.
 *
 * Eight inputs of a panel are SPARSE_BYTES: four vectors of 16 values, two for each four inputs in
 * the order of their places, then a byte for each output with the four places, two bits each, the
 * first lowest. A product picks the inputs that its values are for; those that meet a zero are not
 * looked at. So a chain has the bits of the same weights with their zeros, for finite inputs.
 */
#ifndef QUIRE_SPARSE_H
#define QUIRE_SPARSE_H

#include "codes.h"

#define SPARSE_BYTES (4 * 2 * PANEL + PANEL)

INLINE int is_sparse(const int bits) { return bits == CODES_HALF24 || bits == CODES_BFLOAT24; }

/* The first byte of inputs 8 k to 8 k + 7. */
INLINE const uint8_t *sparse_at(const qn_weight *w, int64_t panel, int64_t k) {
    return w->codes + (panel * (w->num_in / 8) + k) * SPARSE_BYTES;
}

/* LANES of the j-th values, from `lane` on. */
INLINE vf sparse_values(const uint8_t *p, const int bits, const int j, int lane) {
    return weights_at(p, bits == CODES_HALF24 ? CODES_FLOAT16 : CODES_BFLOAT16, j * PANEL + lane);
}

/* `rows` rows by `panels` panels, as float_tile in float_products.c. */
INLINE void sparse_tile(const qn_weight *w, const float *x, int64_t stride, int64_t panel,
                        const int rows, const int panels, const int bits, float *acc_at) {
    const int width = panels * PANEL / LANES;
    vf acc[16];
    for (int i = 0; i < rows * width; i++) acc[i] = vf_set(0.0f);
    for (int64_t k = 0; k < w->num_in / 8; k++)
        for (int i = 0; i < width; i++) {
            const int lane = i * LANES % PANEL;
            const uint8_t *p = sparse_at(w, panel + i * LANES / PANEL, k);
            const vi places = vi_of_u8(p + 4 * 2 * PANEL + lane);
            vf v[4];
            vi at[4];
            UNROLLED for (int j = 0; j < 4; j++) {
                v[j] = sparse_values(p, bits, j, lane);
                at[j] = vi_shr(places, 2 * j);
            }
            UNROLLED for (int r = 0; r < rows; r++)
                for (int j = 0; j < 4; j++) {
                    const vf xs = vf_among(x + r * stride + 8 * k + j / 2 * 4, at[j]);
                    acc[r * width + i] = vf_fma(v[j], xs, acc[r * width + i]);
                }
        }
    store_tile(acc, rows, width, acc_at);
}

/* One row of the weight with its zeros. */
INLINE void sparse_row(const qn_weight *w, int64_t row, float *out) {
    const int lane = (int)(row % PANEL), from = lane / LANES * LANES;
    memset(out, 0, (size_t)w->num_in * sizeof *out);
    for (int64_t k = 0; k < w->num_in / 8; k++) {
        const uint8_t *p = sparse_at(w, row / PANEL, k);
        const int places = p[4 * 2 * PANEL + lane];
        for (int j = 0; j < 4; j++) {
            float values[LANES];
            vf_store(values, sparse_values(p, w->bits, j, from));
            out[8 * k + j / 2 * 4 + (places >> 2 * j & 3)] = values[lane - from];
        }
    }
}

#endif
