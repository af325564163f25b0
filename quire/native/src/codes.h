/* Whole numbers of a weight's panels: codes from their planes of bits, scales from their kinds. */
#ifndef QUIRE_CODES_H
#define QUIRE_CODES_H

#include "lanes.h"
#include "quire_native.h"
#include "rounded.h"

#define INLINE static inline __attribute__((always_inline))
/* Before loops over vectors of a block and rows of a tile: with 32 registers, all that they keep
 * stays there once their numbers are constants. Compilers do not unroll so far by themselves. */
#if LANES == 16
#define UNROLLED _Pragma("GCC unroll 8")
#else
#define UNROLLED
#endif

/* Bytes of codes of one block of a panel. */
INLINE int block_bytes(const int bits, const int block) {
    return (bits == CODES_TABLE4 ? 4 : bits) * block * PANEL / 8;
}

/* What codes of CODES_TABLE4 stand for: 16 bytes for every four outputs, from `lane` on. */
INLINE vb tables_at(const qn_weight *w, int64_t panel, int lane) {
    return vb_load((const uint8_t *)w->table + (panel * PANEL + lane) * 4);
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

/* LANES floats of a weight of floats. */
INLINE vf weights_at(const uint8_t *p, const int bits, int64_t index) {
    if (bits == CODES_FLOAT32) return vf_load((const float *)p + index);
    if (bits == CODES_FLOAT16) return vf_half((const uint16_t *)p + index);
    return vf_bfloat((const uint16_t *)p + index);
}

/* 2^(e - 128); the two smallest are not normal numbers. */
static inline vf powers_at(const uint8_t *from) {
    int32_t bits[LANES];
    for (int j = 0; j < LANES; j++) {
        const int e = from[j];
        bits[j] = e > 1 ? (e - 1) << 23 : e ? 1 << 22 : 1 << 21;
    }
    vi v;
    memcpy(&v, bits, sizeof v);
    return vf_bits(v);
}

/* Scales or offsets: as a weight keeps them. */
typedef struct {
    const uint8_t *small;
    const uint16_t *super;
    int is_high; /* of SCALES_PAIRS: the offset */
} qn_scales;

INLINE qn_scales scales_of(const qn_weight *w) {
    return (qn_scales){w->scales, w->super_scales, 0};
}
INLINE int has_offsets(const qn_weight *w) {
    return w->offsets || w->scale_kind == SCALES_PAIRS;
}
INLINE qn_scales offsets_of(const qn_weight *w) {
    const int is_pair = w->scale_kind == SCALES_PAIRS;
    return (qn_scales){is_pair ? w->scales : w->offsets, w->super_offsets, is_pair};
}

/* LANES numbers below 16 from one half of their bytes. */
INLINE vf nibbles_at(const uint8_t *p, const int is_high) {
    const vi pairs = vi_of_u8(p);
    return vf_of_vi(is_high ? vi_shr(pairs, 4) : vi_and(pairs, vi_set(15)));
}

/* LANES of E4M3, below fp32 numbers of whole rows. Numbers of four bits over any divisor are rounded
 * once this way: all significands were tried. */
INLINE vf eighths_at(const int is_over, qn_scales from, int64_t at, int64_t above, int lane) {
    const vf s = vf_mul(vf_of_e4m3(from.small + at), vf_set(256.0f));
    const float *numbers = (const float *)from.super + above * PANEL + lane;
    if (!is_over) return vf_mul(s, vf_load(numbers));
    numbers += above * PANEL;
    const vf reciprocal = vf_load(numbers + PANEL), near = vf_mul(s, reciprocal);
    return vf_fma(vf_fma(vf_load(numbers), near, s), reciprocal, near);
}

/* LANES of them, from `lane` on: of group `at`, below super scale `above`, both counted over all
 * panels. */
INLINE vf scales_at(const qn_weight *w, qn_scales from, int64_t at, int64_t above, int lane) {
    const int64_t i = at * PANEL + lane;
    if (w->scale_kind == SCALES_HALF) return vf_half((const uint16_t *)from.small + i);
    if (w->scale_kind == SCALES_FLOAT) return vf_load((const float *)from.small + i);
    if (w->scale_kind == SCALES_BFLOAT) return vf_bfloat((const uint16_t *)from.small + i);
    if (w->scale_kind == SCALES_POWER) return powers_at(from.small + i);
    if (w->scale_kind == SCALES_TIMES || w->scale_kind == SCALES_OVER)
        return eighths_at(w->scale_kind == SCALES_OVER, from, i, above, lane);
    const vf d = vf_half(from.super + above * PANEL + lane);
    if (w->scale_kind == SCALES_PAIRS) return vf_mul(nibbles_at(from.small + i, from.is_high), d);
    return vf_mul(w->scale_kind == SCALES_U8 ? vf_of_u8(from.small + i)
                                             : vf_of_s8((const int8_t *)from.small + i), d);
}

/* LANES zeros of a group; of 8 bits with what the sums are off by. */
INLINE vi zeros_at(const qn_weight *w, const int bits, int64_t group, int lane) {
    const uint8_t *at = w->zeros + group * PANEL + lane;
    const vf zeros = bits == 8 ? vf_of_s8((const int8_t *)at) : vf_of_u8(at);
    return vi_add(vi_of_vf(zeros), vi_set(bits == 8 ? DOT8_BIAS : 0));
}

/* Bytes of one group's scales. */
INLINE int scale_bytes(const qn_weight *w) {
    const int is_half = w->scale_kind == SCALES_HALF || w->scale_kind == SCALES_BFLOAT;
    return PANEL * (w->scale_kind == SCALES_FLOAT ? 4 : is_half ? 2 : 1);
}

/* Sums of one block of a tile's rows, whose low plane is `x` from the first input used on. They go
 * on from `sum`. */
INLINE void dot_block(const uint8_t *codes, const int8_t *x, const int rows, const int bits,
                      const int block, const int planes, vb table, vi *sum) {
    const int is_signed = bits == 8 || bits == CODES_TABLE4;
    const int hold = is_signed ? 1 : PAIRS_HOLD(bits); /* vectors before pairs may overflow */
    const int most = hold < block / 4 ? hold : block / 4, both = planes == 2 ? rows : 0;
    const int8_t *above = high_of(x, rows);
    vi high[8];
    UNROLLED for (int r = 0; r < both; r++) high[r] = vi_set(0);
    UNROLLED for (int j = 0; j < block / 4; j += most) {
        if (is_signed) {
            const vb c = codes_of(codes, bits, block, j, table);
            UNROLLED for (int r = 0; r < rows; r++)
                sum[r] = vi_dot8(sum[r], c, vb_four(x + BLOCK * r + 4 * j));
            UNROLLED for (int r = 0; r < both; r++)
                high[r] = vi_dot8(high[r], c, vb_four(above + BLOCK * r + 4 * j));
            continue;
        }
        vp pairs[8], high_pairs[8];
        UNROLLED for (int r = 0; r < rows; r++) pairs[r] = vp_begin(sum[r]);
        UNROLLED for (int r = 0; r < both; r++) high_pairs[r] = vp_begin(high[r]);
        UNROLLED for (int i = 0; i < most; i++) {
            const vb c = codes_of(codes, bits, block, j + i, table);
            UNROLLED for (int r = 0; r < rows; r++)
                pairs[r] = vp_dot(pairs[r], c, vb_four(x + BLOCK * r + 4 * (j + i)));
            UNROLLED for (int r = 0; r < both; r++)
                high_pairs[r] = vp_dot(high_pairs[r], c, vb_four(above + BLOCK * r + 4 * (j + i)));
        }
        UNROLLED for (int r = 0; r < rows; r++) sum[r] = vp_end(sum[r], pairs[r]);
        UNROLLED for (int r = 0; r < both; r++) high[r] = vp_end(high[r], high_pairs[r]);
    }
    UNROLLED for (int r = 0; r < both; r++)
        sum[r] = vi_add(sum[r], vi_shl(high[r], HIGH_SHIFT));
}

/* Sums of a tile of floats, `width` vectors a row, to where write_out finds them: 8 rows a panel. */
INLINE void store_tile(const vf *acc, const int rows, const int width, float *into) {
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < width; i++) {
            const int lane = i * LANES;
            vf_store(into + (lane / PANEL) * 8 * PANEL + r * PANEL + lane % PANEL,
                     acc[r * width + i]);
        }
}

/* A tile's outputs of one panel to where they belong, the bias added. */
static inline void write_out(const qn_weight *w, int64_t panel, const float *acc, int rows, float *out,
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

#endif
