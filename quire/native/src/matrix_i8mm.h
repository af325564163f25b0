/* The matrix instruction of ARM: two rows of eight inputs by two outputs of eight. */
#include <arm_neon.h>

#define MATRIX_TAKES(w) 1

static void matrix_begin(int block) { (void)block; }
static void matrix_end(void) {}

/* Eight rows by eight outputs of one block. */
INLINE void eight_by_eight(const int8_t *x, int64_t stride, const int8_t *codes, const int block,
                           int32_t *sums) {
    int32x4_t acc[4][4]; /* by pairs of rows and of outputs: two by two */
    for (int i = 0; i < 16; i++) acc[i / 4][i % 4] = vdupq_n_s32(0);
    for (int k = 0; k < block; k += 8) {
        int8x16_t rows[4], outputs[4];
        for (int i = 0; i < 4; i++)
            rows[i] = vcombine_s8(vld1_s8(x + 2 * i * stride + k),
                                  vld1_s8(x + (2 * i + 1) * stride + k));
        for (int i = 0; i < 4; i += 2) { /* inputs 0 to 3 and 4 to 7 of four outputs */
            const int32x4_t low = vreinterpretq_s32_s8(vld1q_s8(codes + 16 * k + 8 * i));
            const int32x4_t high = vreinterpretq_s32_s8(vld1q_s8(codes + 16 * k + 64 + 8 * i));
            outputs[i] = vreinterpretq_s8_s32(vzip1q_s32(low, high));
            outputs[i + 1] = vreinterpretq_s8_s32(vzip2q_s32(low, high));
        }
        for (int i = 0; i < 16; i++)
            acc[i / 4][i % 4] = vmmlaq_s32(acc[i / 4][i % 4], rows[i / 4], outputs[i % 4]);
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j += 2) {
            int32_t *at = sums + 2 * i * PANEL + 2 * j;
            vst1q_s32(at, vcombine_s32(vget_low_s32(acc[i][j]), vget_low_s32(acc[i][j + 1])));
            vst1q_s32(at + PANEL,
                      vcombine_s32(vget_high_s32(acc[i][j]), vget_high_s32(acc[i][j + 1])));
        }
}

/* Sums of one block: x [16 rows, block], codes [block / 4, 16, 4] of each panel, sums [16, 16]. */
INLINE void matrix_sums(const int8_t *x, int64_t stride, const int8_t *const *codes,
                        int num_panels, const int block, int32_t *sums) {
    for (int i = 0; i < num_panels; i++)
        for (int part = 0; part < 4; part++) {
            const int row = part / 2 * 8, output = part % 2 * 8;
            eight_by_eight(x + row * stride, stride, codes[i] + 4 * output, block,
                           sums + i * 16 * PANEL + row * PANEL + output);
        }
}
