/* Activations rounded to int8 for products with packed weights; rounded.h has the layout. */
#include "kernels.h"
#include "lanes.h"
#include "rounded.h"

/* The largest magnitude of a block; no number, if one of the block is none. */
static float block_top(const float *x) {
    vi most = vi_set(0); /* bits of magnitudes are ordered as the magnitudes are */
    for (int i = 0; i < BLOCK; i += LANES) most = vi_max(most, vi_magnitude(vf_load(x + i)));
    const int32_t bits = vi_top(most);
    float top;
    memcpy(&top, &bits, sizeof top);
    return bits >= 0x7f800000 ? NAN : top;
}

/* The largest magnitude of a row, in the same way. */
static float row_top(const float *x, int num_in) {
    float top = 0.0f;
    for (int start = 0; start < num_in; start += BLOCK) {
        const float next = block_top(x + start);
        if (next != next) return next;
        top = next > top ? next : top;
    }
    return top;
}

/* One block of one row, into its place in a tile of `rows` rows. */
static void round_block(const float *x, float top, int8_t *block, int row, int rows) {
    const float scale = top / 127.0f;
    float inverse = 127.0f / top;
    if (!(inverse <= 3.4e38f)) inverse = 0.0f; /* nothing, or next to nothing */
    int32_t sum[2] = {0, 0};
    for (int i = 0; i < BLOCK; i += LANES) { /* within 127: top times its inverse rounds to that */
        const vi whole = vi_of_vf(vf_mul(vf_load(x + i), vf_set(inverse)));
        vi_narrow(block + BLOCK * row + i, whole);
        sum[i / 16] += vi_sum(whole);
    }
    float *scales = (float *)(block + BLOCK * rows) + row, *totals = scales + 4 * rows;
    int32_t *sums = (int32_t *)scales + rows;
    *scales = scale;
    sums[0] = sum[0];
    sums[rows] = sum[1];
    sums[2 * rows] = sum[0] + sum[1];
    totals[0] = scale * (float)sum[0];
    totals[rows] = scale * (float)sum[1];
    totals[2 * rows] = totals[0] + totals[rows];
}

void KERNEL(round_rows)(const float *x, int64_t stride, int64_t begin, int64_t end, int64_t rows,
                        const qn_weight *w, int8_t *into) {
    const int num_in = w->num_in;
    for (int64_t row = begin; row < end; row++) {
        int64_t first = row / TILE_ROWS * TILE_ROWS; /* of the row's tile */
        int width = tile_rows(rows - first);
        while (row >= first + width) {
            first += width;
            width = tile_rows(rows - first);
        }
        int8_t *tile = into + first * rounded_row_bytes(num_in);
        const float *at = x + row * stride;
        const float top = w->rounds_rows ? row_top(at, num_in) : 0.0f;
        for (int start = 0; start < num_in; start += BLOCK, tile += width * ROUNDED_BYTES)
            round_block(at + start, w->rounds_rows ? top : block_top(at + start), tile,
                        (int)(row - first), width);
    }
}
