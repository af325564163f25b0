/* Activations rounded to whole numbers for products with packed weights; rounded.h has the layout. */
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
static void round_block(const float *x, float inverse, int planes, int8_t *block, int row,
                        int rows) {
    int8_t *low_at = block + BLOCK * row, *high_at = low_at + BLOCK * rows;
    int32_t sum[2] = {0, 0};
    for (int i = 0; i < BLOCK; i += LANES) { /* within 127: top times its inverse rounds to most */
        const vf scaled = vf_mul(vf_load(x + i), vf_set(inverse));
        const vi whole = vi_of_vf(scaled);
        vi high = vi_set(0);
        if (planes == 2) high = vi_of_vf(vf_mul(scaled, vf_set(1.0f / (1 << HIGH_SHIFT))));
        vi_narrow(low_at + i, vi_add(whole, vi_mul(high, vi_set(-(1 << HIGH_SHIFT)))));
        vi_narrow(high_at + i, high);
        sum[i / 16] += vi_sum(whole);
    }
    int32_t *sums = (int32_t *)(block + 2 * BLOCK * rows) + row;
    float *totals = (float *)sums + 3 * rows;
    const int32_t all[3] = {sum[0], sum[1], sum[0] + sum[1]};
    for (int i = 0; i < 3; i++) {
        sums[i * rows] = all[i];
        totals[i * rows] = (float)all[i];
    }
}

static void round_row(const float *x, const qn_weight *w, int8_t *tile, int row, int rows) {
    const float most = w->planes == 2 ? MOST_OF_TWO : MOST_OF_ONE, top = row_top(x, w->num_in);
    float inverse = most / top;
    if (!(inverse <= 3.4e38f)) inverse = 0.0f; /* nothing, or next to nothing */
    ((float *)tile)[row] = top / most;
    int8_t *block = tile + 4 * rows;
    for (int start = 0; start < w->num_in; start += BLOCK, block += block_stride(rows))
        round_block(x + start, inverse, w->planes, block, row, rows);
}

void KERNEL(round_rows)(const float *x, int64_t stride, int64_t begin, int64_t end, int64_t rows,
                        const qn_weight *w, int8_t *into) {
    for (int64_t row = begin; row < end; row++) {
        const int64_t first = row / TILE_ROWS * TILE_ROWS; /* of the row's tile */
        round_row(x + row * stride, w, into + first * rounded_row_bytes(w->num_in),
                  (int)(row - first), tile_rows(rows - first));
    }
}
