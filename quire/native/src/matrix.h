/* Products of many rows on a matrix unit, which sums 16 rows by 16 outputs at a time.
 *
 * The unit gives the whole-number sums of one block of inputs, exactly; scales follow in the chain
 * of `tile`, so the bits are those of fewer rows. Codes are unpacked once for all rows.
 */
#ifdef QUIRE_PLAIN
#elif defined(__AMX_INT8__) || defined(QUIRE_TILES)
#include "matrix_amx.h"
#define MATRIX_ROWS 16 /* fewer rows stay with the vectors */
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#include "matrix_i8mm.h"
#define MATRIX_ROWS 16
#endif

#ifdef MATRIX_ROWS
#include <stdlib.h>

#define MATRIX_PANELS 4 /* that share each load of activations */
#define MATRIX_BLOCKS 2 /* whose sums are kept before scales are applied: 16 KiB */

typedef struct {
    const int8_t *codes; /* [inputs / 4, 16 outputs, 4], zero subtracted */
    float *scales, *offsets;
} open_panel;

static _Thread_local char *matrix_room;
static _Thread_local size_t matrix_room_size;

static char *matrix_room_of(size_t bytes) {
    if (bytes > matrix_room_size) {
        free(matrix_room);
        matrix_room = aligned_alloc(64, bytes); /* a multiple of 64: whole cache lines */
        if (!matrix_room) abort();
        matrix_room_size = bytes;
    }
    return matrix_room;
}

INLINE void unpack_as(const qn_weight *w, int64_t panel, const int bits, const int block,
                      int8_t *into) {
    const int blocks = w->num_in / block;
    const int zero = bits == CODES_TABLE4 || has_offsets(w) ? 0 : w->zero; /* as in tile */
    const uint8_t *from = w->codes + panel * blocks * block_bytes(bits, block);
    for (int b = 0; b < blocks; b++, from += block_bytes(bits, block), into += block * PANEL) {
        for (int j = 0; j < block / 4; j++)
            for (int lane = 0; lane < PANEL; lane += LANES) {
                const vb table = bits == CODES_TABLE4 ? tables_at(w, panel, lane) : vb_set(0);
                const vb v = codes_of(from + 4 * lane, bits, block, j, table);
                memcpy(into + 64 * j + 4 * lane, &v, sizeof v);
            }
        for (int i = 0; zero && i < block * PANEL; i++) into[i] = (int8_t)(into[i] - zero);
    }
}

#define UNPACK(bits) \
    case bits: \
        if (w->block == 32) unpack_as(w, panel, bits, 32, into); \
        else unpack_as(w, panel, bits, 16, into); \
        return into

static const int8_t *unpack(const qn_weight *w, int64_t panel, int8_t *into) {
    switch (w->bits) {
        UNPACK(2);
        UNPACK(4);
        UNPACK(5);
        UNPACK(6);
        UNPACK(CODES_TABLE4);
    }
    return (const int8_t *)w->codes + panel * w->num_in * PANEL; /* 8 bits: as they should lie */
}

/* Some blocks of 16 rows: what the unit and the rounding found. */
typedef struct {
    int32_t sums[MATRIX_BLOCKS][2][MATRIX_PANELS][MATRIX_ROWS * PANEL] /* of both planes */
        __attribute__((aligned(64)));
    float totals[MATRIX_BLOCKS][MATRIX_ROWS];
    int first, count;
} open_blocks;

/* Block `b` of 16 inputs or 32, of the tiles that hold 16 rows from `row` on: planes [2, 16, 32]. */
INLINE void read_rounded(const qn_operand *x, int64_t row, int num_in, const int block, int b,
                         const int has_offset, open_blocks *open, int8_t *planes) {
    const int half = block == 16 ? (open->first + b) % 2 : 2;
    for (int r = 0; r < MATRIX_ROWS; r += TILE_ROWS) {
        const int8_t *tile = x->rounded + (row + r) * rounded_row_bytes(num_in);
        const int8_t *in = blocks_of(tile, TILE_ROWS) +
                           (int64_t)(open->first + b) * block / BLOCK * block_stride(TILE_ROWS);
        memcpy(planes + r * BLOCK, in, TILE_ROWS * BLOCK);
        memcpy(planes + (MATRIX_ROWS + r) * BLOCK, high_of(in, TILE_ROWS), TILE_ROWS * BLOCK);
        if (has_offset)
            memcpy(open->totals[b] + r, totals_of(in, TILE_ROWS) + half * TILE_ROWS, TILE_ROWS * 4);
    }
}

/* 16 rows of one panel, each output going on from acc [16, 16] with the same steps as in tile. */
INLINE void add_blocks(const open_blocks *open, const open_panel *panel, const int which,
                       const int has_offset, int planes, float *acc_at) {
    for (int part = 0; part < 2 * PANEL / LANES; part++) {
        const int lane = part / 2 * LANES, top = part % 2 * 8;
        vf acc[8];
        for (int r = 0; r < 8; r++) acc[r] = vf_load(acc_at + (top + r) * PANEL + lane);
        for (int b = 0; b < open->count; b++) {
            const int at = (open->first + b) * PANEL + lane;
            const vf scale = vf_load(panel->scales + at);
            const vf offset = has_offset ? vf_load(panel->offsets + at) : vf_set(0.0f);
            for (int r = 0; r < 8; r++) {
                vi sum, high;
                memcpy(&sum, &open->sums[b][0][which][(top + r) * PANEL + lane], sizeof sum);
                if (planes == 2) {
                    memcpy(&high, &open->sums[b][1][which][(top + r) * PANEL + lane], sizeof high);
                    sum = vi_add(sum, vi_shl(high, HIGH_SHIFT));
                }
                acc[r] = vf_fma(vf_of_vi(sum), scale, acc[r]);
                if (has_offset) acc[r] = vf_fma(offset, vf_set(open->totals[b][top + r]), acc[r]);
            }
        }
        for (int r = 0; r < 8; r++) vf_store(acc_at + (top + r) * PANEL + lane, acc[r]);
    }
}

