/* Products of float rows with packed weights, compiled once for each instruction set.
 *
 * Every output is one chain of fp32 fused multiply-adds over increasing blocks (of inputs, for
 * float weights); the sum inside a block is of whole numbers and exact. So an output's bits depend
 * on its row and its weights alone: not on the other rows, the threads or the instruction set.
 */
#include "kernels.h"
#include "lanes.h"
#include "quire_native.h"

#define INLINE static inline __attribute__((always_inline))
#define AHEAD 2048 /* bytes of codes fetched before they are needed */
#define MAX_BLOCKS 2048 /* of a panel whose scales are expanded at a time */

/* ------------------------------------------------------------------ rounding */

/* One row: int8 codes, a scale for each 32 inputs, sums of codes for each 16. */
static void round_row(const float *x, int num_in, int8_t *codes, float *scales, int32_t *sums,
                      float *totals) {
    for (int start = 0; start < num_in; start += BLOCK) {
        vf top = vf_set(0.0f), broken = vf_set(0.0f);
        for (int i = 0; i < BLOCK; i += LANES) {
            const vf v = vf_load(x + start + i);
            top = vf_max(top, vf_abs(v));
            broken = vf_fma(v, vf_set(0.0f), broken); /* no number, if one of them is none */
        }
        float lanes[LANES], most = 0.0f, sign = 0.0f;
        vf_store(lanes, top);
        for (int i = 0; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;
        vf_store(lanes, broken);
        for (int i = 0; i < LANES; i++) sign += lanes[i];
        float inverse = 127.0f / most;
        if (!(inverse <= 3.4e38f)) inverse = 0.0f; /* nothing, or next to nothing */
        scales[start / BLOCK] = most / 127.0f + sign;
        int32_t rounded[BLOCK];
        for (int i = 0; i < BLOCK; i += LANES) {
            vi r = vi_of_vf(vf_mul(vf_load(x + start + i), vf_set(inverse)));
            memcpy(rounded + i, &r, sizeof r);
        }
        for (int half = 0; half < 2; half++) {
            int32_t sum = 0;
            for (int i = half * 16; i < half * 16 + 16; i++) {
                int32_t r = rounded[i]; /* 127 / most may round up by one unit */
                r = r > 127 ? 127 : r < -127 ? -127 : r;
                codes[start + i] = (int8_t)r;
                sum += r;
            }
            sums[start / 16 + half] = sum;
            totals[start / 16 + half] = scales[start / BLOCK] * (float)sum;
        }
    }
}

void KERNEL(round_rows)(const float *x, int64_t stride, int64_t begin, int64_t end, int num_in,
                        qn_rounded into) {
    for (int64_t row = begin; row < end; row++)
        round_row(x + row * stride, num_in, into.codes + row * num_in,
                  into.scales + row * (num_in / BLOCK), into.sums + row * (num_in / 16),
                  into.totals + row * (num_in / 16));
}

/* ------------------------------------------------------------------ whole numbers */

/* 2^(e - 128); the two smallest are not normal numbers. */
static vf powers_at(const uint8_t *from) {
    int32_t bits[LANES];
    for (int j = 0; j < LANES; j++) {
        const int e = from[j];
        bits[j] = e > 1 ? (e - 1) << 23 : e ? 1 << 22 : 1 << 21;
    }
    vi v;
    memcpy(&v, bits, sizeof v);
    return vf_bits(v);
}

/* Scales (or offsets) of `count` blocks of a panel, as floats [count, 16]. */
static void expand_scales(const qn_weight *w, const uint8_t *from, const uint16_t *super,
                          int64_t panel, int first, int count, float *into) {
    const int blocks = w->num_in / w->block;
    const int64_t at = (panel * blocks + first) * PANEL;
    const int size = count * PANEL;
    switch (w->scale_kind) {
    case SCALES_HALF:
        for (int i = 0; i < size; i += LANES)
            vf_store(into + i, vf_half((const uint16_t *)from + at + i));
        return;
    case SCALES_FLOAT: memcpy(into, (const float *)from + at, (size_t)size * 4); return;
    case SCALES_POWER:
        for (int i = 0; i < size; i += LANES) vf_store(into + i, powers_at(from + at + i));
        return;
    }
    super += panel * (blocks / w->super) * PANEL;
    for (int i = 0; i < size; i += LANES) {
        const vf d = vf_half(super + (first + i / PANEL) / w->super * PANEL + i % PANEL);
        const vf s = w->scale_kind == SCALES_U8 ? vf_of_u8(from + at + i)
                                                : vf_of_s8((const int8_t *)from + at + i);
        vf_store(into + i, vf_mul(s, d));
    }
}

/* Bytes of codes of one block of a panel. */
INLINE int64_t block_bytes(const int bits, const int block) {
    return (int64_t)(bits == CODES_TABLE4 ? 4 : bits) * block * PANEL / 8;
}

/* The codes of inputs 4 j to 4 j + 3 of a block, from its planes of 4, 2 and 1 bits. */
INLINE vb codes_of(const uint8_t *p, const int bits, const int block, const int j, vb table) {
    const int n = block / 4; /* vectors of the block */
    if (bits == 8) return vb_load(p + 64 * j);
    if (bits == 4 || bits == CODES_TABLE4 || bits == 5 || bits == 6) {
        vb v = vb_load(p + 64 * (j % (n / 2)));
        v = vb_and(j < n / 2 ? v : vb_shr(v, 4), vb_set(15));
        if (bits == CODES_TABLE4) return vb_look(table, v);
        if (bits == 5) { /* bit j of each byte */
            vb high = vb_load(p + 64 * (n / 2));
            high = vb_and(j <= 4 ? vb_shl(high, 4 - (j <= 4 ? j : 0)) : vb_shr(high, j - 4),
                          vb_set(16));
            v = vb_or(v, high);
        }
        if (bits == 6) {
            vb high = vb_load(p + 64 * (n / 2 + j % (n / 4)));
            const int at = 2 * (j / (n / 4)); /* 0, 2, 4, 6 */
            high = vb_and(at <= 4 ? vb_shl(high, 4 - (at <= 4 ? at : 0)) : vb_shr(high, 2),
                          vb_set(48));
            v = vb_or(v, high);
        }
        return v;
    }
    vb v = vb_load(p + 64 * (j % (n / 4)));
    return vb_and(vb_shr(v, 2 * (j / (n / 4))), vb_set(3));
}

typedef struct {
    const qn_weight *w;
    const qn_rounded *x;
    const float *scales, *offsets; /* of this panel, expanded */
    int64_t panel, row;
    int first, count; /* blocks */
} tile_args;

/* `rows` rows by LANES outputs of a panel, over some blocks; acc goes on from where it is. */
INLINE void tile(const tile_args *a, const int lane, const int rows, const int bits,
                 const int block, const int has_offset, float *acc_at) {
    const qn_weight *w = a->w;
    const int num_in = w->num_in;
    const int signed8 = bits == 8 || bits == CODES_TABLE4;
    const int32_t zero = signed8 ? DOT8_BIAS : w->zero;
    const vb table = bits == CODES_TABLE4 ? vb_table(w->table) : vb_set(0);
    const uint8_t *codes = w->codes + (a->panel * (num_in / block) + a->first) *
                           block_bytes(bits, block) + 4 * lane;
    vf acc[8];
    for (int r = 0; r < rows; r++) acc[r] = vf_load(acc_at + r * PANEL + lane);
    for (int b = 0; b < a->count; b++, codes += block_bytes(bits, block)) {
        const int64_t input = (int64_t)(a->first + b) * block;
        for (int i = 0; rows == 1 && i < block_bytes(bits, block); i += 64)
            __builtin_prefetch(codes + AHEAD + i);
        vi sum[8];
        for (int r = 0; r < rows; r++) {
            const int32_t *s = a->x->sums + (a->row + r) * (num_in / 16) + input / 16;
            const int has_zero = !has_offset && (!signed8 || DOT8_BIAS); /* offsets: zero is 0 */
            sum[r] = vi_set(has_zero ? -zero * (block == 32 ? s[0] + s[1] : s[0]) : 0);
        }
        for (int j = 0; j < block / 4; j++) {
            const vb c = codes_of(codes, bits, block, j, table);
            for (int r = 0; r < rows; r++) {
                const vb x = vb_four(a->x->codes + (a->row + r) * num_in + input + 4 * j);
                sum[r] = signed8 ? vi_dot8(sum[r], c, x) : vi_dot(sum[r], c, x);
            }
        }
        const vf scale = vf_load(a->scales + b * PANEL + lane);
        for (int r = 0; r < rows; r++) {
            const float dx = a->x->scales[(a->row + r) * (num_in / BLOCK) + input / BLOCK];
            acc[r] = vf_fma(vf_of_vi(sum[r]), vf_mul(scale, vf_set(dx)), acc[r]);
            if (has_offset) {
                const vf offset = vf_load(a->offsets + b * PANEL + lane);
                const float *t = a->x->totals + (a->row + r) * (num_in / 16) + input / 16;
                acc[r] = vf_fma(offset, vf_set(block == 32 ? t[0] + t[1] : t[0]), acc[r]);
            }
        }
    }
    for (int r = 0; r < rows; r++) vf_store(acc_at + r * PANEL + lane, acc[r]);
}

INLINE void lanes_of_tile(const tile_args *a, const int rows, const int bits, const int block,
                          const int has_offset, float *acc) {
    for (int lane = 0; lane < PANEL; lane += LANES)
        tile(a, lane, rows, bits, block, has_offset, acc);
}

#define ROWS_OF(name, bits, block, has_offset) \
    static void name##_1(const tile_args *a, float *acc) { \
        lanes_of_tile(a, 1, bits, block, has_offset, acc); \
    } \
    static void name##_4(const tile_args *a, float *acc) { \
        lanes_of_tile(a, 4, bits, block, has_offset, acc); \
    } \
    static void name##_8(const tile_args *a, float *acc) { \
        lanes_of_tile(a, 8, bits, block, has_offset, acc); \
    }

