/* Every operation of lanes.h on odd numbers, as digests: the same for every set of flags.
 *
 * Kernels keep most odd numbers from most operations, so bits.c does not see all of this. A result
 * that is no number is compared as such.
 */
#include "lanes.h"

#include <stdio.h>

static const uint32_t ODD[16] = {
    0x00000000, 0x80000000, 0x7fc00000, 0xffc00000, 0x7f800000, 0xff800000, 0x00000001, 0x807fffff,
    0x7f7fffff, 0x4effffff, 0x4f000000, 0xcf000000, 0xcf000001, 0x3f000000, 0x40200000, 0xc0600000,
};
static float a[256], b[256], c[256], out[256];
static int32_t whole[256];
static uint8_t codes[1024], signs[1024];

static void say(const char *what, const void *from, int are_floats) {
    uint32_t bits[256];
    uint64_t hash = 14695981039346656037ull;
    memcpy(bits, from, sizeof bits);
    for (int i = 0; i < 256; i++) {
        if (are_floats && (bits[i] & 0x7fffffff) > 0x7f800000) bits[i] = 0x7fc00000;
        hash = (hash ^ bits[i]) * 1099511628211ull;
    }
    printf("%s %016llx\n", what, (unsigned long long)hash);
}

#define FLOATS(expr) \
    for (int i = 0; i < 256; i += LANES) { \
        const vf x = vf_load(a + i), y = vf_load(b + i), z = vf_load(c + i); \
        (void)x, (void)y, (void)z; \
        vf_store(out + i, expr); \
    } \
    say(#expr, out, 1)
#define WHOLES(expr) \
    for (int i = 0; i < 256; i += LANES) { \
        const vb u = vb_load(codes + 4 * i), s = vb_load(signs + 4 * i); \
        vi n; \
        memcpy(&n, whole + i, sizeof n); \
        (void)u, (void)s; \
        const vi r = expr; \
        memcpy(out + i, &r, sizeof r); \
    } \
    say(#expr, out, 0)
#define BYTES(expr) \
    for (int i = 0; i < 256; i += LANES) { \
        const vb u = vb_load(codes + 4 * i), s = vb_load(signs + 4 * i); \
        (void)u, (void)s; \
        const vb r = expr; \
        memcpy(out + i, &r, sizeof r); \
    } \
    say(#expr, out, 0)

static vi without_bias(vi sums, const uint8_t *x) {
    int32_t at[LANES];
    memcpy(at, &sums, sizeof at);
    for (int i = 0; i < 4 * LANES; i++) at[i / 4] -= DOT8_BIAS * x[i];
    memcpy(&sums, at, sizeof at);
    return sums;
}

int main(void) {
    uint16_t halves[256];
    for (int i = 0; i < 1024; i++) {
        codes[i] = (uint8_t)(i * 37 % 64);
        signs[i] = (uint8_t)(i * 89 % 255 - 127); /* no -128: activations have none */
    }
    for (int i = 0; i < 256; i++) { /* every pair, and a third beside it */
        memcpy(a + i, ODD + i / 16, 4);
        memcpy(b + i, ODD + i % 16, 4);
        memcpy(c + i, ODD + (i * 5 + i / 16) % 16, 4);
        whole[i] = (i - 128) * 123457;
        halves[i] = (uint16_t)(i * 257 + i / 3);
    }
    FLOATS(vf_set(a[i]));
    FLOATS(vf_add(x, y));
    FLOATS(vf_sub(x, y));
    FLOATS(vf_mul(x, y));
    FLOATS(vf_div(x, y));
    FLOATS(vf_max(x, y));
    FLOATS(vf_min(x, y));
    FLOATS(vf_abs(x));
    FLOATS(vf_fma(x, y, z));
    FLOATS(vf_half(halves + i));
    FLOATS(vf_bfloat(halves + i));
    FLOATS(vf_of_u8(signs + i));
    FLOATS(vf_of_s8((const int8_t *)signs + i));
    FLOATS(vf_of_e4m3(signs + i));
    FLOATS(vf_low4(vi_of_u8(signs + i)));
    FLOATS(vf_high4(vi_of_u8(signs + i)));
    WHOLES(vi_of_vf(vf_load(a + i)));
    WHOLES(vi_set(i < 128 ? -7 : 7));
    WHOLES(vi_add(n, n));
    WHOLES(vi_shl(n, 23));
    WHOLES(vi_shr(n, 5));
    WHOLES(vi_and(n, vi_set(0x5a5a5a)));
    WHOLES(vi_of_u8(signs + i));
    WHOLES(vp_end(n, vp_dot(vp_begin(n), u, s)));
    WHOLES(vi_mul(n, n));
    WHOLES(without_bias(vi_dot8(n, s, u), codes + 4 * i));
    FLOATS(vf_of_vi(vi_of_vf(z)));
    FLOATS(vf_bits(vi_of_vf(y)));
    FLOATS(vf_pick(c + 3, vi_and(vi_of_u8(signs + i), vi_set(15))));
    FLOATS(vf_among(a + 77, vi_of_u8(signs + i)));
    BYTES(vb_set(200));
    BYTES(vb_and(u, s));
    BYTES(vb_or(u, s));
    BYTES(vb_and(vb_shr(s, 3), vb_set(31)));
    BYTES(vb_and(vb_shl(s, 3), vb_set(248)));
    BYTES(vb_look(s, vb_and(u, vb_set(15))));
    return 0;
}