/* 16 rows by some panels, over all blocks. */
INLINE void matrix_tile(const qn_weight *w, const qn_operand *x, const open_panel *panels,
                        int num_panels, int64_t row, const int block, const int has_offset,
                        float *acc) {
    const int blocks = w->num_in / block;
    int8_t rounded[2 * MATRIX_ROWS * BLOCK] __attribute__((aligned(64)));
    open_blocks open;
    memset(acc, 0, (size_t)num_panels * MATRIX_ROWS * PANEL * 4);
    for (open.first = 0; open.first < blocks; open.first += open.count) {
        const int left = blocks - open.first;
        open.count = left < MATRIX_BLOCKS ? left : MATRIX_BLOCKS;
        for (int b = 0; b < open.count; b++) {
            const int64_t input = (int64_t)(open.first + b) * block;
            const int8_t *codes[MATRIX_PANELS];
            for (int i = 0; i < num_panels; i++) codes[i] = panels[i].codes + input * PANEL;
            read_rounded(x, row, w->num_in, block, b, has_offset, &open, rounded);
            for (int i = 0; i < w->planes; i++)
                matrix_sums(rounded + i * MATRIX_ROWS * BLOCK + input % BLOCK, BLOCK, codes,
                            num_panels, block, open.sums[b][i][0]);
        }
        for (int i = 0; i < num_panels; i++)
            add_blocks(&open, &panels[i], i, has_offset, w->planes, acc + i * MATRIX_ROWS * PANEL);
    }
    for (int r = 0; r < MATRIX_ROWS; r++) {
        const int8_t *tile = x->rounded + (row + r / TILE_ROWS * TILE_ROWS) *
                                              rounded_row_bytes(w->num_in);
        const vf scale = vf_set(((const float *)tile)[r % TILE_ROWS]);
        for (int i = 0; i < num_panels; i++)
            for (int lane = 0; lane < PANEL; lane += LANES) {
                float *at = acc + (i * MATRIX_ROWS + r) * PANEL + lane;
                vf_store(at, vf_mul(vf_load(at), scale));
            }
    }
}

static void matrix_rows(const qn_weight *w, const qn_operand *x, const open_panel *panels,
                        int num_panels, int64_t row, float *acc) {
    if (w->block == 32 && has_offsets(w)) matrix_tile(w, x, panels, num_panels, row, 32, 1, acc);
    else if (w->block == 32) matrix_tile(w, x, panels, num_panels, row, 32, 0, acc);
    else if (has_offsets(w)) matrix_tile(w, x, panels, num_panels, row, 16, 1, acc);
    else matrix_tile(w, x, panels, num_panels, row, 16, 0, acc);
}

/* Scales, or offsets, of all blocks of a panel. */
static void open_scales(const qn_weight *w, qn_scales from, int64_t panel, float *into) {
    const int64_t blocks = w->num_in / w->block, groups = blocks / w->share;
    for (int64_t b = 0; b < blocks; b++)
        for (int lane = 0; lane < PANEL; lane += LANES) {
            const int64_t group = panel * groups + b / w->share;
            vf_store(into + b * PANEL + lane, scales_at(w, from, group, group / w->super, lane));
        }
}

/* Panels [begin, end) of `rows` rows, a multiple of MATRIX_ROWS. */
static void matrix_panels(const qn_weight *w, const qn_operand *x, int64_t begin, int64_t end,
                          int64_t rows) {
    const int blocks = w->num_in / w->block;
    const size_t codes_size = (size_t)w->num_in * PANEL, scales_size = (size_t)blocks * PANEL * 4;
    char *room = matrix_room_of(MATRIX_PANELS * (codes_size + 2 * scales_size));
    float acc[MATRIX_PANELS * MATRIX_ROWS * PANEL];
    open_panel panels[MATRIX_PANELS];
    matrix_begin(w->block);
    for (int64_t panel = begin, count; panel < end; panel += count) {
        count = end - panel < MATRIX_PANELS ? end - panel : MATRIX_PANELS;
        char *at = room;
        for (int i = 0; i < count; i++, at += codes_size + 2 * scales_size) {
            panels[i].scales = (float *)(at + codes_size);
            panels[i].offsets = (float *)(at + codes_size + scales_size);
            panels[i].codes = unpack(w, panel + i, (int8_t *)at);
            open_scales(w, scales_of(w), panel + i, panels[i].scales);
            if (has_offsets(w))
                open_scales(w, offsets_of(w), panel + i, panels[i].offsets);
        }
        for (int64_t row = 0; row < rows; row += MATRIX_ROWS) {
            matrix_rows(w, x, panels, (int)count, row, acc);
            for (int i = 0; i < count; i++)
                write_out(w, panel + i, acc + i * MATRIX_ROWS * PANEL, MATRIX_ROWS,
                          x->out + row * x->out_stride, x->out_stride);
        }
    }
    matrix_end();
}
#endif