ROWS_OF(u2_32, 2, 32, 0)
ROWS_OF(u2_16o, 2, 16, 1)
ROWS_OF(u4_16, 4, 16, 0)
ROWS_OF(u4_32, 4, 32, 0)
ROWS_OF(u4_32o, 4, 32, 1)
ROWS_OF(u5_32, 5, 32, 0)
ROWS_OF(u5_32o, 5, 32, 1)
ROWS_OF(u6_16, 6, 16, 0)
ROWS_OF(s8_32, 8, 32, 0)
ROWS_OF(t4_32, CODES_TABLE4, 32, 0)

typedef void (*tile_fn)(const tile_args *, float *);
typedef struct {
    int bits, block, has_offset;
    tile_fn rows1, rows4, rows8;
} tile_kind;

#define KIND(name, bits, block, has_offset) \
    { bits, block, has_offset, name##_1, name##_4, name##_8 }
static const tile_kind KINDS[] = {
    KIND(u2_32, 2, 32, 0),   KIND(u2_16o, 2, 16, 1), KIND(u4_16, 4, 16, 0),
    KIND(u4_32, 4, 32, 0),   KIND(u4_32o, 4, 32, 1), KIND(u5_32, 5, 32, 0),
    KIND(u5_32o, 5, 32, 1),  KIND(u6_16, 6, 16, 0),  KIND(s8_32, 8, 32, 0),
    KIND(t4_32, CODES_TABLE4, 32, 0),
};

static const tile_kind *kind_of(const qn_weight *w) {
    for (unsigned i = 0; i < sizeof KINDS / sizeof *KINDS; i++)
        if (KINDS[i].bits == w->bits && KINDS[i].block == w->block &&
            KINDS[i].has_offset == (w->offsets != 0))
            return &KINDS[i];
    return 0;
}

int KERNEL(can_multiply)(const qn_weight *w) {
    return w->bits >= 100 || (kind_of(w) != 0 && w->num_in % BLOCK == 0);
}

static void write_out(const qn_weight *w, int64_t panel, const float *acc, int rows, float *out,
                      int64_t stride) {
    const int left = w->num_out - (int)(panel * PANEL), width = left < PANEL ? left : PANEL;
    for (int r = 0; r < rows; r++) {
        float *at = out + r * stride + panel * PANEL;
        for (int i = 0; width == PANEL && i < PANEL; i += LANES) {
            const vf v = vf_load(acc + r * PANEL + i);
            vf_store(at + i, w->bias ? vf_add(v, vf_load(w->bias + panel * PANEL + i)) : v);
        }
        for (int i = 0; width < PANEL && i < width; i++)
            at[i] = w->bias ? acc[r * PANEL + i] + w->bias[panel * PANEL + i] : acc[r * PANEL + i];
    }
}

static void packed_panel(const tile_kind *kind, const qn_weight *w, const qn_rounded *x,
                         int64_t panel, int64_t rows, float *out, int64_t stride) {
    const int blocks = w->num_in / w->block;
    float scales[MAX_BLOCKS * PANEL / 8], offsets[MAX_BLOCKS * PANEL / 8];
    const int most = MAX_BLOCKS / 8;
    float acc[8 * PANEL];
    tile_args a = {w, x, scales, offsets, panel, 0, 0, 0};
    if (blocks <= most) { /* the usual case: scales are expanded once for all rows */
        expand_scales(w, w->scales, w->super_scales, panel, 0, blocks, scales);
        if (w->offsets) expand_scales(w, w->offsets, w->super_offsets, panel, 0, blocks, offsets);
    }
    for (int64_t row = 0, count; row < rows; row += count) {
        count = rows - row >= 8 ? 8 : rows - row >= 4 ? 4 : 1;
        a.row = row;
        memset(acc, 0, (size_t)count * PANEL * 4);
        for (int first = 0; first < blocks; first += most) {
            a.first = first;
            a.count = blocks - first < most ? blocks - first : most;
            if (blocks > most) {
                expand_scales(w, w->scales, w->super_scales, panel, first, a.count, scales);
                if (w->offsets)
                    expand_scales(w, w->offsets, w->super_offsets, panel, first, a.count, offsets);
            }
            (count == 8 ? kind->rows8 : count == 4 ? kind->rows4 : kind->rows1)(&a, acc);
        }
        write_out(w, panel, acc, (int)count, out + row * stride, stride);
    }
}

/* ------------------------------------------------------------------ floats */

INLINE vf weights_at(const uint8_t *p, const int bits, int64_t index) {
    if (bits == CODES_FLOAT32) return vf_load((const float *)p + index);
    if (bits == CODES_FLOAT16) return vf_half((const uint16_t *)p + index);
    return vf_bfloat((const uint16_t *)p + index);
}

/* `rows` rows by `panels` panels: every output one chain over increasing inputs. */
INLINE void float_tile(const qn_weight *w, const float *x, int64_t stride, int64_t panel,
                       const int rows, const int panels, const int bits, float *acc_at) {
    const int num_in = w->num_in, width = panels * PANEL / LANES;
    vf acc[16];
    for (int i = 0; i < rows * width; i++) acc[i] = vf_set(0.0f);
    const int64_t first = panel * num_in * PANEL, next = (int64_t)num_in * PANEL;
    for (int k = 0; k < num_in; k++) {
        vf v[8];
        for (int i = 0; i < width; i++) {
            const int lane = i * LANES;
            v[i] = weights_at(w->codes, bits,
                              first + (lane / PANEL) * next + (int64_t)k * PANEL + lane % PANEL);
        }
        for (int r = 0; r < rows; r++) {
            const vf xs = vf_set(x[r * stride + k]);
            for (int i = 0; i < width; i++)
                acc[r * width + i] = vf_fma(v[i], xs, acc[r * width + i]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < width; i++) {
            const int lane = i * LANES;
            vf_store(acc_at + (lane / PANEL) * 8 * PANEL + r * PANEL + lane % PANEL,
                     acc[r * width + i]);
        }
}

#define FLOAT_TILES(name, bits) \
    static void name(const qn_weight *w, const float *x, int64_t stride, int64_t panel, int rows, \
                     int panels, float *acc) { \
        if (rows == 1 && panels == 4) float_tile(w, x, stride, panel, 1, 4, bits, acc); \
        else if (rows == 1) float_tile(w, x, stride, panel, 1, 1, bits, acc); \
        else if (rows == 4) float_tile(w, x, stride, panel, 4, 1, bits, acc); \
        else float_tile(w, x, stride, panel, 8, 1, bits, acc); \
    }
FLOAT_TILES(float32_tiles, CODES_FLOAT32)
FLOAT_TILES(float16_tiles, CODES_FLOAT16)
FLOAT_TILES(bfloat16_tiles, CODES_BFLOAT16)

static void float_panels(const qn_weight *w, const float *x, int64_t stride, int64_t begin,
                         int64_t end, int64_t rows, float *out, int64_t out_stride) {
    float acc[4 * 8 * PANEL];
    for (int64_t panel = begin, panels; panel < end; panel += panels) {
        panels = end - panel >= 4 && rows < 4 ? 4 : 1;
        for (int64_t row = 0, count; row < rows; row += count) {
            count = panels == 4 || rows - row < 4 ? 1 : rows - row >= 8 ? 8 : 4;
            const float *at = x + row * stride;
            if (w->bits == CODES_FLOAT32)
                float32_tiles(w, at, stride, panel, (int)count, (int)panels, acc);
            else if (w->bits == CODES_FLOAT16)
                float16_tiles(w, at, stride, panel, (int)count, (int)panels, acc);
            else
                bfloat16_tiles(w, at, stride, panel, (int)count, (int)panels, acc);
            for (int i = 0; i < panels; i++)
                write_out(w, panel + i, acc + i * 8 * PANEL, (int)count, out + row * out_stride,
                          out_stride);
        }
    }
}

#include "matrix.h"

void KERNEL(multiply)(const qn_weight *w, const float *x, int64_t x_stride, const qn_rounded *q,
                      int64_t begin, int64_t end, int64_t rows, float *out, int64_t stride) {
    if (w->bits >= 100) {
        float_panels(w, x, x_stride, begin, end, rows, out, stride);
        return;
    }
#ifdef MATRIX_ROWS
    if (rows >= MATRIX_ROWS) {
        matrix_panels(w, q, begin, end, rows, out, stride);
        return;
    }
#endif
    const tile_kind *kind = kind_of(w);
    for (int64_t panel = begin; panel < end; panel++)
        packed_panel(kind, w, q, panel, rows, out, stride);
}

/* ------------------------------------------------------------------ rows of a weight */

static int code_at(const qn_weight *w, const uint8_t *block, int input, int lane) {
    const int n = w->block / 4, j = input / 4, at = lane * 4 + input % 4;
    switch (w->bits) {
    case 8: return (int8_t)block[64 * j + at];
    case 2: return block[64 * (j % (n / 4)) + at] >> 2 * (j / (n / 4)) & 3;
    }
    int code = block[64 * (j % (n / 2)) + at] >> (j < n / 2 ? 0 : 4) & 15;
    const uint8_t *high = block + 64 * (n / 2);
    if (w->bits == CODES_TABLE4) return w->table[code];
    if (w->bits == 5) code |= (high[at] >> j & 1) << 4;
    if (w->bits == 6) code |= (high[64 * (j % (n / 4)) + at] >> 2 * (j / (n / 4)) & 3) << 4;
    return code;
}


/* One row of the weight as floats: scale * (code - zero) rounded, then the offset added. */
void KERNEL(expand_row)(const qn_weight *w, int64_t row, float *out) {
    const int64_t panel = row / PANEL;
    const int lane = (int)(row % PANEL);
    if (w->bits >= 100) {
        for (int k = 0; k < w->num_in; k++) {
            float lanes[LANES];
            const int64_t at = (panel * w->num_in + k) * PANEL + lane / LANES * LANES;
            vf_store(lanes, weights_at(w->codes, w->bits, at));
            out[k] = lanes[lane % LANES];
        }
        return;
    }
    const int blocks = w->num_in / w->block;
    const int64_t bytes = block_bytes(w->bits, w->block);
    for (int b = 0; b < blocks; b++) {
        float scales[PANEL], offsets[PANEL];
        expand_scales(w, w->scales, w->super_scales, panel, b, 1, scales);
        if (w->offsets) expand_scales(w, w->offsets, w->super_offsets, panel, b, 1, offsets);
        const uint8_t *codes = w->codes + (panel * blocks + b) * bytes;
        for (int i = 0; i < w->block; i++) {
            const float value = scales[lane] * (float)(code_at(w, codes, i, lane) - w->zero);
            out[b * w->block + i] = w->offsets ? value + offsets[lane] : value;
        }
    }
}
