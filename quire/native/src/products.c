/* Products of rounded rows with weights of whole numbers, compiled once for each instruction set.
 *
 * Every output is one chain of fp32 fused multiply-adds over increasing blocks; the sum inside a
 * block is of whole numbers and exact. So an output's bits depend on its row and its weights alone:
 * not on the other rows, the threads or the instruction set. Float weights are float_products.c's.
 */
#include "codes.h"
#include "kernels.h"
#include "rounded.h"

#define AHEAD 2048 /* bytes of codes fetched before they are needed, with their scales */

enum { NOTHING, OFFSETS, ZEROS }; /* what a group has besides its scale */

/* Outputs of one panel and one tile of rows: from `lane` on, LANES of them. */
INLINE void tile(const qn_weight *w, const int8_t *x, int64_t panel, const int lane,
                 const int rows, const int bits, const int block, const int added_kind,
                 const int planes, float *out) {
    const int signed8 = bits == 8 || bits == CODES_TABLE4, size = block_bytes(bits, block);
    const int has_offset = added_kind == OFFSETS;
    const int has_zero = !has_offset && (!signed8 || DOT8_BIAS); /* offsets: zero is 0 */
    const int32_t zero = signed8 ? DOT8_BIAS : w->zero;
    const vb table = bits == CODES_TABLE4 ? tables_at(w, panel, lane) : vb_set(0);
    const qn_scales small = scales_of(w), added = offsets_of(w);
    const int64_t blocks = w->num_in / block, groups = blocks / w->share;
    const int64_t ahead = AHEAD / size * scale_bytes(w) / w->share;
    int64_t group = panel * groups, above = panel * (groups / w->super); /* of this block */
    int in_group = 0, in_super = 0;
    vf acc[TILE_ROWS];
    UNROLLED for (int r = 0; r < rows; r++) acc[r] = vf_set(0.0f);
    for (int64_t b = 0, at = panel * blocks; b < blocks; b++, at++) {
        const uint8_t *codes = w->codes + at * size + 4 * lane;
        for (int i = 0; i < size; i += 64) __builtin_prefetch(codes + AHEAD + i);
        __builtin_prefetch(w->scales + group * scale_bytes(w) + ahead);
        if (has_offset) __builtin_prefetch(added.small + group * scale_bytes(w) + ahead);
        /* Before the sums: behind a branch, compilers put each row's sums into a chain of its own. */
        const vf scale = scales_at(w, small, group, above, lane);
        const vf offset = has_offset ? scales_at(w, added, group, above, lane) : scale;
        const vi zeros = added_kind == ZEROS ? zeros_at(w, bits, group, lane) : vi_set(0);
        if (++in_group == w->share) {
            in_group = 0, group++;
            if (++in_super == w->super) in_super = 0, above++;
        }
        const int half = block == 16 ? (int)(b % 2) : 2; /* which of the sums */
        const int8_t *in = blocks_of(x, rows) + b * block / BLOCK * block_stride(rows);
        const float *totals = totals_of(in, rows) + half * rows;
        const int32_t *sums = sums_of(in, rows) + half * rows;
        vi sum[TILE_ROWS];
        UNROLLED for (int r = 0; r < rows; r++)
            sum[r] = added_kind == ZEROS ? vi_mul(zeros, vi_set(-sums[r]))
                                         : vi_set(has_zero ? -zero * sums[r] : 0);
        dot_block(codes, in + half % 2 * 16, rows, bits, block, planes, table, sum);
        UNROLLED for (int r = 0; r < rows; r++) acc[r] = vf_fma(vf_of_vi(sum[r]), scale, acc[r]);
        UNROLLED for (int r = 0; has_offset && r < rows; r++)
            acc[r] = vf_fma(offset, vf_set(totals[r]), acc[r]);
    }
    UNROLLED for (int r = 0; r < rows; r++)
        vf_store(out + r * PANEL + lane, vf_mul(acc[r], vf_set(((const float *)x)[r])));
}

INLINE void lanes_of_tile(const qn_weight *w, const int8_t *x, int64_t panel, const int rows,
                          const int bits, const int block, const int added, const int planes,
                          float *out) {
    for (int lane = 0; lane < PANEL; lane += LANES)
        tile(w, x, panel, lane, rows, bits, block, added, planes, out);
}

typedef void (*tile_fn)(const qn_weight *w, const int8_t *x, int64_t panel, float *out);
typedef struct {
    int bits, block, added, planes;
    tile_fn of_rows[TILE_ROWS]; /* 1 and more: a row that nobody asked for would cost its share */
} tile_kind;

#define ROWS_OF(name, rows, bits, block, added, planes) \
    static void name##_##rows(const qn_weight *w, const int8_t *x, int64_t panel, float *out) { \
        lanes_of_tile(w, x, panel, rows, bits, block, added, planes, out); \
    }
