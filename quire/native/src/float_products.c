/* Products of float rows with float weights, compiled once for each instruction set.
 *
 * Every output is one chain of fp32 fused multiply-adds over increasing inputs. Floats with scales
 * are made on the way, so their products have the bits of those with the same weights in fp32.
 */
#include "floats.h"
#include "kernels.h"
#include "sparse.h"

#define MOST_ROWS (LANES == 16 ? 8 : 4) /* of a tile: more sums than registers are slow */

/* `rows` rows by `panels` panels: every output one chain over increasing inputs. */
INLINE void float_tile(const qn_weight *w, const float *x, int64_t stride, int64_t panel,
                       const int rows, const int panels, const int bits, float *acc_at) {
    const int num_in = w->num_in, width = panels * PANEL / LANES;
    vf acc[16];
    for (int i = 0; i < rows * width; i++) acc[i] = vf_set(0.0f);
    vf v[8], scale[8];
    for (int k = 0, left = 0; k < num_in; k++, left--) {
        if (has_scales(bits) && left == 0) {
            left = w->share;
            for (int i = 0; i < width; i++)
                scale[i] = float_scales(w, panel + i * LANES / PANEL, k, i * LANES % PANEL);
        }
        for (int i = 0; i < width; i++) {
            v[i] = float_weights(w, bits, panel + i * LANES / PANEL, k, i * LANES % PANEL);
            if (has_scales(bits)) v[i] = vf_mul(v[i], scale[i]);
        }
        for (int r = 0; r < rows; r++) {
            const vf xs = vf_set(x[r * stride + k]);
            for (int i = 0; i < width; i++)
                acc[r * width + i] = vf_fma(v[i], xs, acc[r * width + i]);
        }
    }
    store_tile(acc, rows, width, acc_at);
}

#define FLOAT_TILES(name, tile, bits) \
    static void name(const qn_weight *w, const float *x, int64_t stride, int64_t panel, int rows, \
                     int panels, float *acc) { \
        if (rows == 1 && panels == 4) tile(w, x, stride, panel, 1, 4, bits, acc); \
        else if (rows == 1) tile(w, x, stride, panel, 1, 1, bits, acc); \
        else if (rows == 2) tile(w, x, stride, panel, 2, 1, bits, acc); \
        else if (rows == 4) tile(w, x, stride, panel, 4, 1, bits, acc); \
        else tile(w, x, stride, panel, MOST_ROWS, 1, bits, acc); \
    }
FLOAT_TILES(float32_tiles, float_tile, CODES_FLOAT32)
FLOAT_TILES(float16_tiles, float_tile, CODES_FLOAT16)
FLOAT_TILES(bfloat16_tiles, float_tile, CODES_BFLOAT16)
FLOAT_TILES(e4m3_tiles, float_tile, CODES_E4M3)
FLOAT_TILES(e5m2_tiles, float_tile, CODES_E5M2)
FLOAT_TILES(values4_tiles, float_tile, CODES_VALUES4)
FLOAT_TILES(half24_tiles, sparse_tile, CODES_HALF24)
FLOAT_TILES(bfloat24_tiles, sparse_tile, CODES_BFLOAT24)

typedef void (*float_tiles)(const qn_weight *, const float *, int64_t, int64_t, int, int, float *);
static const float_tiles TILES[] = {float32_tiles, float16_tiles, bfloat16_tiles, e4m3_tiles,
                                    e5m2_tiles,    values4_tiles, half24_tiles,   bfloat24_tiles};

void KERNEL(multiply_floats)(const qn_weight *w, const qn_operand *x, int64_t begin, int64_t end) {
    const int64_t rows = x->rows, stride = x->x_stride, out_stride = x->out_stride;
    float acc[4 * 8 * PANEL];
    for (int64_t panel = begin, panels; panel < end; panel += panels) {
        panels = end - panel >= 4 && rows < 4 ? 4 : 1;
        for (int64_t row = 0, count; row < rows; row += count) {
            for (count = panels == 4 ? 1 : MOST_ROWS; count > rows - row;) count /= 2;
            const float *at = x->x + row * stride;
            TILES[w->bits - CODES_FLOAT32](w, at, stride, panel, (int)count, (int)panels, acc);
            for (int i = 0; i < panels; i++)
                write_out(w, panel + i, acc + i * 8 * PANEL, (int)count, x->out + row * out_stride,
                          out_stride);
        }
    }
}
