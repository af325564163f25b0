/* Rows of a packed weight as floats: an embedding. Compiled once for each instruction set. */
#include "floats.h"
#include "kernels.h"
#include "sparse.h"

static int code_at(const qn_weight *w, int64_t panel, const uint8_t *block, int input, int lane) {
    const int n = w->block / 4, j = input / 4, at = lane * 4 + input % 4;
    switch (w->bits) {
    case 8: return (int8_t)block[64 * j + at];
    case 2: return block[64 * (j % (n / 4)) + at] >> 2 * (j / (n / 4)) & 3;
    }
    int code = block[64 * (j % (n / 2)) + at] >> (j < n / 2 ? 0 : 4) & 15;
    const uint8_t *high = block + 64 * (n / 2);
    if (w->bits == CODES_TABLE4) return w->table[(panel * PANEL + lane / 4 * 4) * 4 + code];
    if (w->bits == 5) code |= (high[at] >> j & 1) << 4;
    if (w->bits == 6) code |= (high[64 * (j % (n / 4)) + at] >> 2 * (j / (n / 4)) & 3) << 4;
    return code;
}

static float scale_of(const qn_weight *w, qn_scales from, int64_t at, int lane) {
    float lanes[LANES];
    vf_store(lanes, scales_at(w, from, at, at / w->super, lane / LANES * LANES));
    return lanes[lane % LANES];
}

static int zero_of(const qn_weight *w, int64_t group, int lane) {
    const uint8_t zero = w->zeros[group * PANEL + lane];
    return w->bits == 8 ? (int8_t)zero : zero;
}

/* One row of the weight as floats: scale * (code - zero) rounded, then the offset added. */
void KERNEL(expand_row)(const qn_weight *w, int64_t row, float *out) {
    const int64_t panel = row / PANEL;
    const int lane = (int)(row % PANEL);
    if (is_sparse(w->bits)) {
        sparse_row(w, row, out);
        return;
    }
    if (w->bits >= 100) {
        for (int k = 0; k < w->num_in; k++) {
            float lanes[LANES];
            const int from = lane / LANES * LANES;
            vf v = float_weights(w, w->bits, panel, k, from);
            if (has_scales(w->bits)) v = vf_mul(v, float_scales(w, panel, k, from));
            vf_store(lanes, v);
            out[k] = lanes[lane % LANES];
        }
        return;
    }
    const int blocks = w->num_in / w->block;
    const int64_t bytes = block_bytes(w->bits, w->block);
    for (int b = 0; b < blocks; b++) {
        const int64_t at = (panel * blocks + b) / w->share; /* the group: shares fill panels */
        const uint8_t *codes = w->codes + (panel * blocks + b) * bytes;
        const int zero = w->zeros ? zero_of(w, at, lane) : w->zero;
        const float scale = scale_of(w, scales_of(w), at, lane);
        float offset = 0.0f;
        if (has_offsets(w)) offset = scale_of(w, offsets_of(w), at, lane);
        for (int i = 0; i < w->block; i++) {
            const float value = scale * (float)(code_at(w, panel, codes, i, lane) - zero);
            out[b * w->block + i] = has_offsets(w) ? value + offset : value;
        }
    }
}