#if LANES == 16
#define MORE_ROWS_OF(name, bits, block, added, planes) \
    ROWS_OF(name, 5, bits, block, added, planes) \
    ROWS_OF(name, 6, bits, block, added, planes) \
    ROWS_OF(name, 7, bits, block, added, planes) \
    ROWS_OF(name, 8, bits, block, added, planes)
#define MORE_ROWS(name) , name##_5, name##_6, name##_7, name##_8
#else
#define MORE_ROWS_OF(name, bits, block, added, planes)
#define MORE_ROWS(name)
#endif
#define KIND(name, bits, block, added, planes) \
    ROWS_OF(name, 1, bits, block, added, planes) \
    ROWS_OF(name, 2, bits, block, added, planes) \
    ROWS_OF(name, 3, bits, block, added, planes) \
    ROWS_OF(name, 4, bits, block, added, planes) \
    MORE_ROWS_OF(name, bits, block, added, planes) \
    static const tile_kind name = {bits, block, added, planes, \
                                   {name##_1, name##_2, name##_3, name##_4 MORE_ROWS(name)}};

KIND(u2_32, 2, 32, NOTHING, 2)
KIND(u2_32z, 2, 32, ZEROS, 2)
KIND(u2_16o, 2, 16, OFFSETS, 2)
KIND(u2_16z, 2, 16, ZEROS, 2)
KIND(u4_16, 4, 16, NOTHING, 2)
KIND(u4_16z, 4, 16, ZEROS, 2)
KIND(u4_32, 4, 32, NOTHING, 2)
KIND(u4_32o, 4, 32, OFFSETS, 2)
KIND(u4_32z, 4, 32, ZEROS, 2)
KIND(u5_32, 5, 32, NOTHING, 2)
KIND(u5_32o, 5, 32, OFFSETS, 2)
KIND(u5_32z, 5, 32, ZEROS, 2)
KIND(u6_16, 6, 16, NOTHING, 2)
KIND(u6_16z, 6, 16, ZEROS, 2)
KIND(s8_32, 8, 32, NOTHING, 2)
KIND(s8_32z, 8, 32, ZEROS, 2)
KIND(t4_16, CODES_TABLE4, 16, NOTHING, 2)
KIND(t4_32, CODES_TABLE4, 32, NOTHING, 2)

/* Inputs of one plane, for the forms that models were trained so in; others add a plane of zeros. */
KIND(u2_32_one, 2, 32, NOTHING, 1)
KIND(u4_32_one, 4, 32, NOTHING, 1)
KIND(s8_32_one, 8, 32, NOTHING, 1)

static const tile_kind *const KINDS[] = {
    &u2_32_one, &u4_32_one, &s8_32_one, &u2_32, &u2_32z, &u2_16o, &u2_16z, &u4_16, &u4_16z, &u4_32,
    &u4_32o,    &u4_32z,    &u5_32,     &u5_32o, &u5_32z, &u6_16, &u6_16z, &s8_32, &s8_32z, &t4_16,
    &t4_32};

static const tile_kind *kind_of(const qn_weight *w) {
    const int added = w->zeros ? ZEROS : has_offsets(w) ? OFFSETS : NOTHING;
    for (unsigned i = 0; i < sizeof KINDS / sizeof *KINDS; i++)
        if (KINDS[i]->bits == w->bits && KINDS[i]->block == w->block && KINDS[i]->added == added &&
            KINDS[i]->planes >= w->planes)
            return KINDS[i];
    return 0;
}

int KERNEL(can_multiply)(const qn_weight *w) {
    return w->bits >= 100 || (kind_of(w) != 0 && w->num_in % BLOCK == 0);
}

#include "matrix.h"

void KERNEL(multiply)(const qn_weight *w, const qn_operand *x, int64_t begin, int64_t end) {
    if (w->bits >= 100) {
        KERNEL(multiply_floats)(w, x, begin, end);
        return;
    }
    int64_t row = 0;
#ifdef MATRIX_ROWS
    if (MATRIX_TAKES(w) && !w->zeros) /* less zeros, codes may not fit its bytes */
        row = x->rows / MATRIX_ROWS * MATRIX_ROWS;
    if (row) matrix_panels(w, x, begin, end, row);
#endif
    const tile_kind *kind = kind_of(w);
    float out[TILE_ROWS * PANEL];
    while (row < x->rows) {
        const int rows = tile_rows(x->rows - row);
        const tile_fn tile_of = kind->of_rows[rows - 1];
        const int8_t *tile = x->rounded + row * rounded_row_bytes(w->num_in);
        for (int64_t panel = begin; panel < end; panel++) {
            tile_of(w, tile, panel, out);
            write_out(w, panel, out, rows, x->out + row * x->out_stride, x->out_stride);
        }
        row += rows;
    }
}
