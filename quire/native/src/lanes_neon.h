/* Lanes of aarch64: eight of them in a pair of registers, so that tiles have 16 to work with, as
 * with AVX2. Included by lanes.h, which says what the operations are.
 *
 * Where the two architectures disagree, x86 is followed: the larger and the smaller of two numbers
 * are the second one if they do not compare, and what no int32 holds becomes the smallest.
 */
#include <arm_neon.h>

#define LANES 8
typedef float32x4x2_t vf;
typedef int32x4x2_t vi;
typedef uint8x16x2_t vb;
#define BOTH(type, expr) \
    type r; \
    for (int i = 0; i < 2; i++) r.val[i] = (expr); \
    return r

static inline vf vf_load(const float *p) { BOTH(vf, vld1q_f32(p + 4 * i)); }
static inline void vf_store(float *p, vf a) {
    vst1q_f32(p, a.val[0]);
    vst1q_f32(p + 4, a.val[1]);
}
static inline vf vf_set(float a) { BOTH(vf, vdupq_n_f32(a)); }
static inline vf vf_add(vf a, vf b) { BOTH(vf, vaddq_f32(a.val[i], b.val[i])); }
static inline vf vf_sub(vf a, vf b) { BOTH(vf, vsubq_f32(a.val[i], b.val[i])); }
static inline vf vf_mul(vf a, vf b) { BOTH(vf, vmulq_f32(a.val[i], b.val[i])); }
static inline vf vf_div(vf a, vf b) { BOTH(vf, vdivq_f32(a.val[i], b.val[i])); }
static inline vf vf_max(vf a, vf b) {
    BOTH(vf, vbslq_f32(vcgtq_f32(a.val[i], b.val[i]), a.val[i], b.val[i]));
}
static inline vf vf_min(vf a, vf b) {
    BOTH(vf, vbslq_f32(vcltq_f32(a.val[i], b.val[i]), a.val[i], b.val[i]));
}
static inline vf vf_abs(vf a) { BOTH(vf, vabsq_f32(a.val[i])); }
static inline vf vf_fma(vf a, vf b, vf c) { BOTH(vf, vfmaq_f32(c.val[i], a.val[i], b.val[i])); }
static inline vf vf_half(const uint16_t *p) {
    BOTH(vf, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
static inline void vf_to_half(uint16_t *p, vf a) {
    for (int i = 0; i < 2; i++)
        vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.val[i])));
}
static inline vf vf_bfloat(const uint16_t *p) {
    BOTH(vf, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}
static inline vf vf_of_u8(const uint8_t *p) {
    const uint16x8_t wide = vmovl_u8(vld1_u8(p));
    const vf r = {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))),
                  vcvtq_f32_u32(vmovl_high_u16(wide))}};
    return r;
}
static inline vf vf_of_s8(const int8_t *p) {
    const int16x8_t wide = vmovl_s8(vld1_s8(p));
    const vf r = {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))),
                  vcvtq_f32_s32(vmovl_high_s16(wide))}};
    return r;
}
static inline vf vf_of_e4m3(const uint8_t *p) {
    const int16x8_t wide = vshlq_n_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p))), 7);
    const float16x8_t half =
        vreinterpretq_f16_u16(vandq_u16(vreinterpretq_u16_s16(wide), vdupq_n_u16(0xbfff)));
    const vf r = {{vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half)}};
    return r;
}
static inline vi vi_of_u8(const uint8_t *p) {
    const uint16x8_t wide = vmovl_u8(vld1_u8(p));
    const vi r = {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide))),
                  vreinterpretq_s32_u32(vmovl_high_u16(wide))}};
    return r;
}
static inline vf vf_low4(vi a) {
    BOTH(vf, vsubq_f32(vcvtq_f32_s32(vandq_s32(a.val[i], vdupq_n_s32(15))), vdupq_n_f32(7.5f)));
}
static inline vf vf_high4(vi a) {
    const vi r = {{vshrq_n_s32(a.val[0], 4), vshrq_n_s32(a.val[1], 4)}};
    return vf_low4(r);
}
static inline vf vf_of_vi(vi a) { BOTH(vf, vcvtq_f32_s32(a.val[i])); }
static inline int32x4_t nearest(float32x4_t a) { /* the instruction alone gives 0, or the largest */
    return vbslq_s32(vcltq_f32(a, vdupq_n_f32(2147483648.0f)), vcvtnq_s32_f32(a),
                     vdupq_n_s32(INT32_MIN));
}
static inline vi vi_of_vf(vf a) { BOTH(vi, nearest(a.val[i])); }
static inline vi vi_set(int32_t a) { BOTH(vi, vdupq_n_s32(a)); }
static inline vi vi_add(vi a, vi b) { BOTH(vi, vaddq_s32(a.val[i], b.val[i])); }
static inline vi vi_mul(vi a, vi b) { BOTH(vi, vmulq_s32(a.val[i], b.val[i])); }
static inline vi vi_shl(vi a, int n) { BOTH(vi, vshlq_s32(a.val[i], vdupq_n_s32(n))); }
static inline vi vi_shr(vi a, int n) {
    BOTH(vi, vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a.val[i]), vdupq_n_s32(-n))));
}
static inline vi vi_and(vi a, vi b) { BOTH(vi, vandq_s32(a.val[i], b.val[i])); }
static inline vf vf_bits(vi a) { BOTH(vf, vreinterpretq_f32_s32(a.val[i])); }
static inline vf vf_pick(const float *table, vi index) {
    int32_t at[LANES];
    float found[LANES];
    memcpy(at, &index, sizeof at);
    for (int i = 0; i < LANES; i++) found[i] = table[at[i] & 15];
    return vf_load(found);
}
static inline float32x4_t among(uint8x16_t four, int32x4_t index) { /* bytes 4 i to 4 i + 3 */
    const uint32x4_t two = vandq_u32(vreinterpretq_u32_s32(index), vdupq_n_u32(3));
    const uint32x4_t at = vmlaq_n_u32(vdupq_n_u32(0x03020100), two, 0x04040404);
    return vreinterpretq_f32_u8(vqtbl1q_u8(four, vreinterpretq_u8_u32(at)));
}
static inline vf vf_among(const float *four, vi index) {
    const uint8x16_t all = vreinterpretq_u8_f32(vld1q_f32(four));
    BOTH(vf, among(all, index.val[i]));
}
static inline vb vb_load(const uint8_t *p) { BOTH(vb, vld1q_u8(p + 16 * i)); }
static inline vb vb_set(int a) { BOTH(vb, vdupq_n_u8((uint8_t)a)); }
static inline vb vb_and(vb a, vb b) { BOTH(vb, vandq_u8(a.val[i], b.val[i])); }
static inline vb vb_or(vb a, vb b) { BOTH(vb, vorrq_u8(a.val[i], b.val[i])); }
static inline vb vb_shr(vb a, int n) { BOTH(vb, a.val[i] >> (uint8_t)n); }
static inline vb vb_shl(vb a, int n) { BOTH(vb, a.val[i] << (uint8_t)n); }
static inline vb vb_look(vb table, vb index) {
    BOTH(vb, vqtbl1q_u8(table.val[i], index.val[i]));
}
static inline vb vb_four(const int8_t *p) {
    int32_t w;
    memcpy(&w, p, 4);
    BOTH(vb, vreinterpretq_u8_s32(vdupq_n_s32(w)));
}
static inline int32x4_t dot_signed(int32x4_t acc, uint8x16_t codes, uint8x16_t x) {
    const int8x16_t a = vreinterpretq_s8_u8(codes), b = vreinterpretq_s8_u8(x);
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(acc, a, b);
#else /* 2 * 128 * 127 fits 16 bits */
    const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    return vpadalq_s16(acc, vpaddq_s16(low, high));
#endif
}
static inline vi vi_dot(vi acc, vb codes, vb x) { /* codes 0..63 are signed bytes too */
    BOTH(vi, dot_signed(acc.val[i], codes.val[i], x.val[i]));
}
#define DOT8_BIAS 0
static inline vi vi_dot8(vi acc, vb codes, vb x) { return vi_dot(acc, codes, x); }
