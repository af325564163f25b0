/* The tile instructions of matrix_amx.h in plain C, as Intel's manual defines them. */
#include <stdlib.h>
#include <string.h>

int tiles_are_broken = 0; /* set by a test: a unit that computes wrong sums */
static _Thread_local struct {
    int rows, row_bytes, is_configured;
    uint8_t at[16][64];
} emulated[8];

#define TILE_CONFIG(p) tile_config_of((const uint8_t *)(p))
#define TILE_RELEASE() memset(emulated, 0, sizeof emulated)
#define TILE_ZERO(tile) memset(used(tile, 0)->at, 0, sizeof emulated[tile].at)
#define TILE_LOAD(tile, p, stride) tile_move(tile, (uint8_t *)(p), stride, 0)
#define TILE_STORE(tile, p, stride) tile_move(tile, (uint8_t *)(p), stride, 1)
#define TILE_DOT(sums, a, b) tile_dot(sums, a, b)

static __typeof__(&emulated[0]) used(int tile, int want_rows) { /* else: the instruction faults */
    if (!emulated[tile].is_configured || (want_rows && emulated[tile].rows != want_rows)) abort();
    return &emulated[tile];
}

static void tile_config_of(const uint8_t *p) {
    if (p[0] != 1 || p[1] != 0) abort(); /* palette 1, from the first row */
    for (int i = 2; i < 16; i++)
        if (p[i]) abort(); /* reserved */
    memset(emulated, 0, sizeof emulated);
    for (int i = 0; i < 8; i++) {
        emulated[i].row_bytes = p[16 + 2 * i] | p[17 + 2 * i] << 8;
        emulated[i].rows = p[48 + i];
        emulated[i].is_configured = emulated[i].rows > 0;
        if (emulated[i].row_bytes > 64 || emulated[i].rows > 16) abort();
    }
}

static void tile_move(int tile, uint8_t *p, int64_t stride, int is_store) {
    used(tile, 0);
    if (!is_store) memset(emulated[tile].at, 0, sizeof emulated[tile].at);
    for (int row = 0; row < emulated[tile].rows; row++) {
        uint8_t *memory = p + row * stride, *own = emulated[tile].at[row];
        memcpy(is_store ? memory : own, is_store ? own : memory, emulated[tile].row_bytes);
    }
}

static void tile_dot(int sums, int a, int b) {
    used(a, emulated[sums].rows);
    used(b, emulated[a].row_bytes / 4);
    if (emulated[b].row_bytes != emulated[sums].row_bytes) abort();
    for (int m = 0; m < emulated[sums].rows; m++)
        for (int n = 0; n < emulated[sums].row_bytes / 4; n++) {
            int32_t sum;
            memcpy(&sum, &emulated[sums].at[m][4 * n], 4);
            for (int k = 0; k < emulated[a].row_bytes; k++)
                sum += (int8_t)emulated[a].at[m][k] * (int8_t)emulated[b].at[k / 4][4 * n + k % 4];
            sum += tiles_are_broken;
            memcpy(&emulated[sums].at[m][4 * n], &sum, 4);
        }
}
