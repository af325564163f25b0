/* The matrix unit of Sapphire Rapids and later: tiles of 16 rows of 64 bytes.
 *
 * Four neighbouring inputs of 16 outputs, a vector of a panel, are one row of its second factor.
 * Codes of 0 to 63 are signed bytes too, so one instruction serves all formats. In assembly, since
 * compilers' own functions do not say which memory they read. QUIRE_TILES names a file that
 * computes the same in C, for tests on other CPUs.
 */
#include <stdint.h>

/* Narrow codes would have to be unpacked first, and then vectors are as fast. */
#define MATRIX_TAKES(w) ((w)->bits == 8)

#ifdef QUIRE_TILES
#include QUIRE_TILES
#else
#define TILE_CONFIG(p) __asm__ volatile("ldtilecfg %0" ::"m"(*(p)))
#define TILE_RELEASE() __asm__ volatile("tilerelease" ::: "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define TILE_LOAD(tile, p, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(p), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tile, p, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(p), "r"((int64_t)(stride)) \
                     : "memory")
/* sums += a, signed bytes by row, times b, signed bytes by four inputs */
#define TILE_DOT(sums, a, b) \
    __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::)
#endif

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config; /* 64 bytes, as the instruction reads them */

/* Tiles 0 to 3 are sums, 4 is activations, 5 to 7 are codes. Of this thread, until the end. */
static void matrix_begin(int block) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = (uint8_t)(i < 5 ? 16 : block / 4);
        config.row_bytes[i] = (uint16_t)(i == 4 ? block : 64);
    }
    TILE_CONFIG(&config);
}

static void matrix_end(void) { TILE_RELEASE(); }

#define PANEL_DOT(i, b) \
    if (num_panels > i) { \
        TILE_LOAD(b, codes[i], 64); \
        TILE_ZERO(i); \
        TILE_DOT(i, 4, b); \
    }
#define PANEL_STORE(i) \
    if (num_panels > i) TILE_STORE(i, sums + i * 256, 64)

/* Sums of one block: x [16 rows, block], codes [block / 4, 16, 4] of each panel, sums [16, 16]. */
INLINE void matrix_sums(const int8_t *x, int64_t stride, const int8_t *const *codes,
                        int num_panels, const int block, int32_t *sums) {
    (void)block;
    TILE_LOAD(4, x, stride);
    PANEL_DOT(0, 5)
    PANEL_DOT(1, 6)
    PANEL_DOT(2, 7)
    PANEL_DOT(3, 5)
    PANEL_STORE(0);
    PANEL_STORE(1);
    PANEL_STORE(2);
    PANEL_STORE(3);
}
